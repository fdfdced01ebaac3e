"""Misuses of ``fully_shard``, ``replicate``, ``materialize`` and of the methods of wrapped modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

import weft
from clear_errors import Misuse, faults
from weft.distributed import fsdp
from weft.distributed.ddp import broadcast_state


def linear(size: int = 4, **options: Any) -> nn.Linear:
    return nn.Linear(size, size, **options)


def meta(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*(parts or [linear(), linear()])).to("meta")


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (4,), mesh_dim_names=names)


def grid() -> DeviceMesh:
    return mesh(2, 2, names=("dp", "tp"))


def policy(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**options)


def sharded() -> Any:
    return weft.fully_shard(linear())


def shard(**options: Any) -> Any:
    """What PyTorch's own wrapper makes."""
    return fully_shard(linear(), **{"mesh": mesh(4), **options})


def replicated() -> Any:
    return weft.replicate(linear())


class Own(nn.Module):
    """A module without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class NotContiguous(nn.Module):
    """A module whose parameter is a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6).t())


def hooked() -> nn.Module:
    module = linear()
    module.weight.register_hook(lambda grad: grad)
    return module


def ddp() -> nn.Module:
    """A module that torch has wrapped. Its constructor would communicate."""
    module = nn.Module.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(module)
    return module


T, V = TypeError, ValueError

