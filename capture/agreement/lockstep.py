"""Ranks make the same compiled calls in the same order; a rank that deviates says so before its collectives.

Agreements at captures, and calls of forms with collectives, are numbered *events*. Every rank predicts its next event:
what followed the last few events when they last came in this order. Ranks with one past predict the same, so a rank
whose event is the predicted one says nothing, and a steady call costs a look-up. A rank whose event is another one has
all ranks compare their events at this number. Ranks that come to the number later join in; for a rank that is past it,
because it had predicted right, a thread answers. Where all deviate alike, at the end of an epoch, all go on. Otherwise
every rank raises, and one that waits in a collective does so there.

Calls are compared only where their collectives link all ranks to each other, directly or through others. Elsewhere, in
an ensemble, parts of the world go on at a pace of their own.

No wait is without an end, and none holds a lock. A wait for a collective or a comparison ends with it, or with what
:mod:`weft.rank_watch` finds: a rank that has raised, a process that is dead or stopped. A comparison
ends after its timeout, a collective after that of its process group.

Waits for collectives on CPUs are interrupted where they cannot end. What ends those of GPUs is
:mod:`weft.capture.agreement.device_watch`: it looks for processes that are gone. A rank whose GPU waits for one that
has raised, and lives on, learns of it at its next call, or when the watchdog of NCCL ends its wait.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch.distributed as dist

from weft import cuda_driver, errors, knobs, rank_watch, threads_at_exit, torch_adapter
from weft.capture.agreement import collective_ring
from weft.capture.agreement.agreement import agree
from weft.capture.agreement.claims import NO_CLAIMS, Claims
from weft.capture.agreement.device_watch import DeviceProgress, DeviceWatch
from weft.capture.agreement.text_difference import without_remarks
from weft.capture.fake.fake_world import current_fake_world
from weft.rank_watch import CannotEnd, Point, RankFailure, RankWatch, listed

# Events that a prediction looks back, and such contexts that are remembered.
_CONTEXT = 4
_REMEMBERED = 512
# Events that a rank can show to one that comes to them later. Only a rank that sends, and never receives, gets so far
# ahead.
_SHOWN = 256


@dataclass(frozen=True)
class RankEvent:
    """What a rank does next, in a form that ranks compare.

    Attributes:
        name: of the step.
        text: equal on all ranks that do the same.
        claims: see :class:`Claims`.
        counted: whether :meth:`Lockstep.issue` is called for each of its collectives: those on CPUs. Not compared.
    """

    name: str
    text: str
    claims: Claims = NO_CLAIMS
    counted: bool = False

    @cached_property
    def key(self) -> bytes:
        """The same for events that other ranks cannot tell apart."""
        return hashlib.sha256(f"{self.name}\n{without_remarks(self.text)}\n{self.claims}".encode()).digest()


class CollectiveWork(Protocol):
    """A collective that is under way, as torch has it."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait until it has ended; raises RuntimeError where it failed or takes longer."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""
        ...


