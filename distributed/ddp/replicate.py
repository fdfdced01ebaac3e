"""`weft.replicate`: plain data parallelism. Every rank holds the whole module; gradients are averaged.

Names, arguments and meanings are those of torch's `replicate`
(torch.distributed._composable.replicate_with_fsdp), and `no_sync` is that of DistributedDataParallel. Python
only: no buckets, no C++ reducer; every collective of a step is a functional collective, so that a step can be
captured as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import weft.gloo  # noqa: F401 - broadcasts on the CPU of dtypes that gloo does not know
from weft import errors, torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.distributed.arguments import (
    check_divide_factor,
    check_ignored,
    check_mesh,
    check_mesh_dim_names,
    check_policies,
    default_mesh,
    wrapped_modules,
)
from weft.distributed.ddp.precision import ParameterCast
from weft.distributed.ddp.reduction import GradientReduction
from weft.distributed.ddp.slots import buffers, managed_modules, parameter_slots, parameters
from weft.distributed.mixed_precision import cast_floating, reduces_in_grad_dtype, tensors_in
from weft.distributed.settings_without_effect import SettingsWithoutEffect, say_once
from weft.short_tracebacks import methods_shorten_tracebacks, shortens_tracebacks

if TYPE_CHECKING:
    from weft.distributed.fsdp.mesh import DataParallelMeshDims

_ARGUMENTS = ArgumentChecks("replicate")
_METHODS = ArgumentChecks("ReplicateModule")
_ALWAYS_WHOLE = "the parameters of a replicated module are whole on every rank"
_STATE = "_weft_replicate_state"
_M = TypeVar("_M", bound=nn.Module)


@overload
def replicate(
    module: _M,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    forward_sync_buffers: bool = ...,
) -> _M:
    """Replicate one module; return it."""


@overload
def replicate(
    module: list[_M],
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    forward_sync_buffers: bool = ...,
) -> list[_M]:
    """Replicate the modules of a list together; return the list."""


@shortens_tracebacks
def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen; torch's own signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    forward_sync_buffers: bool = True,
) -> nn.Module | list[nn.Module]:
    """Replicate `module` (or each module of a list) over a mesh, in place; return it.

    Parameters and buffers take the values of the mesh's first rank, at once, or, where any is still on the
    meta device, when `broadcast_state` is called after they were given memory. Parameters stay plain
    `nn.Parameter`s. After each backward every gradient is the average over the mesh. A module inside that was
    replicated or sharded before keeps its own settings, parameters and buffers. The class becomes
    `Replicate<Name>`, a subclass of ReplicateModule and of the module's class.

    Args:
        mesh: 1-D; by default all ranks. With `dp_mesh_dims`, one of any dimension.
        mp_policy: `param_dtype` for forward and backward, `reduce_dtype` for the all-reduce (by default
            `param_dtype`, in torch 2.15 the parameter's own), `output_dtype` for the outputs, and whether to cast
            the inputs of forward. Gradients arrive in the parameters' own dtype.
        ignored_params: neither broadcast, nor cast, nor reduced.
        dp_mesh_dims: torch's DataParallelMeshDims with `replicate` names only: what to average over.
        forward_sync_buffers: DistributedDataParallel's argument (`broadcast_buffers` in torch 2.11): give all ranks the
            first rank's buffers, such as BatchNorm's statistics, before the first forward and after each one with
            gradients. torch's `replicate` never does.

    Raises InvalidArgument, InvalidArgumentType, InvalidMesh, NoProcessGroup, AlreadyWrapped, UnsupportedParameter (a
    DTensor), UnsupportedPolicy (offloading), ContainerWithoutForward.
    """
    roots = wrapped_modules(_ARGUMENTS, module, (SettingsWithoutEffect,))
    check_mesh(_ARGUMENTS, mesh, dp_mesh_dims)
    check_policies(_ARGUMENTS, mp_policy, offload_policy)
    ignored = check_ignored(_ARGUMENTS, ignored_params)
    _ARGUMENTS.boolean("forward_sync_buffers", forward_sync_buffers)
    state = _State(roots, _replica_mesh(mesh, dp_mesh_dims), mp_policy, ignored, forward_sync_buffers)
    state.install()
    for root in roots:
        root.__dict__[_STATE] = state
        root.__class__ = _replicated_class(type(root))
    return module


@shortens_tracebacks
def broadcast_state(module: nn.Module) -> None:
    """Give every replicated module in `module` the parameters and buffers of its mesh's first rank.

    `replicate` does this by itself unless the module was on the meta device; then call it once there is
    memory. Collective: all ranks of the mesh call it. Raises NotMaterialized where something is still on the
    meta device.
    """
    checks = ArgumentChecks("broadcast_state")
    checks.kind("module", module, nn.Module, "a torch.nn.Module", "Pass the model that weft.replicate has wrapped")
    for state in _states_in(module.modules()):
        state.broadcast()


@methods_shorten_tracebacks
class ReplicateModule(SettingsWithoutEffect):
    """What a replicated module is an instance of, besides its own class; with the methods of FSDPModule."""

    _checks = _METHODS

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Indexing a container makes a new one of the same class; the new one is not replicated.
        return cast("Self", cls.__bases__[1](*args, **kwargs))

    @property
    def _replicate_state(self) -> _State:
        return self.__dict__[_STATE]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward averages gradients; without, they add up locally until one backward averages the
        sum.
        """
        _METHODS.boolean("requires_gradient_sync", requires_gradient_sync)
        for state in self._states(recurse):
            state.reduction.enabled = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same as `set_requires_gradient_sync`: the all-reduce is all there is to synchronize."""
        _METHODS.boolean("requires_all_reduce", requires_all_reduce)
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor` instead of the number of replicas."""
        check_divide_factor(_METHODS, factor)
        self._replicate_state.reduction.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient take part in the reduction, with zeros.

        For ranks that use different parameters. All gradients are then reduced at the end of backward.
        """
        _METHODS.boolean("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for state in self._states(recurse):
            state.reduction.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` with every averaged gradient, in the reduce dtype; it may change it in place.

        Parameters are reduced one by one, so it is called once for each of them. `stream` is ignored: the hook is
        part of the step like any other code.
        """
        remedy = "Pass a function of one tensor; without a hook, do not call this"
        _METHODS.function_or_callable("hook", hook, remedy)
        self._replicate_state.reduction.hook = hook

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget that iteration. Gradients become None, earlier ones too."""
        for state in self._states(recurse=True):
            state.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here add up gradients without averaging; afterwards each module is as before."""
        states = self._states(recurse=True)
        before = [state.reduction.enabled for state in states]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, enabled in zip(states, before, strict=True):
                state.reduction.enabled = enabled

    def unshard(self, async_op: bool = False) -> None:
        """Does nothing: replicated parameters are always whole. Logged once; for code written for FSDPModule."""
        say_once("unshard", _ALWAYS_WHOLE)

    def reshard(self) -> None:
        """Does nothing, as :meth:`unshard`."""
        say_once("reshard", _ALWAYS_WHOLE)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Does nothing, as :meth:`unshard`."""
        say_once("set_reshard_after_forward", _ALWAYS_WHOLE)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Does nothing, as :meth:`unshard`."""
        say_once("set_reshard_after_backward", _ALWAYS_WHOLE)

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Does nothing: there is no all-gather to prefetch. Logged once."""
        say_once("set_modules_to_forward_prefetch", _ALWAYS_WHOLE)

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Does nothing, as :meth:`set_modules_to_forward_prefetch`."""
        say_once("set_modules_to_backward_prefetch", _ALWAYS_WHOLE)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Does nothing, as :meth:`unshard`."""
        say_once("set_unshard_in_backward", _ALWAYS_WHOLE)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: gradients are always summed on the wire, and divided before. Logged once."""
        say_once("set_force_sum_reduction_for_comms", _ALWAYS_WHOLE)

    def _states(self, recurse: bool) -> list[_State]:
        assert isinstance(self, nn.Module)
        _METHODS.boolean("recurse", recurse)
        return _states_in(self.modules() if recurse else [self])


class _State:
    """What one call of `replicate` manages, and the hooks that do it."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        ignored: set[nn.Parameter],
        forward_sync_buffers: bool,
    ) -> None:
        # Also what `fully_shard` wrapped, which has this base class too: it reduces its gradients itself.
        nested = [m for root in roots for m in root.modules() if isinstance(m, SettingsWithoutEffect)]
        self._roots = roots
        self._outer: _State | None = None
        for state in _states_in(nested):
            state._outer = self if state._outer is None else state._outer
        self._policy = policy
        self._device_type = mesh.device_type
        self._group_name = mesh.get_group(0).group_name
        self._modules = managed_modules(roots, nested)  # type: ignore[arg-type]
        self._slots = parameter_slots(self._modules, ignored)
        self._broadcast_done = False
        self._sync_buffers = forward_sync_buffers
        self._buffers_are_stale = True
        self._cast: ParameterCast | None = None
        reduce_dtype = None if reduces_in_grad_dtype(policy) else policy.reduce_dtype or policy.param_dtype
        self.reduction = GradientReduction(self._group_name, mesh.size(), reduce_dtype)

    def install(self) -> None:
        self.reduction.attach(self._slots)
        if self._on_meta() is None:
            self._move()
            self.broadcast()
        if self._policy.param_dtype is not None:
            self._cast = ParameterCast(self._slots, self._modules, self._policy.param_dtype)
            self._cast.install()
        for root in self._roots:
            root.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            root.register_forward_hook(self._after_forward)

    @torch.no_grad()
    def broadcast(self) -> None:
        if (path := self._on_meta()) is not None:
            raise errors.NotMaterialized(path)
        for tensor in self._tensors():
            self._take_from_first_rank([tensor])
        self.reduction.attach(self._slots)
        self._broadcast_done = True

    def _take_from_first_rank(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give tensors of one dtype and device the values that they have on the first rank, in one collective."""
        sent = tensors[0].detach().contiguous() if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
        received = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.broadcast(sent, 0, self._group_name)
        )
        for tensor, values in zip(tensors, received.reshape(-1).split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def _update_buffers(self) -> None:
        """Broadcast the buffers before the first forward, and after each with gradients that are to be averaged.

        The rule is DistributedDataParallel's. It does not look at the buffers' values: all ranks broadcast, or none.
        Without buffers nothing is noted either: a guard on it would capture the step again after each evaluation.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in buffers(self._modules) if self._sync_buffers else ():
            alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        if not alike:
            return
        if self._buffers_are_stale:
            with torch.no_grad():
                for tensors in alike.values():
                    self._take_from_first_rank(tensors)
        self._buffers_are_stale = torch.is_grad_enabled() and self.reduction.enabled

    def reset(self) -> None:
        if self._cast is not None:
            self._cast.reset()
        self.reduction.reset(self._slots)

    @shortens_tracebacks
    def _before_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._broadcast_done:
            raise errors.NotMaterialized(self._on_meta())
        self.reduction.attach(self._slots)
        if not torch_adapter.in_backward():  # else checkpointing runs the same forward again
            self.reduction.recover()
            self._update_buffers()
        dtype = self._policy.param_dtype
        if dtype is None or not self._policy.cast_forward_inputs:
            return None
        return cast_floating((args, kwargs), dtype)

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self.reduction.reduce_unused and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._reduce_all_at_end)
        return output if self._policy.output_dtype is None else cast_floating(output, self._policy.output_dtype)

    def _reduce_all_at_end(self, _grad: torch.Tensor) -> None:
        # All modules of the tree, in one order: on this rank, some may take no part in backward.
        top = self
        while top._outer is not None:
            top = top._outer
        for state in _states_in(part for root in top._roots for part in root.modules()):
            state.reduction.reduce_all_at_end(state._slots)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for _, param in parameters(self._slots):
            yield param
        yield from buffers(self._modules)

    def _on_meta(self) -> str | None:
        """The path of a parameter without memory, or "a buffer" where only a buffer has none, or None."""
        for path, param in parameters(self._slots):
            if param.is_meta:
                return path
        return "a buffer" if any(buffer.is_meta for buffer in buffers(self._modules)) else None

    def _move(self) -> None:
        """Move what is on another kind of device to the mesh's, as torch's wrappers do."""
        for tensor in self._tensors():
            if tensor.device.type != self._device_type:
                tensor.data = tensor.data.to(self._device_type)


def _states_in(modules: Iterable[nn.Module]) -> list[_State]:
    """The states of the replicated modules among `modules`, each once, in order."""
    return list({m._replicate_state: None for m in modules if isinstance(m, ReplicateModule)})


def _replica_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> DeviceMesh:
    if mesh is None:
        return default_mesh("replicate", ("replicate",))
    if dp_mesh_dims is not None:
        if dp_mesh_dims.shard is not None:
            raise errors.InvalidMesh("replicate", mesh, "dp_mesh_dims names a dimension to shard over; use fully_shard")
        names = dp_mesh_dims.replicate
        names = (names,) if isinstance(names, str) else tuple(names)
        check_mesh_dim_names("replicate", mesh, names)
        return torch_adapter.flat_submesh(mesh, names)
    if mesh.ndim != 1:
        raise errors.InvalidMesh("replicate", mesh, "it must have one dimension. Take one of them, mesh['name']")
    return mesh


_replicated_classes: dict[type, type] = {}


def _replicated_class(cls: type) -> type:
    if cls not in _replicated_classes:
        body = {"__deepcopy__": _no_deepcopy, "__module__": cls.__module__}
        _replicated_classes[cls] = type(f"Replicate{cls.__name__}", (ReplicateModule, cls), body)
    return _replicated_classes[cls]


@shortens_tracebacks
def _no_deepcopy(self: nn.Module, _memo: Any) -> NoReturn:
    raise errors.CannotCopyWrapped(type(self).__name__)
