"""Run one call of a step both ways and compare everything it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.hooks import HookCounts
from weft.capture.modules import ModulePath
from weft.capture.opaque import silenced
from weft.capture.state import State, plain
from weft.capture.tracer import CapturedStep
from weft.errors import VerifyFailed


@dataclass
class _Moment:
    """Values of all tensors a step can reach, and of the generators."""

    tensors: dict[str, torch.Tensor]
    generators: list[torch.Tensor]

    @classmethod
    def now(cls, step: Callable[..., Any]) -> _Moment:
        tensors = {place.path: place.get().detach().clone() for place in State(step).places.values()}
        return cls(
            tensors,
            [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        )

    def restore(self, step: Callable[..., Any]) -> None:
        with torch.no_grad():
            for place in State(step).places.values():
                if place.path in self.tensors:
                    place.get().copy_(self.tensors[place.path])
        torch.set_rng_state(self.generators[0])
        if len(self.generators) > 1:
            torch.cuda.set_rng_state_all(self.generators[1:])


def verify_first_call(
    step: Callable[..., Any],
    captured: CapturedStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[], Any],
) -> Any:
    """Run ``step(*args, **kwargs)``, take it back, call ``run``, and compare.

    Compared bit for bit: the return value, parameters, gradients, buffers and optimizer state, and how often
    each hook fired. Opaque functions run once, in the compiled step.

    Returns:
        What ``run`` returned.

    Raises:
        HookCountDiffers: a hook fired another number of times in the capture than in the eager step.
        VerifyFailed: names the tensors that differ, with the largest difference of each.
    """
    leaves = [leaf for leaf in captured.arguments.leaves if isinstance(leaf, torch.Tensor)]
    inputs = [(leaf, leaf.detach().clone()) for leaf in leaves]
    gradients = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves if leaf.is_leaf]
    before = _Moment.now(step)
    captured.state.refresh()
    hooks, eager_result = _counting_hooks(step, captured, args, kwargs)
    eager_tensors = _Moment.now(step).tensors | _gradients(captured) | _named("return value", eager_result)
    captured.state.notice_new_hooks()
    captured.state.restore()
    before.restore(step)
    with torch.no_grad():
        for leaf, value in inputs:
            leaf.copy_(value)
        for leaf, gradient, value in gradients:
            leaf.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)
    captured.hooks.compare(hooks)
    result = run()
    tensors = _Moment.now(step).tensors | _gradients(captured) | _named("return value", result)
    _compare(eager_tensors, tensors)
    return result


def _counting_hooks(
    step: Callable[..., Any], captured: CapturedStep, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[HookCounts, Any]:
    """Run the step as it is; also returns how often each hook fired."""
    path = ModulePath(captured.state)
    arguments = [
        (leaf, name) for leaf, name in captured.arguments.differentiable if id(leaf) not in captured.state.homes
    ]
    hooks = HookCounts(captured.state, path, arguments)
    with silenced(), path.followed(), hooks.counted():
        return hooks, step(*args, **kwargs)


def _gradients(captured: CapturedStep) -> dict[str, torch.Tensor]:
    named = [(f"{path}.grad", leaf.grad) for leaf, path in captured.arguments.differentiable]
    return {path: plain(grad)[0].detach().clone() for path, grad in named if grad is not None}


def _named(name: str, value: Any) -> dict[str, torch.Tensor]:
    leaves = torch_adapter.flatten(value)[0]
    return {
        f"{name}[{at}]": plain(leaf)[0].detach().clone()
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }


def _compare(eager: dict[str, torch.Tensor], compiled: dict[str, torch.Tensor]) -> None:
    wrong = [
        f"{path}: only in the {'eager' if path in eager else 'compiled'} run" for path in eager.keys() ^ compiled.keys()
    ]
    for path in eager.keys() & compiled.keys():
        a, b = eager[path], compiled[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{path}: {a.dtype} {list(a.shape)} eager, {b.dtype} {list(b.shape)} compiled")
        elif not torch.equal(
            a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b
        ):
            wrong.append(f"{path}: largest difference {(a.double() - b.double()).abs().max().item():.3g}")
    if wrong:
        raise VerifyFailed(sorted(wrong))
