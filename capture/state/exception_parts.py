"""What an exception is made of, and how another one is made of other parts.

A step that catches an exception and returns or keeps it makes another one at each call. None of the methods of its
class run: what ``__init__`` does has been done once.
"""

from __future__ import annotations

import types
from typing import Any

from weft.capture.state.object_parts import ObjectForm, ObjectParts, is_python_class
from weft.capture.state.traceback_lines import lines_of, traceback_of

CAPTURE_NOTE = "while capturing"
"""How the notes begin that a capture adds to exceptions."""

# Their attributes follow from the arguments, or are parts below.
_WITHOUT_FIELDS = (object, BaseException, BaseExceptionGroup)


def exception_parts(error: BaseException) -> ObjectParts:
    """Its arguments, attributes, the fields of its type, its cause and its context. All show the same lines."""
    kind = type(error)
    base = next(each for each in kind.__mro__ if not is_python_class(each))
    of_kind = (vars(each).values() for each in kind.__mro__ if each not in _WITHOUT_FIELDS)
    fields = [each for values in of_kind for each in values if type(each) is types.MemberDescriptorType]
    fields = [each for each in fields if hasattr(error, each.__name__)]
    attributes, count = _attributes(error), len(error.args)
    suppresses, lines = error.__suppress_context__, lines_of(error.__traceback__)

    def made(parts: list[Any]) -> BaseException:
        args, rest = parts[:count], iter(parts[count:])
        new: BaseException = base.__new__(kind, *args)
        base.__init__(new, *args)
        new.args = tuple(args)
        vars(new).update({name: next(rest) for name in attributes})
        for field, value in zip(fields, rest, strict=False):
            # An OSError shows a field that was set, even to None; one that was not reads as None too.
            if _value(field, new) is not value:
                field.__set__(new, value)
        new.__cause__, new.__context__ = rest
        new.__suppress_context__ = suppresses
        return new.with_traceback(traceback_of(lines))

    values = [*error.args, *attributes.values(), *(each.__get__(error) for each in fields)]
    return ObjectParts(ObjectForm(kind, object, node=made), [], [*values, error.__cause__, error.__context__])


def _value(field: types.MemberDescriptorType, error: BaseException) -> Any:
    """The value of a field of an exception, an object of its own where it has none."""
    try:
        return field.__get__(error)
    except AttributeError:
        return object()


def _attributes(error: BaseException) -> dict[str, Any]:
    attributes = dict(vars(error))
    notes = [each for each in attributes.pop("__notes__", ()) if not each.startswith(CAPTURE_NOTE)]
    return {**attributes, "__notes__": notes} if notes else attributes
