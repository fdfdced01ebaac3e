"""When a wrapped module's parameters are gathered and let go: the hooks around its forward and backward."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from weft import torch_adapter
from weft.distributed.fsdp.autograd import AfterBackward
from weft.distributed.fsdp.param import ParameterSlot, ShardedParameter
from weft.distributed.fsdp.reduction import ReduceOptions
from weft.distributed.fsdp.saved import saved_as_recipes
from weft.distributed.mixed_precision import cast_floating, map_tensors, move_to, tensors_in
from weft.errors import MetaParameters

_log = logging.getLogger(__name__)
_STATE = "_weft_fsdp_state"


class Phase(enum.Enum):
    """What a wrapped module is in. Backward: from the gradients of its outputs to those of its inputs."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(eq=False, frozen=True)
class ManagedParameter:
    """A parameter of a wrapped module and the places in it where the parameter stands."""

    param: ShardedParameter
    slots: list[ParameterSlot]

    def put(self, tensor: torch.Tensor) -> None:
        """Register ``tensor`` in every module that uses the parameter."""
        for slot in self.slots:
            slot.put(tensor)


@dataclass(eq=False)
class Context:
    """What the wrapped modules of one tree share.

    Args:
        states: all of them, the root first.
        forward_root: the one whose forward was entered first in the forward that is running.
        callback_queued: whether the running backward will call `after_backward`.
    """

    states: list[ShardedState] = field(default_factory=list)
    forward_root: ShardedState | None = None
    callback_queued: bool = False

    def in_backward(self) -> None:
        """Called from inside a backward: have `after_backward` called at its end."""
        if not self.callback_queued:
            self.callback_queued = True
            torch_adapter.after_backward(self.after_backward)

    @torch_adapter.untraced
    @torch_adapter.outside_transforms()
    def gather_again(self, param: ShardedParameter) -> torch.Tensor:
        """A parameter that autograd needs; inside a backward it is then kept to the end of it at most."""
        if not torch_adapter.in_backward():
            return param.gather() if param.gathered is None else param.gathered
        self.in_backward()
        return param.acquire(self)

    @torch_adapter.untraced
    def after_backward(self) -> None:
        """Finish what no gradient came by for, and let everything go."""
        self.callback_queued = False
        self.forward_root = None
        for state in self.states:
            state.remaining.clear()
            state.after_backward()
        for state in self.states:
            for member in state.members:
                member.param.reduce_leftover()
                member.param.release(self)
                member.param.end_iteration()

    def recover(self) -> None:
        """At a forward: if the last backward was left by an exception, forget what it left."""
        if self.callback_queued and not torch_adapter.in_backward():
            _log.warning("the backward before this forward was not finished: its gradients are forgotten")
            self.reset()

    def reset(self) -> None:
        """Forget an iteration that an exception cut short, the gradients it had accumulated included."""
        self.callback_queued = False
        self.forward_root = None
        for state in self.states:
            state.reset()


