"""Give memory and first values to a model that was built on the meta device, one module at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.distributed.ddp import ReplicateModule, broadcast_state
from weft.distributed.fsdp.mesh import mesh_device
from weft.distributed.fsdp.param import ParameterSlot, ShardedParameter
from weft.distributed.fsdp.state import states_in
from weft.errors import CannotInitialize
from weft.short_tracebacks import shortens_tracebacks

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


@shortens_tracebacks
def materialize(model: M, device: torch.device | str | None = None) -> M:
    """Allocate what of `model` is on the meta device, let each module initialize its own; return the model.

    Modules are visited in the order in which they were built: the submodules of a module in their order, then
    the module itself. Each gets whole parameters on `device` and its `reset_parameters` (or
    `_reset_parameters`) is called; then only this rank's shards are kept. Given the same seed on all ranks,
    the values are those of a model built on `device` without sharding. A tied parameter has the values of its
    first place in that order. Replicated modules then take the values of their first rank. Make the optimizer
    after: parameters are new objects.

    At most one module is whole at a time. But a `reset_parameters` may reach into submodules, as
    torch.nn.MultiheadAttention's does: those stay whole until it has run.

    Args:
        model: sharded, replicated or neither; parameters and buffers that have memory are left alone.
        device: by default that of the mesh, or the CPU where nothing is sharded.

    Raises InvalidArgument and InvalidArgumentType. Raises CannotInitialize at once, for modules that have parameters
    on the meta device while neither they nor a module around them have a `reset_parameters`; at the end, for parameters
    and buffers that none has filled.
    """
    checks = ArgumentChecks("weft.materialize")
    checks.kind("model", model, nn.Module, "a torch.nn.Module", "Pass the model, built under torch.device('meta')")
    target = None if device is None else _checked_device(checks, device)
    lacking = list(_without_reset(model, "", False))
    if lacking:
        raise CannotInitialize(lacking, "modules have parameters on the meta device and no reset_parameters")
    work = _Materialization(_device_of(model) if target is None else target, _meta_places(model))
    with torch.no_grad():
        work.visit(model, "", within_reset=False)
    for state in states_in(model.modules()):
        for member in state.members:
            member.param.home.put(work.done.get(member.param, member.param.sharded))
        state.adopt()
    if work.untouched:
        raise CannotInitialize(work.untouched, "tensors have memory but no values; no reset_parameters fills them")
    if any(isinstance(module, ReplicateModule) for module in model.modules()):
        broadcast_state(model)
    return model


def _checked_device(checks: ArgumentChecks, device: Any) -> torch.device:
    """`device` as a device that has memory."""
    allowed, remedy = "a torch.device that has memory, or its name", 'Write "cuda", "cuda:0" or "cpu", or leave it out'
    checks.kind("device", device, (str, int, torch.device), allowed, remedy)
    try:
        found = torch.device(device)
    except RuntimeError:  # no device has this name
        raise checks.invalid("device", device, allowed, remedy) from None
    if found.type == "meta":
        raise checks.invalid("device", device, allowed, remedy)
    return found


@dataclass(eq=False)
class _Place:
    """Where a tensor on the meta device stands.

    Args:
        key: what the tensors of tied places have in common.
        whole: the tensor that stands there while it is initialized.
    """

    module: nn.Module
    name: str
    is_buffer: bool
    path: str
    meta: torch.Tensor
    key: Any
    whole: torch.Tensor | None = None

    def get(self) -> Any:
        return (self.module._buffers if self.is_buffer else self.module._parameters)[self.name]

    def put(self, tensor: Any) -> None:
        if self.is_buffer:
            self.module._buffers[self.name] = tensor
        else:
            ParameterSlot(self.module, self.name).put(tensor)

    def allocate(self, device: torch.device) -> None:
        local = torch_adapter.local_tensor(self.meta) if isinstance(self.meta, DTensor) else self.meta
        if hasattr(local, "__tensor_flatten__"):  # a subclass stays one; every one that can be sharded knows new_zeros
            memory = local.new_zeros(self.meta.shape, device=device)
        else:
            memory = torch.empty(self.meta.shape, dtype=self.meta.dtype, device=device)
        self.whole = memory if self.is_buffer else nn.Parameter(memory, self.meta.requires_grad)
        self.put(self.whole)

    def kept(self) -> torch.Tensor:
        """What this rank keeps of the tensor that stands there: its shard, or all of it."""
        tensor = self.get()
        if not isinstance(self.meta, DTensor):
            return tensor
        shard: DTensor
        if isinstance(self.key, ShardedParameter):
            layout, whole = self.key.layout, tensor.detach()
            if layout.model_parallel is not None:
                whole = torch_adapter.local_tensor(distribute_tensor(whole, *layout.model_parallel, src_data_rank=None))
            shard = layout.wrap(self.key.residence.keep(layout.cut(whole)))
        else:
            shard = distribute_tensor(tensor.detach(), self.meta.device_mesh, self.meta.placements, src_data_rank=None)
        return nn.Parameter(shard, self.meta.requires_grad)


@dataclass(eq=False)
class _Materialization:
    """The walk over a model. `done`: what was kept, by key; `untouched`: paths without values."""

    device: torch.device
    places: dict[nn.Module, list[_Place]]
    done: dict[Any, torch.Tensor] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    _visited: set[nn.Module] = field(default_factory=set)
    _whole: dict[Any, _Place] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    def visit(self, module: nn.Module, path: str, within_reset: bool) -> None:
        """Initialize `module` and what is in it. `within_reset`: a module around it will be reset."""
        if module in self._visited:
            return
        self._visited.add(module)
        reset = _reset_of(module) if any(part in self.places for part in module.modules()) else None
        if reset is not None and not within_reset and module not in self.places:
            _log.info(
                "%s is whole while its reset_parameters runs: it may reach into submodules",
                path or "the model",
            )
        for name, child in module.named_children():
            self.visit(child, f"{path}.{name}" if path else name, within_reset or reset is not None)
        tied = self._allocate(self.places.get(module, []))
        if reset is not None:
            writes = torch_adapter.StorageWrites()
            with writes, torch.device(self.device):
                reset()
            self._written |= writes.storages
        for place in tied:
            first = self._whole.get(place.key)
            place.put(self.done[place.key] if first is None else first.get())
        if not within_reset:
            self._finish()

    def _allocate(self, places: list[_Place]) -> list[_Place]:
        """Give memory to `places`; return those tied to one that has it.

        They get memory too, so that their module draws the same random numbers as when it was built; it is
        not kept.
        """
        tied = []
        for place in places:
            place.allocate(self.device)
            if place.key in self._whole or place.key in self.done:
                tied.append(place)
            else:
                self._whole[place.key] = place
        return tied

    def _finish(self) -> None:
        """Keep this rank's part of what is whole."""
        for key, place in self._whole.items():
            if place.get() is place.whole and torch_adapter.storage_key(place.get()) not in self._written:
                self.untouched.append(place.path)
            self.done[key] = place.kept()
            place.put(self.done[key])
            place.whole = None
        self._whole.clear()
        self._written.clear()


