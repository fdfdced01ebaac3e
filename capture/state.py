"""The Python state a step can reach: where its tensors live, what it changed, what a later call must still find.

A captured graph replaces the user's Python, so everything that Python would have read or written must be known. From
the step function this module walks closures, globals, modules, optimizers and plain containers, and keeps a shallow
copy of each. The copy serves three ends: names and roles for the graph's inputs, the difference made by a capture
(undone, and done again by each compiled call), and guards.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import Role
from weft.capture.registrations import user_hook

SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
_UNCALLABLE = (bool, int, float, complex, str, bytes)
_FOREIGN = {"torch", "numpy", "sympy", "rich", "triton", "weft", "_pytest", "pytest", "tyro", "matplotlib"}
_WELCOME = ("weft.distributed", "weft.capture.toy", "torch.amp", "torch.cuda.amp")
# Attributes of every nn.Module that do not change what its forward or backward does.
_BOOKKEEPING = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
MISSING = object()
OPAQUE = "__weft_opaque__"
# Code of the functions that were marked opaque. What only they use is none of the step's business.
opaque_code: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


class Container:
    """A mutable Python object that holds others; ``keys`` restricts which of its entries count.

    Attributes:
        before: the entries as they were found.
        frozen: nobody assigns to it after all (the attributes of a frozen dataclass of weft's own).
    """

    def __init__(
        self, obj: Any, path: str, keys: frozenset[str] | None = None, label: Callable[[Any], str] | None = None
    ) -> None:
        self.obj = obj
        self.path = path
        self.keys = keys
        self.frozen = False
        self.label = label or (lambda key: f"{path}[{key!r}]")
        self.before: dict[Any, Any] = self.entries()

    def entries(self) -> dict[Any, Any]:
        obj = self.obj
        if isinstance(obj, types.CellType):
            try:
                return {0: obj.cell_contents}
            except ValueError:
                return {}
        if isinstance(obj, dict):
            return {k: v for k, v in obj.items() if self.keys is None or k in self.keys}
        if isinstance(obj, torch.Tensor):
            return {"grad": obj.grad}
        return dict(enumerate(obj))

    def set(self, key: Any, value: Any) -> None:
        obj = self.obj
        if isinstance(obj, types.CellType):
            obj.cell_contents = value
        elif isinstance(obj, torch.Tensor):
            obj.grad = value
        elif isinstance(obj, dict):
            obj[key] = value
        elif isinstance(obj, (list, deque)):
            if key == len(obj):
                obj.append(value)
            else:
                obj[key] = value

    def remove(self, key: Any) -> None:
        if isinstance(self.obj, dict):
            self.obj.pop(key, None)
        elif isinstance(self.obj, (list, deque)):
            del self.obj[key]

    def restore(self) -> None:
        for key, _, _ in reversed(list(self.changes())):
            if key not in self.before:
                self.remove(key)
        for key, old, _ in list(self.changes()):
            self.set(key, old)
        if isinstance(self.obj, dict) and self.keys is None and list(self.obj) != list(self.before):
            for key in self.before:  # hooks run in the order of their dictionary
                self.obj[key] = self.obj.pop(key)

    def grew(self) -> bool:
        """Whether a list that had entries kept them and got more: it will at every call. (One that was empty may be
        cleared by the next call before it is filled again.)"""
        now = self.entries()
        longer = isinstance(self.obj, (list, deque)) and len(now) > len(self.before) > 0
        return longer and all(now[key] is old for key, old in self.before.items())

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, before, after) of each entry that differs from the shallow copy; MISSING where there is none."""
        now = self.entries()
        for key in {**self.before, **now}:
            old, new = self.before.get(key, MISSING), now.get(key, MISSING)
            if old is not new and not _same_simple(old, new):
                yield key, old, new


@dataclass(frozen=True)
class Place:
    """Where one tensor or number lives: an entry of a container, and the inner tensor of a subclass where it is one."""

    container: Container
    key: Any
    path: str
    role: Role
    inner: tuple[str, ...] = ()

    def outer(self) -> Any:
        """The object at this place now, MISSING where there is none."""
        obj = self.container.obj
        if isinstance(obj, dict):
            return obj.get(self.key, MISSING)
        if isinstance(obj, torch.Tensor):
            return obj.grad
        return self.container.entries().get(self.key, MISSING)

    def get(self) -> Any:
        value = self.outer()
        for name in self.inner:
            value = getattr(value, name, MISSING)
        return value


@dataclass(frozen=True)
class HookSite:
    """Where hooks of one kind are registered on one leaf tensor; ``read`` returns their dictionary, if there is one."""

    owner: str
    kind: str
    read: Callable[[], dict[int, Any] | None]
    before: dict[int, Any]


class State:
    """Everything reachable from a step function, as it stands when the walk is made.

    Args:
        step: the function whose closure, globals and ``self`` are walked.

    Attributes:
        places: for the identity of each tensor's memory (see ``identity``) the place where it was found first.
        containers: every mutable container on the way.
        homes: for the id of each tensor object the place where it was found first.
        in_memory: for each storage (its address as a number) the plain tensors found in it.
        modules, optimizers, leaves: what was found of them, with their paths.
        sites: where hooks can be registered on the leaves.
    """

    def __init__(self, step: Any, *, with_hooks: bool = True) -> None:
        self.step = step
        self._with_hooks = with_hooks
        self.places: dict[tuple[Any, ...], Place] = {}
        self.homes: dict[int, Place] = {}
        self.in_memory: dict[int, list[torch.Tensor]] = {}
        self.containers: list[Container] = []
        self.modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, str]] = []
        self.leaves: list[tuple[torch.Tensor, str]] = []
        self._seen: dict[int, Any] = {}
        self.sites: list[HookSite] = []
        self._attributes: list[tuple[torch.nn.Module, str]] = []
        self._later: list[tuple[torch.optim.Optimizer, str]] = []
        self._keys: list[tuple[Any, str]] = []
        self._objects: dict[int, tuple[Any, str, set[str]]] = {}
        self._names = _Names(step)
        self.add(step, "")

    def add(self, obj: Any, path: str) -> None:
        """Walk ``obj`` too (a module or optimizer that the step was seen to use)."""
        self._visit(obj, path, None)
        known = -1
        while self._attributes or self._later or self._keys or known != self._names.count:
            if self._attributes:
                self._module_attributes(*self._attributes.pop(0))
            elif self._later:
                self._optimizer(*self._later.pop())
            elif known != self._names.count:  # code met since may name more attributes of objects met before
                known = self._names.count
                for known_object, where, _ in list(self._objects.values()):
                    self._object(known_object, where)
            else:
                key, where = self._keys.pop(0)
                self._visit(key, where, None)

    def add_hooks(self, hooks: dict[int, Any], path: str) -> None:
        """Walk a dictionary of hooks and what they close over."""
        self._container(Container(hooks, path, label=lambda key: f"a hook in {path}"))
        for hook in list(hooks.values()):
            self._visit(user_hook(hook), path, None)

    def sites_of(self, leaf: torch.Tensor, path: str) -> list[HookSite]:
        """The places where hooks can be registered on a leaf that requires grad, its autograd node included."""
        reads: list[tuple[str, Callable[[], dict[int, Any] | None]]] = []
        for at, (kind, _) in enumerate(torch_adapter.tensor_hooks(leaf)):
            reads.append((kind, lambda at=at: torch_adapter.tensor_hooks(leaf)[at][1]))
        node = torch_adapter.accumulator(leaf)
        for kind, hooks in torch_adapter.node_hooks(node):
            reads.append((kind, lambda hooks=hooks, node=node: hooks))
        return [HookSite(path, kind, read, dict(read() or {})) for kind, read in reads]

    def notice_new_hooks(self) -> None:
        """Hooks that the step left on leaves which had none become changes like any other."""
        for site in self.sites:
            hooks = site.read()
            if hooks and not site.before and id(hooks) not in self._seen:
                self._seen[id(hooks)] = hooks
                container = Container(hooks, f"the {site.kind} hooks of {site.owner}")
                container.before = {}
                self.containers.append(container)

    # ---- what changed

    def changes(self) -> Iterator[tuple[Container, Any, Any, Any]]:
        for container in self.containers:
            for key, old, new in container.changes():
                yield container, key, old, new

    def restore(self) -> None:
        """Put every container back as the walk found it."""
        for container in reversed(self.containers):
            container.restore()

    def refresh(self) -> None:
        """Take what stands now as the state to compare with."""
        for container in self.containers:
            container.before = container.entries()

    # ---- the walk

    def _visit(self, obj: Any, path: str, place: Place | None) -> None:
        if isinstance(obj, torch.Tensor):
            self._tensor(obj, path, place)
            return
        if isinstance(obj, SIMPLE) or id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, torch.nn.Module):
            self._module(obj, path)
        elif isinstance(obj, torch.optim.Optimizer):
            self._later.append((obj, path))
        elif isinstance(obj, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(obj, path)
        elif isinstance(getattr(obj, "__wrapped__", None), (types.FunctionType, types.MethodType)):
            self._visit(obj.__wrapped__, path, None)  # a compiled step that this one calls, a cached function
        elif isinstance(obj, (dict, list, deque)):
            self._items(obj, path)
        elif isinstance(obj, (tuple, set, frozenset)):
            for at, item in enumerate(obj):
                self._visit(item, f"{path}[{at}]", place)
        elif _is_user_object(obj):
            self._object(obj, path)

    def _items(self, obj: Any, path: str, role: Role | None = None) -> None:
        self._container(Container(obj, path), role)

    def _container(self, container: Container, role: Role | None = None) -> None:
        self.containers.append(container)
        for key, value in container.before.items():
            path = container.label(key)
            if not isinstance(key, SIMPLE):
                self._keys.append((key, path))
            self._visit(value, path, Place(container, key, path, role or _role_of(value)))

    def _tensor(self, tensor: torch.Tensor, path: str, place: Place | None) -> None:
        if id(tensor) in self._seen:
            return
        self._seen[id(tensor)] = tensor
        if place is not None and tensor.layout is torch.strided:
            inner, names = plain(tensor)
            home = Place(place.container, place.key, path, place.role, names)
            self.homes[id(tensor)] = home
            self.places.setdefault(identity(inner), home)
            self.in_memory.setdefault(identity(inner)[0], []).append(inner)
        if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
            self.leaves.append((tensor, path))
            self._container(Container(tensor, path, label=lambda key: f"{path}.grad"), Role.GRADIENT)
            if tensor.requires_grad and self._with_hooks:
                self._leaf_hooks(tensor, path)

    def _leaf_hooks(self, leaf: torch.Tensor, path: str) -> None:
        sites = self.sites_of(leaf, path)
        self.sites += sites
        for site in sites:
            hooks = site.read()
            if hooks and id(hooks) not in self._seen:
                self._seen[id(hooks)] = hooks
                self.add_hooks(hooks, f"the {site.kind} hooks of {path}")

    def _module(self, module: torch.nn.Module, path: str) -> None:
        self.modules[id(module)] = module, path
        self._function_code(type(module).forward)
        prefix = f"{path}." if path else ""
        own = vars(module)
        for name, role in (("_parameters", Role.PARAMETER), ("_buffers", Role.BUFFER)):
            self._container(Container(own[name], path, label=lambda key: f"{prefix}{key}"), role)
        self._container(Container(own["_modules"], path, label=lambda key: f"{prefix}{key}"))
        self._attributes.append((module, path))

    def _module_attributes(self, module: torch.nn.Module, path: str) -> None:
        """What a module holds besides parameters, buffers and modules; after those, so that they have their short
        names."""
        prefix = f"{path}." if path else ""
        keys = frozenset(vars(module)) - _BOOKKEEPING | frozenset(self._names)
        self._container(Container(vars(module), path, keys, label=lambda key: f"{prefix}{key}"))

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        self.optimizers.append((optimizer, path))
        # Loading a checkpoint puts other objects here; adding a group makes the list longer.
        both = frozenset({"state", "param_groups"})
        self.containers.append(Container(vars(optimizer), path, both, label=lambda key: f"{path}.{key}"))
        self.containers.append(Container(optimizer.param_groups, f"{path}.param_groups"))
        for at, group in enumerate(optimizer.param_groups):
            self._items(group["params"], f"{path}.param_groups[{at}]['params']", Role.PARAMETER)
            settings = frozenset(group) - {"params", "lr"}
            where = f"{path}.param_groups[{at}]"
            self._container(Container(group, where, settings, lambda key, where=where: f"{where}[{key!r}]"))
            if isinstance(group["lr"], torch.Tensor):
                rate = Container(group, where, frozenset({"lr"}), lambda key, where=where: f"{where}['lr']")
                self._container(rate, Role.SCALAR)
        for kind, hooks in torch_adapter.optimizer_hooks(optimizer):
            self.add_hooks(hooks, f"the {kind} hooks of {path}")
        self._optimizer_state(optimizer, path)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        names = {id(tensor): where for tensor, where in self.leaves}

        def label(key: Any) -> str:
            return f"{path}.state[{names.get(id(key), '?')}]"

        outer = Container(optimizer.state, f"{path}.state", label=label)
        self.containers.append(outer)
        for key, entry in outer.before.items():
            where = label(key)
            if isinstance(entry, dict):
                inner = Container(entry, where, label=lambda name, where=where: f"{where}.{name}")
                self._container(inner, Role.OPTIMIZER_STATE)
            else:
                self._visit(entry, where, Place(outer, key, where, Role.OPTIMIZER_STATE))

    def extend_optimizer_state(self) -> None:
        """Look again at optimizers: their state may have come to exist since the walk."""
        for optimizer, path in self.optimizers:
            self.containers = [c for c in self.containers if c.obj is not optimizer.state]
            self._optimizer_state(optimizer, path)

    def _function(self, fn: Any, path: str) -> None:
        if hasattr(fn, OPAQUE):
            return
        if isinstance(fn, types.MethodType):
            self._visit(fn.__self__, path or "self", None)
            self._visit(fn.__func__, path, None)
        elif isinstance(fn, functools.partial):
            for at, value in enumerate((fn.func, *fn.args, *fn.keywords.values())):
                self._visit(value, f"{path}.args[{at}]" if at else path, None)
        else:
            self._function_code(fn)
            if not _is_foreign(fn):
                self._names.add_code(fn.__code__)

    def _function_code(self, fn: Any) -> None:
        """The variables a function closes over and the globals it names."""
        if not isinstance(fn, types.FunctionType) or id(fn.__code__) in self._seen:
            return
        self._seen[id(fn.__code__)] = fn.__code__
        if _is_foreign(fn):
            return
        closed_over = _closed_over(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if name in closed_over and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._container(Container(cell, name, label=lambda key, name=name: name))
        used = frozenset(_code_names(fn.__code__)) & fn.__globals__.keys()
        if used:
            self._container(Container(fn.__globals__, "", used, label=str))
        self._visit(list(fn.__defaults__ or ()), f"{fn.__name__}.__defaults__", None)

    def _object(self, obj: Any, path: str) -> None:
        welcome = type(obj).__module__.startswith(_WELCOME)
        for method in () if welcome else _methods_used(type(obj), self._names):
            self._function_code(method)
        done = self._objects.setdefault(id(obj), (obj, path, set()))[2]
        keys = frozenset(vars(obj) if welcome else self._names.of(vars(obj))) - done
        if not keys:
            return
        done |= keys
        prefix = f"{path}." if path else ""
        container = Container(vars(obj), path, keys, label=lambda key: f"{prefix}{key}")
        container.frozen = welcome and _is_frozen(type(obj))
        self._container(container)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells one plain tensor's memory from another's: storage, offset, sizes, strides, dtype."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The tensor that reaches kernels, and the attributes that lead to it through wrapper subclasses."""
    names: tuple[str, ...] = ()
    while hasattr(tensor, "__tensor_flatten__"):
        inner = [n for n in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, n), torch.Tensor)]
        if len(inner) != 1:
            break
        names += (inner[0],)
        tensor = getattr(tensor, inner[0])
    return tensor, names


