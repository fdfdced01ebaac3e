"""Processes of the same host: who they are, and whether one has ended or is stopped.

Ranks on one host see each other's end at once, where ranks on other hosts can only wait for a sign of life.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def host() -> str:
    """Text that is equal for two processes on one machine that can see each other: host name, boot id, pid namespace.
    A container may hide some of them."""
    # The host name alone is not enough: containers on one machine may share it, or machines of one image.
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def identity() -> str:
    """What names this process among all processes of all hosts: its host, network, process id and start time."""
    pid, network = os.getpid(), ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{host()} {network}|{pid}|{_status(pid)[1]}"


def state_of(process: str, seen_from: str) -> str:
    """The state of a process: "ended", "stopped" (by a signal) or "running"; "" where it is on another host or in
    another network, or this system has no /proc. Both arguments are of :func:`identity`; the second is that of the
    process that asks."""
    where, pid, started = process.rsplit("|", 2)
    if where != seen_from.rsplit("|", 2)[0] or not started:
        return ""
    letter, since = _status(int(pid))
    # Another start time: the system has given the number to another process. A zombie (Z) or a dead process (X) runs
    # no more, and waits for its parent to ask.
    if since != started or letter in "ZX":
        return "ended"
    return "stopped" if letter in "Tt" else "running"


def _status(pid: int) -> tuple[str, str]:
    """The state letter and the start time (clock ticks since boot) of a process; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The name of the program is in parentheses and may have spaces: fields are counted behind it (proc(5): 3 and 22).
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
