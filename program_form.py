"""One captured form of a step, compiled: its program, and the Python around it.

A program takes the values of its inputs from their places in Python state and updates tensors in place. What else a
step leaves behind (a new ``.grad``, an attribute) is assigned after the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.agreement.lockstep import RankEvent
from weft.capture.graph import StepGraph
from weft.capture.guards.guards import Guards
from weft.capture.record.autocast_copies import check_copies, known_copies, weights_updated
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.made_for_opaque import begin_call
from weft.capture.record.result_aliases import of_kind
from weft.capture.state.absent_graphs import mark_absent_graph
from weft.capture.state.containers import StatePlace
from weft.capture.state.state_reader import PlaceReader
from weft.capture.step_interface import Role
from weft.inductor.compiler import compile_graph
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.replay import HashedTensors, ReplayedState, with_hashes


class PlacedProgram:
    """A program whose inputs are at places in Python state.

    Attributes:
        program: as compiled.
        updated: the places of the tensors that it writes.
    """

    def __init__(
        self,
        graph: StepGraph,
        places: Sequence[StatePlace],
        mode: str,
        memory_limit: int | None,
        agreed: AgreedCollectives,
    ) -> None:
        self.program = compile_graph(graph, mode, memory_limit, agreed)
        self._inputs = PlaceReader(places)
        updated = {entry.name for entry, _ in graph.updates()}
        inputs = zip(graph.inputs, places, strict=True)
        self.updated = [place for entry, place in inputs if entry.name in updated and entry.role is not Role.SCALAR]
        written = [node.meta["val"] for node in graph.placeholders if node.name in updated]
        # Torch lets nobody write to an inference tensor outside of that mode.
        self._writes_inference = any(isinstance(val, torch.Tensor) and val.is_inference() for val in written)

    def run(self) -> list[Any]:
        """Run with the present values; returns those of the outputs that update no input."""
        if self._writes_inference:
            with torch.inference_mode():
                return self.program.boxed(self._inputs.read())
        return self.program.boxed(self._inputs.read())

    def tell_autocast(self) -> None:
        """Say that the program has written weights of which autocast may hold copies."""
        if known_copies:
            weights_updated(self.updated)


class ProgramForm:
    """One captured form of a step with its guards and its program.

    Args:
        replayed: the name of the step where calls of it can be replayed, see :mod:`weft.replay`.
    """

    def __init__(
        self,
        captured: CapturedStep,
        guards: Guards,
        mode: str,
        memory_limit: int | None,
        agreed: AgreedCollectives,
        replayed: str = "",
    ) -> None:
        self.captured = captured
        self.guards = guards
        self.busy = False  # whether its program is running, with buffers that serve one call at a time
        self.event: RankEvent | None = None  # of its calls, where their collectives link all ranks
        self.replays_next = False  # whether the next call computes twice
        graph, self._name = captured.graph, replayed
        self._hashed: HashedTensors | None = None
        if replayed:
            graph, self._hashed = with_hashes(graph, replayed)
        self._placed = PlacedProgram(graph, captured.places, mode, memory_limit, agreed)
        # Of lists and dictionaries that the step changes and replaces: each call finds others in their places.
        effects = [effect.container for effect in captured.effects]
        self._replaced = [(each, outer) for each in effects if (outer := each.outer) is not None]

    @property
    def program(self) -> Any:
        """The compiled program, whose ``boxed`` is called by ``run``; assigning another replaces it."""
        return self._placed.program

    @program.setter
    def program(self, program: Any) -> None:
        self._placed.program = program

    def run(self, leaves: list[Any], call: tuple[Any, Any], kept: dict[int, Any] | None = None) -> Any:
        """Run the program for a call with these positional and keyword arguments, which have these leaves.

        Must not be busy.

        Args:
            kept: objects that opaque functions kept in programs before this one.
        """
        self.busy = True
        kept = {} if kept is None else kept
        before = begin_call(kept)
        try:
            return self._run(leaves, call, kept)
        finally:
            begin_call(before)
            self.busy = False

    def _compute(self) -> list[Any]:
        """The values of the captured outputs; computed twice where this call is replayed."""
        if self._hashed is None:
            return self._placed.run()
        if not self.replays_next:
            return self._placed.run()[:-1]
        state = ReplayedState(place.get() for place in self._placed.updated)
        once = self._placed.run()[-1].clone()
        state.restore()
        *outputs, again = self._placed.run()
        self._hashed.first_difference(self._name, once, again, linked=self.event is not None)
        return outputs

    def _run(self, leaves: list[Any], call: tuple[Any, Any], made: dict[int, Any]) -> Any:
        captured = self.captured
        captured.arguments.bind(leaves)
        if captured.autocast_copies:
            check_copies(captured.autocast_copies)
        # The call replaces these gradients and reads none. Held until its end, they would add to the peak memory.
        for container in captured.unread_gradients:
            container.obj.grad = None
        with captured.arguments.containers_of(call):  # opaque functions in the program get them, too
            outputs = self._compute()
            for at in captured.aliases:
                outputs[at] = outputs[at].detach()
            for at, inference in captured.inference:
                outputs[at] = of_kind(outputs[at], inference)
            for place in captured.left_with_graph:
                mark_absent_graph(place.outer(), place.path)
            # All values first: one effect may move what another one replaces.
            appended = [append.template.fill(outputs, made) for append in captured.appends]
            values = [effect.template and effect.template.fill(outputs, made) for effect in captured.effects]
            result = captured.result.fill(outputs, made)
            for changed in captured.changed_for_opaque:
                changed.fill(outputs, made)
            for append, value in zip(captured.appends, appended, strict=True):
                append.container.get(append.key).append(value)
            for container, place in self._replaced:
                container.obj = place.outer()
            moved = [
                (container, [key for key in keys if not (new and key in new and key in container.obj)])
                for container, keys, new in captured.moved
            ]
            for effect, value in zip(captured.effects, values, strict=True):
                if effect.template is None:
                    effect.container.remove(effect.key)
                else:
                    effect.container.set(effect.key, value)
            for container, keys in moved:
                container.move_to_end(keys)
        self._placed.tell_autocast()
        return result
