"""Attributes by names that a step computes: ``getattr(callback, "on_" + event)``, ``self.__dict__[name]``.

The walk of the Python state follows the attributes whose names stand in code. Other names are known when the step asks
for them. While a step is captured, the user's modules have functions of their own in the place of Python's, which tell
the walk each name before the attribute is read or written. Where it was a new one, the capture is made once more, with
the name known from the beginning (:mod:`weft.capture.state.asked_attributes`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from weft.capture.record.attribute_loads import loads_replaced
from weft.capture.record.held_references import ORIGINAL, original_of
from weft.capture.record.module_variables import ModuleVariables
from weft.capture.record.scheduler_steps import count_for
from weft.capture.state.code_names import code_names, functions_in, variables_of
from weft.capture.state.contents import names_asked_by
from weft.capture.state.object_parts import objects_in
from weft.capture.state.origin import is_own
from weft.capture.state.reachable_state import ReachableState
from weft.capture.user_code import called_by_user
from weft.thread_patches import replaced

# The file whose functions stand between the user's code and an attribute.
ASKS = __file__
# What takes the name of an attribute as text.
_BY_TEXT: tuple[Callable[..., Any], ...] = (getattr, hasattr, setattr, delattr)
# Methods of every object that do, and those that read all of its attributes.
_METHODS = frozenset({"__getattribute__", "__setattr__", "__delattr__"})
_OWNERS = (object, type, types.ModuleType)
_SUBCLASSES = "__subclasses__"
_OF_ALL = ("__getstate__", "__reduce__", "__reduce_ex__")


class ComputedNames:
    """Follows the names that a step computes, for one capture.

    Args:
        state: follows the attributes.
        intercepts: whether the step runs now, in this thread.
        seen_as: tells the type that a value of the capture has in eager, None for other values.
    """

    def __init__(
        self, state: ReachableState, intercepts: Callable[[], bool], seen_as: Callable[[Any], type | None]
    ) -> None:
        self._state = state
        self._intercepts, self._seen_as = intercepts, seen_as
        self._modules: dict[int, ModuleVariables] = {}
        self._loaded = ModuleVariables(sys.modules, lambda _, name: state.asked.module(name))

    def builtins(self) -> dict[str, Any]:
        """What the user's modules get, by the names of Python's own."""
        replaced: dict[Any, Callable[..., Any]] = {each: self._by_text(each) for each in _BY_TEXT}
        replaced |= {vars: _function(self._vars), dir: _function(self._dir), globals: _function(self._globals)}
        replaced |= {each: self._running(each) for each in (eval, exec)}
        replaced |= {super: _function(self._super)}
        replaced[__import__] = self._importing(__import__, _imported)
        for original, new in replaced.items():
            setattr(new, ORIGINAL, original)
        return {original.__name__: new for original, new in replaced.items()}

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """(owner, name, replacement) of functions of Python's modules."""
        yield inspect, "getattr_static", self._by_text(inspect.getattr_static)
        yield importlib, "import_module", self._importing(importlib.import_module, _loaded)
        for owner, name in ((operator, "attrgetter"), (operator, "methodcaller")):
            yield owner, name, self._getter(getattr(owner, name))
        for owner, name in ((copy, "copy"), (dataclasses, "replace")):
            yield owner, name, self._whole(getattr(owner, name), lambda obj: [obj])
        yield copy, "deepcopy", self._whole(copy.deepcopy, objects_in)
        for name in ("getmembers", "getmembers_static"):
            yield inspect, name, self._whole(getattr(inspect, name), _with_classes)

    def held(self) -> dict[int, Callable[..., Any]]:
        """What stands for methods of Python's own types where the user's code holds them, by their ids."""
        methods = [vars(owner)[name] for owner in _OWNERS for name in _METHODS if name in vars(owner)]
        new = [(each, self._by_text(each)) for each in methods]
        new.append((vars(type)[_SUBCLASSES], lambda kind, *wrong: self._subclasses(kind)(*wrong)))
        for original, function in new:
            setattr(function, ORIGINAL, original)
        return {id(original): function for original, function in new}

    def bound(self, value: Any) -> Callable[..., Any] | None:
        """The same for such a method of one object; None for another value."""
        if type(value) is types.MethodWrapperType and value.__name__ in _METHODS:
            asks = self._by_text(lambda owner, *args: value(*args))
            found = lambda *args: asks(value.__self__, *args)
        elif type(value) is types.BuiltinMethodType and value.__name__ == _SUBCLASSES:
            found = lambda *wrong: self._subclasses(value.__self__)(*wrong)
        else:
            return None
        setattr(found, ORIGINAL, value)
        return found

    @contextlib.contextmanager
    def in_code(self) -> Iterator[None]:
        """Inside, what the functions of the step read of ``__dict__`` is followed, too, and all reads of attributes of
        learning-rate schedulers, by functions of torch, too."""
        given: dict[str, Callable[[Any], Any]] = {name: functools.partial(self._method, name) for name in _METHODS}
        given |= {name: functools.partial(self._dictionary, read=operator.attrgetter(name)) for name in _OF_ALL}
        given |= {"__dict__": self._dictionary, "__globals__": self._variables_of, "__class__": self._class}
        given["modules"] = lambda obj: self._loaded if obj is sys and self._intercepts() else obj.modules
        given |= {_SUBCLASSES: self._subclasses, "f_globals": lambda frame: self._variables(frame.f_globals)}
        # weft's own functions put parts of parameters there and take them away again, which is no state of the step.
        functions = [each for each in self._state.functions if (each.__module__ or "").partition(".")[0] != "weft"]
        functions.append(functools.singledispatchmethod.__get__)  # type: ignore[bad-argument-type]
        # Those of torch read the attributes of the user's functions of epochs, too.
        kinds = {kind for scheduler, _ in self._state.schedulers.with_paths for kind in type(scheduler).__mro__}
        functions += [each for kind in kinds for each in functions_in(vars(kind).get("state_dict"))]
        with loads_replaced(functions, given), replaced(LRScheduler, "__getattribute__", self._of_scheduler):
            yield

    def end(self) -> None:
        """Forget the capture: a module that was imported meanwhile may keep a replacement where only C code finds it
        (``copy.deepcopy`` in ``_elementtree``)."""
        self._intercepts, self._seen_as = (lambda: False), (lambda value: None)
        self._modules.clear()
        del self._state, self._loaded

    # Wrong arguments are Python's to refuse, in its own words.

    def _by_text(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            if len(args) > 1 and type(args[1]) is str and self._intercepts():
                self._state.asked.attribute(args[0], args[1])
                if original is getattr and args[1] == "__dict__":
                    return self._dictionary(args[0], lambda obj: original(obj, *args[1:]))
            return original(*args)

        return ask

    def _getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._intercepts() and called_by_user():
                self._state.asked.texts(names_asked_by(made))
            return made

        return make

    def _whole(self, original: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()][:1] if self._intercepts() else []
            for each in (each for obj in given for each in read(obj)):
                self._state.asked.everything(each)
            return original(*args, **kwargs)

        return ask

    def _vars(self, *obj: Any) -> Any:
        if not obj:
            return sys._getframe(2).f_locals
        return self._dictionary(obj[0], vars) if len(obj) == 1 else vars(*obj)

    def _dir(self, *obj: Any) -> Any:
        if not obj:
            return sorted(sys._getframe(2).f_locals)
        if len(obj) == 1 and self._intercepts():
            for each in _with_classes(obj[0]):
                self._state.asked.everything(each)
            if type(obj[0]) is types.ModuleType and "__dir__" not in vars(obj[0]):
                return sorted(self._dictionary(obj[0], vars))
        return dir(*obj)

    def _globals(self, *wrong: Any) -> Any:
        return globals(*wrong) if wrong else self._variables(sys._getframe(2).f_globals)

    def _running(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``eval`` and ``exec``: the code that they run is known only now."""

        def run(source: Any, *scopes: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            given = dict(zip(("globals", "locals"), map(original_of, scopes), strict=False)) | named
            variables = original_of(given.pop("globals", None))
            names = given.pop("locals", None)
            if names is None:
                names = frame.f_locals if variables is None else variables
            variables = frame.f_globals if variables is None else variables
            if isinstance(source, (str, bytes)):
                if original is eval:  # which takes an indented expression
                    source = source.lstrip(" \t" if isinstance(source, str) else b" \t")  # type: ignore[bad-argument-type]
                source = compile(source, "<string>", original.__name__, dont_inherit=True)
            if self._intercepts() and isinstance(source, types.CodeType):
                self._state.asked.texts(code_names(source))
                for name in variables_of(source):
                    self._state.asked.variable(variables, name)
            return original(source, variables, names, **given)

        return run

    def _importing(self, original: Callable[..., Any], full_name: Callable[..., str]) -> Callable[..., Any]:
        """``importlib.import_module`` and ``__import__``: which module they load is known only now.

        Args:
            full_name: gives the name of the module, from the same arguments.
        """

        def load(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tuple(map(original_of, args)), {name: original_of(value) for name, value in kwargs.items()}
            found = original(*args, **kwargs)
            if self._intercepts() and called_by_user():
                parts = full_name(*args, **kwargs).split(".")
                for at in range(len(parts)):
                    self._state.asked.module(".".join(parts[: at + 1]))
            return found

        return load

    def _of_scheduler(self, scheduler: Any, name: str) -> Any:
        if not self._intercepts():
            return object.__getattribute__(scheduler, name)
        self._state.schedulers.read(scheduler, name)
        value = object.__getattribute__(scheduler, name)
        return count_for(scheduler, value, sys._getframe(2)) if name == "_step_count" else value

    def _class(self, obj: Any) -> Any:
        """The class of an object: of a number that changes ``int`` or ``float``, by which singledispatch chooses."""
        return self._seen_as(obj) or obj.__class__

    def _subclasses(self, kind: Any) -> Any:
        """The method that lists the subclasses of a class, which are walked."""
        if self._intercepts() and isinstance(kind, type) and is_own(kind):
            self._state.asked.subclasses(kind)
        return kind.__subclasses__

    def _variables_of(self, function: Any) -> Any:
        return self._variables(function.__globals__)

    def _dictionary(self, obj: Any, read: Callable[[Any], Any] = lambda obj: obj.__dict__) -> Any:
        """All attributes of an object."""
        if issubclass(type(obj), types.ModuleType):
            return self._variables(vars(obj)) if is_own(obj) else read(obj)
        if self._intercepts():
            self._state.asked.everything(obj)
        return read(obj)

    def _variables(self, module: dict[str, Any]) -> Any:
        if not self._intercepts():
            return module
        return self._modules.setdefault(id(module), ModuleVariables(module, self._state.asked.variable))

    def _super(self, *given: Any) -> Any:
        """``super()``, which finds the class and the object in the frame that calls it."""
        frame = sys._getframe(2)
        first = frame.f_code.co_varnames[:1]
        if not given and "__class__" in frame.f_locals and first and first[0] in frame.f_locals:
            given = frame.f_locals["__class__"], frame.f_locals[first[0]]
        made = _Super(*given) if given and not _METHODS.isdisjoint(frame.f_code.co_names) else super(*given)
        if type(made) is _Super:
            made.asks = self._by_text
        return made

    def _method(self, name: str, obj: Any) -> Any:
        """A method that takes the name of an attribute: of an object, or as its class has it."""
        original = getattr(obj, name)
        if type(obj) is super or not self._intercepts():
            return original
        by_text = self._by_text(lambda owner, name, *value: original(*given(owner), name, *value))
        is_class = issubclass(type(obj), type)
        given = lambda owner: (owner,) if is_class else ()
        return by_text if is_class else functools.partial(by_text, obj)


class _Super(super):
    """Gives methods that take the name of an attribute as functions that tell the name."""

    asks: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __getattribute__(self, name: str) -> Any:
        value = super.__getattribute__(self, name)
        if name not in _METHODS:
            return value
        asks, owner = object.__getattribute__(self, "asks"), object.__getattribute__(self, "__self__")
        return functools.partial(asks(lambda owner, *given: value(*given)), owner)


def _loaded(name: str, package: str | None = None) -> str:
    """The name of the module that ``importlib.import_module`` loads."""
    return importlib.util.resolve_name(name, package)


def _imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> str:
    """The name of the module that ``__import__`` loads."""
    return importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__")) if level else name


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method as a function, which can carry its original."""
    return lambda *args: method(*args)


def _with_classes(obj: Any) -> list[Any]:
    """An object and the user's own classes that it has attributes of."""
    classes = type(obj).__mro__ + (obj.__mro__ if isinstance(obj, type) else ())
    return [obj, *filter(is_own, classes)]
