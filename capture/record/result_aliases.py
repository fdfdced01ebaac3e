"""Which results of a program eager would hand out as tensor objects of their own."""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_adapter


def result_aliases(inputs: list[torch.fx.Node], values: list[Any]) -> list[int]:
    """Numbers of the values in the memory of an input, or at the place of a value before them.

    A program may return one tensor object for two such values. It may make a view of an input without grad mode, and
    torch raises where such a view is used after the next update of the input: these are detached before they leave.
    """
    known = {_geometry(node) for node in inputs}
    memory = {torch_adapter.storage_key(val) for node in inputs if isinstance(val := node.meta["val"], torch.Tensor)}
    found = []
    for at, node in enumerate(values):
        if isinstance(node, torch.fx.Node) and isinstance(node.meta["val"], torch.Tensor):
            where = _geometry(node)
            if where in known or torch_adapter.storage_key(node.meta["val"]) in memory:
                found.append(at)
            known.add(where)
    return found


def _geometry(node: torch.fx.Node) -> Any:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return node
    return torch_adapter.storage_key(val), val.dtype, *map(str, (val.storage_offset(), *val.shape, *val.stride()))
