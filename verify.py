"""Run one call of a step eagerly and compiled, and compare everything that the step changed.

If the compiled step runs eager's own kernels, every bit must be equal. Generated kernels sum in another order and
round less often. Their results are compared with a float64 reference: the eager step with every value also computed in
float64 (:mod:`weft.capture.record.float64_shadow`). The compiled error may be a few times the eager error. PyTorch
checks its compiler in the same way (``torch._dynamo.utils.same``).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.float64_shadow import Float64ShadowMode, draws
from weft.capture.record.generator_states import GeneratorStates
from weft.capture.record.hook_counts import HookCounts
from weft.capture.record.module_path import ModulePath
from weft.capture.record.opaque import silenced
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.step_interface import Role
from weft.capture.user_code import format_frame
from weft.errors import RandomStepUnverified, VerifyFailed

Tensors = dict[str, torch.Tensor]

# Allowed ratio of the compiled error to the eager error. Another order of summation has another error, by chance.
_FACTOR = 4.0
# The mean error of few elements varies more.
_FEW, _FACTOR_OF_FEW = 512, 8.0
# If eager's relative error is above _NOISE, the tensor is mostly rounding noise: the gradient of a bias in front of a
# normalization is zero except for rounding. Two samples of noise differ more, so the allowed ratio is larger, and an
# absolute error that is small compared with other tensors of the same kind is accepted.
_NOISE = 0.25
_FACTOR_OF_NOISE = 16.0
# Largest error of one element, relative to the tensor's largest element.
_ONE_ELEMENT = 0.1
# Adam divides a gradient by its magnitude, so it takes a full step up or down where rounding decides the gradient's
# sign. One element of a parameter may therefore be off by two optimizer steps.
_STEPS = 2.5


@dataclass
class _Snapshot:
    """Values of all tensors that a step can reach, and states of the random generators if the step uses them."""

    tensors: Tensors
    generators: list[torch.Tensor]
    host_generators: GeneratorStates | None

    @classmethod
    def now(cls, step: Callable[..., Any], draws: bool, objects: list[Any]) -> _Snapshot:
        tensors = {place.path: _copy(place.get()) for place in ReachableState(step).places.values()}
        if not draws:  # another thread may draw, and must not do so twice
            return cls(tensors, [], None)
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(tensors, [torch.get_rng_state(), *on_gpus], GeneratorStates(objects))

    def restore(self, step: Callable[..., Any]) -> None:
        with torch.no_grad():
            for place in ReachableState(step).places.values():
                if place.path in self.tensors:
                    place.get().copy_(self.tensors[place.path])
        if self.host_generators is not None:
            self.host_generators.restore()
        if self.generators:
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
    path: Callable[[], CapturedStep] | None = None,
) -> Any:
    """Run ``step(*args, **kwargs)`` eagerly, undo its changes, call ``run``, and compare both.

    Compares the return value, parameters, gradients, buffers, optimizer state, and the number of calls of each hook.
    Opaque functions run once, in the compiled step.

    Args:
        generated: whether ``run`` runs generated kernels. Floating-point values are then compared with the float64
            reference instead of bit for bit. The reference takes twice the time of an eager step, and 8 bytes per
            element of every live value.
        path: the path that the run took, asked afterwards where ``captured`` goes to the first branch only.

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
    inputs = [(leaf, leaf.detach().clone()) for leaf in leaves if not _is_expanded(leaf)]
    gradients = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves if leaf.is_leaf]
    draws = any(map(_uses_generators, captured.graph.graph.nodes))
    before = _Snapshot.now(step, draws, captured.state.objects)
    captured.state.refresh()
    exact_run = Float64ShadowMode() if generated else None
    # Copies, since the eager step may change lists and dictionaries.
    copied, named = captured.arguments.for_eager()
    hooks, eager_result = _counting_hooks(step, captured, copied, named, exact_run)
    eager = _results_of(step, captured, eager_result, _copy)
    exact = _results_of(step, captured, eager_result, exact_run.value) if exact_run is not None else {}
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
    if captured.complete:
        captured.hooks.compare(hooks)
    result = run()
    if not captured.complete and path is not None:
        path().hooks.compare(hooks)
    compiled = _results_of(step, captured, result, _copy)
    if exact_run is None:
        differences = _different_bits(eager, compiled)
    else:
        differences = _Comparison(step, before.tensors, exact, eager, compiled).differences()
    if differences:
        raise VerifyFailed(differences)
    return result


