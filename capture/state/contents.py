"""Objects whose content is compared as one value: sets, arrays of bytes and of numbers, context variables, flags.

The walk of the Python state cannot look into them as it looks into lists and attributes, or there would be one entry
for each element of an array. :func:`content_of` gives what such an object holds as a :class:`Content`. A step that
reads it is captured again where it holds something else, and what a step writes into it is written by each call.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.capture.state.containers import (
    MISSING,
    SIMPLE,
    AllBut,
    Attributes,
    Container,
    Content,
    StatePlace,
    label_of,
)

# Larger arrays are data and no settings: to compare them before every call would take longer than many a step.
LARGEST_BYTES = 16 << 20

_DECIMALS = ("decimal", "_decimal", "_pydecimal")
_OF_SYS = frozenset({"argv", "path"})
_OF_CONTEXTS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_ASK_STREAMS = frozenset({"__stdout__", "__stderr__"})
_ASK_TEXT = frozenset({"__repr__", "array2string", "array_repr", "array_str", "get_printoptions"})
# While a step is captured, functions stand in their places.
_ATTRGETTER, _METHODCALLER = operator.attrgetter, operator.methodcaller

Read = Callable[[Any], Any]
Write = Callable[[Any, Any], None]
Access = tuple[Read, Write]


def content_of(obj: Any, access: Access, path: str) -> Content | None:
    """The content of an object; None for an array that is an input of the graph for its size."""
    return None if access is _ARRAY and is_input_for_its_size(obj) else Content(obj, path, *access)


def sparse_layouts(tensor: torch.Tensor, place: StatePlace) -> list[Content]:
    """Of a sparse tensor at a place: its sizes, and whether it is coalesced and requires grad. None of other tensors.
    What is in it is an input of the graph, or the step does not read it."""
    if tensor.layout is not torch.sparse_coo:
        return []
    return [Content(place, f"the layout of {place.path}", _sparse_layout, lambda place, layout: None)]


def _sparse_layout(place: StatePlace) -> tuple[Any, ...]:
    tensor = place.outer()
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        return ()
    return tuple(tensor.shape), tensor.is_coalesced(), tensor.requires_grad, tensor.sparse_dim()


def compared_array(array: Any) -> Content:
    """The content of an array of any size."""
    return Content(array, "an array of numpy's", *_ARRAY)


def is_input_for_its_size(array: Any) -> bool:
    """Whether an array of numpy's is too large to be compared before each call, and a tensor can lie in its memory."""
    if array.nbytes <= LARGEST_BYTES:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an array that cannot be written to
            torch.from_numpy(array.view(sys.modules["numpy"].ndarray))
    except (TypeError, ValueError):
        return False
    return True


def unsaved_buffers(module: torch.nn.Module, path: str) -> Content:
    """The names of the buffers of a module that ``register_buffer(persistent=False)`` made.

    A step may register buffers. Only ``state_dict()`` reads these names.
    """
    label = f"{path}._non_persistent_buffers_set" if path else "_non_persistent_buffers_set"
    return Content(vars(module)["_non_persistent_buffers_set"], label, tuple, _refill)


