"""``weft.compile``: a training step in, a step that runs one captured graph out.

The first call captures the step, agrees with the other ranks, compiles and runs. Later calls check the guards and run;
when a guard fails the step is captured again, with sizes that changed kept symbolic from then on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, TypeVar, overload

import torch

from weft import graph_hashes, knobs, step_summary
from weft.agreed_options import claims, communicates, options_text
from weft.argument_checks import ArgumentChecks
from weft.branching_form import BranchingForm, PathEnded
from weft.capture.agreement.agreement import COMPILES_AGAIN
from weft.capture.agreement.lockstep import RankEvent, agree_in_order, lockstep
from weft.capture.agreement.signature import signature
from weft.capture.agreement.text_difference import without_remarks
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.capture.guards.compiled_forms import CompiledForms
from weft.capture.guards.guards import Guards
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.ended_runs import may_be_of_step
from weft.capture.record.generator_states import generators_kept
from weft.capture.record.iterator_arguments import ItemsWanted, IteratorArguments
from weft.capture.record.list_arguments import ListHistory
from weft.capture.record.python_numbers import ChangingState
from weft.capture.record.recorder import recording
from weft.capture.record.tracer import capture_step
from weft.capture.record.varying_values import Dims, VaryingValues
from weft.capture.segments import Outcome
from weft.capture.step_threads import PATIENCE_S, capturing, enter_step, in_step, inside_step, leave_step, out_of_step
from weft.compile_options import check_options
from weft.errors import (
    AgreementTimeout,
    CannotCopyStep,
    CaptureValueEscaped,
    GraphMismatch,
    GroupMismatch,
    MarkedDynamicSpecialised,
    PathsDiffer,
    RanksDiverged,
    ScheduleTimeout,
    StaleAutocastCopy,
    StoreLost,
    TooManyPaths,
    WeftError,
)
from weft.inductor.compiler import Mode
from weft.inductor.lowering.lower import device_kind
from weft.inductor.runtime.compile_pool import kept_workers
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.program_form import ProgramForm
from weft.replay import refused
from weft.short_tracebacks import (
    fault_report,
    is_steps_own,
    mark_if_steps_own,
    methods_shorten_tracebacks,
    shortens_tracebacks,
    without_torchs_log,
)
from weft.shown_values import listed
from weft.verify import verify_first_call

log = logging.getLogger(__name__)

# Errors of some or all ranks because of others.
_RANKS_DIFFER = (GraphMismatch, GroupMismatch, RanksDiverged, AgreementTimeout, StoreLost, ScheduleTimeout)

_TIMED_CALLS = 33  # the last calls whose times are kept, for weft.metrics

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
Form = ProgramForm | BranchingForm


@methods_shorten_tracebacks
class CompiledStep(Generic[P, R]):
    """A step that runs compiled; called like the function it was made from.

    Attributes:
        entries: captured forms, the one used last first; at most ``knobs.form_limit``.
        captures: how often the step was captured, with the reason of each.
        began: the host's clock at the beginning of each of the last calls since the last capture, in seconds.
    """

    def __init__(
        self,
        step: Callable[P, R],
        *,
        mode: Mode = "default",
        dynamic: bool | None = None,
        memory_limit: int | None = None,
        verify: bool = False,
        fallback: Literal["eager"] | None = None,
        replay_every: int | None = None,
    ) -> None:
        check_options(ArgumentChecks("weft.CompiledStep"), step, mode, dynamic, verify, fallback, replay_every)
        functools.update_wrapper(self, step)
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        self.__qualname__: str = getattr(step, "__qualname__", self.__name__)
        self.step = step
        self.mode, self.dynamic = mode, dynamic
        self.memory_limit = memory_limit
        self.verify = verify
        self.fallback = fallback
        self.replay_every = replay_every
        self._calls = 0
        self.entries: CompiledForms[Form] = CompiledForms()
        self.captures: list[str] = []
        self.began: deque[float] = deque(maxlen=_TIMED_CALLS)
        self._lists = ListHistory()
        self._varying = VaryingValues(self._lists, dynamic)
        self._iterators = IteratorArguments()
        self._agreed: dict[bytes, AgreedCollectives] = {}
        self._uncompiled = False
        self._lock = threading.RLock()

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> CompiledStep[P, R]: ...

    @overload
    def __get__(self: Callable[Concatenate[T, Q], R], instance: T, owner: type | None = ...) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return step_summary.as_text(self.__name__, self._summary())

    def _repr_html_(self) -> str:
        return step_summary.as_html(self.__name__, self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        return list(step_summary.rows(self.step, self.mode, self.captures, list(self.entries)))

    def __copy__(self) -> NoReturn:
        raise CannotCopyStep("copy.copy", self.__name__)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CannotCopyStep("copy.deepcopy", self.__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CannotCopyStep("pickle", self.__name__)

    @shortens_tracebacks
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._uncompiled or recording() is not None:  # a step inside a step is captured as part of it
            return self.step(*args, **kwargs)
        if not self._lock.acquire(blocking=False) and not self._wait():
            return self.step(*args, **kwargs)
        try:
            # Most steps have none among their arguments, which their first capture finds.
            if self._iterators.seen and self._iterators.begin(args, kwargs):
                args, kwargs = self._iterators.arguments(args, kwargs)
                return self.step(*args, **kwargs)  # raises what eager raises where an iterator has ended
            args, kwargs = self._iterators.arguments(args, kwargs)
            leaves, spec = self._lists.flatten((args, kwargs))
            reasons: list[str] = []
            record = enter_step()
            self.began.append(time.perf_counter())
            try:
                entry = self._find(leaves, spec, reasons)
                if entry is not None:
                    # Where an opaque function of the step calls the step again, its program is in use.
                    return self.step(*args, **kwargs) if entry.busy else self._run(entry, leaves, args, kwargs)
            finally:
                leave_step(record)
            return self._first_call(args, kwargs, reasons)
        finally:
            self._iterators.end()
            self._lock.release()

    def _wait(self) -> bool:
        """Wait for the thread that is calling this step: one call at a time uses its arguments and buffers.

        Returns:
            Whether this thread holds the lock now. A thread that is in a step already does not wait, or two threads
            might wait for each other: it calls the uncompiled step.
        """
        if inside_step():
            return False
        while not self._lock.acquire(timeout=PATIENCE_S):
            log.warning("%s has been running in another thread for %d s", self.__name__, PATIENCE_S)
        return True

    def entry_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """The captured form that serves this call, captured now where there is none; nothing runs."""
        with self._lock:
            return self._iterators.with_items(args, kwargs, self._entry_for)

    def _entry_for(self, args: Any, kwargs: Any) -> Form:
        reasons: list[str] = []
        with in_step():
            entry = self._find(*self._lists.flatten((args, kwargs)), reasons)
        return entry or self.capture(args, kwargs, reasons)

    def _find(self, leaves: list[Any], spec: Any, reasons: list[str]) -> Form | None:
        """The form that serves a call, see :meth:`CompiledForms.find`."""
        try:
            return self.entries.find(leaves, spec, reasons)
        except RuntimeError:
            # Sparse and nested tensors have no strides or sizes to ask for. No form serves them; a capture names them.
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if all(leaf.layout is torch.strided and not leaf.is_nested for leaf in tensors):
                raise
            reasons.append("an argument is not strided")
        return None

    @kept_workers()  # the first run may need variants of kernels
    def _first_call(self, args: Any, kwargs: Any, reasons: list[str]) -> Any:
        if not self._iterators.seen:
            self._iterators.begin(args, kwargs)
            args, kwargs = self._iterators.arguments(args, kwargs)
        try:
            entry = self.capture(args, kwargs, reasons)
        except (*_RANKS_DIFFER, CaptureValueEscaped):
            raise  # ranks that differ must not go on, compiled or not, nor a model with values of the capture inside
        except BaseException as error:
            of_step = may_be_of_step(error) and (self.fallback == "eager" or is_steps_own(error))
            if not of_step and not isinstance(error, ItemsWanted):
                raise
            failure = error if of_step else None
        else:
            leaves, _ = self._lists.flatten((args, kwargs))
            with in_step():
                if self.verify and len(self.entries) == 1:
                    run = lambda: self._run(entry, leaves, args, kwargs)
                    return verify_first_call(self.step, entry.captured, args, kwargs, run, path=lambda: entry.captured)
                return self._run(entry, leaves, args, kwargs)
        if failure is None:  # not in the handler: the reason would be the context of what the step raises
            return self._with_items(args, kwargs, reasons)
        return self._run_uncompiled(failure, args, kwargs)

    def _run_uncompiled(self, failure: BaseException, args: Any, kwargs: Any) -> Any:
        """The call by the uncompiled step: it raises what the step itself raises, and changes what eager changes before
        it does. A later call compiles. If it raises nothing, the step cannot be captured: ``failure`` says why."""
        result = self.step(*args, **kwargs)
        if self.fallback != "eager":
            failure.add_note("the uncompiled step, which has run meanwhile, did not raise")
            raise failure
        self._uncompiled = True
        why = failure if isinstance(failure, WeftError) else fault_report(failure)
        log.warning("%s runs uncompiled from here on: %s", self.__name__, why)
        return result

    def _with_items(self, args: Any, kwargs: Any, reasons: list[str]) -> Any:
        """The call with the items that a capture asked for."""
        self._iterators.take_wanted()
        args, kwargs = self._iterators.arguments(args, kwargs)
        if self._iterators.ended:
            log.warning("%s ran uncompiled: an iterator among its arguments has ended", self.__name__)
            return self.step(*args, **kwargs)
        leaves, spec = self._lists.flatten((args, kwargs))
        with in_step():
            if (entry := self._find(leaves, spec, reasons)) is not None:
                return self._run(entry, leaves, args, kwargs)
        self.captures.pop()
        return self._first_call(args, kwargs, reasons)

    def _run(self, entry: Form, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """Run a form, in step with the other ranks where it communicates."""
        self._calls += 1
        if self.replay_every is not None and isinstance(entry, ProgramForm):
            entry.replays_next = self._calls % self.replay_every == 0
        event = entry.event
        if event is None or (ranks := lockstep()) is None:
            return self._run_form(entry, leaves, args, kwargs)
        with ranks.call(event):
            return self._run_form(entry, leaves, args, kwargs)

    def _run_form(self, entry: Form, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        try:
            if isinstance(entry, BranchingForm):
                return entry.run(leaves, (args, kwargs), functools.partial(self._capture_path, args, kwargs))
            return entry.run(leaves, (args, kwargs))
        except PathEnded as raised:
            ended = raised
        except StaleAutocastCopy:  # raised before anything ran
            if self.fallback != "eager":
                raise
            return self.step(*args, **kwargs)
        return self._after_branch(ended, entry, args, kwargs)  # not as the context of what the step raises there

    @generators_kept()
    @garbage_collection_paused()
    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], reasons: list[str]) -> Form:
        """Capture one call, agree with the other ranks, and keep the result at the front of ``entries``."""
        with out_of_step():
            return self._capture(args, kwargs, reasons)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], reasons: list[str]) -> Form:
        self._begin_capture(reasons)
        dynamic = self._varying.dims(args, kwargs, self._forms())
        captured, guards, event, agreed = self._capture_agreed(args, kwargs, dynamic)
        self._lists.note(captured.changing)
        if captured.complete and not captured.outcomes:
            replayed = self.__name__ if self.replay_every is not None else ""
            form: Form = ProgramForm(captured, guards, self.mode, self.memory_limit, agreed, replayed)
        elif self.replay_every is not None:
            raise refused(f"{self.__name__} branches on a value that it computes")
        else:
            dynamic = self._varying.dims(args, kwargs, self._forms())  # none, where the step needed numbers
            form = BranchingForm(
                self.__name__, captured, guards, dynamic, self.mode, self.memory_limit, self.fallback == "eager"
            )
        on_cpu = device_kind(captured.graph.graph.nodes) == "cpu"
        if on_cpu and self.memory_limit is not None and len(self.captures) == 1 and current_fake_world() is None:
            log.warning(
                "%s: memory_limit has no effect on a CPU, where ATen's kernels run as they are captured. "
                'weft.explain(%s).scheduled("h200x8") keeps it and says what it would do on GPUs',
                self.__name__,
                self.__name__,
            )
        if agreed.linked:
            text = f"{event.text}\ncollectives after the passes: {agreed.issued}"
            form.event = replace(event, text=text, counted=on_cpu)
        nodes, seen = len(captured.graph), captured.recorded
        log.info("captured %s in %.2f s: %d nodes of %d operations", self.__name__, captured.seconds, nodes, seen)
        return self.entries.add(form)

    def _after_branch(self, ended: PathEnded, entry: Form, args: Any, kwargs: Any) -> Any:
        """What a call does that cannot go on compiled after a branch."""
        error = ended.error
        plain = (PathsDiffer, TooManyPaths) if entry.captured.arguments.arrays else PathsDiffer
        # After the branch Python needs plain numbers or sizes, and the operations before it have symbols.
        dims = entry.dynamic if isinstance(entry, BranchingForm) else frozenset()
        if (
            isinstance(error, plain)
            and not ended.raises
            and self._varying.specialise(entry.captured, dims, args, kwargs)
        ):
            self.entries.drop(entry)
            if ended.undone:
                return self._first_call(args, kwargs, ["the path after a branch needs plain numbers"])
        falls_back = self.fallback == "eager" and not isinstance(error, (*_RANKS_DIFFER, CaptureValueEscaped))
        if not ended.undone or not (falls_back or ended.raises):
            raise error
        if ended.called:
            log.warning("%s has called %s, and calls them again uncompiled", self.__name__, listed(ended.called))
        return self._run_uncompiled(error, args, kwargs)

    @generators_kept()
    @garbage_collection_paused()
    def _capture_path(
        self,
        args: Any,
        kwargs: Any,
        dynamic: Dims,
        changing: ChangingState,
        outcomes: tuple[Outcome, ...],
        line: str,
    ) -> tuple[CapturedStep, Guards]:
        """Capture the path of a call that branches on values, after the first branches went by ``outcomes``."""
        self._begin_capture([f"the branch at {line} had the outcome {outcomes[-1]} for the first time"])
        capture = functools.partial(
            self._captured, args, kwargs, dynamic=dynamic, changing=changing, outcomes=outcomes
        )
        with out_of_step(), capturing(), without_torchs_log():
            captured = self._capture_along(capture, predicts=True)
            captured = capture() if captured is None else captured
            return captured, Guards(captured)

    def _capture_along(self, capture: Callable[..., CapturedStep], **path: Any) -> CapturedStep | None:
        """A capture that goes on along a likely path; None where that path cannot be captured.

        Ranks may take different paths, and agree on what is captured: they do not go by them.
        """
        if communicates():
            return None
        try:
            return capture(**path)
        except WeftError as error:
            log.debug("a likely path cannot be captured: %s", error)
            return None

    def _capture_agreed(
        self, args: Any, kwargs: Any, dynamic: Dims
    ) -> tuple[CapturedStep, Guards, RankEvent, AgreedCollectives]:
        """Capture the step, up to its first branch on a value, and agree with the other ranks on it."""
        try:
            with capturing(), without_torchs_log():
                changing = self._varying.numbers(args, kwargs, self._forms())
                captured = self._capture_expected(args, kwargs, dynamic, changing)
                guards = Guards(captured)
                if not self.verify:  # which walks the objects again
                    captured.state.end_walk()
        except BaseException as error:
            if may_be_of_step(error) and self._tell_of_failure(error):
                mark_if_steps_own(error)
            raise
        options = {"mode": self.mode, "memory limit": self.memory_limit, "verify": self.verify}
        options |= {"fallback": self.fallback, "replay every": self.replay_every}
        text = f"{signature(captured.graph)}\n{options_text(options, captured.graph)}"
        event = RankEvent(self.__qualname__, text, claims(captured.graph))
        return captured, guards, event, self._agree(event)

    def _capture_expected(self, args: Any, kwargs: Any, dynamic: Dims, changing: ChangingState) -> CapturedStep:
        """Capture the step up to its first branch on a value; where another form took branches, along its path."""
        expected = self.entries[0].captured.outcomes if self.entries else ()
        capture = functools.partial(self._captured, args, kwargs, dynamic=dynamic, changing=changing)
        if expected and (captured := self._capture_along(capture, expected=expected, predicts=True)) is not None:
            return captured
        try:
            return capture()
        except Exception as error:
            if self.dynamic is not None or not dynamic or isinstance(error, MarkedDynamicSpecialised):
                raise
            why = str(error).split("\n")[0]
        # An operation without a rule for symbolic sizes (`hardshrink`). If the step itself raises, so does this.
        captured = self._captured(args, kwargs, dynamic=frozenset(), changing=changing)
        self._varying.specialise_sizes(args, kwargs)
        log.info("captured with sizes as numbers: %s", why)
        return captured

    def _forms(self) -> list[CapturedStep]:
        return [entry.captured for entry in self.entries]

    def _captured(self, args: Any, kwargs: Any, **how: Any) -> CapturedStep:
        """One capture; :class:`ItemsWanted` where the step asks for items of iterators that are no arguments."""
        try:
            captured = capture_step(self.step, args, kwargs, **how)
        except Exception:
            self._iterators.check()
            raise
        self._iterators.captured(complete=captured.complete)
        return captured

    def _agree(self, event: RankEvent) -> AgreedCollectives:
        """Show that all ranks captured the same collectives, once for each form of the step."""
        agreed = self._agreed.get(event.key)
        if agreed is None:
            linked = communicates() and agree_in_order(event)
            form = hashlib.sha256(without_remarks(event.text).encode()).hexdigest()
            graph_hashes.record(event.name, form)
            again = RankEvent(event.name, f"{COMPILES_AGAIN}: form {form} of {event.name}")
            agreed = AgreedCollectives(linked, functools.partial(agree_in_order, again))
            self._agreed[event.key] = agreed
        return agreed

    def _tell_of_failure(self, error: BaseException) -> bool:
        """Ranks that did capture must not wait for this one; all ranks may run uncompiled, or none.

        Returns:
            Whether all ranks failed in the same way.
        """
        try:
            if communicates():
                agree_in_order(
                    RankEvent(self.__qualname__, f"{self.__qualname__} cannot be captured: {type(error).__name__}")
                )
        except WeftError:
            if self.fallback == "eager":
                raise
            return False
        return True

    def _begin_capture(self, reasons: list[str]) -> None:
        self.began.clear()  # a call that captures takes seconds, and says nothing of the speed of the others
        if not self.captures:
            self.captures.append("first call")
            return
        why = "; ".join(dict.fromkeys(reasons)) or "first call in this form"
        self.captures.append(why)
        log.info("capturing %s again (capture %d): %s", self.__name__, len(self.captures), why)
        if len(self.captures) == knobs.recapture_limit + 1:
            log.warning(
                "%s was captured %d times; each capture costs seconds. Last reason: %s. "
                "Mark sizes that change with weft.mark_dynamic, or keep what changes in a tensor.",
                self.__name__,
                len(self.captures),
                why,
            )


@overload
def compile(
    step: Callable[P, R],
    *,
    mode: Mode = ...,
    dynamic: bool | None = ...,
    memory_limit: float | None = ...,
    verify: bool | None = ...,
    fallback: Literal["eager"] | None = ...,
    replay_every: int | None = ...,
) -> CompiledStep[P, R]:
    """``@weft.compile``, or ``weft.compile(step)``."""


@overload
def compile(
    step: None = None,
    *,
    mode: Mode = ...,
    dynamic: bool | None = ...,
    memory_limit: float | None = ...,
    verify: bool | None = ...,
    fallback: Literal["eager"] | None = ...,
    replay_every: int | None = ...,
) -> Callable[[Callable[P, R]], CompiledStep[P, R]]:
    """``@weft.compile(mode="bitwise")``."""


@shortens_tracebacks
def compile(
    step: Callable[..., object] | None = None,
    *,
    mode: Mode = "default",
    dynamic: bool | None = None,
    memory_limit: float | None = None,
    verify: bool | None = None,
    fallback: Literal["eager"] | None = None,
    replay_every: int | None = None,
) -> object:
    """Compile a training step. A drop-in decorator: without it the step trains with the same numbers.

    Args:
        step: a function (or method) that runs forward, ``.backward()``, clipping and optimizers in any combination.
        mode: ``"default"`` runs generated kernels on GPUs, the whole step as one CUDA graph where that can be: sums
            may be taken in another order than eager takes them. ``"bitwise"`` runs eager's own ATen kernels, bit for
            bit the eager step; on a CPU both do.
        dynamic: True keeps every size of the tensor arguments symbolic, False none, None those that were seen to
            change.
        memory_limit: GiB of tensors that a GPU may hold at once, those of the model and of the optimizer included. The
            fastest schedule that fits is taken: the more memory, the less is communicated twice. By default nine
            tenths of the GPU's memory. On a CPU it has no effect, which a warning says.
        verify: run the first call both ways and compare loss, gradients and updated state (default: ``WEFT_VERIFY``).
        fallback: ``"eager"`` runs the step uncompiled, said once, when it cannot be captured; None raises.
        replay_every: compute every so many-th call twice from the same state, and compare hashes of what each rank
            sends to others (its gradients) and of all results. Finds processors that compute wrong results silently.
            Costs a step and a copy of what it changes, in memory too, at each replay, and at each call a read of what
            is hashed. For steps that neither branch on values nor call opaque functions.

    Returns:
        A callable with the step's signature.

    Raises:
        UnknownOption: an option has a value weft does not know.
        InvalidArgumentType, InvalidArgument: the step cannot be called, or an option is of another type or range.

    A call of the step raises ReplayDiffers, with the rank and the first tensor, where a replay has other bits.
    """
    checks = ArgumentChecks("weft.compile")
    check_options(checks, step if step is not None else compile, mode, dynamic, verify, fallback, replay_every)
    limit = checks.gibibytes("memory_limit", memory_limit)
    options: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "verify": verify, "fallback": fallback}
    options["replay_every"] = replay_every
    if step is None:
        return functools.partial(compile, memory_limit=memory_limit, **options)
    options["verify"] = knobs.verify if verify is None else verify
    return CompiledStep(step, memory_limit=limit, **options)


@shortens_tracebacks
def capture(step: Callable[..., object], *args: object, **kwargs: object) -> StepGraph:
    """Capture one call ``step(*args, **kwargs)`` and return its graph; nothing runs.

    Works on real tensors and, inside :func:`weft.fake_world`, on fake ones.

    Raises:
        InvalidArgumentType: ``step`` cannot be called.
    """
    ArgumentChecks("weft.capture").function_or_callable("step", step, "Pass the function and then its arguments")
    return capture_step(step.step if isinstance(step, CompiledStep) else step, args, kwargs).graph
