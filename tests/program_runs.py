"""Run the text of a random program eagerly and compiled, and compare everything that both leave behind.

``python tests/program_runs.py FILE [MODE]`` does this with a file, and says what differs.
"""

from __future__ import annotations

import collections
import contextlib
import linecache
import random
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

import weft
from weft.errors import MalformedGraph, MalformedNest, MalformedProgram, MalformedSchedule, StepFailed, WeftError

# Errors that are no refusals: weft took the step, and then failed.
FAULTS = (MalformedGraph, MalformedNest, MalformedProgram, MalformedSchedule, StepFailed)


class EagerFailed(Exception):
    """The program fails without weft too, so that it says nothing."""


@dataclass
class Run:
    """What a run of a program showed: after each call, the frozen state and results."""

    states: list[Any] = field(default_factory=list)
    refused: WeftError | None = None


def compare(source: str, **options: Any) -> str:
    """How the program went: ``captured``, or ``refused: CLASS: MESSAGE``.

    Raises:
        EagerFailed: the program fails without weft.
        AssertionError: weft computes or leaves something else, with the first difference.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = run(source)
        except Exception as error:
            raise EagerFailed(f"{type(error).__name__}: {error}") from error
        found = run(source, options)
    for k, (ours, theirs) in enumerate(zip(found.states, wanted.states, strict=False)):
        for part in theirs:
            different = difference(ours[part], theirs[part], f"after call {k}: {part}")
            assert different is None, different
    return "captured" if found.refused is None else f"refused: {type(found.refused).__name__}: {found.refused}"


def run(source: str, options: dict[str, Any] | None = None) -> Run:
    """Run all calls of a program, under ``weft.compile(**options)`` where options are given.

    A run ends with the first call that weft refuses, after a check that the refusal changed nothing.
    """
    filename = f"/random_programs/{abs(hash(source))}.py"  # a file, as code of the user's has one
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    program: dict[str, Any] = {"__name__": "program"}
    found = Run()
    try:
        with _fresh_world():
            exec(compile(source, filename, "exec"), program)
            s, step = program["make"]()
            called = step if options is None else weft.compile(step, **options)
            results: list[Any] = []
            for k in range(len(program["ROWS"])):
                args, kwargs = program["call"](k)
                before = _everything(s, results, (args, kwargs)) if options is not None else None
                try:
                    out = called(*args, **kwargs)
                except WeftError as error:
                    if options is None or isinstance(error, FAULTS):
                        raise
                    after, kind = _everything(s, results, (args, kwargs)), type(error).__name__
                    for part in after:
                        if (different := difference(after[part], before[part], part)) is not None:
                            raise AssertionError(f"refused with {kind}, which changed {different}") from error
                    found.refused = error
                    return found
                results.append(out)
                found.states.append(_everything(s, results, (args, kwargs)))
                program["between"](k, s, out)
    finally:
        linecache.cache.pop(filename, None)
    return found


@contextlib.contextmanager
def _fresh_world() -> Iterator[None]:
    """Random generators and settings at a fixed start, put back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _everything(s: Any, results: Any, arguments: Any) -> dict[str, Any]:
    return {
        "results": freeze(results, results=True),
        "state": freeze(s),
        "arguments": freeze(arguments),
        "generators": freeze((torch.get_rng_state(), random.getstate(), np.random.get_state())),
        "sharing": sharing([s, results, arguments]),
        "settings": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
    }


# ---- everything that can be reached, as plain values that are compared


def freeze(obj: Any, *, results: bool = False) -> Any:
    """A copy of all that ``obj`` leads to, as tuples of plain values.

    Of results it does not say whether they require grad: a compiled step returns them without a graph of autograd.
    """
    return _freeze(obj, {}, results)


