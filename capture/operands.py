"""The operands of an operation: finding tensors among them, replacing them, handing them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.torch_adapter import OpOverload


def map_operands(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """``tree`` with ``fn`` applied to everything that is no list, tuple or dict; named tuples become tuples."""
    if isinstance(tree, list):
        return [map_operands(item, fn) for item in tree]
    if isinstance(tree, tuple):
        return tuple([map_operands(item, fn) for item in tree])
    if isinstance(tree, dict):
        return {key: map_operands(item, fn) for key, item in tree.items()}
    return fn(tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def argument_of(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """The argument at a place of the schema, None where the call leaves it out."""
    return args[position] if position < len(args) else kwargs.get(name)


def handed_back(op: OpOverload, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, int]) -> Any:
    """The results of an in-place operation, with the caller's own tensor objects where it returns what it was given."""
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
        back.append(argument_of(args, kwargs, named[name], name))
    return tuple(back) if isinstance(out, tuple) else back[0]
