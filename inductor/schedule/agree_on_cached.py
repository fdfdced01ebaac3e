"""Scheduled graphs on disk, with their transports: a job that starts again generates no kernels and searches no
schedule.

The ranks made theirs together, by one rank's decisions, and use them together: every rank reads its own, or none does.
A rank without one, because its batch has another size or its disk is new, would otherwise wait in the rendezvous of a
schedule for ranks that have theirs. Before they use them, ranks compare what they agreed on when they made them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from weft import torch_adapter
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.graph import StepGraph
from weft.inductor.cache import graph_cache
from weft.inductor.cost import cluster_file
from weft.inductor.cost.cluster import Cluster
from weft.inductor.graph.serializable import fits
from weft.inductor.schedule.agree_on_collectives import rank_that_differs
from weft.inductor.schedule.agree_on_schedule import cluster_of_rank_0, find_unreachable_groups, known_unreachable
from weft.inductor.schedule.decisions import Decisions
from weft.inductor.schedule.planner import log_warnings, made_before
from weft.inductor.schedule.schedule_result import Schedule


@dataclass(frozen=True)
class Agreement:
    """What ranks agreed on when they scheduled a step.

    Attributes:
        decisions: the text of :class:`weft.inductor.schedule.decisions.Decisions`; None where the ranks' kernels
            differed and collectives are issued as they were captured.
        issued: see :class:`weft.inductor.schedule.agree_on_collectives.AgreedCollectives`.
        unreachable: the groups in which some rank lacked peer access.
    """

    decisions: str | None
    issued: str
    unreachable: tuple[str, ...]

    def digest(self) -> str:
        """Equal on ranks that agreed on the same."""
        return hashlib.sha256(json.dumps([self.decisions, self.issued, self.unreachable]).encode()).hexdigest()


@dataclass(frozen=True)
class _Note:
    """What an entry holds beside the graph.

    Attributes:
        candidates, warnings: of the :class:`weft.inductor.schedule.schedule_result.Schedule`.
    """

    agreement: Agreement
    candidates: int
    warnings: tuple[str, ...]

    def text(self) -> str:
        made = self.agreement
        return json.dumps([made.decisions, made.issued, made.unreachable, self.candidates, self.warnings])

    @classmethod
    def read(cls, text: str) -> _Note:
        """Raises ValueError where :meth:`text` did not write it."""
        fields = json.loads(text)
        if not fits(tuple(fields), tuple[str | None, str, list[str], int, list[str]]):
            raise ValueError("the note of a scheduled graph has other fields")
        decisions, issued, unreachable, candidates, warnings = fields
        return cls(Agreement(decisions, issued, tuple(unreachable)), candidates, tuple(warnings))


def entry_of(step: StepGraph, cluster: Cluster, memory_limit: int | None, variant: str) -> Path | None:
    """The file of the scheduled graph of a captured step; None where nothing can be kept, and in a fake world, where no
    transport is applied.

    Args:
        cluster, memory_limit: what it is scheduled for.
        variant: what else it depends on.
    """
    if current_fake_world() is not None:
        return None
    # Which ranks a group has decides which links its collectives use, so costs depend on it. The graph has the group's
    # name only.
    ranks = {name: torch_adapter.group_ranks(group) for name, group in sorted(step.groups.items())}
    depends_on = [cluster_file.text(cluster), memory_limit, variant, ranks]
    return graph_cache.entry_of(step, f"scheduled: {json.dumps(depends_on)}")


def keep(path: Path | None, step: StepGraph, made: StepGraph, schedule: Schedule | None, issued: str) -> None:
    """Keep ``made``, which was scheduled together with the other ranks and has its transports.

    Args:
        path: see :func:`entry_of`.
        schedule: None where collectives are issued as captured.
        issued: see :class:`Agreement`.
    """
    if path is None:
        return
    decisions, candidates, warnings = None, 0, list[str]()
    if schedule is not None:
        decisions, candidates, warnings = schedule.decisions.text(), schedule.candidates, schedule.warnings
    agreement = Agreement(decisions, issued, tuple(known_unreachable()))
    graph_cache.write(path, made, step, _Note(agreement, candidates, tuple(warnings)).text())


def read_by_all(
    path: Path | None, step: StepGraph, cluster: Cluster, memory_limit: int | None
) -> tuple[StepGraph, Schedule | None, str] | None:
    """The graph that :func:`keep` kept, its schedule and its list of collectives; None on all ranks where one of them
    has none, or agreed on something else.

    All ranks must call this in the same order.

    Raises:
        ScheduleTimeout, StoreLost: see :func:`weft.inductor.schedule.agree_on_collectives.rank_that_differs`.
        PeersUnreachable: a rank did not come to the test of peer access.
    """
    found = None if path is None else _read(path, step)
    digest = "" if found is None else found[1].agreement.digest()
    if rank_that_differs("cached schedules", digest) is not None or found is None:
        return None
    graph, note, decisions = found
    agreement = note.agreement
    # Peer access is no property of the graph: a container can have it today and lack it tomorrow.
    unreachable = find_unreachable_groups(graph, agreement.unreachable)
    if set(unreachable) != set(agreement.unreachable):
        return None
    known = known_unreachable()
    known += (group for group in unreachable if group not in known)
    cluster = cluster_of_rank_0(cluster)
    log_warnings(note.warnings)
    if decisions is None:
        return graph, None, agreement.issued
    schedule = made_before(graph, cluster, decisions, memory_limit, candidates=note.candidates, warnings=note.warnings)
    return graph.copy(), schedule, agreement.issued


def _read(path: Path, step: StepGraph) -> tuple[StepGraph, _Note, Decisions | None] | None:
    """The entry in ``path``; None where it is missing or invalid."""
    found = graph_cache.read(path, step)
    if found is None:
        return None
    try:
        note = _Note.read(found[1])
        text = note.agreement.decisions
        return found[0], note, None if text is None else Decisions.read(text)
    except Exception as error:  # noqa: BLE001 - its checksum holds, but nobody knows who wrote it
        graph_cache.tell_of_damage(path, error)
        return None
