"""What a step reads besides tensors and Python state, and what it does outside: random numbers, clocks, environment
variables, files, iterators.

While a step is captured, the functions that give such values are replaced, by name and where the user's code holds them
(:mod:`weft.capture.record.held_references`). A random number or a time becomes a node, so every call reads a new one;
an environment variable and the names in a folder become guards; all else is refused. Other threads get what they always
get.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from weft.capture.loaded_modules import names_of_modules
from weft.capture.record.assignment_problems import assignment_replacements
from weft.capture.record.builtin_types import sum_replacements
from weft.capture.record.clocks import clock_replacements
from weft.capture.record.computed_names import ComputedNames
from weft.capture.record.control_flow import control_flow_replacements
from weft.capture.record.eager_types import EagerTypes
from weft.capture.record.environment import EnvironmentReads
from weft.capture.record.float_arithmetic import math_replacements
from weft.capture.record.generator_states import GeneratorStates, MovingLine
from weft.capture.record.held_references import (
    OPENED,
    ORIGINAL,
    held_references_replaced,
    original_of,
    users_modules,
)
from weft.capture.record.host_draws import HostDraws
from weft.capture.record.numpy_classes import numpy_class_replacements
from weft.capture.record.object_ids import Ids
from weft.capture.record.outside_calls import OutsideCalls
from weft.capture.record.outside_objects import OutsideObjects
from weft.capture.record.randomness import RandomState
from weft.capture.record.recorder import OpRecorder, recording
from weft.capture.record.remembered_results import RememberingFunction, RememberingFunctions
from weft.capture.record.repeated_warnings import warning_replacements
from weft.capture.record.stand_ins import PlainKinds, StandIns
from weft.capture.record.tensor_classes import tensor_class_replacements, tensors_of_symbols
from weft.capture.record.torch_generators import TorchGenerators
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.type_facts import is_what_its_type_says
from weft.capture.user_code import REMEMBERING
from weft.errors import UnrecordedDraw

# Of these types some objects have stand-ins and others have none.
_DECIDED_BY_OBJECT = (
    *(types.MethodType, types.BuiltinMethodType, types.MethodWrapperType),
    *(REMEMBERING, type(torch.default_generator)),
)
# Of these types no object has a stand-in as a generator. Most values of the user's modules are functions and classes.
_NO_GENERATORS = PlainKinds()


class OutsideValues:
    """Replaces and watches what gives values from outside, for one capture.

    Args:
        recorder: of the capture.
        state: what the step can reach.
        remembering: notes the functions with ``functools.lru_cache`` that the step calls.
        ids: tells which objects were made since the capture began.
        watched: whether to look for the line that moves a generator, which takes long.
        arrays: whether arrays that numpy draws are followed.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        state: ReachableState,
        remembering: RememberingFunctions,
        ids: Ids,
        *,
        watched: bool = False,
        arrays: bool = False,
    ) -> None:
        self._recorder = recorder
        self._state = state
        self._ids = ids
        self._watched = watched
        self._thread = threading.get_ident()
        self.draws = HostDraws(recorder, self._intercepts, arrays=arrays)
        self.arrays = self.draws.arrays
        self.environment = EnvironmentReads(self._intercepts)
        self.calls = OutsideCalls(self._intercepts)
        self._objects = OutsideObjects(self.calls.counts)
        self._torch = RandomState(recorder, self.draws)
        self._generators = TorchGenerators(recorder, self.draws)
        self._types = EagerTypes(recorder, self._intercepts)
        self._names = ComputedNames(state, self._intercepts, self._types.of)
        self._remembering_all = remembering
        self._remembering_functions: dict[int, RememberingFunction] = {}
        self._plain = PlainKinds()  # of which no object has any stand-in

    def _intercepts(self) -> bool:
        """Whether this thread runs the step now, and nothing is paused."""
        return threading.get_ident() == self._thread and recording() is self._recorder and not self._recorder.is_paused

    def argument(self, value: Any) -> Any:
        """What the step gets for an argument that is no tensor."""
        stand_in = self._stand_in(value)
        return value if stand_in is None else stand_in

    def _stand_in(self, value: Any) -> Any | None:
        kind = type(value)
        if id(kind) in self._plain.ids:
            return None
        stand_in = self._of_generator(value)
        stand_in = self._objects.stand_in(value) if stand_in is None else stand_in
        decided = kind not in OPENED and not issubclass(kind, _DECIDED_BY_OBJECT) and is_what_its_type_says(kind)
        if stand_in is None and decided:
            self._plain.add(kind)
        return stand_in

    def _remembering(self, value: Any) -> Any | None:
        if type(value) is not REMEMBERING:
            return None
        return self._remembering_functions.setdefault(id(value), RememberingFunction(value, self._remembering_all))

    def _of_generator(self, value: Any) -> Any | None:
        kind = type(value)
        if id(kind) in _NO_GENERATORS.ids:
            return None
        stand_in = self.draws.stand_in(value)
        stand_in = self._generators.stand_in(value) if stand_in is None else stand_in
        if stand_in is None and not issubclass(kind, _DECIDED_BY_OBJECT):
            _NO_GENERATORS.add(kind)
        return stand_in

    def end(self) -> None:
        """Forget the capture. What a module that was imported meanwhile keeps of it would keep the user's model."""
        self.arrays.end()
        self._names.end()
        self._ids.end()
        self._remembering_all.end()
        del self._state

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """While active, reads are recorded; at the end all generators are as they were.

        Raises:
            UnrecordedDraw: a generator was used without a node.
            ArrayDrawn: an array was drawn, and arrays are not followed.
        """
        states = GeneratorStates(self._state.objects)
        modules = users_modules()  # before functions that look at files are replaced
        moved = lambda: states.moved(self.draws.used_elsewhere)
        try:
            with contextlib.ExitStack() as stack:
                functions: dict[int, Any] = {}
                alive: list[Any] = []
                stand_ins: dict[int, tuple[Any, Any]] = {}
                stack.callback(self.calls.end)
                stack.enter_context(_originals_in_new_modules(stand_ins))
                stack.enter_context(self._types.as_class())
                stack.enter_context(tensors_of_symbols())
                stack.enter_context(self.environment.followed())
                stack.enter_context(self.arrays.extensions_kept())
                replacements = [
                    *self.draws.replacements(),
                    *self.arrays.replacements(),
                    *clock_replacements(self.draws),
                    *self._torch.replacements(),
                    *self.calls.replacements(),
                    *warning_replacements(self.calls),
                    *sum_replacements(),
                    *math_replacements(),
                    *control_flow_replacements(),
                    *assignment_replacements(self.arrays),
                    *self._objects.replacements(),
                    *self._generators.replacements(),
                    *self._types.replacements(),
                    *self._names.replacements(),
                    *tensor_class_replacements(self._state.objects),
                    *numpy_class_replacements(self._state.objects, self.arrays),
                ]
                for owner, name, new in replacements:
                    original = getattr(owner, name)
                    alive.append(original)
                    functions.setdefault(id(original), new)
                    stand_ins[id(new)] = new, original
                    if isinstance(new, types.FunctionType):
                        setattr(new, ORIGINAL, original)
                    _replace(stack, owner, name, new)
                builtins = self._types.builtins() | self._names.builtins()
                builtins |= self._ids.builtins(self._intercepts)
                functions |= {id(original_of(new)): new for new in builtins.values()}
                functions |= self._names.held()
                own = lambda value: functions.get(id(value)) or self._remembering(value) or self._names.bound(value)
                held = StandIns(functions, lambda value: own(value) or self._of_generator(value), _NO_GENERATORS)
                reached = StandIns(functions, lambda value: own(value) or self._stand_in(value), self._plain)
                containers = lambda: self._state.containers
                objects = self._state.objects
                stack.enter_context(held_references_replaced(containers, objects, modules, held, reached, builtins))
                stack.enter_context(self._names.in_code())
                line = MovingLine(moved)
                if self._watched:
                    stack.enter_context(line.watched())
                yield
        except BaseException:
            states.restore(self.draws.used_elsewhere)
            self.arrays.check()
            raise
        self.arrays.check()
        names = moved()
        if names:
            states.restore(self.draws.used_elsewhere)
            if line.found is not None or not self._watched:
                raise UnrecordedDraw(names, line.found)


@contextlib.contextmanager
def _originals_in_new_modules(stand_ins: dict[int, tuple[Any, Any]]) -> Iterator[None]:
    """Puts originals into the modules that are imported inside.

    A module with ``from time import time`` that is first imported during a capture binds the replacement, and would
    keep it, and with it the capture, for ever.

    Args:
        stand_ins: by the id of a replacement, it and its original; filled later.
    """
    before = names_of_modules()
    try:
        yield
    finally:
        for name in names_of_modules() - before:
            names = getattr(sys.modules.get(name), "__dict__", {})
            for key, value in list(names.items()):
                new, original = stand_ins.get(id(value), (None, None))
                if new is value and new is not None:
                    names[key] = original


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    """Assign an attribute until the stack ends. What a class only inherits is deleted then."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, new)
