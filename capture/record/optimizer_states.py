"""The state that an optimizer makes in its first step on parameters.

It is made for real before the captured step goes on, as eager's first step makes it, so that the graph reads it as an
input: the next calls find it there. A step may also drop the state itself (``optimizer.state.clear()``). Then every
call makes it anew, and the graph has to. In a first call nothing tells these apart, since there is no state to drop.
So where the step's code could drop state, the step is captured once more, with the state in place.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.tracked_storages import was_tracked
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor

# Attributes and methods by which the state of an optimizer is dropped.
_DROPS = frozenset({"clear", "pop", "popitem", "__setstate__", "defaultdict", "__delitem__"})

Entry = tuple[torch.optim.Optimizer, torch.Tensor]


class OptimizerStateMade(Exception):
    """The step's optimizers have made state, which the step's code may drop.

    Attributes:
        entries: the optimizers with the parameters whose state is new.
    """

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__()
        self.entries = entries


class OptimizerStates:
    """The state that optimizers make during one attempt at a capture.

    Args:
        recorder: of the step.
        state: what the step can reach.
        modes: those of a fake world.
        made: what an earlier attempt at the same capture has made.
    """

    def __init__(
        self, recorder: OpRecorder, state: ReachableState, modes: tuple[FakeTensorMode, ...], made: list[Entry]
    ) -> None:
        self._recorder, self._state, self._modes = recorder, state, modes
        self._earlier = list(made)
        self._made: list[Entry] = []
        self._before = {id(optimizer): set(optimizer.state) for optimizer, _ in state.optimizers}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state that the optimizer is about to make; unless the step makes it anew in each call."""
        missing = [
            p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p not in optimizer.state
        ]
        # Dropped by the step: it was there when the step began.
        if not self._before.setdefault(id(optimizer), set(optimizer.state)).isdisjoint(missing) or not missing:
            return
        with self._recorder.paused(*self._modes):
            made = torch_adapter.init_optimizer_state(optimizer)
        states = [value for p in missing for value in optimizer.state.get(p, {}).values()]
        if made and any(map(self._is_of_the_capture, states)):
            # Made from gradients, which are fakes here: it is made again in the step, and recorded there.
            for p in missing:
                optimizer.state.pop(p, None)
        elif made:
            self._made += [(optimizer, p) for p in missing]
            self._state.extend_optimizer_state(optimizer)

    def check(self) -> None:
        """Raise OptimizerStateMade where another attempt has to start with the state that this one made."""
        names = self._state.names
        if self._made and "state" in names and not names.isdisjoint(_DROPS):
            entries = [*self._earlier, *self._made]
            self._earlier, self._made = [], []
            raise OptimizerStateMade(entries)

    @property
    def created(self) -> list[Entry]:
        """What this attempt and earlier ones made."""
        return [*self._earlier, *self._made]

    def _is_of_the_capture(self, value: object) -> bool:
        """Whether a value of an optimizer's state means nothing outside the capture."""
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        inner = inner_tensor(value)[0]
        return isinstance(inner, FakeTensor) and (not self._modes or was_tracked(inner))


def remove(created: list[Entry]) -> None:
    """Take away the state that a failed capture made."""
    for optimizer, parameter in created:
        optimizer.state.pop(parameter, None)
