"""``int(n)``, ``float(n)``, ``max(n, m)``, ``min(sizes)``, ``range(0, n, 4)`` of symbolic numbers, in the user's code
and in torch's optimizers.

Python's conversions must give plain numbers, and would fix a symbol to its value in the captured call. Which of two
numbers is larger is a question about them. So while a step is captured, the modules whose functions it can call see
these names with stand-ins that know symbols.

Where code uses the names as values, torch and Python ask for the very types (``dtype=float``, ``type(n) is int``,
``parser.add_argument("--lr", type=float)``). While a step is captured, the code of such functions loads the types by
other names, under which nobody replaces them.

From Python 3.12 on, ``sum`` adds floats with the rounding errors kept apart. Of symbolic numbers it would be one
addition after the other, so the function itself is replaced (:func:`sum_replacements`), under every name by which the
user's code holds it. Nobody asks for it as a type.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.loaded_modules import remembered
from weft.capture.record.float_arithmetic import added, choice, computed, plain
from weft.capture.record.growing_lists import AppendedList
from weft.capture.record.host_arrays import HostArray
from weft.capture.record.plain_numbers import PYTHON_TYPES
from weft.capture.record.recorder import recording
from weft.capture.state.bytecode import ByCode, NameUse, code_replaced, place_of, uses_of_names
from weft.capture.state.containers import BuiltinLike
from weft.short_tracebacks import called_for_user

# Modules of torch whose Python computes with numbers of the step, beside those of torch.optim. They ask for types with
# ``isinstance`` only.
_OF_TORCH = ("torch.nn.utils.clip_grad", "torch.nn.modules.rnn")
_NOWHERE = ((-1, -1), (-1, -1))
_TYPE_CHECKS = ("isinstance", "issubclass")
_NAMES = frozenset({"int", "float", "max", "min", "range"})
_LOADS = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME"))
_GLOBAL, _WIDE = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]
_SUM = builtins.sum
# The names under which Python finds its own types in every module. They are never removed: functions that such code
# defines may be called after the capture.
_OWN_NAMES = {name: f"{name} of Python" for name in _NAMES}
vars(builtins).update({own: vars(builtins)[name] for name, own in _OWN_NAMES.items()})


@contextlib.contextmanager
def builtin_types_know_symbols(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Inside, the stand-ins are in the globals of modules that do not define the names themselves.

    Args:
        functions: those that the step can call; their globals may be those of no module.
    """
    called: dict[int, list[types.FunctionType]] = {}  # by module
    scopes = {id(vars(module)): vars(module) for module in _modules_of_torch()}
    for each in functions:
        scopes[id(each.__globals__)] = each.__globals__
        called.setdefault(id(each.__globals__), []).append(each)
    with contextlib.ExitStack() as stack:
        for at, names in scopes.items():
            replaced = set(_NAMES.difference(names))
            # The step may call other functions of the module in a way that weft does not see.
            for each in {*called[at], *_functions(names)} if at in called else ():
                code, kept = _with_own_names(each.__code__, frozenset(_NAMES.difference(names)))
                replaced -= kept
                if code is not each.__code__:
                    stack.enter_context(code_replaced(each, code))
            stack.enter_context(_defined(names, replaced))
        yield


@remembered
def _modules_of_torch() -> list[types.ModuleType]:
    """Those loaded modules of torch that get the stand-ins.

    Not LBFGS: its step is refused at its first conversion of a loss, with a remedy that works.
    """
    loaded = [(name, module) for name, module in list(sys.modules.items()) if module is not None]
    counts = lambda name: name in _OF_TORCH or name.startswith("torch.optim.")
    return [module for name, module in loaded if counts(name) and name != "torch.optim.lbfgs"]


@contextlib.contextmanager
def _defined(names: dict[str, Any], replaced: Iterable[str]) -> Iterator[None]:
    """Inside, the stand-ins of some names are in ``names``."""
    try:
        for name in replaced:
            names[name] = STAND_INS[name]
        yield
    finally:
        for name in replaced:
            if names.get(name) is STAND_INS[name]:
                del names[name]


