"""The fake value of a node, computed again from the recorded fake values of its operands.

The verifier compares it with what the node records, and passes that change layouts record it
(:mod:`weft.inductor.graph.relayout`). Lowerings index memory by recorded strides and the executor plans memory by
recorded storages: a stale one is a wrong result without an error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.fake.fake_rules import fake_result
from weft.capture.node_kinds import group_of, is_wait
from weft.capture.record.functional_ops import Functionalized, WithGradMode
from weft.capture.record.number_results import number_results
from weft.inductor.graph.aliasing import copies, effects_of, looks_into
from weft.inductor.graph.operations import argument_at
from weft.inductor.graph.sizes import layout_text, tensors_in, tensors_of
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten

NOT_STATED: Any = object()
"""The result of a call that only running it can tell: sizes that the data decides, opaque Python calls."""

# What fake implementations raise on a torch without CUDA, in a process that is not in the group, or for a number that
# the operation reads from a tensor.
_NOT_HERE = (
    # A GPU's fake where there is no GPU; the last one where a build for GPUs sees none.
    *("not linked with support for", "driver version is insufficient", "no CUDA-capable device"),
    *("Could not resolve the process group", "Cannot cast FakeTensor"),
)
# Some of their results (scratch memory, statistics) differ between CPUs and GPUs: a retargeted graph keeps the CPU's.
_DIFFER_BY_DEVICE = frozenset(
    {
        aten._embedding_bag.default,
        aten.native_layer_norm.default,
    }
)
# The dtype of the statistics that they save differs between CPUs and GPUs too. Passes that change layouts need to know
# the layout of their results all the same.
SAVED_STATISTICS_DIFFER = frozenset(
    {
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
    }
)
# Copies of constants, which traces of torch's record in the constant's memory.
_COPIES = frozenset({aten.lift_fresh_copy.default})
# Their results' sizes or values depend on data; on fakes they would make new symbols.
_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def infer(node: Node, groups: Mapping[str, str] | None = None) -> Any:
    """What the call of ``node`` gives for the recorded fake values of its operands, or ``NOT_STATED``.

    Operations run on the fakes. Other callables of a graph state their result with a method
    ``fake_result(recorded, *args, **kwargs)``; what a call leaves open, it takes from ``recorded``, the node's own fake
    value. Other Python functions are not stated. Guards are not added to the graph's ShapeEnv.

    Args:
        groups: names of process groups as they stand in the graph to torch's; some fake implementations ask the group.

    Raises:
        RuntimeError, ValueError, TypeError, IndexError: the operation refuses its operands.
    """
    target: Any = node.target
    if node.op != "call_function" or any("val" not in used.meta for used in node.all_input_nodes):
        return NOT_STATED
    operands: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    args, kwargs = operands
    if target is operator.getitem and isinstance(node.args[0], Node):
        return args[0][args[1]]
    if is_wait(node):
        return args[0]
    # Graphs name groups by mesh and dimension, torch by names of its own.
    if (group := group_of(node)) and groups and group in groups:
        args = tuple(groups[group] if arg == group and isinstance(arg, str) else arg for arg in args)
    mode = _mode((args, kwargs, node.meta.get("val")))
    if mode is None:
        return NOT_STATED
    stated = getattr(target, "fake_result", None)
    if stated is None and not _runs_on_fakes(target):
        return NOT_STATED
    with torch_adapter.recomputing(mode):
        try:
            if stated is not None:
                return stated(node.meta.get("val"), *args, **kwargs)
            if isinstance(target, Functionalized):
                return target.run(lambda op, bound: fake_result(op, (), bound), args, kwargs)
            return fake_result(target, args, kwargs) if isinstance(target, OpOverload) else target(*args, **kwargs)
        except torch_adapter.fakes_unsupported_errors():
            return NOT_STATED
        except NotImplementedError:
            return NOT_STATED
        except RuntimeError as error:
            if any(words in str(error) for words in _NOT_HERE):
                return NOT_STATED
            raise


def take_memory(nodes: Iterable[Node], new: torch.Tensor, old: torch.Tensor) -> None:
    """Let the fakes of ``nodes`` that lie in the memory of ``new`` lie in the memory of ``old``, at the same places.

    For a value ``new`` that replaces ``old``, of the same layout: views of ``old``, and values written over it, stay in
    the memory that they are recorded in, and what ``new`` is a view of lies there too.
    """
    source, target = torch_adapter.storage_key(new), old.untyped_storage()
    if source == torch_adapter.storage_key(old):
        return

    def moved(val: Any) -> Any:
        if isinstance(val, (list, tuple)):
            return type(val)([moved(item) for item in val])
        if not isinstance(val, FakeTensor) or torch_adapter.storage_key(val) != source:
            return val
        place = val.shape, val.stride(), val.storage_offset()
        return torch_adapter.new_fake(val.fake_mode, val.device, val.dtype, *place, target)

    for node in nodes:
        if any(torch_adapter.storage_key(tensor) == source for tensor in tensors_of(node)):
            node.meta["val"] = moved(node.meta["val"])


def replace_uses(graph: torch.fx.Graph, node: Node, new: Node) -> None:
    """Let all users of ``node`` read ``new``, a value of the same layout, in the memory recorded for ``node``."""
    take_memory(graph.nodes, new.meta["val"], node.meta["val"])
    node.replace_all_uses_with(new)


class ViewRefresher:
    """Keeps the recorded memory of values correct while passes change a graph.

    Views, and values that are written in place, lie in the memory of their operand. Copies of constants lie in memory
    of their own. A pass that puts one value in the place of another leaves views recorded in the memory of the old one.

    What reads a view whose strides change needs :mod:`weft.inductor.graph.relayout`.
    """

    def __init__(self) -> None:
        # What a node looked like when it was found right. Passes leave most nodes alone, and a graph has thousands.
        # The objects are kept, so that their identities stay theirs.
        self._known: dict[Node, tuple[Any, ...]] = {}

    def refresh(self, graph: torch.fx.Graph) -> None:
        """Correct the nodes that changed since the last call, and what they are views of."""
        known, call_of = self._known, torch_adapter.call_of
        for node in graph.nodes:
            entry = known.get(node)
            if entry is not None:
                val, args, kwargs, target, inplace, operand, operand_val = entry
                meta, (now_args, now_kwargs, now_target) = node.meta, call_of(node)
                if (
                    now_args is args
                    and meta.get("val") is val
                    and now_kwargs is kwargs
                    and now_target is target
                    and meta.get("inplace") is inplace
                    and (operand is None or operand.meta.get("val") is operand_val)
                ):
                    continue
            elif node.op != "call_function":
                continue
            operand = _refresh(node)
            operand_val = None if operand is None else operand.meta.get("val")
            known[node] = node.meta.get("val"), *call_of(node), node.meta.get("inplace"), operand, operand_val


def _refresh(node: Node) -> Node | None:
    """Correct the memory that ``node`` records. Returns the operand that it depends on, if any."""
    if is_wait(node) or not tensors_of(node):
        return None
    is_view = node.target is operator.getitem or (looks_into(node) and not copies(node))
    operand = node.args[0] if is_view or node.target in _COPIES else _written_operand(node)
    if not isinstance(operand, Node):
        return None
    value = operand.meta.get("val")
    if node.target is operator.getitem and isinstance(value, (list, tuple)) and type(node.args[1]) is int:
        value = value[node.args[1]]  # a list may hold all parameters of a step: the others are not looked at
    memory = {torch_adapter.storage_key(tensor) for tensor in tensors_in(value)}
    inside = [torch_adapter.storage_key(tensor) in memory for tensor in tensors_in(node.meta["val"])]
    if node.target in _COPIES:
        if any(inside) and (copy := infer(node)) is not NOT_STATED:
            node.meta["val"] = copy
    # Only a value in the wrong memory is computed again: most nodes are right, and a graph has thousands.
    elif not all(inside):
        moved = infer(node) if is_view else _alias_of(operand, node.meta["val"])
        if tensors_in(moved) and all(torch_adapter.storage_key(tensor) in memory for tensor in tensors_in(moved)):
            node.meta["val"] = moved
    return operand


def _written_operand(node: Node) -> Any:
    """The operand that an in-place operation with one result writes; None for other nodes."""
    inplace = node.meta.get("inplace")
    what = effects_of(inplace) if inplace is not None else None
    if what is None or what.fresh or len(what.writes) != 1:
        return None
    return argument_at(node, *what.writes[0])


def _alias_of(operand: Node, val: Any) -> torch.Tensor | None:
    """A fake in the memory of ``operand``, if that has the layout of ``val``."""
    source = operand.meta["val"]
    mode = _mode(source)
    if mode is None or not isinstance(source, torch.Tensor) or layout_text(source) != layout_text(val):
        return None
    with torch_adapter.recomputing(mode):
        return aten.alias.default(source)


def _runs_on_fakes(target: Any) -> bool:
    op = target.op if isinstance(target, (Functionalized, WithGradMode)) else target
    if not isinstance(op, OpOverload) or number_results(op):
        return False
    return op not in _DIFFER_BY_DEVICE and _BY_DATA.isdisjoint(op.tags)


def _mode(tree: Any) -> FakeTensorMode | None:
    """The one mode of all fakes in nested values; None for none, for several and for tensors that are not fake."""
    modes: dict[int, FakeTensorMode] = {}
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, FakeTensor):
            modes[id(value.fake_mode)] = value.fake_mode
        elif isinstance(value, torch.Tensor):
            return None
    return next(iter(modes.values())) if len(modes) == 1 else None
