"""What of optimizers and learning-rate schedulers counts as Python state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.state.containers import MISSING, AllBut, Container, holder_of, label_of
from weft.capture.state.contents import attributes_of
from weft.capture.step_interface import Role


def parts_of_groups(groups: list[dict[str, Any]], path: str) -> Iterator[tuple[Container, Role | None]]:
    """The parameters and settings of an optimizer at a path, with their roles."""
    for at, group in enumerate(groups):
        where = f"{path}.param_groups[{at}]"
        yield Container(group["params"], f"{where}['params']"), Role.PARAMETER
        yield Container(group, where, AllBut("lr")), None
        rate = Container(group, where, frozenset({"lr"}))
        rate.holds_rates = True
        yield rate, Role.SCALAR


def state_of(optimizer: torch.optim.Optimizer, path: str, leaves: Iterable[tuple[torch.Tensor, str]]) -> Container:
    """The state of an optimizer at a path, by parameters, which ``leaves`` has with their paths."""
    names = {id(tensor): where for tensor, where in leaves}
    return Container(optimizer.state, f"{path}.state", label=lambda key: f"{path}.state[{names.get(id(key), '?')}]")


def containers_of_state(optimizer: torch.optim.Optimizer, containers: list[Container]) -> list[Container]:
    """The containers of an optimizer's state; none where a part of the state is reached in another way too."""
    own = vars(optimizer)
    parts, waiting = set[int](), [own["state"]]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in parts and holder_of(type(holder)) is not None:
            parts.add(id(holder))
            waiting += holder.values() if isinstance(holder, dict) else holder
    found = [each for each in containers if id(each.obj) in parts]
    others = (each for each in containers if id(each.obj) not in parts and each.obj is not own)
    return [] if any(id(value) in parts for each in others for value in each.before.values()) else found


class WalkedSchedulers:
    """The learning-rate schedulers that a walk has met. Each changed attribute counts, so that ``scheduler.step()`` in
    a step is noticed. Their counters change between calls, wherever they are stepped: attributes are guards only where
    the step was seen to read them, by code of its own or of torch.

    Args:
        add: lets a container count.
    """

    def __init__(self, add: Callable[[Container], None]) -> None:
        self._add = add
        self._known: dict[int, tuple[Any, Container, Container]] = {}

    @property
    def with_paths(self) -> list[tuple[Any, str]]:
        """The schedulers."""
        return [(scheduler, found.path) for scheduler, found, _ in self._known.values()]

    def meet(self, scheduler: torch.optim.lr_scheduler.LRScheduler, path: str) -> None:
        """The walk meets one."""
        attributes = attributes_of(scheduler)
        found, read = (Container(attributes, path, names, label_of(path)) for names in (None, frozenset()))
        found.frozen, read.stand_ins = True, found.stand_ins
        self._known[id(scheduler)] = scheduler, found, read
        self._add(found)
        self._add(read)

    def read(self, scheduler: Any, name: str) -> None:
        """The step is about to read an attribute of an object, which may be a scheduler; or all, as ``__dict__``."""
        if id(scheduler) not in self._known:
            return
        found, guarded = self._known[id(scheduler)][1:]
        if name == "__dict__":
            found.frozen = False
        elif not name.startswith("__") and name not in guarded.before:
            guarded.before[name] = value = found.before.get(name, MISSING)
            guarded.keys = frozenset(guarded.before)
            guarded.absent |= {name} if value is MISSING else set()

    def clear(self) -> None:
        """Let go of the schedulers."""
        self._known.clear()