def _with_own_names(code: types.CodeType, names: frozenset[str]) -> tuple[types.CodeType, frozenset[str]]:
    """The code, where each load of one of the types as a value names what nobody replaces; and of which it cannot."""
    known = _codes.get(code)
    if known is None or known[0] != names:
        found, kept = _renamed(code, names)
        known = _codes.keep(code, (names, None if found is code else found, kept))
    return known[1] or code, known[2]


def _renamed(code: types.CodeType, names: frozenset[str]) -> tuple[types.CodeType, frozenset[str]]:
    inner = [
        _with_own_names(each, names) if isinstance(each, types.CodeType) else (each, frozenset[str]())
        for each in code.co_consts
    ]
    kept = frozenset[str]().union(*(found for _, found in inner))
    loads = [use for use in _loads_of_values(code) if use.name in names]
    if not loads and all(new is old for (new, _), old in zip(inner, code.co_consts, strict=True)):
        return code, kept
    text, known = bytearray(code.co_code), list(code.co_names)
    for use in loads:
        if (own := _OWN_NAMES[use.name]) not in known:
            known.append(own)
        argument, at = known.index(own) << (use.op == _GLOBAL), 2 * use.at
        # One byte, of an instruction without a prefix.
        if argument <= 255 and not (at and text[at - 2] == _WIDE):
            text[at + 1] = argument
        else:
            kept |= {use.name}
    constants = tuple(new for new, _ in inner)
    return code.replace(co_code=bytes(text), co_names=tuple(known), co_consts=constants), kept


def _functions(names: dict[str, Any]) -> Iterator[types.FunctionType]:
    """The functions that a module defines, and the methods of its classes."""
    for value in list(names.values()):
        own = isinstance(value, type) and value.__module__ == names.get("__name__")
        for member in list(vars(value).values()) if own else [value]:
            member = getattr(member, "__func__", member)
            if hasattr(member, "__wrapped__"):  # what a decorator made of a function
                member = inspect.unwrap(member)
            if isinstance(member, types.FunctionType) and member.__globals__ is names:
                yield member


# None instead of the code itself, which would keep it.
_codes: ByCode[tuple[frozenset[str], types.CodeType | None, frozenset[str]]] = ByCode()
_loads: ByCode[list[NameUse]] = ByCode()


def _loads_of_values(code: types.CodeType) -> list[NameUse]:
    """Where a function uses one of the names otherwise than to call what it names."""
    if (known := _loads.get(code)) is not None:
        return known
    found = [use for use in uses_of_names(code) if use.name in _NAMES and use.op in _LOADS]
    found = [use for use in found if not (use.op == _GLOBAL and use.flag)]
    if found:  # seldom, and only then places in the source matter
        steps = list(dis.get_instructions(code))
        checks = _checks_of_types(steps)
        places = {step.offset: _NOWHERE if (place := place_of(step)) is None else place for step in steps}
        found = [use for use in found if not any(begin <= places[2 * use.at][0] <= end for begin, end in checks)]
    return _loads.keep(code, found)


