"""A part of the compiler that fails is left out: the step computes what eager computes, and one warning says so."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.errors import MalformedGraph, RankCannotCompile
from weft.inductor import compiler
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.compiler import compile_graph, left_out_of
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.fusion import emit, fuse, generate_kernels, inline, kernel_stages
from weft.inductor.graph import serialize
from weft.inductor.graph.faults import LeftOut, Part
from weft.inductor.lowering import all_lowerings  # noqa: F401 - registers them
from weft.inductor.lowering.registry import LOWERINGS
from weft.inductor.passes import pipeline
from weft.inductor.runtime import compile_pool
from weft.inductor.schedule import scheduled_graph

aten = torch.ops.aten

Plant = Callable[[pytest.MonkeyPatch], None]


class Planted(Exception):
    """What the planted faults raise."""


def fails(*args: Any, **how: Any) -> Any:
    raise Planted("planted by this test")


# ---- the steps


def trainer() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()  # the line of the loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def trained(compiled: bool) -> list[Tensor]:
    model, step = trainer()
    run = weft.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(1)
    losses = [run(torch.randn(4, 8, generator=generator)) for _ in range(2)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing is cached, and every warning is new."""
    compiler._warn.cache_clear()
    with knobs.override(cache_dir=""):
        yield


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return trained(compiled=False)


def interpreted(plant: pytest.MonkeyPatch) -> None:
    """Compile for generated kernels, which run in Triton's interpreter, although the step is on the CPU."""
    plant.setattr(compiler, "device_kind", lambda nodes: "cuda")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in texts if "goes on without" in text]


# ---- faults


def in_pass(module: Any, passes: str, name: str, fault: Callable[[StepGraph], StepGraph] = fails) -> Plant:
    """A fault of a pass of a list, after it has changed the graph."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def broken(step: StepGraph) -> StepGraph:
            return fault(original(step))

        (original, *_) = [pass_ for pass_ in getattr(module, passes) if pass_.__name__ == name]
        broken.__name__, broken.required = name, original.required  # type: ignore[attr-defined]
        changed = [broken if pass_ is original else pass_ for pass_ in getattr(module, passes)]
        patch.setattr(module, passes, changed)

    return plant


def in_function(module: Any, name: str, when: Callable[..., bool] = lambda *args, **how: True) -> Plant:
    """A fault of a function or method, in the calls ``when`` says."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def broken(*args: Any, **how: Any) -> Any:
            return (fails if when(*args, **how) else original)(*args, **how)

        patch.setattr(module, name, broken)

    return plant


def in_lowering(op: Any) -> Plant:
    assert op in LOWERINGS
    return lambda patch: patch.setitem(LOWERINGS, op, fails)


def uses_a_later_node(step: StepGraph) -> StepGraph:
    """No pass notices it, but the graph cannot run."""
    first = next(node for node in step.graph.nodes if node.op == "call_function" and node.all_input_nodes)
    last = next(node for node in reversed(step.graph.nodes) if node.op == "call_function" and node is not first)
    last.append(first)
    return step


def loses_an_output(step: StepGraph) -> StepGraph:
    step.outputs.pop()
    return step


def misstates_a_dtype(step: StepGraph) -> StepGraph:
    """Only the verifiers notice it: a cast too much later on, or another number of bytes."""
    node = next(node for node in step.graph.nodes if node.target is aten.addmm.default)
    node.meta["val"] = node.meta["val"].double()
    return step


def forgets_values(step: StepGraph) -> StepGraph:
    """A later pass fails on it."""
    for node in step.graph.nodes:
        node.meta.pop("val", None)
    return step


# Each with what is left out because of it.
ON_ATEN: dict[str, tuple[Plant, str]] = {
    **{
        f"the pass {name}": (in_pass(kernel_stages, "ATEN_PASSES", name), f"the pass {name}")
        for name in (
            "drop_noops",
            "drop_unused_gathers",
            "pack",
            "fold_casts",
            "common_subexpressions",
            "schedule_waits",
        )
    },
    "a pass that breaks the order": (
        in_pass(kernel_stages, "ATEN_PASSES", "schedule_waits", uses_a_later_node),
        "the pass schedule_waits",
    ),
    "a pass that loses an output": (
        in_pass(kernel_stages, "ATEN_PASSES", "fold_casts", loses_an_output),
        "the pass fold_casts",
    ),
    "a pass that another one fails on": (
        in_pass(kernel_stages, "ATEN_PASSES", "drop_noops", forgets_values),
        "all graph passes that are not required",
    ),
}

