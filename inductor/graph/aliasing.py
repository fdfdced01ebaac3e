"""Where a value lies in memory, as far as its fake tensor and its operation tell.

A recorder runs the step on fake tensors, so the fakes share storages just as the eager step's tensors would:
two values whose fakes have one storage, offset, sizes and strides are one tensor in eager, perhaps before and
after it was written.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from weft import torch_adapter
from weft.capture.node_kinds import WAIT, is_wait
from weft.capture.record.functional_ops import WrittenArguments, written_arguments
from weft.inductor.graph.operations import argument_at
from weft.inductor.graph.sizes import tensors_in
from weft.torch_adapter import OpOverload

aten = torch.ops.aten

# Writes a changed view back into its base: (base, view, *where). A new tensor, though its fake is the base's.
SCATTERS = frozenset(
    {
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)
# Views that undo a view; where the result has the geometry of a tensor that exists, it is that tensor.
_INVERSES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.transpose.int,
        aten.t.default,
        aten.permute.default,
        aten.view.dtype,
        aten.alias.default,
        aten.detach.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.as_strided.default,
    }
)
# Hand back their input's memory although their schemas do not say so.
_UNMARKED_VIEWS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        WAIT._schema.name,
    }
)

# Views where strides can express the result, and copies elsewhere.
_MAY_COPY = frozenset({aten.reshape, aten.contiguous, aten.flatten})

Geometry = tuple[Any, ...]


class InPlace(Protocol):
    """An in-place operation of weft's own, such as a multi-tensor kernel. It takes the arguments of the functional
    operation and returns the results that are new values.

    Attributes:
        effects: which arguments it writes.
    """

    effects: WrittenArguments

    def __call__(self, *arguments: Any) -> Any: ...


def effects_of(op: OpOverload | InPlace) -> WrittenArguments | None:
    """The arguments that ``op`` writes; None for an operation that writes nothing."""
    return written_arguments(op) if isinstance(op, OpOverload) else op.effects


def is_lazy(val: torch.Tensor) -> bool:
    """Whether the values are the conjugates or negatives of what memory holds. Only ATen's kernels know of these."""
    return val.is_conj() or val.is_neg()


def geometry(value: torch.fx.Node) -> Geometry | None:
    """Storage, offset, sizes, strides, dtype and marks of the value's fake; None for all but strided tensors."""
    val = value.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided or _is_list(value):
        return None
    places = (val.storage_offset(), *val.shape, *val.stride())
    marks = val.is_conj(), val.is_neg()  # views that change values when they are read
    return torch_adapter.storage_key(val), val.dtype, *marks, *(n if type(n) is int else str(n) for n in places)


def share_storage(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether any fake tensor of ``a`` lies in the storage of any of ``b``."""
    return not storages(a).isdisjoint(storages(b))


def looks_into(node: torch.fx.Node) -> bool:
    """Whether the node only makes another view of its input's memory, or picks from a list of such."""
    return _makes_views(node.target)


def _makes_views(target: Any) -> bool:
    if target is operator.getitem or getattr(target, "waits", False):
        return True
    return isinstance(target, OpOverload) and _is_view(target)


@functools.cache
def _is_view(op: OpOverload) -> bool:
    marked = any(result.alias_info is not None for result in op._schema.returns)
    return not op._schema.is_mutable and (marked or op._schema.name in _UNMARKED_VIEWS)


def copies(view: torch.fx.Node) -> bool:
    """Whether an operation whose schema says "view" has to copy its operand, as no strides can express the result."""
    operand = view.args[0] if view.args else None
    if not isinstance(operand, torch.fx.Node) or getattr(view.target, "overloadpacket", None) not in _MAY_COPY:
        return False
    # The fake of a node that a pass made can lie in memory of its own.
    return not share_storage(view, operand) and not operand.meta["val"].is_contiguous()


def with_views(*nodes: torch.fx.Node) -> list[torch.fx.Node]:
    """``nodes`` and all views of them, also waits and elements of lists, each after what it is a view of."""
    views = list(nodes)
    for view in views:  # which grows, through chains of views
        views += [user for user in view.users if looks_into(user)]
    return views


def readers_of(*nodes: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes that read ``nodes`` or views of them, without these views; some of them several times."""
    return (user for view in with_views(*nodes) for user in view.users if not looks_into(user))


def addresses_storage(node: torch.fx.Node) -> bool:
    """Whether the node goes by the whole storage of its first input: to a place counted from the beginning of that, or
    because it copies all of it. Such an input must not be a part of something larger."""
    return node.target in SCATTERS or node.target is aten.as_strided.default


def read_by_storage(node: torch.fx.Node) -> bool:
    """Whether some node goes by the whole storage that ``node`` lies in, be it of a view, or after a write in place."""
    # Few graphs have such nodes at all, and torch keeps a table of the calls of each operation.
    addressing = (*SCATTERS, aten.as_strided.default)
    if not any(node.graph.find_nodes(op="call_function", target=op, sort=False) for op in addressing):
        return False
    views = [node]
    for view in views:
        if any(map(addresses_storage, view.users)):
            return True
        there = (user for user in view.users if share_storage(user, node) or _is_another_view(user))
        views += [user for user in there if user not in views]
    return False


def _is_another_view(node: torch.fx.Node) -> bool:
    """Whether the node makes a view, and does not pick from a list, in which other storages may be."""
    return looks_into(node) and node.target is not operator.getitem


def is_inverse_view(node: torch.fx.Node) -> bool:
    """Whether the node may be a view made back into the tensor it was taken from."""
    return node.target in _INVERSES


def returns_its_input(node: torch.fx.Node) -> bool:
    """Whether the result is the very tensor given."""
    return is_wait(node)


def sources(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Inputs whose memory a result of the node may lie in; more rather than fewer."""
    target = node.target
    if not isinstance(target, OpOverload) and not getattr(target, "shares_as_fakes", False):
        return [n for n in node.all_input_nodes if "val" not in n.meta or storages(n)]
    if target in SCATTERS:
        return []
    if isinstance(target, OpOverload) and looks_into(node):
        return _aliased_arguments(node, target) or node.all_input_nodes[:1]
    own = storages(node)
    return [n for n in node.all_input_nodes if not own.isdisjoint(storages(n))]


def _aliased_arguments(node: torch.fx.Node, target: OpOverload) -> list[torch.fx.Node]:
    aliased = [(at, argument.name) for at, argument in enumerate(target._schema.arguments) if argument.alias_info]
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg([argument_at(node, *place) for place in aliased], found.append)
    return found


def storages(node: torch.fx.Node) -> set[int]:
    """Keys of the storages of the node's fake tensors."""
    return set(storage_keys(node.meta.get("val")))


def _is_list(node: torch.fx.Node) -> bool:
    """Whether elements are picked from the node; a view taken again has its one element as its fake."""
    return any(user.target is operator.getitem for user in node.users)


def storage_keys(val: Any) -> Iterator[int]:
    """Keys of the storages of a fake value: a tensor, or lists of tensors. One storage has one key."""
    return map(torch_adapter.storage_key, tensors_in(val))