FULLY_SHARD = [
    Misuse("weft.fully_shard(None)", "module", "None", T),
    Misuse("weft.fully_shard(3)", "module", "3", T),
    Misuse("weft.fully_shard('model')", "module", "'model'", T),
    Misuse("weft.fully_shard(nn.Linear)", "module", "the class Linear", T),
    Misuse("weft.fully_shard(torch.ones(3))", "module", "tensor of shape (3,)", T),
    Misuse("weft.fully_shard(linear().forward)", "module", "forward", T),
    Misuse("weft.fully_shard([])", "module", "[]", V),
    Misuse("weft.fully_shard([linear(), None])", "module[1]", "None", T),
    Misuse("weft.fully_shard((linear(), linear()))", "module", "of type tuple", T),
    Misuse("weft.fully_shard(linear().parameters())", "module", "generator", T),
    Misuse("m = linear(); weft.fully_shard([m, m])", "module[1]", "module[0]", V),
    Misuse("weft.fully_shard(nn.ModuleList([linear()]))", "ModuleList", "forward", V, "fully_shard(nn.ModuleList())"),
    Misuse("weft.fully_shard(nn.ModuleDict({'a': linear()}))", "ModuleDict", "forward", V),
    Misuse("weft.fully_shard(sharded())", "fully_shard", "FSDPLinear"),
    Misuse("weft.fully_shard(replicated())", "fully_shard", "ReplicateLinear"),
    Misuse("weft.fully_shard(fully_shard(linear()))", "fully_shard", "FSDPLinear"),
    Misuse("weft.fully_shard(linear(), mesh='dp')", "mesh", "'dp'", T),
    Misuse("weft.fully_shard(linear(), mesh=8)", "mesh", "8", T),
    Misuse("weft.fully_shard(linear(), mesh=(2, 2))", "mesh", "(2, 2)", T),
    Misuse("weft.fully_shard(linear(), mesh=dist.group.WORLD)", "mesh", "ProcessGroup", T),
    Misuse(
        "weft.fully_shard(linear(), mesh=mesh(2, 2))",
        "mesh",
        "mesh_dim_names",
        V,
        "fully_shard(linear(), mesh=mesh(2, 2))",
    ),
    Misuse(
        "weft.fully_shard(linear(), mesh=mesh(2, 2, 1, names=('a', 'b', 'c')))",
        "mesh",
        "c=1",
        V,
        "fully_shard(linear(), mesh=mesh(2, 2, 1))",
    ),
    Misuse(
        "weft.fully_shard(linear(), reshard_after_forward='yes')",
        "reshard_after_forward",
        "'yes'",
        V,
        "shard(reshard_after_forward='yes')",
    ),
    Misuse(
        "weft.fully_shard(linear(), reshard_after_forward=2.0)",
        "reshard_after_forward",
        "2.0",
        V,
        "shard(reshard_after_forward=2.0)",
    ),
    Misuse(
        "weft.fully_shard(linear(), reshard_after_forward=3)",
        "reshard_after_forward",
        "3",
        V,
        "shard(reshard_after_forward=3)",
    ),
    Misuse("weft.fully_shard(linear(), reshard_after_forward=0)", "reshard_after_forward", "0", V),
    Misuse("weft.fully_shard(linear(), reshard_after_forward=-2)", "reshard_after_forward", "-2", V),
    Misuse("weft.fully_shard(linear(), reshard_after_forward=8)", "reshard_after_forward", "8", V),
    Misuse("weft.fully_shard(linear(), shard_placement_fn=Shard(0))", "shard_placement_fn", "Shard(dim=0)", T),
    Misuse("weft.fully_shard(linear(), shard_placement_fn=lambda p: 0)", "shard_placement_fn", "0", V),
    Misuse(
        "weft.fully_shard(linear(), shard_placement_fn=lambda p: Replicate())", "shard_placement_fn", "Replicate()", V
    ),
    Misuse(
        "weft.fully_shard(linear(), shard_placement_fn=lambda p: Shard(2))", "shard_placement_fn", "Shard(dim=2)", V
    ),
    Misuse(
        "weft.fully_shard(linear(), shard_placement_fn=lambda p: Shard(-3))", "shard_placement_fn", "Shard(dim=-3)", V
    ),
    Misuse("weft.fully_shard(linear(), shard_placement_fn=lambda: Shard(0))", "shard_placement_fn", "a lambda", T),
    Misuse("weft.fully_shard(linear(), mp_policy='bf16')", "mp_policy", "'bf16'", T),
    Misuse("weft.fully_shard(linear(), mp_policy=torch.bfloat16)", "mp_policy", "torch.bfloat16", T),
    Misuse("weft.fully_shard(linear(), mp_policy={'param_dtype': torch.bfloat16})", "mp_policy", "param_dtype", T),
    Misuse("weft.fully_shard(linear(), mp_policy=None)", "mp_policy", "None", T),
    Misuse(
        "weft.fully_shard(linear(), mp_policy=policy(param_dtype=torch.int32))",
        "mp_policy.param_dtype",
        "torch.int32",
        V,
    ),
    Misuse(
        "weft.fully_shard(linear(), mp_policy=policy(reduce_dtype=torch.int8))",
        "mp_policy.reduce_dtype",
        "torch.int8",
        V,
    ),
    Misuse(
        "weft.fully_shard(linear(), mp_policy=policy(output_dtype=torch.bool))",
        "mp_policy.output_dtype",
        "torch.bool",
        V,
    ),
    Misuse(
        "weft.fully_shard(linear(), mp_policy=policy(param_dtype='bfloat16'))", "mp_policy.param_dtype", "'bfloat16'", T
    ),
    Misuse("weft.fully_shard(linear(), mp_policy=policy(reduce_dtype=float))", "mp_policy.reduce_dtype", "float", T),
    Misuse(
        "weft.fully_shard(linear(), mp_policy=policy(cast_forward_inputs='no'))",
        "mp_policy.cast_forward_inputs",
        "'no'",
        T,
    ),
    Misuse("weft.fully_shard(linear(), offload_policy='cpu')", "offload_policy", "'cpu'", T),
    Misuse("weft.fully_shard(linear(), offload_policy=True)", "offload_policy", "True", T),
    Misuse("m = linear(); weft.fully_shard(m, ignored_params=[m.weight])", "ignored_params", "list", T),
    Misuse("m = linear(); weft.fully_shard(m, ignored_params=m.weight)", "ignored_params", "tensor of shape (4, 4)", T),
    Misuse("weft.fully_shard(linear(), ignored_params={'weight'})", "ignored_params", "'weight'", T),
    Misuse("weft.fully_shard(linear(), ignored_params='weight')", "ignored_params", "'weight'", T),
    Misuse("m = linear(); weft.fully_shard(m, ignored_params=m.parameters())", "ignored_params", "generator", T),
    Misuse("weft.fully_shard(linear(), dp_mesh_dims='dp')", "dp_mesh_dims", "'dp'", T),
    Misuse("weft.fully_shard(linear(), dp_mesh_dims=('dp',))", "dp_mesh_dims", "('dp',)", T),
    Misuse(
        "weft.fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='nope'))",
        "dp_mesh_dims",
        "nope",
        V,
        "fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='nope'))",
    ),
    Misuse("weft.fully_shard(linear(), dp_mesh_dims=dims(shard='dp'))", "dp_mesh_dims", "mesh", V),
    Misuse(
        "weft.fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='dp'))",
        "weight",
        "DTensor",
        V,
        "fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='dp'))",
    ),
    Misuse(
        "weft.fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='dp'), reshard_after_forward=2)",
        "reshard_after_forward",
        "2",
        NotImplementedError,
        "fully_shard(linear(), mesh=grid(), dp_mesh_dims=dims(shard='dp'), reshard_after_forward=2)",
    ),
    Misuse("weft.fully_shard(hooked())", "weight", "hook"),
    Misuse("weft.fully_shard(NotContiguous())", "weight", "(6, 4)", V),
    Misuse("weft.fully_shard(torch.jit.script(linear()))", "module", "ScriptModule", T),
    Misuse("weft.fully_shard(ddp())", "module", "DistributedDataParallel", T),
    Misuse("copy.deepcopy(sharded())", "copy.deepcopy", "FSDPLinear"),
    Misuse("m = weft.fully_shard(meta()); m(torch.ones(2, 4))", "0.weight", "meta device"),
    Misuse("m = weft.fully_shard(meta(*(linear() for _ in range(40)))); m(torch.ones(2, 4))", "70 more", "materialize"),
    Misuse(
        "m = sharded(); m.weight = nn.Parameter(torch.ones(4, 4)); m(torch.ones(2, 4))",
        "weight",
        "tensor of shape (4, 4)",
    ),
]

