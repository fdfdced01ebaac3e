"""Numbers that Python's ``random`` and numpy draw inside a step, as nodes of the graph.

A number that ``random.uniform(0, 1)`` or ``numpy.random.beta(1, 1)`` draws is another one at every call. The capture
does not draw: it records a node with an effect, whose result is a symbolic number. The compiled step calls the same
method of the same generator, in the order in which the step called it. So it gets the numbers that eager gets, and
leaves the generator in the state in which eager leaves it.

Arrays of numbers are drawn the same way (:mod:`weft.capture.record.array_sources`). A draw among Python objects draws
their positions, and the step branches on these, as long as there are few outcomes. What has no place in a graph is
refused with the user's line: draws of many outcomes, reading or setting a generator's state.
:mod:`weft.capture.record.generator_states` finds draws that none of the functions here saw.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.array_recorder import OUTSIDE, WITH_TORCH
from weft.capture.record.array_sources import DRAWS_OF_ARRAYS, ArraySources
from weft.capture.record.held_references import StandIn
from weft.capture.record.host_arrays import HostArray, python_number
from weft.capture.record.recorder import OpRecorder
from weft.capture.user_code import nearest_package, user_line
from weft.errors import UncapturableDraw

# Methods that draw one number: its type, and how many positional arguments describe the distribution. For numpy, an
# argument after those is the shape of an array.
_PYTHON: dict[str, tuple[type, int]] = {
    **dict.fromkeys(("random",), (float, 0)),
    **dict.fromkeys(("expovariate", "paretovariate"), (float, 1)),
    **dict.fromkeys(("uniform", "betavariate", "gammavariate", "gauss", "normalvariate"), (float, 2)),
    **dict.fromkeys(("lognormvariate", "vonmisesvariate", "weibullvariate"), (float, 2)),
    "triangular": (float, 3),
    "getrandbits": (int, 1),
    "randint": (int, 2),
    "randrange": (int, 3),
    "binomialvariate": (int, 2),
}
_NUMPY: dict[str, tuple[type, int]] = {
    **dict.fromkeys(("rand", "randn", "random", "random_sample", "ranf", "sample"), (float, 0)),
    **dict.fromkeys(("standard_normal", "standard_exponential", "standard_cauchy"), (float, 0)),
    **dict.fromkeys(("chisquare", "exponential", "pareto", "power", "rayleigh", "weibull"), (float, 1)),
    **dict.fromkeys(("standard_gamma", "standard_t"), (float, 1)),
    **dict.fromkeys(("uniform", "normal", "beta", "gamma", "f", "gumbel", "laplace", "logistic"), (float, 2)),
    **dict.fromkeys(("lognormal", "noncentral_chisquare", "vonmises", "wald"), (float, 2)),
    **dict.fromkeys(("noncentral_f", "triangular"), (float, 3)),
    **dict.fromkeys(("geometric", "logseries", "poisson", "zipf"), (int, 1)),
    **dict.fromkeys(("randint", "integers", "binomial", "negative_binomial"), (int, 2)),
    "hypergeometric": (int, 3),
}
# Python's methods that draw among given numbers, one or a list of them.
_AMONG = ("choice", "choices", "sample", "shuffle")
# How many outcomes such a draw of ``k`` among ``n`` objects has, and how many it may have: each is a path of the step.
_OUTCOMES: dict[str, Callable[[int, int], int]] = {
    "choice": lambda n, k: n,
    "choices": lambda n, k: n**k,
    "sample": math.perm,
    "shuffle": lambda n, k: math.factorial(n),
}
_MOST_OUTCOMES = 64
_ORIGINAL = {method: getattr(random.Random, method) for method in _AMONG}
# All other methods that draw, or read or write the state.
_PYTHON_OTHERS = ("randbytes", "getstate", "setstate")
_NUMPY_OTHERS = ("get_state", "set_state", "bytes", *DRAWS_OF_ARRAYS)
# What a generator of numpy's tells without a draw.
_FIXED = ("bit_generator", "__repr__", "__str__")
# Longest sequence that a draw among numbers carries in the graph.
_LONGEST = 4096
# Packages that draw from generators of their own while a step is traced; these numbers are none of the step's.
_MACHINERY = ("torch", "sympy", "weft", "numpy")

Draw = Callable[..., Any]


# ---- the functions that nodes call


def draw_python(method: str, *args: Any, **kwargs: Any) -> Any:
    """Draw from the global generator of Python's ``random``."""
    return _drawn(random, _known(method, _PYTHON), args, kwargs)


