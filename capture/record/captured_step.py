"""What a capture leaves: the graph of a step, and how calls of the user's function reach and leave it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.capture.graph import StepGraph
from weft.capture.record.arguments import CallArguments
from weft.capture.record.autocast_copies import AutocastCopy
from weft.capture.record.dynamic_sizes import DynamicSizes, Specialised
from weft.capture.record.hook_counts import HookCounts
from weft.capture.record.outside_calls import OutsideRead
from weft.capture.record.python_numbers import ChangingState, PythonNumber
from weft.capture.record.symbols import Computed
from weft.capture.record.template_parts import Template
from weft.capture.segments import Outcome
from weft.capture.state.containers import Container, StatePlace
from weft.capture.state.library_names import Libraries
from weft.capture.state.reachable_state import ReachableState


@dataclass
class Effect:
    """A change of Python state that each call repeats: ``container[key]`` becomes ``template`` (None: is removed)."""

    container: Container
    key: Any
    template: Template | None


@dataclass
class Append:
    """What each call appends to a list of the Python state, the one that it finds at ``container[key]``."""

    container: Container
    key: Any
    template: Template


@dataclass
class CapturedStep:
    """A step as captured: the graph, and how calls of the user's function reach and leave it.

    Attributes:
        graph: the StepGraph.
        places: the place in Python state of each input's value at a call, aligned with ``graph.inputs``.
        effects: changes of Python state that each call repeats.
        appends: what each call appends to lists, before the other effects.
        result: the step's return value, over the graph's ``Return`` outputs.
        arguments: of the captured call.
        state: the Python state that the step can reach, for guards.
        recorded: number of operations in the step.
        passed: number of operations that ran once, during the capture, and are no part of the step (they created
            optimizer state).
        hooks: how often each registered hook fired.
        shape_env: the symbols of the graph and what the step assumed of them.
        sizes: the sizes of arguments that the capture began with as symbols.
        numbers: the Python numbers that are symbols.
        changing: what of the Python state was taken for changing.
        computed: how the symbols that are results of float arithmetic are computed from others.
        specialised: the sizes that were to be symbolic and are numbers in the graph.
        environment: the environment variables that the step read; None for one that is not set.
        outside: what else the step asked outside, with the answers.
        libraries: what of libraries the step goes by.
        autocast_copies: copies of weights that autocast keeps in the region around the call.
        outcomes: of the branches on values that the captured path takes.
        complete: whether the path goes to the end of the step, and not to a branch whose outcome is not known.
        raises: whether the step ends with an exception on this path, after its branches: ``result`` is that one.
        aliases: numbers of the values that ``effects`` and ``result`` take which eager would hand out as tensor objects
            of their own, and a program may return as an input or as another result (``p.detach()``).
        inference: numbers of tensors among these values, with whether eager makes an inference tensor; empty where
            neither the step nor its caller is in inference mode, and no input is such a tensor.
        unread_gradients: parameters whose gradient each call replaces and none reads.
        left_with_graph: the places of the tensors that the step writes in place, which eager leaves with a grad_fn.
        moved: dictionaries, with the keys that each call moves to their end after the effects, one by one, and those
            among them that stay where they are if they were there before.
        changed_for_opaque: objects that the step changes after an opaque function got them.
        seconds: duration of the capture.
    """

    graph: StepGraph
    places: list[StatePlace]
    effects: list[Effect]
    appends: list[Append]
    result: Template
    arguments: CallArguments
    state: ReachableState
    recorded: int
    passed: int
    hooks: HookCounts
    shape_env: ShapeEnv
    sizes: DynamicSizes
    numbers: list[PythonNumber]
    computed: dict[sympy.Symbol, Computed]
    specialised: list[Specialised]
    environment: dict[str, str | None]
    outside: list[OutsideRead]
    libraries: Libraries
    autocast_copies: list[AutocastCopy]
    aliases: list[int]
    inference: list[tuple[int, bool]]
    changing: ChangingState
    outcomes: tuple[Outcome, ...] = ()
    complete: bool = True
    raises: bool = False
    unread_gradients: list[Container] = field(default_factory=list)
    moved: list[tuple[Container, list[Any], frozenset[str]]] = field(default_factory=list)
    left_with_graph: list[StatePlace] = field(default_factory=list)
    changed_for_opaque: list[Template] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def changing_paths(self) -> Iterator[str]:
        """Paths of the numbers that are symbols, and of lists, dictionaries and objects that each call may replace."""
        yield from (number.place.path for number in self.numbers)
        yield from (place.path for place, _ in self.state.replaced_places)

    def fakes(self) -> Iterator[Any]:
        """The fake tensors and symbolic numbers that the captured step holds, once for each reference."""
        pending: list[Any] = [*self.arguments.vals.values(), *(node.meta.get("val") for node in self.graph.graph.nodes)]
        pending += (operand for each in self.computed.values() for operand in each.operands)
        while pending:
            value = pending.pop()
            if isinstance(value, (list, tuple)):
                pending += value
            else:
                yield value
