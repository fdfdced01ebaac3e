"""The arguments that `fully_shard` and `replicate` have in common: their checks, and the default mesh."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from weft.argument_checks import ArgumentChecks
from weft.errors import AlreadyWrapped, ContainerWithoutForward, InvalidMesh, NoProcessGroup, UnsupportedPolicy

_MODULES = "a torch.nn.Module, or a list of them"
_MESH_DIMS = "a torch.distributed.fsdp.DataParallelMeshDims, or None"
_WRAPPED_BY_TORCH = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, TorchFSDPModule)


def wrapped_modules(checks: ArgumentChecks, module: Any, wrapped: tuple[type, ...]) -> tuple[nn.Module, ...]:
    """The modules that the argument `module` of a wrapper names, one or a list.

    Args:
        wrapped: classes of modules that this wrapper cannot wrap, because they are wrapped already.

    Raises InvalidArgumentType, InvalidArgument, AlreadyWrapped, ContainerWithoutForward.
    """
    if not isinstance(module, list):
        _check_module(checks, "module", module, wrapped)
        return (module,)
    if not module:
        raise checks.invalid("module", module, "a list of at least one module", "Pass the modules to wrap together")
    for at, one in enumerate(module):
        _check_module(checks, f"module[{at}]", one, wrapped)
        first = next(i for i, other in enumerate(module) if other is one)
        if first != at:
            allowed = f"another module than module[{first}]"
            raise checks.invalid(f"module[{at}]", one, allowed, "Name each module of a list once")
    return tuple(module)


def _check_module(checks: ArgumentChecks, argument: str, module: Any, wrapped: tuple[type, ...]) -> None:
    if isinstance(module, wrapped):
        raise AlreadyWrapped(checks.function, type(module).__name__)
    if isinstance(module, _WRAPPED_BY_TORCH):
        remedy = "Pass the module inside it: one wrapper averages gradients, two would do it twice"
        raise checks.wrong_type(argument, module, "a module that torch has not wrapped", remedy)
    if isinstance(module, torch.jit.ScriptModule):
        remedy = "Wrap the module before torch.jit.script, or leave torch.jit.script out"
        raise checks.wrong_type(argument, module, "a module of Python code, which takes hooks", remedy)
    if not isinstance(module, nn.Module):
        called = isinstance(module, type) and issubclass(module, nn.Module)
        remedy = f"Create one: {module.__name__}(...)" if called else "Pass the model"
        raise checks.wrong_type(argument, module, _MODULES, remedy)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ContainerWithoutForward(checks.function, type(module).__name__)


def check_mesh(checks: ArgumentChecks, mesh: Any, dp_mesh_dims: Any) -> None:
    """`mesh` is a DeviceMesh or None, `dp_mesh_dims` is None or names dimensions of a mesh that is given.

    Raises InvalidArgumentType, InvalidArgument.
    """
    if mesh is not None:
        remedy = 'Make one with torch.distributed.init_device_mesh("cuda", (world_size,)); mesh["dp"] is a part of one'
        checks.kind("mesh", mesh, DeviceMesh, "a torch.distributed.DeviceMesh, or None for all ranks", remedy)
    if dp_mesh_dims is None:
        return
    if not (hasattr(dp_mesh_dims, "shard") and hasattr(dp_mesh_dims, "replicate")):
        remedy = 'Write DataParallelMeshDims(shard="dp"), or leave it out and pass the mesh of the data-parallel ranks'
        raise checks.wrong_type("dp_mesh_dims", dp_mesh_dims, _MESH_DIMS, remedy)
    if mesh is None:
        allowed = "given together with mesh, whose dimensions it names"
        raise checks.invalid("dp_mesh_dims", dp_mesh_dims, allowed, "Pass mesh= too")


def check_mesh_dim_names(wrapper: str, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """`dp_mesh_dims` has at least one name, and names dimensions of `mesh`. Raises InvalidMesh."""
    known = mesh.mesh_dim_names or ()
    there = ", ".join(map(repr, known)) or "none: create the mesh with mesh_dim_names="
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"dp_mesh_dims names {unknown}, which it does not have" if unknown else "dp_mesh_dims names no dimension"
        raise InvalidMesh(wrapper, mesh, f"{what}. Choose names of its dimensions, which are {there}")


def check_policies(checks: ArgumentChecks, mp_policy: Any, offload_policy: Any, offloads: bool = False) -> None:
    """`mp_policy` names floating-point dtypes; `offload_policy` is the default, or CPUOffloadPolicy where `offloads`.

    Raises InvalidArgumentType, InvalidArgument, UnsupportedPolicy.
    """
    remedy = "Write weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16), or leave it out to keep all dtypes"
    checks.kind("mp_policy", mp_policy, MixedPrecisionPolicy, "a weft.MixedPrecisionPolicy", remedy)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        allowed, remedy = (
            "a floating-point torch.dtype, or None",
            "Write torch.bfloat16, torch.float16 or torch.float32",
        )
        if dtype is not None:
            checks.kind(f"mp_policy.{name}", dtype, torch.dtype, allowed, remedy)
            if not dtype.is_floating_point:
                raise checks.invalid(f"mp_policy.{name}", dtype, allowed, remedy)
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # of torch 2.15
        raise UnsupportedPolicy(checks.function, "mp_policy.param_dtype_override_fn")
    checks.boolean("mp_policy.cast_forward_inputs", mp_policy.cast_forward_inputs)
    checks.kind("offload_policy", offload_policy, OffloadPolicy, "an OffloadPolicy", "Leave it out")
    if type(offload_policy) is not OffloadPolicy and not (offloads and isinstance(offload_policy, CPUOffloadPolicy)):
        raise UnsupportedPolicy(checks.function, f"offload_policy={offload_policy}")


def check_ignored(checks: ArgumentChecks, ignored: Any) -> set[nn.Parameter]:
    """The parameters that a wrapper leaves alone.

    Raises InvalidArgumentType.
    """
    if ignored is None:
        return set()
    allowed = "a set of parameters, or None"
    checks.kind("ignored_params", ignored, Set, allowed, "Write {model.head.weight} or set(model.head.parameters())")
    for one in ignored:
        remedy = f"Pass the parameter itself: {{model.get_parameter({one!r})}}" if isinstance(one, str) else "Pass them"
        checks.kind("ignored_params", one, torch.Tensor, allowed, remedy)
    return set(ignored)


def check_divide_factor(checks: ArgumentChecks, factor: Any) -> None:
    """`factor` is a finite number more than 0. Raises InvalidArgumentType, InvalidArgument."""
    remedy = "Pass what the sum of all ranks' gradients is to be divided by, such as the number of ranks"
    checks.number("factor", factor, above=True, remedy=remedy)


def default_mesh(wrapper: str, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of all ranks, on an accelerator if there is one. A script that torchrun started gets its process group.

    Raises NoProcessGroup.
    """
    if not torch.distributed.is_initialized():
        if "RANK" not in os.environ:
            raise NoProcessGroup(wrapper)
        torch.distributed.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (torch.distributed.get_world_size(),), mesh_dim_names=names)
