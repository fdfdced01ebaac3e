"""Operations of torch as nodes call them: their names, and their arguments by name."""

from __future__ import annotations

from typing import Any

import torch


def op_name(node: torch.fx.Node) -> str:
    """The name of the operation that a node calls, without its overload ("aten::add"); "" for other callables."""
    return getattr(getattr(node.target, "_schema", None), "name", "")


def argument_at(node: torch.fx.Node, position: int, name: str) -> Any:
    """An argument of a call, given by its position or by its name; None where it is not given."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operation by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    # In the order of the schema, which formulas rely on. An argument without value or default raises, which is right.
    return {argument.name: {**defaults, **named, **node.kwargs}[argument.name] for argument in schema}