def draw_numpy(method: str, *args: Any, **kwargs: Any) -> Any:
    """Draw from the global generator of ``numpy.random``."""
    return getattr(sys.modules["numpy.random"], _known(method, _NUMPY))(*args, **kwargs)


def seed_python(seed: Any = None, version: int = 2) -> None:
    """``random.seed``."""
    random.seed(seed, version)


def seed_numpy(seed: Any = None) -> None:
    """``numpy.random.seed``."""
    sys.modules["numpy.random"].seed(seed)


class GeneratorDraw:
    """The target of a node that draws from a generator object of the user's.

    Args:
        generator: a ``random.Random``, ``numpy.random.Generator`` or ``numpy.random.RandomState``.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.__name__ = self.__qualname__ = f"draw_from_{type(generator).__name__}"
        self.__module__ = __name__

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _drawn(self.generator, method, args, kwargs)


def _drawn(generator: Any, method: str, args: Any, kwargs: Any) -> Any:
    """The result of a method; a shuffled copy where one of Python's generators shuffles."""
    if method != "shuffle" or not (generator is random or isinstance(generator, random.Random)):
        return getattr(generator, method)(*args, **kwargs)
    shuffled = [*args[0]]
    generator.shuffle(shuffled)
    return shuffled


def _known(method: str, table: dict[str, Any]) -> str:
    """``method``, which must be one that draws: a graph may come from a file."""
    if method not in table and method not in (*_AMONG, *DRAWS_OF_ARRAYS):
        raise ValueError(f"{method} draws no number")
    return method


# ---- recording


