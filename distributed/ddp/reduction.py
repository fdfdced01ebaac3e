"""Average each gradient over the replicas, one all-reduce a parameter, while backward is still running.

The all-reduce is issued by a post-accumulate-grad hook and waited for at the end of backward, so that it
overlaps with what is left of backward.

Ranks pair their all-reduces by the order of issue, so all must issue them in one order. That in which gradients are
accumulated differs between ranks: an LSTM over a packed sequence gives its biases before or after its weights, as the
lengths of the rank's sequences decide. So parameters are reduced in the reverse of the order in which they are
registered, as DistributedDataParallel's first buckets are: a gradient that is there before its turn waits. What is left
at the end of backward, because a parameter took no part in it, follows then in the same order.

Where the user registered a hook on the same parameter after the wrap, it is issued and waited for at once instead: a
hook registered before `replicate` sees the local gradient, one registered after it the averaged one.

The gradient is multiplied with 1/n before the sum, as torch's DistributedDataParallel does: one order of
operations on every backend (gloo has no average), and no overflow in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft import errors, torch_adapter
from weft.distributed.ddp.slots import ModuleSlot, parameters


@dataclass(eq=False)
class _Pending:
    """An all-reduce on its way: `result` is to replace the contents of `local`, the gradient of `param`."""

    param: nn.Parameter
    path: str
    local: torch.Tensor
    result: torch.Tensor


class GradientReduction:
    """Averages the gradients of the parameters that it is attached to over the process group `group_name`.

    `dtype` is what gradients travel in (None: their own). A gradient that several backwards added up without
    synchronization is averaged as a whole. A parameter that took no part in a backward keeps its gradient,
    None included, and sends nothing: that set must be the same on all ranks, unless `reduce_unused` is set. Then every
    trainable parameter is reduced at the end of backward, in one order on all ranks, with zeros for what is missing.
    `hook` is called with every averaged gradient, in `dtype`, which it may change in place.

    It lives as long as one of the parameters, wherever that has gone since, and keeps none of them: what a hook holds,
    its parameter holds, where Python's garbage collector cannot see it.
    """

    def __init__(self, group_name: str, divide_factor: float, dtype: torch.dtype | None) -> None:
        self.enabled = True
        self.divide_factor = divide_factor
        self.reduce_unused = False
        self.hook: Callable[[torch.Tensor], None] | None = None
        self._group_name = group_name
        self._dtype = dtype
        # The numbers of the hooks, with the addresses of their parameters: these change where torch converts a module
        # by a swap, which it refuses for a parameter that has weak references.
        self._hooks: dict[int, int] = {}
        self._pending: dict[nn.Parameter, _Pending] = {}
        self._at_end = False
        # The paths of trainable parameters in the order of their turns, and how many had theirs in this backward.
        self._turns: list[str] = []
        self._turn = 0
        self._ready: dict[str, nn.Parameter | None] = {}  # None: reduced before its turn
        self._in_backward = False

    def attach(self, slots: Sequence[ModuleSlot]) -> None:
        """Put the hook on every trainable parameter that is in a slot now and has none.

        Raises UnsupportedParameter for a parameter that is a DTensor.
        """
        trainable = [(path, param) for path, param in parameters(slots) if param.requires_grad]
        turns = [path for path, _ in reversed(trainable)]
        # In a backward, checkpointing runs the forward again, while casts may be in the places of parameters.
        if turns != self._turns and not torch_adapter.in_backward():
            self._turns = turns
        for path, param in trainable:
            hooks = torch_adapter.post_accumulate_hooks(param)
            own = next(filter(self._hooks.__contains__, hooks or ()), None)
            if own is None:
                if torch_adapter.is_dtensor(param):
                    raise errors.UnsupportedParameter(path, "is a DTensor")
                own = param.register_post_accumulate_grad_hook(self._hook(path)).id
            elif self._hooks[own] != torch_adapter.address(param):
                torch_adapter.register_listed_hooks(param, hooks)
            self._hooks[own] = torch_adapter.address(param)

    def _hook(self, path: str):
        def reduce_gradient(param: torch.Tensor) -> None:
            assert isinstance(param, nn.Parameter)
            if self.enabled and not self.reduce_unused:
                self._accumulated(param, path)

        return reduce_gradient

    def _accumulated(self, param: nn.Parameter, path: str) -> None:
        """Issue the all-reduces whose turn has come now that the gradient of `param` is there."""
        if not self._in_backward:
            self._in_backward = True
            torch_adapter.after_backward(self._issue_left)
        at_once = next(reversed(torch_adapter.post_accumulate_hooks(param))) not in self._hooks
        self._ready[path] = None if at_once else param
        if at_once:
            self._finish(self._issue(param, path))
        while self._turn < len(self._turns) and self._turns[self._turn] in self._ready:
            self._issue_ready(self._turns[self._turn])
            self._turn += 1

    def _issue_left(self) -> None:
        """At the end of a backward: issue what waits for the turn of a parameter that took no part in it."""
        turns = {path: at for at, path in enumerate(self._turns)}
        # One that has no turn yet was frozen when a forward last looked.
        for path in sorted(self._ready, key=lambda path: (turns.get(path, len(turns)), path)):
            self._issue_ready(path)
        self._end_turns()

    def _issue_ready(self, path: str) -> None:
        if (param := self._ready.pop(path)) is not None:
            self._finish_at_end(self._issue(param, path))

    def _end_turns(self) -> None:
        self._ready.clear()
        self._turn, self._in_backward = 0, False

    def reduce_all_at_end(self, slots: Sequence[ModuleSlot]) -> None:
        """Called inside a backward: with `reduce_unused`, have all parameters in `slots` reduced at its end."""
        if self.enabled and self.reduce_unused and not self._at_end:
            self._at_end = True
            torch_adapter.after_backward(lambda: self._reduce_all(slots))

    @torch.no_grad()
    def _reduce_all(self, slots: Sequence[ModuleSlot]) -> None:
        self._at_end = False
        for path, param in parameters(slots):
            if param.requires_grad:
                # A gradient that an earlier backward averaged is the same on all ranks, and so is its average.
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                self._finish_at_end(self._issue(param, path))

    def recover(self) -> None:
        """At a forward outside of any backward: nothing is left to do from a backward that an exception cut short."""
        self._at_end = False
        self._end_turns()

    def reset(self, slots: Sequence[ModuleSlot]) -> None:
        """Forget an iteration: the all-reduces on their way, and all gradients of the parameters in `slots`."""
        for pending in self._pending.values():
            torch.ops._c10d_functional.wait_tensor(pending.result)
        self._pending.clear()
        self._at_end = False
        self._end_turns()
        for _, param in parameters(slots):
            param.grad = None

    @torch.no_grad()
    def _issue(self, param: nn.Parameter, path: str) -> _Pending:
        local = param.grad
        if local is None:
            raise errors.GradientLost(path)
        if local.requires_grad:
            raise errors.GradientWithGraph(path)
        if local.layout is not torch.strided:
            raise errors.UnsupportedParameter(path, f"has a gradient of layout {local.layout}")
        share = local.to(self._dtype or local.dtype) * (1 / self.divide_factor)
        result = torch.ops._c10d_functional.all_reduce(share, "sum", self._group_name)
        pending = self._pending[param] = _Pending(param, path, local, result)
        return pending

    def _finish_at_end(self, pending: _Pending) -> None:
        torch_adapter.after_backward(lambda: self._finish(pending))

    @torch.no_grad()
    def _finish(self, pending: _Pending) -> None:
        average = torch.ops._c10d_functional.wait_tensor(pending.result)
        # A backward inside a backward (reentrant checkpointing) may have added to the same gradient since,
        # and then the all-reduce that it issued covers both; this one is out of date.
        if self._pending.get(pending.param) is not pending:
            return
        del self._pending[pending.param]
        if pending.param.grad is not pending.local:
            raise errors.GradientLost(pending.path)
        if self.hook is not None:
            self.hook(average)
        pending.local.copy_(average)
