"""Steps captured on the CPU, rewritten as if they had been captured on a GPU, or back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft import torch_adapter
from weft.capture.graph import StepGraph

Node = torch.fx.Node


def retarget(step: StepGraph, device: str, keep: Callable[[Node], bool] = lambda node: False) -> StepGraph:
    """Give every fake tensor and every device argument of `step` another device; nodes that `keep` stay where they
    are. Fakes go on sharing storages. Changes `step`."""
    env = torch_adapter.fake_mode_of(step.graph).shape_env
    mode = FakeTensorMode(shape_env=env)
    storages: dict[tuple[int, str], torch.UntypedStorage] = {}

    def moved(val: Any, to: str) -> Any:
        if isinstance(val, (list, tuple)):
            return [moved(item, to) for item in val]
        if not isinstance(val, torch.Tensor):
            return val
        old = val.untyped_storage()
        with mode:
            if (old._cdata, to) not in storages:
                storages[old._cdata, to] = torch.empty(old.nbytes(), dtype=torch.uint8, device=to).untyped_storage()
            storage = storages[old._cdata, to]
            empty = torch.empty(0, dtype=val.dtype, device=to)
            return empty.set_(storage, val.storage_offset(), val.size(), val.stride())

    for node in step.graph.nodes:
        if keep(node):
            node.meta["val"] = moved(node.meta.get("val"), "cpu")
            continue
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"], device)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
    return step
