"""Which functions, methods and settings of libraries a step goes by.

A program may replace a function of torch or of another library between two calls (``torch.nn.functional.relu = mine``,
``torch.nn.Linear.forward = mine``, ``math.exp = mine``), and eager would call the new one. Libraries are not walked:
they are large, and nearly all of what they hold has nothing to do with a step. What counts of them are the names in

- the user's functions that the step can run,
- the functions that were running whenever an operation was recorded, from the step down to that operation,
- the functions of libraries that the user's functions name.

Such a name is looked up as Python does: among the variables of the function's module, those of the modules that these
hold, and the built-in functions. Of a class count the methods of these names, and those that operators run.
"""

from __future__ import annotations

import abc
import builtins
import sys
import types
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch

from weft.capture.state.code_names import (
    code_names,
    functions_in,
    globals_of,
    imported_by,
    may_run,
    variables_of,
)
from weft.capture.state.containers import SIMPLE
from weft.capture.state.contents import dictionary_behind
from weft.capture.state.origin import is_own, is_walked
from weft.capture.state.reachable_state import ReachableState
from weft.source_files import is_own_file

_IMMUTABLE = 1 << 8  # `Py_TPFLAGS_IMMUTABLETYPE`: nobody can assign to attributes of such a class


class Libraries(NamedTuple):
    """What counts of libraries.

    Attributes:
        namespaces: variables of modules and attributes of classes.
        abstract: the abstract base classes that code names: others can be registered with them.
    """

    namespaces: list[Namespace]
    abstract: list[abc.ABCMeta]


class Namespace(NamedTuple):
    """The variables of a module, or the attributes of a class, that count.

    Attributes:
        entries: the dictionary that holds them.
        path: the name of the module or class.
        names: of what counts; what is missing counts too.
    """

    entries: dict[str, Any]
    path: str
    names: list[str]


class RunningCode:
    """The functions that were running when operations were recorded.

    Args:
        outermost: the function that calls the step.
    """

    def __init__(self, outermost: types.CodeType) -> None:
        self._outermost = outermost
        self._found: dict[int, _Code] = {}  # by id: code objects are compared by content, which is slow

    def notice(self) -> None:
        """Note the functions that are running now, those of weft's own included."""
        found = self._found
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._outermost:
            if id(frame.f_code) not in found:
                found[id(frame.f_code)] = _Code(frame.f_code, frame.f_globals)
            frame = frame.f_back

    def libraries(self, state: ReachableState) -> Libraries:
        """What counts of libraries, for a step that can reach ``state``."""
        running = [each for each in self._found.values() if not _name_of(each.variables).startswith("weft.")]
        return _LibraryNames(state, running).libraries()


class _Code(NamedTuple):
    code: types.CodeType
    variables: dict[str, Any]  # of its module


