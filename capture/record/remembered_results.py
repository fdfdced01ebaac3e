"""Functions with ``functools.lru_cache`` whose body runs while a step is captured.

The body runs once, and what it changes in the Python state belongs to the captured call alone. Each later call would
change it again. So where such a body ran and the state changed, the capture is made once more, and the changes are
compared before and after each run of a body.

A result that can be changed is Python state from the call that returned it. Operations that the body records are
repeated by each call of the program. Where that would give another result than the remembered one, the capture is made
once more, and the body runs eagerly in it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.node_kinds import is_ordered, is_random
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.held_references import StandIn
from weft.capture.record.host_draws import GeneratorDraw, draw_numpy, draw_python
from weft.capture.record.operands import tensors_in
from weft.capture.record.plain_keys import keep_entries, plain_key
from weft.capture.record.recorder import recording
from weft.capture.record.runtime_checks import check
from weft.capture.record.tracked_storages import is_tracked
from weft.capture.state.containers import Container
from weft.capture.state.object_parts import identity_of_parts, objects_in, parts_of
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.user_code import REMEMBERING, cache_of, user_line
from weft.errors import RememberedFunctionReads, RememberedFunctionWrites, UncapturableDraw
from weft.torch_adapter import TorchDispatchMode


class RememberingFunction(StandIn):
    """Stands in for a function that remembers results. It hands on numbers of the captured call for symbolic ones: the
    function hashes them, which makes them guards by their values, and knows its results by these.

    Args:
        original: the function.
        functions: makes each call of the step.
    """

    def __init__(self, original: Any, functions: RememberingFunctions) -> None:
        super().__init__(original)
        self.weft_functions = functions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if recording() is None:
            return self.weft_original(*args, **kwargs)
        args, kwargs = tuple(map(plain_key, args)), {name: plain_key(value) for name, value in kwargs.items()}
        return self.weft_functions.call(self.weft_original, args, kwargs)

    def cache_info(self) -> Any:
        """How often a result was remembered: a compiled call asks for none, so that eager's counts are others."""
        self._refuse("cache_info", "each call counts on in eager")
        return self.weft_original.cache_info()

    def cache_clear(self) -> None:
        """Forget all results."""
        self._refuse("cache_clear", "each call forgets and computes anew in eager")
        self.weft_original.cache_clear()

    def _refuse(self, method: str, why: str) -> None:
        if recording() is not None:
            remedy = "call it between calls of the step, or in a function marked @weft.opaque"
            raise UncapturableDraw(f"{self.weft_original.__qualname__}.{method}()", user_line(), why, remedy)

    def __get__(self, obj: Any, kind: Any = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weft_original, name)


