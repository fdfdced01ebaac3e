"""The attempts at the capture of one path of a step: when another one is needed, and what it does otherwise."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

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
    """Capture a path; again, where the step defined opaque functions or imported modules of the user's.

    What only opaque functions use must not be guarded, which the walk of the state knows now. Modules see the types of
    eager (:mod:`weft.capture.record.eager_types`) where they were there before.

    Args:
        attempt: runs the step once. It takes what changes, the tensors of the state that earlier calls leave with a
            graph (:mod:`weft.capture.record.kept_graphs`), and the options ``watched``, to look for the line that moves
            a generator, and ``arrays``, to follow the arrays that numpy draws. It notes in ``found`` what becomes
            of the values of arguments.
        changing: what is known to change from call to call.
        collect: collects garbage; called before each attempt.
    """
    functions = RememberingFunctions()
    attempt = functools.partial(attempt_with_checked_bodies, attempt, functions)
    known, modules = len(opaque_code), set(sys.modules)
    imported = lambda: any(is_users_module(sys.modules.get(name)) for name in set(sys.modules) - modules)
    grew = lambda: len(opaque_code) != known or imported()
    try:
        captured = _with_what_changes(attempt, functions, changing, collect)
    except Exception:
        if not grew():
            raise
    else:
        if not grew():
            return captured
        functions.forget()
    return _with_what_changes(attempt, functions, changing, collect)


def _with_what_changes(
    attempt: Callable[..., CapturedStep],
    functions: RememberingFunctions,
    changing: ChangingState,
    collect: Callable[[], object],
) -> CapturedStep:
    """Capture with symbols for the Python numbers that change, and with stand-ins for lists that grow, for tables that
    symbolic numbers index, and for arrays that cannot be constants.

    The first attempt finds those that the step changes or indexes; the next one starts with symbols and stand-ins for
    them. Where that fails, because the step needs a plain number at a place that torch does not say, all of them are
    constants with guards on their values.

    Where the user's code met exceptions, an attempt without symbols follows. Symbols are trusted if it meets the same
    ones; otherwise it is the captured step.
    """
    with_symbols: ChangingState | None = None  # of the attempt that met exceptions
    met_with_symbols: list[MetException] = []
    trusted = False
    earlier: Mapping[str, torch.Tensor] = {}
    in_graph: list[torch.optim.Optimizer] = []  # whose state the graph allocates
    while True:
        arguments = ValuesOfArguments(tried=bool(changing.tried), compared=changing.plain or with_symbols is not None)
        how = functools.partial(attempt, changing, earlier, in_graph=in_graph, found=arguments)
        try:
            captured = _with_names_known(how, arguments, collect)
            if changing.tried and arguments.met:
                functions.forget()
                changing = replace(changing, tried=frozenset())
                continue
            if arguments.tables - changing.tables:
                functions.forget()
                changing = replace(changing, tables=changing.tables | arguments.tables)
                continue
            if not arguments.read and not (arguments.unread and of_wrong_types(arguments.met)):
                met = of_symbols(arguments.met)
                if not met or trusted or (not arguments.symbols and with_symbols is None):
                    return _without_late_numbers(captured, met)
                if not changing.plain:
                    with_symbols, met_with_symbols = changing, met
                    changing = _constants(changing, plain=True)
                elif met == met_with_symbols and with_symbols is not None:
                    changing, trusted = with_symbols, True
                else:
                    return _without_late_numbers(captured, met)
                functions.forget()
                continue
            functions.forget()
            changing = replace(changing, values=changing.values | (arguments.read or arguments.unread))
        except ArgumentRead:
            changing = replace(changing, values=changing.values | arguments.read)
        except NamesComputed:
            functions.forget()
            changing = replace(changing, names=changing.names | arguments.names)
        except OptimizerStateRead as found:
            in_graph = [*in_graph, *found.optimizers]
        except GraphsKept as found:
            earlier = found.tensors
        except NumbersChanged as found:
            changing = replace(changing, numbers=changing.numbers | found.paths)
        except NumbersUsed as found:
            changing = replace(changing, tried=changing.tried - found.paths)
        except ListsRead as found:
            changing = replace(changing, growing=changing.growing - found.paths, read=changing.read | found.paths)
        except ListsGrew as found:
            changing = replace(changing, growing=changing.growing | found.paths)
        except TableWritten:
            plain = changing.plain_tables | arguments.written
            changing = replace(changing, tables=changing.tables - plain, plain_tables=plain)
        except UnknownFloat as error:
            if changing.tried:
                changing = replace(changing, tried=frozenset())
                continue
            log.info("captured with the values of floats: %s", error)
            changing = replace(changing, plain_floats=True)
        except UsedDuringCapture:
            raise
        except Exception as error:
            if changing.tried:
                changing = replace(changing, tried=frozenset())
                continue
            if new := (arguments.tables or arguments.arrays) - changing.tables - changing.plain_tables:
                changing = replace(changing, tables=changing.tables | new)
                continue
            if changing.tables:
                changing = replace(changing, tables=frozenset(), plain_tables=changing.plain_tables | changing.tables)
                continue
            if changing.growing:
                changing = replace(changing, growing=frozenset(), read=changing.read | changing.growing)
                continue
            inputs = arguments.read or arguments.unread or arguments.inputs
            constants = arguments.constants - changing.values
            if inputs:
                log.info("captured with the values of %s: %s", ", ".join(sorted(inputs)), str(error).split("\n")[0])
                changing = replace(changing, values=changing.values | inputs)
                continue
            if constants and isinstance(error, UncapturableMutation):  # of a tensor in the memory of an array
                changing = replace(changing, numbers=changing.numbers | constants)
                continue
            if not changing.numbers:
                raise
            log.info("captured with numbers as constants: %s", str(error).split("\n")[0])
            changing = _constants(changing)


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
