"""The forward of a module computes with the local tensors of its DTensor parameters.

``state_dict``, optimizers and checkpoints see the DTensors, which stay registered. While forward runs, an attribute of
the same name in the module's ``__dict__``, which Python finds first, holds this rank's part. So no operation of forward
or backward is dispatched through DTensor, which takes the host 10 to 25 microseconds each.

Hooks keep nothing of their own and take the module that they are called with: those of a deep copy work on the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.distributed.dtensor.collectives import sum_gradient, to_local_sum_gradient
from weft.distributed.dtensor.conversions import to_local

_MISSING = object()
_NAME = "_weft_forward"


@dataclass
class LocalForward:
    """One call of a module's forward, from its input hook to its output hook.

    Attributes:
        attributes: what the module's ``__dict__`` had under the names that are set for this call.
        kept: values that the input hook keeps for the output hook.
    """

    module: nn.Module
    attributes: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the module until its forward ends."""
        self.attributes.setdefault(name, self.module.__dict__.get(name, _MISSING))
        self.module.__dict__[name] = value

    def end(self) -> None:
        """Put back what the module had."""
        for name, value in self.attributes.items():
            if value is _MISSING:
                self.module.__dict__.pop(name, None)
            else:
                self.module.__dict__[name] = value


Prepare = Callable[[LocalForward, Any], Any]
Finish = Callable[[LocalForward, Any], Any]


def compute_locally(
    module: nn.Module, mesh: DeviceMesh, prepare: Prepare, finish: Finish, partial_gradients: tuple[str, ...] = ()
) -> None:
    """Register hooks on ``module``: forward takes ``prepare(call, first argument)`` and local parameters, and the call
    returns ``finish(call, result of forward)``.

    Args:
        partial_gradients: replicated parameters whose gradient on a rank comes from a part of the batch or sequence.
            It is summed over the ranks of ``mesh``.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = LocalForward(module)
        call.set(_NAME, call)
        # `fully_shard` over another mesh dimension has put the gathered parameter there, if it wraps the module too.
        for name, parameter in module._parameters.items():
            if parameter is not None:
                call.set(name, local(parameter, mesh if name in partial_gradients else None))
        if args:
            return (prepare(call, args[0]), *args[1:]), kwargs
        first = next(iter(kwargs), None)
        return args, kwargs if first is None else kwargs | {first: prepare(call, kwargs[first])}

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        call = module.__dict__.get(_NAME)
        if call is None:  # another hook raised before this one's turn
            return None
        try:
            return None if result is None else finish(call, result)
        finally:
            call.end()

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)  # without a result where forward raised


def local(parameter: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's part of a parameter, whose gradient becomes a DTensor like it; summed over ``mesh`` if given."""
    if not isinstance(parameter, DTensor):
        return parameter if mesh is None else sum_gradient(parameter, mesh)
    return to_local(parameter) if mesh is None else to_local_sum_gradient(parameter, mesh)