class RememberingFunctions:
    """The functions that remember results, during one attempt at a capture.

    Args:
        known: functions that may not be among the objects that the step reaches: static methods.

    Attributes:
        watched: whether to compare the state before and after their bodies.
        eagerly: whether bodies run on real tensors and are not recorded.
        changed: what the bodies changed, as the user would write it.
        impure: where the step calls those whose recorded operations would give another result at the next call,
            because the step writes to the result or because it depends on the Python state; by name.
    """

    def __init__(self, *, watched: bool = False, eagerly: bool = False, known: Iterable[Any] = ()) -> None:
        self.watched, self.eagerly = watched, eagerly
        self.impure: dict[str, str] = {}
        self._computed: list[tuple[str, str, Any, list[Any]]] = []  # name, line, an object in the result, its version
        self._known = list(known)
        self.changed: set[str] = set()
        self._misses: list[tuple[Any, int]] = []
        self._remembered: dict[int, list[Any]] = {}  # the keys of results, by function
        self.end()

    def end(self) -> None:
        """Forget the capture that the attempt made."""
        self._walk: Callable[[Any, str], object] = lambda result, path: None
        self._modes: tuple[TorchDispatchMode, ...] = ()

    def note(
        self, objects: Iterable[Any], walk: Callable[[Any, str], object], modes: tuple[TorchDispatchMode, ...]
    ) -> None:
        """Begin with those among ``objects``.

        Args:
            walk: follows a result that the step can change, under a path.
            modes: those of a fake world.
        """
        self._walk, self._modes = walk, modes
        self._computed.clear()
        self._misses.clear()
        self._remembered.clear()
        for each in (*objects, *self._known):
            if isinstance(each, REMEMBERING):
                self.add(each)

    def add(self, function: Any) -> None:
        """Begin with one that the step is about to call."""
        if any(function is known for known, _ in self._misses):
            return
        self._misses.append((function, function.cache_info().misses))
        self._remembered[id(function)] = list(cache_of(function) or ())

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of the step."""
        recorder: Any = recording()
        self.add(function)
        misses, last = function.cache_info().misses, next(iter(reversed(recorder.graph.nodes)), None)
        plain = not _of_the_call([*args, *kwargs.values()])
        with contextlib.ExitStack() as stack:
            if plain and self.eagerly:
                stack.enter_context(recorder.paused(*self._modes))
                stack.enter_context(_ValuesBeforeTheStep(recorder, function.__qualname__))
            result = function(*args, **kwargs)
        if not _holds_values(result):
            if _can_be_changed(result):
                given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
                self._walk(result, f"{function.__name__}({', '.join(given)})")
        elif plain and function.cache_info().misses != misses:
            recorded = itertools.takewhile(lambda node: node is not last, reversed(recorder.graph.nodes))
            nodes = {node for node in recorded if node.op != "placeholder"}
            self._note_computed(function.__qualname__, result, nodes)
        return result

    def _note_computed(self, name: str, result: Any, nodes: set[torch.fx.Node]) -> None:
        """Note what a body recorded, and whether that depends on more than the body's arguments."""
        line = user_line()
        if not all(nodes.issuperset(node.all_input_nodes) for node in nodes):
            self.impure[name] = line
        self._computed += [(name, line, each, _version(each)) for each in objects_in(result)]

    def check_written(self) -> None:
        """After the step: note which functions' results it changed."""
        self.impure |= {name: line for name, line, each, before in self._computed if _version(each) != before}
        self._computed.clear()

    def ran(self) -> list[Any]:
        """Those whose body ran since."""
        return [function for function, misses in self._misses if function.cache_info().misses != misses]

    def forget(self) -> None:
        """Have those whose body ran run it again when they are called next: in another attempt, or in eager.

        What they remembered before stays. Python's function of a limited size finds its results in a dictionary, too,
        and copes with entries that are no longer there: the code of the user that it calls may have removed them.
        """
        for function in self.ran():
            if known := self._remembered.get(id(function)):
                ids = set(map(id, known))
                keep_entries(cache_of(function) or {}, lambda key, value, ids=ids: id(key) in ids)
            else:
                function.cache_clear()

    @contextlib.contextmanager
    def compared(
        self, changes: Callable[[], Iterable[tuple[Container, Any, Any, Any]]], graph: torch.fx.Graph
    ) -> Iterator[None]:
        """While the step runs.

        Args:
            changes: of the Python state so far: (container, key, before, after).
            graph: of the operations so far.
        """
        if not self.watched:
            yield
            return
        bodies = [function.__wrapped__ for function, _ in self._misses]
        codes = {each.__code__ for each in bodies if hasattr(each, "__code__")}
        in_c = {id(each) for each in bodies if not hasattr(each, "__code__")}
        running: list[dict[tuple[int, Any, int], str] | None] = []
        seen = lambda: _labels(changes()) | {(id(node), 0, 0): label for node, label in _actions(graph)}

        def compare(frame: FrameType, event: str, argument: object) -> None:
            if event.startswith("c_") and id(argument) in in_c:
                if event == "c_call":
                    running.append(seen())
                elif (before := running.pop()) is not None:
                    self.changed |= {label for key, label in seen().items() if key not in before}
            elif frame.f_code in codes and event == "call":
                # A tensor that the step computes is a new argument at each call, so that the body runs at each call.
                running.append(None if _of_the_call(list(frame.f_locals.values())) else seen())
            elif frame.f_code in codes and event == "return" and (before := running.pop()) is not None:
                self.changed |= {label for key, label in seen().items() if key not in before}

        profile = sys.getprofile()
        sys.setprofile(compare)
        try:
            yield
        finally:
            sys.setprofile(profile)


