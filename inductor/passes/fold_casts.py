"""Casts and copies that change no bits are dropped or merged.

- ``_to_copy`` keeps only the keywords that change something, so that equal casts are equal nodes.
- A cast of a lossless cast (bfloat16 to float32 to bfloat16) becomes one cast of the original value, or none.
- A copy with the layout of its source is replaced by the source, unless the user holds the copy after the step. The
  source may have a storage offset, as the rows of a rank have in a replicated gradient: those of the first rank have
  none, and the graphs of the ranks would differ otherwise.

Keeps the bits of every result.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.inductor.graph.aliasing import effects_of, looks_into, read_by_storage, readers_of, share_storage
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.pass_runner import keeps_bits

Node = torch.fx.Node

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default)
# Bytes. Kernels load 16 at once where tensors begin at multiples of that.
_ALIGNMENT = 16


@keeps_bits
def fold_casts(step: StepGraph) -> StepGraph:
    """Drop copies and casts that change nothing. Changes ``step``."""
    escapes = escaping(step)
    for node in step.graph.nodes:
        if node.target not in _COPIES or "inplace" in node.meta:
            continue
        if node.target is aten._to_copy.default:
            node.kwargs = _effective_keywords(node)
            _skip_exact_cast(node)
        source = node.args[0]
        assert isinstance(source, Node)
        if node not in escapes and _is_same(node.meta["val"], source.meta["val"]) and not _is_kept_apart(node, source):
            node.replace_all_uses_with(source)
            step.graph.erase_node(node)
    _drop_copies_of_parts(step.graph, escapes)
    return step


def _drop_copies_of_parts(graph: torch.fx.Graph, escapes: Set[Node]) -> None:
    """Replace copies of sources that have the same sizes and strides but another storage offset. Last, because the
    offsets that views of such a copy record are wrong until the pass has ended."""
    moved: set[Node] = set()
    for node in graph.nodes:
        if node.target not in _COPIES or "inplace" in node.meta or node in escapes:
            continue
        (source,) = node.all_input_nodes
        unchanged = moved.isdisjoint(_with_bases(source)) and _begins_elsewhere(node.meta["val"], source.meta["val"])
        if unchanged and not read_by_storage(node) and not _is_kept_apart(node, source):
            moved.add(source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _begins_elsewhere(copy: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether only the storage offsets differ, and that of ``source`` is aligned for wide loads."""
    first = source.storage_offset()
    aligned = type(first) is int and first * source.itemsize % _ALIGNMENT == 0 and copy.storage_offset() == 0
    alike = copy.dtype == source.dtype and copy.device == source.device and _layout(copy)[:-1] == _layout(source)[:-1]
    return alike and aligned


def _with_bases(node: Node) -> Iterator[Node]:
    """A value and what it is a view of."""
    yield node
    while looks_into(node):
        node = node.all_input_nodes[0]
        yield node


def _is_kept_apart(copy: Node, source: Node) -> bool:
    """Whether the copy, or a view of it, is an operand of a write to the memory of its source: the kernel must not read
    what it writes."""
    for user in readers_of(copy):
        if (op := user.meta.get("inplace")) is not None and (effect := effects_of(op)) is not None:
            written = [user.args[at] for at, _ in effect.writes if at < len(user.args)]
            if any(isinstance(each, Node) and share_storage(each, source) for each in written):
                return True
    return False


def _effective_keywords(node: Node) -> dict[str, Any]:
    """The keywords of a ``_to_copy`` that make its result differ from its operand."""
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    keywords = {name: value for name, value in node.kwargs.items() if value not in (None, False)}
    same = {"dtype": source.dtype == result.dtype, "device": source.device == result.device, "layout": True}
    if keywords.get("memory_format") is torch.preserve_format:
        del keywords["memory_format"]
    return {name: value for name, value in keywords.items() if not same.get(name, False)}


def _skip_exact_cast(node: Node) -> None:
    """Skip lossless casts of the operand that keep its layout."""
    source = node.args[0]
    assert isinstance(source, Node)
    while source.target is aten._to_copy.default and "inplace" not in source.meta:
        before = source.args[0]
        assert isinstance(before, Node)
        narrow, wide = before.meta["val"], source.meta["val"]
        exact = represents_exactly(wide.dtype, narrow.dtype) and narrow.device == wide.device
        if not exact or _layout(narrow) != _layout(wide):
            return
        node.replace_input_with(source, before)
        source = before


def represents_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of dtype ``narrow`` is a value of ``wide``. False where unsure."""
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
    # A format holds another if it has its significand and its range. Neither of float16 and bfloat16 holds the other.
    digits = _digits(wide)
    if not narrow.is_floating_point:
        return torch.iinfo(narrow).bits <= digits
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return digits >= _digits(narrow) and a.max >= b.max and a.smallest_normal <= b.smallest_normal


def _digits(dtype: torch.dtype) -> int:
    """Bits of the significand, including the hidden bit."""
    return round(1 - torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and _layout(one) == _layout(other)


def _layout(val: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and offset, symbolic ones as text: comparing symbols may add guards."""
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    return tuple([n if type(n) is int else str(n) for n in numbers])