METHODS = [
    Misuse("sharded().unshard('yes')", "async_op", "'yes'", T),
    Misuse("sharded().set_requires_gradient_sync('no')", "requires_gradient_sync", "'no'", T),
    Misuse("sharded().set_requires_gradient_sync(None)", "requires_gradient_sync", "None", T),
    Misuse("sharded().set_requires_gradient_sync(True, recurse='deep')", "recurse", "'deep'", T),
    Misuse("sharded().set_requires_all_reduce(2)", "requires_all_reduce", "2", T),
    Misuse("sharded().set_gradient_divide_factor(0)", "factor", "0", V),
    Misuse("sharded().set_gradient_divide_factor(-1.0)", "factor", "-1.0", V),
    Misuse("sharded().set_gradient_divide_factor(float('nan'))", "factor", "nan", V),
    Misuse("sharded().set_gradient_divide_factor(float('inf'))", "factor", "inf", V),
    Misuse("sharded().set_gradient_divide_factor('4')", "factor", "'4'", T),
    Misuse("sharded().set_gradient_divide_factor(torch.tensor(2.0))", "factor", "tensor", T),
    Misuse("sharded().set_reduce_scatter_divide_factor(0.0)", "factor", "0.0", V),
    Misuse("sharded().set_force_sum_reduction_for_comms('always')", "enable", "'always'", T),
    Misuse("sharded().set_reduce_scatter_unused_params(1)", "reduce_scatter_unused_params", "1", T),
    Misuse("sharded().set_all_reduce_hook(3)", "hook", "3", T),
    Misuse("sharded().set_all_reduce_hook(None)", "hook", "None", T),
    Misuse(
        "weft.fully_shard(linear(), mesh=grid()).set_all_reduce_hook(print, stream=torch.ones(1))",
        "stream",
        "tensor",
        V,
    ),
    Misuse(
        "sharded().set_reshard_after_forward('yes')",
        "reshard_after_forward",
        "'yes'",
        V,
        "shard().set_reshard_after_forward('yes')",
    ),
    Misuse(
        "sharded().set_reshard_after_forward(2)",
        "reshard_after_forward",
        "2",
        V,
        "shard().set_reshard_after_forward(2)",
    ),
    Misuse("sharded().set_reshard_after_backward('no')", "reshard_after_backward", "'no'", T),
    Misuse("sharded().set_manual_backward_finalization(True)", "enabled", "set_requires_gradient_sync(True)", V),
    Misuse("replicated().set_manual_backward_finalization(1)", "enabled", "1", T),
    Misuse("sharded().finalize_backward(async_op='yes')", "async_op", "'yes'", T),
    Misuse("sharded().set_keep_unsharded_storage(None)", "keep", "None", T),
    Misuse("sharded().set_unshard_in_backward(1)", "unshard_in_backward", "1", T),
    Misuse(
        "sharded().set_modules_to_forward_prefetch([linear()])",
        "modules[0]",
        "Linear",
        V,
        "shard().set_modules_to_forward_prefetch([linear()])",
    ),
    Misuse(
        "sharded().set_modules_to_backward_prefetch([linear()])",
        "modules[0]",
        "Linear",
        V,
        "shard().set_modules_to_backward_prefetch([linear()])",
    ),
    Misuse("sharded().set_modules_to_forward_prefetch(sharded())", "modules", "FSDPLinear", T),
    Misuse("sharded().set_modules_to_forward_prefetch(None)", "modules", "None", T),
    Misuse("sharded().set_modules_to_backward_prefetch(3)", "modules", "3", T),
    Misuse(
        "sharded().set_reduce_scatter_max_input_buffers(0)",
        "max_input_buffers",
        "0",
        V,
        "shard().set_reduce_scatter_max_input_buffers(0)",
    ),
    Misuse(
        "sharded().set_reduce_scatter_max_input_buffers('2')",
        "max_input_buffers",
        "'2'",
        T,
        "shard().set_reduce_scatter_max_input_buffers('2')",
    ),
    Misuse(
        "m = nn.Sequential(sharded()); weft.fully_shard(m); m(torch.ones(2, 4)); m[0].reset_iter_state()",
        "reset_iter_state",
        "root",
    ),
    Misuse(
        "fsdp.register_fsdp_forward_method(sharded(), 'nope')",
        "method_name",
        "'nope'",
        V,
        "torch.distributed.fsdp.register_fsdp_forward_method(shard(), 'nope')",
    ),
    Misuse("fsdp.register_fsdp_forward_method(sharded(), 3)", "method_name", "3", T),
    Misuse("fsdp.register_fsdp_forward_method(None, 'forward')", "module", "None", T),
    Misuse("fsdp.share_comm_ctx([linear()])", "modules[0]", "Linear", V),
    Misuse("fsdp.share_comm_ctx(3)", "modules", "3", T),
]

