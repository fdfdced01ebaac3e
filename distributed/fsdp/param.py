"""One sharded parameter: its shard, the gathered tensor while there is one, and its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from weft import tensor_subclasses, torch_adapter
from weft.distributed.fsdp.autograd import Attach, ReduceGradient
from weft.distributed.fsdp.extension import GATHERED_OVER_FEWER, GatherExtension, StartedGather, extends_gather
from weft.distributed.fsdp.layout import ShardLayout
from weft.distributed.fsdp.mesh import Axis
from weft.distributed.fsdp.offload import ShardHome
from weft.distributed.fsdp.reduction import (
    Division,
    ReduceOptions,
    all_reduce,
    choose_division,
    reduce_scatter,
)
from weft.distributed.mixed_precision import has_grad_dtypes, reduces_in_grad_dtype
from weft.distributed.ops import pad_shard, take_shard, unpad_shard
from weft.errors import ParameterReplaced, UnshardableParameter


@dataclass(eq=False, frozen=True)
class ParameterSlot:
    """A place in a module that holds a parameter."""

    module: nn.Module
    name: str

    def get(self) -> Any:
        """The tensor registered under this name: sharded, or gathered while the module is unsharded."""
        return self.module._parameters[self.name]

    def put(self, tensor: torch.Tensor) -> None:
        # Not setattr: it refuses a tensor with a history in the place of a parameter.
        """Register ``tensor`` under this name."""
        self.module._parameters[self.name] = tensor  # type: ignore[assignment]
        if isinstance(self.module, nn.RNNBase):
            torch_adapter.refresh_rnn_weights(self.module)


@dataclass(eq=False)
class ShardedParameter:
    """A parameter, tied ones once.

    Args:
        path: its name in the wrapped module.
        home: the place that decides which object the parameter is, should another be put there.
        sharded: the leaf, a DTensor that holds this rank's shard.
        layout: how it is cut.
        policy: dtypes of gathering and reducing.
        options: how its gradient is reduced; shared with the wrapped module that owns the parameter.
        residence: where the shard lives.
        extension: its own way of gathering, None for parameters whose values are gathered as they are.
        on_gradient: called when backward brings a gradient.
        small: the axis to gather it over again where it was resharded to a smaller world after forward.

    The numbers beside tensors are versions of the shard: what was gathered before an update is not used after
    it.

    Between steps `gathered`, `pending` and `kept` are None, `holders` and `anchors` empty. Only `unreduced`
    (a whole gradient in the reduce dtype) and `unsummed` (a shard of it, not yet all-reduced) live on, while
    gradients accumulate without synchronization.
    """

    path: str
    home: ParameterSlot
    sharded: nn.Parameter
    layout: ShardLayout
    policy: MixedPrecisionPolicy
    options: ReduceOptions
    residence: ShardHome
    extension: GatherExtension | None = None
    small: Axis | None = None
    gathered: torch.Tensor | None = None
    gathered_from: int = 0
    pending: tuple[StartedGather, int] | None = None
    kept: tuple[torch.Tensor, int] | None = None
    unreduced: torch.Tensor | None = None
    unsummed: torch.Tensor | None = None
    on_gradient: Callable[[], None] = lambda: None
    holders: set[object] = field(default_factory=set)
    anchors: weakref.WeakValueDictionary[str, torch.Tensor] = field(default_factory=weakref.WeakValueDictionary)

    # ---- the parameter

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, the tensor inside the DTensor."""
        return torch_adapter.local_tensor(self.sharded)

    @property
    def _version(self) -> int:
        """Grows with every update: eager optimizers update the DTensor, compiled steps the tensor inside."""
        inside = sum(part._version for part in tensor_subclasses.plain_parts(self.shard).values())
        return self.sharded._version + self.shard._version + inside

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that forward sees; only floating-point parameters are cast."""
        dtype = self.sharded.dtype
        return self.policy.param_dtype or dtype if dtype.is_floating_point else dtype

    def adopt(self) -> None:
        """Take over the parameter that stands at home now (after `to`, or `load_state_dict(assign=True)`)."""
        if self.holders or (current := self.home.get()) is self.sharded:
            return
        if not isinstance(current, DTensor):
            raise ParameterReplaced(self.path, current)
        assert isinstance(current, nn.Parameter)
        self.sharded = current
        self.follow_extension()
        self.forget_gathered()

    def follow_extension(self) -> None:
        """Gather by methods that the shard has now: they may have been put on it, or lost with it, after `fully_shard`.

        Raises UnshardableParameter.
        """
        extends = extends_gather(self.shard, self.path)
        if extends == (self.extension is not None):
            return
        if extends and self.small is not None:
            raise UnshardableParameter(self.path, GATHERED_OVER_FEWER)
        self.extension = GatherExtension.of(self.path, self.layout, self.home.module, self.policy) if extends else None
        self.gathered, self.gathered_from = None, 0

    # ---- gathering

    def launch(self) -> None:
        """Start the all-gather, unless the gathered tensor is there or on its way."""
        if self._is_split and self.pending is None and not self._is_current():
            with torch.no_grad():
                self.pending = self._start_gather(), self._version

    def acquire(self, holder: object) -> torch.Tensor:
        """The gathered tensor in the compute dtype, with the gradient's way back where gradients are on.

        It is kept until every holder has called `release`.
        """
        self.holders.add(holder)
        if not self._is_current():
            self.gathered = self.gather()
        self._attach()
        assert self.gathered is not None
        return self.gathered

    def release(self, holder: object, for_backward: bool = False) -> None:
        """Let the gathered tensor go. With `for_backward`, keep a shard over the smaller world."""
        if holder not in self.holders:
            return
        self.holders.discard(holder)
        if self.holders:
            return
        if for_backward and self.small is not None and self.gathered is not None:
            with torch.no_grad():
                whole = self._to_front(_plain(self.gathered))
                self.kept = take_shard(whole, self.small.size, self.small.group_name), self.gathered_from
        self.gathered, self.gathered_from = None, 0

    def end_iteration(self) -> None:
        """Let go of what a backward no longer needs."""
        if self.pending is not None:
            self.pending[0].wait()
        self.pending = self.kept = None
        self.anchors.clear()

    def forget_gathered(self) -> None:
        """Forget everything gathered, whoever holds it."""
        self.end_iteration()
        self.gathered, self.gathered_from = None, 0
        self.holders.clear()

    def forget(self) -> None:
        """Forget everything but the parameter: gradients waiting to be reduced too."""
        self.forget_gathered()
        self.unreduced = self.unsummed = None

    @property
    def _is_split(self) -> bool:
        return self.layout.dim is not None and self.layout.data_parallel.shard_size > 1

    def _is_current(self) -> bool:
        """Whether there is a gathered tensor, of the present values, that autograd may use."""
        if self.gathered is None or self.gathered_from != self._version:
            return False
        return torch.is_inference_mode_enabled() or not self.gathered.is_inference()

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """The whole in the compute dtype; a view of the shard where nothing is split or cast."""
        self.gathered_from = self._version
        if not self._is_split and self.extension is None:
            shard, dtype = self._fetched(), self.compute_dtype
            return self.layout.wrap_whole(shard.detach() if shard.dtype == dtype else shard.to(dtype))
        if self.pending is not None and self.pending[1] != self.gathered_from:
            self.pending[0].wait()
            self.pending = None
        started = self._start_gather() if self.pending is None else self.pending[0]
        self.pending = self.kept = None
        with torch_adapter.below_autograd():
            # Else autograd forbids writing to what forward sees, as a view of memory that it does not know.
            arrived = started.wait()
            whole = arrived.outputs[0]
            if self.extension is None:
                whole = self._from_front(whole.narrow(0, 0, self.layout.shape[self.layout.dim or 0]))
        if self.extension is not None:
            whole = self.extension.finish(self._fetched(), arrived, self.compute_dtype)
        return self.layout.wrap_whole(whole)

    def _start_gather(self) -> StartedGather:
        if self.extension is not None:
            return self.extension.start(self._fetched())
        axis = self.layout.data_parallel.shard
        assert axis is not None
        if self.kept is not None and self.small is not None and self.kept[1] == self._version:
            axis, part = self.small, self.kept[0]
        else:
            size = self.layout.shape[self.layout.dim or 0]
            part = pad_shard(self._to_front(self._fetched()), size, axis.size, self.compute_dtype)
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(part, axis.size, axis.group_name)
        return StartedGather([gathered])

    def _fetched(self) -> torch.Tensor:
        return self.residence.fetch(self.shard, self.path)

    def _attach(self) -> None:
        """Let gradients reach the leaf through the gathered tensor, or not, as the leaf says now."""
        assert self.gathered is not None
        if not torch.is_grad_enabled():
            return
        attached, grad_dtype = self.gathered.grad_fn, self._grad_dtype_of_uses()
        if not self.sharded.requires_grad:
            self.gathered = self.gathered if attached is None else self.gathered.detach()
            return
        if attached is not None and not self._is_out_of_date(attached, grad_dtype):
            return
        # A compiled step may have left it here as a view, which autograd would not let anyone write to.
        is_view = attached is not None or self.gathered._is_view()
        gathered = self.gathered.detach() if is_view else self.gathered
        self.gathered = Attach.apply(self._anchor(), [gathered], self, grad_dtype)
        # So that isinstance(module.weight, nn.Parameter) holds inside forward too.
        self.gathered._is_param = True  # type: ignore[attr-defined]

    def _is_out_of_date(self, attached: Any, grad_dtype: torch.dtype | None) -> bool:
        """Whether a tensor kept from an earlier backward would send gradients to the anchor of that one, or add them up
        in another dtype. Where the user changed the tensor in place, autograd has a node of its own, which is kept.
        """
        if not hasattr(attached, "anchor"):
            return False
        return attached.anchor is not self.anchors.get("") or attached.grad_dtype != grad_dtype

    def _anchor(self) -> torch.Tensor:
        """The anchor of this iteration: until backward is done, or no graph is left that gathered by it."""
        anchor = self.anchors.get("")
        if anchor is None:
            assert self.gathered is not None
            anchor = ReduceGradient.apply(self.sharded, self, self.gathered.dtype)
            self.anchors[""] = anchor
        return anchor

    def _grad_dtype_of_uses(self) -> torch.dtype | None:
        """The dtype to which the gradient of each use of the gathered tensor is cast before they are added up; None:
        they are added as they come. It is the `grad_dtype` that torch's FSDP2 sets: since 2.15 the reduce dtype.

        The cast to a wider one is left to what follows: the reduction, or the addition to the gradients of earlier
        backwards. torch decides that when backward reaches the module. Here it is decided when forward does, as
        autograd wants to know it then: a difference only where settings change, or another backward runs, in between.
        """
        assert self.gathered is not None
        if not has_grad_dtypes(self.policy):
            return self.gathered.dtype
        dtype = self.policy.reduce_dtype or self.sharded.grad_dtype
        follows = self.options.reduce or self.unreduced is not None
        if dtype is None or (follows and self._is_wider(dtype) and not self.layout.may_reduce_outside):
            return None
        return dtype

    def _is_wider(self, dtype: torch.dtype) -> bool:
        compute = self.compute_dtype
        return compute.is_floating_point and dtype.is_floating_point and dtype.itemsize > compute.itemsize

    def _to_front(self, tensor: torch.Tensor) -> torch.Tensor:
        """The split dimension moved to the front, where collectives cut."""
        return tensor.movedim(self.layout.dim, 0) if self.layout.dim else tensor

    def _from_front(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse; contiguous."""
        if not self.layout.dim:
            return tensor
        # Always a copy: whether strides happen to be right already depends on the size of the world.
        return tensor.movedim(0, self.layout.dim).clone(memory_format=torch.contiguous_format)

    # ---- reducing

    def reduce(self, grad: torch.Tensor) -> DTensor | None:
        """The shard of the whole gradient `grad` (of `layout.shape`), averaged over the data-parallel ranks.

        None where the options say to wait; the sum so far is kept then.
        """
        if self.unreduced is not None:
            grad, self.unreduced = self.unreduced + grad, None
        if self.options.reduce and not self.options.reduce_unused:
            return self._reduced(grad)
        self.unreduced = grad.to(self._reduce_dtype(grad))
        return None

    def reduce_leftover(self) -> None:
        """At the end of a backward: reduce what was left for now, or what it did not touch.

        Where parameters without a gradient are reduced too, all of them are reduced here: in one order on all
        ranks.
        """
        if not self.options.reduce or not self.sharded.requires_grad:
            return
        grad, self.unreduced = self.unreduced, None
        if grad is None:
            if not self.options.reduce_unused:
                return
            grad = torch.zeros(self.layout.shape, dtype=self.compute_dtype, device=self.residence.device)
        with torch.no_grad():
            reduced = self._reduced(grad)
        if reduced is not None:
            torch.autograd.backward([self.sharded], [reduced])

    def _reduce_dtype(self, grad: torch.Tensor) -> torch.dtype:
        if reduces_in_grad_dtype(self.policy):
            return self.sharded.grad_dtype or grad.dtype
        # Where both are the same, the policy asks for no cast. An extension may have chosen another dtype of gradients.
        dtype = self.policy.reduce_dtype
        return grad.dtype if dtype is None or dtype == self.policy.param_dtype else dtype

    def _reduced(self, grad: torch.Tensor) -> DTensor | None:
        """The collectives of a gradient; None where the all-reduce is to wait."""
        options, dtype = self.options, self._reduce_dtype(grad)
        division = choose_division(self.layout.data_parallel, dtype, options)
        part = self._scattered(grad, dtype, division)
        if (axis := self.layout.data_parallel.replicate) is not None:
            if self.unsummed is not None:
                part, self.unsummed = part + self.unsummed, None
            if not options.all_reduce:
                self.unsummed = part
                return None
            part = all_reduce(part, division.all_reduce, axis)
        if options.all_reduce_hook is not None:
            options.all_reduce_hook(part)
        return self._finished(part if division.divide_after == 1 else part / division.divide_after)

    def _scattered(self, grad: torch.Tensor, dtype: torch.dtype, division: Division) -> torch.Tensor:
        """`grad` reduced over the shard axis: this rank's padded shard, or all where nothing is split."""
        axis = self.layout.data_parallel.shard
        if self._is_split and axis is not None:
            part = pad_shard(self._to_front(grad), self.layout.rows * axis.size, 1, dtype)
        else:
            # A copy even where nothing is to do: autograd may hand one tensor to several parameters.
            part = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if division.multiply != 1:
            part = part * division.multiply
        if division.divide_before != 1:
            part = part / division.divide_before
        if axis is None or axis.size == 1:
            return part
        return (reduce_scatter if self._is_split else all_reduce)(part, division.scatter, axis)

    def _finished(self, part: torch.Tensor) -> DTensor:
        """The reduced gradient in the dtype and layout of the parameter."""
        axis = self.layout.data_parallel.shard
        if self._is_split and axis is not None:
            size = self.layout.shape[self.layout.dim or 0]
            shard = self._from_front(unpad_shard(part, size, axis.group_name, self.sharded.dtype))
        else:
            shard = part.to(self.sharded.dtype)
        return torch_adapter.dtensor_with(self.residence.keep_gradient(shard), torch_adapter.dtensor_spec(self.sharded))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch_adapter.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
