"""Run one call of a step both ways and compare everything it leaves behind.

Where the compiled step runs eager's own kernels, all must be the same to the bit. Generated kernels take sums in
another order and round less often, so there the question is another: is the compiled step as close to the truth as the
eager one? The truth is the eager step followed in float64 (:mod:`weft.capture.exact`). That a result is compared with a
run of more digits, and may be a few times as far from it as eager is, is how torch checks its own compiler
(``torch._dynamo.utils.same``).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.exact import ExactRun, draws
from weft.capture.graph import Role
from weft.capture.hooks import HookCounts
from weft.capture.modules import ModulePath
from weft.capture.opaque import silenced
from weft.capture.state import State, plain
from weft.capture.tracer import CapturedStep
from weft.capture.user_code import format_frame
from weft.errors import RandomStepUnverified, VerifyFailed

Tensors = dict[str, torch.Tensor]

# How many times as far from the truth as eager the compiled step may be: other sums have other errors, by chance.
_FACTOR = 4.0
# The mean of few elements is more a matter of chance.
_FEW, _FACTOR_OF_FEW = 512, 8.0
# Where eager is this far off, in parts of a tensor's size, noise is most of what the tensor holds: the gradient of a
# bias before a normalization is zero but for rounding. Two samples of noise compare less well, and may differ by what
# is next to nothing in tensors of the kind.
_NOISE = 0.25
_FACTOR_OF_NOISE = 16.0
# Most that one element may be off, in parts of the tensor's largest.
_ONE_ELEMENT = 0.1
# An optimizer that divides a gradient by its size (Adam) takes a whole step one way or the other where rounding decides
# the sign of a gradient. So a parameter may be off by two steps in an element.
_STEPS = 2.5


@dataclass
class _Moment:
    """Values of all tensors a step can reach, and of the generators."""

    tensors: Tensors
    generators: list[torch.Tensor]

    @classmethod
    def now(cls, step: Callable[..., Any]) -> _Moment:
        tensors = {place.path: _copy(place.get()) for place in State(step).places.values()}
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
    *,
    generated: bool = False,
) -> Any:
    """Run ``step(*args, **kwargs)``, take it back, call ``run``, and compare.

    Compared are the return value, parameters, gradients, buffers and optimizer state, and how often each hook fired.
    Opaque functions run once, in the compiled step.

    Args:
        generated: whether ``run`` runs generated kernels, so that floating point values are compared with the eager
            step in float64 instead of bit for bit. This takes twice the time of an eager step, and for every value
            that is alive twice the memory of a float32 one.

    Returns:
        What ``run`` returned.

    Raises:
        HookCountDiffers: a hook fired another number of times in the capture than in the eager step.
        VerifyFailed: names the tensors that differ, and by how much.
        RandomStepUnverified: generated kernels draw other random numbers than eager does.
    """
    if generated:
        _refuse_randomness(captured)
    leaves = [leaf for leaf in captured.arguments.leaves if isinstance(leaf, torch.Tensor)]
    inputs = [(leaf, leaf.detach().clone()) for leaf in leaves]
    gradients = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves if leaf.is_leaf]
    before = _Moment.now(step)
    captured.state.refresh()
    exact_run = ExactRun() if generated else None
    hooks, eager_result = _counting_hooks(step, captured, args, kwargs, exact_run)
    eager = _left_behind(step, captured, eager_result, _copy)
    exact = _left_behind(step, captured, eager_result, exact_run.value) if exact_run is not None else {}
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
    compiled = _left_behind(step, captured, result, _copy)
    if exact_run is None:
        differences = _different_bits(eager, compiled)
    else:
        differences = _Comparison(step, before.tensors, exact, eager, compiled).differences()
    if differences:
        raise VerifyFailed(differences)
    return result


def _refuse_randomness(captured: CapturedStep) -> None:
    for node in captured.graph.graph.nodes:
        op = getattr(node.target, "op", node.target)  # an operation made functional says which it is
        if node.op == "call_function" and draws(op, node.args, node.kwargs):
            frames = node.meta.get("frames", ())
            raise RandomStepUnverified(str(op), format_frame(frames[0]) if frames else "")


def _counting_hooks(
    step: Callable[..., Any],
    captured: CapturedStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    exact_run: ExactRun | None,
) -> tuple[HookCounts, Any]:
    """Run the step as it is; also returns how often each hook fired."""
    path = ModulePath(captured.state)
    arguments = [
        (leaf, name) for leaf, name in captured.arguments.differentiable if id(leaf) not in captured.state.homes
    ]
    hooks = HookCounts(captured.state, path, arguments)
    with silenced(), path.followed(), hooks.counted(), exact_run or contextlib.nullcontext():
        return hooks, step(*args, **kwargs)


# ---- what a step leaves behind


def _left_behind(
    step: Callable[..., Any], captured: CapturedStep, result: Any, read: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """The state of the step, gradients of its arguments and what it returned, each tensor as ``read`` gives it."""
    named = {place.path: place.get() for place in State(step).places.values()}
    named |= {f"{path}.grad": leaf.grad for leaf, path in captured.arguments.differentiable if leaf.grad is not None}
    returned = enumerate(torch_adapter.flatten(result)[0])
    named |= {f"return value[{at}]": leaf for at, leaf in returned if isinstance(leaf, torch.Tensor)}
    return {path: read(plain(tensor)[0]) for path, tensor in named.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _different_kinds(eager: Tensors, compiled: Tensors) -> list[str]:
    """What only one run left behind, or left in another form."""
    wrong = [
        f"{path}: only in the {'eager' if path in eager else 'compiled'} run"
        for path in sorted(eager.keys() ^ compiled.keys())
    ]
    for path in sorted(eager.keys() & compiled.keys()):
        a, b = eager[path], compiled[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{path}: {a.dtype} {list(a.shape)} eager, {b.dtype} {list(b.shape)} compiled")
    return wrong


def _alike(eager: Tensors, compiled: Tensors) -> list[str]:
    """The paths of tensors that both runs left behind in one form, in order."""
    paths = sorted(eager.keys() & compiled.keys())
    return [p for p in paths if eager[p].shape == compiled[p].shape and eager[p].dtype == compiled[p].dtype]


def _different_bits(eager: Tensors, compiled: Tensors) -> list[str]:
    wrong = _different_kinds(eager, compiled)
    for path in _alike(eager, compiled):
        a, b = eager[path], compiled[path]
        if not torch.equal(
            a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b
        ):
            wrong.append(f"{path}: largest difference {(a.double() - b.double()).abs().max().item():.3g}")
    return sorted(wrong)


# ---- as close to the truth as eager


@dataclass(frozen=True)
class _Errors:
    """How far both runs are from the truth in one tensor.

    Attributes:
        size: the mean of the tensor's elements, or of what the step changed them by; ``size_worst`` the largest.
        count: how many elements there are.
        eager, compiled: mean errors in parts of ``size``.
        eager_worst, compiled_worst: the largest errors of an element.
        digits: the error that is expected of a long computation in the tensor's dtype.
    """

    path: str
    is_parameter: bool
    size: float
    count: int
    eager: float
    compiled: float
    eager_worst: float
    compiled_worst: float
    size_worst: float
    digits: float

    @property
    def kind(self) -> str:
        """What tensors are called that hold the like of it: ``grad``, ``exp_avg``, ``weight``."""
        return self.path.rpartition(".")[2]


class _Comparison:
    """Compares what an eager and a compiled run left behind with the exact values.

    A tensor that was there before is judged by what the step changed: what an update of a parameter gets wrong is
    nothing beside the parameter.
    """

    def __init__(
        self, step: Callable[..., Any], before: Tensors, exact: Tensors, eager: Tensors, compiled: Tensors
    ) -> None:
        self._parameters = {place.path for place in State(step).places.values() if place.role is Role.PARAMETER}
        self._before, self._exact, self._eager, self._compiled = before, exact, eager, compiled

    def differences(self) -> list[str]:
        """What is wrong, in words, the worst first."""
        wrong = _different_kinds(self._eager, self._compiled)
        paths = _alike(self._eager, self._compiled)
        numbers = [path for path in paths if self._has_digits(path)]
        wrong += [text for path in paths if path not in numbers and (text := self._different_choices(path))]
        found = [self._errors(path) for path in numbers]
        wrong += [
            f"{path}: NaN or infinity where eager has none, or none where it has"
            for path in numbers
            if not self._finite_alike(path)
        ]
        typical = statistics.median([errors.eager for errors in found]) if found else 0.0
        step = max((errors.size_worst for errors in found if errors.is_parameter), default=0.0)
        alike = {errors.kind: [other for other in found if other.kind == errors.kind] for errors in found}
        judged = [_judged(errors, typical, step, alike[errors.kind]) for errors in found]
        return wrong + [text for _, text in sorted(judged, key=lambda pair: -pair[0]) if text]

    def _different_choices(self, path: str) -> str:
        """What is wrong with whole numbers or booleans: as many as eager itself chooses wrongly may differ."""
        exact, eager, compiled = self._exact[path], self._eager[path], self._compiled[path]
        count, wrong = int((compiled != eager).sum()), int((exact != eager).sum())
        return f"{path}: {count} elements differ; eager has {wrong} wrong" if count > _FACTOR * wrong else ""

    def _has_digits(self, path: str) -> bool:
        return self._eager[path].is_floating_point() or self._eager[path].is_complex()

    def _finite_alike(self, path: str) -> bool:
        a, b = self._eager[path], self._compiled[path]
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())

    def _errors(self, path: str) -> _Errors:
        exact = self._exact[path]
        eager, compiled = self._eager[path].to(exact.dtype), self._compiled[path].to(exact.dtype)
        known = self._before.get(path)
        change = exact if known is None or known.shape != exact.shape else exact - known.to(exact.dtype)
        counts = exact.isfinite() & eager.isfinite() & compiled.isfinite() & change.isfinite()
        exact, eager, compiled, change = (tensor[counts] for tensor in (exact, eager, compiled, change))
        eps = torch.finfo(self._eager[path].dtype).eps
        size = _mean(change) + eps * _mean(exact)
        off, eager_off = (compiled - exact).abs(), (eager - exact).abs()
        is_parameter = path in self._parameters
        # Of a parameter the worst element does not count, for the reason that _STEPS gives.
        left_out = _largest(off) / off.numel() if is_parameter and off.numel() > 1 else 0.0
        return _Errors(
            path,
            is_parameter,
            size,
            exact.numel(),
            eager=_ratio(_mean(eager_off), size),
            compiled=_ratio(_mean(off) - left_out, size),
            eager_worst=_largest(eager_off),
            compiled_worst=_largest(off),
            size_worst=_largest(change) + eps * _largest(exact),
            digits=eps**0.5,
        )


def _judged(errors: _Errors, typical: float, step: float, alike: list[_Errors]) -> tuple[float, str]:
    """How many times what is allowed the error is, and what is wrong in words, "" for nothing.

    Args:
        typical: eager's error in the median tensor; a tensor of few elements may be right by chance.
        step: the largest change of a parameter.
        alike: the errors of all tensors of the kind.
    """
    is_noise = errors.eager >= _NOISE
    factor = _FACTOR_OF_NOISE if is_noise else _FACTOR_OF_FEW if errors.count <= _FEW else _FACTOR
    allowed = errors.digits + factor * max(errors.eager, typical)
    worst = _STEPS * step if errors.is_parameter else _ONE_ELEMENT * errors.size_worst
    worst += factor * errors.eager_worst
    if is_noise:
        allowed += _ratio(errors.digits * statistics.median(other.size for other in alike), errors.size)
        worst += errors.digits * statistics.median(other.size_worst for other in alike)
    if errors.compiled > allowed:
        return errors.compiled / allowed, (
            f"{errors.path}: off by {errors.compiled:.2g} of its size from the step in float64; eager is off by "
            f"{errors.eager:.2g}, and {allowed:.2g} is allowed"
        )
    if errors.compiled_worst > worst:
        return errors.compiled_worst / worst, (
            f"{errors.path}: an element is off by {errors.compiled_worst:.2g} from the step in float64; eager is off "
            f"by at most {errors.eager_worst:.2g}, and {worst:.2g} is allowed"
        )
    return 0.0, ""


def _mean(tensor: torch.Tensor) -> float:
    return tensor.abs().mean().item() if tensor.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _ratio(error: float, size: float) -> float:
    return error / size if size else float("inf") if error else 0.0
