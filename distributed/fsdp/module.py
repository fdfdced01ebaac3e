"""The class that a sharded module is an instance of, besides its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import torch
from torch import nn

from weft.argument_checks import ArgumentChecks
from weft.distributed.arguments import check_divide_factor
from weft.distributed.fsdp.state import ShardedState, state_of, states_in
from weft.distributed.settings_without_effect import SettingsWithoutEffect, say_once
from weft.errors import CannotCopyWrapped, NotTheRoot, WeftError
from weft.short_tracebacks import methods_shorten_tracebacks, shorten_traceback, shortens_tracebacks

_ARGUMENTS = ArgumentChecks("FSDPModule")


@methods_shorten_tracebacks
class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, state: ShardedState) -> None:
        self._state: ShardedState | None = state

    def wait(self) -> None:
        """Wait for the all-gathers; then the gathered parameters are in the module."""
        if self._state is not None:
            self._state.unshard()
            self._state = None


@methods_shorten_tracebacks
class FSDPModule(SettingsWithoutEffect):
    """A module wrapped by `weft.fully_shard`: an instance of `FSDP<Name>`, its own class and this one.

    The methods have the names, arguments and meanings of torch.distributed.fsdp.FSDPModule. It is no subclass
    of that: torch's pipeline schedules and memory tracker reach from an instance of torch's class into
    private parts that have no counterpart here, and would fail or, worse, half work. Methods that steer how
    torch overlaps communication say once, in the log, that they do nothing: the compiler decides that.
    """

    _checks = _ARGUMENTS

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Indexing a container makes a new one of the same class; the new one is not sharded.
        return cast("Self", cls.__bases__[1](*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state()
        depth = len(state.saving)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            state.unwind(depth)
            if isinstance(error, WeftError):
                shorten_traceback(error)
            raise

    # ---- gathering by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters and put them into it; not those of wrapped modules inside.

        With `async_op` only start, and return a handle to wait on; forward waits by itself.
        """
        _ARGUMENTS.boolean("async_op", async_op)
        state = self._state()
        if async_op:
            state.launch()
            return UnshardHandle(state)
        state.unshard()
        return None

    def reshard(self) -> None:
        """Let go of the gathered parameters; not those of wrapped modules inside."""
        self._state().shard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget that iteration, accumulated gradients included.

        Raises NotTheRoot on a module that is not the root.
        """
        state = self._state()
        if not state.is_root:
            raise NotTheRoot("reset_iter_state")
        state.context.reset()

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without, they add up, whole and in the reduce dtype."""
        _ARGUMENTS.boolean("requires_gradient_sync", requires_gradient_sync)
        for state in self._states(recurse):
            state.options.reduce = requires_gradient_sync
            state.options.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """For HSDP: whether reduce-scattered gradients are all-reduced too; without, their shards add up."""
        _ARGUMENTS.boolean("requires_all_reduce", requires_all_reduce)
        for state in self._states(recurse):
            state.options.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor` instead of the number of ranks."""
        check_divide_factor(_ARGUMENTS, factor)
        self._state().options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Only sums on the wire, with a division of its own after."""
        _ARGUMENTS.boolean("enable", enable)
        self._state().options.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient take part in the reduction with zeros."""
        _ARGUMENTS.boolean("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for state in self._states(recurse):
            state.options.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook` with every reduced gradient before the last division; it may change it in place.

        Parameters are reduced one by one, so it is called once for each of them, with this rank's (padded)
        shard in the reduce dtype. `stream` is ignored: the hook is part of the step like any other code.
        """
        _ARGUMENTS.function_or_callable("hook", hook, "Pass a function of one tensor; without a hook, do not call this")
        state = self._state()
        if stream is not None and any(m.param.layout.data_parallel.replicate is not None for m in state.members):
            raise _ARGUMENTS.invalid("stream", stream, "None with a mesh of two dimensions (HSDP)", "Leave stream out")
        state.options.all_reduce_hook = hook

    # ---- when parameters are gathered

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to let go of parameters after forward and gather them again in backward."""
        _ARGUMENTS.boolean("reshard_after_forward", reshard_after_forward)
        for state in self._states(recurse):
            state.reshard = reshard_after_forward
            for member in state.members:
                member.param.small = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to let go of parameters after backward; without, the next forward finds them gathered."""
        _ARGUMENTS.boolean("reshard_after_backward", reshard_after_backward)
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether to gather before backward; False where backward needs none of the parameters."""
        _ARGUMENTS.boolean("unshard_in_backward", unshard_in_backward)
        self._state().unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Wrapped modules whose all-gathers are started when this module has gathered in forward."""
        self._state().forward_prefetch = _sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Wrapped modules whose all-gathers are started when this module has gathered in backward."""
        self._state().backward_prefetch = _sharded(modules)

    # ----

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `to`, `cuda`, `to_empty` and the like do: to the shards."""
        state = self._state()
        state.shard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        state.adopt()
        return result

    def _state(self) -> ShardedState:
        state = state_of(_as_module(self))
        assert state is not None
        return state

    def _states(self, recurse: bool) -> list[ShardedState]:
        _ARGUMENTS.boolean("recurse", recurse)
        module = _as_module(self)
        return states_in(module.modules() if recurse else iter([module]))


@shortens_tracebacks
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Torch's way to let several roots share streams; there are none here to share."""
    _sharded(modules)
    say_once("share_comm_ctx", "the compiler decides when a collective runs")


_classes: dict[type, type] = {}


def wrap_class(modules: Iterable[nn.Module]) -> None:
    """Make each module an instance of `FSDP<Name>`."""
    for module in modules:
        cls = type(module)
        if cls not in _classes:
            body = {"__deepcopy__": _no_deepcopy, "__module__": cls.__module__}
            _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
        module.__class__ = _classes[cls]


@shortens_tracebacks
def _no_deepcopy(self: nn.Module, _memo: Any) -> Any:
    raise CannotCopyWrapped(type(self).__name__)


def _as_module(module: Any) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module


def _sharded(modules: Any) -> list[ShardedState]:
    """The states of a list of sharded modules."""
    allowed, remedy = "a list of sharded modules", "Pass modules that weft.fully_shard has wrapped, as a list"
    _ARGUMENTS.kind("modules", modules, (list, tuple), allowed, remedy)
    for at, module in enumerate(modules):
        _ARGUMENTS.kind(f"modules[{at}]", module, FSDPModule, "a sharded module", remedy)
    return [module._state() for module in modules]