def access_to(kind: type) -> Access | None:
    """How the content of objects of a type is read and written, None for those that are no such objects."""
    for base, read, write in _KINDS:
        if issubclass(kind, base):
            return read, write
    for base in kind.__mro__:
        if (found := _OF_MODULES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return found
    return None


def attributes_of(obj: Any) -> Mapping[str, Any]:
    """The dictionary of an object's own attributes, read-only for a class, empty where there is none; no code of the
    user's runs."""
    if issubclass(type(obj), threading.local):
        return vars(obj)
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def all_attributes(obj: Any, path: str, known: frozenset[str], found: dict[str, Any] | None) -> list[Container]:
    """All attributes of an object or of a class itself, those that it may get included, but for ``known``.

    Args:
        found: the attributes that it had before the step wrote to some of them; None for those of now.
    """
    if isinstance(obj, type):
        return [keys_of(vars(obj), path), Attributes(obj, path, frozenset(vars(obj)), label_of(path))]
    container = Container(attributes_of(obj), path, AllBut(*known) if known else None, label_of(path))
    container.before = container.before if found is None else found
    return [container]


def keys_of(names: Mapping[str, Any], path: str) -> Content:
    """The names that a module or class has, in their order."""
    return Content(names, f"the names in {path}", tuple, unchanged)


def subclasses_of(kind: type) -> Content:
    """The classes that are derived from a class directly."""
    read = lambda kind: tuple(map(weakref.ref, type.__subclasses__(kind)))
    return Content(kind, f"{kind.__qualname__}.__subclasses__()", read, unchanged)


def settings_of(owner: types.ModuleType | type) -> list[tuple[Container, frozenset[str]]]:
    """The settings that decide what functions of a module of Python's or numpy's compute, for the module or a class of
    it. With each setting the names that read it: it is compared where the step's code has one of them, and always where
    there are none."""
    if owner is sys:
        streams = Content(sys, "sys.stdout is sys.__stdout__", _read_streams, unchanged)
        return [(Container(vars(sys), "sys", _OF_SYS, label_of("sys")), frozenset()), (streams, _ASK_STREAMS)]
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    if module == "numpy":
        errors = Content(owner, "numpy.geterr()", _read_error_handling, unchanged)
        return [
            (errors, frozenset()),
            (Content(owner, "numpy.get_printoptions()", _read_print_options, unchanged), _ASK_TEXT),
        ]
    if owner is warnings:
        return [(Content(owner, "warnings.filters", lambda owner: tuple(owner.filters), unchanged), frozenset())]
    if module not in _DECIMALS:
        return []
    current = sys.modules["decimal"].getcontext
    write = lambda owner, content: _write_context(current(), content)
    return [(Content(owner, "decimal.getcontext()", lambda owner: _read_context(current()), write), frozenset())]


def value_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value or the default of a context variable, None where it has neither."""
    try:
        return variable.get()
    except LookupError:
        return None


def referents_of(obj: Any) -> list[Any]:
    """The objects that ``obj`` shows under another face: the dictionary of a view or of a read-only proxy, the object
    that a method belongs to, what weak references refer to."""
    if type(obj).__module__ in (*_DECIMALS, "numpy"):
        return [type(obj)]
    if isinstance(obj, (types.BuiltinMethodType, types.MethodWrapperType)):
        owner = obj.__self__
        return [] if isinstance(owner, types.ModuleType) and owner.__name__ not in _DECIMALS else [owner]
    if isinstance(obj, weakref.ref):
        return [obj()]
    if isinstance(obj, weakref.WeakSet):
        return list(obj)
    if isinstance(obj, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return [each for item in obj.items() for each in item]
    if isinstance(obj, _KEYS_OR_VALUES):
        obj = obj.mapping
    return [dictionary_behind(obj)] if isinstance(obj, types.MappingProxyType) else []


def names_asked_by(getter: Any) -> set[str]:
    """The names of attributes that an ``operator.attrgetter`` or ``methodcaller`` asks for, or the attribute in a slot;
    none of another object."""
    if type(getter) is _ATTRGETTER:
        return {name for path in getter.__reduce__()[1] for name in path.split(".")}
    if type(getter) is types.MemberDescriptorType:  # of a slot
        return {getter.__name__}
    if type(getter) is _METHODCALLER:
        made, arguments = getter.__reduce__()[:2]
        return {made.args[0] if isinstance(made, functools.partial) else arguments[0]}
    return set()


def dictionary_behind(proxy: Any) -> Any:
    """The dictionary that a read-only proxy shows, such as the ``vars`` of a class."""
    return proxy | _Operand()


def unproxied(obj: Any) -> Any:
    """The object behind a weak proxy, None if it is gone; any other object itself."""
    if type(obj) not in weakref.ProxyTypes:
        return obj
    try:
        return obj.__repr__.__self__
    except ReferenceError:
        return None


def attributes_with_tensors(obj: Any) -> frozenset[str]:
    """Names of an object's own attributes that are tensors, or tuples, lists or dictionaries with tensors in them."""
    return frozenset(name for name, value in attributes_of(obj).items() if _holds_tensor(value))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensor, value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, torch.Tensor)


class _Operand:
    """Tells the dictionary behind a read-only proxy: ``proxy | operand`` asks that dictionary."""

    def __ror__(self, mapping: Any) -> Any:
        return mapping


def _refill(elements: set[Any], content: tuple[Any, ...]) -> None:
    elements.clear()
    elements.update(content)


def _fill(buffer: Any, content: bytes) -> None:
    memoryview(buffer).cast("B")[:] = content


def _refill_array(values: array.array[Any], content: bytes) -> None:
    values[:] = array.array(values.typecode, content)  # of another length, too


