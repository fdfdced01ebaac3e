"""``np.float32(loss.item())``, ``np.int64(count)``: numbers of numpy's, made by classes.

These classes ask in C for the value of their argument. While a step is captured, the code of the step finds stand-ins
by their names. A stand-in is a subclass, which numpy takes for a dtype as it takes the class. It makes numbers of the
class, and what it makes of a number that differs between calls is a node that calls the class. Code that asks with
``is`` for a class finds the class itself.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weft.capture.record.array_sources import ArraySources
from weft.capture.record.tensor_classes import ClassStandIn, with_inner
from weft.source_files import is_user_file


class NumpyClass(ClassStandIn):
    """The class of the stand-ins."""

    weft_make: Callable[..., Any]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.weft_make(*args, **options)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.weft_original)


def numpy_class_replacements(objects: Iterable[Any], arrays: ArraySources) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the classes whose names stand in functions that the step can call."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    kinds = {name: kind for name, kind in vars(numpy).items() if isinstance(kind, type) and _is_class_of_numbers(kind)}
    known = frozenset(map(id, kinds.values()))
    used, asked_for = set[int](), set[int]()
    for function in objects:
        if type(function) is types.FunctionType and is_user_file(function.__code__.co_filename):
            named = lambda name, own=function.__globals__: id(own.get(name, kinds.get(name)))
            for code in with_inner(function.__code__):
                if found := known.intersection(map(named, code.co_names)):
                    used |= found
                    asked_for |= found.intersection(map(named, _asked_for(code)))
    for name, kind in kinds.items():
        if id(kind) in used - asked_for:
            own = {"weft_original": kind, "weft_make": staticmethod(arrays.number_of_class(kind)), "__slots__": ()}
            yield numpy, name, NumpyClass(kind.__name__, (kind,), own)


def _is_class_of_numbers(kind: type) -> bool:
    numpy = sys.modules["numpy"]
    return issubclass(kind, (numpy.number, numpy.bool_)) and kind in numpy.sctypeDict.values()


def _asked_for(code: types.CodeType) -> Iterator[str]:
    """The names in front of each ``is``."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for at, step in enumerate(steps):
        if step.opname == "IS_OP":
            yield from (each.argval for each in steps[max(at - 2, 0) : at] if each.opcode in dis.hasname)
