"""The list of passes and the runner: tiers, switches, records, dumps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pass_runs import targets
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.errors import MalformedGraph, UnknownOption
from weft.inductor.compiler import BINDING, loading_passes
from weft.inductor.fusion.kernel_stages import generation_passes
from weft.inductor.graph.pass_runner import Pass, PassRunner, declared_passes, keeps_bits
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.pipeline import ATEN_PASSES, KERNEL_PASSES, run_passes
from weft.inductor.passes.write_in_place import write_in_place
from weft.inductor.runtime.piecewise_cudagraph import stage_host_copies
from weft.inductor.schedule.agree_on_schedule import apply_transports, in_captured_order
from weft.inductor.schedule.communicators import assign_communicators
from weft.inductor.schedule.decisions import Decisions, schedule_passes


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) + torch.exp(x)


@pytest.fixture
def graph() -> StepGraph:
    return capture_step(twice, (torch.randn(3),)).graph


def test_every_declared_pass_is_in_the_pipeline() -> None:
    schedule = [in_captured_order, *schedule_passes(Decisions()), apply_transports, assign_communicators]
    first = [write_in_place, *ATEN_PASSES, *KERNEL_PASSES, *generation_passes(PassRunner())]
    pipeline: list[Pass] = [*first, *schedule, *loading_passes(), *BINDING, stage_host_copies]
    inductor = {name for name, pass_ in declared_passes().items() if pass_.__module__.startswith("weft.")}
    assert {pass_.__name__ for pass_ in pipeline} == inductor


def test_a_pass_is_left_out_by_name(graph: StepGraph) -> None:
    assert targets(run_passes(graph, [common_subexpressions]))["aten.exp.default"] == 1
    with knobs.override(disable_passes="pack, common_subexpressions"):
        assert targets(run_passes(graph, [common_subexpressions]))["aten.exp.default"] == 2


@pytest.mark.parametrize("name", ["cse", "number_collectives"])
def test_names_of_no_pass_and_of_required_passes_are_refused(graph: StepGraph, name: str) -> None:
    with knobs.override(disable_passes=name), pytest.raises(UnknownOption, match="'common_subexpressions'"):
        run_passes(graph)


def test_the_runner_records_node_counts_and_times(graph: StepGraph) -> None:
    runner = PassRunner()
    runner.run("graph", graph, [drop_noops, common_subexpressions])
    assert [(record.name, record.nodes_before - record.nodes_after) for record in runner.records] == [
        ("drop_noops", 0),
        ("common_subexpressions", 1),
    ]
    assert runner.seconds["graph"] >= sum(record.seconds for record in runner.records) > 0
    assert "common_subexpressions" in runner.table()


def test_seconds_of_inner_stages_are_not_counted_twice() -> None:
    runner = PassRunner()

    def work() -> int:
        return sum(range(100_000))

    runner.timed("outer", lambda: runner.timed("inner", work))
    assert runner.seconds["outer"] < runner.seconds["inner"]


def test_graphs_that_a_pass_changed_are_dumped(graph: StepGraph, tmp_path: Path) -> None:
    PassRunner(tmp_path / "passes").run("graph", graph, [common_subexpressions, drop_noops])
    assert [file.name for file in (tmp_path / "passes").iterdir()] == ["01_common_subexpressions.txt"]


def test_a_pass_that_breaks_the_graph_is_caught(graph: StepGraph) -> None:
    @keeps_bits
    def loses_an_output(step: StepGraph) -> StepGraph:
        step.outputs.pop()
        return step

    with pytest.raises(MalformedGraph):
        PassRunner().run("graph", graph, [loses_an_output])


def test_a_verifier_is_called_after_each_pass(graph: StepGraph) -> None:
    names: list[str] = []
    verify: Callable[[StepGraph, str], None] = lambda step, name: names.append(name)
    PassRunner().run("graph", graph, [drop_noops, common_subexpressions], verify)
    assert names == ["drop_noops", "common_subexpressions"]