def _uses_generators(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers, or may: effects run functions of the user and set seeds."""
    op = getattr(node.target, "op", node.target)  # an operation made functional says which it is
    return node.op == "call_function" and (bool(node.meta.get("effect")) or draws(op, node.args, node.kwargs))


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
    exact_run: Float64ShadowMode | None,
) -> tuple[HookCounts, Any]:
    """Run the step as it is; also returns how often each hook fired."""
    path = ModulePath(captured.state)
    arguments = [
        (leaf, name) for leaf, name in captured.arguments.differentiable if id(leaf) not in captured.state.places_by_id
    ]
    hooks = HookCounts(captured.state, path, arguments)
    with silenced(), path.followed(), hooks.counted(), _uncompiled(), exact_run or contextlib.nullcontext():
        return hooks, step(*args, **kwargs)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Inside, functions and modules of the step that ``torch.compile`` made run eagerly, as they do in a capture."""
    if "torch._dynamo" not in sys.modules:  # nobody has called torch.compile, and the import takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


# ---- results of a run


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory: torch lets no operation write to such a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _results_of(
    step: Callable[..., Any], captured: CapturedStep, result: Any, read: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:
    """The step's state, gradients of its arguments and its return value, each tensor passed through ``read``."""
    named = {place.path: place.get() for place in ReachableState(step).places.values()}
    named |= {f"{path}.grad": leaf.grad for leaf, path in captured.arguments.differentiable if leaf.grad is not None}
    returned = enumerate(torch_adapter.flatten(result)[0])
    named |= {f"return value[{at}]": leaf for at, leaf in returned if isinstance(leaf, torch.Tensor)}
    return {path: read(inner_tensor(tensor)[0]) for path, tensor in named.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _different_kinds(eager: Tensors, compiled: Tensors) -> list[str]:
    """Tensors that only one run has, or that differ in shape or dtype."""
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
    """Paths of the tensors that have the same shape and dtype in both runs, sorted."""
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


# ---- errors against the float64 reference


@dataclass(frozen=True)
class _Errors:
    """Errors of both runs against the float64 reference, for one tensor.

    Attributes:
        size: mean magnitude of the elements, or of their change if the tensor existed before; ``size_worst``: largest.
        count: number of elements.
        eager, compiled: mean errors relative to ``size``.
        eager_worst, compiled_worst: largest errors of an element.
        digits: error expected of a long computation in the tensor's dtype: the square root of its epsilon.
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
        """Last part of the path, equal for comparable tensors: ``grad``, ``exp_avg``, ``weight``."""
        return self.path.rpartition(".")[2]


class _Comparison:
    """Compares the results of an eager and a compiled run with the float64 reference.

    A tensor that existed before the step is judged relative to its change: the error of an update is negligible
    relative to the parameter itself.
    """

    def __init__(
        self, step: Callable[..., Any], before: Tensors, exact: Tensors, eager: Tensors, compiled: Tensors
    ) -> None:
        places = ReachableState(step).places.values()
        self._parameters = {place.path for place in places if place.role is Role.PARAMETER}
        self._before, self._exact, self._eager, self._compiled = before, exact, eager, compiled

    def differences(self) -> list[str]:
        """A line per tensor that differs too much, the worst first."""
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
        """A line if too many integers or booleans differ: up to _FACTOR times as many as eager has wrong."""
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
    """The ratio of the error to the allowed error, and a line about it; "" if it is allowed.

    Args:
        typical: eager's error in the median tensor; eager may be accurate by chance in a tensor of few elements.
        step: largest change of a parameter.
        alike: errors of all tensors of the same kind.
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
