"""Graphs of kernels on disk: the same graph comes back, in another process too; whatever differs is another entry;
damaged entries are made again; many processes share them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from step_builder import StepBuilder
from weft import cache_folder, knobs, torch_adapter
from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.capture.user_code import format_frame
from weft.inductor.cache import graph_cache
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph import serialize
from weft.inductor.graph.host_scalars import to_memory
from weft.inductor.graph.retarget import retarget
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.schedule import agree_on_cached

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    with knobs.override(cache_dir=str(tmp_path)):
        yield tmp_path


def training_step(width: int = 16, rows: int = 4, lr: float = 1e-2) -> StepGraph:
    """A captured step with a scheduled learning rate, clipping and fused AdamW."""
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return capture_step(step, (torch.zeros(rows, width),), {}).graph


def sharded_step() -> StepGraph:
    with fake_world(4):
        return sharded_in_a_world()


def sharded_in_a_world() -> StepGraph:
    mesh = torch.distributed.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to("cuda")
    weft.fully_shard(model, mesh=mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return capture_step(step, (torch.zeros(4, 16, device="cuda"),), {}).graph


def sharded_training_step() -> StepGraph:
    """On GPUs, with AdamW: kernels read the learning rate and the counts of steps from memory."""
    with fake_world(4):
        mesh = torch.distributed.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to("cuda")
        weft.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graph = capture_step(step, (torch.zeros(4, 16, device="cuda"),), {}).graph
        return retarget(graph) if device_kind(graph.graph.nodes) == "cpu" else graph


def dynamic_step() -> StepGraph:
    model = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(x).softmax(-1), x[1:] * 2]).sum(0)

    return capture_step(step, (torch.zeros(6, 8),), {}, dynamic=frozenset({(0, 0)})).graph


def with_kernels(step: StepGraph) -> StepGraph:
    return kernel_graph(run_passes(step, KERNEL_PASSES))


def unexpected(step: StepGraph) -> StepGraph:
    raise AssertionError("the step should have been in the cache")


def entries(directory: Path) -> list[Path]:
    return [path for path in (directory / "graphs").rglob("*") if len(path.name) == 64]  # and no unfinished ones


# ---- what comes back


@pytest.mark.parametrize("capture", [training_step, sharded_step, sharded_training_step, dynamic_step])
def test_the_same_graph_comes_back(capture: Callable[[], StepGraph]) -> None:
    capture()  # the first capture of an operation in a process may number the nodes after it otherwise
    first, second = capture(), capture()
    made = graph_cache.cached(first, with_kernels)
    assert any(isinstance(node.target, KernelCall) for node in made.graph.nodes)
    found = graph_cache.cached(second, unexpected)
    assert str(found) == str(made)
    assert serialize.dump(found) == serialize.dump(made)
    assert any(node.target is to_memory for node in found.graph.nodes) == (capture is sharded_training_step)
    assert [node.meta.keys() for node in found.graph.nodes] == [node.meta.keys() for node in made.graph.nodes]
    assert (found.inputs, found.outputs, found.groups) == (second.inputs, second.outputs, second.groups)
    # Where values lie, and what of it is shared with inputs, decides what the program writes in place.
    assert compile_aten(found).source == compile_aten(made).source


@pytest.mark.parametrize("rows", [6, 9])
def test_a_graph_from_the_cache_computes_what_eager_does(rows: int) -> None:
    first, second = dynamic_step(), dynamic_step()
    graph_cache.cached(first, with_kernels)
    found = graph_cache.cached(second, unexpected)
    for node in found.graph.nodes:
        if isinstance(node.target, KernelCall):
            (kernel,) = compile_kernels([node.target.generated.source], torch.device("cpu"))
            node.target.attach(kernel, lambda sources: compile_kernels(sources, torch.device("cpu")))
    x, weight, bias = torch.randn(rows, 8), torch.randn(8, 8), torch.randn(8)
    by_path = {"args[0]": x, "model.weight": weight, "model.bias": bias}
    (result,) = compile_aten(found)(*(by_path[entry.path] for entry in found.inputs))
    wanted = torch.cat([torch.nn.functional.linear(x, weight, bias).softmax(-1), x[1:] * 2]).sum(0)
    torch.testing.assert_close(result, wanted)


def entry_over(ranks: Sequence[int]) -> Path | None:
    """The entry of a scheduled graph with an all-reduce over some of 16 ranks."""
    with fake_world(16):
        group = torch.distributed.new_group(list(ranks))
        weight = torch.zeros(64, 64, requires_grad=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            (gradient,) = torch.autograd.grad((x @ weight).sum(), weight)
            torch.distributed.all_reduce(gradient, group=group)
            return gradient.sum()

        graph = capture_step(step, (torch.zeros(4, 64),), {}).graph
        with mock.patch.object(agree_on_cached, "current_fake_world", return_value=None):
            return agree_on_cached.entry_of(graph, load_cluster("h200x8"), None, "")


def test_a_schedule_is_of_the_ranks_behind_a_name() -> None:
    """Graphs that say the same of groups of other ranks: within a node, over two."""
    near, far = range(8), range(0, 16, 2)
    assert None is not entry_over(near) == entry_over(near) != entry_over(far)


def test_values_that_both_graphs_have_are_the_same_objects() -> None:
    step = training_step()
    graph_cache.cached(step, with_kernels)
    found = graph_cache.cached(step, unexpected)
    given = {node.name: node.meta["val"] for node in step.placeholders}
    assert all(node.meta["val"] is given[node.name] for node in found.placeholders)
    for fake in (node.meta["val"] for node in found.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)):
        assert fake.fake_mode is torch_adapter.fake_mode_of(step.graph)


def test_numbers_constants_and_shared_memory_survive() -> None:
    build = StepBuilder()
    x = build.input(torch.zeros(4, 6))
    view = build.call(aten.as_strided.default, x, [3], [7], 2)
    scaled = build.call(aten.mul.Tensor, view, -0.0)
    bounded = build.call(aten.clamp.default, scaled, float("-inf"), float("nan"))
    whole = build.call(aten.to.dtype, bounded, torch.int64)
    build.returns(build.call(aten.index.Tensor, x, [None, whole]))
    step = build.build()
    found = serialize.load(serialize.dump(step), step)
    assert str(found) == str(step)
    views = {node.name: node.meta["val"] for node in found.graph.nodes if "val" in node.meta}
    assert torch_adapter.storage_key(views[view.name]) == torch_adapter.storage_key(views[x.name])
    assert torch_adapter.storage_key(views[scaled.name]) != torch_adapter.storage_key(views[x.name])
    assert views[view.name].storage_offset() == 2
    zero = next(node for node in found.graph.nodes if node.name == scaled.name).args[1]
    assert str(zero) == "-0.0"


# ---- what finds an entry


def test_another_process_finds_it(directory: Path) -> None:
    program = (
        "import sys; sys.path[:] = {path!r}\n"
        "from test_graph_cache import *\n"
        "with knobs.override(cache_dir={directory!r}):\n"
        "    graph_cache.cached(training_step(), {make})\n"
    )

    def run(make: str, seed: str) -> subprocess.CompletedProcess[str]:
        text = program.format(path=[str(Path(__file__).parent), *sys.path], directory=str(directory), make=make)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)

    assert run("with_kernels", "1").returncode == 0
    assert len(entries(directory)) == 1
    second = run("unexpected", "2")
    assert second.returncode == 0, second.stderr


def test_the_value_of_a_learning_rate_is_none_of_its_business() -> None:
    assert len({graph_cache.entry_of(training_step(lr=lr)) for lr in (1e-2, 1e-3)}) == 1


def _moved(step: StepGraph, lines: int) -> StepGraph:
    """The same from a file of another name, in which all stands so many lines further down."""
    for meta in (node.meta for node in step.graph.nodes if "frames" in node.meta):
        meta["frames"] = tuple(f._replace(filename="edited.py", lineno=f.lineno + lines) for f in meta["frames"])
    return step


def lines_of(step: StepGraph) -> list[str]:
    """All that a graph of kernels says of the user's lines."""
    told = [format_frame(frame) for node in step.graph.nodes for frame in node.meta.get("frames", ())]
    calls = [node.target for node in step.graph.nodes if isinstance(node.target, KernelCall)]
    return [*told, *(str(origin) for call in calls for origin in call.origins)]


