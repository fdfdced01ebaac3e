"""Symbolic numbers among the arguments of torch's functions in C++ that want a ``double``.

An argument that is a *Scalar* in C++ may be symbolic, and arrives at the dispatcher as it is. A ``double`` may not:
torch would fix the symbol to its present value, and capture the step for each value. So the function gets a tag
instead (:mod:`weft.capture.record.float_tags`). The recorder puts the symbol back where the tag arrives, also in the
backward.

That is right where the function hands the number on. A function that computes with it is listed with its formulas:
what they give for the tag stands for what they give for the symbol. A function that compares it with some number is
listed with that number: the outcome is a guard. While such a function runs, no other float may arrive that is neither
an argument nor a small constant: the capture ends, and the number is a guard by its value.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft import torch_adapter
from weft.capture.record.float_arithmetic import computed
from weft.capture.record.float_tags import FloatTags

Formula = Callable[[Any], Any]
_ALPHA = 1.7580993408473766  # of alpha dropout, as in ATen/native/Dropout.cpp


@dataclass(frozen=True)
class _FloatUse:
    """What a function in C++ does with its floats, besides handing them on.

    Attributes:
        compared: the numbers that it compares them with.
        formulas: what it computes of one of them, and so does its backward.
        constants: other floats that it computes with.
        legal: the least and the largest float that its kernels take. Another one is a guard by its value: they raise.
    """

    compared: tuple[float, ...] = ()
    formulas: tuple[Formula, ...] = ()
    constants: tuple[float, ...] = ()
    legal: tuple[float, float] | None = None


def _alpha_scale(p: Any) -> Any:
    return 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


def _float32(number: float) -> float:
    """The number as a ``float`` of C++."""
    return ctypes.c_float(number).value


def _rounded(number: Any) -> Any:
    made = computed(_float32, [number], torch.float64)
    return _float32(number) if made is None else made


_PASSED_ON = _FloatUse()
_PROBABILITY = _FloatUse((0.0, 1.0), legal=(0.0, 1.0))
_DROPOUT = _FloatUse((0.0, 1.0), (lambda p: 1 - p, lambda p: 1.0 / (1 - p)), legal=(0.0, 1.0))
_ALPHA_DROPOUT = _FloatUse(
    (0.0, 1.0),
    (lambda p: 1 - p, _alpha_scale, lambda p: _ALPHA * _alpha_scale(p), lambda p: _ALPHA * _alpha_scale(p) * p),
)
_USES: dict[str, _FloatUse] = {
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm", "nan_to_num", "logit"), _PASSED_ON),
    **dict.fromkeys(("huber_loss", "multi_margin_loss", "rrelu", "rrelu_"), _PASSED_ON),
    "smooth_l1_loss": _FloatUse(legal=(0.0, math.inf)),
    **dict.fromkeys(("margin_ranking_loss", "hinge_embedding_loss"), _PASSED_ON),
    "poisson_nll_loss": _FloatUse(constants=(2 * math.pi,)),
    **dict.fromkeys(("normal", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_"), _PASSED_ON),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), _PASSED_ON),
    **dict.fromkeys(("bernoulli", "bernoulli_", "geometric_"), _PROBABILITY),
    "batch_norm": _FloatUse((1e-5,)),  # cuDNN's least eps
    "triplet_margin_loss": _FloatUse((0.0,)),
    "cosine_embedding_loss": _FloatUse(constants=(1e-12, _float32(1e-12))),
    "isclose": _FloatUse((0.0,), constants=(1e-5, 1e-8)),
    **dict.fromkeys(("dropout", "dropout_", "feature_dropout", "feature_dropout_", "native_dropout"), _DROPOUT),
    **{name: _ALPHA_DROPOUT for each in ("alpha_dropout", "feature_alpha_dropout") for name in (each, f"{each}_")},
    "rms_norm": _FloatUse(formulas=(_rounded,)),
    **dict.fromkeys(
        ("celu", "celu_"), _FloatUse((0.0,), (lambda alpha: 1.0 / alpha, lambda alpha: 1.0 / _rounded(alpha)))
    ),
    "lerp": _FloatUse(formulas=(lambda weight: 1 - weight,)),
    "lerp_": _FloatUse(formulas=(lambda weight: 1 - weight,)),
    "pow": _FloatUse((0.0,), (lambda exponent: exponent - 1,)),
    "pow_": _FloatUse((0.0,), (lambda exponent: exponent - 1,)),
}


def _cross_entropy(scores: torch.Tensor) -> _FloatUse | None:
    """It weighs the loss by ``1 - smoothing``, and adds ``smoothing / classes`` of the losses of all classes."""
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    if not isinstance(classes, int):
        return None
    return _FloatUse((0.0, 1.0), (lambda smoothing: 1 - smoothing, lambda smoothing: smoothing / classes))


def _attention(query: torch.Tensor) -> _FloatUse | None:
    """Where there is no fused kernel, query and key are scaled by the root of the scale."""
    width = query.shape[-1]
    if not isinstance(width, int):
        return None
    default = 1.0 / math.sqrt(width)
    formulas = (lambda p: 1 - p, lambda p: 1.0 / (1 - p), lambda scale: math.sqrt(abs(scale)))
    return _FloatUse((0.0, 1.0), formulas, (default, math.sqrt(default)))


# By the first argument; None where what they compute is not known.
_USES_BY_SIZE = {"cross_entropy_loss": _cross_entropy, "scaled_dot_product_attention": _attention}
_FIRST = {"cross_entropy_loss": "input", "scaled_dot_product_attention": "query"}


def _functions() -> Iterator[tuple[Any, str]]:
    for name in (*_USES, *_USES_BY_SIZE):
        for owner in (torch, torch_adapter.nn_functions, torch.Tensor):
            if (found := getattr(owner, name, None)) is not None and not isinstance(found, FunctionType):
                yield found, name
    yield torch.Tensor.__pow__, "pow"


FLOAT_FUNCTIONS: Mapping[Any, str] = dict(_functions())


class FloatArguments:
    """Calls functions in C++ with symbolic numbers for their floats.

    Args:
        tags: of the capture.
    """

    def __init__(self, tags: FloatTags) -> None:
        self._tags = tags

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result; ``function`` is one of ``FLOAT_FUNCTIONS``, and an argument is symbolic."""
        name = FLOAT_FUNCTIONS[function]
        use = _USES.get(name) or _USES_BY_SIZE[name](args[0] if args else kwargs[_FIRST[name]])
        numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.SymFloat)]
        if use is None or not self._tags.used or not all(map(_has_tag, numbers)):
            if use is not None and use.formulas and _wants_gradient((*args, *kwargs.values())):
                # Without a tag it is not known what backward computes of a Scalar. Of a symbolic exponent, torch 2.15
                # computes in the dtype of the base, with other bits than of a number. So the value is a guard.
                args, kwargs = tuple(map(_fixed, args)), {key: _fixed(each) for key, each in kwargs.items()}
            return function(*args, **kwargs)
        args = tuple(self._argument(each, use) for each in args)
        kwargs = {key: self._argument(each, use) for key, each in kwargs.items()}
        known = {each for each in (*args, *kwargs.values(), *use.constants) if type(each) is float}
        with self._tags.only(known):
            return function(*args, **kwargs)

    def _argument(self, argument: Any, use: _FloatUse) -> Any:
        if not isinstance(argument, torch.SymFloat):
            return argument
        for special in sorted({0.0, *use.compared}):
            if argument == special:
                return special
            bool(argument < special)  # the outcome is a guard
        if use.legal is not None and not (use.legal[0] <= argument <= use.legal[1]):
            return float(argument)
        tag = self._tags.tag(argument)
        for formula in use.formulas:
            self._tags.define(formula(tag), formula(argument))
        return tag