class Lockstep:
    """The events of this process among those of all ranks of the default process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.group = weakref.ref(group)
        # Guards what is below, which the thread of the watch uses too. Nothing waits while it is held.
        self._lock = threading.Lock()
        self._number = 0  # of the last event
        self._issued = 0  # collectives since then
        self._before: tuple[int, tuple[bytes, ...]] | None = None  # the last call: what it changed of the two below
        self._past: deque[RankEvent] = deque(maxlen=_SHOWN)
        self._compared: deque[int] = deque(maxlen=_SHOWN)  # events that this rank has compared, or is comparing
        self._to_compare: set[int] = set()  # events to come
        self._recent: tuple[bytes, ...] = (b"",) * _CONTEXT
        self._after: dict[tuple[bytes, ...], bytes] = {}
        self._broken: errors.WeftError | None = None
        self._abandoned = False
        self._progress: DeviceProgress | None = None  # made by the first call whose collectives run on a GPU
        self._on_device = False  # whether those of the last call do
        rank_watch.answered("the first compiled call", self.rank, self._connect)
        atexit.register(self.stop)

    def _connect(self) -> None:
        """Make connections of their own: over one, a request waits for the one before. They are made at the beginning
        because making one can take seconds."""
        base: Any = torch_adapter.default_store()
        generation = dist.PrefixStore("weft/lockstep", base).add(f"started/{self.rank}", 1)
        self._place = f"lockstep {generation}"
        self._store = base.clone()  # of comparisons: there is one at a time
        store = dist.PrefixStore(f"weft/{self._place}", base.clone())
        self.watch = RankWatch(self.rank, self.world, store, lambda: dist.group.WORLD is self.group(), self._answer)

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self.watch.stop()

    # ---- events

    def begin(self, event: RankEvent, *, call: bool = True) -> bool:
        """Come to an event, before anything of it runs.

        Args:
            event: the one of this rank.
            call: whether it is a call. Else it is an agreement, which is always compared.

        Returns:
            Whether the collectives of an agreement link all ranks; False for calls.

        Raises, where this event or an earlier one is not that of all ranks:
            errors.GraphMismatch, errors.GroupMismatch, errors.AgreementTimeout, errors.StoreLost: see :func:`agree`.
            errors.RanksDiverged: another rank found out, while this one was in an earlier call; or another rank makes
                no more calls.
        """
        self._go_on()
        self._on_device = call and not event.counted
        with self._lock:
            number, recent = self._number + 1, self._recent
            compares = not call or self._after.get(recent) != event.key or number in self._to_compare
            if compares:
                self._compared.append(number)
                self._to_compare.discard(number)
            self._before = (self._issued, recent) if call and event.counted else None
            self._number, self._issued = number, 0
            self._past.append(event)
            if len(self._after) >= _REMEMBERED:  # ever new events; all ranks forget at the same one
                self._after.clear()
            self._after[recent] = event.key
            self._recent = (*recent[1:], event.key)
        try:
            linked = compares and self._compare(number, event, call)
            if self._on_device:
                self._device_progress().begin()
            return linked
        except errors.WeftError as error:
            collective_ring.write(self.rank, f"{type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def call(self, event: RankEvent) -> Iterator[None]:
        """Around a call. Raises what :meth:`begin` raises, and what the call raises, once other ranks were told."""
        self.begin(event)
        try:
            yield
            self.end()
        except BaseException as error:
            self.fail(error)
            raise

    def end(self) -> None:
        """The call that began last has issued all that it computes."""
        if self._on_device:
            self._device_progress().end()

    def _device_progress(self) -> DeviceProgress:
        if self._progress is None:
            self._progress = DeviceProgress(cuda_driver.driver())
            self.watch.on_look = DeviceWatch(self.watch, self._progress, self._device_lost).look
        return self._progress

    def _device_lost(self, error: errors.CollectiveFailed) -> None:
        """The GPU waited for a rank that is gone. Called in the thread of the watch, which writes the failure."""
        self._broken = error
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
        self.watch.failure = RankFailure(self._number, self._issued, True, why)

    def issue(self) -> Point:
        """Count a collective that has been issued. Returns its place in the order of all ranks."""
        self._issued += 1
        return Point(self._number, self._issued - 1)

    def fail(self, error: BaseException) -> None:
        """The call that began last has raised: other ranks, which may wait for this one, are told.

        A call that is known to have issued no collective is as if it had not begun: the caller may catch the error and
        call again.
        """
        first = (str(error).splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first[:500]}"
        if self._abandoned and self._broken is None:
            self._broken = error if isinstance(error, errors.WeftError) else errors.CollectiveFailed("a call", [], why)
        with self._lock:
            if self._issued == 0 and self._before is not None and self._broken is None:
                self._number -= 1
                self._past.pop()
                self._issued, self._recent = self._before
            self._before = None
            failure = RankFailure(self._number, self._issued, self._broken is not None, why)
        self.watch.tell(failure)
        if failure.final or isinstance(error, (errors.PeerLost, errors.PeerTimeout)):
            collective_ring.write(self.rank, why)

    def _go_on(self) -> None:
        """Raise where this rank must not go on: its collectives would be paired with others than eager's."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    def _break(self, error: errors.WeftError) -> None:
        """An event that this rank has begun is not that of all ranks."""
        if self._broken is None:
            self._broken = error
            self.fail(error)

    # ---- comparisons

    def _compare(self, number: int, event: RankEvent, call: bool) -> bool:
        """Compare an event with those of all ranks at its number. Others may be busy for long outside of compiled calls
        before they make a call that they know."""
        timeout_s = knobs.peer_timeout_s if call else knobs.agreement_timeout_s
        comparison = _EventComparison(self, number, event, timeout_s)
        comparison.start()
        self.watch.comparing = number
        with self.watch.waiting(range(self.world)) as wait:
            try:
                while not comparison.done.wait(rank_watch.SLICE_S):
                    self._go_on()
                    wait.check(self.watch)
            except CannotEnd as found:
                if not (missing := [*wait.silent]):
                    raise errors.RanksDiverged(event.name, self.rank, [], str(found), "") from None
                raise errors.AgreementTimeout(
                    event.name, number, self.rank, missing, listed(missing), self.rank, wait.silent_s
                ) from None
            finally:
                self.watch.comparing = None
        if comparison.error is not None:
            self._forget()
            raise comparison.error
        return comparison.linked

    def _forget(self) -> None:
        """Predict nothing from what ranks did not do alike."""
        with self._lock:
            self._recent = (b"",) * _CONTEXT
            self._after.clear()

    def _answer(self, number: int) -> None:
        """Have an event compared that this rank is past; one to come is compared when it comes."""
        with self._lock:
            if number in self._compared:
                return
            if number > self._number:
                self._to_compare.add(number)
                return
            self._compared.append(number)
            back = self._number - number
            last = self._past[-1]
            long_ago = RankEvent(last.name, f"rank {self.rank} has made {back} calls since the one that is compared")
            event = self._past[-1 - back] if back < len(self._past) else long_ago
        _EventComparison(self, number, event, knobs.peer_timeout_s, past=True).start()

    # ---- collectives on CPUs

    def wait(self, work: CollectiveWork, group: str, point: Point) -> None:
        """Wait for a collective of a group that was issued at ``point``.

        Raises:
            CannotEnd: it failed or cannot end. The text says why, as far as the members of the group know.
            errors.RanksDiverged: another rank deviates from this call.
        """
        try:
            if _ended(work, rank_watch.SLICE_S):
                return
            with self.watch.waiting(torch_adapter.group_ranks(group), point) as wait:
                while not _ended(work, rank_watch.SLICE_S):
                    self._go_on()
                    wait.check(self.watch)
        except BaseException as error:
            self._abandon(group)
            if isinstance(error, RuntimeError) and not isinstance(error, errors.WeftError):
                raise CannotEnd(self.explain(error, group)) from error
            raise

    def explain(self, error: RuntimeError, group: str) -> str:
        """Why a collective of this call has failed, as far as members of its group say, or do not answer; or the
        library's words."""
        self._abandon(group)
        point = Point(self._number, self._issued)
        with self.watch.waiting(torch_adapter.group_ranks(group), point, rank_watch.EXPLAIN_S) as wait:
            while not wait.why and not self.watch.lost and wait.clock.look() < wait.silent_s + 2:
                time.sleep(rank_watch.SLICE_S)
        return wait.why or f"{type(error).__name__}: {error}"

    def _abandon(self, group: str) -> None:
        """No later collective may be paired with this one by other ranks, and the process must be able to end."""
        self._abandoned = True
        with contextlib.suppress(RuntimeError):  # a group that has been destroyed
            _keep(torch_adapter.process_group(group))


