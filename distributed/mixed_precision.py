"""Mixed precision of a wrapped module: casts of what goes into forward and comes out, and the dtype of reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with `function` applied to its tensors, in order.

    Goes through tuples (named ones too), lists, dicts and dataclasses; anything else is left as it is. A
    container in which nothing changed is returned itself, not a copy.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changes = {k: new for k, old in fields.items() if (new := map_tensors(function, old)) is not old}
        return dataclasses.replace(cast(Any, tree), **changes) if changes else tree
    if isinstance(tree, dict):
        values = {key: map_tensors(function, value) for key, value in tree.items()}
        if all(values[key] is tree[key] for key in tree):
            return tree
        copied = tree.copy()
        copied.update(values)
        return copied
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of `tree` in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return iter(found)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`; other tensors and other leaves are untouched."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, tree)


def move_to(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`."""
    return map_tensors(lambda t: t if t.device == device else t.to(device), tree)


def has_grad_dtypes(policy: MixedPrecisionPolicy) -> bool:
    """Whether the policy is one of torch 2.15, whose FSDP2 sets the `grad_dtype` of gathered parameters. Policies of
    earlier ones have no `param_dtype_override_fn`."""
    return hasattr(policy, "param_dtype_override_fn")


def reduces_in_grad_dtype(policy: MixedPrecisionPolicy) -> bool:
    """Whether gradients are reduced in the `grad_dtype` of their parameter: what a policy without a `reduce_dtype` says
    in torch 2.15. In earlier ones it says `param_dtype`."""
    return policy.reduce_dtype is None and has_grad_dtypes(policy)