class Inside:
    """Functions of torch's in Python whose calls of other functions a mode is to see."""

    def __init__(self) -> None:
        self._running: list[Any] = []

    def __call__(self, function: Any, mode: TorchFunctionMode) -> Callable[..., Any]:
        """The function with the mode on. A mode is off while it handles a call.

        The copy does not ask whether there is a mode: it would hand the call back to it.
        """
        if type(function) is not FunctionType or function in self._running:
            return function
        if not (function.__module__ or "").startswith("torch."):
            return function
        unasked = {name: _nobody for name in function.__globals__ if name.startswith("has_torch_function")}
        copy = FunctionType(
            function.__code__,
            {**function.__globals__, **unasked},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__

        def call(*args: Any, **kwargs: Any) -> Any:
            self._running.append(function)
            try:
                with contextlib.nullcontext() if mode in torch_adapter.function_modes() else mode:
                    return copy(*args, **kwargs)
            finally:
                self._running.pop()

        return call


def _has_tag(number: torch.SymFloat) -> bool:
    """Whether a float next to the present value is seen for what it is, also where C++ rounds it to float32. A tag of 0
    is never asked for; a value that only the data decides is not known."""
    if not number.node.has_hint():
        return False
    value = abs(number.node.hint)
    return value == 0 or 1e-30 < value < 1e30


def _wants_gradient(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)


def _fixed(argument: Any) -> Any:
    return float(argument) if isinstance(argument, torch.SymFloat) else argument


def _nobody(*args: Any) -> bool:
    return False


def has_symbolic_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is a symbolic float."""
    return torch.SymFloat in map(type, args) or torch.SymFloat in map(type, kwargs.values())
