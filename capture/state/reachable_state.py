"""The Python state that a step can reach: its tensors, modules, optimizers, containers and hooks.

A captured graph replaces the user's Python, so everything that this Python would read or write must be known. Starting
from the step function, :class:`ReachableState` walks closures, globals, modules, optimizers, attributes and plain
containers, and keeps a shallow copy of each container. The walk serves three ends. It gives the inputs of the graph
their names and roles. The difference between the copies and the containers after the capture is what the step changed:
it is undone, and repeated by each compiled call. And the copies are guards of later calls.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.state.asked_attributes import AskedAttributes
from weft.capture.state.code_names import (
    OPAQUE,
    AttributeNames,
    closed_over,
    functions_in,
    globals_used,
    imported_by,
    parts_of_member,
)
from weft.capture.state.containers import (
    GROWING_KINDS,
    MISSING,
    SIMPLE,
    Attributes,
    Container,
    StatePlace,
    label_of,
    role_of,
)
from weft.capture.state.contents import (
    LOCKS,
    all_attributes,
    attributes_of,
    attributes_with_tensors,
    content_of,
    keys_of,
    names_asked_by,
    referents_of,
    settings_of,
    sparse_layouts,
    unproxied,
    unsaved_buffers,
    value_of,
)
from weft.capture.state.deep_walks import WaitingVisits, waits_when_deep
from weft.capture.state.followed_names import FollowedByObject, FollowedNames
from weft.capture.state.function_defaults import containers_of
from weft.capture.state.hook_registrations import HookSite, new_hooks, sites_of, user_hook
from weft.capture.state.object_parts import followed_items, is_replaceable
from weft.capture.state.object_types import ObjectTypes
from weft.capture.state.optimizer_parts import WalkedSchedulers, parts_of_groups, state_of
from weft.capture.state.origin import is_foreign, is_own, is_walked_module
from weft.capture.state.plain_leaves import PlainLeaves
from weft.capture.state.script_modules import script_state
from weft.capture.state.tensor_attributes import AttributesOfTensors, MissingAttributes
from weft.capture.state.tensor_memory import inner_tensor, memory_key, parts_at, wrappers
from weft.capture.state.type_facts import (
    ASK_LOCKS,
    ASK_STATE,
    BOOKKEEPING,
    OF_DEFAULTDICTS,
    OF_LOGGERS,
    PLAIN_HOLDERS,
    SIMPLE_KINDS,
    FactsOfTypes,
    TypeFacts,
)
from weft.capture.state.wrappers_of_torch import refuse_wrapper_of_torch
from weft.capture.step_interface import Role


class ReachableState:
    """Everything reachable from a step function, at the time of the walk.

    Args:
        step: the function whose closure, globals and ``self`` are walked.
        with_hooks: whether hooks on leaf tensors are walked too.
        replaced: paths of lists and dictionaries that the step replaces by new ones. What is in them has its place
            under the entry that holds them, unless an entry that the step keeps holds them too.
        growing: paths of lists to which the step appends. What is in them is not walked.
        computed: names of attributes that the step is known to compute, and the like (:class:`AskedAttributes`).

    Attributes:
        places: the place where each tensor was found first, by its ``memory_key``.
        containers: every mutable container that was met.
        places_by_id: the place where each tensor object was found first, by its id.
        in_memory: the plain tensors found in each storage, by ``memory_key(tensor)[0]``.
        modules, optimizers, leaves: those found, with their paths. names: attributes that the code of the step names.
        asked: those that it asks for otherwise. schedulers: those of learning rates that were found.
        plain_leaves: the leaves that do not require grad and are no parameters.
        sites: where hooks can be registered on the leaves.
        shared: those of ``replaced`` and ``growing`` that were met at another place, too, which keeps its object.
        replaced_places: where lists and dictionaries of ``replaced`` are, with the object there. One object may be at
            several of them; what is in it has its place under the first.
    """

    def __init__(
        self,
        step: Any,
        *,
        with_hooks: bool = True,
        replaced: frozenset[str] = frozenset(),
        growing: frozenset[str] = frozenset(),
        computed: frozenset[str] = frozenset(),
    ) -> None:
        self.step = step
        self._growing, self._replaced = growing, replaced
        self.waiting_visits = WaitingVisits()
        self._replaced_at: dict[int, str] = {}
        self.shared: set[str] = set()
        self.replaced_places: list[tuple[StatePlace, Any]] = []
        self._with_hooks = with_hooks
        self.places: dict[tuple[Any, ...], StatePlace] = {}
        self.places_by_id: dict[int, StatePlace] = {}
        self.in_memory: dict[int, list[torch.Tensor]] = {}
        self.types = ObjectTypes()
        self.containers: list[Container] = [self.types]
        self.modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, str]] = []
        self.leaves: list[tuple[torch.Tensor, str]] = []
        self.plain_leaves = PlainLeaves()
        self._seen: dict[int, Any] = {}
        self.sites: list[HookSite] = []
        self._counted_attributes: dict[int, frozenset[str]] = {}  # by id of a module
        self._attributes, self._later = list[tuple[torch.nn.Module, str]](), list[tuple[torch.optim.Optimizer, str]]()
        self._keys: list[tuple[Any, str]] = []
        self._when_asked: list[tuple[Container, frozenset[str]]] = []  # count where code has one of these names
        self._tensors = AttributesOfTensors()
        self.missing = MissingAttributes()
        self._objects: dict[int, tuple[Any, str, FollowedByObject]] = {}
        self._whole: set[int] = set()  # ids of objects of which all attributes are followed
        self._kinds = FactsOfTypes()
        self._functions: dict[int, types.FunctionType] = {}
        self._classes, self._codes = set[type](), set[tuple[int, int]]()
        self._inside_walked = 0
        self._names_followed = -1  # how many names there were when all objects were last followed by them
        self.asked = AskedAttributes(self, computed)
        self.names = AttributeNames(step, self.asked.names, self.asked.modules)
        self.schedulers = WalkedSchedulers(self._container)
        self._followed = FollowedNames(self.names, self._kinds)
        self.add(step, "")

    def add(self, obj: Any, path: str) -> None:
        """Walk ``obj`` too, a module or optimizer that the step was seen to use."""
        self._visit(obj, path, None)
        self.go_on()

    def is_unknown(self, obj: Any, name: str) -> bool:
        """Whether code that asks an object for an attribute by a text may find something that is not followed."""
        return self._followed.is_unknown(obj, name, met=id(obj) in self._objects or id(obj) in self.modules)

    def path_of(self, obj: Any) -> str | None:
        """The path of an object that was met and can have attributes, None of any other."""
        if issubclass(type(obj), torch.Tensor):
            return self._tensors.path_of(obj)
        met = self.modules.get(id(obj)) or self._objects.get(id(obj))
        return None if met is None else met[1]

    def follow_all(self, obj: Any, path: str, known: frozenset[str] = frozenset()) -> None:
        """Follow all attributes of an object or a class, those that it may get included, but for ``known``."""
        if id(obj) not in self._whole:
            self._whole.add(id(obj))
            for each in all_attributes(obj, path, known, self._tensors.found_with(obj)):
                self._container(each)

    def follow_variables(self, module: dict[str, Any], names: Iterable[str]) -> None:
        """Follow global variables of a module, there or not; with "" among the names which ones there are."""
        found = frozenset(names)
        if "" in found:
            self.containers.append(keys_of(module, "a module"))
        if found := found - {""}:
            self._container(Container(module, "", found, str, found))

    def go_on(self) -> None:
        """Follow what the walk has met, and not followed yet."""
        while self._attributes or self._later or self._keys or self._names_followed != self.names.count:
            if self._attributes:
                self._module_attributes(*self._attributes.pop(0))
            elif self._later:
                self._optimizer(*self._later.pop())
            elif self._names_followed != self.names.count:
                # Functions met since then name more attributes. Objects met before may have these attributes.
                self._names_followed = self.names.count
                for module, where in list(self.modules.values()):
                    if self._kinds[type(module)].own and id(module) in self._counted_attributes:
                        self._count_absent(module, where)
                for kind in list(self._classes):
                    self._methods(kind)
                for known_object, where, _ in list(self._objects.values()):
                    self._object(known_object, where)
            else:
                key, where = self._keys.pop(0)
                self._visit(key, where, None)
        self.types.note(self.with_attributes)
        self.asked.follow_modules()
        for container, names in self._when_asked:
            container.frozen = self.names.isdisjoint(names)

    @property
    def objects(self) -> list[Any]:
        """All objects that the walk met, but for plain values."""
        return list(self._seen.values())

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions that the step can call, but for those of torch and the like."""
        return list(self._functions.values())

    @property
    def with_attributes(self) -> list[tuple[Any, str]]:
        """The objects and classes whose attributes count, with their paths."""
        found = (*self.modules.values(), *self._objects.values(), *self.schedulers.with_paths, *self.optimizers)
        return [each[:2] for each in found]

    def add_hooks(self, hooks: dict[int, Any], path: str) -> None:
        """Walk a dictionary of hooks and what they close over."""
        self._container(Container(hooks, path, label=lambda key: f"a hook in {path}"))
        for hook in list(hooks.values()):
            self._visit(user_hook(hook), path, None)

    def notice_new_hooks(self) -> None:
        """Treat hooks that the step left on leaves without hooks as changes of Python state."""
        self.containers += new_hooks(self.sites, self._seen)

    def notice_new_attributes(self) -> None:
        """Treat attributes that the step put on tensors as changes of Python state, also where no code names them."""
        followed = lambda tensor: self._objects[id(tensor)][2] if id(tensor) in self._objects else ()
        self.containers += [*self._tensors.new(followed), *self.plain_leaves.changed()]

    def follow_missing(self, obj: torch.Tensor, name: str) -> None:
        """Let it count that a tensor lacks an attribute, which the step looked for."""
        if (path := self.path_of(obj)) is not None:
            self.missing.note(obj, path, name)

    def end_walk(self) -> None:
        """Drop all references that guards, inputs and effects do not need: the program may hold objects weakly."""
        walked = self._seen, self._objects, self._tensors, self._functions, self.schedulers, self.modules
        for known in (*walked, self.in_memory, self.plain_leaves):
            known.clear()
        self.types.forget_unchanged()
        self._followed.forget()

    # ---- what changed

    def changes(self) -> Iterator[tuple[Container, Any, Any, Any]]:
        """(container, key, before, after) of each entry that differs from the walk."""
        yield from ((container, *change) for container in self.containers for change in container.changes())

    def restore(self) -> None:
        """Undo the changes: every container gets back the entries that the walk found."""
        for container in reversed(self.containers):
            container.restore()

    def refresh(self) -> None:
        """Compare with the entries as they are now from here on."""
        for container in self.containers:
            container.refresh()

    # ---- the walk

    @waits_when_deep
    def _visit(self, obj: Any, path: str, place: StatePlace | None) -> None:
        obj = unproxied(obj)
        kind = type(obj)
        if id(obj) in self._seen or kind in SIMPLE_KINDS:
            self._met_again(obj, path, place)
            return
        if kind in PLAIN_HOLDERS:
            self._seen[id(obj)] = obj
            self._elements(obj, path, place)
            return
        if isinstance(obj, torch.Tensor):
            self._tensor(obj, path, place)
            return
        if isinstance(obj, SIMPLE):
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, torch.nn.Module):
            self._module(obj, path)
        elif isinstance(obj, torch.optim.Optimizer) and "param_groups" in vars(obj):  # no wrapper of a library's
            self._later.append((obj, path))
        elif isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            self._class(type(obj))
            self.schedulers.meet(obj, path)
        elif isinstance(obj, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(obj, path)
        elif isinstance(obj, (types.ModuleType, type)):
            if is_own(obj):
                self._own(obj, path)
            for settings, names in [] if is_own(obj) else settings_of(obj):
                self._container(settings)
                self._when_asked += [(settings, names)] if names else []
        elif isinstance(wrapped := attributes_of(obj).get("__wrapped__"), (types.FunctionType, types.MethodType)):
            self._visit(wrapped, path, None)  # a compiled step that this step calls, or a function with a cache
        else:
            self._other(obj, path, place)

    def _met_again(self, obj: Any, path: str, place: StatePlace | None) -> None:
        """Another place of an object: of a list that each call replaces at all of its places, or only at some."""
        replaced = place is not None and self._is_replaced(obj, path, place)
        first = self._replaced_at.get(id(obj))
        if replaced and first in self._replaced:
            self.replaced_places.append((place, obj))
        elif replaced or first is not None:
            self.shared |= {each for each in (path if replaced else None, first) if each is not None}

    def _other(self, obj: Any, path: str, place: StatePlace | None) -> None:
        """An object of a class of the user's, of a library's or of another one of Python's own."""
        kind = self._kinds[type(obj)]
        self._elements(obj, path, place)
        if self._is_replaced(obj, path, place):
            self._class(type(obj))
            return
        # Sets inside weft's own objects change with what else is guarded.
        access = None if self._inside_walked else kind.access
        if access is not None and (content := content_of(obj, access, path)) is not None:
            self.containers.append(content)
            if isinstance(obj, LOCKS):  # another thread may hold one that a `with` of the step would wait for
                self._when_asked.append((content, ASK_LOCKS))
            if isinstance(obj, contextvars.ContextVar):
                is_set = content.before[content.KEY] is not MISSING
                found = StatePlace(content, content.KEY, path, Role.BUFFER) if is_set else None
                self._visit(value_of(obj), f"{path}.get()", found)
        if kind.has_attributes:
            self._object(obj, path)
        elif isinstance(obj, logging.Logger):
            self._container(Attributes(obj, path, OF_LOGGERS, label_of(path)))
        elif not kind.is_user:
            for name in names_asked_by(obj):
                self.names.add_text(name)
            for referent in referents_of(obj):
                self._visit(referent, path, None)
            if names := attributes_with_tensors(obj):  # an object of torch's or of Python's own that the user filled
                self._container(Container(attributes_of(obj), path, names, label_of(path)))
        for part in parts_of_member(obj):
            self._visit(part, path, None)

    def _elements(self, obj: Any, path: str, place: StatePlace | None) -> None:
        """What an object of Python's own types holds."""
        if isinstance(obj, tuple) or self._is_replaced(obj, path, place):
            if place is not None and not isinstance(obj, tuple):
                self._replaced_at[id(obj)] = path
                self.replaced_places.append((place, obj))
            self._items(obj, path, place)
        # A stand-in cannot take the place of a list inside of a tuple.
        elif place is not None and not place.items and path in self._growing and type(obj) in GROWING_KINDS:
            self._replaced_at[id(obj)] = path
        elif isinstance(obj, (dict, list, deque)):
            self._container(Container(obj, path))
            if isinstance(obj, defaultdict):
                self._container(Attributes(obj, path, OF_DEFAULTDICTS, label_of(path)))
        elif isinstance(obj, (set, frozenset)):
            elements = Container(obj, path)
            for at, item in enumerate(obj):
                self._visit(item, f"{path}[{at}]", StatePlace(elements, at, f"{path}[{at}]", role_of(item)))

    def _is_replaced(self, obj: Any, path: str, place: StatePlace | None) -> bool:
        return place is not None and path in self._replaced and is_replaceable(obj)

    def _items(self, obj: Any, path: str, place: StatePlace | None) -> None:
        """What is in a tuple, or in an object that each call replaces, at places under its own."""
        if place is not None and isinstance(obj, (dict, list)):
            label = label_of(path) if place.items[-1:] == (vars,) else None
            self.containers.append(Container(obj, path, label=label))
            self.containers[-1].outer, self.containers[-1].frozen = place, True
        for at, item in followed_items(obj):
            inner = place and place.inside(at)
            visit = self._items if at is vars else self._visit
            visit(item, inner.path if inner else path if at is vars else f"{path}[{at!r}]", inner)

    def _container(self, container: Container, role: Role | None = None) -> None:
        self.containers.append(container)
        seen, places_matter = self._seen, bool(self._replaced or self._growing)
        for key, value in container.before.items():
            if value is MISSING:
                continue
            # Most entries are plain values, in which nothing is found, or objects that were met before.
            known = type(value) in SIMPLE_KINDS or id(value) in seen
            if known and type(key) in SIMPLE_KINDS and not places_matter:
                continue
            path = container.label(key)
            if not isinstance(key, SIMPLE):
                self._keys.append((key, path))
            self._visit(value, path, StatePlace(container, key, path, role or role_of(value)))

    def _tensor(self, tensor: torch.Tensor, path: str, place: StatePlace | None) -> None:
        self._seen[id(tensor)] = tensor
        self._class(type(tensor))
        if place is not None:
            if tensor.layout is torch.strided:
                self.places_by_id[id(tensor)] = dataclasses.replace(place, path=path, inner=inner_tensor(tensor)[1])
            self.containers += sparse_layouts(tensor, place)
            for where, names, part in parts_at(tensor, path):
                self.places.setdefault(key := memory_key(part), dataclasses.replace(place, path=where, inner=names))
                self.in_memory.setdefault(key[0], []).append(part)
        for each, where, whole in self._tensors.note(tensor, path, self.asked.has_all):
            self._objects.setdefault(id(each), (each, where, self._followed.none()))
            if whole:
                self.follow_all(each, where)
        if tensor._base is not None and tensor._base.requires_grad:  # it may get the gradient of this view
            self._visit(tensor._base, f"{path}._base", None)
        if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
            self.leaves.append((tensor, path))
            for wrapper in wrappers(tensor):  # a step may exchange what is in it
                self._container(Container(vars(wrapper), path, frozenset(vars(wrapper)), label_of(path)))
            self._container(Container(tensor, path, label=lambda key: f"{path}.{key}"), Role.GRADIENT)
            for site in sites_of(tensor, path) if tensor.requires_grad and self._with_hooks else ():
                self.sites.append(site)
                if (hooks := site.read()) and id(hooks) not in self._seen:
                    self._seen[id(hooks)] = hooks
                    self.add_hooks(hooks, f"the {site.kind} hooks of {path}")
        elif tensor.is_leaf:
            self.plain_leaves.note(tensor, path, place, self._container)

    def _module(self, module: torch.nn.Module, path: str) -> None:
        refuse_wrapper_of_torch(module, path)
        self.modules[id(module)] = module, path
        if isinstance(module, torch.jit.ScriptModule):
            for container, role in script_state(module, path):
                self._container(container, role)
            return
        self._class(type(module))
        prefix, own = f"{path}." if path else "", vars(module)
        self._seen |= {id(each): each for each in (own["_parameters"], own["_buffers"], own["_modules"])}
        for name, role in (("_parameters", Role.PARAMETER), ("_buffers", Role.BUFFER), ("_modules", None)):
            self._container(Container(own[name], path, label=lambda key: f"{prefix}{key}"), role)
        self.containers.append(unsaved := unsaved_buffers(module, path))
        self._when_asked.append((unsaved, ASK_STATE))
        self._attributes.append((module, path))

    def _module_attributes(self, module: torch.nn.Module, path: str) -> None:
        """The other attributes of a module, after its parameters, whose places have short names."""
        prefix, own = f"{path}." if path else "", vars(module)
        absent = self._followed.absent(module, own)
        self._counted_attributes[id(module)] = absent.union(own)
        if self.asked.has_all(path):
            self.follow_all(module, path)
            return
        joined = self._followed.joined
        keys = joined(joined(self.names.frozen, frozenset(own) - BOOKKEEPING), absent)
        self._container(Container(own, path, keys, label=lambda key: f"{prefix}{key}", absent=absent))

    def _count_absent(self, module: torch.nn.Module, path: str) -> None:
        """Let it count that no attribute takes the place of a method; again once code with more names was met."""
        known = self._counted_attributes[id(module)]
        if absent := self._followed.absent(module, vars(module)) - known:
            self._counted_attributes[id(module)] = known | absent
            self._container(Container(vars(module), path, absent, label_of(path), absent))

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        self.optimizers.append((optimizer, path))
        # Loading a checkpoint replaces both objects; adding a parameter group makes the list longer.
        replaceable = frozenset({"state", "param_groups"})
        self.containers.append(Container(vars(optimizer), path, replaceable, label=lambda key: f"{path}.{key}"))
        self._object(optimizer, path, frozenset(dir(torch.optim.Optimizer)) | replaceable)
        for name, inner in vars(optimizer).items():
            if isinstance(inner, torch.optim.Optimizer):  # of a ZeroRedundancyOptimizer, or of a wrapper of a library's
                self._visit(inner, f"{path}.{name}", None)
        self.containers.append(Container(optimizer.param_groups, f"{path}.param_groups"))
        for part, role in parts_of_groups(optimizer.param_groups, path):
            if role is not Role.PARAMETER or id(part.obj) not in self._seen:
                self._seen |= {id(part.obj): part.obj} if role is Role.PARAMETER else {}
                self._container(part, role)
        for kind, hooks in torch_adapter.optimizer_hooks(optimizer):
            self.add_hooks(hooks, f"the {kind} hooks of {path}")
        self._optimizer_state(optimizer, path)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        known = {id(each.obj) for each in self.containers}
        outer = state_of(optimizer, path, self.leaves)
        self.containers.append(outer)
        for key, entry in outer.before.items():
            where = outer.label(key)
            if id(entry) in known:
                continue  # found by the walk before: since then the step may have put values of the capture into it
            if isinstance(entry, dict):
                inner = Container(entry, where, label=lambda name, where=where: f"{where}.{name}")
                self._container(inner, Role.OPTIMIZER_STATE)
            else:
                self._visit(entry, where, StatePlace(outer, key, where, Role.OPTIMIZER_STATE))

    def extend_optimizer_state(self, created: torch.optim.Optimizer) -> None:
        """Walk the state of an optimizer again: it was created since the walk. That of others may be the step's."""
        for optimizer, path in self.optimizers:
            if optimizer is created:
                self.containers = [c for c in self.containers if c.obj is not optimizer.state]
                self._optimizer_state(optimizer, path)

    def _function(self, fn: Any, path: str) -> None:
        if hasattr(fn, OPAQUE):
            return
        if isinstance(fn, types.MethodType):
            self._visit(fn.__self__, path or "self", None)
            self._visit(fn.__func__, path, None)
        elif isinstance(fn, functools.partial):
            for at, value in enumerate((fn.func, *fn.args)):
                self._visit(value, f"{path}.args[{at}]" if at else path, None)
            self._visit(fn.keywords, f"{path}.keywords", None)
            self._object(fn, path)
        else:
            self._function_code(fn)
            if not is_foreign(fn.__module__):
                self.names.add_code(fn.__code__)

    def _function_code(self, fn: Any) -> None:
        """What a function closes over, the globals and modules that it names, and what it itself holds."""
        if not isinstance(fn, types.FunctionType) or id(fn) in self._functions or is_foreign(fn.__module__):
            return
        self._functions[id(fn)] = fn
        names = closed_over(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if name in names and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._container(Container(cell, name, label=lambda key, name=name: name))
        # By identity: equal code of another module reads the variables of that module.
        if (code := (id(fn.__code__), id(fn.__globals__))) not in self._codes:
            self._codes.add(code)
            used, absent = globals_used(fn)
            if used:
                self._container(Container(fn.__globals__, "", used, str, absent))
            self.follow_variables(fn.__globals__, self.asked.variables(fn.__globals__))
            for module in imported_by(fn.__code__, fn.__globals__.get("__package__") or ""):
                self._visit(module, module.__name__, None)
        if is_own(fn):
            for container in containers_of(fn, self._growing):
                self._container(container)
            self._visit(fn.__kwdefaults__, f"{fn.__name__}.__kwdefaults__", None)
            self._object(fn, fn.__name__)
        else:
            self._visit(list(fn.__defaults__ or ()), f"{fn.__name__}.__defaults__", None)

    def _own(self, owner: Any, path: str) -> None:
        """A module or a class of the user's that the step's code names."""
        self._object(owner, path if isinstance(owner, types.ModuleType) else owner.__qualname__)
        if isinstance(owner, types.ModuleType):
            self.follow_variables(vars(owner), self.asked.variables(vars(owner)))
        if isinstance(owner, type):
            for kind in owner.__mro__[1:]:
                self._visit(kind, path, None)
            for function in functions_in(vars(owner).get("__init__")):
                self._visit(function, path, None)

    def _class(self, kind: type) -> TypeFacts:
        """The class of an object: the code that it can run, and what it holds where it is the user's."""
        facts = self._kinds[kind]
        if facts.is_user and not facts.is_walked and kind not in self._classes:
            self._classes.add(kind)
            self._methods(kind)
            for base in facts.own:
                self._object(base, base.__qualname__)
        return facts

    def _methods(self, kind: type) -> None:
        for method in self.names.methods_used(kind):
            self._function_code(method)

    def _object(self, obj: Any, path: str, known: frozenset[str] = frozenset()) -> None:
        """The attributes of an object, a class or a module that code can read, but for those of the names ``known``."""
        kind = self._class(type(obj))
        followed = self._followed
        visited = self._objects.setdefault(id(obj), (obj, path, followed.none(known)))[2]
        attributes, absent = attributes_of(obj), frozenset[str]()
        if self.asked.has_all(path):
            named = absent, absent
            self.follow_all(obj, path, known)
        else:
            named = (frozenset(attributes), absent) if kind.is_walked else followed.named(obj, attributes, kind)
            absent = followed.absent(obj, attributes)
        slots = kind.slots & self.names if kind.slots else kind.slots
        new = visited.grow(*named, absent, slots)
        if new.slots:
            self._container(Attributes(obj, path, new.slots, label_of(path), new.slots))
        keys = followed.joined(new.names, new.absent)
        if keys <= new.left_out:
            return
        if isinstance(obj, (type, threading.local)):
            self._container(Attributes(obj, path, keys, label_of(path), new.absent, new.left_out))
            return
        container = Container(attributes, path, keys, label_of(path), new.absent, new.left_out)
        container.frozen = kind.is_frozen
        inside = is_walked_module(type(obj).__module__)
        self._inside_walked += inside
        self._container(container)
        self._inside_walked -= inside
