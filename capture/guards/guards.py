"""Guards: the conditions under which a captured graph may serve a later call.

All Python state that the walk found is guarded: simple values by equality, other objects by identity, tensors by
shape, strides, dtype and device. The arguments, hooks, sizes and torch's global settings are guarded too. Values of
tensors and numbers that change from call to call are inputs of the graph. Of such numbers only the type is guarded, and
what the step's Python assumed of them. A call for which a guard fails is captured anew.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.guards.argument_guards import ArgumentGuard, HookKey, TensorGuard, hooks_of, matches
from weft.capture.guards.memory_guard import MemoryGuard
from weft.capture.guards.size_guard import SizeGuard
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.environment import environment_failure
from weft.capture.record.outside_calls import outside_failure
from weft.capture.state.containers import ANY, MISSING, SIMPLE, Container, without_overrides
from weft.capture.state.state_reader import EntryReader, PlaceReader

_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class Guard:
    """One condition as text, for a reader, and its kind."""

    kind: str
    condition: str


class Guards:
    """The guards of one captured step.

    :meth:`failure` checks them one by one and names the first that does not hold. Nearly always nothing has changed
    since the last call, and a GPU may wait for the answer. So :meth:`unchanged` comes first: it compares everything at
    once with the state that :meth:`failure` last accepted.
    """

    def __init__(self, captured: CapturedStep) -> None:
        arguments = captured.arguments
        numbers = {each.place.key for each in captured.numbers if each.place.container is arguments.container}
        self._arguments = ArgumentGuard(arguments, numbers)
        self._world = _global_state()
        self._environment = captured.environment
        self._outside = captured.outside
        counted = [each for each in captured.state.containers if not each.frozen]
        self._containers = _ContainerGuard(counted)
        self._values = [
            (each, key, pattern) for each in counted for key, pattern in each.by_value.items() if pattern is not ANY
        ]
        # A list or dictionary that each call replaces is at the same places in each call, and is none that is guarded.
        replaced = captured.state.replaced_places
        self._replaced = [place for place, _ in replaced]
        self._kept = frozenset(id(each.obj) for each in captured.state.containers if each.outer is None)
        self._sharing = self._numbered([obj for _, obj in replaced])
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
        self._memory = MemoryGuard(captured, self._containers.entries, self._containers.labels())
        # Read by `unchanged`, and compared with what `_remember` stored when `failure` accepted a state.
        self._leaves = [leaf for leaf, _ in captured.state.leaves]
        self._static = PlaceReader([guard.place for guard in self._tensors if guard.static])
        self._symbolic = [guard for guard in self._tensors if not guard.static]
        self._requires_grad: list[bool] = []
        self._unhooked: list[torch.Tensor] = []
        self._hooked: list[tuple[torch.Tensor, tuple[HookKey, ...]]] = []
        self._alike: Callable[..., bool] | None = None

    def __len__(self) -> int:
        return len(self.listed())

    def listed(self) -> list[Guard]:
        """Every condition, grouped by kind, cheapest check first."""
        found = [Guard("argument", condition) for condition in self._arguments.listed()]
        found += [Guard("python state", condition) for condition in self._containers.listed()]
        for _, path, requires_grad, hooks in self._flags:
            found.append(Guard("parameter", f"{path}.requires_grad is {requires_grad}, {len(hooks)} hooks on it"))
        found += [Guard("tensor", str(guard)) for guard in self._tensors]
        found += [Guard("size", condition) for condition in self._sizes.conditions]
        found.append(Guard("memory", "the same tensors of the state and of the arguments overlap"))
        found += [Guard("environment", f"{key} is {value!r}") for key, value in self._environment.items()]
        found += [Guard("outside", f"{read.text} gives {read.answer!r}") for read in self._outside]
        return found + [Guard("torch", f"{name} is {value}") for name, value in self._world.items()]

    def failure(self, leaves: list[Any], spec: Any) -> str | None:
        """Why the captured graph cannot serve a call with these argument leaves; None where it can."""
        if self.unchanged(leaves, spec):
            return None
        why = (
            self._arguments.failure(leaves, spec)
            or self._containers.failure()
            or self._value_failure()
            or self._leaf_failure()
            or next(filter(None, (guard.failure() for guard in self._tensors)), None)
            or self._sizes.failure()
            or self._memory_failure()
            or self._world_failure()
            or environment_failure(self._environment)
            or outside_failure(self._outside)
        )
        if why is None:
            self._remember()
        return why

    def unchanged(self, leaves: list[Any], spec: Any) -> bool:
        """Whether everything is as :meth:`failure` last accepted it. False only means that it must be asked."""
        with torch_adapter.no_torch_function():
            return (
                self._alike is not None
                and self._arguments.failure(leaves, spec) is None
                and self._containers.holds()
                and self._value_failure() is None
                and list(map(_requires_grad, self._leaves)) == self._requires_grad
                and not any(any(map(hooks, self._unhooked)) for hooks in torch_adapter.leaf_hooks)
                and all(hooks_of(leaf) == hooks for leaf, hooks in self._hooked)
                and not any(self._quiet)
                and self._alike(*self._static.read())
                and all(guard.failure() is None for guard in self._symbolic)
                and self._sizes.failure() is None
                and self._memory.holds(self._containers.entries)
                and _global_state() == self._world
                and (not self._environment or environment_failure(self._environment) is None)
                and (not self._outside or outside_failure(self._outside) is None)
            )

    def _remember(self) -> None:
        """Store the present state, which :meth:`failure` accepted, for later comparisons."""
        self._requires_grad = list(map(_requires_grad, self._leaves))
        self._unhooked = [leaf for leaf, _, _, hooks in self._flags if not hooks]
        self._hooked = [(leaf, hooks) for leaf, _, _, hooks in self._flags if hooks]
        self._alike = torch_adapter.like(self._static.read())

    def _leaf_failure(self) -> str | None:
        for tensor, path, requires_grad, hooks in self._flags:
            if tensor.requires_grad is not requires_grad:
                return f"{path}.requires_grad is {tensor.requires_grad}"
            if hooks_of(tensor) != hooks:
                return f"the hooks registered on {path} changed: {_listed(hooks_of(tensor))}, had {_listed(hooks)}"
        if any(self._quiet):
            site = next(site for site in self._sites if site.read() and not site.before)
            return f"a {site.kind} hook was registered on {site.owner}"
        return None

    def _value_failure(self) -> str | None:
        for container, key, pattern in self._values:
            if not matches(container.get(key), pattern):
                return f"{container.label(key)} holds something else"
        if self._replaced:
            now = self._numbered([place.outer() for place in self._replaced])
            for place, at, before in zip(self._replaced, now, self._sharing, strict=True):
                if at != before:
                    return f"the object of {place.path} is at {'other' if at < before else 'fewer'} places"
        return None

    def _numbered(self, objects: list[Any]) -> list[int]:
        """For each object the number of the first one that is the same; -1 for those that are guarded."""
        first: dict[int, int] = {}
        return [-1 if id(obj) in self._kept else first.setdefault(id(obj), at) for at, obj in enumerate(objects)]

    def _memory_failure(self) -> str | None:
        with torch_adapter.no_torch_function():
            return self._memory.failure(self._containers.entries)

    def _world_failure(self) -> str | None:
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
    """Guards on the entries of all containers: tensors must look alike, all other values must match."""

    def __init__(self, containers: Sequence[Container]) -> None:
        self._entries = EntryReader(containers)
        self._expected = [value for each in self._entries.containers for value in each.guarded().values()]
        self._filled_first = sorted(containers, key=lambda each: not each.before)
        sized = [each for each in containers if _is_sized(each)]
        self._empty = [without_overrides(each.obj) for each in sized if not each.before]
        self._filled = [without_overrides(each.obj) for each in sized if each.before]
        self._counts = [len(each.before) for each in sized if each.before]
        # Code that goes through a dictionary sees the order of its keys. The reader of entries relies on them too.
        ordered = [each.obj for each in sized if isinstance(each.obj, dict) and each.before]
        self._ordered = [*map(without_overrides, ordered)]
        self._order = [key for each in self._ordered for key in each]

    @property
    def entries(self) -> list[Any]:
        """The values of all entries as they were last accepted; another list where one is another object."""
        return self._expected

    def labels(self) -> list[str]:
        """How the user would write each of :attr:`entries`."""
        return [each.label(key) for each in self._entries.containers for key in each.guarded()]

    def listed(self) -> list[str]:
        """The conditions as text."""
        expected = self._expected_of()
        return [
            f"{each.label(key)} is {_shown(value)}"
            for each in self._filled_first
            for key, value in expected[id(each)].items()
        ]

    def holds(self) -> bool:
        """Whether all entries match the expected ones. If they do, the present entries are expected from now on."""
        if any(self._empty) or list(map(len, self._filled)) != self._counts:
            return False
        if not self._in_order():
            return False
        try:
            if self._entries.all_are(self._expected):
                return True
            now = self._entries.read()
        except ValueError:
            return False
        if not all(map(operator.is_, now, self._expected)):
            pairs = zip(now, self._expected, strict=True)
            if not all(value is expected or matches(value, expected) for value, expected in pairs):
                return False
            self._expected = now
        return True

    def failure(self) -> str | None:
        """The first entry that does not match, as text; None where all match."""
        if self.holds():
            return None
        expected = self._expected_of()
        failures = (_container_failure(each, expected[id(each)]) for each in self._filled_first)
        reordered = None if self._in_order() else "the keys of a dictionary are in another order"
        return next(filter(None, failures), reordered)

    def _in_order(self) -> bool:
        """Whether the keys of all dictionaries are in the order that they had. Their numbers are known to be equal."""
        if all(map(operator.is_, chain.from_iterable(self._ordered), self._order)):
            return True
        keys = chain.from_iterable(self._ordered)
        return all(now is before or _same_key(now, before) for now, before in zip(keys, self._order, strict=False))

    def _expected_of(self) -> dict[int, dict[Any, Any]]:
        """The expected entries of each container, by its id."""
        containers = self._entries.containers
        guarded = [each.guarded() for each in containers]
        ends = accumulate(map(len, guarded))
        return {
            id(each): dict(zip(keys, self._expected[end - len(keys) : end], strict=True))
            for each, keys, end in zip(containers, guarded, ends, strict=True)
        }


def _container_failure(container: Container, expected: dict[Any, Any]) -> str | None:
    now = container.entries()
    if _is_sized(container) and len(now) != len(container.before):
        return f"{container.path} holds {len(now)} entries, had {len(container.before)}"
    for key, before in expected.items():
        value = now.get(key, MISSING)
        if not matches(value, before):
            now_is = "missing" if value is MISSING else _shown(value, "another")
            return f"{container.label(key)} is {now_is}, was {_shown(before, 'a')}"
    return None


def _same_key(one: Any, other: Any) -> bool:
    return hash(one) == hash(other) and bool(one == other)


def _is_sized(container: Container) -> bool:
    """Whether the number of entries is guarded."""
    return container.keys is None and isinstance(container.obj, (dict, list, deque))


def _global_state() -> dict[str, Any]:
    """Global settings of torch that change what a step computes."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")],
        "anomaly mode with check_nan": torch.is_anomaly_check_nan_enabled() and torch.is_anomaly_enabled(),
        "function modes": torch_adapter.function_modes(),
        "saved tensor hooks": torch_adapter.innermost_saved_tensor_hooks(),
        "autocast region": torch_adapter.in_autocast_region(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
