"""What ranks know of each other while they compute: which call is compared, who has raised, and who is gone.

Every process has a thread that writes the state of its rank to the store once a second, and reads which call ranks
compare. While the main thread waits for other ranks, it reads the states of those too. A process that is dead or
stopped writes no new states.

Only the thread uses its connection to the store, and nobody holds a lock during a request. The main thread waits in
slices and looks in between at what the thread has found, so a store that does not answer holds up nobody.

Large worlds ask less often: one process serves the requests of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from weft import host_processes, threads_at_exit
from weft.errors import StoreLost

log = logging.getLogger(__name__)

# Seconds between two states of a rank, and between two looks of a rank that waits.
BEAT_S = 1.0
SLICE_S = 0.25
# Seconds without a new state, or without an answer of the store, after which a process counts as dead or stopped. A
# process that runs may hold Python's lock for seconds, which its thread needs.
SILENT_S = 16.0
# The same where a collective has failed already, and the question is why.
EXPLAIN_S = 6.0
# A process on this host that is known to run may be silent for so many times as long: it may be in a long call of a
# library that holds Python's lock.
_RUNNING_FACTOR = 4
# Seconds from the end of a process to the time at which it is reported, so that those that end together are named
# together, and what the process did last can still be heard.
_TOGETHER_S = 1.0

# States that all ranks together read in a second, at most.
_READS_PER_S = 200_000
# Seconds between two looks that count as passed, at most: in the others this process was stopped itself.
_STRIDE_S = 1.0


# Seconds without an answer of the store after which it counts as lost where nothing else is known.
STORE_S = 30.0

Answer = TypeVar("Answer")


def answered(name: str, rank: int, requests: Callable[[], Answer]) -> Answer:
    """What ``requests()`` returns or raises, which asks the store. A request has no timeout of its own: where the
    process that holds the store is stopped, it would wait for as long as that is.

    Args:
        name: whoever asks, for the error.

    Raises:
        StoreLost: there is no answer.
    """
    answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(requests())
        except BaseException as error:  # noqa: BLE001 - raised below
            answers.put(error)

    threads_at_exit.started("weft store requests", ask)
    try:
        answer = answers.get(timeout=STORE_S)
    except queue.Empty:
        raise StoreLost(name, rank) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Point(NamedTuple):
    """A place in the order of collectives: the number of the call, and of the collective in it, from 0."""

    call: int
    collective: int


class RankFailure(NamedTuple):
    """A rank has raised.

    Attributes:
        call: the number of its call.
        issued: the collectives of the call that it had issued.
        final: whether it issues no more collectives of compiled steps.
        why: its error.
    """

    call: int
    issued: int
    final: bool
    why: str

    def misses(self, point: Point | None) -> bool:
        """Whether the rank never comes to the collective at ``point``; with None, to any call that is to come."""
        if point is None:
            return self.final
        here = Point(self.call, self.issued)
        return point >= here if self.final else point.call == self.call and point >= here


class CannotEnd(Exception):
    """A wait for other ranks cannot end; the text says why."""


class _Clock:
    """Seconds in which this process ran, as far as whoever looks often can tell."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """The seconds up to now."""
        now = time.monotonic()
        self.seconds += min(now - self._looked, _STRIDE_S)
        self._looked = now
        return self.seconds


@dataclass
class RankWait:
    """A wait of the main thread for other ranks. The main thread calls :meth:`check`; the thread fills in the rest.

    Attributes:
        ranks: those it waits for.
        point: the collective that it waits for; None for a call that is to come.
        silent_s: seconds without a new state after which a rank counts as gone.
        why: why it cannot end; "" for all that is known.
        silent: the ranks that are gone.
    """

    ranks: Sequence[int]
    point: Point | None
    silent_s: float
    why: str = ""
    silent: Sequence[int] = ()
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)  # by rank: its last state, and when it was new
    clock: _Clock = field(default_factory=_Clock)
    answered: float = 0.0  # when the store answered last, on the clock
    due: float = 0.0  # when the states are to be read next, on the thread's clock
    ended: float | None = None  # when the first process was found that has ended

    def check(self, watch: RankWatch) -> None:
        """Raise CannotEnd where the wait cannot end."""
        if self.why:
            raise CannotEnd(self.why)
        # A store that is closed says nothing of the ranks that are waited for.
        if not watch.lost and self.clock.look() - self.answered > self.silent_s:
            raise CannotEnd(STORE_SILENT)


class RankWatch:
    """The thread of one process.

    Args:
        rank, world: of this process, and how many there are.
        store: a connection that nobody else uses.
        alive: whether the process group is still the one that is watched.
        compared: called in the thread with the number of a call that ranks compare, more than once.

    Attributes:
        comparing: the number of the call that this rank has to have compared; None for none.
        failure: what other ranks have to know of this one.
        lost: whether the store is closed.
        on_look: called in the thread at each look.
    """

    def __init__(
        self, rank: int, world: int, store: dist.Store, alive: Callable[[], bool], compared: Callable[[int], None]
    ) -> None:
        self.rank, self.world = rank, world
        self.comparing: int | None = None
        self.failure: RankFailure | None = None
        self.lost = False
        self.on_look: Callable[[], object] = lambda: None
        self._process = host_processes.identity()
        self._store = store
        self._alive = alive
        self._compared = compared
        self._beats = 0
        self._clock = _Clock()
        self._wait: RankWait | None = None
        self._stopped = False
        self._wake, self._told = threading.Event(), threading.Event()
        self._store.compare_set(_COMPARED, "", "0")
        self.write()
        self._thread = threads_at_exit.started("weft rank watch", self._run)

    def wait_for(self, ranks: Sequence[int], point: Point | None = None, silent_s: float | None = None) -> RankWait:
        """A wait for these ranks, without this one. Whoever makes it calls :meth:`read` in the thread."""
        others = [rank for rank in ranks if rank != self.rank]
        return RankWait(others, point, max(silent_s or SILENT_S, 4 * self._beat_s()))

    @contextlib.contextmanager
    def waiting(
        self, ranks: Sequence[int], point: Point | None = None, silent_s: float | None = None
    ) -> Iterator[RankWait]:
        """Inside, the states of ``ranks`` are read, and the wait learns of what is found."""
        wait = self.wait_for(ranks, point, silent_s)
        before, self._wait = self._wait, wait
        self.wake()
        try:
            yield wait
        finally:
            self._wait = before

    def tell(self, failure: RankFailure) -> None:
        """Have other ranks know of a failure of this one. Returns once it is written, since the process may be about
        to end; or after a second, where the store does not answer."""
        self.failure = failure
        self._told.clear()
        self.wake()
        self._told.wait(BEAT_S)

    def wake(self) -> None:
        """Have the thread look now."""
        self._wake.set()

    def stop(self) -> None:
        """Have the thread end, once it has written the last state. :mod:`weft.threads_at_exit` waits for it at exit."""
        self._stopped = True
        self.wake()
        self._thread.join(BEAT_S)

    # ---- the thread

    def _beat_s(self) -> float:
        return max(BEAT_S, self.world / 1000)

    def _run(self) -> None:
        try:
            while self._alive():
                last = self._stopped or threads_at_exit.ending()
                self._look()
                if last:
                    return
                self._wake.wait(self._beat_s() if self._wait is None else SLICE_S)
                self._wake.clear()
        except Exception as error:  # noqa: BLE001 - whatever a closed store raises
            log.debug("no longer watching other ranks: %s", error)
            self.lost = True

    def _look(self) -> None:
        self.write()
        # Written until all ranks have come: another rank may compare another call, and writes over it.
        if (number := self.comparing) is not None:
            self._store.set(_COMPARED, str(number))
        if number := int(self._store.multi_get([_COMPARED])[0]):
            self._compared(number)
        self.on_look()
        if (wait := self._wait) is not None:
            self.read(wait)

    def write(self) -> None:
        """Write the state of this rank. Called in the thread."""
        self._beats += 1
        failure = self.failure
        self._store.set(_state(self.rank), json.dumps([self._beats, failure, self._process]))
        if failure is self.failure:
            self._told.set()

    def read(self, wait: RankWait) -> None:
        """Read the states of the ranks of a wait, where that is due. Called in the thread."""
        now = self._clock.look()
        if now >= wait.due:
            wait.due = now + len(wait.ranks) * self.world / _READS_PER_S
            self._read(wait, now)
        wait.answered = wait.clock.seconds

    def _read(self, wait: RankWait, now: float) -> None:
        keys = [_state(rank) for rank in wait.ranks]
        if not self._store.check(keys):
            return  # one has not begun yet, and reading would wait for it
        raised: dict[int, str] = {}
        states: dict[int, str] = {}
        never_comes = ""
        for rank, text in zip(wait.ranks, self._store.multi_get(keys), strict=True):
            beats, posted, process = json.loads(text)
            states[rank] = host_processes.state_of(process, self._process)
            if posted is not None:
                failure = RankFailure(*posted)
                raised[rank] = f". Rank {rank} had raised {failure.why}"
                if failure.misses(wait.point) and not never_comes:
                    never_comes = f"rank {rank} has raised: {failure.why}"
            if wait.heard.get(rank, (0, 0.0))[0] != beats:
                wait.heard[rank] = beats, now
        ended = sorted(rank for rank in wait.ranks if states[rank] == "ended")
        # What others raise, and end with, follows from the end of a process that has raised nothing.
        if first := [rank for rank in ended if rank not in raised] or ([] if never_comes else ended):
            wait.ended = now if wait.ended is None else wait.ended
            if now - wait.ended >= _TOGETHER_S:
                has = "the process of {} has ended" if len(first) == 1 else "the processes of {} have ended"
                wait.silent, wait.why = first, has.format(listed(first))
        elif never_comes:
            wait.why = never_comes
            return
        else:
            self._hear(wait, now, states)
        if wait.silent:
            wait.why += f". Look at its log first{''.join(raised.get(rank, '') for rank in wait.silent)}"

    def _hear(self, wait: RankWait, now: float, states: dict[int, str]) -> None:
        """Find the ranks that have been silent for too long."""
        silences = {
            rank: (now - since) / (_RUNNING_FACTOR if states[rank] == "running" else 1)
            for rank, (_, since) in wait.heard.items()
        }
        if max(silences.values(), default=0.0) > wait.silent_s:
            # Ranks that stop together write their last states a beat apart, or more on a busy host or network. A rank
            # that runs is never silent for half of the limit, which is two beats or more.
            wait.silent = sorted(rank for rank, silence in silences.items() if silence > wait.silent_s / 2)
            seconds = int(min(silences[rank] for rank in wait.silent))
            known = {states[rank] for rank in wait.silent}
            what = {"stopped": "stopped by a signal", "running": "running, and its threads are held up"}
            wait.why = f"{listed(wait.silent)} did not answer for {seconds} s: the process is "
            wait.why += what.get(known.pop(), "dead or stopped") if len(known) == 1 else "dead or stopped"


def listed(ranks: Sequence[int], at_most: int = 20) -> str:
    """Ascending ranks as text: `rank 3`, `ranks 0-6, 9`, at most `at_most` ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ["-".join(map(str, run)) for run in runs[:at_most]]
    more = f" and more ({len(ranks)} in all)" if len(runs) > at_most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}{more}"


def _state(rank: int) -> str:
    return f"state/{rank}"


_COMPARED = "compared"
STORE_SILENT = (
    "the store that ranks share does not answer: the process that holds it (rank 0, or the launcher) is dead or "
    "stopped. Look at its log first"
)
