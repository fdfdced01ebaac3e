"""What must still hold for a captured graph to stand for the user's function.

Everything the walk of the Python state saw is a guard: simple values by equality, objects by identity, tensors by what
a kernel sees of them. Values of tensors and the learning rate are inputs and guard nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

from weft import torch_adapter
from weft.capture.state import MISSING, SIMPLE, Container, Place
from weft.capture.tracer import CapturedStep


class Guards:
    """The conditions of one captured step; :meth:`failure` says the first that does not hold for a call."""

    def __init__(self, captured: CapturedStep) -> None:
        self._arguments = captured.arguments
        self._leaves = [(at, leaf) for at, leaf in enumerate(captured.arguments.leaves) if not isinstance(leaf, torch.Tensor)]
        self._world = _global_state()
        self._containers = [_ContainerGuard(container) for container in captured.state.containers]
        self._gradients = [(container, container.obj.grad is None) for _, container in captured.arguments.gradients]
        self._tensors = [
            _TensorGuard(place, node.meta["val"])
            for place, node in zip(captured.places, captured.graph.placeholders, strict=True)
            if isinstance(node.meta["val"], torch.Tensor)
        ]
        self._flags = [
            (tensor, path, tensor.requires_grad, _hooks_of(tensor)) for tensor, path in captured.state.leaves
        ]
        self._sizes = _SizeGuard(captured)

    def __len__(self) -> int:
        entries = sum(len(guard.expected) for guard in self._containers)
        return entries + len(self._tensors) + len(self._flags) + len(self._leaves) + len(self._sizes)

    def failure(self, leaves: list[Any], spec: Any) -> str | None:
        """Why the captured graph cannot serve a call with these argument leaves, None when it can."""
        if spec != self._arguments.spec:
            return "the arguments have another structure"
        for at, expected in self._leaves:
            if not _matches(leaves[at], expected):
                return f"{self._arguments.paths[at]} is {leaves[at]!r}, was {expected!r}"
        self._arguments.bind(leaves)
        for container, empty in self._gradients:
            if (container.obj.grad is None) is not empty:
                return f"{container.label('grad')} {'exists now' if empty else 'is gone'}"
        for guard in self._containers:
            if not guard.holds() and (why := guard.failure()) is not None:
                return why
        for tensor, path, requires_grad, hooks in self._flags:
            if tensor.requires_grad is not requires_grad:
                return f"{path}.requires_grad is {tensor.requires_grad}"
            if _hooks_of(tensor) != hooks:
                return f"the hooks registered on {path} changed"
        for guard in self._tensors:
            if (why := guard.failure()) is not None:
                return why
        if (why := self._sizes.failure()) is not None:
            return why
        now = _global_state()
        return next((f"{k} is {now[k]}, was {v}" for k, v in self._world.items() if now[k] != v), None)


class _ContainerGuard:
    """The entries of one container: tensors must be there, all else must be what it was."""

    __slots__ = ("container", "count", "expected", "fetch")

    def __init__(self, container: Container) -> None:
        self.container = container
        self.count = len(container.before) if container.keys is None and isinstance(container.obj, Sized) else None
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
            if not _matches(value, expected):
                shown = "missing" if value is MISSING else "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                was = "a tensor" if isinstance(expected, torch.Tensor) else repr(expected)
                return f"{self.container.label(key)} is {shown}, was {was}"
        self.expected = {key: now[key] for key in self.expected}
        return None


def _fetcher(container: Container, keys: list[Any]) -> Callable[[], Any]:
    obj = container.obj
    if not keys:
        return tuple
    if isinstance(obj, (dict, list)) and len(keys) > 1:
        return functools.partial(operator.itemgetter(*keys), obj)
    if isinstance(obj, torch.Tensor):
        return lambda: (obj.grad,)
    return lambda: container.entries().values()


def _matches(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    if isinstance(expected, torch.Tensor):
        return isinstance(value, torch.Tensor)
    return type(value) is type(expected) and isinstance(expected, SIMPLE) and (value == expected or expected != expected)


class _TensorGuard:
    """Shape, strides, dtype and device of one input; symbolic sizes are left to the size guard."""

    def __init__(self, place: Place, val: torch.Tensor) -> None:
        self.place = place
        self.dtype, self.device = val.dtype, val.device
        self.static = all(isinstance(n, int) for n in (*val.shape, *val.stride()))
        self.shape = tuple(val.shape) if self.static else val.dim()
        self.sizes = [(dim, n) for dim, n in enumerate(val.shape) if isinstance(n, int)]
        self.strides = val.stride() if self.static else [(d, s) for d, s in enumerate(val.stride()) if isinstance(s, int)]

    def failure(self) -> str | None:
        value = self.place.get()
        if not isinstance(value, torch.Tensor):
            return f"{self.place.path} is no tensor any more"
        if self.static:
            same = value.shape == self.shape and value.stride() == self.strides
        else:
            same = value.dim() == self.shape and all(value.shape[d] == n for d, n in self.sizes)
            same = same and all(value.stride(d) == s or value.shape[d] < 2 for d, s in self.strides)
        if same and value.dtype == self.dtype and value.device == self.device:
            return None
        return (
            f"{self.place.path} is {value.dtype} {list(value.shape)} strides {list(value.stride())} on {value.device}, "
            f"was {self.dtype} {self.shape if self.static else self.sizes} strides {self.strides} on {self.device}"
        )


class _SizeGuard:
    """What the capture assumed about symbolic sizes, as one Python expression over them."""

    def __init__(self, captured: CapturedStep) -> None:
        self._where: dict[str, tuple[Place, int | None]] = {}
        symbols = {}
        for place, node in zip(captured.places, captured.graph.placeholders, strict=True):
            val = node.meta["val"]
            sizes = enumerate(val.shape) if isinstance(val, torch.Tensor) else [(None, val)]
            for dim, size in sizes:
                if isinstance(size, (torch.SymInt, torch.SymFloat)) and size.node.expr.is_symbol:
                    self._where.setdefault(str(size.node.expr), (place, dim))
                    symbols[str(size.node.expr)] = size.node.expr
        known = set(symbols.values())
        printed = PythonPrinter()
        conditions = [printed.doprint(g) for g in torch_adapter.assumptions(captured.shape_env) if g.free_symbols <= known]
        for name, symbol in symbols.items():
            if self._where[name][1] is not None:
                low, high = torch_adapter.range_of(captured.shape_env, symbol)
                conditions.append(f"{low} <= {name}" + (f" <= {high}" if high is not None else ""))
        self.conditions = conditions
        code = f"lambda {', '.join(symbols)}: {' and '.join(f'({c})' for c in conditions) or 'True'}"
        self._holds: Callable[..., bool] = eval(code, {"math": __import__("math")})

    def __len__(self) -> int:
        return len(self.conditions)

    def failure(self) -> str | None:
        values = {
            name: place.get() if dim is None else place.get().shape[dim] for name, (place, dim) in self._where.items()
        }
        if self._holds(**values):
            return None
        named = ", ".join(f"{n} = {place.path}{'' if d is None else f'.size({d})'} = {values[n]}" for n, (place, d) in self._where.items())
        return f"{' and '.join(self.conditions)} does not hold for {named}"


def _hooks_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(id(hook) for hooks in torch_adapter.registered_hooks(tensor) for hook in hooks.values())


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