def _read_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """The value or the default: a variable cannot be given back its lack of a value, but its default it can."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _write_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(None if value is MISSING else value)  # a variable cannot be given back its lack of a value


def _read_flag(event: Any) -> bool:
    return event.is_set()


def _write_flag(event: Any, value: bool) -> None:
    event.set() if value else event.clear()


def _holds_of(lock: Any) -> int:
    """How often this thread has acquired a re-entrant lock."""
    return int(repr(lock).rpartition(" count=")[2].split()[0]) if lock._is_owned() else 0


def _hold(lock: Any, times: int) -> None:
    for _ in range(times - _holds_of(lock)):
        lock.acquire()
    for _ in range(_holds_of(lock) - times):
        lock.release()


def _set_value(semaphore: Any, value: int) -> None:
    with semaphore._cond:
        semaphore._value = value
        semaphore._cond.notify_all()


def _read_array(values: Any) -> tuple[Any, ...]:
    if values.dtype.hasobject:
        return values.dtype.str, str(values.shape), *values.ravel().tolist()
    return values.dtype.str, str(values.shape), values.tobytes()


def _write_array(values: Any, content: tuple[Any, ...]) -> None:
    numpy = sys.modules["numpy"]
    if values.dtype.hasobject:
        values.flat[:] = list(content[2:])
    else:
        values[...] = numpy.frombuffer(content[2], dtype=content[0]).reshape(values.shape)


def _read_context(context: Any) -> tuple[Any, ...]:
    plain = tuple(getattr(context, name) for name in _OF_CONTEXTS)
    return (*plain, *(signal.__name__ for signal, is_set in context.traps.items() if is_set))


def _write_context(context: Any, content: tuple[Any, ...]) -> None:
    count = len(_OF_CONTEXTS)
    for name, value in zip(_OF_CONTEXTS, content[:count], strict=True):
        setattr(context, name, value)
    for signal in context.traps:
        context.traps[signal] = signal.__name__ in content[count:]


def _read_streams(owner: Any) -> tuple[bool, bool]:
    """Whether the streams are those that the process began with. Each call writes to those of the call."""
    return sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__


def _read_error_handling(owner: Any) -> tuple[Any, ...]:
    return tuple(sys.modules["numpy"].geterr().values())


def _read_print_options(owner: Any) -> tuple[Any, ...]:
    return tuple(value for value in sys.modules["numpy"].get_printoptions().values() if isinstance(value, SIMPLE))


def _refill_weakly(elements: weakref.WeakSet[Any], content: tuple[weakref.ref[Any], ...]) -> None:
    _refill(elements, tuple(element for each in content if (element := each()) is not None))  # type: ignore[arg-type]


def _weak_keys(mapping: weakref.WeakKeyDictionary[Any, Any]) -> tuple[Any, ...]:
    shown = lambda value: value if isinstance(value, SIMPLE) else id(value)
    return tuple((weakref.ref(key), shown(value)) for key, value in mapping.items())


def _weak_values(mapping: weakref.WeakValueDictionary[Any, Any]) -> tuple[Any, ...]:
    return tuple((key, weakref.ref(value)) for key, value in mapping.items())


def _kept_alive(reference: weakref.ref[Any]) -> bool:
    return reference() is not None


def unchanged(obj: Any, value: Any) -> None:
    """Writes nothing: the step cannot change this."""


LOCKS: tuple[Any, ...] = (type(threading.Lock()), type(threading.RLock()), threading.Semaphore)
_KEYS_OR_VALUES = (type({}.keys()), type({}.values()), type({}.items()))
_KINDS: list[tuple[Any, Read, Write]] = [
    (set, tuple, _refill),
    (bytearray, bytes, lambda values, new: values.__setitem__(slice(None), new)),
    (array.array, array.array.tobytes, _refill_array),
    (memoryview, memoryview.tobytes, lambda values, new: values.readonly or _fill(values, new)),
    ((ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union), bytes, _fill),
    (contextvars.ContextVar, _read_variable, _write_variable),
    (threading.Event, _read_flag, _write_flag),
    (LOCKS[0], lambda lock: lock.locked(), lambda lock, held: lock.acquire() if held else lock.release()),
    (LOCKS[1], _holds_of, _hold),
    (LOCKS[2], lambda semaphore: semaphore._value, _set_value),
    (weakref.ref, _kept_alive, unchanged),
    (weakref.WeakSet, lambda elements: tuple(map(weakref.ref, elements)), _refill_weakly),
    (weakref.WeakKeyDictionary, _weak_keys, unchanged),
    (weakref.WeakValueDictionary, _weak_values, unchanged),
]
_ARRAY: Access = (_read_array, _write_array)
# Types of modules that a program may not have imported.
_OF_MODULES: dict[str, Access] = {
    "numpy.ndarray": _ARRAY,
    **{f"{module}.Context": (_read_context, _write_context) for module in _DECIMALS},
    "multiprocessing.sharedctypes.SynchronizedBase": (
        lambda value: bytes(value.get_obj()),
        lambda value, new: _fill(value.get_obj(), new),
    ),
    "multiprocessing.synchronize.Event": (_read_flag, _write_flag),
}
