"""Values that the user's code holds after the step: their memory must be their own."""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph
from weft.capture.step_interface import Update
from weft.inductor.graph.aliasing import sources

Node = torch.fx.Node


def escaping(step: StepGraph) -> set[Node]:
    """Nodes whose memory a returned or newly created tensor may lie in.

    Were two of them one, or one of them an input, the user's next write to the one would show in the other.
    """
    found: set[Node] = set()
    kept = [r for what, r in zip(step.outputs, step.results, strict=True) if not isinstance(what, Update)]
    todo = [result for result in kept if isinstance(result, Node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += sources(node)
    return found
