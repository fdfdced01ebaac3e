"""Which names the code of a step can read: its closure variables, globals and attributes.

Objects of the user's carry much that changes every step and has nothing to do with it, such as a trainer's counters.
Guards on those would recapture all the time. So the walk of the Python state looks only at attributes whose names
stand in code that the step can run. Code of functions that are marked opaque does not count.
"""

from __future__ import annotations

import dis
import functools
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

from weft.capture.state.bytecode import ByCode, is_method_load, level_of_import, uses_of_names
from weft.capture.state.containers import BuiltinLike
from weft.capture.state.origin import is_own, is_pythons_own, is_user_class

_UNCALLABLE = (bool, int, float, complex, str, bytes)
# Marks functions that weft.opaque made.
OPAQUE = "__weft_opaque__"
# Code of the functions that were marked opaque. Names that only they use are not walked and not guarded.
opaque_code: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
# What takes names of attributes and variables as text. Texts in code that uses one of these count as names.
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "vars", "globals", "__dict__"})
# Functions that import the module of a name.
_IMPORTING = frozenset({"import_module", "__import__"})
# What reads all fields of a dataclass.
_ALL_FIELDS = frozenset({"asdict", "astuple", "fields"})
# Methods with such names are called where no code names them (by operators, by ``with``), but for these; ``forward``
# is another such method.
_CALLED_OUTSIDE = frozenset(
    {f"__{name}__" for name in ("init", "new", "del", "repr", "getstate", "setstate", "reduce", "reduce_ex", "copy")}
    | {f"__{name}__" for name in ("deepcopy", "init_subclass", "class_getitem", "set_name", "sizeof", "dir", "replace")}
    | {"__post_init__"}
)


class _Names(NamedTuple):
    """The names in one piece of code, without functions that it defines.

    Attributes:
        all: global and attribute names, and texts that may be such.
        read: those whose value the code reads or writes, other than to call it as a method: ``x.step()`` reads no
            number ``step``.
        variables: those of global variables that it reads.
        globals: those of global variables that it reads or writes, and texts that may be such. An attribute of the
            same name is none of them: ``optimizer.step()`` reads no global ``step``.
        looked_for: texts that may be names of attributes or variables, and names of attributes in code that catches the
            exception of a missing one.
        modules: the modules that it imports, with the level of a relative import.
        asked: texts that may be keys of ``sys.modules``, or names of modules that it imports by a function.
        inner: code of the functions that it defines.
    """

    all: frozenset[str]
    read: frozenset[str]
    variables: frozenset[str]
    globals: frozenset[str]
    looked_for: frozenset[str]
    modules: tuple[tuple[str, int], ...]
    asked: frozenset[str]
    inner: tuple[types.CodeType, ...]

    def joined(self, other: _Names) -> _Names:
        """The names in both pieces of code."""
        return _Names(
            self.all | other.all,
            self.read | other.read,
            self.variables | other.variables,
            self.globals | other.globals,
            self.looked_for | other.looked_for,
            self.modules + other.modules,
            self.asked | other.asked,
            self.inner + other.inner,
        )


_MATCHES, _MATCHED_BY_POSITION = dis.opmap["MATCH_CLASS"], "__match_args__"
# Exceptions that a missing attribute is; a clause without any drops the exception at once.
_CAUGHT = frozenset({"AttributeError", "Exception", "BaseException"})
_CATCHES, _DROPS = dis.opmap["PUSH_EXC_INFO"], dis.opmap["POP_TOP"]
_FORMATTING = frozenset({"format", "format_map", "vformat"})
_ATTRIBUTE_IN_FORMAT = re.compile(r"\{[^{}!:]*?\.([^\W\d]\w*)")
_READS = frozenset(op for op in dis.hasname if dis.opname[op].endswith(("_ATTR", "_NAME", "_GLOBAL", "IMPORT_FROM")))
_VARIABLES = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME"))
_IMPORT = dis.opmap["IMPORT_NAME"]
_OF_OBJECTS = frozenset(op for op in dis.hasname if dis.opname[op].endswith(("_ATTR", "_METHOD")))
_OF_MODULE = frozenset(
    op for op in dis.hasname if dis.opname[op].endswith(("_NAME", "_GLOBAL", "_OR_GLOBALS")) and op != _IMPORT
)

