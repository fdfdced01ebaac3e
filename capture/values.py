"""A Python value with holes where the tensors of a call go."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.recorder import Recorder
from weft.capture.state import Place, plain
from weft.errors import EscapedTensor

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Hole:
    """Output number ``index`` goes here, wrapped like ``like`` where that is a tensor subclass."""

    index: int
    like: torch.Tensor | None = None
    requires_grad: bool = False

    def fill(self, outputs: list[Any]) -> Any:
        value = outputs[self.index]
        value = value if self.like is None else torch_adapter.rewrap(self.like, value)
        return value.requires_grad_() if self.requires_grad else value


@dataclass(frozen=True)
class _Held:
    """The object that stands at ``place`` when a call begins goes here."""

    place: Place

    def fill(self, outputs: list[Any]) -> Any:
        return self.place.outer()


@dataclass(frozen=True)
class Template:
    """What a value of the user's looks like, over the outputs of a graph."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(
        cls,
        value: Any,
        recorder: Recorder,
        keep: Callable[[Any], int],
        where: str,
        *,
        lift_users: bool = False,
        homes: Mapping[int, Place] | None = None,
    ) -> Template:
        """Make a template of ``value``, which the capture left at ``where``.

        Args:
            keep: makes a node an output of the graph and returns the output's number.
            lift_users: the user's own tensors become holes too, filled with their value; else they stay themselves.
            homes: where the user's own tensors stand, by id: what stands there in a later call is meant.

        Raises:
            EscapedTensor: a tensor of the capture sits inside an object that cannot be rebuilt.
        """
        torch_adapter.register_dataclasses(value)
        leaves, spec = torch_adapter.flatten(value)
        return cls(tuple(_hole(leaf, recorder, keep, where, lift_users, homes or {}) for leaf in leaves), spec)

    def fill(self, outputs: list[Any]) -> Any:
        """The value of one call, given what the graph returned for its ``Create`` and ``Return`` outputs."""
        leaves = [leaf.fill(outputs) if isinstance(leaf, (_Hole, _Held)) else leaf for leaf in self.leaves]
        return torch_adapter.unflatten(leaves, self.spec)


def _hole(
    leaf: Any, recorder: Recorder, keep: Callable[[Any], int], where: str, lift_users: bool, homes: Mapping[int, Place]
) -> Any:
    if isinstance(leaf, torch.Tensor):
        inner, names = plain(leaf)
        if not lift_users and (not isinstance(inner, FakeTensor) or recorder.is_users(inner)):
            return _Held(homes[id(leaf)]) if id(leaf) in homes else leaf
        grad = leaf.requires_grad and leaf.is_leaf and not lift_users
        return _Hole(keep(recorder.current(inner)), leaf if names else None, grad)
    if isinstance(leaf, _NUMBERS):
        return _Hole(keep(recorder.value(leaf)))
    if not isinstance(leaf, (torch.nn.Module, torch.optim.Optimizer)) and any(map(_made_by_capture, _inside(leaf))):
        raise EscapedTensor(type(leaf), where)
    return leaf


def _inside(leaf: Any) -> list[Any]:
    """Attributes of an object, and variables that a function closes over."""
    cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or () if cell != _EMPTY_CELL]
    return [*getattr(leaf, "__dict__", {}).values(), *cells]


def _made_by_capture(value: Any) -> bool:
    return isinstance(value, FakeTensor) and "_weft_alias" in value.__dict__


_EMPTY_CELL = types.CellType()
