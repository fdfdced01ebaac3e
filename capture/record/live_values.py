"""Which values of a capture are still in use at a point of the step: by Python, or by autograd.

A step that branches on a value is cut there, and any code may follow in a branch that was not captured yet. All that
such code can use is what somebody still holds: the variables of the functions that are running, Python objects, and
tensors that autograd saved. The recorder itself holds every fake tensor of the capture, so being alive says nothing.
The references that the recorder has are counted, and a tensor with more references than those is in use.

Counting too few of the recorder's references makes a value look used that is not: it is kept a little longer. Nothing
may be counted that is not certain to be a reference.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.record.operands import map_operands
from weft.capture.record.tracked_storages import TrackedStorage, TrackedStorages


def references(objects: list[Any], at: int) -> int:
    """How many others than ``objects`` refer to its entry number ``at`` from Python."""
    value = objects[at]
    inside = torch_adapter.references_from_cpp(value) if isinstance(value, torch.Tensor) else 0
    return sys.getrefcount(value) - _HELD_BY_A_LIST - inside


_HELD_BY_A_LIST = 0
_HELD_BY_A_LIST = references([object()], 0)


def calls_keep_arguments() -> bool:
    """Whether a Python function that calls another one refers to the arguments until that returns.

    CPython's interpreter hands its references over to the called function. It keeps them where something has replaced
    the evaluation of frames (PEP 523): torch does in the whole process while any of its threads runs compiled code, or
    code in which ``torch.compiler.disable`` forbids that.
    """
    # `next` calls through C, which always keeps its references.
    return _references_to_argument(object()) == next(map(_references_to_argument, iter(object, None)))


def _references_to_argument(argument: object) -> int:
    return sys.getrefcount(argument)


def storages_in_use(
    storages: TrackedStorages, nodes: Iterable[torch.fx.Node], inputs: Iterable[torch.Tensor]
) -> list[TrackedStorage]:
    """The storages of which somebody but the recorder holds a tensor, in the order in which the capture met them.

    The recorder lets go of tensors that nobody else holds. A view holds its base, and the result of an operation holds
    what autograd saved for it, so others may be found to be out of use then.

    Args:
        storages: those of the capture.
        nodes: all nodes of its graph. Each holds its fake value, in whose place it gets one of the same layout.
        inputs: the fakes of the inputs, which the recorder needs.
    """
    kept = set(map(id, inputs))
    while unused := _unused(storages, nodes, kept):
        copies = {id(tensor): torch_adapter.detached_fake(tensor) for tensor in unused}
        exchanged = lambda val, copies=copies: copies.get(id(val), val)
        for node in nodes:
            if "val" in node.meta:
                node.meta["val"] = map_operands(node.meta["val"], exchanged)
        storages.exchange(copies)
        del unused
    used = {storages.of(tensor).storage for tensor in storages.tensors() if id(tensor) not in kept}
    return [storage for storage in storages.all() if storage in used]


def _unused(storages: TrackedStorages, nodes: Iterable[torch.fx.Node], kept: set[int]) -> list[torch.Tensor]:
    """The tensors that only the recorder holds, but for those in ``kept``."""
    recorded = Counter(map(id, [*storages.references(), *_values(nodes)]))
    tensors = storages.tensors()
    return [
        tensors[at]
        for at in range(len(tensors))
        if references(tensors, at) <= recorded[id(tensors[at])]
        and not torch_adapter.cpp_holders(tensors[at])
        and id(tensors[at]) not in kept
    ]


def _values(nodes: Iterable[torch.fx.Node]) -> Iterator[Any]:
    """The fake values that nodes hold, once for each reference."""
    pending: list[Any] = [node.meta.get("val") for node in nodes]
    lists: set[int] = set()  # two nodes may hold the same list
    while pending:
        value = pending.pop()
        if not isinstance(value, (list, tuple)):
            yield value
        elif id(value) not in lists:
            lists.add(id(value))
            pending += value
