"""The signature of a graph: the text of its collectives, which must be equal on every rank.

Ranks compare signatures before the first collective runs. Two graphs with equal signatures issue the same collectives
in the same order, with the same groups, dtypes, sizes and parameters. What each rank computes between them is its own
affair, as it is in a step that is not compiled: batches and shards of uneven sizes, numbers made from them, generators,
and Python that depends on the rank do not appear in the text.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.fx

from weft.capture.agreement.carried_parameters import CarriedParameters, operation_name
from weft.capture.agreement.claims import even_part
from weft.capture.agreement.text_difference import PARAMETERS, REMARK
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import sizes_differ_by_rank
from weft.capture.user_code import format_frame

Node = torch.fx.Node


def signature(step: StepGraph) -> str:
    """One line per collective, in order: operation, operands that are no tensors, dtype and elements of what it
    carries, stage and module. The parameters that this belongs to, and the user's line, stand behind it as remarks.

    Sizes are compared where partners must know them. Unequal parts of an all-to-all differ between ranks (see
    :mod:`weft.capture.agreement.claims`), and a size that only the data decides is a symbol, of which the name is
    compared and never the value.
    """
    names, parameters = _SymbolNames(), CarriedParameters(step)
    return "\n".join(_line(node, names, parameters) for node in step.collectives())


def _line(node: Node, names: _SymbolNames, parameters: CarriedParameters) -> str:
    payload = [used.meta["val"] for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.Tensor)]
    sizes = [names.shown(val.numel()) for val in payload]
    if sizes_differ_by_rank(node.target):  # which of several tensors the sizes split is not known here
        part = even_part(node)
        sizes = ["in parts that differ" if part is None else f"{part} each"] * len(payload)
    carried = ", ".join(f"{val.dtype} [{size}]" for val, size in zip(payload, sizes, strict=True))
    belongs = parameters.of(node)
    whose = f"{PARAMETERS}{', '.join(belongs)}" if belongs else ""
    where = " ".join(filter(None, (node.meta.get("stage"), node.meta.get("module"))))
    frames = node.meta.get("frames", ())
    line = f"{REMARK}{format_frame(frames[0])}" if frames else ""
    return f"{operation_name(node)}({_operands(node)}): {carried}{f'; {where}' if where else ''}{whose}{line}"


def _operands(node: Node) -> str:
    """The operands that are neither tensors nor split sizes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a callable, which says what it does by its name and group
        return str(getattr(node.target, "group", ""))
    shown = []
    for at, argument in enumerate(schema.arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        if "split_sizes" not in argument.name and not _holds_nodes(value):
            shown.append(f"{argument.name}={value}")
    return ", ".join(shown)


def _holds_nodes(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, (list, tuple)) and any(map(_holds_nodes, value)))


class _SymbolNames:
    """Names of symbolic sizes, by first appearance in the text: torch numbers symbols by all that a rank traced."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def shown(self, size: int | torch.SymInt) -> str:
        """A number, or the text of an expression over renamed symbols. Nothing is asked of the symbols."""
        if isinstance(size, int):
            return str(size)
        rename = lambda found: self._names.setdefault(found[0], f"n{len(self._names)}")
        return re.sub(r"\b[su]\d+\b", rename, str(size))
