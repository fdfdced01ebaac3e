"""``id()`` and ``hash()`` of objects that are others at each call: of arguments, and of what a step makes.

A step may tell objects apart by such a number. It cannot keep it: in a later call it would be that of an object of the
capture. While a step is captured, the user's modules have an ``id`` and a ``hash`` of their own, whose numbers are
known again where the step leaves them.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.held_references import ORIGINAL
from weft.capture.record.left_addresses import LOWEST_ADDRESS
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw
from weft.short_tracebacks import called_for_user

_BY_IDENTITY = (object.__hash__, torch.Tensor.__hash__)
_OF_PARTS = (tuple.__hash__, frozenset.__hash__)

# What a capture's own objects stand for.
_KINDS = {torch.Tensor: "tensor", list: "list", dict: "dict"}


class IdInCapture(int):
    """The ``id()`` of an object that may be the capture's, its ``hash()`` by identity, or a number computed from it.

    Attributes:
        weft_by: "id" or "hash"; weft_of: the id; weft_type: the type of the object; weft_alive: gives it, None where it
            is gone.
        weft_line: the user's line that asked for it; weft_ids: of the capture.

    Whether the object was made since the capture began is looked up where it counts: that takes long.
    """

    weft_by: str
    weft_of: int
    weft_type: type
    weft_alive: Callable[[], Any]
    weft_line: str
    weft_ids: Ids

    def weft_like(self, number: int) -> IdInCapture:
        """A number that is computed from this one."""
        found = IdInCapture(number)
        vars(found).update(vars(self))
        return found

    def weft_plain(self, why: str) -> int:
        """The plain number, of an object of the user's.

        Raises:
            UncapturableDraw: it is an object of the capture.
        """
        if not self.weft_ids.is_made(self.weft_of, self.weft_type, self.weft_alive):
            return int(self)
        kinds = (name for kind, name in _KINDS.items() if issubclass(self.weft_type, kind))
        kind = next(kinds, self.weft_type.__qualname__)
        remedy = f"keep the {kind}, and compare with `is`"
        raise UncapturableDraw(f"{self.weft_by}() of a {kind}", self.weft_line, why.format(kind=kind), remedy)

    def __format__(self, spec: str, /) -> str:
        return self.weft_plain(_IN_TEXT).__format__(spec)

    def __repr__(self) -> str:
        return repr(self.weft_plain(_IN_TEXT))

    __str__ = __repr__

    def __eq__(self, other: object, /) -> bool:
        same = int.__eq__(self, other)  # type: ignore[bad-argument-type]
        if same is not True and self.weft_ids.is_from_outside(other):
            self.weft_plain(_COMPARED)
        return same

    def __ne__(self, other: object, /) -> bool:
        return not self == other

    __hash__ = int.__hash__


_IN_TEXT = "text is made of it"
_KEPT = "the step leaves it for later, and each call has another {kind}"
_COMPARED = "it is compared with a number that was made outside of the step, and each call has another {kind}"


def _computed(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def compute(number: IdInCapture, other: Any) -> Any:
        result = original(number, other)
        return number.weft_like(result) if type(result) is int else result

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(IdInCapture, _method, _computed(_method))


class Ids:
    """The ids of one capture.

    Args:
        known: ids of the objects that the walk of the state met.
        made: gives the ids of the objects of a type that were made since the capture began.
    """

    def __init__(self, known: Callable[[], Set[int]], made: Callable[[type], set[int]]) -> None:
        self._known, self._made = known, made
        self._used: list[IdInCapture] = []  # those that a `__hash__` asked for
        self._ended = False

    def builtins(self, intercepts: Callable[[], bool]) -> dict[str, Any]:
        """What the user's modules get, by the name of Python's own.

        Args:
            intercepts: whether the step runs now, in this thread.
        """

        def id_of(value: Any, /) -> int:
            # The collector does not list a dictionary of plain values, nor texts and numbers.
            is_plain = not gc.is_tracked(value) and type(value) is not dict
            if not intercepts() or is_plain or id(value) in self._known():
                return id(value)
            return self._number(id(value), "id", value)

        def hash_of(value: Any, /) -> int:
            if not intercepts():
                return hash(value)
            before, self._used = self._used, []
            try:
                number, used = called_for_user(hash, value), self._used
            finally:
                self._used = before
            if (hashed := self._hashed_by_identity(value)) is not None:
                return self._number(number, "hash", hashed)
            if not used:
                return number
            found = used[0].weft_like(number)
            vars(found).update(weft_by="hash", weft_line=user_line())
            self._used.append(found)
            return found

        setattr(id_of, ORIGINAL, id)
        setattr(hash_of, ORIGINAL, hash)
        return {"id": id_of, "hash": hash_of}

    def end(self) -> None:
        """Forget the capture: a module that was imported meanwhile may have kept a number, as a key of its own."""
        self._known, self._made, self._ended = (lambda: set()), (lambda kind: set()), True
        self._used.clear()

    def _number(self, number: int, by: str, value: Any) -> IdInCapture:
        """What stands for a number that the identity of an object decides."""
        found = IdInCapture(number)
        vars(found).update(weft_by=by, weft_of=id(value), weft_type=type(value), weft_alive=_weakly(value))
        vars(found).update(weft_line=user_line(), weft_ids=self)
        self._used.append(found)
        return found

    def _hashed_by_identity(self, value: Any) -> Any:
        """The object whose identity decides the hash of a value, if the step may have made it; also one in a tuple."""
        kind = type(value)
        if not gc.is_tracked(value) or id(value) in self._known():
            return None
        if kind.__hash__ in _OF_PARTS:
            return next((found for each in value if (found := self._hashed_by_identity(each)) is not None), None)
        if kind is types.MethodType:
            return self._hashed_by_identity(value.__self__)
        return value if kind.__hash__ in _BY_IDENTITY else None

    def is_made(self, at: int, kind: type, alive: Callable[[], Any]) -> bool:
        """Whether the object with this id and of this type was made since the capture began, as what is gone was. Asked
        after the capture, nothing was."""
        if self._ended:
            return False
        return issubclass(kind, (FakeTensor, dict)) or alive() is None or at in self._made(kind)

    def is_from_outside(self, number: object) -> bool:
        """Whether a number can be the id of an object that the step does not know."""
        if isinstance(number, torch.SymInt):
            return True
        return type(number) is int and number >= LOWEST_ADDRESS and number not in self._known()


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # of a list, or of an object with slots
        return lambda: True


def plain_ids(value: Any) -> Any:
    """A value that the step leaves, with plain numbers for ids; also in a tuple.

    Raises:
        UncapturableDraw: one is of an object of the capture.
    """
    if type(value) is tuple and any(type(each) is IdInCapture for each in value):
        return tuple(map(plain_ids, value))
    return value.weft_plain(_KEPT) if type(value) is IdInCapture else value
