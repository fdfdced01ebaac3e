"""Names of process groups that are equal on every rank.

The graph names a group by its mesh and axis, so that the text of the graph is the same on all ranks. The StepGraph
keeps the names under which torch knows the groups on this rank.
"""

from __future__ import annotations

import torch

from weft import torch_adapter
from weft.capture.node_kinds import group_of


def canonical_groups(graph: torch.fx.Graph) -> dict[str, str]:
    """Rename the process groups in ``graph`` by mesh axis; returns torch's own name of each new name.

    Torch names groups by a counter or a hash of their ranks, which differ between ranks. A mesh describes each of its
    groups by the axis, so the description becomes the name. Several groups with one description are numbered in the
    order in which the graph uses them.
    """
    named: dict[str, str] = {}
    for node in graph.nodes:
        torch_name = group_of(node)
        if not torch_name:
            continue
        if torch_name not in named:
            named[torch_name] = _unused(torch_adapter.describe_group(torch_name), named.values())
        node.args = tuple(named[torch_name] if arg == torch_name and isinstance(arg, str) else arg for arg in node.args)
        node.kwargs = {
            k: named[torch_name] if v == torch_name and isinstance(v, str) else v for k, v in node.kwargs.items()
        }
    return {canonical: torch_name for torch_name, canonical in named.items()}


def _unused(name: str, taken: object) -> str:
    names = set(taken)  # type: ignore[call-overload]
    candidates = [name, *(f"{name}_{count}" for count in range(1, len(names) + 1))]
    return next(candidate for candidate in candidates if candidate not in names)
