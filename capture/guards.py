"""What must still hold for a captured graph to stand for the user's function.

Everything the walk of the Python state saw is a guard: simple values by equality, objects by identity, tensors by what
a kernel sees of them. Values of tensors and the learning rate are inputs and guard nothing.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.argument_guards import ArgumentGuard, HookKey, TensorGuard, hooks_of, matches
from weft.capture.size_guard import SizeGuard
from weft.capture.state import MISSING, SIMPLE, Container
from weft.capture.tracer import CapturedStep


@dataclass(frozen=True)
class Guard:
    """One condition, for a reader: what kind it is of, and what must hold."""

    kind: str
    condition: str


class Guards:
    """The conditions of one captured step; :meth:`failure` says the first that does not hold for a call."""

    def __init__(self, captured: CapturedStep) -> None:
        arguments = captured.arguments
        self._arguments = ArgumentGuard(arguments)
        self._world = _global_state()
        self._containers = [_ContainerGuard(container) for container in captured.state.containers]
        self._filled = [guard for guard in self._containers if guard.expected]
        self._empty = [guard.container.obj for guard in self._containers if guard.count == 0]
        self._tensors = [TensorGuard(place, arguments.vals[at]) for at, place in arguments.tensors.items()]
        self._tensors += [
            TensorGuard(place, node.meta["val"])
            for place, node in zip(captured.places, captured.graph.placeholders, strict=True)
            if isinstance(node.meta["val"], torch.Tensor) and place.container is not arguments.container
        ]
        self._flags = [(tensor, path, tensor.requires_grad, hooks_of(tensor)) for tensor, path in captured.state.leaves]
        self._sites = captured.state.sites
        self._quiet = [hooks for site in captured.state.sites if not (hooks := site.read()) and hooks is not None]
        self._sizes = SizeGuard(captured)

    def __len__(self) -> int:
        return len(self.listed())

    def listed(self) -> list[Guard]:
        """Every condition, grouped by kind, cheapest check first."""
        found = [Guard("argument", condition) for condition in self._arguments.listed()]
        for guard in self._containers:
            found += [
                Guard("python state", f"{guard.container.label(k)} is {_shown(v)}") for k, v in guard.expected.items()
            ]
        for _, path, requires_grad, hooks in self._flags:
            found.append(Guard("parameter", f"{path}.requires_grad is {requires_grad}, {len(hooks)} hooks on it"))
        found += [Guard("tensor", str(guard)) for guard in self._tensors]
        found += [Guard("size", condition) for condition in self._sizes.conditions]
        return found + [Guard("torch", f"{name} is {value}") for name, value in self._world.items()]

    def failure(self, leaves: list[Any], spec: Any) -> str | None:
        """Why the captured graph cannot serve a call with these argument leaves, None when it can."""
        if (why := self._arguments.failure(leaves, spec)) is not None:
            return why
        for guard in self._filled:
            if not guard.holds() and (why := guard.failure()) is not None:
                return why
        if any(self._empty):  # by far the most, dictionaries of hooks above all: one call for all of them
            return next(why for guard in self._containers if guard.count == 0 and (why := guard.failure()))
        for tensor, path, requires_grad, hooks in self._flags:
            if tensor.requires_grad is not requires_grad:
                return f"{path}.requires_grad is {tensor.requires_grad}"
            if hooks_of(tensor) != hooks:
                return f"the hooks registered on {path} changed: {_listed(hooks_of(tensor))}, had {_listed(hooks)}"
        if any(self._quiet):
            site = next(site for site in self._sites if site.read() and not site.before)
            return f"a {site.kind} hook was registered on {site.owner}"
        for guard in self._tensors:
            if (why := guard.failure()) is not None:
                return why
        if (why := self._sizes.failure()) is not None:
            return why
        now = _global_state()
        return next((f"{k} is {now[k]}, was {v}" for k, v in self._world.items() if now[k] != v), None)


def _listed(hooks: tuple[HookKey, ...]) -> str:
    return ", ".join(getattr(key.hook, "__qualname__", repr(key.hook)) for key in hooks) or "none"


def _shown(value: Any, article: str = "the same") -> str:
    if isinstance(value, torch.Tensor):
        leaf = value.requires_grad or isinstance(value, torch.nn.Parameter)
        return f"{article if leaf else 'a'} tensor {value.dtype} {list(value.shape)}"
    return repr(value) if isinstance(value, SIMPLE) else f"{article} {type(value).__qualname__}"


class _ContainerGuard:
    """The entries of one container: tensors must be there, all else must be what it was."""

    __slots__ = ("container", "count", "expected", "fetch")

    def __init__(self, container: Container) -> None:
        self.container = container
        sized = container.keys is None and isinstance(container.obj, (dict, list, deque))
        self.count = len(container.before) if sized else None
        self.expected = dict(container.before)
        self.fetch = _fetcher(container, list(self.expected))

    def holds(self) -> bool:
        """Quick: nothing was assigned since. False says only that a closer look is due."""
        if self.count is not None and len(self.container.obj) != self.count:
            return False
        try:
            return all(map(operator.is_, self.fetch(), self.expected.values()))
        except (KeyError, IndexError):
            return False

    def failure(self) -> str | None:
        now = self.container.entries()
        if self.count is not None and len(now) != self.count:
            return f"{self.container.path} holds {len(now)} entries, had {self.count}"
        for key, expected in self.expected.items():
            value = now.get(key, MISSING)
            if not matches(value, expected):
                now_is = "missing" if value is MISSING else _shown(value, "another")
                return f"{self.container.label(key)} is {now_is}, was {_shown(expected, 'a')}"
        self.expected = {key: now[key] for key in self.expected}
        return None


def _fetcher(container: Container, keys: list[Any]) -> Callable[[], Any]:
    obj = container.obj
    if not keys:
        return tuple
    if isinstance(obj, (dict, list)):
        only = keys[0]
        return (lambda: (obj[only],)) if len(keys) == 1 else functools.partial(operator.itemgetter(*keys), obj)
    if isinstance(obj, torch.Tensor):
        return lambda: (obj.grad,)
    return lambda: container.entries().values()


def _global_state() -> dict[str, Any]:
    """Settings of torch that change what a step computes."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")],
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