REPLICATE = [
    Misuse("weft.replicate(None)", "module", "None", T),
    Misuse("weft.replicate(nn.Linear)", "module", "the class Linear", T),
    Misuse("weft.replicate([])", "module", "[]", V),
    Misuse("weft.replicate([linear(), 3])", "module[1]", "3", T),
    Misuse("weft.replicate((linear(),))", "module", "of type tuple", T),
    Misuse("m = linear(); weft.replicate([m, m])", "module[1]", "module[0]", V),
    Misuse("weft.replicate(nn.ModuleList([linear()]))", "ModuleList", "forward", V),
    Misuse("weft.replicate(replicated())", "replicate", "ReplicateLinear"),
    Misuse("weft.replicate(sharded())", "replicate", "FSDPLinear"),
    Misuse("weft.replicate(ddp())", "module", "DistributedDataParallel", T),
    Misuse("weft.replicate(linear(), mesh='dp')", "mesh", "'dp'", T),
    Misuse("weft.replicate(linear(), mesh=4)", "mesh", "4", T),
    Misuse("weft.replicate(linear(), mesh=mesh(2, 2))", "mesh", "one dimension", V),
    Misuse("weft.replicate(linear(), mp_policy='bf16')", "mp_policy", "'bf16'", T),
    Misuse("weft.replicate(linear(), mp_policy=None)", "mp_policy", "None", T),
    Misuse(
        "weft.replicate(linear(), mp_policy=policy(param_dtype=torch.int32))", "mp_policy.param_dtype", "torch.int32", V
    ),
    Misuse("weft.replicate(linear(), mp_policy=policy(output_dtype='half'))", "mp_policy.output_dtype", "'half'", T),
    Misuse(
        "weft.replicate(linear(), offload_policy=CPUOffloadPolicy())",
        "offload_policy",
        "CPUOffloadPolicy",
        NotImplementedError,
    ),
    Misuse("weft.replicate(linear(), offload_policy='cpu')", "offload_policy", "'cpu'", T),
    Misuse("m = linear(); weft.replicate(m, ignored_params=[m.weight])", "ignored_params", "list", T),
    Misuse("weft.replicate(linear(), ignored_params={'weight'})", "ignored_params", "'weight'", T),
    Misuse("weft.replicate(linear(), dp_mesh_dims='dp')", "dp_mesh_dims", "'dp'", T),
    Misuse(
        "weft.replicate(linear(), mesh=grid(), dp_mesh_dims=dims(shard='dp'))",
        "dp_mesh_dims",
        "fully_shard",
        V,
    ),
    Misuse(
        "weft.replicate(linear(), mesh=grid(), dp_mesh_dims=dims(replicate='nope'))",
        "dp_mesh_dims",
        "nope",
        V,
    ),
    Misuse("weft.replicate(linear(), dp_mesh_dims=dims(replicate='dp'))", "dp_mesh_dims", "mesh", V),
    Misuse("weft.replicate(torch.jit.script(linear()))", "module", "ScriptModule", T),
    Misuse("copy.deepcopy(replicated())", "copy.deepcopy", "ReplicateLinear"),
    Misuse("weft.replicate(meta())(torch.ones(2, 4))", "0.weight", "meta device"),
    Misuse("broadcast_state(weft.replicate(meta()))", "0.weight", "meta device"),
    Misuse("broadcast_state(3)", "module", "3", T),
    Misuse("replicated().set_requires_gradient_sync('no')", "requires_gradient_sync", "'no'", T),
    Misuse("replicated().set_requires_all_reduce(None)", "requires_all_reduce", "None", T),
    Misuse("replicated().set_gradient_divide_factor(0)", "factor", "0", V),
    Misuse("replicated().set_gradient_divide_factor(float('nan'))", "factor", "nan", V),
    Misuse("replicated().set_gradient_divide_factor('2')", "factor", "'2'", T),
]