def test_an_edited_script_finds_the_entry_and_its_own_lines() -> None:
    first, second, third = (training_step() for _ in range(3))
    made = graph_cache.cached(first, with_kernels)
    assert lines_of(graph_cache.cached(second, unexpected)) == lines_of(made)
    found = graph_cache.cached(_moved(third, 7), unexpected)
    here = re.compile(rf"{re.escape(__file__)}:(\d+)")
    moved = [here.sub(lambda line: f"edited.py:{int(line[1]) + 7}", told) for told in lines_of(made)]
    assert any("edited.py" in told for told in moved)
    assert lines_of(found) == moved


def _other_number(step: StepGraph) -> None:
    node = next(node for node in step.graph.nodes if any(type(arg) is float for arg in node.args))
    node.args = tuple(arg + 1 if type(arg) is float else arg for arg in node.args)


def _other_role(step: StepGraph) -> None:
    roles = type(step.inputs[0].role)
    step.inputs[0] = dataclasses.replace(step.inputs[0], role=roles.BUFFER)


@pytest.mark.parametrize("change", [_other_number, _other_role])
def test_another_graph_is_another_entry(change: Callable[[StepGraph], None]) -> None:
    step = training_step()
    before = graph_cache.entry_of(step)
    change(step)
    assert graph_cache.entry_of(step) != before


