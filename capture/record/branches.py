"""Data-dependent branches of a step: where its Python needs a value that the step computes, the recording is cut into
segments.

``if not torch.isfinite(loss)`` needs a number that a capture does not have. The capture is told the *outcomes* of the
branches of one path through the step. It hands them to the step in the order of the branches, and records each branch
as a node, :func:`weft.capture.segments.branch`. At the first branch without a known outcome it stops: what comes after
depends on the value, which the program of the nodes so far computes. A branch that only checks a value is taken to have
the outcome that raises no error (:mod:`weft.capture.record.assumed_outcomes`).

A branch node holds everything that code after it may use, whichever branch is taken:

- ``held``: the contents of each storage that is still in use (:mod:`weft.capture.record.live_values`), and each
  number that only the data decides;
- ``written``: each input that the step has written so far, with its present value.

:mod:`weft.capture.segments` cuts the graph at these nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import sympy
import torch.fx
from torch.fx.experimental.sym_node import SymNode

from weft import torch_adapter
from weft.capture.record.assumed_outcomes import (
    branch_place,
    evaluated_in_a_call,
    outcome_without_error,
    outcome_without_skip,
    usual_outcome,
)
from weft.capture.record.caught_errors import is_caught
from weft.capture.record.ended_runs import RunEnded, is_interrupt
from weft.capture.record.live_values import storages_in_use
from weft.capture.record.outcomes_from_inputs import MOST_OPERATIONS, is_host_number, outcome_from
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.shown_symbols import ShownSymbols
from weft.capture.segments import Outcome, branch
from weft.capture.user_code import user_line
from weft.errors import TextOfValue
from weft.short_tracebacks import without_machinery


class Undecided(RunEnded):
    """Ends the run of a step at a branch without a known outcome."""


class Branches:
    """Decides the data-dependent branches of a step while it is captured.

    Args:
        recorder: of the capture.
        outcomes: of the first branches, in order.
        expected: outcomes to capture where none is known: those of another form of the step.
        predicts: whether the outcome in one module predicts that in the next module that runs the same code.

    Attributes:
        whole_numbers: ids of the arguments that are tensors of integers or booleans: branches on them are decided at
            once.
        is_constant: whether a tensor is neither an argument nor a part of the state, so that its content is a part of
            the capture: a table of numbers that the step indexes.
        taken: the outcomes on the captured path.
        shown: the symbolic numbers that messages of errors show.
        undecided: whether the step came to a branch without an outcome, which ends the capture.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        outcomes: Sequence[Outcome],
        expected: Sequence[Outcome] = (),
        predicts: bool = False,
    ) -> None:
        self._recorder = recorder
        self._outcomes = outcomes
        self._expected = expected
        self._predicts = predicts
        self._by_module: dict[tuple[CodeType, int], dict[str, Outcome]] = {}  # outcomes at a place in code
        self._decided: dict[sympy.Basic, sympy.Basic] = {}
        self._needed_inside: Any = None  # the last condition that torch needed for a fake result
        self._caught: Exception | None = None  # torch's, where the step's code catches what no eager step meets
        self.whole_numbers: frozenset[int] = frozenset()
        self.is_constant: Callable[[torch.Tensor], bool] = lambda tensor: False
        self.taken: tuple[Outcome, ...] = ()
        self.undecided = False
        self.shown = ShownSymbols(recorder)

    def ended_by(self, error: BaseException) -> BaseException:
        """The exception with which a step ends after a branch, without the frames that lead from it to the capture.

        Raises:
            TextOfValue: a library made text of a tensor, or of an unknown number, for its message.
        """
        if "FakeTensor(" in str(error):
            raise TextOfValue(user_line(), in_raise=True)
        self.shown.mark_messages(error)
        without_machinery(error)
        return error

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Inside, torch gets the outcomes where it needs the value of a symbolic number. A step that needs one without
        an outcome ends there."""
        shape_env = self._recorder.symbols.shape_env
        original, guard_bool = shape_env.evaluate_expr, SymNode.guard_bool

        def evaluate_expr(expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(expr, *args, **kwargs)
            except torch_adapter.data_dependent_errors() as error:
                outcome = self._evaluate(expr)
                if outcome is None:
                    if not self._recorder.runs_operation and is_caught([type(error)], by_torch=True):
                        self._caught = error
                    raise
                return outcome

        def is_true(node: SymNode, file: str, line: int) -> bool:
            if node.shape_env is shape_env and torch_adapter.compares_keys(node.expr, file):
                return False  # two numbers are two entries; what the table has under a key depends on no number
            # Whether a number is true depends on less than the number: it is a condition of its own.
            if node.shape_env is shape_env and not node.is_bool():
                return bool(shape_env.evaluate_expr(sympy.Ne(node.expr, 0)))
            return guard_bool(node, file, line)

        self._recorder.computed = self._computed
        shape_env.evaluate_expr = evaluate_expr  # type: ignore[method-assign]
        SymNode.guard_bool = is_true  # type: ignore[method-assign]
        try:
            with self.shown.noted():
                yield
            if self._caught is not None:
                raise self._caught
        except BaseException as error:
            # The step may have caught the exception that ended it, and raised another one.
            if self._caught is not None and isinstance(error, Exception):
                raise self._caught from None
            if not self.undecided or is_interrupt(error):
                raise
        finally:
            SymNode.guard_bool = guard_bool  # type: ignore[method-assign]
            del shape_env.evaluate_expr

    def _evaluate(self, expr: Any) -> Any:
        """The outcome of an expression over symbols; None where it is no condition of the step's Python."""
        symbols = self._recorder.symbols
        known = expr.xreplace(self._decided)
        if known.is_number or known in (sympy.true, sympy.false):
            return known
        if not all(map(symbols.knows, expr.free_symbols)):
            return None
        if self._recorder.runs_operation:
            self._needed_inside = expr
            return None
        if not (expr.is_Boolean or expr.is_Relational or expr.is_integer):
            return None  # a float would be another one at every call
        assumed = None if expr.is_integer else outcome_without_error()
        by_call = evaluated_in_a_call()
        usual = usual_outcome(expr) if by_call else outcome_without_skip()
        # A boolean is no size, though torch compares it with 1: ``bool(loss > 1)``. The other form knows more of it.
        expected_first = by_call and expr.free_symbols <= symbols.booleans
        self._decided[expr] = sympy.sympify(self._decide(symbols.expression(expr), assumed, usual, expected_first))
        return self._decided[expr]

    def _computed(self, fake_result: Callable[[], Any]) -> Any:
        """A fake result. Where torch needs numbers of the data for it, there is a branch before the operation."""
        while True:
            try:
                return fake_result()
            except torch_adapter.data_dependent_errors():
                if not self._decide_before_operation():
                    raise

    def _decide_before_operation(self) -> bool:
        """Decide the last condition that torch needed for a fake result; whether it could be decided."""
        expr, self._needed_inside = self._needed_inside, None
        if expr is None or expr in self._decided or not (expr.is_Boolean or expr.is_Relational or expr.is_integer):
            return False
        value = self._recorder.symbols.expression(expr)
        self._decided[expr] = sympy.sympify(self._decide(value, usual_outcome(expr)))
        return True

    def _decide(
        self, value: torch.fx.Node, assumed: bool | None, usual: bool | None = None, expected_first: bool = False
    ) -> Outcome:
        """Record a branch on ``value``; returns its outcome on the captured path.

        Args:
            assumed: the outcome to capture where none is known.
            usual: the outcome to capture where neither ``assumed`` nor the inputs give one.
            expected_first: whether the expected outcome comes before ``usual``.

        Raises:
            Undecided: it has no outcome yet.
        """
        known = self._outcomes[len(self.taken) :]
        outcome = known[0] if known else assumed
        if outcome is None:
            outcome = self._outcome_from_inputs(value)
        expected = next(iter(self._expected[len(self.taken) :]), None)
        place, module = branch_place(), self._recorder.module_path()
        before = {} if place is None else self._by_module.setdefault(place, {})
        # Once for each module: a loop that branches again and again would have no end.
        same = next(reversed(before.values()), None) if self._predicts and module not in before else None
        for likely in (same, expected, usual) if expected_first else (usual, same, expected):
            outcome = likely if outcome is None else outcome
        if not self.undecided:  # otherwise the step caught the exception that was to end it
            self._cut(value, outcome)
        if outcome is None or self.undecided:
            self.undecided = True
            raise Undecided
        self.taken = (*self.taken, outcome)
        before[module] = outcome
        return outcome

    def _outcome_from_inputs(self, value: torch.fx.Node) -> Outcome | None:
        """The outcome that present values of inputs give; None where they do not decide it.

        An optimizer branches on the number of steps of each parameter, or on its norm. The programs in front of this
        branch may have updated such a number in this call, and then the outcome may be wrong. That costs a capture: the
        branch compares the value at run time, as any other does, and what is captured for another outcome is not taken.
        """
        # Ranks agree on what is captured. Their arguments differ; counts, tables and parameters mostly do not.
        alone = torch_adapter.world_size() == 1
        known, parameters = {}, {}
        for node, each in self._recorder.placeholders:
            if (alone and id(each) in self.whole_numbers) or is_host_number(each) or self._is_table(each):
                known[node] = each
            elif isinstance(each, torch.nn.Parameter):
                parameters[node] = each
        outcome = outcome_from(value, known)
        return outcome_from(value, parameters, MOST_OPERATIONS) if outcome is None else outcome

    def _is_table(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self.is_constant(tensor)

    def _cut(self, value: torch.fx.Node, outcome: Outcome | None) -> None:
        recorder = self._recorder
        numbers = recorder.symbols.end_segment()
        now = [(node, recorder.current_value(tensor)) for node, tensor in recorder.placeholders]
        written = [(node, current) for node, current in now if current is not node]
        by_place = {current for _, current in now}
        nodes = recorder.graph.nodes
        with torch_adapter.only_mode(recorder.fake_mode):
            used = storages_in_use(recorder.storages, nodes, recorder.input_fakes())
        contents = [storage.node for storage in used]
        held = [node for node in dict.fromkeys([*contents, *numbers]) if node not in by_place]
        # Without the inputs, of which one path may have more than another.
        operations = [_line(node) for node in nodes if node.op == "call_function"]
        digest = hashlib.sha256("\n".join(operations).encode()).hexdigest()
        recorder.emit_effect(branch, value, outcome, held=held, written=written).meta["digest"] = digest
        recorder.storages.read_views_again()


def _line(node: torch.fx.Node) -> str:
    """An operation as text that is the same on all paths that lead through it."""
    args, kwargs = ((), {}) if node.target is branch else (node.args, node.kwargs)
    return f"{node.name} {getattr(node.target, '__name__', node.target)} {args} {kwargs}"
