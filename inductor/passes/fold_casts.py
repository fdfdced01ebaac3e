"""Casts and copies that make no other bits than those that are there already.

- ``_to_copy`` says what it changes and nothing else, so that two that do the same look the same.
- A cast of a cast that lost nothing (bfloat16 to float32 to bfloat16) is one cast of what the first was given, or none.
- A copy with the layout of what it copies, which nobody holds after the step, is what it copies.

Keeps the bits of every result.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.inductor.passes.escapes import escaping

Node = torch.fx.Node

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default)


def fold_casts(step: StepGraph) -> StepGraph:
    """Drop copies and casts that change nothing. Changes ``step``."""
    held = escaping(step)
    for node in step.graph.nodes:
        if node.target not in _COPIES or "inplace" in node.meta:
            continue
        if node.target is aten._to_copy.default:
            node.kwargs = _said_once(node)
            _skip_exact_cast(node)
        source = node.args[0]
        assert isinstance(source, Node)
        if node not in held and _is_same(node.meta["val"], source.meta["val"]):
            node.replace_all_uses_with(source)
            step.graph.erase_node(node)
    return step


def _said_once(node: Node) -> dict[str, Any]:
    """The keywords of a ``_to_copy`` that tell its result from its operand."""
    given, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    told = {name: value for name, value in node.kwargs.items() if value not in (None, False)}
    same = {"dtype": given.dtype == made.dtype, "device": given.device == made.device, "layout": True}
    if told.get("memory_format") is torch.preserve_format:
        del told["memory_format"]
    return {name: value for name, value in told.items() if not same.get(name, False)}


def _skip_exact_cast(node: Node) -> None:
    """Read past casts of the operand that lose nothing and leave its layout alone."""
    source = node.args[0]
    assert isinstance(source, Node)
    while source.target is aten._to_copy.default and "inplace" not in source.meta:
        before = source.args[0]
        assert isinstance(before, Node)
        given, wide = before.meta["val"], source.meta["val"]
        exact = holds_exactly(wide.dtype, given.dtype) and given.device == wide.device
        if not exact or _places(given) != _places(wide):
            return
        node.replace_input_with(source, before)
        source = before


def holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``; where unsure, no."""
    if wide == narrow or narrow == torch.bool:
        return True
    if (
        wide == torch.bool
        or wide.is_complex
        or narrow.is_complex
        or (narrow.is_floating_point and not wide.is_floating_point)
    ):
        return False
    if not wide.is_floating_point:
        a, b = torch.iinfo(wide), torch.iinfo(narrow)
        return a.min <= b.min and a.max >= b.max
    digits = _digits(wide)
    if not narrow.is_floating_point:
        return torch.iinfo(narrow).bits <= digits
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return digits >= _digits(narrow) and a.max >= b.max and a.smallest_normal <= b.smallest_normal


def _digits(dtype: torch.dtype) -> int:
    """Bits of the significand, the hidden one counted."""
    return round(1 - torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())


def _is_same(made: torch.Tensor, given: torch.Tensor) -> bool:
    return made.dtype == given.dtype and made.device == given.device and _places(made) == _places(given)


def _places(val: torch.Tensor) -> tuple[Any, ...]:
    """Symbolic numbers as text: comparing themselves may add to what the graph assumes."""
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    return tuple([n if type(n) is int else str(n) for n in numbers])
