"""What the recorder asks of an operation each time that it meets it, looked up once for each operation.

Torch's operations answer such questions with Python code, their hash included. A step calls a few dozen different
operations some thousand times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.node_kinds import needs_check
from weft.capture.record.functional_ops import WrittenArguments, executable_form, written_arguments
from weft.capture.record.number_results import number_results
from weft.capture.record.value_gradients import FORMULAS, Formula
from weft.torch_adapter import OpOverload

# The fake result of these depends on the data of an operand, for which torch makes a symbol.
_READS_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OpFacts(NamedTuple):
    """What is known of one operation.

    Attributes:
        op: the operation, which is held: its id is the key.
        namespace: ``aten`` for ``aten.mm.default``.
        name: ``mm`` for ``aten.mm.default``.
        executable: what a graph calls for it.
        writes: the arguments that it writes, None where there are none.
        reads_data: whether the sizes or the number that it returns depend on data.
        returns_numbers: whether it returns numbers that may depend on data.
        needs_check: whether torch checks its operands only when it runs.
        gradient: makes eager's gradients, where those for fake tensors have other bits.
        is_composite: whether torch computes it by other operations.
        is_taken_apart: whether it is recorded as those, see :func:`weft.torch_adapter.is_taken_apart`.
    """

    op: OpOverload
    namespace: str
    name: str
    executable: Callable[..., Any]
    writes: WrittenArguments | None
    reads_data: bool
    returns_numbers: bool
    needs_check: bool
    gradient: Formula | None
    is_composite: bool
    is_taken_apart: bool


_known: dict[int, OpFacts] = {}


def facts_of(op: OpOverload) -> OpFacts:
    """What is known of an operation."""
    found = _known.get(id(op))
    if found is None:
        namespace, name = op._schema.name.split("::")
        reads_data = not _READS_DATA.isdisjoint(op.tags)
        asked = executable_form(op), written_arguments(op), reads_data, number_results(op), needs_check(op)
        asked = *asked, FORMULAS.get(op), torch_adapter.is_composite(op), torch_adapter.is_taken_apart(op)
        found = _known[id(op)] = OpFacts(op, namespace, name, *asked)
    return found
