"""Tensors that get other memory in a step: ``tensor.data = ...``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.record.captured_step import Effect
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.templates import Templates
from weft.capture.record.tracked_storages import is_tensor
from weft.capture.state.containers import StatePlace, TensorData
from weft.errors import UncapturableMutation

# The use count of a storage that one tensor has: the tensor, and the handle with which the count is asked.
_ALONE = 2


def memory_replaced(
    recorder: OpRecorder,
    places_by_id: Mapping[int, StatePlace],
    effects: list[Effect],
    create: Callable[[Any, str], int],
    nodes: list[Any],
    templates: Templates,
) -> set[int]:
    """Add an effect for each tensor that gets other memory by ``tensor.data = ...``; their ids.

    Where nothing else has the memory that it had, nor that of its new value, nobody can tell this from an update of
    its old memory, which the tracer takes instead.

    Args:
        places_by_id: of the tensors of the state.
        create: makes a node an output of the graph, for a path, and returns the output's number.
        nodes: the outputs so far.

    Raises:
        UncapturableMutation: the tensor is an argument.
    """
    leaving = {
        torch_adapter.storage_key(node.meta["val"])
        for node in nodes
        if isinstance(node, torch.fx.Node) and is_tensor(node)
    }
    replaced: set[int] = set()
    for target, source, own, _ in recorder.data_set.values():
        tracked = recorder.storages.of(target)
        alone = torch_adapter.storage_users(target) <= _ALONE
        if tracked.storage is own or (alone and torch_adapter.storage_key(tracked.val) not in leaving):
            continue
        if id(target) not in places_by_id:
            what = "`tensor.data = ...` of an argument whose memory other tensors share"
            raise UncapturableMutation(f"{what}; assign to a clone of the argument")
        path = places_by_id[id(target)].path
        template = templates.of_memory(source, lambda value, path=path: create(value, path), f"{path}.data")
        effects.append(Effect(TensorData(target, path), "data", template))
        replaced.add(id(target))
    return replaced
