"""What the user's code and libraries see of the types in a capture: those that eager shows them.

In a capture tensors are fake, and numbers that only the data decides are symbolic. Libraries ask for that
(``isinstance(x, FakeTensor)``, ``type(x) is torch.Tensor``, ``isinstance(x.item(), float)``) and take another path than
they take in eager, whose numbers then differ in the last bits. So their modules get an ``isinstance`` and a ``type`` of
their own while a step is captured. These tell of a value of the capture what eager would tell, and of all else what
Python tells. Torch, which has to know what is fake, and other threads, which have no values of the capture, see
nothing of it.

The functions of torch that tell which modes are active, and whether a tensor is fake, answer the user's code from
outside the capture.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.computed_names import ASKS
from weft.capture.record.growing_lists import AppendedList
from weft.capture.record.held_references import ORIGINAL, StandIn, original_of
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.host_lists import HostList
from weft.capture.record.number_tables import NumberTable
from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.unread_arguments import UnreadValue
from weft.capture.user_code import called_by_user
from weft.source_files import KIND_OF_FILE

_LAYERS = {module.__file__ for module in (torch.nn.modules.activation, torch.nn.modules.transformer)}


class EagerTypes:
    """Answers for one capture.

    Args:
        recorder: of the capture; its fakes and symbolic numbers are shown as what they stand for.
        intercepts: whether the step runs now, in this thread.
    """

    def __init__(self, recorder: OpRecorder, intercepts: Callable[[], bool]) -> None:
        self._mode = recorder.fake_mode
        self._intercepts = intercepts

    def of(self, value: Any) -> type | None:
        """The type that a value of the capture has in eager; None for all other values."""
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not self._mode:
                return None
            return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
        if kind is HostArray:
            return type(value.weft_sample)
        if issubclass(kind, UnreadValue):
            return value.weft_kind
        if issubclass(kind, AppendedList):
            return kind.kind
        if issubclass(kind, NumberTable):
            return type(value.weft_original)
        if kind is types.FunctionType or issubclass(kind, StandIn):
            original = original_of(value)
            return None if original is value else type(original)
        number = PYTHON_TYPES.get(kind)
        own = number is not None and torch_adapter.shape_env_of_number(value) is self._mode.shape_env
        return number if own else None

    def builtins(self) -> dict[str, Any]:
        """What the user's modules get, by the names of Python's own."""
        seen_as = self.of

        def is_instance(value: Any, kinds: Any, /) -> bool:
            kind = seen_as(value)
            return isinstance(value, original_of(kinds)) if kind is None else _is_instance(value, kind, kinds)

        def length(value: Any, /) -> Any:
            # Python's own makes a plain number of the size, which fixes it.
            if type(value) is HostArray and value.ndim:
                return value.shape[0]
            if isinstance(value, AppendedList):
                return value.count()
            if type(value) is HostList:
                return value.weft_tensor.shape[0]
            return value.shape[0] if isinstance(value, FakeTensor) and seen_as(value) and value.dim() else len(value)

        setattr(is_instance, ORIGINAL, isinstance)
        setattr(length, ORIGINAL, len)
        return {"isinstance": is_instance, "type": _type_through(seen_as), "len": length}

    @contextlib.contextmanager
    def as_class(self) -> Iterator[None]:
        """Inside, ``x.__class__`` of a fake of the capture is that of eager in the user's code.

        What an attribute of Python's own is, only a class before ``object`` in the order of bases can say.
        """
        seen_as, kind_of_file, frame, asks = self.of, KIND_OF_FILE, sys._getframe, ASKS

        class ShownAs(torch.Tensor):
            @property
            def __class__(self) -> type:
                # Each isinstance that is false asks for it, in torch ten times for an operation.
                file = frame(1).f_code.co_filename
                file = frame(2).f_code.co_filename if file == asks else file
                return (seen_as(self) if kind_of_file[file] else None) or type(self)

        FakeTensor.__bases__ = (ShownAs,)
        try:
            yield
        finally:
            FakeTensor.__bases__ = (torch.Tensor,)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement) of the functions of torch that tell of fakes and of modes."""
        for owner, name in torch_adapter.capture_queries():
            yield owner, name, self._asked_outside(getattr(owner, name))

    def _asked_outside(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            # Attention and encoder layers of torch's ask too: in eager they call one fused kernel.
            if not (self._intercepts() and (called_by_user() or sys._getframe(1).f_code.co_filename in _LAYERS)):
                return original(*args, **kwargs)
            with torch_adapter.real_tensors():
                args, kwargs = torch_adapter.tree_map(self._real, (args, kwargs))
            with torch_adapter.modes_set_aside(self._is_own):
                return original(*args, **kwargs)

        return ask

    def _is_own(self, mode: Any) -> bool:
        return mode is self._mode or type(mode).__module__.startswith("weft.")

    def _real(self, value: Any) -> Any:
        """A real tensor, which is all that such a function looks for, in the place of one of the capture."""
        return torch.empty(()) if type(value) is FakeTensor and self.of(value) is not None else value


def _is_instance(value: Any, kind: type, kinds: Any) -> bool:
    """Whether a value of the capture, which eager shows as ``kind``, is an instance there."""
    if isinstance(kinds, tuple):
        return any(_is_instance(value, kind, each) for each in kinds)
    if isinstance(kinds, types.UnionType):
        return any(_is_instance(value, kind, each) for each in kinds.__args__)
    if (original := original_of(value)) is not value:
        return isinstance(original, original_of(kinds))
    if kind in PYTHON_TYPES.values():
        return issubclass(kind, original_of(kinds))
    return kinds is not FakeTensor and isinstance(value, original_of(kinds))


class _TypeOfTypes(type, StandIn):
    """The class of what stands in for ``type``. Classes that are derived from that are derived from ``type``."""

    weft_original = type
    seen_as: Callable[[Any], type | None]

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], **options: Any) -> Any:
        if any(isinstance(base, _TypeOfTypes) for base in bases):
            return type(name, tuple(map(original_of, bases)), names, **options)
        return super().__new__(cls, name, bases, names)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) != 1:
            return type(*args, **options)
        kind = cls.seen_as(args[0]) or type(args[0])
        return cls if kind is type else kind

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(original_of(other), type)

    def __eq__(cls, other: object) -> bool:
        return original_of(other) is type

    def __hash__(cls) -> int:
        return hash(type)


def _type_through(seen_as: Callable[[Any], type | None]) -> Any:
    kind: Any = _TypeOfTypes("type", (type,), {})
    kind.seen_as = seen_as
    return kind
