"""The numbers of an explanation against counts made without weft."""

from __future__ import annotations

import ast
import functools
import io
import json
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from harness import run_script_on_ranks
from weft import knobs
from weft.capture.step_interface import Role
from weft.errors import NoGeneratedKernels, NotCapturedYet, NotOnGpu, NotScheduled, UnknownOption, WeftError
from weft.explain import CollectiveCount, Explanation, HookFired, InputBytes
from weft.explain_tables import seconds_text, short_graph, shortened


class CountOperations(TorchDispatchMode):
    """Counts what reaches the dispatcher below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace != "profiler"
        return func(*args, **(kwargs or {}))


def training(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def test_operations_are_those_that_eager_dispatches() -> None:
    _, _, step = training()
    step(torch.randn(4, 8))
    with CountOperations() as eager:
        step(torch.randn(4, 8))
    explained = weft.explain(step, torch.randn(4, 8))
    # A gradient that someone else holds is detached when it becomes `.grad`; in eager nobody does.
    assert explained.operations_run == explained.operations_captured == eager.count + 4
    assert explained.nodes == sum(node.op == "call_function" for node in explained.step_graph.graph.nodes)
    assert explained.seconds > 0


def test_operations_that_run_once_are_not_captured() -> None:
    """The first step makes the state of the optimizer: the capture makes it for real, outside the graph."""
    _, _, step = training()
    first = weft.explain(step, torch.randn(4, 8))
    second = weft.explain(step, torch.randn(4, 8))
    assert first.operations_run - first.operations_captured >= 3 * 4
    assert second.operations_run == second.operations_captured == first.operations_captured


def test_inputs_by_role_with_their_bytes() -> None:
    _, _, step = training()
    explained = weft.explain(step, torch.randn(4, 8))
    parameters = 4 * (8 * 8 + 8 + 8 + 1)
    assert explained.inputs == [
        InputBytes(Role.PARAMETER, 4, parameters),
        InputBytes(Role.OPTIMIZER_STATE, 12, 2 * parameters + 4 * 4),
        InputBytes(Role.BATCH, 1, 4 * 4 * 8),
        InputBytes(Role.SCALAR, 1, 0),
    ]


def test_hooks_that_fired() -> None:
    model, _, step = training()

    def twice(x: Tensor) -> Tensor:
        return step(x) + model(x).sum()

    def on_forward(*args: Any) -> None:
        pass

    def on_gradient(gradient: Tensor) -> Tensor:
        return gradient * 2

    model[0].register_forward_hook(on_forward)
    model[2].weight.register_hook(on_gradient)
    explained = weft.explain(twice, torch.randn(4, 8))
    name = f"{test_hooks_that_fired.__name__}.<locals>"
    assert sorted(explained.hooks, key=str) == [
        HookFired("model.0", "forward", f"{name}.on_forward", 2),
        HookFired("model.2.weight", "gradient", f"{name}.on_gradient", 1),
    ]


@pytest.mark.fake
def test_collectives_are_those_that_eager_issues() -> None:
    with weft.fake_world(8, target_device="cpu"):
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 4))
        for layer in model:
            weft.fully_shard(layer, mesh=mesh)
        weft.fully_shard(model, mesh=mesh)

        def step(x: Tensor) -> None:
            model(x).sum().backward()

        with CommDebugMode() as eager:
            step(torch.randn(2, 16))
        model.zero_grad()
        explained = weft.explain(step, torch.randn(2, 16))
    counts = {str(op).rpartition(".")[2]: count for op, count in eager.get_comm_counts().items()}
    ours: dict[str, int] = {}
    for entry in explained.collective_counts:
        ours[entry.kind] = ours.get(entry.kind, 0) + entry.count
    assert ours == counts
    weights = 4 * (16 * 16 + 4 * 16 + 4)
    gathers = [entry for entry in explained.collective_counts if entry.kind == "all_gather_into_tensor"]
    per_forward = sum(entry.count for entry in gathers) // 3
    assert gathers == [CollectiveCount("all_gather_into_tensor", "shards", 3 * per_forward, weights * per_forward)]
    reduces = {(entry.kind, entry.group): (entry.count, entry.bytes) for entry in explained.collective_counts}
    assert reduces["reduce_scatter_tensor", "shards"] == (3, weights)
    assert reduces["all_reduce", "replicas"] == (3, weights // 4)


def test_sizes_and_captures() -> None:
    _, _, step = training()
    compiled = weft.compile(step)

    def with_batch(size: int) -> Any:
        compiled(torch.randn(size, 8))
        return weft.explain(compiled)

    with_batch(4)
    explained = with_batch(5)
    assert [(s.size, s.low, s.high) for s in explained.symbolic] == [("args[0].size(0)", 2, None)]
    assert explained.symbolic[0].symbol in ast.unparse(ast.parse(str(explained.step_graph)))
    assert explained.specialised == []
    assert explained.captures[0] == "first call"
    assert "[5, 8]" in explained.captures[1]
    assert len(explained.captures) == 2
    assert "size" in explained.guards_by_kind
    one = with_batch(1)
    assert one.symbolic == []
    assert [(s.size, s.value) for s in one.specialised] == [("args[0].size(0)", 1)]


def test_guards_are_listed() -> None:
    _, _, step = training()
    explained = weft.explain(step, torch.randn(4, 8))
    conditions = [guard.condition for guard in explained.guard_list]
    assert "model.0.training is True" in conditions
    assert "optimizer.param_groups[0]['weight_decay'] is 0.01" in conditions
    assert "args[0] is torch.float32 [4, 8] strides [8, 1] on cpu" in conditions
    assert not any("'lr'" in condition for condition in conditions)
    assert sum(explained.guards_by_kind.values()) == len(conditions)


def test_a_step_that_never_ran() -> None:
    model, _, step = training()
    compiled = weft.compile(step)
    with pytest.raises(NotCapturedYet, match="step was not captured yet"):
        weft.explain(compiled)
    before = [p.detach().clone() for p in model.parameters()]
    explained = weft.explain(compiled, torch.randn(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    compiled(torch.randn(4, 8))
    assert compiled.captures == explained.captures == ["first call"]


def test_opaque_calls() -> None:
    @weft.opaque
    def log_loss(loss: Tensor) -> None:
        raise AssertionError("an explanation runs nothing")

    def step(x: Tensor) -> None:
        log_loss(x.sum())

    assert weft.explain(step, torch.randn(4)).opaque_calls == ["log_loss"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_is_plain_unless_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = training()
    explained = weft.explain(step, torch.randn(4, 8))
    plain = str(explained)
    rows = [line.split() for line in str(explained.memory()).splitlines()]
    assert ["parameter", "4", "324", "B"] in rows
    assert ["batch", "1", "128", "B"] in rows
    assert "\x1b" not in plain
    assert all(ord(letter) < 128 for letter in plain)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        assert "\x1b[" in str(explained)
        patch.setenv("NO_COLOR", "1")
        assert str(explained) == plain


def test_the_program_and_the_graph() -> None:
    _, _, step = training()
    explained = weft.explain(step, torch.randn(4, 8))
    ast.parse(explained.program)
    ast.parse(str(explained.step_graph))
    assert "def run(" in explained.program


def test_kernels_that_would_run_on_a_gpu(tmp_path: Path) -> None:
    """Bytes counted by hand: the tensor, the sums that ATen makes of it, and the result."""

    def step(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * 2 + torch.cumsum(x, 0)

    explained = weft.explain(step, torch.randn(64, 1024))
    assert explained.kernel_report is None
    with knobs.override(cache_dir=str(tmp_path)):
        found = explained.on("H200").kernel_report
    assert found is not None
    (kernel,) = found.kernels
    assert kernel.count == 1
    assert kernel.operations >= 2
    assert kernel.bytes == 3 * 64 * 1024 * 4
    assert kernel.roofline_us == pytest.approx(3 * 64 * 1024 * 4 / 4.28e12 * 1e6)
    (line,) = {line.rsplit(":", 1)[0] for line in kernel.lines}
    assert line == __file__
    assert kernel.resources is not None
    assert kernel.resources.spills == 0
    assert kernel.resources.vector_loads > 0
    assert [(calls.operation, calls.why) for calls in found.calls] == [("aten.cumsum.default", "no lowering")]
    assert {"graph", "lower", "fuse", "generate", "compile"} <= set(found.seconds)
    text = str(explained.on("H200"))
    assert "1 generated, launched 1 time on H200, at least 2.00 us" in text  # that of the shortest kernel
    sections = str(explained.on("H200").kernels())
    assert "cumsum" in sections
    assert "no lowering" in sections
    with pytest.raises(NotOnGpu):
        explained.on("H200").measured()
    with pytest.raises(
        NoGeneratedKernels,
        match=r"ATen's kernels here, and no generated ones that could be timed\. Call print\(explained",
    ):
        explained.measured()
    assert str(explained.kernels()).splitlines() == [
        *('ATen runs 4 operations here; .on("H200").kernels() shows what a GPU would run', "", "operations"),
        *("operation  count", "silu           1", "mul            1", "cumsum         1", "add            1"),
    ]
    with pytest.raises(UnknownOption, match="'H200'"):
        explained.on("RTX 2000")


def test_what_runs_is_written_to_a_file(tmp_path: Path) -> None:
    explained = weft.explain(lambda x: x.exp() @ x, torch.randn(4, 4))
    explained.write(tmp_path / "aten.py")
    explained.on("H200").write(tmp_path / "kernels.py")
    assert "@triton.jit" not in (tmp_path / "aten.py").read_text()
    assert "@triton.jit" in (tmp_path / "kernels.py").read_text()
    names = runpy.run_path(str(tmp_path / "aten.py"))
    x = torch.randn(4, 4)
    assert torch.equal(names["run"]([x])[0], x.exp() @ x)
    head, _, text = (tmp_path / "aten.py").read_text().partition("\n")
    assert head.endswith('Runs on a CPU with torch."""')
    assert "import triton" not in text
    assert (
        '"""A step compiled by weft: 1 kernel, 1 other call. Runs on a GPU with torch and triton."""'
        in (tmp_path / "kernels.py").read_text()
    )
    run = subprocess.run([sys.executable, str(tmp_path / "kernels.py")], capture_output=True, text=True)
    assert (
        torch.cuda.is_available() or run.stderr == f"{tmp_path}/kernels.py runs on a GPU, and torch finds none here\n"
    )


