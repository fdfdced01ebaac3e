"""The writer process of one rank: it writes the copies of the state that the rank makes, at the lowest priority.

It has no connection to other ranks. What the writers have to agree on goes through the ranks, which know when one of
them is gone. It ends when its rank does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import platform
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from weft.distributed.checkpoint.staging import SharedMemory
from weft.distributed.checkpoint.write import Round, SaveRequest, write_checkpoint

# What a text between a writer and its rank begins with: a pickled object, or the reason why the save cannot go on.
DONE, FAILED = b"+", b"-"

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # Linux has no wrapper for this system call
_IDLE_CLASS = 3 << 13

# Seconds between two looks whether the rank is alive. A fork of the rank may hold the connection open.
_LOOK_S = 1.0


class _Failed(Exception):
    """The save cannot go on; all ranks know why."""


def main(connection: Connection, memory: SharedMemory, rank_pid: int) -> None:
    """Write what comes over ``connection`` until its other end is closed or process ``rank_pid`` ends."""
    _lower_priority()
    torch.set_num_threads(1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages, rank_pid), daemon=True).start()
    while True:
        request: SaveRequest = pickle.loads(messages.get())
        with contextlib.suppress(_Failed):
            write_checkpoint(request, memory, _rounds(connection, messages, request.rank))


def _receive(connection: Connection, messages: queue.SimpleQueue[bytes], rank_pid: int) -> None:
    """End the process when the rank has ended, whatever the main thread does; pass on what comes until then."""
    try:
        while os.getppid() == rank_pid:
            if connection.poll(_LOOK_S):
                messages.put(connection.recv_bytes())
    except (EOFError, OSError):
        pass
    os._exit(0)


def _rounds(connection: Connection, messages: queue.SimpleQueue[bytes], rank: int) -> Round:
    def together(mine: Callable[[], Any], first: Callable[[list[Any]], list[Any]]) -> Any:
        text = outcome(mine, rank)
        connection.send_bytes(text)
        if rank == 0 and text[:1] != FAILED:  # else the answer is known without this process
            everyone: list[bytes] = pickle.loads(messages.get())
            reasons = [text[1:].decode() for text in everyone if text[:1] == FAILED]
            answers: list[bytes] = []

            def answer() -> None:
                answers.extend(DONE + pickle.dumps(each) for each in first([pickle.loads(t[1:]) for t in everyone]))

            if not reasons and (failure := outcome(answer, 0))[:1] == FAILED:
                reasons = [failure[1:].decode()]
            if reasons:
                answers = [FAILED + "; ".join(reasons).encode()] * len(everyone)
            connection.send_bytes(pickle.dumps(answers))
        reply = messages.get()
        if reply[:1] == FAILED:
            raise _Failed
        return pickle.loads(reply[1:])

    return together


def outcome(action: Callable[[], Any], rank: int) -> bytes:
    """What ``action()`` returns, or why it failed, as a text for other processes."""
    try:
        return DONE + pickle.dumps(action())
    except Exception as error:  # noqa: BLE001 - all ranks must learn of it
        return FAILED + f"rank {rank}: {type(error).__name__}: {error}".encode()


def _lower_priority() -> None:
    """Other programs that want the CPU or the disk come first."""
    os.nice(19)
    if sys.platform == "linux" and (number := _IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE_CLASS)