class HostDraws:
    """Records draws of numbers while a step is captured.

    Args:
        recorder: of the capture.
        intercepts: whether what this thread does now is a part of the step.
        arrays: whether arrays that numpy draws are followed.

    Attributes:
        arrays: those of the capture.
        described: what drew each symbol, and on which line.
        used_elsewhere: ids of the generators that another thread drew from meanwhile.
    """

    def __init__(self, recorder: OpRecorder, intercepts: Callable[[], bool], *, arrays: bool = False) -> None:
        self.intercepts = intercepts
        self.described: dict[Any, str] = {}
        self.used_elsewhere: set[int] = set()
        self.arrays = ArraySources(recorder, intercepts, self.described, followed=arrays)
        self._recorder = recorder
        self._made: dict[int, Any] = {}  # generators that the step made: what they draw is the same at every call
        self._targets: dict[int, GeneratorDraw] = {}
        self._proxies: dict[int, Any] = {}

    def owns(self, generator: Any) -> bool:
        """Whether the step itself made this generator, so that each call makes it anew with the same numbers."""
        return id(generator) in self._made

    def draw(self, name: str, target: Draw, table: dict[str, Any], method: str, args: Any, kwargs: Any) -> Any:
        """Record a draw and return its result, a symbolic number or an array.

        Args:
            name: the generator as the user would write it.
            target: what a node calls.
            table: the methods that draw one number.

        Raises:
            UncapturableDraw: the result has no place in a graph.
        """
        text = f"{name}.{method}"
        if method in _AMONG and table is _PYTHON:
            return self._among(text, target, method, args, kwargs)
        if table is _NUMPY and method in DRAWS_OF_ARRAYS:
            return self.arrays.draw(text, target, method, args, kwargs)
        if method not in table:
            raise UncapturableDraw(text, user_line(), _why_not(method), _remedy(method))
        kind, parameters = table[method]
        numbers = [*args, *(value for key, value in kwargs.items() if key != "size")]
        shaped = table is _NUMPY and (len(args) > parameters or kwargs.get("size") is not None)
        plain = all(isinstance(each, _NUMBER) and type(each) is not HostArray for each in numbers)
        # `integers` gives a number of numpy's own, all others give one of Python's.
        if table is _NUMPY and (shaped or not plain or method == "integers"):
            return self.arrays.draw(text, target, method, args, kwargs, parameters)
        if not plain:
            raise UncapturableDraw(text, user_line(), "it draws no number", f"{WITH_TORCH}, or {OUTSIDE}")
        low, high = _range(table, method, args, kwargs)
        result = self.fresh(kind, text, low, high)
        self.record(target, (method, *args), kwargs, result)
        for bound, holds in ((low, lambda: low <= result), (high, lambda: result <= high)):
            if isinstance(bound, torch.SymInt):
                torch._check(holds())
        self._recorder.emit_new_checks()
        return result

    def _among(self, text: str, target: Draw, method: str, args: Any, kwargs: Any) -> Any:
        """Record a draw among the elements of a sequence."""
        name = next((key for key in ("population", "seq", "x") if key in kwargs), "")
        given: Any = args[0] if args else kwargs[name]
        rest = args[1:]
        kwargs = {key: value for key, value in kwargs.items() if key != name}
        count = kwargs.get("k", rest[0] if method == "sample" and rest else 1)
        length = len(given)
        if not length or (method == "sample" and "counts" not in kwargs and not _can_sample(given, count)):
            return _ORIGINAL[method](GLOBAL, given, *rest, **kwargs)  # draws nothing: an error, or no element
        count = length if method == "shuffle" else count
        kind = _kind_of_numbers(given)
        if kind is None or not isinstance(count, int):
            return self._among_objects(text, target, method, given, rest, kwargs, count)
        drawn = self._numbers(text, target, method, list(given), rest, kwargs, count, kind)
        if method == "shuffle":
            given[:] = drawn
            return None
        return drawn

    def _among_objects(
        self, text: str, target: Draw, method: str, given: Any, rest: Any, kwargs: Any, count: Any
    ) -> Any:
        """Draw positions, and let the step branch on them."""
        length = len(given)
        few = isinstance(count, int) and length <= _MOST_OUTCOMES and "counts" not in kwargs
        if not few or _OUTCOMES[method](length, count) > _MOST_OUTCOMES:
            why = f"it chooses among Python objects, and has more than {_MOST_OUTCOMES} outcomes"
            remedy = f"choose an index with random.randrange before the step and pass what it chooses, or {WITH_TORCH}"
            raise UncapturableDraw(text, user_line(), why, remedy)
        positions = self._numbers(text, target, method, list(range(length)), rest, kwargs, count, int)
        if method == "choice":
            return given[operator.index(positions)]
        chosen = [given[operator.index(position)] for position in positions]
        if method == "shuffle":
            given[:] = chosen
            return None
        return chosen

    def _numbers(
        self,
        text: str,
        target: Draw,
        method: str,
        numbers: list[Any],
        rest: Any,
        kwargs: Any,
        count: int,
        kind: type,
    ) -> Any:
        """Record a draw among numbers; returns one symbol, or a list of them."""
        plain = all(type(each) is kind for each in numbers)
        low, high = (min(numbers), max(numbers)) if plain else (None, None)
        fresh = [self.fresh(kind, text, low, high) for _ in range(count)]
        result = fresh[0] if method == "choice" else fresh
        return self.record(target, (method, numbers, *rest), kwargs, result)

    def fresh(self, kind: type, text: str, low: Any = None, high: Any = None) -> Any:
        """A symbol for a number of this type in [low, high]."""
        shape_env = self._recorder.symbols.shape_env
        number: Any = torch_adapter.fresh_number(shape_env, torch.int64 if kind is int else torch.float64)
        torch_adapter.constrain(number, *(each if isinstance(each, (int, float)) else None for each in (low, high)))
        self.described[torch_adapter.symbol_of(number)] = f"{text} at {user_line()}"
        return number

    def record(self, target: Draw, args: Any, kwargs: Any, result: Any) -> Any:
        """Append a call of ``target``, whose result is the symbol ``result`` or a list of them, and return that."""
        recorder = self._recorder
        node = recorder.effect(target, *args, val=result, **kwargs)
        if isinstance(result, list):
            for at, value in enumerate(result):
                recorder.symbols.define(value, lambda at=at, value=value: recorder.getitem(node, at, value))
        else:
            recorder.symbols.define(result, lambda: node)
        recorder.claim_pending_symbols()
        return result

    def seed(self, target: Draw, name: str, args: Any, kwargs: Any) -> None:
        """Record that the step seeds a global generator."""
        if not all(isinstance(each, (*_NUMBER, str, bytes, type(None))) for each in (*args, *kwargs.values())):
            raise UncapturableDraw(f"{name}.seed", user_line(), "its seed is no number", "seed with an int")
        self._recorder.effect(target, *map(python_number, args), **{k: python_number(v) for k, v in kwargs.items()})

    # ---- what stands in for functions and generators while a step is captured

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, function): the functions of ``random`` and ``numpy.random``, and the methods of ``Random``."""
        for name in (*_PYTHON, *_AMONG, *_PYTHON_OTHERS):
            if hasattr(random, name):
                yield random, name, self._function(getattr(random, name), "random", draw_python, _PYTHON, name)
                yield random.Random, name, self._method(getattr(random.Random, name), name)
        yield random, "seed", self._seeding(random.seed, seed_python, "random")
        yield random.Random, "seed", self._refused_seed(random.Random.seed)
        yield random.Random, "__init__", self._creation(random.Random.__init__)
        # What has no seed takes one from the operating system, numpy through the generator of Python's `secrets`.
        yield os, "urandom", self._entropy(os.urandom)
        yield random, "_urandom", self._entropy(os.urandom)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            for name in (*_NUMPY, *_NUMPY_OTHERS):
                if hasattr(numpy, name):
                    original = getattr(numpy, name)
                    yield numpy, name, self._function(original, "numpy.random", draw_numpy, _NUMPY, name)
            yield numpy, "seed", self._seeding(numpy.seed, seed_numpy, "numpy.random")
            yield numpy, "default_rng", self._numpy_creation(numpy.default_rng)

    def stand_in(self, value: Any) -> Any:
        """What stands in for a generator, or for a method bound to one, that the step may reach; None for all else."""
        if is_numpy_generator(value):
            return self._proxy(value)
        owner = getattr(value, "__self__", None) if isinstance(value, _BOUND) else None
        if is_numpy_generator(owner):
            return getattr(self._proxy(owner), value.__name__)
        if isinstance(owner, random.Random) and value.__name__ in (*_PYTHON, *_AMONG, *_PYTHON_OTHERS, "seed"):
            return types.MethodType(getattr(type(owner), value.__name__), owner)
        return None

    def _proxy(self, generator: Any) -> Any:
        if generator is numpy_global():
            name, target = "numpy.random", draw_numpy
        else:
            name, target = type(generator).__name__, self._target(generator)
        if id(generator) not in self._proxies:
            self._proxies[id(generator)] = _NumpyStandIn(generator, self, name, target)
        return self._proxies[id(generator)]

    def _target(self, generator: Any) -> GeneratorDraw:
        return self._targets.setdefault(id(generator), GeneratorDraw(generator))

    def _function(self, original: Any, name: str, target: Draw, table: dict[str, Any], method: str) -> Any:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not self.intercepts():
                self.used_elsewhere.add(id(GLOBAL if table is _PYTHON else numpy_global()))
                return original(*args, **kwargs)
            return self.draw(name, target, table, method, args, kwargs)

        return replaced

    def _method(self, original: Any, method: str) -> Any:
        @functools.wraps(original)
        def replaced(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
            if not self.intercepts():
                self.used_elsewhere.add(id(generator))
                return original(generator, *args, **kwargs)
            if self.owns(generator) or not _called_by_step():
                return original(generator, *args, **kwargs)
            is_global = generator is GLOBAL
            name, target = ("random", draw_python) if is_global else (type(generator).__name__, self._target(generator))
            return self.draw(name, target, _PYTHON, method, args, kwargs)

        return replaced

    def _seeding(self, original: Any, target: Draw, name: str) -> Any:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.seed(target, name, args, kwargs) if self.intercepts() else original(*args, **kwargs)

        return replaced

    def _refused_seed(self, original: Any) -> Any:
        @functools.wraps(original)
        def replaced(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
            ours = self.intercepts() and not self.owns(generator)
            if ours and _called_by_step():
                raise UncapturableDraw(
                    "Random.seed", user_line(), _why_not("seed"), "seed the generator before the step"
                )
            return original(generator, *args, **kwargs)

        return replaced

    def _entropy(self, original: Any) -> Any:
        @functools.wraps(original)
        def read(size: int) -> bytes:
            if self.intercepts() and _called_by_step(*sys.stdlib_module_names):
                why = "random bytes of the operating system are others at every call"
                raise UncapturableDraw("os.urandom", user_line(), why, f"read them before the step, or {WITH_TORCH}")
            return original(size)

        return read

    def _creation(self, original: Any) -> Any:
        @functools.wraps(original)
        def created(generator: random.Random, *args: Any, **kwargs: Any) -> None:
            if self.intercepts() and _called_by_step():
                self._check_seed("random.Random", args, kwargs)
                self._made[id(generator)] = generator
            original(generator, *args, **kwargs)

        return created

    def _numpy_creation(self, original: Any) -> Any:
        @functools.wraps(original)
        def created(*args: Any, **kwargs: Any) -> Any:
            if not (self.intercepts() and _called_by_step()):
                return original(*args, **kwargs)
            self._check_seed("numpy.random.default_rng", args, kwargs)
            generator = original(*args, **kwargs)
            self._made[id(generator)] = generator
            return generator

        return created

    def _check_seed(self, name: str, args: Any, kwargs: Any) -> None:
        """A generator that the step makes must be the same in each call: it needs a seed that is a plain number."""
        given = [*args, *kwargs.values()]
        if not given or given[0] is None:
            why = "without a seed it is another generator at every call"
            raise UncapturableDraw(name, user_line(), why, "make it before the step, or give it a seed")


class _NumpyStandIn(StandIn):
    """Stands in for a generator of numpy's, whose class cannot be patched, where the step can reach it."""

    def __init__(self, generator: Any, draws: HostDraws, name: str, target: Draw) -> None:
        super().__init__(generator)
        self._draws, self._name, self._target = draws, name, target

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.weft_original)

    def __getattr__(self, method: str) -> Any:
        value = getattr(self.weft_original, method)
        if not callable(value) or method in _FIXED:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._draws.intercepts():
                self._draws.used_elsewhere.add(id(self.weft_original))
                return value(*args, **kwargs)
            return self._draws.draw(self._name, self._target, _NUMPY, method, args, kwargs)

        return call


