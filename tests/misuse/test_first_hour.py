"""Mistakes of the first hour: each gives one clear error or warning, with exactly the text that is written here.

What torch's users do from habit, and what works as it is, is tested too: prints and logging in a step.
``docs/first_hour.md`` is the list of them; a test holds it to these texts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from harness import ScriptRun, run_script_on_ranks
from weft import knobs
from weft.capture.record import torch_functions

HERE = __file__
PAGE = Path(__file__).parents[2] / "docs" / "first_hour.md"


def assert_on_page(text: str) -> None:
    """The page of these mistakes has the text, with a line of ``train.py`` in place of the real one. It wraps texts."""
    text = re.sub(r"(/[\w./-]+|train)\.py:\d+", "train.py:12", text).replace(str(Path(HERE)), "train.py")
    assert " ".join(text.split()) in " ".join(PAGE.read_text().split()), text


def line_of(text: str) -> int:
    """The number of the only line of this file with ``text`` in a comment at its end."""
    (found,) = (at for at, line in enumerate(Path(HERE).read_text().splitlines(), 1) if line.endswith(f"# {text}"))
    return found


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    with weft.fake_world(4, target_device="cpu"):
        yield dist.init_device_mesh("cpu", (4,))


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[Tensor], Tensor]:
    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()  # forward
        loss.backward()
        optimizer.step()  # update
        optimizer.zero_grad()
        return loss

    return train_step


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage().removeprefix("[rank 0] ") for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_optimizer_made_before_sharding_is_warned_about(
    mesh: dist.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    weft.fully_shard(model, mesh=mesh)
    with caplog.at_level(logging.WARNING, "weft"):
        weft.compile(stepped(early, model))(torch.randn(2, 8))
    assert_on_page(warnings_of(caplog)[0])
    assert warnings_of(caplog) == [
        f"SGD.step at {HERE}:{line_of('update')} in train_step changes nothing: none of its 2 "
        "parameters has a gradient. If the optimizer was made before fully_shard, replicate or materialize, it has "
        "parameters that the model no longer has: make it after them"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "weft"):
        step = weft.compile(stepped(early, model))
        for _ in range(3):
            step(torch.randn(2, 8))
        assert step.captures == ["first call"]
        weft.compile(stepped(torch.optim.SGD(model.parameters(), lr=0.1), model))(torch.randn(2, 8))
    assert warnings_of(caplog) == []


def test_a_closure_computes_the_gradients_that_an_optimizer_has_not_at_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @weft.compile
    def train_step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    with caplog.at_level(logging.WARNING, "weft"):
        losses = [float(train_step(torch.ones(2, 8))) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3
    assert warnings_of(caplog) == []


def test_a_wrong_shape_is_one_error_with_the_users_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    step = weft.compile(stepped(torch.optim.SGD(model.parameters()), model))
    with pytest.raises(RuntimeError) as found:
        step(torch.randn(2, 7))
    with pytest.raises(RuntimeError) as eager:
        model(torch.randn(2, 7))
    assert str(found.value) == str(eager.value)
    assert_on_page(f"RuntimeError: {str(found.value).removeprefix('addmm: ')}")  # which torch 2.15 says first
    files = [Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert files == ["test_first_hour.py", "test_first_hour.py"]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    with knobs.override(full_traceback=True), pytest.raises(RuntimeError) as whole:
        step(torch.randn(2, 7))
    files = [frame.filename for frame in traceback.extract_tb(whole.value.__traceback__)]
    assert files[1].endswith("short_tracebacks.py")
    assert files[-1].endswith("linear.py")


def test_a_wrong_shape_in_a_later_call_is_one_error() -> None:
    """The step is captured with symbolic sizes first, then with numbers: the user sees the error that eager raises."""
    model = nn.Linear(8, 8)
    step = weft.compile(stepped(torch.optim.SGD(model.parameters()), model))
    step(torch.randn(2, 8))
    with pytest.raises(RuntimeError) as found:
        step(torch.randn(2, 7))
    printed = "".join(traceback.format_exception(found.value))
    assert printed.count("Traceback") == 1
    assert "(2x7 and 8x8)" in printed


def test_an_attribute_that_is_missing_in_a_step_called_by_a_coroutine() -> None:
    """As cells of a notebook call it. The error refers to no tensor that would seem to be stored."""

    async def cell() -> None:
        weft.compile(lambda x: x.drop_out(0.5))(torch.ones(2))

    with pytest.raises(AttributeError, match="no attribute 'drop_out'"):
        asyncio.run(cell())


def test_errors_of_weft_have_short_tracebacks() -> None:
    step = weft.compile(lambda x: x + 1)
    with pytest.raises(weft.WeftError) as found:
        step(torch.ones(2).to_sparse())
    assert [Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)] == [Path(HERE).name]


def shortens(function: object) -> bool:
    """Whether a function is one of ``short_tracebacks``, which calls the one that it is named after."""
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).name == "short_tracebacks.py"


OF_TORCH = {name for name in weft.__all__ if not getattr(getattr(weft, name), "__module__", "").startswith("weft.")}
# What a wrapper calls, not the user; and what takes nothing from the user.
INNER = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel", "NoParallel", "StepGraph", "WeftError"}


@pytest.mark.parametrize("name", sorted({*weft.__all__} - OF_TORCH - INNER))
def test_every_public_function_and_method_shortens_tracebacks(name: str) -> None:
    value = getattr(weft, name)
    if not isinstance(value, type):
        assert shortens(value)
        return
    methods = {name: method for name, method in vars(value).items() if inspect.isfunction(method)}
    contexts = {"no_sync"}  # fails in no way of its own
    public = {name for name in methods if not name.startswith("_") or name == "__init__"} - contexts
    assert not {name for name in public if not shortens(methods[name])}


def test_mistakes_in_arguments_show_the_users_line_alone(mesh: dist.DeviceMesh) -> None:
    for call in (
        lambda: weft.fully_shard(nn.Linear(2, 2), mesh=3),  # type: ignore[call-overload]
        lambda: weft.fully_shard(),  # type: ignore[call-overload]
        lambda: weft.TrainState(model=3),
        lambda: weft.fake_world(0).__enter__(),
        lambda: weft.fully_shard(nn.Linear(2, 2), mesh=mesh).set_requires_gradient_sync(3),  # type: ignore[operator]
        lambda: weft.fully_shard(nn.Linear(2, 2, device="meta"), mesh=mesh)(torch.ones(2)),
    ):
        for whole in (False, True):
            with knobs.override(full_traceback=whole), pytest.raises((weft.WeftError, TypeError)) as found:
                call()
            files = {Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)}
            assert (files == {Path(HERE).name}) is not whole


def test_arguments_that_a_step_does_not_take_are_the_callers_mistake() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    for call in (weft.compile(step), lambda x: weft.explain(step, x), lambda x: weft.capture(step, x)):
        with pytest.raises(TypeError) as found:
            call(torch.ones(2))  # type: ignore[call-arg]
        assert str(found.value).endswith("step() missing 1 required positional argument: 'y'")
        files = {Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)}
        assert files == {Path(HERE).name}


def test_a_method_that_tensors_do_not_have_is_said_as_in_eager() -> None:
    def step(x: Tensor) -> Tensor:
        return x.drop_out(0.5)  # type: ignore[attr-defined]

    messages = []
    for call in (step, weft.compile(step)):
        with pytest.raises(AttributeError) as found:
            call(torch.ones(2))
        messages.append(str(found.value))
    assert messages[0] == messages[1] == "'Tensor' object has no attribute 'drop_out'"
    assert {Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)} == {Path(HERE).name}


REFUSED_IN_C: list[Callable[[Tensor], object]] = [
    lambda x: x[0, 0, 0],
    lambda x: [1, 2][x],  # type: ignore[call-overload]
    lambda x: x.item(),
    lambda x: x.softmax(),  # type: ignore[call-overload]
    lambda x: torch.zeros("two"),  # type: ignore[call-overload]
    lambda x: x * int("two"),
    lambda x: x * float("two"),
    lambda x: x * max([]),
    lambda x: x * math.sqrt(-1),
    lambda x: x * math.log(-1),
    lambda x: print("%d" % "two"),  # noqa: PLE1307, UP031
    lambda x: print(f"{x:d}"),
]


@pytest.mark.parametrize("step", REFUSED_IN_C, ids=range(len(REFUSED_IN_C)))
def test_what_torch_and_python_refuse_in_c_shows_the_users_lines_alone(step: Callable[[Tensor], object]) -> None:
    """What the user called is weft's stand-in while a step is captured; the mistake is the user's."""
    with pytest.raises(Exception) as eager:  # noqa: PT011 - whatever it is
        step(torch.ones(1, 2))
    with pytest.raises(type(eager.value)) as found:
        weft.compile(step)(torch.ones(1, 2))
    files = {Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)}
    assert files == {Path(HERE).name}


def test_a_fault_in_a_capture_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_functions, "symbolic_numbers", float)  # refuses a list
    with pytest.raises(TypeError) as found:
        weft.compile(lambda x: torch.tensor(x[0].tolist()))(torch.ones(2, 2))
    assert len(traceback.extract_tb(found.value.__traceback__)) > 10


def test_what_a_step_raises_after_a_branch_is_printed_as_in_eager() -> None:
    def step(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise FloatingPointError(f"loss is {x.sum()}")
        return x

    compiled = weft.compile(step)
    compiled(torch.ones(2))
    with pytest.raises(FloatingPointError, match=r"^loss is nan$") as found:
        compiled(torch.full((2,), torch.nan))
    printed = "".join(traceback.format_exception(found.value))
    assert printed.count("Traceback") == 1


def by_percent(loss: Tensor) -> str:
    text = "loss %.3f"
    return text % loss.item()  # percent


def test_percent_with_a_number_of_the_step() -> None:
    def step(x: Tensor) -> Tensor:
        print(by_percent(x.sum()))
        return x

    with pytest.raises(weft.WeftError) as found:
        weft.compile(step)(torch.ones(2))
    assert f"at {HERE}:{line_of('percent')} in by_percent" in str(found.value)
    assert_on_page(str(found.value).splitlines()[-1])
    assert "GuardOnDataDependentSymNode" not in "".join(traceback.format_exception(found.value))
    weft.compile(lambda x: print(x.sum() % 3, x.sum().item() % 3))(torch.ones(2))  # a remainder is another number


LIMIT = (
    "weft.compile: memory_limit is '45GB' (of type str), and must be a finite number of GiB, more than 0. Pass a "
    "number of GiB, such as 45.0, or None"
)
LAUNCHER = (
    "fully_shard: mesh is None, which means all ranks, and this process has no process group. Call "
    "torch.distributed.init_process_group() in a script that torchrun starts, or pass mesh=, or plan for many ranks in "
    "one process: with weft.fake_world(8)"
)


def test_a_limit_that_is_a_text() -> None:
    with pytest.raises(weft.WeftError) as found:
        weft.compile(lambda x: x, memory_limit="45GB")  # type: ignore[call-overload]
    assert str(found.value) == LIMIT
    assert_on_page(LIMIT)


def test_no_launcher() -> None:
    with pytest.raises(weft.WeftError) as found:
        weft.fully_shard(nn.Linear(2, 2))
    assert str(found.value) == LAUNCHER
    assert_on_page(LAUNCHER)


def test_a_mesh_without_names() -> None:
    with weft.fake_world(4, target_device="cpu"):
        mesh = dist.init_device_mesh("cpu", (2, 2))
        with pytest.raises(weft.WeftError) as found:
            weft.fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert_on_page(str(found.value))
    assert str(found.value) == (
        "fully_shard cannot use mesh=DeviceMesh((2, 2), 'cpu', stride=(2, 1)): a mesh of two dimensions needs names. "
        "Create it with mesh_dim_names=('replicate', 'shard')"
    )


def test_a_module_wrapped_twice(mesh: dist.DeviceMesh) -> None:
    model = weft.fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(weft.WeftError) as found:
        weft.fully_shard(model, mesh=mesh)
    assert_on_page(str(found.value))
    assert str(found.value) == (
        "cannot apply fully_shard to a FSDPLinear: it is wrapped already. Wrap each module once: modules that need "
        "another setting first, then the one around them"
    )


def test_a_model_on_the_meta_device(mesh: dist.DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    weft.fully_shard(model, mesh=mesh)
    with pytest.raises(weft.WeftError) as found:
        weft.compile(stepped(torch.optim.SGD(model.parameters()), model))(torch.randn(2, 4))
    assert_on_page(str(found.value))
    assert str(found.value) == (
        "sharded parameters are still on the meta device: weight, bias. Call weft.materialize(model, device=...) "
        "before the first forward"
    )
    assert len(traceback.extract_tb(found.value.__traceback__)) == 2


class Run:
    """A stand-in for a run of W&B."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def log(self, values: dict[str, float]) -> None:
        self.seen.append(values["loss"])