WITH_KERNELS: dict[str, tuple[Plant, str]] = {
    **{
        f"the pass {name}": (in_pass(pipeline, "KERNEL_PASSES", name), f"the pass {name}")
        for name in ("chunk_loss", "decompose", "group_casts", "fuse_optimizer", "rematerialise", "scalars_to_memory")
    },
    "a pass with wrong metadata": (
        in_pass(pipeline, "KERNEL_PASSES", "decompose", misstates_a_dtype),
        "the pass decompose",
    ),
    "a lowering": (in_lowering(aten.tanh.default), "generated kernels for tanh"),
    "inlining of one operation": (
        in_function(inline._Inliner, "with_producers", lambda self, loop, *rest: "tanh" in loop.node.name),
        "generated kernels for tanh",
    ),
    "inlining as a whole": (in_function(generate_kernels, "inline"), "inlining of loop nests"),
    "joining two nests": (
        in_function(fuse._Fuser, "_combined", lambda self, a, b: "tanh" in str([*self._computed(self.groups[a])])),
        "generated kernels for",
    ),
    "the order of fused nests": (
        in_function(fuse._Fuser, "_order", lambda self: any(len(g.members) > 1 for g in self.groups.values())),
        "fusion of loop nests",
    ),
    "code generation": (
        in_function(emit, "generate", lambda nest, *rest: "tanh" in str(nest)),
        "generated kernels for",
    ),
    "generation of all kernels": (in_function(generate_kernels, "lower"), "generated kernels, which"),
    "loading of all kernels": (in_function(compiler, "compile_kernels"), "generated kernels for"),
    "multi-tensor kernels": (in_function(compiler, "use_kernels"), "the pass use_kernels"),
    "recording": (in_function(compiler, "compile_recorded"), "CUDA graphs"),
}