def test_the_schedule_that_a_step_would_have_on_a_cluster(tmp_path: Path) -> None:
    with weft.fake_world(8):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        weft.fully_shard(model, mesh=init_device_mesh("cuda", (8,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        explained = weft.explain(step, torch.zeros(64, 512))
        with pytest.raises(NotScheduled):
            explained.write_trace(tmp_path / "trace.json")
        found = explained.scheduled("h200x8")
    assert found.schedule is not None
    assert "exposed" in str(found)
    assert {bucket.kind for bucket in found.schedule.reports} == {"all_gather", "reduce_scatter"}
    found.write_trace(tmp_path / "trace.json")
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def sharded_step(
    world: int, file: Path | None = None, width: int = 6, rank: int = 0
) -> tuple[Explanation, Explanation]:
    """An explanation of a small FSDP step on CPUs with a memory limit, plain and scheduled; ``file`` gets the step."""
    with weft.fake_world(world, rank=rank, target_device="cpu"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards"))
        for layer in model:
            weft.fully_shard(layer, mesh=mesh)
        weft.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        @weft.compile(memory_limit=45)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        explained = weft.explain(step, torch.zeros(2, width))
        if file is not None:
            explained.write(file)
        return explained, explained.scheduled("H200")


@torch.library.custom_op("test_explain::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def test_a_written_step_leaves_logging_out_and_says_what_it_needs(tmp_path: Path) -> None:
    """Logging gives a step nothing, so the file runs without it. It cannot register the user's operations."""
    written = tmp_path / "step.py"

    @weft.compile
    def step(x: Tensor) -> Tensor:
        loss = nn.functional.dropout(x, 0.5).square().mean()
        weft.log("loss", loss)
        print(loss)
        if loss.item() < 0:
            raise ValueError
        return loss + random.random()

    weft.explain(step, torch.randn(4)).write(written)
    run = subprocess.run([sys.executable, str(written)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    head = written.read_text().partition("from __future__")[0]
    assert "Calls of opaque functions are left out: weft_log, print." in head
    assert "It follows one way of each branch on a value." in head
    assert "needs" not in head

    weft.explain(lambda x: scaled(x, 2.0), torch.randn(4)).write(written)
    head = written.read_text().partition("from __future__")[0]
    assert "Import what registers these operations before running it: test_explain::scaled." in head
    names = runpy.run_path(str(written))  # this process has registered it
    assert torch.equal(names["run"]([torch.ones(4)])[0], torch.full((4,), 2.0))


@pytest.mark.gloo
def test_a_written_step_that_communicates_runs_under_torchrun(tmp_path: Path) -> None:
    sharded_step(2, tmp_path / "step.py")
    assert "torchrun --nproc-per-node 2" in (tmp_path / "step.py").read_text().partition("import")[0]
    alone = subprocess.run([sys.executable, str(tmp_path / "step.py")], capture_output=True, text=True)
    assert alone.stderr.strip().endswith("step.py communicates: run it with torchrun --nproc-per-node 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*command, str(tmp_path / "step.py")], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr


@pytest.mark.gloo
def test_a_written_step_of_uneven_shards_runs(tmp_path: Path) -> None:
    """Rank 1 has 3 rows of 4."""
    sharded_step(2, tmp_path / "step.py", 7, 1)
    for run in run_script_on_ranks(tmp_path / "step.py", 2):
        assert run.returncode == 0, run.stderr


@pytest.mark.fake
def test_text_fits_80_columns_and_repeated_layers_have_one_row() -> None:
    explained, scheduled = sharded_step(4)
    found = [explained, explained.graph(), explained.guards(), explained.memory(), explained.collectives()]
    found += [scheduled, scheduled.collectives(), scheduled.memory()]
    for text in map(str, found):
        assert max(map(len, text.splitlines())) <= 80
        assert not re.search(r"(?<!\d)0\.0+ ", text)
    assert "rank 0 of 4" in str(explained)
    assert re.search(r"model\.\* x[2345]", str(explained.graph()))
    assert "limit 45.0 GiB" in str(scheduled)  # that of the compiled step is kept
    assert "<pre" in explained._repr_html_()
    assert "predicted" in str(scheduled.summary())


def test_the_table_of_the_graph_breaks_no_name() -> None:
    """Names of attention's operations are longer than their column, which is as narrow as it gets here."""
    outer, inner = "a_module_with_a_name_of_forty_letters", "another_with_a_name_of_forty_letters"
    model = nn.ModuleDict({outer: nn.ModuleDict({inner: nn.Linear(8, 8)})})

    def step(x: Tensor) -> Tensor:
        heads = model[outer][inner](x).view(1, 2, 2, 4)
        loss = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        loss.sum().backward()
        return loss

    explained = weft.explain(step, torch.randn(2, 8))
    _, head, *rows = str(explained.graph()).splitlines()
    words = {word for row in rows for word in row[head.index("operations") :].replace(",", "").split()}
    names = {name for part in short_graph(explained.step_graph) for name in part.operations}
    assert max(map(len, names)) > 40
    assert {word for word in words if not word.isdigit()} <= {shortened(name, 22) for name in names} | {"more"}


def test_what_is_printed_adds_up_and_reads() -> None:
    _, _, step = training()
    explained = weft.explain(step, torch.randn(4, 8))
    text = str(explained.graph())
    rows = [re.search(r"(?: x(\d+))? +(\d+)  \d+ \w", line) for line in text.splitlines()[2:]]
    assert sum(int(row[1] or 1) * int(row[2]) for row in rows if row) == explained.nodes
    assert text.startswith(f"{explained.nodes} operations;")
    assert str(explained).startswith(f"step: {explained.nodes} operations")
    on_gpu = explained.on("H200")
    wrong = r"(?<![\d.])0(\.\d+)? us|<1 ns|\b1 (operation|time|kernel|call|condition|other)s\b"
    for printed in map(str, (on_gpu, on_gpu.kernels())):
        assert not re.search(wrong, printed), printed
    _, scheduled = sharded_step(4)
    assert re.search(r"\d+ all-gathers over \w+, [\d.]+ \wiB\s+together", str(scheduled))


def test_a_notebook_gets_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich shows what it prints in a notebook by itself."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("shown twice"))
    explained = weft.explain(lambda x: x.exp(), torch.randn(4, 4))
    for shown in (explained, explained.graph(), explained.guards()):
        assert shown._repr_html_().startswith("<pre")
        assert "\x1b" not in str(shown)


def test_the_names_of_gpus_and_clusters_are_the_same() -> None:
    explained = weft.explain(lambda x: x.exp(), torch.randn(4, 4))
    kernels = [str(explained.on(name).kernels()).partition("compiling")[0].rstrip() for name in ("H200", "h200x8")]
    assert kernels[0] == kernels[1]  # but for how long compiling took
    assert "H200" in str(explained.on("h200x8"))


def test_a_step_on_a_cpu_is_scheduled_without_a_fake_world(tmp_path: Path) -> None:
    """What the warning about memory_limit tells people to call."""
    _, _, step = training()
    scheduled = weft.explain(step, torch.randn(4, 8)).scheduled("h200x8")
    assert "predicted" in str(scheduled)
    limited = weft.explain(step, torch.randn(4, 8)).scheduled("h200x8", memory_limit=40)
    for printed in (limited, limited.memory()):
        assert re.search(r"predicted\b.*, limit 40\.0 GiB", str(printed))
    scheduled.write_trace(tmp_path / "step.json")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step(torch.randn(4, 8))
    with pytest.raises(WeftError, match=r"ProfilerActivity\.CUDA"):
        scheduled.write_trace(tmp_path / "step.json", recorded)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.50 s"), (0.110227, "110 ms"), (12.34e-6, "12.3 us"), (4e-7, "400 ns"), (2e-10, "<1 ns"), (0.0, "0")],
)
def test_units_are_those_in_which_a_number_reads(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


class Methods:
    def method(self, x: Tensor) -> Tensor:
        return x + 1

    def __call__(self, x: Tensor) -> Tensor:
        return x + 2


@pytest.mark.parametrize("kind", ["method", "object", "lambda", "partial", "exec"])
def test_a_compiled_step_says_where_it_was_written(kind: str) -> None:
    steps: dict[str, Any] = {
        "method": Methods().method,
        "object": Methods(),
        "lambda": lambda x: x + 3,
        "partial": functools.partial(Methods.method, None),
    }
    exec(compile("def written(x):\n    return x + 4", "<string>", "exec"), steps)
    written = {
        "method": f"{__file__}:{Methods.method.__code__.co_firstlineno}",
        "object": f"{__file__}:{Methods.__call__.__code__.co_firstlineno}",
        "lambda": f"{__file__}:{steps['lambda'].__code__.co_firstlineno}",
        "partial": f"{__file__}:{Methods.method.__code__.co_firstlineno}",
        "exec": "<string>:1",
    }
    compiled = weft.compile(steps["written" if kind == "exec" else kind])
    assert f"defined at {written[kind]}," in repr(compiled)
    compiled(torch.ones(2))
    nodes = compiled.entries[0].captured.graph.graph.nodes
    (frame,) = {node.meta["frames"][0] for node in nodes if node.op == "call_function"}
    file, _, line = written[kind].rpartition(":")
    assert frame.filename == file
    assert frame.lineno in (int(line), int(line) + 1)


def test_a_compiled_step_says_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    _, _, step = training()
    compiled = weft.compile(step, memory_limit=45)
    line = step.__code__.co_firstlineno
    head = f"<weft.CompiledStep step: defined at {__file__}:{line}, mode default"
    assert repr(compiled) == f"{head}, captures none yet: it was not called>"
    compiled(torch.randn(4, 8))
    compiled(torch.randn(4, 8))
    nodes = weft.explain(compiled).nodes
    assert repr(compiled) == f"{head}, captures 1, 1 form kept, operations {nodes}, kernels ATen's, collectives 0>"
    assert f"<td style='text-align:left'>{nodes}</td>" in compiled._repr_html_()
    (said,) = [record.getMessage() for record in caplog.records if "memory_limit" in record.getMessage()]
    assert said == (
        "step: memory_limit has no effect on a CPU, where ATen's kernels run as they are captured. "
        'weft.explain(step).scheduled("h200x8") keeps it and says what it would do on GPUs'
    )