class _EventComparison:
    """One comparison of an event, in a thread of its own: no request holds up its rank.

    Attributes:
        done: set at its end.
        linked: see :func:`agree`.
        error: what it came to, where ranks do not agree.
    """

    def __init__(self, ranks: Lockstep, number: int, event: RankEvent, timeout_s: float, past: bool = False) -> None:
        self.done = threading.Event()
        self.linked = False
        self.error: errors.WeftError | None = None
        self._ranks, self._number, self._event = ranks, number, event
        self._timeout_s = timeout_s
        self._past = past

    def start(self) -> None:
        """Begin."""
        threads_at_exit.started("weft comparison", self._run)

    def _run(self) -> None:
        ranks, event = self._ranks, self._event
        try:
            self.linked = agree(
                event.name,
                event.text,
                event.claims,
                place=(ranks._place, self._number),
                timeout_s=self._timeout_s,
                store=ranks._store,
                rank=ranks.rank,
                world=ranks.world,
            )
        except errors.WeftError as error:
            self.error = error
        except Exception:  # noqa: BLE001 - whatever a store raises that is closed
            self.error = errors.StoreLost(event.name, ranks.rank)
        if self._past and self.error is not None:
            found = self.error
            if isinstance(found, errors.GraphMismatch):
                found = errors.RanksDiverged(event.name, ranks.rank, found.ranks, found.summary, found.difference)
            ranks._break(found)
        self.done.set()


def _ended(work: CollectiveWork, seconds: float) -> bool:
    """Whether a collective has ended after so many seconds. Raises RuntimeError where it failed."""
    started = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            return work.wait() or True  # it ended meanwhile, or raises what it failed with
        if time.monotonic() - started < seconds / 2:
            raise  # too early for the timeout, from a work that never says that it has ended
        return False
    return True


def _keep(group: dist.ProcessGroup) -> None:
    """Keep a process group for as long as the process lives. Its destructor waits for unfinished collectives, until
    their timeout: half an hour, at the end of a process that has raised. A thread's frame is never cleared."""
    if id(group) not in _kept:
        _kept.add(id(group))
        threading.Thread(target=_hold, args=(group,), name="weft unfinished collective", daemon=True).start()


def _hold(group: dist.ProcessGroup) -> None:
    threading.Event().wait()


_kept: set[int] = set()


# ---- that of this process

_current: Lockstep | None = None
_main = threading.main_thread().ident


def lockstep() -> Lockstep | None:
    """That of the default process group. None where nobody is to be compared with: in a world of one rank or a fake
    one, and outside of the main thread, since several threads make their calls in an order of this rank's own."""
    global _current
    if threading.get_ident() != _main or current_fake_world() is not None:
        return None
    world, current = dist.group.WORLD, _current
    if current is not None and current.group() is world:
        return current
    if current is not None:
        current.stop()
    _current = Lockstep(world) if world is not None and dist.get_world_size(world) > 1 else None
    return _current


def agree_in_order(event: RankEvent) -> bool:
    """Show that all ranks do the same next, as :func:`agree`, in the order of their events. Returns whether the
    collectives of the event link all ranks."""
    ranks = lockstep()
    if ranks is not None:
        return ranks.begin(event, call=False)
    return agree(event.name, event.text, event.claims)
