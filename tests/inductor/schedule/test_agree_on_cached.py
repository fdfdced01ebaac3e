"""Scheduled graphs from the cache: what comes back, and ranks that use theirs together or not at all."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peer_steps import model, step_of, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from harness import run_ranks
from weft import knobs
from weft.capture.graph import StepGraph
from weft.errors import MemoryLimitUnreachable
from weft.inductor.compiler import BINDING, loading_passes
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule import agree_on_cached, agree_on_schedule
from weft.inductor.schedule import scheduled_graph as stages
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.inductor.schedule.schedule_result import Schedule
from weft.inductor.transports import apply_transports
from weft.inductor.transports.peer_calls import PeerCall

pytestmark = pytest.mark.gloo

H200 = load_cluster("h200x8")
# Where the library is slow, whatever can be carried by others is.
SLOW_LIBRARY = dataclasses.replace(
    H200, transports=tuple(dataclasses.replace(t, latency=1e-3) if t.crosses else t for t in H200.transports)
)


class Compiler:
    """Compiles steps on CPUs as those on GPUs are compiled, for any number of restarts of a job.

    Attributes:
        plans: how often the graph was made for a schedule.
        made: the graphs and schedules, and the lists of collectives that were agreed on.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.plans = 0
        self.made: list[tuple[StepGraph, Schedule | None, AgreedCollectives]] = []
        self.limit: int | None = None
        self.cluster: Cluster = SLOW_LIBRARY
        self._plan = stages._with_agreed_collectives
        sys.modules["weft.program_form"].compile_graph = self._compile  # type: ignore[attr-defined]

    def _compile(self, graph: StepGraph, *how: Any, **more: Any) -> Any:
        runner, agreed = PassRunner(), AgreedCollectives()
        with mock.patch.object(stages, "_with_agreed_collectives", self._counted):
            step, found = stages.scheduled_graph(graph, self.cluster, self.limit, True, runner, agreed)
        self.made.append((step.copy(), found, agreed))
        return compile_aten(runner.run("binding", step, [*loading_passes(), *BINDING]))

    def _counted(self, *given: Any, **how: Any) -> StepGraph:
        self.plans += 1
        return self._plan(*given, **how)

    def job(self, rank: int, step: Any = step_of) -> int:
        """Train as eager does, as a job that starts now. How often it planned."""
        agree_on_schedule._unreachable_groups.clear()  # what a process finds out, it knows
        nets, before = [model(8, 16) for _ in range(2)], self.plans
        for net in nets:
            for block in net[1:-1]:
                weft.fully_shard(block, mesh=self.mesh)
            weft.fully_shard(net, mesh=self.mesh)
        expected = train(step(nets[0]), nets[0], rank)
        torch.testing.assert_close(train(weft.compile(step(nets[1])), nets[1], rank), expected)
        return self.plans - before

    @property
    def by_peers(self) -> bool:
        """Whether peers carry collectives of the last step."""
        return any(isinstance(node.target, PeerCall) for node in self.made[-1][0].collectives())


def reading(ranks: Sequence[int]) -> Any:
    """Steps whose loss these ranks read and keep."""

    def make(net: Any) -> Any:
        step, seen = step_of(net), list[float]()

        def reads(ids: torch.Tensor) -> torch.Tensor:
            loss = step(ids)
            if dist.get_rank() in ranks:
                seen.append(loss.item())
            return loss

        return reads

    return make


