"""Guards: the conditions under which a captured graph may serve a later call.

All Python state that the walk found is guarded: simple values by equality, other objects by identity, tensors by
shape, strides, dtype and device, modules by class, and which tensors overlap. The arguments, hooks, sizes and torch's
global settings are guarded too. Values of tensors and numbers that change from call to call are inputs of the graph. Of
such numbers only the type is guarded, and what the step's Python assumed of them. A call for which a guard fails is
captured anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft import state_checks, torch_adapter
from weft.capture.guards.argument_guards import ArgumentGuard, HookKey, TensorGuard, hooks_of, matches
from weft.capture.guards.array_memory_guard import ArrayMemoryGuard
from weft.capture.guards.class_guard import ClassGuard
from weft.capture.guards.container_guard import ContainerGuard
from weft.capture.guards.library_guard import LibraryGuard
from weft.capture.guards.memory_guard import MemoryGuard
from weft.capture.guards.missing_attribute_guard import MissingAttributeGuard
from weft.capture.guards.object_guard import ObjectGuard
from weft.capture.guards.result_cache_guard import ResultCacheGuard
from weft.capture.guards.sharing_guard import SharingGuard
from weft.capture.guards.size_guard import SizeGuard
from weft.capture.guards.steady_checks import GuardPart, Steady, SteadyChecks
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.environment import environment_failure
from weft.capture.record.outside_calls import outside_failure
from weft.capture.state.containers import ANY, TensorLike
from weft.capture.state.patterns import Growing
from weft.capture.state.state_reader import PlaceReader

_NEVER: tuple[list[torch.Tensor] | None, Callable[[], bool]] = (None, lambda: False)


@dataclass(frozen=True)
class Guard:
    """One condition as text, for a reader, and its kind."""

    kind: str
    condition: str


# Calls after which a step is taken for one that is called thousands of times: compiling the checks takes 2 s of a core.
_OFTEN = 200


class Guards:
    """The guards of one captured step.

    :meth:`failure` checks them one by one and names the first that does not hold. Nearly always nothing has changed
    since the last call, and a GPU may wait for the answer. So :meth:`unchanged` comes first: it compares everything at
    once with the state that :meth:`failure` last accepted.

    Attributes:
        checks: what is compared, by name.
    """

    def __init__(self, captured: CapturedStep) -> None:
        arguments = captured.arguments
        numbers = {each.place.key for each in captured.numbers if each.place.container is arguments.container}
        self._arguments = ArgumentGuard(arguments, numbers)
        self._same_objects = SharingGuard(captured)
        self._settings = _settings()
        self._same_settings = state_checks.same_settings(_read_settings)
        self._other_settings = [read() for read in _OTHER_SETTINGS]
        self._environment = captured.environment
        self._outside = captured.outside
        counted = [each for each in captured.state.containers if not each.frozen]
        self._containers = ContainerGuard(counted)
        self._values = [
            (each, key, pattern) for each in counted for key, pattern in each.by_value.items() if pattern is not ANY
        ]
        # What is appended to one list that grows must not be what the step reads of another one.
        growing = [each for each in self._values if isinstance(each[2], Growing)]
        self._growing = [each[:2] for each in growing if any(pattern.is_asked for *_, pattern in growing)]
        self._growing_alike = _numbered([each.before[key] for each, key in self._growing])
        # A list or dictionary that each call replaces is at the same places in each call, and is none that is guarded.
        replaced = captured.state.replaced_places
        self._replaced = [place for place, _ in replaced]
        kept = [each.obj for each in captured.state.containers if each.outer is None]
        self._kept = frozenset(map(id, (*kept, *(obj for obj, _ in captured.state.with_attributes))))
        self._sharing = self._numbered([obj for _, obj in replaced])
        self._tensors = [TensorGuard(place, arguments.vals[at]) for at, place in arguments.tensors.items()]
        self._tensors += [
            TensorGuard(place, node.meta["val"])
            for place, node in zip(captured.places, captured.graph.placeholders, strict=True)
            if isinstance(node.meta["val"], torch.Tensor) and place.container is not arguments.container
        ]
        self._flags = [(tensor, path, tensor.requires_grad, hooks_of(tensor)) for tensor, path in captured.state.leaves]
        self._plain = list(captured.state.plain_leaves.guarded(captured.places))
        self._kinds = [type(tensor) for tensor, *_ in self._flags]
        self._sites = captured.state.sites
        quiet = [hooks for site in captured.state.sites if not (hooks := site.read()) and hooks is not None]
        self._are_quiet = state_checks.all_empty(quiet)
        self._sizes = SizeGuard(captured)
        self._memory = MemoryGuard(captured, self._containers)
        self._array_memory = ArrayMemoryGuard(captured)
        # A form lives longer than the gradients with which it was captured.
        for each in (*captured.state.containers, *(container for _, container in captured.arguments.gradients)):
            if (like := TensorLike.of_gradient(each)) is not None:
                each.before["grad"] = like
        self._libraries = LibraryGuard(captured.libraries)
        self._objects = ObjectGuard(captured.state.with_attributes)
        classes = [*captured.state.with_attributes, (torch.nn.Parameter, "")]  # of tensors, its bases included
        self._classes = ClassGuard(classes, captured.state.names.frozen)
        self._results = ResultCacheGuard(captured.state.objects)
        self._missing = MissingAttributeGuard(captured.state.missing)
        # Read by `unchanged`, and compared with what `_remember` stored when `failure` accepted a state.
        static = [guard.place for guard in self._tensors if guard.static]
        kept = [place for place in static if self._containers.keeps(place) and self._memory.follows(place)]
        known = set(map(id, kept))
        self._kept_places = PlaceReader(kept)
        self._other_places = PlaceReader([place for place in static if id(place) not in known])
        self._kept_tensors: list[Any] = []
        self._read_with: list[torch.Tensor] | None = None
        self._symbolic = [guard for guard in self._tensors if not guard.static]
        self._leaves_require_grad: Callable[[], bool] = lambda: False
        self._unhooked: list[torch.Tensor] = []
        self._hooked: list[tuple[torch.Tensor, tuple[HookKey, ...]]] = []
        self._hooks_made = -1  # the number of the last time that no leaf was found to have hooks
        self._kept_alike: Callable[..., bool] | None = None
        self._others_alike: Callable[..., bool] = lambda *found: False
        # The tensors that stay the same objects, and whether they are as they were when all guards held. The next ones
        # are accepted when all guards hold.
        self._untouched = self._next_untouched = _NEVER
        self._are_untouched = False
        self._calls = 0
        self.checks = self._checks()
        self._steady = SteadyChecks(self.checks)

    def __len__(self) -> int:
        return len(self.listed())

    def release_gradients(self) -> None:
        """Hold no gradient that was found, because another form serves the calls now and may replace it."""
        if self._containers.release_gradients():
            self._memory.release()
            self._steady.separate()
            self._untouched = self._next_untouched = _NEVER
            self._read_with = None

    def listed(self) -> list[Guard]:
        """Every condition, grouped by kind, cheapest check first."""
        found = [Guard("argument", condition) for condition in self._arguments.listed()]
        found.append(Guard("argument", "the same arguments are one object, or an object of the Python state"))
        found += [Guard("python state", condition) for condition in self._containers.listed()]
        for _, path, requires_grad, hooks in self._flags:
            found.append(Guard("parameter", f"{path}.requires_grad is {requires_grad}, {len(hooks)} hooks on it"))
        found.append(Guard("tensor", "no other tensor of the Python state requires grad"))
        found += [Guard("tensor", str(guard)) for guard in self._tensors]
        found += [Guard("class", condition) for condition in self._objects.listed()]
        found += [Guard("result cache", condition) for condition in self._results.listed()]
        found += [Guard("python state", condition) for condition in self._missing.listed()]
        found += [Guard("library", condition) for condition in self._libraries.listed()]
        found += [Guard("size", condition) for condition in self._sizes.conditions]
        found.append(Guard("memory", "the same tensors of the state and of the arguments overlap"))
        found += [Guard("environment", f"{key} is {value!r}") for key, value in self._environment.items()]
        found += [Guard("outside", f"{read.text} gives {read.answer!r}") for read in self._outside]
        return found + [
            Guard("torch", f"{name} is {value}") for name, value in zip(_SETTINGS, self._settings, strict=True)
        ]

    def failure(self, leaves: list[Any], spec: Any) -> str | None:
        """Why the captured graph cannot serve a call with these argument leaves; None where it can."""
        if self.unchanged(leaves, spec):
            return None
        why = self._arguments.failure(leaves, spec) or self._same_objects.failure(leaves) or self._containers.failure()
        if why is None:
            self._watch_tensors()
            why = self._other_failure()
        if why is None:
            self._remember()
        return why

    def unchanged(self, leaves: list[Any], spec: Any) -> bool:
        """Whether everything is as :meth:`failure` last accepted it. False only means that it must be asked."""
        with torch_adapter.no_torch_function():
            if (
                self._kept_alike is None
                or self._arguments.failure(leaves, spec) is not None
                or self._same_objects.failure(leaves) is not None
            ):
                return False
            if not self._steady.hold():
                return False
        if not self._are_untouched:
            self._untouched = self._next_untouched
        if self._calls < _OFTEN:
            self._calls += 1
            if self._calls == _OFTEN:
                state_checks.compile_in_background()
        return True

    def _other_failure(self) -> str | None:
        """What :meth:`failure` asks after the arguments and containers."""
        return (
            self._value_failure()
            or self._objects.failure()
            or self._classes.failure()
            or self._results.failure()
            or self._missing.failure()
            or self._libraries.failure()
            or self._leaf_failure()
            or next(filter(None, (guard.failure() for guard in self._tensors)), None)
            or self._sizes.failure()
            or self._memory_failure()
            or self._array_memory.failure()
            or self._settings_failure()
            or environment_failure(self._environment)
            or outside_failure(self._outside)
        )

    def _checks(self) -> dict[str, GuardPart]:
        """What :meth:`unchanged` asks besides the arguments, in this order: each relies on those before it."""
        asked, containers, memory = self._same_settings, self._containers, self._memory
        before = self._other_settings
        others = lambda: list(map(operator.call, _OTHER_SETTINGS)) == before
        grads = lambda: Steady([self._leaves_require_grad])
        overlaps = lambda: memory.steady(self._other_places, self._others_alike) if self._stay_untouched() else None
        found: dict[str, GuardPart | None] = {
            "settings of torch": GuardPart(lambda: asked() and others(), lambda: Steady([asked], others)),
            "functions of libraries": GuardPart(self._libraries.holds, self._libraries.steady),
            "dictionaries, lists, attributes": GuardPart(containers.holds, containers.steady),
            "values": _none_fails(self._value_failure) if self._values or self._replaced else None,
            "classes and attributes of objects": GuardPart(self._objects.holds, self._objects.steady),
            "attributes of classes": GuardPart(self._classes.holds, self._classes.steady),
            "cached results": GuardPart(self._results.holds) if self._results.listed() else None,
            "missing attributes": GuardPart(self._missing.holds, self._missing.steady) if len(self._missing) else None,
            "requires_grad": GuardPart(lambda: self._leaves_require_grad(), grads),
            "tensors": GuardPart(self._tensors_hold, self._steady_tensors),
            "hooks": GuardPart(self._hooks_hold, self._steady_hooks),
            "symbolic tensors": GuardPart(lambda: all(guard.failure() is None for guard in self._symbolic))
            if self._symbolic
            else None,
            "sizes": _none_fails(self._sizes.failure, lambda: self._sizes.steady(containers.watches))
            if len(self._sizes)
            else None,
            "memory": GuardPart(lambda: memory.holds(self._are_untouched), overlaps),
            "memory of arrays": _none_fails(self._array_memory.failure) if len(self._array_memory) else None,
            "environment": _none_fails(lambda: environment_failure(self._environment)) if self._environment else None,
            "outside": _none_fails(lambda: outside_failure(self._outside)) if self._outside else None,
        }
        return {name: part for name, part in found.items() if part is not None}

    def _steady_tensors(self) -> Steady | None:
        """Of those that stay the same; the others are compared with their memory."""
        return Steady([self._untouched[1]]) if self._stay_untouched() else None

    def _stay_untouched(self) -> bool:
        """Whether the kept tensors are those that the last call found untouched, as long as what holds them does."""
        return (
            self._are_untouched and self._untouched[0] is self._memory.kept() and self._containers.steady() is not None
        )

    def _steady_hooks(self) -> Steady:
        if self._hooked:
            return Steady(rest=self._hooks_hold)
        made = self._hooks_made
        return Steady([self._are_quiet], lambda: torch_adapter.hooks_made() == made)

    def _tensors_hold(self) -> bool:
        kept, check = self._untouched
        self._are_untouched = kept is self._memory.kept() and check()
        if not self._are_untouched:
            self._watch_tensors()
            if self._kept_alike is None or not self._kept_alike(*self._read_kept()):
                return False
        return self._others_alike(*self._other_places.read())

    def _watch_tensors(self) -> None:
        """See each change of a kept tensor from now on. Before the tensors are compared: what another thread changes
        meanwhile is seen by the next call."""
        with torch_adapter.no_torch_function():
            kept = self._memory.kept_for_comparison()
            self._next_untouched = kept, state_checks.unchanged_tensors(self._read_kept(), kept)

    def _hooks_hold(self) -> bool:
        if not self._are_quiet() or (self._hooked and any(hooks_of(leaf) != hooks for leaf, hooks in self._hooked)):
            return False
        # A leaf without hooks gets one by a registration alone: `swap_tensors` registers one, too.
        made = torch_adapter.hooks_made()
        if made != self._hooks_made:
            if any(any(map(hooks, self._unhooked)) for hooks in torch_adapter.leaf_hooks):
                return False
            self._hooks_made = made
        return True

    def _remember(self) -> None:
        """Store the present state, which :meth:`failure` accepted, for later comparisons."""
        self._steady.separate()
        self._hooks_made = -1
        self._untouched = self._next_untouched
        self._kept_alike = torch_adapter.like(self._read_kept())
        self._others_alike = torch_adapter.like(self._other_places.read())
        # Of tensors that have to be alike, `requires_grad` has to be the same too.
        compared = set(map(id, self._kept_tensors))
        others = [(leaf, required) for leaf, _, required, _ in self._flags if id(leaf) not in compared]
        others += [(leaf, False) for leaf, _ in self._plain if id(leaf) not in compared]
        self._leaves_require_grad = state_checks.require_grad(others)
        self._unhooked = [leaf for leaf, _, _, hooks in self._flags if not hooks]
        self._hooked = [(leaf, hooks) for leaf, _, _, hooks in self._flags if hooks]

    def _read_kept(self) -> list[Any]:
        """The tensors of kept places, now: not read again while the guards see the same objects."""
        if (kept := self._memory.kept()) is not self._read_with:
            self._read_with, self._kept_tensors = kept, self._kept_places.read()
        return self._kept_tensors

    def _leaf_failure(self) -> str | None:
        for (tensor, path, requires_grad, hooks), kind in zip(self._flags, self._kinds, strict=True):
            if type(tensor) is not kind:
                return f"the class of {path} is {type(tensor).__qualname__}, was {kind.__qualname__}"
            if tensor.requires_grad is not requires_grad:
                return f"{path}.requires_grad is {tensor.requires_grad}"
            if hooks_of(tensor) != hooks:
                return f"the hooks registered on {path} changed: {_listed(hooks_of(tensor))}, had {_listed(hooks)}"
        for tensor, path in self._plain:
            if tensor.requires_grad:
                return f"{path}.requires_grad is True"
        if not self._are_quiet():
            site = next(site for site in self._sites if site.read() and not site.before)
            return f"a {site.kind} hook was registered on {site.owner}"
        return None

    def _value_failure(self) -> str | None:
        for container, key, pattern in self._values:
            if not matches(container.get(key), pattern):
                return f"{container.label(key)} holds something else"
        if len(self._growing) > 1:
            now = _numbered([container.get(key) for container, key in self._growing])
            for (container, key), at, before in zip(self._growing, now, self._growing_alike, strict=True):
                if at != before:
                    return f"the list {container.label(key)} is at {'other' if at < before else 'fewer'} places"
        if self._replaced:
            now = self._numbered([place.outer() for place in self._replaced])
            for place, at, before in zip(self._replaced, now, self._sharing, strict=True):
                if at != before:
                    return f"the object of {place.path} is at {'other' if at < before else 'fewer'} places"
        return None

    def _numbered(self, objects: list[Any]) -> list[int]:
        """For each object the number of the first one that is the same; -1 for those that are guarded."""
        return [-1 if id(obj) in self._kept else at for obj, at in zip(objects, _numbered(objects), strict=True)]

    def _memory_failure(self) -> str | None:
        with torch_adapter.no_torch_function():
            return self._memory.failure()

    def _settings_failure(self) -> str | None:
        found = zip(_SETTINGS, _settings(), self._settings, strict=True)
        return next((f"{name} is {now}, was {before}" for name, now, before in found if now != before), None)


def _none_fails(failure: Callable[[], str | None], steady: Callable[[], Steady] | None = None) -> GuardPart:
    return GuardPart(lambda: failure() is None, steady)


def _numbered(objects: list[Any]) -> list[int]:
    """For each object the number of the first one that is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(id(obj), at) for at, obj in enumerate(objects)]