class ShardedState:
    """Everything `fully_shard` keeps about one module, or about several that it was given as a list.

    Args:
        modules: the wrapped modules.
        members: their parameters, but for those of modules inside that were wrapped before.
        reshard: whether to let go of parameters after forward; None: everywhere but at the root.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        members: list[ManagedParameter],
        policy: MixedPrecisionPolicy,
        options: ReduceOptions,
        reshard: bool | None,
        device: torch.device,
    ) -> None:
        self.modules = modules
        self.members = members
        self.policy = policy
        self.options = options
        self.reshard = reshard
        self.device = device
        self.phase = Phase.IDLE
        self.is_root = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[ShardedState] = []
        self.backward_prefetch: list[ShardedState] = []
        self.remaining: set[nn.Module] = set()
        self.is_unsharded = False
        self.saving: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        self.context = Context([self])
        self._adopt_nested()
        for member in members:
            member.param.on_gradient = self.in_backward

    def _adopt_nested(self) -> None:
        for module in self.modules:
            for part in module.modules():
                state = state_of(part)
                if state is not None and state.context is not self.context:
                    state.is_root = False
                    self.context.states += [s for s in state.context.states if s not in self.context.states]
        for state in self.context.states:
            state.context = self.context

    # ---- gathered or not

    @property
    def reshard_after_forward(self) -> bool:
        """Whether parameters are resharded after forward; without a setting, everywhere but at the root module."""
        return not self.is_root if self.reshard is None else self.reshard

    @torch_adapter.outside_transforms()
    def launch(self) -> None:
        """Start the all-gathers; `unshard` waits for them."""
        for member in self.members:
            self._check(member)
            member.param.launch()

    @torch_adapter.outside_transforms()
    def unshard(self) -> None:
        """Put the gathered parameters into the modules. They belong to no transform of torch.func: a call inside
        `jvp` or `grad` leaves them for calls outside."""
        self.launch()
        for member in self.members:
            member.put(member.param.acquire(self))
        self.is_unsharded = True

    def shard(self, for_backward: bool = False) -> None:
        """Put the sharded parameters back and let the gathered ones go."""
        if not self.is_unsharded:
            return
        self.is_unsharded = False
        for member in self.members:
            member.put(member.param.sharded)
            member.param.release(self, for_backward)

    def adopt(self) -> None:
        """Take over parameters that were exchanged in the modules since."""
        if self.is_unsharded:
            return
        for member in self.members:
            member.param.adopt()
            member.put(member.param.sharded)

    def _check(self, member: ManagedParameter) -> None:
        if not self.is_unsharded and member.slots[0].get() is not member.param.sharded:
            self.adopt()
        if member.param.shard.is_meta:
            raise MetaParameters([m.param.path for m in self.members if m.param.shard.is_meta])
        member.param.follow_extension()

    # ---- forward

    @torch_adapter.untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather, cast the inputs. A forward that backward runs again leaves parameters as they are."""
        self.context.recover()
        again, entered = self.phase is Phase.BACKWARD, self.phase is Phase.FORWARD
        if self.context.forward_root is None and not again:
            self.context.forward_root = self
            if self.device.type != "cpu":
                args, kwargs = move_to((args, kwargs), self.device)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        self.unshard()
        self._start_saving(module, again)
        if again:
            return args, kwargs
        self.phase = Phase.FORWARD
        if not self.remaining:
            self.remaining.update(self.modules)
        if entered:
            return args, kwargs
        for state in self.forward_prefetch:
            state.launch()
        return self._watch_inputs(args, kwargs)

    @torch_adapter.untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Let go, if so asked, cast the output, and have backward gather again."""
        self._stop_saving(len(self.saving) - 1)
        if self.phase is Phase.BACKWARD:
            return self._cast_output(output)
        self.remaining.discard(module)
        is_last = self.context.forward_root is self
        if is_last:
            self.context.forward_root = None
        if self.remaining:
            return self._cast_output(output)
        output = self._finish_forward(output)
        if is_last:
            for state in reversed(self.context.states):
                if state is not self and state.remaining:
                    output = state._finish_forward(output)
        return output

    def unwind(self, depth: int) -> None:
        """Clean up after an exception left a forward that had begun at `depth`."""
        self._stop_saving(depth)
        if depth or self.phase is Phase.BACKWARD:
            return
        if self.context.forward_root is self:
            self.context.forward_root = None
            for state in self.context.states:
                if state.remaining:
                    state._abandon_forward()
        self._abandon_forward()

    def _abandon_forward(self) -> None:
        self.phase = Phase.IDLE
        self.remaining.clear()
        # Checkpointing leaves a second forward by an exception as soon as it has what it wants.
        if not torch_adapter.in_backward():
            self.shard()

    def _finish_forward(self, output: Any) -> Any:
        self.remaining.clear()
        kept_for_backward = torch.is_grad_enabled() or self.reshard is False
        if not torch_adapter.in_backward() and (self.reshard_after_forward or not kept_for_backward):
            self.shard(for_backward=torch.is_grad_enabled())
        self._watch_outputs(output)
        self.phase = Phase.IDLE
        return self._cast_output(output)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    def _start_saving(self, module: nn.Module, again: bool) -> None:
        # torch.func forbids these hooks. What autograd saves then keeps the gathered parameters until backward.
        wanted = self.reshard_after_forward and torch.is_grad_enabled() and not torch_adapter.in_transform()
        # torch's composable `checkpoint` has hooks on the module itself. In forward they are inside of these, and see
        # all that autograd saves. When the module runs again they are outside, and must see as much.
        if wanted and not (again and torch_adapter.checkpoints_itself(module)):
            hooks = saved_as_recipes([m.param for m in self.members], self.context.gather_again)
            hooks.__enter__()
            self.saving.append(hooks)
        else:
            self.saving.append(None)

    def _stop_saving(self, depth: int) -> None:
        while len(self.saving) > depth:
            hooks = self.saving.pop()
            if hooks is not None:
                hooks.__exit__()

    # ---- backward

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Have backward let go once it has got past the module."""
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return args, kwargs
        passed = iter(AfterBackward.apply(self.after_backward, *inputs))
        return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, (args, kwargs))

    def _watch_outputs(self, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.before_backward)

    def in_backward(self) -> None:
        """Called from inside a backward: have it finished at its end."""
        self.context.in_backward()

    @torch_adapter.untraced
    def before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Gather again, for what was saved and for forwards that run again; the gradient passes."""
        if self.phase is Phase.BACKWARD:
            return grad
        self.phase = Phase.BACKWARD
        self.in_backward()
        if self.unshard_in_backward:
            with torch.enable_grad():
                self.unshard()
        for state in self.backward_prefetch:
            state.launch()
        return grad

    @torch_adapter.untraced
    def after_backward(self) -> None:
        """Let go; called when the gradients of the inputs are there, and at the end of backward."""
        self.phase = Phase.IDLE
        if self.reshard_after_backward:
            self.shard()

    def reset(self) -> None:
        """Forget everything of a broken iteration."""
        self._stop_saving(0)
        self.shard()
        self.phase = Phase.IDLE
        self.remaining.clear()
        for member in self.members:
            member.param.forget()


def state_of(module: nn.Module) -> ShardedState | None:
    """The state that `fully_shard` gave to `module`, None for a module that it was not called on."""
    return module.__dict__.get(_STATE)


def set_state(module: nn.Module, state: ShardedState) -> None:
    """Make `state` that of `module`."""
    module.__dict__[_STATE] = state


def states_in(modules: Iterator[nn.Module]) -> list[ShardedState]:
    """The states of the wrapped modules among `modules`, each once, in order."""
    return list({state: None for module in modules if (state := state_of(module)) is not None})