def test_what_people_do_from_habit_works(capsys: pytest.CaptureFixture[str]) -> None:
    model, wandb = nn.Linear(4, 1), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        print(loss.item())
        print(f"{loss.item():.3f}")
        print("loss %.3f" % loss.item())  # noqa: UP031
        print(f"{loss.detach()}")
        print(loss)
        print(f"{loss}")
        wandb.log({"loss": loss.item()})
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    compiled = weft.compile(step)
    losses = [compiled(torch.ones(2, 4)).item() for _ in range(3)]
    assert wandb.seen == losses
    assert len(set(losses)) == 3
    lines = capsys.readouterr().out.splitlines()
    shapes = [torch.tensor(loss, requires_grad=True) + 0 for loss in losses]
    as_shown = [str(loss).replace("AddBackward0", "MeanBackward0") for loss in shapes]
    in_eager = [
        (str(loss), f"{loss:.3f}", f"loss {loss:.3f}", f"{torch.tensor(loss)}", shown, str(loss))
        for loss, shown in zip(losses, as_shown, strict=True)
    ]
    assert lines == [text for texts in in_eager for text in texts]


def test_a_memory_limit_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    train_step = stepped(torch.optim.SGD(model.parameters()), model)
    with caplog.at_level(logging.WARNING, "weft"):
        weft.compile(train_step, memory_limit=45)(torch.randn(2, 8))
    assert warnings_of(caplog) == [
        "train_step: memory_limit has no effect on a CPU, where ATen's kernels run as they are captured. "
        'weft.explain(train_step).scheduled("h200x8") keeps it and says what it would do on GPUs'
    ]
    assert_on_page(warnings_of(caplog)[0])


