"""Run one call of a step both ways and compare everything it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
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
        return cls(tensors, [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])])

    def restore(self, step: Callable[..., Any]) -> None:
        with torch.no_grad():
            for place in State(step).places.values():
                if place.path in self.tensors:
                    place.get().copy_(self.tensors[place.path])
        torch.set_rng_state(self.generators[0])
        if len(self.generators) > 1:
            torch.cuda.set_rng_state_all(self.generators[1:])


def verify_first_call(
    step: Callable[..., Any], captured: CapturedStep, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    """Run ``step(*args, **kwargs)``, take it back, call ``run``, and compare.

    Compared bit for bit: the return value, parameters, gradients, buffers and optimizer state.

    Returns:
        What ``run`` returned.

    Raises:
        VerifyFailed: names the tensors that differ, with the largest difference of each.
    """
    inputs = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else None for leaf in captured.arguments.leaves]
    before = _Moment.now(step)
    captured.state.refresh()
    eager_result = step(*args, **kwargs)
    eager_tensors = _Moment.now(step).tensors
    eager_tensors |= _named("return value", eager_result)
    captured.state.restore()
    before.restore(step)
    with torch.no_grad():
        for leaf, saved in zip(captured.arguments.leaves, inputs, strict=True):
            if saved is not None:
                leaf.copy_(saved)
    result = run()
    tensors = _Moment.now(step).tensors | _named("return value", result)
    _compare(eager_tensors, tensors)
    return result


def _named(name: str, value: Any) -> dict[str, torch.Tensor]:
    leaves = torch_adapter.flatten(value)[0]
    return {f"{name}[{at}]": plain(leaf)[0].detach().clone() for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _compare(eager: dict[str, torch.Tensor], compiled: dict[str, torch.Tensor]) -> None:
    wrong = [f"{path}: only in the {'eager' if path in eager else 'compiled'} run" for path in eager.keys() ^ compiled.keys()]
    for path in eager.keys() & compiled.keys():
        a, b = eager[path], compiled[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{path}: {a.dtype} {list(a.shape)} eager, {b.dtype} {list(b.shape)} compiled")
        elif not torch.equal(a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b):
            wrong.append(f"{path}: largest difference {(a.double() - b.double()).abs().max().item():.3g}")
    if wrong:
        raise VerifyFailed(sorted(wrong))
