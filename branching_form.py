"""A step that branches on values, compiled: a tree of programs.

Up to a value that the step's Python asks for, all paths share a program. The host reads the value and goes on with the
program of the branch that was captured for it. An outcome that was not seen before is captured then, by running the
step on fake tensors with the outcomes so far, and becomes a new branch. What a path leaves in Python state is assigned
at its end.

Ranks may have different outcomes, as long as the same collectives follow. Where a step communicates, they show each
other at every branch, over the store, which collectives come next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import knobs
from weft.capture.agreement.agreement import agree
from weft.capture.agreement.claims import claims_of
from weft.capture.agreement.lockstep import RankEvent
from weft.capture.agreement.signature import signature
from weft.capture.agreement.text_difference import REMARK, without_lines
from weft.capture.guards.guards import Guards
from weft.capture.node_kinds import is_collective, is_random
from weft.capture.record.arguments import CallArguments
from weft.capture.record.autocast_copies import check_copies
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.generator_states import GeneratorStates
from weft.capture.record.made_for_opaque import begin_call
from weft.capture.record.python_numbers import ChangingState
from weft.capture.record.runtime_checks import check
from weft.capture.segments import Outcome, Segment, is_branch, segments_of
from weft.capture.state.containers import Container, StatePlace
from weft.capture.step_interface import Role
from weft.errors import PathsDiffer, StaleAutocastCopy, TextOfValue, TooManyPaths, WeftError
from weft.inductor.runtime.piecewise_cudagraph import Program
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.program_form import PlacedProgram, ProgramForm
from weft.shown_values import listed

# Captures the path of some outcomes, up to the first branch beyond them. Takes the dimensions and the Python numbers to
# keep symbolic, the outcomes, and the user's line of the last branch.
CapturePath = Callable[
    [frozenset[tuple[int, int]], ChangingState, tuple[Outcome, ...], str], tuple[CapturedStep, Guards]
]


class PathEnded(Exception):
    """A call cannot go on compiled after a branch: the step raises there, or the branch cannot be captured.

    Attributes:
        error: what the capture raised, or what the step raises.
        undone: whether the call has left nothing behind, so that the uncompiled step can take its place.
        raises: whether the step raises there, in eager too.
        called: the functions outside the step that it has called, and that the uncompiled step calls again.
    """

    def __init__(self, error: BaseException, undone: bool, *, raises: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.undone = undone
        in_raise = isinstance(error, TextOfValue) and error.in_raise  # for the message of an exception
        self.raises = raises or in_raise or not isinstance(error, WeftError)
        self.called: list[str] = []


class _Branch:
    """A program whose first returned value decides what comes next.

    Args:
        compiled: makes the program, when it is first needed: ranks that communicate compile together.

    Attributes:
        segment: the graph of the program, and what of its results is kept.
        arguments: of the capture; they find the tensors of a call.
        next: by outcome, the branch or the end of the path that follows.
        lasting: whether the program leaves anything behind, but for states of generators.
    """

    def __init__(self, segment: Segment, compiled: Callable[[], PlacedProgram], arguments: CallArguments) -> None:
        self._compiled = compiled
        self.segment = segment
        self.arguments = arguments
        self.next: dict[Outcome, _Branch | _PathEnd] = {}
        acts = any(is_collective(node) or _acts(node) for node in segment.graph.graph.nodes)
        self.lasting = acts or any(True for _ in segment.graph.updates())

    def done(self) -> Iterator[tuple[str, str]]:
        """What a run of the program leaves behind: (kind of change, the tensor, collective or function)."""
        yield from (("updated in place", entry.path) for entry, _ in self.segment.graph.updates())
        for node in self.segment.graph.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if is_collective(node):
                yield "run", name.split(".")[0]
            elif is_random(node):
                yield "drawn random numbers by", name.split(".")[0]
            elif _acts(node) and not is_branch(node):
                yield "called", name.removeprefix("opaque_")

    @functools.cached_property
    def placed(self) -> PlacedProgram:
        """The program."""
        return self._compiled()


def _acts(node: torch.fx.Node) -> bool:
    """Whether a node runs for what it does, and does not only compute with arrays or raise."""
    is_pure = node.target is check or getattr(node.target, "is_pure", False)
    return bool(node.meta.get("effect")) and not is_pure


class _PathEnd:
    """The last program of a path, with what the path leaves behind, and the path as it was captured."""

    def __init__(
        self, segment: Segment, compiled: Callable[[], ProgramForm], path: CapturedStep, guards: Guards
    ) -> None:
        self._compiled = compiled
        self.segment = segment
        self.path = path
        self.guards = guards

    @functools.cached_property
    def form(self) -> ProgramForm:
        """The program."""
        return self._compiled()


class _Undo:
    """What a call has changed, so that it can be taken back.

    Args:
        generators: what the step can reach, where it draws random numbers.
        copies: whether to copy tensors before they are updated.

    Attributes:
        possible: whether everything can be taken back.
    """

    def __init__(self, generators: list[Any] | None, copies: bool) -> None:
        self._copies = copies
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: list[Callable[[], None]] = []
        self.possible = True
        if generators is not None:
            self._states.append(GeneratorStates(generators).restore)
            self._states.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
            if torch.cuda.is_initialized():
                self._states.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def before(self, branch: _Branch) -> None:
        """Called before the program of a branch runs."""
        if self._copies:
            updated = [place.get() for place in branch.placed.updated]
            self._tensors += [(tensor, tensor.detach().clone()) for tensor in updated]
        elif branch.lasting:
            self.possible = False

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value in reversed(self._tensors):
                tensor.copy_(value)
        for restore in self._states:
            restore()


def _what_was_done(step: str, run: Sequence[_Branch]) -> str:
    """What a call leaves behind that ends after the programs of these branches."""
    found: dict[str, dict[str, None]] = {}
    for kind, name in (each for branch in run for each in branch.done()):
        found.setdefault(kind, {})[name] = None
    done = "; ".join(f"{kind} {listed(list(names))}" for kind, names in found.items())
    return (
        f"{step} has run up to {run[-1].segment.line}, and no further. Up to there it has {done}. "
        "Its other changes, to new gradients, attributes and Python numbers, were not made. Load what it has changed "
        'from a checkpoint before you go on with it, or pass fallback="eager" to weft.compile, which takes the updates '
        "back and runs such a call uncompiled."
    )


class BranchingForm:
    """One captured form of a step that branches on values.

    Args:
        step: its name.
        captured, guards: its path up to the first branch.
        dynamic: the dimensions of arguments that are kept symbolic, on all paths.
        mode, memory_limit: of :func:`weft.inductor.compiler.compile_graph`.
        undoes: whether tensors are copied before they are updated, so that a call whose branch cannot be captured can
            be taken back.

    Attributes:
        captured, guards: of the path that was taken last.
        dynamic: as given.
    """

    def __init__(
        self,
        step: str,
        captured: CapturedStep,
        guards: Guards,
        dynamic: frozenset[tuple[int, int]],
        mode: str,
        memory_limit: int | None,
        undoes: bool,
    ) -> None:
        self.captured = captured
        self.guards = guards
        self.busy = False
        self.event: RankEvent | None = None  # of its calls, where their collectives link all ranks
        self._step = step
        self.dynamic = dynamic
        self._changing = captured.changing
        self._undoes = undoes
        self._mode = mode
        self._memory_limit = memory_limit
        self._values: dict[str, Any] = {}  # those of one call that travel between its programs
        self._container = Container(self._values, "values of earlier segments")
        self._first: dict[Outcome, _Branch | _PathEnd] = {}
        self._paths = 0
        self._communicates = False
        self._draws = False
        self._agreed: dict[str, AgreedCollectives] = {}  # by the signature of a segment
        self._add(captured, guards)
        assert self.program is not None  # compiled with the first capture, as that of a step without branches

    @property
    def program(self) -> Program:
        """The first program."""
        first = self._first[False]
        assert isinstance(first, _Branch)
        return first.placed.program

    def run(self, leaves: list[Any], call: tuple[Any, Any], capture: CapturePath) -> Any:
        """Run the programs of a call with these arguments (positional, keyword) and their leaves. Must not be busy.

        Raises:
            PathEnded: a branch cannot be captured, or the step raises there and the uncompiled step can do it instead.
        """
        self.busy = True
        before = begin_call(for_opaque := {})
        try:
            return self._run(leaves, call, capture, for_opaque)
        finally:
            begin_call(before)
            self._values.clear()
            self.busy = False

    def _run(self, leaves: list[Any], call: tuple[Any, Any], capture: CapturePath, for_opaque: dict[int, Any]) -> Any:
        if self.captured.autocast_copies:
            check_copies(self.captured.autocast_copies)
        undo = _Undo(self.captured.state.objects if self._draws else None, self._undoes)
        outcomes: tuple[Outcome, ...] = ()
        here = self._first[False]
        run: list[_Branch] = []
        while isinstance(here, _Branch):
            undo.before(here)
            run.append(here)
            here.arguments.bind(leaves)
            with here.arguments.bound_to(call):  # opaque functions get them
                outcome, *kept = here.placed.run()
            here.placed.tell_autocast()
            self._values.update(zip(here.segment.kept, kept, strict=True))
            for name in self._values.keys() - here.segment.used:
                del self._values[name]
            outcomes = (*outcomes, outcome)
            try:
                here = self._following(here, outcomes, leaves, capture, undo)
            except PathEnded as ended:
                ended.called = [name for branch in run for kind, name in branch.done() if kind == "called"]
                if not ended.undone:
                    ended.error.add_note(_what_was_done(self._step, run))
                raise
            except WeftError as error:  # ranks differ in what follows
                if undo.possible:
                    undo.restore()
                else:
                    error.add_note(_what_was_done(self._step, run))
                raise
        self.captured, self.guards = here.path, here.guards
        if here.path.raises and undo.possible:  # the uncompiled step can raise it
            undo.restore()
            line = run[-1].segment.line
            raise PathEnded(PathsDiffer(self._step, line, "it raised an exception there"), True, raises=True)
        try:
            result = here.form.run(leaves, call, for_opaque)
        except StaleAutocastCopy as error:  # raised before the last program ran
            if undo.possible:
                undo.restore()
            else:
                error.add_note(_what_was_done(self._step, run))
            raise PathEnded(error, undo.possible) from error
        if here.path.raises:
            raise result
        return result

    def _following(
        self, branch: _Branch, outcomes: tuple[Outcome, ...], leaves: list[Any], capture: CapturePath, undo: _Undo
    ) -> _Branch | _PathEnd:
        """What follows a branch, captured where this call is the first to go there."""
        outcome, line = outcomes[-1], branch.segment.line
        if not self._serves(branch.next.get(outcome), leaves):
            try:
                self._capture(capture, outcomes, line)
                if outcome not in branch.next:
                    raise PathsDiffer(self._step, line, "captured again, the step does not branch there")
            except BaseException as error:
                if undo.possible:
                    undo.restore()
                if not isinstance(error, Exception):  # an interrupt
                    raise
                if self._communicates:
                    agree(self._step, f"{self._step} cannot be captured at {line}: {type(error).__name__}")
                raise PathEnded(error, undo.possible) from error
        following = branch.next[outcome]
        if self._communicates:
            after = "another branch" if isinstance(following, _Branch) else "the end of the step"
            text = f"a branch{REMARK}{line}\n{signature(following.segment.graph)}\n{after}"
            agree(self._step, text, claims_of(following.segment.graph))
        return following

    def _capture(self, capture: CapturePath, outcomes: tuple[Outcome, ...], line: str) -> None:
        """Capture the path of these outcomes and put it into the tree.

        Numbers that only this path changes become symbols of it, unless operations before the branch use them: those
        have run, with constants.
        """
        try:
            path, guards = capture(self.dynamic, self._changing, outcomes, line)
            self._add(path, guards)
            self._changing = path.changing
        except PathsDiffer:
            if self._changing.closed:
                raise
            self._add(*capture(self.dynamic, replace(self._changing, closed=True), outcomes, line))

    def _serves(self, following: _Branch | _PathEnd | None, leaves: list[Any]) -> bool:
        """Whether what was captured for an outcome serves this call. The guards of the path that the last call took
        were checked before the call; those of another path are checked at its end."""
        if not isinstance(following, _PathEnd) or following.guards is self.guards:
            return following is not None
        return following.guards.failure(leaves, following.path.arguments.spec) is None

    def _add(self, path: CapturedStep, guards: Guards) -> None:
        """Put what a path adds into the tree."""
        segments, last = segments_of(path.graph)
        if self._paths + (last is not None) > knobs.path_limit:
            raise TooManyPaths(self._step, segments[-1].line, knobs.path_limit)
        following, outcome = self._first, False
        available: frozenset[str] = frozenset()
        for segment, after in zip(segments, [*path.outcomes, False], strict=False):
            branch = following.get(outcome)
            if not isinstance(branch, _Branch):
                places = self._places(segment, path, available)
                compiled = functools.partial(PlacedProgram, segment.graph, places, *self._options(segment))
                branch = following[outcome] = _Branch(segment, compiled, path.arguments)
            elif branch.segment.digest != segment.digest:
                raise PathsDiffer(self._step, segment.line, "its operations differ")
            following, outcome, available = branch.next, after, branch.segment.used
        if last is not None:
            end = replace(path, graph=last.graph, places=self._places(last, path, available))
            compiled_end = functools.partial(ProgramForm, end, guards, *self._options(last))
            following[outcome] = _PathEnd(last, compiled_end, path, guards)
            self._paths += 1
        self._communicates |= bool(path.graph.collectives())
        self._draws |= any(
            is_random(node) or (bool(node.meta.get("effect")) and not is_branch(node))
            for node in path.graph.graph.nodes
        )

    def _options(self, segment: Segment) -> tuple[str, int | None, AgreedCollectives]:
        """How to compile a segment."""
        agreed = self._agreed.setdefault(without_lines(signature(segment.graph)), AgreedCollectives())
        return self._mode, self._memory_limit, agreed

    def _places(self, segment: Segment, path: CapturedStep, available: frozenset[str]) -> list[StatePlace]:
        """Where the inputs of a segment are: in Python state, or among the values of earlier segments."""
        missing = {source for source in segment.sources if isinstance(source, str)} - available
        if missing:
            raise PathsDiffer(self._step, segment.line, f"{', '.join(sorted(missing))} was out of use")
        return [
            path.places[source] if isinstance(source, int) else StatePlace(self._container, source, source, Role.BATCH)
            for source in segment.sources
        ]