def twice(rank: int, world: int, folder: str, readers: Sequence[int]) -> list[bool]:
    compiler = Compiler(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    with knobs.override(transports="all", cache_dir=folder):
        compiler.job(rank, reading(readers))  # the first capture of a process may number its nodes otherwise
        compiler.job(rank, reading(readers))
        found = [compiler.job(rank, reading(readers)) == 0]
    *_, (first, once, agreed), (second, again, later) = compiler.made
    found += [
        str(second) == str(first),
        second.outputs == first.outputs,
        second.groups == first.groups,
        [node.target for node in second.collectives()] == [node.target for node in first.collectives()],
        compile_aten(second.copy()).source == compile_aten(first.copy()).source,
        later.issued == agreed.issued != "",
        not later.is_new,
    ]
    if len(readers) == 1:  # the kernels of the ranks differ: collectives are issued as they were captured
        return [*found, once is None, again is None]
    assert once is not None
    assert again is not None
    return [
        *found,
        again.decisions == once.decisions,
        again.simulation.seconds == once.simulation.seconds,
        again.simulation.peak == once.simulation.peak,
        again.reports == once.reports,
        again.limit == once.limit,
    ]


@pytest.mark.parametrize("readers", [(), (0, 1), (0,)], ids=["", "all read the loss", "one reads the loss"])
def test_the_same_graph_and_schedule_come_back(readers: Sequence[int], tmp_path: Path) -> None:
    for found in run_ranks(twice, 2, str(tmp_path), readers, timeout=240):
        assert all(found), found


def restarted(rank: int, world: int, folder: str) -> list[tuple[int, bool]]:
    """The same training again and again. How often each planned, and whether peers carried collectives."""
    compiler = Compiler(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    own, found = Path(folder, str(rank)), list[tuple[int, bool]]()
    reachable, read = apply_transports.reachable, agree_on_cached._read

    def starts(times: int = 1) -> None:
        for _ in range(times):
            with knobs.override(transports="all", cache_dir=str(own)):
                found.append((compiler.job(rank), compiler.by_peers))

    def of_another_agreement(*given: Any) -> Any:
        graph, note, decisions = read(*given)  # type: ignore[misc]
        agreement = dataclasses.replace(note.agreement, issued="another list")
        return graph, dataclasses.replace(note, agreement=agreement), decisions

    starts(3)
    if rank == 1:
        shutil.rmtree(own / "graphs")
    starts(2)
    agree_on_cached._read = of_another_agreement if rank == 0 else read
    starts()
    agree_on_cached._read = read
    apply_transports.reachable = (lambda *given: "worlds apart") if rank == 1 else reachable  # type: ignore[assignment]
    starts(2)
    apply_transports.reachable = reachable
    starts(2)
    return found


def test_ranks_use_their_graphs_together_or_not_at_all(tmp_path: Path) -> None:
    found = run_ranks(restarted, 2, str(tmp_path), timeout=240)
    assert found[0] == found[1]
    first, second, *rest = found[0]
    assert first == (1, True)
    assert second in ((0, True), (1, True))  # the first capture of a process may number its nodes otherwise
    assert rest == [
        (0, True),
        (1, True),  # one rank has lost its graph: both plan
        (0, True),
        (1, True),  # one rank has a graph of another agreement
        (1, False),  # peers cannot share memory in this run
        (0, False),
        (1, True),  # now they can
        (0, True),
    ]


def with_other_options(rank: int, world: int, folder: str) -> list[int]:
    """How often each planned: with limits and clusters, twice each."""
    compiler = Compiler(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    found = []
    with knobs.override(transports="all", cache_dir=folder):
        compiler.job(rank)
        for limit, cluster in ((None, SLOW_LIBRARY), (1 << 30, SLOW_LIBRARY), (None, H200)):
            compiler.limit, compiler.cluster = limit, cluster
            found += [compiler.job(rank), compiler.job(rank)]
        compiler.limit = 1 << 9
        for _ in range(2):
            with pytest.raises(MemoryLimitUnreachable, match="memory_limit="):
                compiler.job(rank)
    with knobs.override(transports="all", cache_dir=""):
        compiler.limit = None
        found += [compiler.job(rank), compiler.job(rank)]
    return found


def test_another_limit_or_cluster_is_another_entry(tmp_path: Path) -> None:
    for first, *found in run_ranks(with_other_options, 2, str(tmp_path), timeout=240):
        assert first <= 1
        assert found == [0, 1, 0, 1, 0, 1, 1]


def test_nothing_is_kept_of_a_fake_world(tmp_path: Path) -> None:
    """No transport is applied there: ranks must not read its graphs."""
    with weft.fake_world(2), knobs.override(cache_dir=str(tmp_path)):
        step = weft.capture(lambda x: x * 2, torch.ones(2))
        assert agree_on_cached.entry_of(step, H200, None, "") is None
    with knobs.override(cache_dir=str(tmp_path)):
        assert agree_on_cached.entry_of(step, H200, None, "") is not None