def _called_by_step(*skipped: str) -> bool:
    """Whether the user's code makes or uses a generator now, and not a library for ends of its own. Code of the modules
    ``skipped`` works for its caller."""
    package = nearest_package(__name__, "random", *skipped)
    return (package not in _MACHINERY and package not in sys.stdlib_module_names) or package == "__main__"


# ---- generators


GLOBAL: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

_NUMBER = (int, float, torch.SymInt, torch.SymFloat)
_BOUND = (types.MethodType, types.BuiltinMethodType)


def is_numpy_generator(value: Any) -> bool:
    """Whether ``value`` is a generator of numpy's, old or new."""
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and type(value) in (numpy.Generator, numpy.RandomState)


def numpy_global() -> Any:
    """The global generator of ``numpy.random``, None where numpy is not imported."""
    numpy = sys.modules.get("numpy.random.mtrand")
    return None if numpy is None else numpy._rand


def _can_sample(population: Any, count: Any) -> bool:
    """Whether ``random.sample`` raises no error before it draws."""
    return isinstance(population, Sequence) and (not isinstance(count, int) or 0 <= count <= len(population))


def _kind_of_numbers(sequence: Any) -> type | None:
    """int or float where all elements are such numbers, symbolic ones included; None for other sequences, and for those
    that are too long to be carried in the graph."""
    if not isinstance(sequence, (list, tuple, range)) or len(sequence) > _LONGEST:
        return None
    kinds = {type(each) for each in sequence}
    if kinds <= {int, torch.SymInt}:
        return int
    return float if kinds <= {float, torch.SymFloat} else None