def _freeze(obj: Any, seen: dict[int, int], results: bool = False) -> Any:
    if obj is None or isinstance(obj, (bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device)):
        return (type(obj).__name__, repr(obj))
    if isinstance(obj, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return ("function", getattr(obj, "__name__", "?"))
    if isinstance(obj, torch.UntypedStorage):
        return "storage"
    if id(obj) in seen:
        return ("again", seen[id(obj)])
    seen[id(obj)] = len(seen)
    if isinstance(obj, torch.Tensor):
        return _frozen_tensor(obj, seen, results)
    name = type(obj).__name__
    if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (name, "a symbol of a capture")
    if isinstance(obj, torch.Generator):
        return (name, obj.get_state().numpy().tobytes())
    if isinstance(obj, random.Random):
        return (name, obj.getstate())
    if isinstance(obj, np.random.Generator):
        return (name, repr(obj.bit_generator.state))
    if isinstance(obj, np.ndarray):
        return (name, str(obj.dtype), obj.shape, obj.tobytes())
    if isinstance(obj, dict):
        return (name, *(item for k, v in obj.items() for item in (_key(k), _freeze(_entry(k, v), seen, results))))
    if isinstance(obj, (set, frozenset)):
        return (name, *sorted(map(repr, obj)))
    if isinstance(obj, (list, tuple, collections.deque)):
        return (name, *(_freeze(item, seen, results) for item in obj))
    if isinstance(obj, torch.optim.Optimizer):
        return (name, _freeze(obj.state, seen, results), _freeze(obj.param_groups, seen, results))
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        kept = {key: value for key, value in vars(obj).items() if key != "optimizer"}
        return (name, _freeze(kept, seen, results))
    return (name, _freeze(getattr(obj, "__dict__", {}), seen, results))


def _entry(key: Any, value: Any) -> Any:
    """The value of a dict's entry; hooks without their ids, which torch counts over all modules."""
    return list(value.values()) if isinstance(key, str) and key.endswith("_hooks") and value else value


def _key(key: Any) -> Any:
    """A key of a dict; a tensor, which is one by its identity, is any tensor of that size."""
    return f"tensor {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)


def _frozen_tensor(tensor: torch.Tensor, seen: dict[int, int], results: bool) -> Any:
    kind = type(tensor).__name__
    if isinstance(tensor, FakeTensor):
        return (kind, "left by a capture")
    plain = tensor.detach()
    values = plain.contiguous()
    if plain.is_floating_point() or plain.is_complex():
        values = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
    leaf = tensor.is_leaf and tensor.requires_grad and not results
    grad = _freeze(tensor.grad if tensor.is_leaf else None, seen, results)
    layout = tuple(plain.shape), tuple(plain.stride()) if plain.numel() > 1 else None
    bits = values.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
    return (kind, str(plain.dtype), *layout, _Bits(bits, values), leaf, ("grad", grad))


class _Bits:
    """The bytes of a tensor, printed as its values."""

    def __init__(self, data: bytes, values: torch.Tensor) -> None:
        self.data, self.values = data, values.clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.values.tolist())


def sharing(objects: list[Any]) -> Any:
    """For each tensor, in the order of a walk, the first one that has an element in the same place of memory.

    Gradients that eager leaves as parts of one tensor have memory of their own in a compiled step. No value shows it.
    """
    first: list[tuple[int, set[int]]] = []
    found: list[int] = []
    kept: list[Any] = []

    def visit(obj: Any, seen: set[int]) -> None:
        if id(obj) in seen:
            return
        seen.add(id(obj))
        if isinstance(obj, torch.Tensor):
            if isinstance(obj, FakeTensor):
                return
            kept.append(obj)
            first.append((obj.untyped_storage()._cdata, _places(obj)))
            storage, places = first[-1]
            same = (at for at, (other, taken) in enumerate(first) if other == storage and not places.isdisjoint(taken))
            found.append(next(same, -1))
            if obj.is_leaf and obj.grad is not None:
                visit(obj.grad, seen)
        elif isinstance(obj, dict):
            for value in obj.values():
                visit(value, seen)
        elif isinstance(obj, (list, tuple, collections.deque)):
            for value in obj:
                visit(value, seen)
        elif isinstance(obj, torch.optim.Optimizer):
            visit(obj.state, seen)
        elif hasattr(obj, "__dict__") and not isinstance(obj, (type, types.FunctionType)):
            visit(vars(obj), seen)

    visit(objects, set())
    return tuple(found)


def _places(tensor: torch.Tensor) -> set[int]:
    """Where the elements of a tensor begin in its storage, in bytes."""
    size = tensor.element_size()
    every = torch.arange(0, tensor.untyped_storage().nbytes() // size * size, size)
    return set(every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist())


def difference(ours: Any, theirs: Any, where: str) -> str | None:
    """The first place where two frozen values differ."""
    if type(ours) is tuple and type(theirs) is tuple and len(ours) == len(theirs):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (found := difference(a, b, f"{where}[{at}]")) is not None:
                return found
        return None
    return None if ours == theirs else f"{where}: {_short(ours)} and {_short(theirs)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:400]}..."


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        text = file.read()
    for chosen in sys.argv[2:] or ["bitwise", "default"]:
        print(chosen, compare(text, mode=chosen))
