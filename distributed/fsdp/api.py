"""`fully_shard`: what a user calls to shard a module."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.distributed.arguments import check_ignored, check_mesh, check_policies, wrapped_modules
from weft.distributed.ddp import ReplicateModule
from weft.distributed.fsdp.extension import GATHERED_OVER_FEWER, GatherExtension, extends_gather
from weft.distributed.fsdp.layout import layout_of
from weft.distributed.fsdp.mesh import Axis, DataParallelMesh, DataParallelMeshDims, data_parallel_mesh, mesh_device
from weft.distributed.fsdp.module import FSDPModule, wrap_class
from weft.distributed.fsdp.offload import ShardHome
from weft.distributed.fsdp.param import ParameterSlot, ShardedParameter
from weft.distributed.fsdp.reduction import ReduceOptions
from weft.distributed.fsdp.state import ManagedParameter, ShardedState, set_state, state_of, states_in
from weft.errors import (
    HookBeforeSharding,
    InvalidReshardSize,
    ReshardSizeWithMeshDims,
    UnshardableParameter,
)
from weft.short_tracebacks import shortens_tracebacks

_M = TypeVar("_M", bound=nn.Module)
Placement = Callable[[nn.Parameter], object]  # what it returns is checked: see fully_shard

_ARGUMENTS = ArgumentChecks("fully_shard")

# Whole parameters that were sharded: what is tied to one by a module wrapped later is recognized by it.
_sharded_from = WeakTensorKeyDictionary()


@overload
def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> _M:
    """Shard one module; return it."""


@overload
def fully_shard(
    module: list[_M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Placement | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[_M]:
    """Shard the modules of a list together; return the list."""


@shortens_tracebacks
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Placement | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen; torch's own signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> nn.Module | list[nn.Module]:
    """Shard the parameters of `module` over the ranks of a mesh, in place; return it.

    The meaning of every argument is that of torch.distributed.fsdp.fully_shard. Parameters of modules inside
    that were wrapped before stay theirs. Each parameter becomes a DTensor that holds this rank's part;
    forward sees whole tensors. Every parameter has collectives of its own: one all-gather before forward, one
    more before backward where it was let go in between, one reduce-scatter of its gradient. Grouping them is
    for the compiler. The class becomes `FSDP<Name>`, a subclass of FSDPModule and of the module's class.

    Beyond torch: 0-dimensional parameters (every rank holds them), sizes that do not divide in any dimension,
    several dtypes in one module, and parameters tied between modules that are wrapped separately.

    A tensor subclass that defines `fsdp_pre_all_gather` and `fsdp_post_all_gather` decides what is gathered of it
    (weft.distributed.fsdp.extension).

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: 1-D (shard) or 2-D (replicate, shard); by default all ranks.
        reshard_after_forward: True lets go of parameters after forward and gathers them again in backward; False
            keeps them; None is True but for the outermost wrapped module; a number gathers them again over
            that many ranks, each of which keeps its part of them until then. With None and gradients off, the
            outermost lets go too: there is no backward to keep them for.
        shard_placement_fn: from parameter to the Shard(dim) to split it by (None: Shard(0)), or to torch's
            ShardPlacementResult, which names a mesh as well.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: CPUOffloadPolicy keeps shards, their gradients and so the optimizer's state on the host.
        ignored_params: left as they are.
        dp_mesh_dims: torch's DataParallelMeshDims: `mesh` is that of every kind of parallelism, parameters are
            DTensors on it, and these dimensions of it are for data.

    Raises InvalidArgument, InvalidArgumentType, InvalidMesh, NoProcessGroup, InvalidShardPlacement,
    InvalidReshardSize, ReshardSizeWithMeshDims, UnshardableParameter, UnsupportedPolicy, HookBeforeSharding,
    AlreadyWrapped, ContainerWithoutForward.
    """
    modules = wrapped_modules(_ARGUMENTS, module, (FSDPModule, ReplicateModule))
    check_mesh(_ARGUMENTS, mesh, dp_mesh_dims)
    check_policies(_ARGUMENTS, mp_policy, offload_policy, offloads=True)
    ignored = check_ignored(_ARGUMENTS, ignored_params)
    _check_resharding(reshard_after_forward)
    if shard_placement_fn is not None:
        _check_placement_fn(shard_placement_fn)
    axes = data_parallel_mesh(mesh, dp_mesh_dims)
    device = mesh_device(axes.mesh)
    residence = ShardHome(device, offload_policy)
    small, reshard = _resharding(reshard_after_forward, axes)
    options = ReduceOptions()
    managed = _managed_modules(modules)
    members = []
    for slots, path in _parameters(managed, ignored):
        param = _already_sharded(slots[0].get(), modules)
        if param is None:
            param = _shard(slots, path, axes, shard_placement_fn, mp_policy, options, residence)
            if small is not None and param.extension is not None:
                raise UnshardableParameter(path, GATHERED_OVER_FEWER)
            param.small = small
        members.append(ManagedParameter(param, slots))
    for member in members:
        member.put(member.param.sharded)
    _move_buffers(managed, device)
    state = ShardedState(modules, members, mp_policy, options, reshard, device)
    for one in modules:
        set_state(one, state)
        one.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
        one.register_forward_hook(state.after_forward)
    _shard_for_state_dicts(state)
    wrap_class(modules)
    return module


@shortens_tracebacks
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module gather parameters as `forward` does; nothing on other modules.

    Raises InvalidArgumentType, and InvalidArgument where the module has no such method.
    """
    checks = ArgumentChecks("register_fsdp_forward_method")
    checks.kind("module", module, nn.Module, "a torch.nn.Module", "Pass the sharded module that has the method")
    checks.kind("method_name", method_name, str, "the name of a method", 'Write its name as text: "encode"')
    state = state_of(module)
    if state is None:
        return
    if not callable(getattr(module, method_name, None)):
        allowed = f"the name of a method of {type(module).__name__}"
        raise checks.invalid("method_name", method_name, allowed, "Choose one that the module's class defines")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def sharded_method(*args: Any, **kwargs: Any) -> Any:
        depth = len(state.saving)
        try:
            args, kwargs = state.before_forward(module, args, kwargs)
            return state.after_forward(module, args, method(*args, **kwargs))
        except BaseException:
            state.unwind(depth)
            raise

    setattr(module, method_name, sharded_method)