class _LibraryNames:
    def __init__(self, state: ReachableState, running: list[_Code]) -> None:
        self._found: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self._asked: set[tuple[int, int]] = set()
        self._kinds = {torch.Tensor, torch.nn.Parameter, *map(type, state.objects)}
        self._kinds.update(each for each in state.objects if isinstance(each, type))
        self._names = set(state.asked.names)
        self._run: dict[type, list[str]] = {}  # by class, see `_run_of`
        known = {id(each.__code__) for each in state.functions}
        called: dict[int, types.FunctionType] = {}
        for function in state.functions:
            held = [each for cell in function.__closure__ or () for each in _content_of(cell)]
            called |= self._code(_Code(function.__code__, function.__globals__), held)
        users = set(self._names)
        for module in [each for each in state.objects if isinstance(each, types.ModuleType)]:
            self._of_module(module, users, 0, plain=False)
        for kind in self._bases():
            for name in vars(kind).keys() & users:
                called |= {id(each): each for each in functions_in(vars(kind)[name])}
        for each in running:
            self._code(each, (), variables_too=id(each.code) not in known)
        for function in called.values():
            self._code(_Code(function.__code__, function.__globals__), (), variables_too=True)
        for kind in self._bases():
            self._methods(kind)

    def libraries(self) -> Libraries:
        found = [Namespace(entries, path, sorted(names)) for entries, path, names in self._found.values() if names]
        return Libraries(found, [kind for kind in self._kinds if isinstance(kind, abc.ABCMeta) and kind is not abc.ABC])

    def _code(self, code: _Code, held: Iterable[Any], *, variables_too: bool = False) -> dict[int, types.FunctionType]:
        """Look up the names in the code of a function.

        Args:
            code: of the function.
            held: what it closes over.
            variables_too: whether the variables of its module count: those of the user's functions are guarded as
                state of the user's.

        Returns:
            The functions of libraries among them, by id.
        """
        names = code_names(code.code)
        self._names |= names
        variables = code.variables
        own = is_own_file(code.code.co_filename)
        known = globals_of(code.code) & variables.keys()
        if variables_too and not own:
            self._note(variables, _name_of(variables), (each for each in known if _counts(variables[each])))
        # Few names are looked up in large dictionaries; an operation on sets would go through those.
        unset = [name for name in variables_of(code.code) if name not in variables]
        self._note(vars(builtins), "", [name for name in unset if name in vars(builtins)])
        modules = imported_by(code.code, variables.get("__package__") or "")
        self._note(sys.modules, "sys.modules", (module.__name__ for module in modules))
        found = [*held, *(variables[each] for each in known), *modules]
        for module in [each for each in found if isinstance(each, types.ModuleType)]:
            found += self._of_module(module, names, id(code.code), plain=own)
        self._kinds.update(each for each in found if isinstance(each, type))
        functions = [each for each in found if isinstance(each, types.FunctionType) and not is_own(each)]
        return {id(each): each for each in functions}

    def _of_module(self, module: types.ModuleType, names: Set[str], asks: int, *, plain: bool) -> list[Any]:
        """The values that a module has under ``names``, and those in modules among them.

        Args:
            asks: id of the code that the names are from.
            plain: whether plain values count. Libraries count and remember for ends of their own.
        """
        if (id(module), asks) in self._asked or is_own(module) or module.__name__.startswith("weft."):
            return []
        self._asked.add((id(module), asks))
        variables = vars(module)
        named = variables.keys() & names
        used = [each for each in named if _counts(variables[each]) or (plain and isinstance(variables[each], SIMPLE))]
        self._note(variables, module.__name__, used)
        found = [variables[name] for name in used]
        for inner in [each for each in found if isinstance(each, types.ModuleType)]:
            found += self._of_module(inner, names, asks, plain=plain)
        return found

    def _bases(self) -> list[type]:
        """The classes whose attributes can be assigned to, with their bases."""
        bases = dict.fromkeys(base for kind in self._kinds for base in kind.__mro__)
        return [base for base in bases if not base.__flags__ & _IMMUTABLE and not base.__module__.startswith("weft.")]

    def _methods(self, kind: type) -> None:
        """The methods of a class that code with the known names can run, and those that it has of its bases."""
        # The others of a class of the user's are guarded as state of the user's.
        names: set[str] = set().union(*map(self._run_of, kind.__mro__[:-1]))
        if is_own(kind):
            names = set(filter(_is_special, names))
        self._note(dictionary_behind(vars(kind)), kind.__qualname__, names)

    def _run_of(self, base: type) -> list[str]:
        """The methods that a class defines itself and code with the known names can run: the same for all classes that
        have it as a base."""
        found = self._run.get(base)
        if found is None:
            members = vars(base).items()
            # Code puts attributes for all tensors into their classes. Distributions have settings there.
            every = issubclass(base, torch.Tensor) or is_walked(base)
            run = [name for name, value in members if may_run(name, self._names) and (every or _counts(value))]
            found = self._run[base] = run
        return found

    def _note(self, entries: dict[str, Any], path: str, names: Iterable[str]) -> None:
        self._found.setdefault(id(entries), (entries, path, set()))[2].update(names)


def _counts(value: Any) -> bool:
    """Whether a value of a library is a function, a method, a property, a class or a module."""
    return callable(value) or hasattr(type(value), "__get__") or isinstance(value, types.ModuleType)


def _is_special(name: str) -> bool:
    return name == "forward" or name.startswith("__")


def _content_of(cell: types.CellType) -> list[Any]:
    """What a cell of a closure holds, as a list: it may be empty."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _name_of(variables: dict[str, Any]) -> str:
    return str(variables.get("__name__"))
