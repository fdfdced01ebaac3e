"""A Python value with holes where the tensors of a call go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.recorder import Recorder
from weft.capture.state import plain
from weft.errors import EscapedTensor

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Hole:
    """Output number ``index`` goes here, wrapped like ``like`` where that is a tensor subclass."""

    index: int
    like: torch.Tensor | None = None

    def fill(self, outputs: list[Any]) -> Any:
        value = outputs[self.index]
        return value if self.like is None else torch_adapter.rewrap(self.like, value)


@dataclass(frozen=True)
class Template:
    """What a value of the user's looks like, over the outputs of a graph."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(
        cls, value: Any, recorder: Recorder, keep: Callable[[Any], int], where: str, *, lift_users: bool = False
    ) -> Template:
        """Make a template of ``value``, which the capture left at ``where``.

        Args:
            keep: makes a node an output of the graph and returns the output's number.
            lift_users: the user's own tensors become holes too, filled with their value; else they stay themselves.

        Raises:
            EscapedTensor: a tensor of the capture sits inside an object that cannot be rebuilt.
        """
        torch_adapter.register_dataclasses(value)
        leaves, spec = torch_adapter.flatten(value)
        return cls(tuple(_hole(leaf, recorder, keep, where, lift_users) for leaf in leaves), spec)

    def fill(self, outputs: list[Any]) -> Any:
        """The value of one call, given what the graph returned for its ``Create`` and ``Return`` outputs."""
        leaves = [leaf.fill(outputs) if isinstance(leaf, _Hole) else leaf for leaf in self.leaves]
        return torch_adapter.unflatten(leaves, self.spec)


def _hole(leaf: Any, recorder: Recorder, keep: Callable[[Any], int], where: str, lift_users: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        inner, names = plain(leaf)
        if not lift_users and (not isinstance(inner, FakeTensor) or recorder.is_users(inner)):
            return leaf
        return _Hole(keep(recorder.current(inner)), leaf if names else None)
    if isinstance(leaf, _NUMBERS):
        return _Hole(keep(recorder.value(leaf)))
    if any(isinstance(value, FakeTensor) for value in list(getattr(leaf, "__dict__", {}).values())):
        raise EscapedTensor(type(leaf), where)
    return leaf