# ---- on two ranks

SCRIPT = """
import sys, torch, weft
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2,))
rank = mesh.get_rank()
model = weft.fully_shard(nn.Linear(8, 8), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@weft.compile
def train_step(x):
    loss = model(x).square().mean()
    IN_STEP
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

for step in range(3):
    IN_LOOP
    train_step(torch.ones(2, 8))
print("ends")
torch.distributed.destroy_process_group()
"""


def ranks_of(tmp_path: Path, in_step: str = "", in_loop: str = "") -> list[ScriptRun]:
    (tmp_path / "train.py").write_text(SCRIPT.replace("IN_STEP", in_step).replace("IN_LOOP", in_loop))
    return run_script_on_ranks(tmp_path / "train.py", 2)


@pytest.mark.gloo
def test_a_rank_exits_early(tmp_path: Path) -> None:
    left, gone = ranks_of(tmp_path, in_loop="if rank == 1 and step == 1: sys.exit()")
    assert (left.returncode, gone.returncode) == (1, 0)
    error = left.stderr[left.stderr.index("weft.errors.") :].strip()
    assert "rank 0 waited 16.0 s and did not hear from rank 1" in error
    assert_on_page(error)


@pytest.mark.gloo
def test_another_collective_on_one_rank(tmp_path: Path) -> None:
    runs = ranks_of(tmp_path, "if rank == 1: torch.distributed.all_reduce(loss.detach())")
    line = SCRIPT[: SCRIPT.index("IN_STEP")].count("\n") + 1
    for rank, run in enumerate(runs):
        assert run.returncode == 1
        assert "ends" not in run.stdout
        error = run.stderr[run.stderr.index("weft.errors.") :].replace(f"This is rank {rank}", "This is rank 0")
        added = [text for text in error.splitlines() if text.startswith("+ ")]
        assert [re.sub(r" at \S*/train", " at train", text) for text in added] == [
            "+ _c10d_functional::all_reduce(reduce_op=sum, group_name=world): torch.float32 [1]; forward  # at "
            f"train.py:{line} in train_step"
        ]
        for part in (error.partition("\n")[0], added[0], error.strip().splitlines()[-1]):
            assert_on_page(part)


@pytest.mark.gloo
def test_other_arithmetic_on_one_rank_is_what_eager_does(tmp_path: Path) -> None:
    in_step = "if rank == 1: loss = loss * 2"
    compiled = ranks_of(tmp_path, in_step, "print(model.weight.to_local().tolist())")
    eager = SCRIPT.replace("@weft.compile\n", "").replace("IN_STEP", in_step)
    (tmp_path / "eager.py").write_text(eager.replace("IN_LOOP", "print(model.weight.to_local().tolist())"))
    same = run_script_on_ranks(tmp_path / "eager.py", 2)
    assert [run.returncode for run in (*compiled, *same)] == [0] * 4
    assert [run.stdout for run in compiled] == [run.stdout for run in same]


def test_a_script_ends_with_one_line() -> None:
    program = inspect.cleandoc("""
        import torch, weft
        model = torch.nn.Linear(4, 4)
        weft.fully_shard(model)
        """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == f"weft.errors.NoProcessGroup: {LAUNCHER}"
