"""Tensors of the user's that a step makes require grad."""

from __future__ import annotations

import torch

from weft.errors import PythonStateChanged


def refuse_new_leaves(known: list[tuple[torch.Tensor, str]]) -> None:
    """Undo it, and raise.

    Args:
        known: tensors that did not require grad before the step and are no parameters, with their paths.

    Raises:
        PythonStateChanged: names the first.
    """
    changed = [(tensor, path) for tensor, path in known if tensor.requires_grad and tensor.is_leaf]
    for tensor, _ in changed:
        tensor.requires_grad = False
    if changed:
        path = f"{changed[0][1]}.requires_grad"
        raise PythonStateChanged(path, "False -> True", "call requires_grad_() before the step")
