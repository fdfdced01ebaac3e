"""Operations write over an operand that nothing reads afterwards.

AOTAutograd's graphs have no mutation: what the user's code did in place (an activation, running statistics, a counter)
makes a new tensor there, and statistics are copied back. Written in place it costs no memory and no copy. Steps that
weft captures itself remember what was done in place and do not need this pass. An elementwise operation without an
in-place form, such as the backward of an activation, or whose first operand is still read, writes over another operand
through its ``out`` form. For programs of ATen kernels only: generated kernels reuse memory by themselves.

Keeps the bits of every result.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.record.functional_ops import written_arguments
from weft.capture.step_interface import Update
from weft.inductor.graph.aliasing import looks_into, sources, storages
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.graph.sizes import layout_text
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten

# In-place forms that are not called like the functional one with an underscore.
_OTHERWISE_NAMED = {aten._native_batch_norm_legit_functional.default: aten._native_batch_norm_legit.default}
# The same to all but autograd, to which the second makes no view.
_PLAIN_VIEWS = (aten.view.default, aten._unsafe_view.default)
# Element by element, though torch does not tag them so.
_POINTWISE = frozenset(
    {
        aten.elu_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
        aten.softplus_backward.default,
    }
)


@keeps_bits
def write_in_place(step: StepGraph) -> StepGraph:
    """Use in-place or ``out`` forms for operations whose operand is not read again. Changes ``step``.

    An in-place form is recorded in ``meta["inplace"]``. An ``out`` form replaces the operation, with the operand as
    ``out``.
    """
    last_reads = _LastReads(step)
    for node in step.graph.nodes:
        if node.op == "call_function" and "inplace" not in node.meta and not _in_place(node, last_reads):
            _over_an_operand(node, last_reads)
    return step


def _in_place(node: Node, last_reads: _LastReads) -> bool:
    """Record the in-place form of ``node`` if that is safe. Returns whether it is."""
    form = in_place_form(node.target)
    if form is None:
        return False
    operands = _written(node, form)
    results = _results(node, len(operands))
    if not all(last_reads.end_at(node, operand, result) for operand, result in zip(operands, results, strict=True)):
        return False
    node.meta["inplace"] = form
    last_reads.write(node, operands)
    return True


def _over_an_operand(node: Node, last_reads: _LastReads) -> None:
    """Replace ``node`` by its ``out`` form over the first operand that can be overwritten."""
    form = out_form(node.target)
    effect = written_arguments(form) if form is not None else None
    if effect is None:
        return
    for operand in _operands(node):
        if last_reads.end_at(node, operand, node.meta["val"]):
            node.kwargs = {**node.kwargs, effect.writes[0][1]: operand}
            node.target = effect.functional
            last_reads.write(node, [operand])
            return


def in_place_form(target: Any) -> OpOverload | None:
    """The operation that computes what ``target`` does and writes it over operands, None where there is none."""
    return _in_place_form(target) if isinstance(target, OpOverload) and target.namespace == "aten" else None


@functools.cache
def _in_place_form(target: OpOverload) -> OpOverload | None:
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, f"{name}_", None)
    form = _OTHERWISE_NAMED.get(target) or getattr(packet, target._overloadname, None)
    # An in-place draw need not draw the same numbers as the functional one.
    if form is None or torch.Tag.nondeterministic_seeded in form.tags:
        return None
    effect = written_arguments(form)
    return form if effect is not None and effect.functional is target else None


def out_form(target: Any) -> OpOverload | None:
    """The operation that computes what ``target`` does, element by element, into a tensor that it is given, None where
    there is none. Since each element is read before it is written, that tensor may be an operand."""
    return _out_form(target) if isinstance(target, OpOverload) and target.namespace == "aten" else None


@functools.cache
def _out_form(target: OpOverload) -> OpOverload | None:
    pointwise = torch.Tag.pointwise in target.tags or target in _POINTWISE
    if not pointwise or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = target.overloadpacket
    forms = (getattr(packet, name) for name in packet.overloads())
    return next((form for form in forms if _is_out_form(form, target)), None)


def _is_out_form(form: OpOverload, target: OpOverload) -> bool:
    """Whether ``form`` has the arguments of ``target`` and one more to write, and a kernel that computes there: those
    that torch generates compute elsewhere and copy."""
    arguments = [(argument.name, str(argument.type)) for argument in form._schema.arguments if not argument.is_out]
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    return (
        arguments == wanted and len(form._schema.arguments) == len(wanted) + 1 and torch.Tag.generated not in form.tags
    )


def _written(node: Node, form: OpOverload) -> list[Any]:
    """The operands that the in-place form writes, None for one that is not given by its position."""
    effect = written_arguments(form)
    assert effect is not None
    return [node.args[at] if at < len(node.args) else None for at, _ in effect.writes]


def _results(node: Node, count: int) -> list[Any]:
    """Fakes of the last ``count`` results, the new values of what is written."""
    val = node.meta["val"]
    return [*val][-count:] if isinstance(val, (list, tuple)) else [val]


class _LastReads:
    """The last read of each value's memory, and the tensor that each value lies in."""

    def __init__(self, step: StepGraph) -> None:
        self._at = {node: at for at, node in enumerate(step.graph.nodes)}
        self._updates = _updates(step)
        self._tensors: dict[Node, Node] = {}
        self._returned = _returned(step)
        self._by_storage: dict[int, list[Node]] = {}
        for node in step.graph.nodes:
            for storage in storages(node) if isinstance(node.meta.get("val"), torch.Tensor) else ():
                self._by_storage.setdefault(storage, []).append(node)

    def end_at(self, node: Node, operand: Any, result: torch.Tensor) -> bool:
        """Whether ``node`` is the last reader of the memory of ``operand``, and ``result`` has the operand's layout."""
        layout = _layout(result)
        if layout is None or not isinstance(operand, Node) or _layout(operand.meta.get("val")) != layout:
            return False
        # The caller would get a view where eager gives a tensor of its own, see :meth:`write`.
        if node in self._returned and _is_view(maker := self._maker(operand)) and maker.target not in _PLAIN_VIEWS:
            return False
        values = self._values(operand)
        if not all(self._is_writable(value, node) for value in values):
            return False
        # Exactly one operand in that memory: a second one would be read while it is written.
        read = [used for used in _operands(node) if used in values]
        return read == [operand] and all(self._at[user] <= self._at[node] for value in values for user in value.users)

    def write(self, node: Node, operands: list[Node]) -> None:
        """Note that ``node`` is written over ``operands``. What a step returns is no view where eager's is none: users
        may write to it, and autograd refuses that of a view that a compiled function returns."""
        for operand in operands:
            maker = self._tensors[node] = self._maker(operand)
            if node in self._returned and maker.target is aten.view.default:
                maker.target = aten._unsafe_view.default

    def _maker(self, value: Node) -> Node:
        """The operation that made the tensor that ``value`` is."""
        if _picks_new(value):
            value = value.args[0]  # type: ignore[assignment]
        return self._tensors.get(value, value)

    def _values(self, operand: Node) -> set[Node]:
        """All values that can share memory with ``operand``."""
        values: set[Node] = set()
        todo = [operand]
        while todo:
            value = todo.pop()
            if value in values:
                continue
            values.add(value)
            if not isinstance(value.meta.get("val"), torch.Tensor):
                todo += value.users  # a list of views
                continue
            todo += [other for storage in storages(value) for other in self._by_storage.get(storage, ())]
            todo += [user for user in value.users if looks_into(user) and not _picks_new(user)]
            todo += sources(value) if looks_into(value) and not _picks_new(value) else []
        return values

    def _is_writable(self, value: Node, by: Node) -> bool:
        if value.op == "placeholder":
            return by in self._updates.get(value.name, ())
        return value.op == "call_function" and getattr(value.target, "namespace", "aten") == "aten"


