"""Operands of an operation, in nested lists, tuples and dicts: find, replace and return tensors among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from weft.torch_adapter import OpOverload

_CONTAINERS = (list, tuple, dict)


def map_operands(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """``tree`` with ``fn`` applied to each leaf. Lists, tuples and dicts are opened; named tuples become tuples."""
    # Of types, not objects: isinstance asks a fake tensor of a capture for its class, in Python.
    kind = type(tree)
    if not issubclass(kind, _CONTAINERS):
        return fn(tree)
    if issubclass(kind, dict):
        return {key: map_operands(item, fn) for key, item in tree.items()} if tree else {}
    mapped = [map_operands(item, fn) if issubclass(type(item), _CONTAINERS) else fn(item) for item in tree]
    return mapped if issubclass(kind, list) else tuple(mapped)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    _collect((tree,), found)
    return found


def _collect(tree: Iterable[Any], found: list[torch.Tensor]) -> None:
    for item in tree:
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            found.append(item)
        elif issubclass(kind, _CONTAINERS):
            _collect(item.values() if issubclass(kind, dict) else item, found)


def argument_of(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """The argument at ``position`` of the schema, by position or by name; None where the call omits it."""
    return args[position] if position < len(args) else kwargs.get(name)


def inplace_results(
    op: OpOverload, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positions: dict[str, int]
) -> Any:
    """The results of an in-place operation as its caller sees them.

    The schema says which results are written arguments. For those the caller gets its own tensor objects back.

    Args:
        out: what the operation returned on fake tensors.
        positions: position of each argument of the schema, by name.
    """
    if out is None:
        return None
    back = []
    for result, spec in zip(out if isinstance(out, tuple) else (out,), op._schema.returns, strict=True):
        if spec.alias_info is None:
            back.append(result)
            continue
        name = next(
            a.name
            for a in op._schema.arguments
            if a.alias_info and a.alias_info.before_set & spec.alias_info.before_set
        )
        back.append(argument_of(args, kwargs, positions[name], name))
    return tuple(back) if isinstance(out, tuple) else back[0]