@pytest.mark.parametrize("name", ON_ATEN)
def test_a_step_of_aten_kernels_keeps_eagers_bits(
    name: str, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant, left_out = ON_ATEN[name]
    plant(monkeypatch)
    with knobs.override(strict=False, verify_graphs=False):
        found = trained(compiled=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (text,) = warned(caplog)
    assert f"goes on without {left_out}, which failed" in text


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_step_of_generated_kernels_computes_what_eager_does(
    name: str, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interpreted(monkeypatch)
    plant, left_out = WITH_KERNELS[name]
    plant(monkeypatch)
    with knobs.override(strict=False, verify_graphs="metadata" in name):
        found = trained(compiled=True)
    torch.testing.assert_close(found, expected)
    (text,) = warned(caplog)
    assert f"goes on without {left_out}" in text
    assert "WEFT_DUMP_DIR" in text


@pytest.mark.parametrize("name", [*ON_ATEN, "the pass decompose", "a lowering", "code generation", "recording"])
def test_the_knob_makes_a_fault_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WITH_KERNELS:
        interpreted(monkeypatch)
    (ON_ATEN | WITH_KERNELS)[name][0](monkeypatch)
    with pytest.raises((Planted, MalformedGraph, KeyError)):
        trained(compiled=True)


def fails_at_tanh(step: StepGraph) -> StepGraph:
    for node in step.graph.nodes:
        if node.target is aten.tanh.default:
            fails()
    return step


@pytest.mark.parametrize(
    "plant", [in_lowering(aten.tanh.default), in_pass(pipeline, "KERNEL_PASSES", "drop_noops", fails_at_tanh)]
)
def test_the_users_line_is_named(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interpreted(monkeypatch)
    plant(monkeypatch)
    with knobs.override(strict=False):
        trained(compiled=True)
    (text,) = warned(caplog)
    lines = Path(__file__).read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.endswith("# the line of the loss"))
    assert f"test_faults.py:{at}" in text


def test_a_kernel_that_triton_refuses_is_left_out(
    expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are compiled for sm_90, and those that compile run in the interpreter."""
    interpreted(monkeypatch)
    load, generate = compiler.compile_kernels, emit.generate

    def compiled_too(sources: list[KernelSource], device: torch.device) -> Any:
        compile_pool.build(sources, 90)
        return load(sources, device)

    def misspelled(nest: Any, *rest: Any) -> Any:
        generated = generate(nest, *rest)
        source = generated.source
        text = source.text.replace("tl.load(", "tl.lode(") if "tanh" in str(nest) else source.text
        return dataclasses.replace(generated, source=dataclasses.replace(source, text=text))

    monkeypatch.setattr(compiler, "compile_kernels", compiled_too)
    monkeypatch.setattr(emit, "generate", misspelled)
    with knobs.override(strict=False):
        found = trained(compiled=True)
    torch.testing.assert_close(found, expected)
    (text,) = warned(caplog)
    assert "KernelCompilationFailed" in text
    assert "tanh" in text


def captured() -> StepGraph:
    return capture_step(trainer()[1], (torch.zeros(4, 8),), {}).graph


def test_the_captured_graph_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step = captured()
    before = serialize.dump(step)
    for broken in (forgets_values, loses_an_output, uses_a_later_node):
        with monkeypatch.context() as patch, knobs.override(strict=False, verify_graphs=False):
            in_pass(kernel_stages, "ATEN_PASSES", "schedule_waits", broken)(patch)
            compile_graph(step)
    assert serialize.dump(step) == before


def test_a_graph_with_something_left_out_is_not_cached_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    step = captured()
    with knobs.override(cache_dir=str(tmp_path), strict=False):
        for plant, part in (
            (in_lowering(aten.tanh.default), Part("operation", "tanh")),
            (in_pass(pipeline, "KERNEL_PASSES", "fuse_optimizer"), Part("pass", "fuse_optimizer")),
        ):
            with monkeypatch.context() as patch:
                plant(patch)
                assert part in left_out_of(compile_graph(step)).parts
        whole = compile_graph(step)
        assert left_out_of(whole) == LeftOut()
        with monkeypatch.context() as patch:  # nothing is lowered: the graph comes from the cache
            patch.setattr(generate_kernels, "lower", fails)
            again = compile_graph(step)
        assert left_out_of(again) == LeftOut()
        assert again.source == whole.source


# ---- ranks


def sharded(rank: int, compiled: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        weft.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if compiled is None else weft.compile(step, **compiled)
    generator = torch.Generator().manual_seed(rank)
    losses = [run(torch.randn(4, 8, generator=generator)) for _ in range(2)]
    return [*losses, *(parameter.to_local().detach() for parameter in model.parameters())], run


def on_one_of_two_ranks(rank: int, world: int) -> dict[str, Any]:
    """What a fault on rank 1 alone leads to, by where it is."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    found: dict[str, Any] = {"eager": sharded(rank, None)[0]}
    for name in ("drop_unused_gathers", "pack", "schedule_waits", "number_collectives"):
        for options in ({}, {"fallback": "eager"}):
            said.clear()
            with pytest.MonkeyPatch.context() as patch, knobs.override(cache_dir="", strict=False):
                if rank == 1:
                    in_pass(kernel_stages, "ATEN_PASSES", name)(patch)
                try:
                    values, run = sharded(rank, options)
                    parts = [] if run._uncompiled else sorted(left_out_of(run.entries[0].program).names("pass"))
                    outcome: Any = values, parts, len([text for text in said if "goes on without" in text])
                except Exception as error:  # noqa: BLE001 - what each rank raises is looked at
                    outcome = type(error).__name__
            found[f"{name} {options.get('fallback')}"] = outcome
            dist.barrier()
    return found


def test_ranks_leave_out_the_same() -> None:
    ranks = run_ranks(on_one_of_two_ranks, 2)
    for name in ("drop_unused_gathers", "pack", "schedule_waits"):
        for rank, found in enumerate(ranks):
            values, parts, warnings = found[f"{name} None"]
            assert all(torch.equal(a, b) for a, b in zip(values, found["eager"], strict=True))
            assert parts == [name]
            assert warnings == rank  # the one that has the fault says so
    # What no rank can do without: its own error where it is, and the other names that rank.
    assert [found["number_collectives None"] for found in ranks] == [RankCannotCompile.__name__, Planted.__name__]
    for found in ranks:
        values, parts, _ = found["number_collectives eager"]
        assert all(torch.equal(a, b) for a, b in zip(values, found["eager"], strict=True))
        assert parts == []


# ---- the schedule, which a step on CPUs has where it is given a cluster


def scheduled_for(cluster: str, patch: pytest.MonkeyPatch) -> None:
    original, found = compiler._Attempts, load_cluster(cluster)
    patch.setattr(compiler, "_Attempts", lambda *args: dataclasses.replace(original(*args), cluster=found))


@pytest.mark.parametrize("is_planted", [True, False])
def test_a_schedule_that_fails_is_left_out(
    is_planted: bool, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduled_for("h200x8", monkeypatch)
    asked: list[bool] = []
    original = scheduled_graph.scheduled

    def planted(*args: Any, **how: Any) -> Any:
        asked.append(True)
        return original(*args, **how) if not is_planted else fails()

    monkeypatch.setattr(scheduled_graph, "scheduled", planted)
    with knobs.override(strict=False, verify_graphs=False):
        found = trained(compiled=True)
    assert asked
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert ["goes on without a schedule of the collectives" in text for text in warned(caplog)] == (
        [True] if is_planted else []
    )