def _updates(step: StepGraph) -> dict[str, list[Node]]:
    """For each input that is updated, the operations that make its new value of its old one, each in place."""
    updates: dict[str, list[Node]] = {}
    for entry, result in step.updates():
        value: Any = result
        while isinstance(value, Node):
            maker: Any = value.args[0] if value.target is operator.getitem else value
            form = in_place_form(maker.target)
            if form is None:
                break
            updates.setdefault(entry.name, []).append(maker)
            operands = [operand for operand in _written(maker, form) if isinstance(operand, Node)]
            # What comes before must be for this operation alone: else it would be read where it is overwritten.
            value = operands[0] if len(operands) == 1 and [*operands[0].users] == [maker] else None
    return updates


def _is_view(node: Node) -> bool:
    """Whether the node makes a view, as autograd sees it."""
    return looks_into(node) and not _picks_new(node)


def _returned(step: StepGraph) -> set[Node]:
    """The operations of which a result is handed to the caller."""
    returned = (value for what, value in zip(step.outputs, step.results, strict=True) if not isinstance(what, Update))
    return {value.args[0] if _picks_new(value) else value for value in returned if isinstance(value, Node)}  # type: ignore[misc]


def _picks_new(node: Node) -> bool:
    """Whether the node picks a result that has memory of its own."""
    return node.target is operator.getitem and not looks_into(node.args[0])  # type: ignore[arg-type]


def _operands(node: Node) -> list[Node]:
    """The operands of ``node``, as often as they are."""
    operands: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda used: operands.append(used))
    return operands


def _layout(val: Any) -> tuple[Any, ...] | None:
    """The layout of a strided tensor; None where sizes depend on data: fake strides may then be wrong."""
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    if any(torch_adapter.hint(size) is None for size in val.shape):
        return None
    return layout_text(val)
