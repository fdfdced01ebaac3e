"""``weft.stopping``: all ranks leave the training loop at the same step when one of them is told to stop.

A cluster that takes a job back sends SIGTERM, or the signal that submitit asks for (SIGUSR2), to some processes of it
and not always to all at the same moment. A handler only sets a flag: it may run in the middle of a collective.

Ranks agree through the store of the process group, without a collective. Call number n of ``stopping`` has one
decision, which the first rank that asks writes ("go" or "stop") and all others read: one atomic compare-and-set a call.
A rank that was told to stop claims the first later call that no rank has reached yet, so ranks that run ahead never
miss it.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from weft import threads_at_exit, torch_adapter
from weft.errors import NotMainThread, StoreLost
from weft.rank_watch import STORE_S
from weft.short_tracebacks import shortens_tracebacks

_log = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR2", "SIGINT") if hasattr(signal, name))

# Signals within so many seconds of the first one are copies of it. A cluster may send one to each process of a job, and
# the launcher or torchrun may pass on its own; Ctrl-C reaches all processes of a terminal.
_COPIES_S = 1.0

# Between calls that are less than so many seconds apart, the decision of the next one is asked for in advance: nobody
# waits for the store then, and a signal ends the loop one step later.
_AHEAD_S = 1.0

# Decisions of so many calls ago are removed from the store: no rank is that far behind.
_KEPT = 1000


class StoreRequests:
    """Requests to a store that do not wait for ever. One has no timeout of its own: where the process that holds the
    store is stopped, it would wait for as long as that is.

    Args:
        silent_s: seconds without an answer after which the store counts as lost.
    """

    def __init__(self, silent_s: float = STORE_S) -> None:
        self._silent_s = silent_s
        self._lost = False
        self._requests: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threads_at_exit.started("weft stopping", self._run)
        atexit.register(self._requests.put, None)

    def __call__(self, request: Callable[..., Any], *arguments: Any) -> Any:
        """What ``request(*arguments)`` returns. Raises StoreLost, and what it raises."""
        self.start(request, *arguments)
        return self.answer()

    def start(self, request: Callable[..., Any], *arguments: Any) -> None:
        """Make a request whose answer is asked for later, before the next request."""
        self._requests.put((request, arguments))

    def answer(self) -> Any:
        """What the request that was started returns. Raises StoreLost, and what it raises."""
        if self._lost:
            raise self._error()
        try:
            answer, error = self._answers.get(timeout=self._silent_s)
        except queue.Empty:
            self._lost = True  # for good: a late answer is not that of a later request
            raise self._error() from None
        if error is not None:
            raise error
        return answer

    def _error(self) -> StoreLost:
        return StoreLost("weft.stopping", dist.get_rank() if dist.is_initialized() else 0)

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None:
            request, arguments = asked
            try:
                self._answers.put((request(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._answers.put((None, error))


class _StopSignals:
    """The handlers of this process, and the number of calls so far."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._store: dist.Store | None = None
        self._ask: StoreRequests | None = None
        self._group: Any = None
        self._calls = 0
        self._last_call = -_AHEAD_S  # when it was
        self._asked = False  # whether the decision of the next call has been asked for
        self._stopped = False

    def install(self) -> None:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a data-loader worker: it inherited the handler, and ends with its parent
        now = time.monotonic()
        if self.received is not None:  # the second signal ends the process at once
            if now - self._since < _COPIES_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(self._process, number)
            return
        self.received, self._since = number, now
        # Logging takes locks, which the interrupted code may hold; a write does not.
        text = f"weft: {signal.Signals(number).name} received, stopping after this step; again to end at once\n"
        os.write(2, text.encode())

    def agreed(self) -> bool:
        """Whether this call is the one at which all ranks stop."""
        if self._stopped:
            return True
        if torch_adapter.world_size() == 1:
            self._stopped = self.received is not None
            return self._stopped
        group = dist.group.WORLD
        if group is not self._group:  # the first call, or a process group that was made anew
            self._group, self._calls, self._asked = group, 0, False
            self._store = dist.PrefixStore("weft/stopping", torch_adapter.default_store())
            self._ask = StoreRequests()
        store, ask, self._calls = self._store, self._ask, self._calls + 1
        assert store is not None
        assert ask is not None
        if not self._asked:
            self._ask_for(store, ask, self._calls)
        decided = ask.answer()
        self._asked = False
        if self.received is not None and decided != b"stop":
            ask(self._claim, store)
        if self._calls % _KEPT == 0 and dist.get_rank() == 0:
            for old in range(self._calls - 2 * _KEPT + 1, self._calls - _KEPT + 1):
                ask(store.delete_key, f"call/{old}")
        self._stopped = decided == b"stop"
        now = time.monotonic()
        if now - self._last_call < _AHEAD_S and self.received is None and not self._stopped:
            self._ask_for(store, ask, self._calls + 1)
            self._asked = True
        self._last_call = now
        return self._stopped

    def _ask_for(self, store: dist.Store, ask: StoreRequests, call: int) -> None:
        """Ask for the decision of a call, and make it where no rank has."""
        ask.start(store.compare_set, f"call/{call}", "", "go" if self.received is None else "stop")

    def _claim(self, store: dist.Store) -> None:
        """Decide that all ranks stop at the first later call that no rank has decided yet."""
        later = self._calls + 1
        while store.compare_set(f"call/{later}", "", "stop") != b"stop":
            later += 1


_signals: _StopSignals | None = None


@shortens_tracebacks
def stopping() -> bool:
    """Whether the training loop is to be left now: call it once a step, on all ranks.

        for step in range(first, steps):
            train_step(*next(batches))
            if weft.stopping():
                state.save("checkpoints", step + 1, wait=True)
                break

    The first call installs handlers for SIGTERM, SIGUSR2 and SIGINT. Once any rank has received one of them, this
    returns True at the same call on all ranks, and from then on. A second signal, a second or more after the first,
    ends its process at once: signals that come sooner are copies of the first one. Processes forked from this one
    ignore the first signal.

    A call makes one request to the store of the process group, and no collective. Where calls are less than a second
    apart, the request is made during the step before: a call then costs a few microseconds, and ranks leave one step
    later.

    Raises:
        StoreLost: the process that holds the store does not answer for 30 s, or is gone.
        NotMainThread: the first call is not made in the main thread, where Python handles signals.
    """
    global _signals
    if _signals is None:
        if threading.current_thread() is not threading.main_thread():
            raise NotMainThread
        _signals = _StopSignals()
        _signals.install()
    return _signals.agreed()


def stopped() -> bool:
    """Whether :func:`stopping` has returned True in this process."""
    return _signals is not None and _signals._stopped
