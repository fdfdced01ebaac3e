"""What of optimizers and learning-rate schedulers counts as Python state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.state.code_names import AttributeNames
from weft.capture.state.containers import AllBut, Container, holder_of, label_of
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
    a step is noticed. Their counters change between calls, wherever they are stepped: they are guards only where the
    step reads them.

    Args:
        names: of attributes, in the code that the walk has met so far.
        add: lets a container count.
    """

    def __init__(self, names: AttributeNames, add: Callable[[Container], None]) -> None:
        self._names, self._add = names, add
        self._known: dict[int, tuple[Any, str, set[str]]] = {}

    @property
    def with_paths(self) -> list[tuple[Any, str]]:
        """The schedulers."""
        return [(scheduler, path) for scheduler, path, _ in self._known.values()]

    def meet(self, scheduler: torch.optim.lr_scheduler.LRScheduler, path: str) -> None:
        """The walk meets one."""
        self._known[id(scheduler)] = scheduler, path, set()
        container = Container(vars(scheduler), path, label=label_of(path))
        container.frozen = True
        self._add(container)

    def follow_names(self) -> None:
        """Follow the attributes that the user's code names."""
        for scheduler, path, read in list(self._known.values()):
            names = self._names.of(vars(scheduler)) | ({"_last_lr"} if "get_last_lr" in self._names else set())
            if keys := frozenset(names & vars(scheduler).keys()) - read:
                read |= keys
                self._add(Container(vars(scheduler), path, keys, label=label_of(path)))

    def clear(self) -> None:
        """Let go of the schedulers."""
        self._known.clear()
