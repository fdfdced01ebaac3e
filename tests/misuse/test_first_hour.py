"""Mistakes of the first hour: each gives one clear error or warning, with exactly the text that is written here.

What torch's users do from habit, and what works as it is, is tested too: prints and logging in a step.
"""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft import knobs

HERE = __file__


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


def test_a_wrong_shape_is_one_error_with_the_users_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    step = weft.compile(stepped(torch.optim.SGD(model.parameters()), model))
    with pytest.raises(RuntimeError) as found:
        step(torch.randn(2, 7))
    where = f"{HERE}:{line_of('forward')} in train_step"
    assert str(found.value) == "a and b must have same reduction dim, but got [2, 7] X [8, 8]."
    assert found.value.__notes__ == [f"while capturing aten.addmm.default at {where}"]
    files = [Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert files == ["test_first_hour.py", "test_first_hour.py"]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    with knobs.override(full_traceback=True), pytest.raises(RuntimeError) as whole:
        step(torch.randn(2, 7))
    assert len(traceback.extract_tb(whole.value.__traceback__)) > 10


def test_errors_of_weft_have_short_tracebacks() -> None:
    step = weft.compile(lambda x: x + 1)
    with pytest.raises(weft.WeftError) as found:
        step(torch.ones(2).to_sparse())
    assert [Path(frame.filename).name for frame in traceback.extract_tb(found.value.__traceback__)] == [Path(HERE).name]


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


def test_no_launcher() -> None:
    with pytest.raises(weft.WeftError) as found:
        weft.fully_shard(nn.Linear(2, 2))
    assert str(found.value) == LAUNCHER


def test_a_mesh_without_names() -> None:
    with weft.fake_world(4, target_device="cpu"):
        mesh = dist.init_device_mesh("cpu", (2, 2))
        with pytest.raises(weft.WeftError) as found:
            weft.fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert str(found.value) == (
        "fully_shard cannot use mesh=DeviceMesh((2, 2), 'cpu', stride=(2, 1)): a mesh of two dimensions needs names. "
        "Create it with mesh_dim_names=('replicate', 'shard')"
    )


def test_a_module_wrapped_twice(mesh: dist.DeviceMesh) -> None:
    model = weft.fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(weft.WeftError) as found:
        weft.fully_shard(model, mesh=mesh)
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
        print(f"{loss.detach()}")
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
    in_eager = [(str(loss), f"{loss:.3f}", f"{torch.tensor(loss)}") for loss in losses]
    assert lines == [text for texts in in_eager for text in texts]


def test_a_script_ends_with_one_line() -> None:
    program = inspect.cleandoc("""
        import torch, weft
        model = torch.nn.Linear(4, 4)
        weft.fully_shard(model)
        """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == f"weft.errors.NoProcessGroup: {LAUNCHER}"