# ---- what is refused, and what to do


def _why_not(method: str) -> str:
    if method in ("getstate", "setstate", "get_state", "set_state", "seed"):
        return "it reads or sets the state of a generator"
    return "it draws more than a number"


def _remedy(method: str) -> str:
    if method in ("getstate", "setstate", "get_state", "set_state", "seed"):
        return "do so before the step"
    return f"{WITH_TORCH}, or {OUTSIDE}"


def _range(table: dict[str, Any], method: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The smallest and the largest result of a draw, None where it is not known. numpy leaves the upper bound of whole
    numbers out, and Python's ``randint`` does not."""
    a: Any = args[0] if args else None
    b: Any = args[1] if len(args) > 1 else None
    if kwargs:
        return None, None
    if method in ("random", "rand", "random_sample", "ranf", "sample") and not args:
        return 0.0, 1.0 - 2.0**-53
    if method == "beta" or method == "betavariate":
        return 0.0, 1.0
    if method == "getrandbits":
        return 0, None if not isinstance(a, int) or a > 62 else 2**a - 1
    if method in ("randint", "randrange", "integers") and len(args) in (1, 2) and _is_whole(*args):
        last = 0 if method == "randint" and table is _PYTHON else 1
        return (0, a - last) if b is None else (a, b - last)
    return None, None


def _is_whole(*numbers: Any) -> bool:
    return all(isinstance(each, (int, torch.SymInt)) for each in numbers)