TENSOR_PARALLEL = [
    Misuse("weft.tensor_parallel_plan(nn.Linear, 2)", "module", "the class Linear", T),
    Misuse("weft.tensor_parallel_plan(linear(), '2')", "ranks", "'2'", T),
    Misuse("weft.tensor_parallel_plan(linear(), 0)", "ranks", "0", V),
]

MATERIALIZE = [
    Misuse("weft.materialize(None)", "model", "None", T),
    Misuse("weft.materialize(nn.Linear)", "model", "the class Linear", T),
    Misuse("weft.materialize([meta()])", "model", "[a Sequential]", T),
    Misuse("weft.materialize(meta(), device='quantum')", "device", "'quantum'", V),
    Misuse("weft.materialize(meta(), device='gpu')", "device", "'gpu'", V),
    Misuse("weft.materialize(meta(), device=3.5)", "device", "3.5", T),
    Misuse("weft.materialize(meta(), device=['cpu'])", "device", "['cpu']", T),
    Misuse("weft.materialize(meta(), device='meta')", "device", "'meta'", V),
    Misuse("weft.materialize(meta(), device='cpu:x')", "device", "'cpu:x'", V),
    Misuse("weft.materialize(meta(Own()))", "no reset_parameters", ": 0."),
    Misuse("weft.materialize(meta(*(Own() for _ in range(30))))", "20 more", "reset_parameters"),
]

NAMES = {
    **{"torch": torch, "nn": nn, "weft": weft, "copy": copy, "dist": dist, "fsdp": fsdp},
    **{"Replicate": Replicate, "Shard": Shard, "CPUOffloadPolicy": CPUOffloadPolicy, "dims": weft.DataParallelMeshDims},
    **{"linear": linear, "meta": meta, "mesh": mesh, "grid": grid, "policy": policy, "hooked": hooked, "ddp": ddp},
    **{"sharded": sharded, "replicated": replicated, "shard": shard, "fully_shard": fully_shard, "Own": Own},
    **{"NotContiguous": NotContiguous, "broadcast_state": broadcast_state},
}


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    """Four ranks, of which this is the first."""
    with weft.fake_world(4, target_device="cpu"):
        yield


@pytest.mark.parametrize("misuse", [*FULLY_SHARD, *METHODS, *REPLICATE, *TENSOR_PARALLEL, *MATERIALIZE], ids=str)
def test_the_error_is_clear(misuse: Misuse) -> None:
    if "dp_mesh_dims" in misuse.source and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 has no dp_mesh_dims to compare with")
    assert not faults(misuse, NAMES)
