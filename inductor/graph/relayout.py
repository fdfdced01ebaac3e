"""Values that change their layout, and what that means for everything that reads them.

A pass that gives a value other strides must not leave the recorded fake values of its readers as they were: lowerings
index memory by recorded strides. :class:`Relayout` recomputes the readers that work with the new layout, and gives the
others a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.node_meta import meta_of
from weft.inductor.graph.fake_values import NOT_STATED, infer
from weft.inductor.graph.sizes import tensors_in, tensors_of

aten = torch.ops.aten
Node = torch.fx.Node


class Relayout:
    """Follows changed layouts through a graph, node by node in the order of the graph.

    Attributes:
        old: the fake values that nodes had before their strides changed.
        moved: nodes whose value lies in other memory than before, with the same strides: views of such values do too.
    """

    def __init__(self, graph: torch.fx.Graph, follows: Callable[[Node], bool]) -> None:
        """``follows`` says of a node whether it works on operands of any layout."""
        self.graph = graph
        self.old: dict[Node, Any] = {}
        self.moved: set[Node] = set()
        self._follows = follows
        self._copies: dict[tuple[Node, torch.memory_format], Node] = {}

    def replace(self, node: Node, new: Node) -> None:
        """Let ``new``, of the same sizes, be what users of ``node`` read; :meth:`visit` them afterwards."""
        if _strides(new.meta["val"]) != _strides(node.meta["val"]):
            self.old[new] = node.meta["val"]
        else:
            self.moved.add(new)
        node.replace_all_uses_with(new)

    def visit(self, node: Node) -> None:
        """Recompute ``node`` if its operands changed, which must have been visited before it."""
        if any(source in self.old for source in node.all_input_nodes):
            # What the step returns has the layout that eager returns.
            if node.op == "output":
                self.restore(node)
            # An operation that refuses the new layout gets copies, and is computed again with those.
            elif not self._follows(node) or not self.recompute(node):
                self.restore(node)
                self.recompute(node)
        elif node.op != "output" and any(source in self.moved for source in node.all_input_nodes):
            self.recompute(node)

    def recompute(self, node: Node) -> bool:
        """Record the fake value that ``node`` has for its present operands. False where it refuses them, or where not
        only its layout would change."""
        before = node.meta["val"]
        try:
            after = infer(node)
        except (RuntimeError, ValueError):
            return False
        if after is NOT_STATED or not _same_form(before, after):
            return False
        if _strides(before) != _strides(after):
            self.old.setdefault(node, before)
            node.meta["val"] = after
        elif _is_view(node, after):
            self.moved.add(node)
            node.meta["val"] = after
        return True

    def restore(self, node: Node) -> None:
        """Give ``node`` contiguous copies of its operands whose layout changed."""
        for source in [used for used in node.all_input_nodes if used in self.old]:
            if isinstance(self.old[source], torch.Tensor):
                node.replace_input_with(source, self.copy(source, torch.contiguous_format))

    def copy(self, source: Node, memory_format: torch.memory_format) -> Node:
        """``source`` in a memory format, right behind it; made once."""
        key = source, memory_format
        if key not in self._copies:
            with self.graph.inserting_after(behind(source)):
                copy = self.graph.call_function(aten.clone.default, (source,), {"memory_format": memory_format})
            copy.meta = meta_of(source, val=None)
            copy.meta["val"] = infer(copy)
            self._copies[key] = copy
        return self._copies[key]


def behind(node: Node) -> Node:
    """Where a copy of ``node`` may stand: behind it, and behind all inputs of the step."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _same_form(before: Any, after: Any) -> bool:
    ours, theirs = tensors_in(before), tensors_in(after)
    pairs = zip(ours, theirs, strict=False)
    return bool(ours) and len(ours) == len(theirs) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _strides(val: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.stride()) for tensor in tensors_in(val)]


def _is_view(node: Node, val: Any) -> bool:
    """Whether ``val`` lies in the memory of an operand. New memory is as good as other new memory."""
    memory = {torch_adapter.storage_key(t) for used in node.all_input_nodes for t in tensors_of(used)}
    return any(torch_adapter.storage_key(tensor) in memory for tensor in tensors_in(val))