_known: ByCode[_Names] = ByCode()
_known_whole: ByCode[_Names] = ByCode()  # with those of the functions that the code defines; see `mark_opaque`


def mark_opaque(code: types.CodeType) -> None:
    """Let the names in a function's code count no longer."""
    opaque_code.add(code)
    _known_whole.clear()  # functions that define this one have its names among theirs


def _names(code: types.CodeType) -> _Names:
    return _known.get(code) or _known.keep(code, _analysed(code))


def _analysed(code: types.CodeType) -> _Names:
    read, variables, modules, of_module, of_objects = set(), set(), [], set(), set()
    for use in uses_of_names(code):
        op, name = use.op, use.name
        if op in _READS and not is_method_load(use):
            read.add(name)
        if op in _VARIABLES:
            variables.add(name)
        if op in _OF_MODULE:
            of_module.add(name)
        if op in _OF_OBJECTS:
            of_objects.add(name)
        if op == _IMPORT:
            modules.append((name, level_of_import(code, use.at)))
    texts = (
        frozenset(filter(str.isidentifier, _texts(code.co_consts))) if _BY_TEXT & set(code.co_names) else frozenset()
    )
    asks = {"sys", "modules"} <= set(code.co_names) or not _IMPORTING.isdisjoint(code.co_names)
    asked = _texts(code.co_consts) if asks else frozenset()
    inner = tuple(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    read |= _matched(code) | _formatted(code)
    everything = texts.union(code.co_names, read)
    names = everything, texts.union(read), frozenset(variables), texts.union(of_module)
    looked_for = texts.union(of_objects) if _may_lack_attributes(code) else texts
    return _Names(*names, looked_for, tuple(modules), asked, inner)


def _may_lack_attributes(code: types.CodeType) -> bool:
    """Whether the code catches, or suppresses, the exception of a missing attribute; ``raise Exception`` is taken for
    such code, too."""
    return not _CAUGHT.isdisjoint(code.co_names) or any(
        op == _CATCHES and after == _DROPS for op, after in itertools.pairwise(code.co_code[::2])
    )


def _texts(constants: tuple[Any, ...]) -> frozenset[str]:
    found = [each for each in constants if isinstance(each, str)]
    return frozenset(found).union(*(_texts(each) for each in constants if isinstance(each, tuple)))


def _matched(code: types.CodeType) -> frozenset[str]:
    """The attributes that patterns of classes name: ``case Point(x=0)``; those of ``case Point(0)`` are the class's."""
    if _MATCHES not in code.co_code[::2]:
        return frozenset()
    tuples = [each for each in code.co_consts if isinstance(each, tuple)]
    return _texts(tuple(tuples)) | {_MATCHED_BY_POSITION}


def _formatted(code: types.CodeType) -> frozenset[str]:
    """The attributes that formats name: ``"{0.x}".format(point)``."""
    if _FORMATTING.isdisjoint(code.co_names):
        return frozenset()
    return frozenset(name for text in _texts(code.co_consts) for name in _ATTRIBUTE_IN_FORMAT.findall(text))


def _whole(code: types.CodeType) -> _Names:
    """The names of the code and of the functions that it defines, but for opaque ones."""
    if (found := _known_whole.get(code)) is not None:
        return found
    found = names = _names(code)
    for inner in names.inner:
        if inner not in opaque_code:
            found = found.joined(_whole(inner))
    return _known_whole.keep(code, found)


def code_names(code: types.CodeType) -> frozenset[str]:
    """All global and attribute names in the code, functions that it defines included."""
    return _whole(code).all


def variables_of(code: types.CodeType) -> frozenset[str]:
    """The global variables that the code reads, functions that it defines included."""
    return _whole(code).variables


def globals_of(code: types.CodeType) -> frozenset[str]:
    """The global variables that the code reads or writes, or may by text, functions that it defines included."""
    return _whole(code).globals


def globals_used(function: types.FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """The variables of its module whose values count for a function, and those of them that are not there: Python goes
    on to its own names then, which a variable of the module would hide."""
    variables = function.__globals__
    read = variables_of(function.__code__) if is_own(function) else ()
    absent = frozenset(name for name in read if name not in variables)
    named = [name for name in globals_of(function.__code__) if name in variables and not is_pythons_own(function, name)]
    return frozenset(name for name in named if not isinstance(variables[name], BuiltinLike)) | absent, absent


def imported_by(code: types.CodeType, package: str) -> list[types.ModuleType]:
    """The modules that the code of a function in ``package`` imports and that are loaded already."""
    found = []
    for name, level in _whole(code).modules:
        if level:
            parents = package.split(".")
            name = ".".join(part for part in (*parents[: len(parents) - level + 1], name) if part)
        parts = name.split(".")
        found += [sys.modules.get(".".join(parts[: at + 1])) for at in range(len(parts))]
    return [module for module in found if isinstance(module, types.ModuleType)]


def closed_over(code: types.CodeType) -> set[str]:
    """The variables of outer functions that ``code`` uses, itself or in functions it makes that are not opaque."""
    inner = _names(code).inner
    if not any(constant in opaque_code for constant in inner):
        return set(code.co_freevars)
    names = {step.argval for step in dis.get_instructions(code) if "DEREF" in step.opname}
    return names.union(*(closed_over(constant) for constant in inner if constant not in opaque_code))


class AttributeNames(set[str]):
    """Attribute names in the code that a step can run.

    Attributes:
        read: those that are used for more than to call a method.
        looked_for: those that the code gives as text, to ``getattr`` with a default for one, or whose lack it catches:
            there may be none yet.
        modules: names of modules for which it looks whether they are loaded.

    Args:
        step: a function, a method, or an object with ``__call__``.
        computed: names that its code is known to compute, and to give as text.
        modules: names of modules that it is known to look up.
    """

    def __init__(self, step: Callable[..., Any], computed: Iterable[str] = (), modules: Iterable[str] = ()) -> None:
        super().__init__(computed)
        self.read: set[str] = set(self)
        self.looked_for: set[str] = set(self)
        self.modules = set(modules)
        self._methods: dict[type, dict[str, list[types.FunctionType]]] = {}
        self._used: dict[type, tuple[int, list[types.FunctionType]]] = {}
        self._frozen: frozenset[str] = frozenset()
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None) or getattr(type(step).__call__, "__code__", None)
        if code:
            self.add_code(code)

    @property
    def count(self) -> int:
        """Grows with every new name."""
        return len(self) + len(self.read) + len(self.looked_for)

    @property
    def frozen(self) -> frozenset[str]:
        """The names; the same object until there are more."""
        if len(self._frozen) != len(self):
            self._frozen = frozenset(self)
        return self._frozen

    @property
    def whole_dataclasses(self) -> bool:
        """Whether the code may read all fields of a dataclass."""
        return not self.isdisjoint(_ALL_FIELDS)

    def add_code(self, code: types.CodeType) -> None:
        """Add the names of one function's code."""
        names = _whole(code)
        self.update(names.all)
        if "__repr__" not in self and (not _TEXTS.isdisjoint(names.all) or makes_text(code)):
            self.add("__repr__")
        self.read.update(names.read)
        self.looked_for.update(names.looked_for)
        self.modules.update(names.asked)

    def add_text(self, name: str) -> None:
        """Add a name that code gives as text."""
        for names in (self, self.read, self.looked_for):
            names.add(name)

    def of(self, attributes: Mapping[str, Any]) -> frozenset[str]:
        """The names that count for an object with these attributes."""
        return self.frozen - self.only_called(attributes)

    def only_called(self, attributes: Mapping[str, Any]) -> frozenset[str]:
        """The names that do not count for an object: code calls them, and a plain value is never called, only read."""
        called = [name for name in attributes if name in self and name not in self.read]
        return frozenset([name for name in called if isinstance(attributes[name], _UNCALLABLE)])

    def methods_used(self, owner: type) -> list[types.FunctionType]:
        """Methods of the class ``owner`` that code with these names can call, directly, through each other or by an
        operator; the names grow by theirs, and by those of attributes that a pattern matches by position."""
        for name in getattr(owner, _MATCHED_BY_POSITION, ()) if _MATCHED_BY_POSITION in self else ():
            self.add(name)
            self.read.add(name)
        count, found = self._used.get(owner, (-1, []))
        if count != self.count:
            known = set(map(id, found))
            if owner not in self._methods:
                self._methods[owner] = _functions_of(owner)
            grown = True
            while grown:
                used = [
                    method
                    for name, methods in self._methods[owner].items()
                    if may_run(name, self)
                    for method in methods
                    if id(method) not in known
                ]
                for method in used:
                    self.add_code(method.__code__)
                known.update(map(id, used))
                found = [*found, *used]
                grown = bool(used)
            self._used[owner] = self.count, found
        return found


def _functions_of(owner: type) -> dict[str, list[types.FunctionType]]:
    """The methods and properties of a class and its bases, those of torch and of the standard library left out, as
    Python functions."""
    kinds = [kind for kind in reversed(owner.__mro__) if is_user_class(kind)]
    members = {name: member for kind in kinds for name, member in vars(kind).items()}
    found = {name: functions_in(member) for name, member in members.items()}
    return {name: functions for name, functions in found.items() if functions}


def parts_of_member(member: Any) -> tuple[Any, ...]:
    """What a member of a class runs, where it wraps it: a property, a class method."""
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    if isinstance(member, (staticmethod, classmethod)):
        return (member.__func__,)
    if isinstance(member, functools.partialmethod):
        return member.func, member.args, member.keywords
    if isinstance(member, functools.singledispatchmethod):
        return member.func, *member.dispatcher.registry.values()
    return (member.func,) if isinstance(member, functools.cached_property) else ()


def functions_in(member: Any) -> list[types.FunctionType]:
    """The Python functions that a member of a class runs: its own, those of a property, of a class method."""
    return [part for part in (member, *parts_of_member(member)) if isinstance(part, types.FunctionType)]


def may_run(name: str, names: Set[str]) -> bool:
    """Whether code with these names can run a method called ``name``, by an operator for one."""
    unnamed = name == "forward" or (name.startswith("__") and name.endswith("__") and name not in _CALLED_OUTSIDE)
    return unnamed or name in names


# Functions that call the `__repr__` of what they get.
_TEXTS = frozenset({"print", "repr", "str", "format", "ascii"})
_FORMATS = dis.opmap["FORMAT_VALUE"] if "FORMAT_VALUE" in dis.opmap else dis.opmap["FORMAT_SIMPLE"]


def makes_text(code: types.CodeType) -> bool:
    """Whether the code, functions that it defines included, has an f-string with a value in it."""
    found = _FORMATS in code.co_code[::2]
    return found or any(makes_text(each) for each in code.co_consts if isinstance(each, types.CodeType))


# Methods that take entries out of a list or deque.
_TAKING = frozenset({"pop", "popleft", "remove", "clear"})
_DELETES_ENTRY = dis.opmap["DELETE_SUBSCR"]


def takes_entries(code: types.CodeType) -> bool:
    """Whether the code, functions that it defines included, takes entries out of a list: a window of the last few."""
    # Each instruction has two bytes, and the first is the operation.
    found = not _TAKING.isdisjoint(code.co_names) or _DELETES_ENTRY in code.co_code[::2]
    return found or any(takes_entries(each) for each in code.co_consts if isinstance(each, types.CodeType))
