"""The attempts at the capture of one path of a step: when another one is needed, and what it does otherwise."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from weft.capture.loaded_modules import names_of_modules
from weft.capture.record.array_sources import ArrayDrawn
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.float_tags import UnknownFloat
from weft.capture.record.growing_lists import ListsGrew, ListsRead
from weft.capture.record.held_references import is_users_module
from weft.capture.record.kept_graphs import GraphsKept
from weft.capture.record.met_exceptions import MetException, names_symbols, of_symbols, of_wrong_types
from weft.capture.record.number_tables import TableWritten
from weft.capture.record.optimizer_states import OptimizerStateRead
from weft.capture.record.python_numbers import CONSTANTS, ChangingState, NumbersChanged, NumbersUsed
from weft.capture.record.remembered_results import RememberingFunctions, attempt_with_checked_bodies
from weft.capture.record.unread_arguments import ArgumentRead, ValuesOfArguments
from weft.capture.state.code_names import opaque_code
from weft.capture.user_code import format_frame
from weft.errors import CannotCapture, UncapturableMutation, UnrecordedDraw, UsedDuringCapture

log = logging.getLogger(__name__)


def captured_in_attempts(
    attempt: Callable[..., CapturedStep], changing: ChangingState, collect: Callable[[], object]
) -> CapturedStep:
    """Capture a path with symbols for the Python numbers that change, and with stand-ins for lists that grow, for
    tables that symbolic numbers index, and for arrays that cannot be constants.

    The first attempt finds those that the step changes or indexes; the next one starts with symbols and stand-ins for
    them. Where that fails, because the step needs a plain number at a place that torch does not say, all of them are
    constants with guards on their values.

    Args:
        attempt: runs the step once. It takes what changes, the tensors of the state that earlier calls leave with a
            graph (:mod:`weft.capture.record.kept_graphs`), and the options ``watched``, to look for the line that moves
            a generator, and ``arrays``, to follow the arrays that numpy draws. It notes in ``found`` what becomes
            of the values of arguments.
        changing: what is known to change from call to call.
        collect: collects garbage; called before each attempt.
    """
    return _CaptureAttempts(attempt, changing, collect).run()


class _CaptureAttempts:
    """What the attempts so far have found; each one adds to it, until one holds."""

    def __init__(
        self, attempt: Callable[..., CapturedStep], changing: ChangingState, collect: Callable[[], object]
    ) -> None:
        self._functions = RememberingFunctions()
        self._attempt = functools.partial(attempt_with_checked_bodies, attempt, self._functions)
        self._changing = changing
        self._collect = collect
        self._repeated = False  # because the code grew
        self._earlier: Mapping[str, torch.Tensor] = {}
        self._in_graph: list[torch.optim.Optimizer] = []  # whose state the graph allocates
        # Of an attempt with symbols in which the user's code met exceptions.
        self._with_symbols: tuple[ChangingState, list[MetException]] | None = None
        self._symbols_are_trusted = False

    def run(self) -> CapturedStep:
        while True:
            changing, compared = self._changing, self._changing.plain or self._with_symbols is not None
            found, code = ValuesOfArguments(tried=bool(changing.tried), compared=compared), _CodeOfProcess()
            attempt = functools.partial(self._attempt, changing, self._earlier, in_graph=self._in_graph, found=found)
            try:
                captured = _with_names_known(attempt, found, self._collect)
            except UsedDuringCapture:
                raise
            except _FINDINGS as finding:
                self._learn(finding, found)
            except Exception as error:
                if not self._repeat(code) and not self._fall_back(error, found):
                    raise
            else:
                if not self._repeat(code) and self._accept(found):
                    return _without_late_numbers(captured, of_symbols(found.met))
                self._functions.forget()

    def _repeat(self, code: _CodeOfProcess) -> bool:
        """Decide whether the attempt is made once more as it was, at most once.

        What only opaque functions use must not be guarded, which the walk of the state knows now. Modules see the types
        of eager (:mod:`weft.capture.record.eager_types`) where they were there before.
        """
        if self._repeated or not code.grew():
            return False
        self._repeated = True
        return True

    def _accept(self, found: ValuesOfArguments) -> bool:
        """Decide whether the captured step of an attempt is right. If not, correct what is known to change."""
        changing = self._changing
        if changing.tried and found.met:
            self._changing = replace(changing, tried=frozenset())
            return False
        if found.tables - changing.tables:
            self._changing = replace(changing, tables=changing.tables | found.tables)
            return False
        if found.read or (found.unread and of_wrong_types(found.met)):
            self._changing = replace(changing, values=changing.values | (found.read or found.unread))
            return False
        met = of_symbols(found.met)
        no_symbols = not found.symbols and self._with_symbols is None
        return not met or self._symbols_are_trusted or no_symbols or self._accept_with_exceptions(met)

    def _accept_with_exceptions(self, met: list[MetException]) -> bool:
        """The same where the user's code met exceptions. An attempt without symbols follows; symbols are trusted if it
        meets the same ones, and otherwise it is the captured step."""
        if not self._changing.plain:
            self._with_symbols = self._changing, met
            self._changing = _constants(self._changing, plain=True)
            return False
        if self._with_symbols is None or self._with_symbols[1] != met:
            return True
        self._changing, self._symbols_are_trusted = self._with_symbols[0], True
        return False

    def _learn(self, finding: BaseException, found: ValuesOfArguments) -> None:
        """Add to what is known to change what has ended an attempt."""
        changing = self._changing
        match finding:
            case ArgumentRead():
                self._changing = replace(changing, values=changing.values | found.read)
            case NamesComputed():
                self._functions.forget()
                self._changing = replace(changing, names=changing.names | found.names)
            case OptimizerStateRead():
                self._in_graph = [*self._in_graph, *finding.optimizers]
            case GraphsKept():
                self._earlier = finding.tensors
            case NumbersChanged():
                self._changing = replace(changing, numbers=changing.numbers | finding.paths)
            case NumbersUsed():
                self._changing = replace(changing, tried=changing.tried - finding.paths)
            case ListsRead():
                paths = finding.paths
                self._changing = replace(changing, growing=changing.growing - paths, read=changing.read | paths)
            case ListsGrew():
                self._changing = replace(changing, growing=changing.growing | finding.paths)
            case TableWritten():
                plain = changing.plain_tables | found.written
                self._changing = replace(changing, tables=changing.tables - plain, plain_tables=plain)
            case UnknownFloat() if changing.tried:
                self._changing = replace(changing, tried=frozenset())
            case UnknownFloat():
                log.info("captured with the values of floats: %s", finding)
                self._changing = replace(changing, plain_floats=True)

    def _fall_back(self, error: Exception, found: ValuesOfArguments) -> bool:
        """Drop symbols or stand-ins that may have caused an error. False where there are none."""
        changing, reason = self._changing, str(error).split("\n")[0]
        inputs, constants = found.read or found.unread or found.inputs, found.constants - changing.values
        tables = (found.tables or found.arrays) - changing.tables - changing.plain_tables
        if changing.tried:
            self._changing = replace(changing, tried=frozenset())
        elif tables:
            self._changing = replace(changing, tables=changing.tables | tables)
        elif changing.tables:
            plain = changing.plain_tables | changing.tables
            self._changing = replace(changing, tables=frozenset(), plain_tables=plain)
        elif changing.growing:
            self._changing = replace(changing, growing=frozenset(), read=changing.read | changing.growing)
        elif inputs:
            log.info("captured with the values of %s: %s", ", ".join(sorted(inputs)), reason)
            self._changing = replace(changing, values=changing.values | inputs)
        elif constants and isinstance(error, UncapturableMutation):  # of a tensor in the memory of an array
            self._changing = replace(changing, numbers=changing.numbers | constants)
        elif changing.numbers:
            log.info("captured with numbers as constants: %s", reason)
            self._changing = _constants(changing)
        else:
            return False
        return True


class _CodeOfProcess:
    """Code that the process has at the beginning of an attempt."""

    def __init__(self) -> None:
        self._opaque, self._modules = len(opaque_code), names_of_modules()

    def grew(self) -> bool:
        """Whether opaque functions were defined, or modules of the user's imported, since then."""
        new = names_of_modules() - self._modules
        return len(opaque_code) != self._opaque or any(is_users_module(sys.modules.get(name)) for name in new)