def _checks_of_types(steps: list[dis.Instruction]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where calls of ``isinstance`` begin and end in the source. The stand-ins answer those as the types do."""
    placed = [(step, place) for step in steps if (place := place_of(step)) is not None]
    begins = {begin for step, (begin, _) in placed if step.opname == "LOAD_GLOBAL" and step.argval in _TYPE_CHECKS}
    return [place for step, place in placed if step.opname == "CALL" and place[0] in begins]


def _like(kind: type, convert: Callable[..., Any], most: int = 1) -> type:
    """A class that is ``kind`` in every respect but ``is``, except for what it makes of a symbolic number among at most
    ``most`` arguments."""

    class Like(BuiltinLike):
        def __instancecheck__(cls, instance: Any) -> bool:
            return issubclass(PYTHON_TYPES.get(type(instance), type(instance)), kind) or isinstance(instance, kind)

        def __subclasscheck__(cls, other: type) -> bool:
            return other is cls or issubclass(other, kind)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            symbolic = not kwargs and recording() is not None and any(map(_is_symbolic, args))
            return convert(*args) if symbolic and len(args) <= most else called_for_user(kind, *args, **kwargs)

        def __getattribute__(cls, name: str) -> Any:
            return getattr(kind, name)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is kind

        def __hash__(cls) -> int:
            return hash(kind)

        def __mro_entries__(cls, bases: tuple[Any, ...]) -> tuple[type, ...]:
            return (kind,)

        def __or__(cls, other: Any) -> Any:
            return kind | other

        def __ror__(cls, other: Any) -> Any:
            return other | kind

    return Like(kind.__name__, (), {})


def _is_symbolic(value: Any) -> bool:
    return type(value) in PYTHON_TYPES or isinstance(value, torch.Tensor) or type(value) is HostArray


def _number_in(value: Any) -> Any:
    """The number in a tensor, or in an array or number of numpy's; a number itself."""
    return value.item() if isinstance(value, torch.Tensor) or type(value) is HostArray else value


def _int(value: Any) -> Any:
    value = _number_in(value)
    if isinstance(value, torch.SymFloat):
        return math.trunc(value)
    return plain(value) if type(value) is torch.SymInt else int(value)


def _float(value: Any) -> Any:
    value = _number_in(value)
    return plain(torch.sym_float(value)) if isinstance(value, (torch.SymInt, torch.SymFloat)) else float(value)


def _choosing(function: Callable[..., Any]) -> type:
    """What stands for ``max`` or ``min``."""

    class Like(BuiltinLike):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if recording() is None or not args or not kwargs.keys() <= {"default"}:
                return function(*args, **kwargs)
            if len(args) == 1 and isinstance(args[0], AppendedList):
                return args[0].reduced(function, computed, **kwargs)
            items = list(args[0]) if len(args) == 1 else args
            chosen = choice(function, items) if items else None
            if chosen is not None:
                return chosen
            return called_for_user(function, *((items,) if len(args) == 1 else args), **kwargs)

    return Like(function.__name__, (), {})


def sum_as_python(*args: Any, **kwargs: Any) -> Any:
    """``sum``; one number where there are symbolic floats among numbers, which Python then adds at every call."""
    # Wrong arguments are Python's to refuse, in its own words.
    if recording() is None or not 1 <= len(args) <= 2 or not kwargs.keys() <= {"start"} or len(args) + len(kwargs) > 2:
        return _SUM(*args, **kwargs)
    values, start = args[0], args[1] if len(args) == 2 else kwargs.get("start", 0)
    if isinstance(values, AppendedList) and not values.is_read and type(start) is int and start == 0:
        return values.reduced(_SUM, computed)
    items = list(values)
    found = added(start, items)
    return _SUM(items, start) if found is None else found


def sum_replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of ``sum``."""
    return [(builtins, "sum", sum_as_python)]


def _range(*bounds: Any) -> range:
    """``range(0, n, step)`` of a symbolic ``n``: only how many numbers there are is fixed, not ``n``.

    Comparisons fix it, and not a division, because torch learns from them which slices end before ``n``.
    """
    begin, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    plain = type(begin) is int and type(step) is int and step > 1
    known = torch_adapter.hint(end) if plain and type(end) is torch.SymInt else None
    if known is None:
        return range(*bounds)
    found = range(begin, known, step)
    last = begin + len(found) * step
    bool(end <= last and (not found or end > last - step))
    return range(begin, last, step)


STAND_INS = {
    "int": _like(builtins.int, _int),
    "float": _like(builtins.float, _float),
    "max": _choosing(max),
    "min": _choosing(min),
    "range": _like(range, _range, most=3),
}
