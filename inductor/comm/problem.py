"""What a schedule is made of: tasks that take time, the order they need, and the memory they hold.

A step is one list of tasks. Computation runs on one stream, one task after the other, in the order they are issued. A
collective is two tasks: its START is issued on the compute stream and runs beside it, on a *lane* that carries one
collective at a time in the order of issue; its WAIT holds the compute stream back until it has ended. Everything here
is plain numbers, so that a simulator, a scheduler and a brute-force test work on the same thing, graph or no graph.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What a task does to the streams."""

    COMPUTE = "compute"  # takes its seconds of the compute stream
    START = "start"  # hands a collective to its lane
    WAIT = "wait"  # holds the compute stream until the collective it needs has ended
    FREE = "free"  # takes no time: a view, an element of a list, an input, the output


@dataclass(eq=False)
class Task:
    """One node of a step.

    Attributes:
        name: for people; unique.
        kind: see :class:`Kind`.
        needs: positions, in ``Problem.tasks``, of the tasks that have to be issued before this one. A WAIT needs its
            START, and nothing that reads the result of a collective needs the START without the WAIT.
        seconds: of a COMPUTE, alone on the GPU; of a START, how long the collective takes alone on its lane and link.
        lane: of a START: what carries it, one at a time and in order of issue ("nccl:world:gather").
        link: of a START: the wires it shares, half each, with collectives that other lanes carry at the same time.
        interference: of a START: the part of its speed that computation loses while the collective runs (0.4: a
            kernel gets 0.6 seconds of work done in a second).
        pinned: whether it keeps its place among the other pinned tasks (it has effects, or draws random numbers).
    """

    name: str
    kind: Kind
    needs: tuple[int, ...] = ()
    seconds: float = 0.0
    lane: str = ""
    link: str = ""
    interference: float = 0.0
    pinned: bool = False


@dataclass(eq=False)
class Storage:
    """Memory that a task makes and others read.

    It is held from the issue of ``maker`` through that of the last of ``readers``. Where one of these is a START, its
    WAITs count as readers too, and the end does where it has none. One that is ``kept`` is held to the end.

    Attributes:
        size: bytes.
        maker: position of the task that makes it.
        readers: positions of the tasks that read it or write to it, its maker left out.
    """

    size: int
    maker: int
    readers: tuple[int, ...] = ()
    kept: bool = False


@dataclass(eq=False)
class Problem:
    """A step to be scheduled.

    Attributes:
        tasks: in an order that runs, the one the step was captured in.
        storages: what is held while it runs, inputs left out.
        base: bytes held from beginning to end: the inputs, and what is set aside.
        set_aside: bytes of those that collectives over peers have, in a step, in the next, and between them.
    """

    tasks: list[Task]
    storages: list[Storage] = field(default_factory=list)
    base: int = 0
    set_aside: int = 0

    def waits_of(self) -> dict[int, list[int]]:
        """The WAITs of each START."""
        found: dict[int, list[int]] = {at: [] for at, task in enumerate(self.tasks) if task.kind is Kind.START}
        for at, task in enumerate(self.tasks):
            if task.kind is Kind.WAIT:
                found[self.start_of(at)].append(at)
        return found

    def start_of(self, wait: int) -> int:
        """The START that a WAIT waits for, found through the FREE tasks between (an element of a list)."""
        at = wait
        while self.tasks[at].kind is not Kind.START:
            at = self.tasks[at].needs[0]
        return at

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether ``order`` has every task once, after all it needs, and keeps the order of pinned tasks."""
        place = {task: at for at, task in enumerate(order)}
        if len(order) != len(self.tasks) or len(place) != len(order):
            return False
        pinned = [place[at] for at, task in enumerate(self.tasks) if task.pinned]
        needed = all(place[need] < place[at] for at, task in enumerate(self.tasks) for need in task.needs)
        return needed and pinned == sorted(pinned)