def _role_of(value: Any) -> Role:
    return Role.PARAMETER if isinstance(value, torch.nn.Parameter) else Role.BUFFER


def _same_simple(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, SIMPLE) and (old == new or (old != old and new != new))


def _root(module: str | None) -> str:
    return (module or "").split(".")[0]


def _is_user_object(obj: Any) -> bool:
    if isinstance(obj, (type, types.ModuleType)) or not hasattr(obj, "__dict__"):
        return False
    module = type(obj).__module__
    if module.startswith(_WELCOME):
        return True
    return _root(module) not in _FOREIGN and (_root(module) not in sys.stdlib_module_names or module == "__main__")


def _is_frozen(owner: type) -> bool:
    return dataclasses.is_dataclass(owner) and owner.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _is_foreign(fn: types.FunctionType) -> bool:
    return _root(fn.__module__) in _FOREIGN and not (fn.__module__ or "").startswith(_WELCOME)


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in _inner_code(code):
        if constant not in opaque_code:
            yield from _code_names(constant)


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Names whose value the code reads or writes, other than to call it as a method: ``x.step()`` reads no number
    ``step``."""
    for step in dis.get_instructions(code):
        method = step.opname == "LOAD_METHOD" or (
            step.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and (step.arg or 0) & 1
        )
        if step.opname.endswith(("_ATTR", "_NAME", "_GLOBAL")) and not method:
            yield step.argval
    for constant in _inner_code(code):
        if constant not in opaque_code:
            yield from _names_read(constant)


def _inner_code(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _closed_over(code: types.CodeType) -> set[str]:
    """The variables of outer functions that ``code`` uses, itself or in functions it makes that are not opaque."""
    inner = _inner_code(code)
    if not any(constant in opaque_code for constant in inner):
        return set(code.co_freevars)
    names = {step.argval for step in dis.get_instructions(code) if "DEREF" in step.opname}
    return names.union(*(_closed_over(constant) for constant in inner if constant not in opaque_code))


class _Names(set[str]):
    """Attribute names in the code that a step can run.

    Objects of the user's carry much that changes every step and has nothing to do with it (a trainer's counters);
    only attributes that the step, or a method it names, can read or write are looked at.

    Attributes:
        read: those that are used for more than to call a method.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.read: set[str] = set()
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None) or getattr(type(step).__call__, "__code__", None)
        if code:
            self.add_code(code)

    @property
    def count(self) -> int:
        return len(self) + len(self.read)

    def add_code(self, code: types.CodeType) -> None:
        self.update(_code_names(code))
        self.read.update(_names_read(code))

    def of(self, attributes: dict[str, Any]) -> set[str]:
        """The names that matter of an object with these attributes: a plain value is never called."""
        return {name for name in self if name in self.read or not isinstance(attributes.get(name), _UNCALLABLE)}


@functools.cache
def _functions_of(owner: type) -> dict[str, types.FunctionType]:
    """The plain methods of a class and its bases, as attribute look-up finds them."""
    members = {name: member for base in reversed(owner.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if isinstance(member, types.FunctionType)}


def _methods_used(owner: type, names: _Names) -> list[types.FunctionType]:
    """Methods of ``owner`` that code using ``names`` can call, directly or through each other; ``names`` grows by
    theirs."""
    found: dict[str, types.FunctionType] = {}
    grown = True
    while grown:
        methods = {name: method for name, method in _functions_of(owner).items() if name in names and name not in found}
        found |= methods
        for method in methods.values():
            names.add_code(method.__code__)
        grown = bool(methods)
    return list(found.values())
