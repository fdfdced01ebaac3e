"""Stand-ins for numpy arrays, and for numbers of numpy's, whose values exist only when a step runs.

:class:`HostArray` has the shape, the dtype and the methods of the array. Operators, methods and functions of numpy hand
themselves to the :class:`~weft.capture.record.array_recorder.ArrayRecorder` of the capture, through numpy's own
protocols where there is one. It is no ``numpy.ndarray`` and has no buffer: code in C that looks for the values finds
none, and ``__array__`` refuses to give them.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from weft.capture.record.late_text import text_by
from weft.capture.user_code import called_for_user, formatting_frame, in_raise_statement, user_line
from weft.errors import TextOfValue
from weft.short_tracebacks import users_mistake
from weft.source_files import is_user_file


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# What an array is without its values, and views that are attributes.
_FIXED = frozenset({"dtype", "ndim", "itemsize"})
_SIZES = frozenset({"size", "nbytes", "strides"})
_VIEWS = frozenset({"T", "mT", "real", "imag"})
_METHODS = names(
    "all any argmax argmin argpartition argsort astype byteswap clip conj conjugate copy cumprod cumsum diagonal "
    "dot flatten max mean min newbyteorder prod ravel repeat reshape round searchsorted squeeze std sum swapaxes "
    "take trace transpose var view is_integer"
)
_METHODS_BY_VALUE = frozenset({"nonzero", "compress"})
_WRITING_METHODS = frozenset({"fill", "sort", "partition", "put"})
# Methods of which a number is a size, which must be plain.
_SIZED_BY_NUMBERS = frozenset({"reshape", "repeat"})
_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor"
_COMPARISONS = "lt le eq ne gt ge"
_UNARY = "neg pos abs invert"


class HostArray:
    """An array, or a number of numpy's, of one capture.

    Args:
        owner: records what is done with it.
        call: makes it of its memory.
        memory: what it is in, wholly or as a view.
        sample: an array, or a number, of the same shape and dtype and strides.
    """

    def __init__(self, owner: Any, call: Any, memory: Any, sample: Any) -> None:
        self.weft_owner = owner
        self.weft_call = call
        self.weft_memory = memory
        self.weft_sample = sample

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.weft_sample)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes, outermost dimension first."""
        return self.weft_owner.sizes(self)

    # ---- the protocols of numpy

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self.weft_owner.ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self.weft_owner.function(function, args, kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets functions of torch take it as an argument, up to the function mode of the capture."""
        return NotImplemented

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        known = self.weft_owner.known(self)
        if known is None:
            why = "code that is not a function of numpy's asks for the values of a drawn array"
            remedy = "make a tensor of it with torch.from_numpy, or an array with numpy.array; use numpy.take(x, i, 0) "
            remedy += "for x[i], and numpy.array(x) for an array x to be written that is no result of the step"
            raise self.weft_owner.refusal(self.weft_memory.source, why, remedy)
        made = sys.modules["numpy"].array(known, dtype=dtype)
        made.flags.writeable = False
        return made

    # ---- the values, for Python

    def _number(self, kind: Callable[[Any], Any]) -> Any:
        return kind(self.weft_owner.number(self))

    def __bool__(self) -> bool:
        return self._number(bool)

    def __int__(self) -> int:
        return self._number(int)

    def __float__(self) -> float:
        return self._number(float)

    def __complex__(self) -> complex:
        return self._number(complex)

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.ndim:
            raise users_mistake(TypeError("only integer scalar arrays can be converted to a scalar index"))
        return self._number(int)

    def __hash__(self) -> int:
        if isinstance(self.weft_sample, sys.modules["numpy"].ndarray):
            raise users_mistake(TypeError("unhashable type: 'numpy.ndarray'"))
        known = self.weft_owner.known(self)
        if known is None:
            why = "a number of a drawn array is a key of a dictionary or a set"
            raise self.weft_owner.refusal(self.weft_memory.source, why)
        return hash(known)

    def item(self, *index: Any) -> Any:
        """An element as a number of Python's."""
        if index:
            return self[index if len(index) > 1 else self._place(index[0])].item()
        return self.weft_owner.number(self)

    def _place(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return index
        return tuple(map(int, sys.modules["numpy"].unravel_index(index, self.shape)))

    def tolist(self) -> Any:
        """The elements as numbers of Python's, in lists."""
        known = self.weft_owner.known(self)
        if known is not None:
            return known.tolist()
        if not self.ndim:
            return self.item()
        return [each.item() for each in self] if self.ndim == 1 else [each.tolist() for each in self]

    def __len__(self) -> int:
        if not self.ndim:
            raise users_mistake(TypeError("len() of unsized object"))
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return builtins.bool((self == value).any())

    def __repr__(self) -> str:
        return self.weft_text("__repr__")

    def __str__(self) -> str:
        return self.weft_text("__str__")

    def __format__(self, spec: str) -> str:
        return self.weft_text("__format__", spec)

    def weft_text(self, method: str, *arguments: str, frame: FrameType | None = None) -> str:
        """The text that a method, or ``"%"``, makes of it; ``frame`` is of the code that asks.

        Raises:
            TextOfValue: the code may read it, and no call knows it yet.
        """
        known = self.weft_owner.known(self) if self.weft_owner.active else None
        if known is not None:
            return text_by(method, known, arguments)
        frame = formatting_frame(sys._getframe(2)) if frame is None else frame
        if self.weft_owner.active and is_user_file(frame.f_code.co_filename):
            text = self.weft_owner.text(self, frame, method, arguments)
            if text is not None:
                return text
        if self.weft_owner.active and called_for_user(__name__):
            raise TextOfValue(user_line(), in_raise=in_raise_statement())
        return f"<{type(self.weft_sample).__name__} of {self.dtype} and shape {self.shape}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.weft_owner.refusal(self.weft_memory.source, "its values do not exist yet, and it is to be pickled")

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    # ---- parts

    def __getitem__(self, index: Any) -> Any:
        return self.weft_owner.call(operator.getitem, (self, _plain(index)), sized=_selects(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.weft_owner.call(operator.setitem, (self, _plain(index), value), writes=self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "weft_")):
            raise AttributeError(name)
        value = getattr(self.weft_sample, name)  # an AttributeError where numpy's have none
        if name in _SIZES:
            self.weft_owner.settle(self)
        if name in _FIXED | _SIZES:
            return value
        if name in _VIEWS:
            return self.weft_owner.call(getattr, (self, name))
        if name not in _METHODS | _METHODS_BY_VALUE | _WRITING_METHODS:
            why = "a compiled step has no place for this attribute of a drawn array"
            raise self.weft_owner.refusal(f"numpy.ndarray.{name}", why)
        return lambda *args, **kwargs: self._method(name, args, kwargs)

    def _method(self, name: str, args: Any, kwargs: Any) -> Any:
        owner = self.weft_owner
        method = getattr(type(self.weft_sample), name)
        if name in _WRITING_METHODS:
            return owner.call(method, (self, *args), kwargs, writes=self)
        out = kwargs.get("out")
        if out is not None:
            owner.call(method, (self, *args), kwargs, writes=out)
            return out
        if name in _SIZED_BY_NUMBERS:
            args, kwargs = owner.plain((args, kwargs))
        return owner.call(method, (self, *args), kwargs, sized=name in _METHODS_BY_VALUE)


def python_number(value: Any) -> Any:
    """A number of numpy's whose value is not known as a number of Python's; every other value itself."""
    return value.item() if type(value) is HostArray and not value.ndim else value


def _selects(index: Any) -> bool:
    """Whether an index chooses by a mask whose values are not known."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [each for each in parts if type(each) is HostArray and each.dtype.kind == "b"]
    return any(each.weft_owner.known(each) is None for each in masks)


def _plain(index: Any) -> Any:
    """An index whose slices have plain bounds: they decide the shape."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    if isinstance(index, slice):
        bounds = index.start, index.stop, index.step
        return slice(*(None if each is None else operator.index(each) for each in bounds))
    return index


def _binary(function: Callable[..., Any], *, swapped: bool = False, in_place: bool = False) -> Any:
    def method(self: HostArray, other: Any) -> Any:
        number = not isinstance(self.weft_sample, sys.modules["numpy"].ndarray)
        if isinstance(other, torch.Tensor):
            if number:
                return NotImplemented  # the tensor takes it as a number
            why = "an operator takes a drawn array and a tensor"
            raise self.weft_owner.refusal(self.weft_memory.source, why, "make a tensor of it with torch.from_numpy")
        operands = (other, self) if swapped else (self, other)
        if in_place and not number:
            self.weft_owner.call(function, operands, writes=self)
            return self
        return self.weft_owner.call(_OUT_OF_PLACE.get(function, function) if number else function, operands)

    return method


def _unary(function: Callable[..., Any]) -> Any:
    return lambda self, *args: self.weft_owner.call(function, (self, *args))


_OUT_OF_PLACE: dict[Any, Any] = {}
for _name in _BINARY.split():
    _word = _name.rstrip("_")
    _function = getattr(operator, _name)
    _in_place = getattr(operator, f"i{_word}")
    _OUT_OF_PLACE[_in_place] = _function
    setattr(HostArray, f"__{_word}__", _binary(_function))
    setattr(HostArray, f"__r{_word}__", _binary(_function, swapped=True))
    setattr(HostArray, f"__i{_word}__", _binary(_in_place, in_place=True))
for _name in _COMPARISONS.split():
    setattr(HostArray, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in _UNARY.split():
    setattr(HostArray, f"__{_name}__", _unary(getattr(operator, _name)))
HostArray.__divmod__ = _binary(divmod)  # type: ignore[attr-defined]
HostArray.__rdivmod__ = _binary(divmod, swapped=True)  # type: ignore[attr-defined]
HostArray.__round__ = _unary(round)  # type: ignore[attr-defined]