def _meta_places(model: nn.Module) -> dict[nn.Module, list[_Place]]:
    """Where tensors on the meta device stand, by module."""
    sharded = {
        (slot.module, slot.name): member.param
        for state in states_in(model.modules())
        for member in state.members
        for slot in member.slots
    }
    found: dict[nn.Module, list[_Place]] = {}
    for path, module in model.named_modules():
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and _is_meta(tensor):
                    where = f"{path}.{name}" if path else name
                    key = sharded.get((module, name), tensor)
                    found.setdefault(module, []).append(_Place(module, name, is_buffer, where, tensor, key))
    return found


def _without_reset(module: nn.Module, path: str, within_reset: bool) -> Iterator[str]:
    """Paths of modules with parameters on the meta device that nothing would initialize."""
    within_reset = within_reset or _reset_of(module) is not None
    if not within_reset and any(p is not None and _is_meta(p) for p in module._parameters.values()):
        yield path or "the model"
    for name, child in module.named_children():
        yield from _without_reset(child, f"{path}.{name}" if path else name, within_reset)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _device_of(model: nn.Module) -> torch.device:
    for state in states_in(model.modules()):
        return state.device
    for param in model.parameters():
        if isinstance(param, DTensor):
            return mesh_device(param.device_mesh)
    return torch.device("cpu")
