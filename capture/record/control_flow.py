"""``torch.cond`` and ``while_loop`` in a step: the branch that a predicate chooses, as Python's ``if`` and ``while``
would.

Tracers that see no Python are given functions for both outcomes. A capture sees Python, and branches on values
(:mod:`weft.capture.record.branches`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.recorder import recording
from weft.short_tracebacks import users_mistake
from weft.thread_patches import present

_WHILE_LOOP = "torch._higher_order_ops.while_loop"


def control_flow_replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement)."""
    original_cond = present(torch, "cond")
    # A function of the same name hides the module where its package has it.
    owner = sys.modules.get(_WHILE_LOOP)
    original_while = getattr(owner, "while_loop", None)

    def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
        if recording() is None:
            return original_cond(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
        if recording() is None:
            assert original_while is not None
            return original_while(cond_fn, body_fn, carried_inputs)
        # Like torch's, it returns no input: those of a loop that ends at once are copied.
        result = carried = torch_adapter.tree_map(_copied, carried_inputs)
        structure = torch_adapter.flatten(carried)[1]
        while cond_fn(*carried):
            # Torch returns what the body returned, and nests its tensors for the next iteration like the inputs.
            result = body_fn(*carried)
            leaves = torch_adapter.flatten(result)[0]
            if len(leaves) != structure.num_leaves:
                taken = f"body_fn of while_loop takes {structure.num_leaves} tensors and numbers"
                raise users_mistake(RuntimeError(f"{taken}, and returned {len(leaves)}"))
            carried = torch_adapter.unflatten(leaves, structure)
        return result

    replacements: list[tuple[Any, str, Any]] = [(torch, "cond", cond)]
    return replacements + ([(owner, "while_loop", while_loop)] if original_while is not None else [])


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
