"""Objects of the world outside that a step can reach: iterators, open files, queues, connections.

Such an object is moved on or written to by each use, in C code that no walk of the Python state sees. While a step is
captured a stand-in is in its place, wherever the step can reach it. What only writes becomes a call that every step
repeats, as :func:`weft.opaque` makes it; all else is refused with the user's line, before it happens.
"""

from __future__ import annotations

import io
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.capture.record.held_references import StandIn
from weft.capture.record.opaque import opaque
from weft.capture.state.origin import is_user_class
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw

_OPAQUE = "do it in a function marked @weft.opaque, which every call runs, or outside the step"


class _Use(NamedTuple):
    """What a step may do with objects of one kind.

    Attributes:
        name: of the kind, for messages.
        repeated: methods that every step repeats; a name that ends with an underscore stands for all that begin so.
        remedy: what to do instead of all else.
    """

    name: str
    repeated: frozenset[str]
    remedy: str


_ITERATOR = _Use(
    "an iterator from outside the step", frozenset(), "pass the iterator as an argument, or what next() of it gives"
)
_COROUTINE = _Use(
    "a coroutine from outside the step", frozenset(), "run it outside the step, or write it as a function"
)
_FILE = _Use("an open file", frozenset({"write", "writelines", "flush"}), _OPAQUE)
_USES = {
    "_csv.writer": _Use("a writer of CSV files", frozenset({"writerow", "writerows"}), _OPAQUE),
    "_queue.SimpleQueue": _Use("a queue", frozenset({"put", "put_nowait"}), _OPAQUE),
    "sqlite3.Connection": _Use("a database", frozenset(), _OPAQUE),
    "sqlite3.Cursor": _Use("a database", frozenset(), _OPAQUE),
    "torch.utils.tensorboard.writer.SummaryWriter": _Use("a SummaryWriter", frozenset({"add_", "flush"}), _OPAQUE),
}
# Methods of files that tell nothing that changes, and do nothing.
_HARMLESS = frozenset({"isatty", "fileno", "readable", "writable", "seekable", "__enter__"})
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_UNKNOWN = object()


class OutsideObjects:
    """Makes the stand-ins for one capture.

    Args:
        counts: whether the step's code, or a library for it, uses the object now.
    """

    def __init__(self, counts: Callable[[], bool]) -> None:
        self.counts = counts
        self._uses: dict[type, Any] = {}
        self._stand_ins: dict[int, _ObjectStandIn] = {}

    def stand_in(self, value: Any) -> Any | None:
        """What stands in for an object, or for a method bound to one; None for all other values."""
        kind = type(value)
        if kind in _BOUND:
            owner = self.stand_in(value.__self__) if type(value.__self__) is not types.ModuleType else None
            return None if owner is None else getattr(owner, value.__name__)
        use = self._uses.get(kind, _UNKNOWN)
        if use is _UNKNOWN:
            use = self._uses[kind] = _use_of(kind)
        if use is None:
            return None
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = _ObjectStandIn(value, use, self)
        return self._stand_ins[id(value)]

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement): of the streams of Python, which are written to under their names."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not isinstance(stream, (StandIn, type(None))):
                stand_in = _ObjectStandIn(stream, _FILE, self, _StreamOfPython(name))
                yield sys, name, stand_in
                if getattr(sys, f"__{name}__") is stream:  # as code asks where nobody redirects it
                    yield sys, f"__{name}__", stand_in


class _ObjectStandIn(StandIn):
    def __init__(self, original: Any, use: _Use, objects: OutsideObjects, place: _StreamOfPython | None = None) -> None:
        super().__init__(original)
        self._use, self._objects, self.weft_place = use, objects, place

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.weft_original)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(*error)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.weft_original, name)
        if not callable(value) or name in _HARMLESS:
            return value
        use, objects, place = self._use, self._objects, self.weft_place

        def call(*args: Any, **kwargs: Any) -> Any:
            if not objects.counts():
                return value(*args, **kwargs)
            if not _is_repeated(name, use.repeated):
                what = f"{name.strip('_')}() of {use.name}"
                why = "it would happen once only, in the capture"
                raise UncapturableDraw(what, user_line(), why, use.remedy)
            opaque(value if place is None else _Method(place, name))(*args, **kwargs)
            return len(args[0]) if name == "write" and args and isinstance(args[0], (str, bytes)) else None

        return call


class _StreamOfPython:
    """Where each call finds the stream that Python has under a name in ``sys``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def outer(self) -> Any:
        """The stream of the present call."""
        return getattr(sys, self.name)


class _Method:
    """A method of the stream that Python has under a name when the method is called."""

    def __init__(self, place: _StreamOfPython, name: str) -> None:
        self._place, self._name = place, name
        self.__name__ = self.__qualname__ = f"sys.{place.name}.{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        getattr(self._place.outer(), self._name)(*args, **kwargs)


def is_made_by_step(stream: Any) -> bool:
    """Whether a step that is captured made a stream itself: it then has no stand-in."""
    return issubclass(type(stream), io.IOBase)


def _is_repeated(name: str, repeated: frozenset[str]) -> bool:
    return name in repeated or any(name.startswith(each) for each in repeated if each.endswith("_"))


def _use_of(kind: type) -> _Use | None:
    """How a step may use objects of a type; None where no stand-in is needed."""
    if issubclass(kind, (StandIn, *weakref.ProxyTypes)):  # a proxy has the methods of every kind of object
        return None
    if issubclass(kind, io.IOBase):
        return _FILE
    for base in kind.__mro__:
        if (use := _USES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return use
    if issubclass(kind, (types.CoroutineType, types.AsyncGeneratorType)):
        return _COROUTINE
    # The walk of the Python state finds what an iterator of the user's own class keeps.
    return _ITERATOR if issubclass(kind, Iterator) and not is_user_class(kind) else None
