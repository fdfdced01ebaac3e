"""Which results of a program eager would hand out as other tensor objects, or as those of the other kind."""

from __future__ import annotations

from collections.abc import Iterable
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


def inference_results(inputs: Iterable[torch.Tensor], results: dict[int, bool]) -> list[tuple[int, bool]]:
    """The entries of ``results``, by number whether the value is an inference tensor in eager; none where the programs
    of a step, which run in the mode of its caller, can only make ordinary tensors, as eager does."""
    ambient = torch.is_inference_mode_enabled()
    return [*results.items()] if ambient or any(results.values()) or any(map(_is_inference, inputs)) else []


def of_kind(tensor: torch.Tensor, inference: bool) -> torch.Tensor:
    """The tensor, or one in its memory: an inference tensor or an ordinary one."""
    if tensor.is_inference() is inference:
        return tensor
    layout = tensor.storage_offset(), tensor.size(), tensor.stride()
    with torch.inference_mode(inference), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *layout)
        made = made.conj() if tensor.is_conj() else made
        return torch.ops.aten._neg_view.default(made) if tensor.is_neg() else made


def _is_inference(tensor: torch.Tensor) -> bool:
    return tensor.is_inference()


def _geometry(node: torch.fx.Node) -> Any:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return node
    return torch_adapter.storage_key(val), val.dtype, *map(str, (val.storage_offset(), *val.shape, *val.stride()))