def _listed(hooks: tuple[HookKey, ...]) -> str:
    return ", ".join(getattr(key.hook, "__qualname__", repr(key.hook)) for key in hooks) or "none"


# Global settings of torch that change what a step computes. All are read before every call. Those that the compiled
# checks know of (:func:`state_checks.same_settings`):
_READ_AT_ONCE: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "default dtype": torch.get_default_dtype,
    "autocast on CPUs": partial(torch.is_autocast_enabled, "cpu"),
    "autocast on GPUs": partial(torch.is_autocast_enabled, "cuda"),
    "autocast dtype on CPUs": partial(torch.get_autocast_dtype, "cpu"),
    "autocast dtype on GPUs": partial(torch.get_autocast_dtype, "cuda"),
    "autocast region": torch_adapter.in_autocast_region,
    "autocast cache": torch.is_autocast_cache_enabled,
}
_SETTINGS: dict[str, Callable[[], Any]] = {
    **_READ_AT_ONCE,
    "anomaly mode with check_nan": lambda: torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled(),
    "function modes": torch_adapter.function_modes,
    "saved tensor hooks": torch_adapter.innermost_saved_tensor_hooks,
    "deterministic algorithms": torch_adapter.deterministic_algorithms,
    "float32 matmul precision": torch_adapter.float32_matmul_precision,
}


_OTHER_SETTINGS = [read for name, read in _SETTINGS.items() if name not in _READ_AT_ONCE]


def _settings() -> list[Any]:
    return list(map(operator.call, _SETTINGS.values()))


def _read_settings() -> list[Any]:
    return list(map(operator.call, _READ_AT_ONCE.values()))
