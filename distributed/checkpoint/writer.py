"""The rank's side of its writer process: starting it, handing it copies of the state, and passing on its messages.

The process is started anew, never forked: threads and CUDA do not survive a fork. It lives across saves, since starting
Python and torch takes seconds. It is one for all that a rank saves, so two saves are never written at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from weft.distributed.checkpoint.exchange import Ranks
from weft.distributed.checkpoint.staging import SharedMemory
from weft.distributed.checkpoint.write import ROUNDS, SaveRequest
from weft.distributed.checkpoint.writer_main import FAILED, outcome
from weft.errors import CannotCheckpoint, CheckpointNotSaved, WeftError
from weft.rank_watch import CannotEnd

_log = logging.getLogger(__name__)

# Seconds that the last save gets when an error ends this process, since the ranks that it waits for may be gone; and
# that the writer gets to end.
_AFTER_ERROR_S = 5.0
_END_S = 5.0

_NO_POSIX = (
    "it needs a system whose processes inherit files, as Linux and macOS have. Save the state_dict() of model and "
    "optimizer with torch.save or torch.distributed.checkpoint here"
)

# The modules are found where this process finds them.
_START = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from weft.distributed.checkpoint.staging import SharedMemory
from weft.distributed.checkpoint.writer_main import main
main(connection, SharedMemory(int(sys.argv[2])), int(sys.argv[3]))
"""


class Writer:
    """The writer process of this one."""

    def __init__(self) -> None:
        if not hasattr(signal, "pthread_sigmask"):  # Windows: no process inherits pipes by their numbers
            raise CannotCheckpoint("save", _NO_POSIX)
        self.memory = SharedMemory()
        self._connection, theirs = multiprocessing.Pipe()
        passed = (theirs.fileno(), self.memory.descriptor)
        # A cluster sends signals to all processes of a job, and a terminal sends Ctrl-C to all of a command. A writer
        # ends when its rank does, not before: it may be the last save that the signal asks for. Blocked signals stay
        # blocked in the new process from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        with contextlib.suppress(OSError):  # of a process that has ended already, which the first save finds
            self._connection.send(sys.path)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def send(self, data: bytes) -> None:
        """Send a message, if the process still is there."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def receive(self, rank: int) -> bytes:
        """The next message, or the reason why there is none: the process of ``rank`` has ended."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            status = self._process.returncode
            killed = status is not None and status < 0
            how = f"was ended by {signal.Signals(-status).name}" if killed else f"ended with status {status}"
            return FAILED + f"rank {rank}: process {self.pid}, which writes its checkpoints, {how}".encode()

    def close(self) -> None:
        """End the process and free the memory. What it is writing is not finished."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # storage may hold it for as long as it does not answer
            self._process.wait(_END_S)
        self._connection.close()
        self.memory.close()

    def forget(self) -> None:
        """In a fork: leave the process to the one that has started it, and do not keep it alive."""
        self._connection.close()
        os.close(self.memory.descriptor)


class Save:
    """A save that is under way: a thread passes on what the writers have to agree on.

    Args:
        writer: of this process; None where there is none, which ``request`` says.
        request: for the writer; or why there is none, which other ranks learn.
    """

    def __init__(self, ranks: Ranks, step: int, folder: str, writer: Writer | None, request: bytes) -> None:
        self._ranks, self._step, self._folder = ranks, step, folder
        self._writer, self._request = writer, request
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"weft-checkpoint-{step}", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether the thread has messages to pass on still."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is complete.

        Raises:
            CheckpointNotSaved: it failed, or a rank is gone.
        """
        try:
            self._ranks.wait(self._thread)
        except CannotEnd as error:
            _discard(self._writer)
            raise CheckpointNotSaved(self._step, self._folder, str(error)) from None
        if isinstance(self._failure, RuntimeError) and not isinstance(self._failure, WeftError):  # of a collective
            raise CheckpointNotSaved(self._step, self._folder, self._ranks.why(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    def join(self, timeout_s: float | None) -> None:
        """Wait until it is complete or has failed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            size = self._pass_on()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._failure = error
            _log.error("%s", error)
            if not isinstance(error, CheckpointNotSaved):  # the writer still waits for other ranks
                _discard(self._writer)
            return
        if self._ranks.rank == 0:
            taken = time.perf_counter() - started
            _log.info("step %d saved to %s: %.1f MiB in %.1f s", self._step, self._folder, size / 2**20, taken)

    def _pass_on(self) -> int:
        """Returns the size of the files of all ranks, in bytes."""
        ranks, writer, mine = self._ranks, self._writer, self._request
        if mine[:1] != FAILED and writer is not None:
            writer.send(mine[1:])
        reply = b""
        for _ in range(ROUNDS):
            if mine[:1] != FAILED and writer is not None:
                mine = writer.receive(ranks.rank)
            everyone = ranks.to_first(mine)
            answers = None
            if everyone is not None:
                answers = self._answers(everyone)
            reply = ranks.from_first(answers)
            if writer is not None:
                writer.send(reply)
            if reply[:1] == FAILED:
                raise CheckpointNotSaved(self._step, self._folder, reply[1:].decode())
        return pickle.loads(reply[1:])

    def _answers(self, everyone: list[bytes]) -> list[bytes]:
        """What each rank gets back, on rank 0: what its writer says, or why it cannot."""
        if everyone[0][:1] != FAILED and self._writer is not None:
            self._writer.send(pickle.dumps(everyone))
            text = self._writer.receive(0)
            if text[:1] != FAILED:
                return pickle.loads(text)
            everyone = [text, *everyone[1:]]
        reasons = b"; ".join(text[1:] for text in everyone if text[:1] == FAILED)
        return [FAILED + reasons] * len(everyone)


_writer: Writer | None = None
_last: Save | None = None


def begin(ranks: Ranks, step: int, folder: str, prepare: Callable[[SharedMemory], SaveRequest]) -> Save:
    """Begin a save. One that another object began is waited for; its failure stays with that object. Collective.

    Args:
        prepare: copies the state to the memory, before this returns.

    Raises:
        whatever ``prepare`` raises. Other ranks learn of it by the save.
    """
    global _writer, _last
    if _last is not None:
        with contextlib.suppress(CheckpointNotSaved):
            _last.wait()
    raised: list[Exception] = []

    def prepared() -> SaveRequest:
        global _writer
        try:
            if _writer is not None and _writer.ended():
                _log.warning("process %d, which writes checkpoints, has ended; another is started", _writer.pid)
                _discard(_writer)
            _writer = _writer or _started()
            return prepare(_writer.memory)
        except Exception as error:
            raised.append(error)
            raise

    request = outcome(prepared, ranks.rank)
    if raised and ranks.world_size == 1:
        raise raised[0]
    _last = Save(ranks, step, folder, None if raised else _writer, request)
    if raised:
        raise raised[0]
    return _last


def _started() -> Writer:
    # Not ``atexit``: processes that multiprocessing forks end without its handlers.
    multiprocessing.util.Finalize(None, _finish, exitpriority=0)
    return Writer()


def _discard(writer: Writer | None) -> None:
    global _writer
    if writer is not None and writer is _writer:
        _writer = None
        writer.close()


def _finish() -> None:
    """At the end of the process: its last save ends first. After an error only for a while."""
    if _last is not None:
        _last.join(_AFTER_ERROR_S if getattr(sys, "last_value", None) is not None else None)
    _discard(_writer)


def _forget() -> None:
    global _writer, _last
    if _writer is not None:
        _writer.forget()
    _writer = _last = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