def _check_resharding(value: Any) -> None:
    allowed = "True, False, None or a whole number of ranks"
    _ARGUMENTS.kind("reshard_after_forward", value, (bool, int, type(None)), allowed, "Pass one of these")


def _check_placement_fn(function: Any) -> None:
    remedy = "Write lambda parameter: Shard(0), or leave it out"
    _ARGUMENTS.function_or_callable("shard_placement_fn", function, remedy)
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise _ARGUMENTS.wrong_type("shard_placement_fn", function, "a function of one parameter", remedy) from None
    except ValueError:  # a function written in C, whose arguments Python does not know
        return


def _resharding(value: bool | int | None, axes: DataParallelMesh) -> tuple[Axis | None, bool | None]:
    """The smaller axis to gather over again, if one is asked for, and whether to reshard after forward."""
    if value is None or isinstance(value, bool):
        return None, value
    size = axes.shard_size
    if axes.whole is not None:
        raise ReshardSizeWithMeshDims(value)
    if not 1 <= value <= size or size % value:
        raise InvalidReshardSize(value, size)
    if value in (1, size):
        return None, value != 1
    # Lists, because a view of the mesh's tensor would be a fake tensor in a fake world, without ranks to read.
    rows = axes.mesh.mesh.tolist()
    ranks = rows if isinstance(rows[0], int) else [rank for row in rows for rank in row]
    parts = [ranks[start : start + value] for start in range(0, len(ranks), value)]
    return Axis.of(DeviceMesh(axes.mesh.device_type, parts), 1), True


def _managed_modules(roots: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The modules under `roots`, children first, and their paths, without trees that were wrapped before."""
    found: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        if module in seen or (module not in roots and _is_wrapped(module)):
            return
        seen.add(module)
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)
        found[module] = path

    for root in roots:
        visit(root, "")
    return found


def _is_wrapped(module: nn.Module) -> bool:
    return state_of(module) is not None or isinstance(module, ReplicateModule)


def _parameters(modules: dict[nn.Module, str], ignored: set[nn.Parameter]) -> list[tuple[list[ParameterSlot], str]]:
    """Each parameter's places in `modules` and the path of the first."""
    found: dict[nn.Parameter, tuple[list[ParameterSlot], str]] = {}
    for module, path in modules.items():
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                slots, _ = found.setdefault(param, ([], f"{path}.{name}" if path else name))
                slots.append(ParameterSlot(module, name))
    return list(found.values())


def _already_sharded(param: nn.Parameter, roots: Sequence[nn.Module]) -> ShardedParameter | None:
    """The parameter that `param` is tied to, if a module wrapped before has it."""
    if (tied := _sharded_from.get(param)) is not None:
        return tied
    if isinstance(param, DTensor):
        for state in states_in(part for root in roots for part in root.modules()):
            for member in state.members:
                if member.param.sharded is param:
                    return member.param
    return None


@torch.no_grad()
def _shard(
    slots: list[ParameterSlot],
    path: str,
    axes: DataParallelMesh,
    placement_fn: Placement | None,
    policy: MixedPrecisionPolicy,
    options: ReduceOptions,
    residence: ShardHome,
) -> ShardedParameter:
    param = slots[0].get()
    if not param.is_contiguous():
        raise UnshardableParameter(path, f"is not contiguous (shape {tuple(param.shape)}, strides {param.stride()})")
    if torch_adapter.registered_hooks(param):
        raise HookBeforeSharding(path)
    placement: Any = None if placement_fn is None else placement_fn(param)
    if placement is not None and not isinstance(placement, Shard) and hasattr(placement, "mesh_info"):
        info, placement = placement.mesh_info, placement.placement
        axes = DataParallelMesh.of(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)
    layout = layout_of(param, placement, axes, path)
    shard = layout.cut(torch_adapter.local_tensor(param) if isinstance(param, DTensor) else param.detach())
    extension = None
    if extends_gather(shard, path):
        extension = GatherExtension.of(path, layout, slots[0].module, policy)
    sharded = nn.Parameter(layout.wrap(residence.keep(shard)), requires_grad=param.requires_grad)
    result = ShardedParameter(path, slots[0], sharded, layout, policy, options, residence, extension)
    _sharded_from[param] = result
    return result


def _move_buffers(modules: dict[nn.Module, str], device: torch.device) -> None:
    for module in modules:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.data.to(device)


def _shard_for_state_dicts(state: ShardedState) -> None:
    """State dicts hold shards, also between a forward and its backward."""
    # A submodule that outlives the model, as a loop variable does, must not keep the shards of the others.
    weak_state = weakref.ref(state)

    def shard(*_: Any) -> None:
        if (alive := weak_state()) is not None:
            alive.shard()

    for module in {slot.module: None for member in state.members for slot in member.slots}:
        module.register_state_dict_pre_hook(shard)
        module.register_load_state_dict_pre_hook(shard)