def _constants(changing: ChangingState, *, plain: bool = False) -> ChangingState:
    """The same with constants, guarded by their values, in the place of the numbers that change."""
    values = changing.values | changing.lists.keys()
    floats, names = changing.plain_floats, changing.names
    return replace(CONSTANTS, values=values, plain_floats=floats, names=names, plain=plain)


def _without_late_numbers(captured: CapturedStep, met: list[MetException]) -> CapturedStep:
    """The captured step, where the step's code caught no exception that a number of the data raised for want of a
    value.

    Raises:
        CannotCapture: it did.
    """
    for each in met:
        if names_symbols(each):
            reason = "a number that only the data decides is used here where Python wants a plain one"
            raise CannotCapture(format_frame(each.where), reason)
    return captured


class NamesComputed(Exception):
    """The step has computed names of attributes that this attempt at its capture did not follow from the beginning."""


# What ends an attempt that the next one makes otherwise.
_FINDINGS = (
    *(ArgumentRead, NamesComputed, OptimizerStateRead, GraphsKept, NumbersChanged, NumbersUsed),
    *(ListsRead, ListsGrew, TableWritten, UnknownFloat),
)


def _with_names_known(
    attempt: Callable[..., CapturedStep], found: ValuesOfArguments, collect: Callable[[], object]
) -> CapturedStep:
    """Capture; NamesComputed where the step computes new names, whatever else this attempt has found: stand-ins for
    what changes are put in place before the step runs, so they need the names."""
    try:
        captured = _with_what_it_draws(attempt, {}, collect)
    except UsedDuringCapture:
        raise
    except Exception as error:
        if found.names:
            raise NamesComputed from error
        raise
    if found.names:
        raise NamesComputed
    return captured


def _with_what_it_draws(
    attempt: Callable[..., CapturedStep], how: dict[str, bool], collect: Callable[[], object]
) -> CapturedStep:
    collect()  # wrappers of modules look whether what autograd made of their tensors is alive
    try:
        return attempt(**how)
    except ArrayDrawn:
        needed = "arrays"
    except UnrecordedDraw:  # by the step, or by a module that was imported meanwhile
        needed = "watched"
        if needed in how:
            raise
    return _with_what_it_draws(attempt, {**how, needed: True}, collect)