def attempt_with_checked_bodies(
    attempt: Callable[..., CapturedStep], functions: RememberingFunctions, *args: Any, **how: Any
) -> CapturedStep:
    """Make one attempt at a capture, and another one where the body of a function ran that remembers its result.

    Raises:
        RememberedFunctionWrites: the body changes the Python state.
        RememberedFunctionReads: the body cannot run eagerly, because it takes what the step has computed before, or
            because the step branches on a value.
    """
    try:
        captured = attempt(*args, remembering=functions, **how)
    except BaseException:
        functions.forget()
        raise
    ran = functions.ran()
    impure = functions.impure
    if not captured.complete:
        functions.forget()  # the capture of the path to its end shall see what the bodies change
    changes = any(each.key != "grad" for each in captured.effects + captured.appends)
    if ran and captured.complete and (changes or any(_actions(captured.graph.graph))):
        functions.forget()
        functions = RememberingFunctions(watched=True, known=ran)
        captured = attempt(*args, remembering=functions, **how)
        if functions.changed:
            functions.forget()
            raise RememberedFunctionWrites([each.__qualname__ for each in ran], sorted(functions.changed))
    if not impure:
        return captured
    functions.forget()
    if captured.outcomes or not captured.complete:  # another path may have the same beginning
        raise RememberedFunctionReads(*min(impure.items()))
    functions = RememberingFunctions(eagerly=True, known=ran)
    try:
        return attempt(*args, remembering=functions, **how)
    except BaseException:
        functions.forget()
        raise


class _ValuesBeforeTheStep(TorchDispatchMode):
    """Refuses operations of a body on tensors that the step has computed or written to.

    Raises:
        RememberedFunctionReads: names the function and the line.
    """

    def __init__(self, recorder: Any, function: str) -> None:
        super().__init__()
        self._recorder, self._function = recorder, function

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            plain = inner_tensor(tensor)[0]
            is_written = (
                self._recorder.input_fake(plain) is not None and self._recorder.current_value(plain).op != "placeholder"
            )
            if is_tracked(plain) or is_written:
                raise RememberedFunctionReads(self._function, user_line())
        return func(*args, **(kwargs or {}))


def _version(value: Any) -> list[Any]:
    """What tells whether an object was changed: how often a tensor was written to, and the parts of others."""
    return [value._version] if isinstance(value, torch.Tensor) else identity_of_parts(value)


def _of_the_call(arguments: Any) -> bool:
    """Whether a tensor of the capture is among the arguments of a function, or in a tuple there."""
    return any(
        isinstance(each, FakeTensor) or (isinstance(each, (tuple, list)) and _of_the_call(each)) for each in arguments
    )


def _holds_values(result: Any) -> bool:
    """Whether a tensor or number of the capture is in a result."""
    kinds = FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool
    return any(isinstance(each, kinds) for each in objects_in(result))


def _can_be_changed(result: Any) -> bool:
    """Whether an object in a result can be changed, other than a tensor."""
    return any((taken := parts_of(each)) is not None and not taken.form.is_fixed for each in objects_in(result))


def _labels(changes: Iterable[tuple[Container, Any, Any, Any]]) -> dict[tuple[int, Any, int], str]:
    return {(id(container), _hashable(key), id(now)): container.label(key) for container, key, _, now in changes}


def _actions(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, str]]:
    """The operations that do more than compute their result, with what they change as the user would write it."""
    for node in graph.nodes:
        if is_random(node) or isinstance(node.target, GeneratorDraw) or node.target in (draw_python, draw_numpy):
            yield node, "the state of the random generator"
        elif is_ordered(node) and node.op == "call_function" and not _only_computes(node.target):
            yield node, f"what `{getattr(node.target, '__name__', node.target)}` does"


def _only_computes(target: Any) -> bool:
    return target is check or getattr(target, "is_pure", False)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else id(key)