def test_other_sizes_are_another_entry() -> None:
    assert len({graph_cache.entry_of(training_step(width, rows)) for width, rows in [(16, 4), (16, 5), (8, 4)]}) == 3


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (graph_cache, "_own_version", lambda rooms: "another"),
        (torch, "__version__", "9.9"),
        (graph_cache.triton_adapter, "version", lambda: "9.9"),
        (graph_cache.platform, "python_version", lambda: "9.9"),
    ],
)
def test_other_versions_are_another_entry(where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = training_step()
    before = graph_cache.entry_of(step)
    monkeypatch.setattr(where, name, value)
    assert graph_cache.entry_of(step) != before


@dataclasses.dataclass
class Gpu:
    """The properties of a GPU, shown as torch shows them."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    total_memory: int = 150_110_011_392
    multi_processor_count: int = 132
    uuid: str = "1b2f"
    pci_bus_id: int = 25


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"uuid": "77aa", "pci_bus_id": 38}, True),
        ({"multi_processor_count": 66}, False),
        ({"name": "NVIDIA H100"}, False),
        ({"total_memory": 85_520_809_984}, False),
        ({"major": 10}, False),
    ],
)
def test_another_gpu_of_the_same_kind_finds_the_entry(
    change: dict[str, Any], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, gpu = retarget(training_step()), Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    before = graph_cache.entry_of(step)
    gpu = dataclasses.replace(gpu, **change)
    assert (graph_cache.entry_of(step) == before) is same


def test_another_default_dtype_is_another_entry() -> None:
    step = training_step()
    before = graph_cache.entry_of(step)
    torch.set_default_dtype(torch.float64)
    assert graph_cache.entry_of(step) != before


def test_knobs_are_part_of_an_entry_unless_they_decide_nothing() -> None:
    step = training_step()
    before = graph_cache.entry_of(step)
    with knobs.override(disable_passes="chunk_loss"):
        assert graph_cache.entry_of(step) != before
    with knobs.override(verify=True):
        assert graph_cache.entry_of(step) == before


# ---- damage, and graphs that cannot be kept


def _checked(content: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Damage under a checksum that holds."""

    def damage(path: Path) -> None:
        tables = json.loads(path.read_bytes().partition(b"\n")[2])
        cache_folder.write_checked(path, json.dumps(content(tables)).encode())

    return damage


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"call_function", b"call_functiom", 1)),
    "of another entry": lambda path: path.write_bytes(b"0" * 64 + path.read_bytes()[64:]),
    "another meaning": _checked(lambda tables: {"nodes": tables["nodes"]}),
    "nodes out of order": _checked(lambda tables: {**tables, "nodes": tables["nodes"][::-1]}),
    "no such operation": _checked(
        lambda tables: {**tables, "table": [["op", "aten::none", ""] if e[0] == "op" else e for e in tables["table"]]}
    ),
    "code to run": _checked(
        lambda tables: {
            **tables,
            "table": [["function", "os", "system"] if e[0] == "op" else e for e in tables["table"]],
        }
    ),
    "a class of another library": _checked(
        lambda tables: {
            **tables,
            "table": [["object", "subprocess", "Popen", "ls"] if e[0] == "object" else e for e in tables["table"]],
        }
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_made_again(damage: Callable[[Path], None], directory: Path) -> None:
    first, second = training_step(), training_step()
    made = graph_cache.cached(first, with_kernels)
    (path,) = entries(directory)
    content = path.read_bytes()
    damage(path)
    assert path.read_bytes() != content
    again = graph_cache.cached(second, with_kernels)
    assert str(again) == str(made)
    assert path.read_bytes() == content
    graph_cache.cached(second, unexpected)


def test_what_only_this_process_knows_is_compiled_in_each(directory: Path) -> None:
    def hook(x: torch.Tensor) -> torch.Tensor:
        return x

    build = StepBuilder()
    x = build.input(torch.zeros(4))
    build.returns(build.call(hook, x, val=x.meta["val"]))
    step = build.build()
    assert graph_cache.cached(step, lambda given: given) is step
    assert not (directory / "graphs").exists()


# ---- many processes


def _share(step: StepGraph, wanted: str, directory: Path) -> None:
    assert str(graph_cache.cached(step, with_kernels)) == wanted
    (path,) = entries(directory)
    for _ in range(20):  # as the others read and write it
        content = cache_folder.read_checked(path)
        assert content is not None
        cache_folder.write_checked(path, content)
        assert str(graph_cache.cached(step, unexpected)) == wanted


def test_many_processes_share_an_entry(directory: Path) -> None:
    step = training_step()
    wanted = str(with_kernels(step))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_share, args=(step, wanted, directory)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
