"""Lowering an operation once for all layers that repeat it.

A lowering sees the arguments of an operation, how its tensor operands and what they are views of lie in memory, from
which numbers an operand such as ``arange(6)`` was made, and the results. Two operations that agree in these have the
same loops over other buffers, so the second takes those of the first. Nothing is shared where a lowering depends on
anything else: on numbers of the step, which may change, or on a seed of random numbers, of which each operation has its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from weft import knobs
from weft.errors import MalformedNest
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.loop_ir.ir import Buffer, Nest
from weft.inductor.loop_ir.numbering import buffers_of, numbered
from weft.inductor.lowering.lowered_step import Loop, Lowered
from weft.inductor.lowering.registry import Lowering, Operand, base_of_views, size_of

Node = torch.fx.Node

# Arguments that are described by their type and value. Of floats the text is compared: 0.0 == -0.0, nan != nan.
_CONSTANTS = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Loops(NamedTuple):
    """A loop nest of an operation. Each of its buffers is an operand's, given by its number, or the operation's own,
    given by what follows the operation's name in that of the buffer."""

    form: Nest
    buffers: tuple[int | str, ...]


@dataclass(frozen=True)
class _LoweredOperation:
    """The loops and buffers of an operation, apart from the names.

    Attributes:
        nests: in order.
        buffers: its results and temporaries, called by what follows the operation's name in theirs.
        result: how its result is read; None for several results.
    """

    nests: tuple[_Loops, ...]
    buffers: tuple[Buffer, ...]
    result: Operand | None

    def add_to(self, lowered: Lowered, node: Node, operands: Sequence[str]) -> None:
        """Add the loops and buffers of ``node``, whose operands have these buffers."""
        for like in self.buffers:
            name = node.name + like.name
            lowered.buffers[name] = Buffer(name, like.dtype, like.device, like.sizes, like.strides)
        for form, buffers in self.nests:
            names = [operands[each] if isinstance(each, int) else node.name + each for each in buffers]
            loop = Loop(form, tuple(names), node)
            lowered.operations.append(loop)
            lowered.orders.note(form, loop.names, lowered.buffers)
        if self.result is not None:
            lowered.operands[node] = replace(self.result, buffer=node.name)


class RepeatedOperations:
    """The operations of a step that were lowered so far, by what a lowering sees of them."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._known: dict[Hashable, _LoweredOperation | None] = {}

    def add(self, node: Node, lower: Callable[[], Lowering | None]) -> bool:
        """Add the loops of ``node`` to the step. False where its lowering does not cover it.

        Args:
            lower: lowers the node; None where the lowering does not cover it.

        Raises:
            MalformedNest: lowered again, the operation has other loops; checked if ``knobs.verify_graphs`` is set.
        """
        operands: dict[str, int] = {}
        seen = self._seen(node, operands)
        if seen is not None and seen in self._known:
            found, buffers = self._known[seen], list(operands)
            if knobs.verify_graphs and found != _lowered_operation(lower(), buffers):
                raise MalformedNest("it has other loops than an equal operation before it", "", "lowering", node.name)
        else:
            out = lower()
            used = dict.fromkeys(name for nest in out.nests for name in buffers_of(nest)) if out is not None else {}
            # Those of numbers in memory and of seeds are no operands.
            others = [name for name in used if out is not None and name not in out.buffers and name not in operands]
            buffers = [*operands, *others]
            found = _lowered_operation(out, buffers)
            if seen is not None and not others:
                self._known[seen] = found
        if found is not None:
            found.add_to(self._lowered, node, buffers)
        return found is not None

    def _seen(self, node: Node, operands: dict[str, int]) -> Hashable | None:
        """What a lowering sees of a node; None where that is not known. Numbers the buffers of the operands."""
        arguments = self._argument((node.args, tuple(node.kwargs.items())), operands)
        results = _result(node.meta["val"])
        return None if arguments is None or results is None else (node.target, arguments, results)

    def _argument(self, arg: Any, operands: dict[str, int]) -> Hashable | None:
        if isinstance(arg, (tuple, list)):
            parts = tuple([self._argument(each, operands) for each in arg])
            return None if None in parts else parts
        if isinstance(arg, Node):
            operand, val = self._lowered.operands.get(arg), arg.meta.get("val")
            if operand is None or not isinstance(val, torch.Tensor):
                return None
            number = operands.setdefault(operand.buffer, len(operands))
            layout = operand.dtype, operand.sizes, operand.strides, operand.offset
            base = base_of_views(self._lowered.operands, arg)
            orders = [self._lowered.orders.strides(each, self._lowered.buffers) for each in (operand, base)]
            made = self._made_of_numbers(arg)
            if made is None:
                return None
            return number, layout, (base.sizes, base.strides), tuple(orders), val.device, is_lazy(val), made
        if type(arg) is float:
            return float, repr(arg)
        return (type(arg), arg) if isinstance(arg, _CONSTANTS) else None

    def _made_of_numbers(self, arg: Node) -> Hashable | None:
        """How a tensor was made that no tensor went into: lowerings ask whether one is ``arange(rows)``. "" of others;
        None where a number of the step decides."""
        if arg.op != "call_function" or any(isinstance(n.meta.get("val"), torch.Tensor) for n in arg.all_input_nodes):
            return ""
        arguments = self._argument((arg.args, tuple(arg.kwargs.items())), {})
        return None if arguments is None else (arg.target, arguments)


def _result(val: Any) -> Hashable | None:
    if isinstance(val, (tuple, list)):
        parts = tuple([_result(each) for each in val])
        return None if None in parts else parts
    if not isinstance(val, torch.Tensor):
        return (type(val),) if val is None else None  # None: a result that was not asked for
    if val.layout is not torch.strided:
        return None
    sizes, strides = tuple([size_of(n) for n in val.shape]), tuple([size_of(n) for n in val.stride()])
    return val.dtype, val.device, sizes, strides, is_lazy(val)


def _lowered_operation(out: Lowering | None, operands: Sequence[str]) -> _LoweredOperation | None:
    """What a lowering made, with ``operands`` as the buffers of the operands."""
    if out is None:
        return None
    # First: a result that no loop stores gets its buffer here.
    result = out.result() if isinstance(out.node.meta["val"], torch.Tensor) else None
    places: dict[str, int | str] = {buffer: at for at, buffer in enumerate(operands)}
    places |= {name: name[len(out.node.name) :] for name in out.buffers}
    nests = []
    for nest in out.nests:
        form, buffers = numbered(nest)
        nests.append(_Loops(form, tuple([places[name] for name in buffers])))
    own = tuple([replace(each, name=name[len(out.node.name) :]) for name, each in out.buffers.items()])
    return _LoweredOperation(tuple(nests), own, None if result is None else replace(result, buffer=""))
