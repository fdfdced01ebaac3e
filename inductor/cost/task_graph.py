"""The task graph of a step: tasks with durations, their dependencies, and the memory they hold.

A step is one list of tasks. Computation runs on one stream, one task after the other, in the order they are issued. A
collective is two tasks: its START is issued on the compute stream and runs beside it, on a *stream* of its kind, which
carries one collective at a time in the order of issue; its WAIT holds the compute stream back until it has ended.
Everything here is plain numbers, so that a simulator, a scheduler and a brute-force test work on the same thing, graph
or no graph.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class Kind(enum.Enum):
    """What a task does to the streams."""

    COMPUTE = "compute"  # takes its seconds of the compute stream
    START = "start"  # hands a collective to its stream
    WAIT = "wait"  # holds the compute stream until the collective it needs has ended
    NO_TIME = "no_time"  # takes none: a view, an element of a list, an input, the output


@dataclass(eq=False)
class Task:
    """One node of a step.

    Attributes:
        name: unique; used in reports and errors.
        kind: see :class:`Kind`.
        needs: positions, in ``TaskGraph.tasks``, of the tasks that have to be issued before this one. A WAIT needs its
            START, and nothing that reads the result of a collective needs the START without the WAIT.
        seconds: of a COMPUTE, alone on the GPU; of a START, how long the collective takes alone on its stream and link.
        stream: of a START: what runs it, one collective at a time in order of issue ("nccl:world:gather"). A
            communicator of NCCL has one; transports over symmetric memory share theirs among all groups.
        link: of a START: the link whose bandwidth it shares equally with concurrent collectives of other streams.
        interference: of a START: the part of its speed that computation loses while the collective runs (0.4: a
            kernel gets 0.6 seconds of work done in a second).
        pinned: whether it keeps its place among the other pinned tasks (it has effects, or draws random numbers).
    """

    name: str
    kind: Kind
    needs: tuple[int, ...] = ()
    seconds: float = 0.0
    stream: str = ""
    link: str = ""
    interference: float = 0.0
    pinned: bool = False


@dataclass(eq=False)
class Storage:
    """Memory that a task allocates and others use.

    Its live range goes from the issue of ``maker`` through the issue of the last of ``readers``. A collective reads its
    operands until it ends, so if a reader is a START, its WAITs count as readers too. A START without a WAIT extends
    the live range to the end of the step.

    Attributes:
        size: bytes.
        maker: position of the task that allocates it.
        readers: positions of the tasks that read it or write to it, without its maker.
        kept: whether it is live until the end of the step.
    """

    size: int
    maker: int
    readers: tuple[int, ...] = ()
    kept: bool = False


@dataclass(eq=False)
class TaskGraph:
    """A step to be scheduled.

    Attributes:
        tasks: in a valid order, that of the graph.
        storages: memory that tasks allocate, without the inputs.
        base: bytes that are allocated for the whole step: the inputs and ``set_aside``.
        set_aside: bytes of ``base`` that the symmetric-memory transports keep during and between steps.
    """

    tasks: list[Task]
    storages: list[Storage] = field(default_factory=list)
    base: int = 0
    set_aside: int = 0
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def derived(self, make: Callable[[TaskGraph], T]) -> T:
        """``make(self)``, made once: what follows from the task graph, which is not changed once it is complete."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return self._derived[make]

    def waits_of(self) -> dict[int, list[int]]:
        """The positions of the WAITs of each START, by the position of the START."""
        waits: dict[int, list[int]] = {at: [] for at, task in enumerate(self.tasks) if task.kind is Kind.START}
        for at, task in enumerate(self.tasks):
            if task.kind is Kind.WAIT:
                waits[self.start_of(at)].append(at)
        return waits

    def start_of(self, wait: int) -> int:
        """The START that a WAIT waits for, through NO_TIME tasks in between (elements of a coalesced result)."""
        at = wait
        # The first need of a WAIT or getitem is its operand: `build` lists operands before ordering dependencies.
        while self.tasks[at].kind is not Kind.START:
            at = self.tasks[at].needs[0]
        return at

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether ``order`` has every task once, after all of its needs, and keeps the order of pinned tasks."""
        place = {task: at for at, task in enumerate(order)}
        if len(order) != len(self.tasks) or len(place) != len(order):
            return False
        pinned = [place[at] for at, task in enumerate(self.tasks) if task.pinned]
        needed = all(place[need] < place[at] for at, task in enumerate(self.tasks) for need in task.needs)
        return needed and pinned == sorted(pinned)
