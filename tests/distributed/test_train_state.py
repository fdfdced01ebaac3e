"""Saving and loading a training run: the same bits as without, and never a checkpoint that is not what was written."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import weft
from harness import RanksFailed, run_ranks
from weft import host_processes, rank_watch
from weft.distributed.checkpoint import manifest, writer
from weft.distributed.checkpoint.dcp import _IndexUnpickler
from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.errors import (
    CannotCheckpoint,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotLoaded,
    CheckpointNotSaved,
)

# Kills of a process that saves all the time. Each takes a tenth of a second.
KILLS = int(os.environ.get("WEFT_CHECKPOINT_KILLS", "8"))

_forkserver = multiprocessing.get_context("forkserver")  # the one that harness.py preloads


class Run:
    """A small training run: dropout, Adam, a scheduler, and numbers drawn from Python."""

    def __init__(self, seed: int, mesh: Any = None, wrapper: Any = weft.fully_shard, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.5), nn.Linear(13, 5, bias=False))
        if mesh is not None:
            wrapper(self.model[0], mesh=mesh)
            wrapper(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = weft.TrainState(**objects, **options)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.model(torch.randn(4, 7) * random.random()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path: Path) -> None:
    first = Run(0)
    first.steps(4)
    first.state.save(tmp_path, 4)  # the copy is made before this returns: training goes on while it is written
    wanted = first.steps(5)
    first.state.wait()
    second = Run(1)
    assert second.state.load(tmp_path) == 4
    assert second.steps(5) == wanted
    assert second.scheduler.state_dict() == first.scheduler.state_dict()


def test_an_empty_or_absent_folder_loads_nothing(tmp_path: Path) -> None:
    assert Run(0).state.load(tmp_path) is None
    assert Run(0).state.load(tmp_path / "absent") is None


def save_sharded(rank: int, world: int, folder: str) -> Any:
    run = Run(rank, init_device_mesh("cpu", (world,)))
    run.steps(3)
    run.state.save(folder, 3)
    wanted = run.steps(4)
    run.state.wait()
    return wanted, _whole(run.model)


def load_sharded(rank: int, world: int, folder: str) -> Any:
    run = Run(rank + 10, init_device_mesh("cpu", (world,)))
    assert run.state.load(folder) == 3
    loaded = _whole(run.model)
    return run.steps(4), _whole(run.model), loaded


def load_by_torch(rank: int, world: int, folder: str) -> Any:
    """torch's FSDP2 and its DCP read what TrainState wrote."""
    warnings.simplefilter("ignore")
    run = Run(rank + 10, init_device_mesh("cpu", (world,)), torch_fully_shard)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    torch_dcp.load(state, checkpoint_id=CheckpointFolder(folder).final(3))
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _whole(run.model), run.optimizer.state_dict()["state"][0]["step"].item()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in model.state_dict().items()}


@pytest.mark.gloo
def test_two_ranks_resume_with_the_same_bits_and_other_world_sizes_load_the_same_weights(tmp_path: Path) -> None:
    saved = run_ranks(save_sharded, 2, str(tmp_path))
    resumed = run_ranks(load_sharded, 2, str(tmp_path))
    for (wanted, weights), (found, after, _) in zip(saved, resumed, strict=True):
        assert found == wanted
        assert all(torch.equal(weights[name], after[name]) for name in weights)
    for world in (1, 3):
        for _, _, loaded in run_ranks(load_sharded, world, str(tmp_path)):
            assert all(torch.equal(value, resumed[0][2][name]) for name, value in loaded.items())
    by_torch, steps = run_ranks(load_by_torch, 2, str(tmp_path))[0]
    assert steps == 3
    assert all(torch.equal(value, resumed[0][2][name]) for name, value in by_torch.items())


def save_twice(rank: int, world: int, folder: str) -> None:
    run = Run(rank, init_device_mesh("cpu", (world,)))
    run.steps(1)
    run.state.save(folder, 1, wait=True)
    if rank == 1:
        limit = (4096, resource.RLIM_INFINITY)  # as a disk that is nearly full
        resource.prlimit(_writer_pid(), resource.RLIMIT_FSIZE, limit)
    run.steps(1)
    with pytest.raises(CheckpointNotSaved, match="rank 1"):
        run.state.save(folder, 2, wait=True)
    assert Run(5, init_device_mesh("cpu", (world,))).state.load(folder) == 1


def save_and_destroy_the_group(rank: int, world: int, folder: str) -> None:
    model = nn.Linear(4, 4)
    weft.TrainState(model=model).save(folder, step=3)
    dist.destroy_process_group()


@pytest.mark.gloo
def test_a_save_under_way_is_completed_after_the_process_group_was_destroyed(tmp_path: Path) -> None:
    run_ranks(save_and_destroy_the_group, 2, str(tmp_path))
    assert weft.TrainState(model=nn.Linear(4, 4)).load(tmp_path, strict=True) == 3


@pytest.mark.gloo
def test_a_full_disk_on_one_rank_is_named_on_all_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    run_ranks(save_twice, 2, str(tmp_path))


def wait_for_the_gone(rank: int, world: int, how: int, folder: str) -> None:
    """Rank 1 stops or dies before it saves. The others write what they hear to files."""
    rank_watch.BEAT_S, rank_watch.SLICE_S = 0.2, 0.05
    rank_watch.SILENT_S, rank_watch.EXPLAIN_S = 4.0, 3.0
    run = Run(rank, init_device_mesh("cpu", (world,)))
    run.state.save(folder, 1, wait=True)
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, (os.getpid(), host_processes.identity()))
    if rank == 1:
        os.kill(os.getpid(), how)
    if how == signal.SIGKILL and rank == 0:
        # Rank 2 finds out first, and ends. Rank 0 must not name it as well.
        while host_processes.state_of(processes[2][1], processes[0][1]) != "ended":
            time.sleep(0.1)
    run.state.save(folder, 2)
    for action in (run.state.wait, lambda: run.state.save(folder, 3), lambda: run.state.load(folder)):
        with pytest.raises((CheckpointNotSaved, CheckpointNotLoaded)) as error:
            action()
        with open(f"{folder}/heard{rank}", "a") as heard:
            print(error.value, file=heard)
    if how == signal.SIGSTOP and rank == 0:
        until = time.monotonic() + 30
        while Path(folder, "heard2").read_text().count("\n") < 3 and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(processes[1][0], signal.SIGKILL)


@pytest.mark.gloo
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_save_that_waits_for_a_rank_that_is_gone_names_it(how: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(wait_for_the_gone, 3, how, str(tmp_path), timeout=60)
    for rank in (0, 2):
        saved, again, loaded = Path(tmp_path, f"heard{rank}").read_text().splitlines()
        assert saved.startswith("step 2 was not saved to ")
        assert again.startswith("step 3 was not saved to ")
        assert loaded.startswith("nothing was loaded from ")
        said = ": rank 1 did not answer for " if how == signal.SIGSTOP else ": the process of rank 1 has ended"
        assert all(said in each for each in (saved, again, loaded))


def test_flipped_cut_and_deleted_files_are_named_with_their_tensors(tmp_path: Path) -> None:
    """200 faults: bits anywhere, cuts and deletions. Which tensors a byte belongs to is read from DCP's own index."""
    run = Run(0)
    run.steps(1)
    run.state.save(tmp_path, 1, wait=True)
    folder = CheckpointFolder(tmp_path).final(1)
    index = pickle.loads((folder / ".metadata").read_bytes())
    data = "__0_0.distcp"
    names = [*([data] * 5), ".metadata", manifest.MANIFEST]
    draw = random.Random(0)
    found = 0
    for at in range(200):
        name, kind = draw.choice(names), ("flip", "flip", "flip", "cut", "delete")[at % 5]
        path = folder / name
        before = path.read_bytes()
        byte = draw.randrange(len(before))
        hit = [  # by their place in the file, as an error names them
            key.fqn
            for key, info in sorted(index.storage_data.items(), key=lambda entry: entry[1].offset)
            if info.offset + info.length > byte and (kind != "flip" or info.offset <= byte)
        ]
        if kind == "flip":
            path.write_bytes(before[:byte] + bytes([before[byte] ^ 1 << draw.randrange(8)]) + before[byte + 1 :])
        elif kind == "cut":
            path.write_bytes(before[:byte])
        else:
            path.unlink()
        with pytest.raises(CheckpointDamaged) as error:
            run.state.load(tmp_path, strict=True)
        (damage,) = error.value.damages
        named = name in damage
        if name == data and kind != "delete":
            named &= hit[0] in damage and (kind == "cut" or len(hit) == 1)
        found += named
        path.write_bytes(before)
    assert found == 200
    assert run.state.load(tmp_path, strict=True) == 1


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(0)
    for step in (1, 2):
        run.steps(1)
        run.state.save(tmp_path, step, wait=True)
    path = CheckpointFolder(tmp_path).final(2) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert Run(1).state.load(tmp_path) == 1
    assert "__0_0.distcp has other bytes than were written" in caplog.text


def test_a_file_that_was_added_is_named(tmp_path: Path) -> None:
    run = Run(0)
    run.state.save(tmp_path, 1, wait=True)
    (CheckpointFolder(tmp_path).final(1) / "__9_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"__9_0\.distcp is not part of the checkpoint"):
        run.state.load(tmp_path)


class Touches:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", ["index", "value"])
def test_nothing_in_a_checkpoint_is_executed_even_with_a_matching_manifest(where: str, tmp_path: Path) -> None:
    run = Run(0)
    run.state.save(tmp_path / "run", 1, wait=True)
    folder = CheckpointFolder(tmp_path / "run").final(1)
    index = pickle.loads((folder / ".metadata").read_bytes())
    if where == "index":
        index.planner_data = Touches(tmp_path / "touched")
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    else:
        info = next(i for k, i in index.storage_data.items() if k.fqn.endswith("param_groups.0.lr"))
        torch.save(Touches(tmp_path / "touched"), tmp_path / "value")
        data = (folder / "__0_0.distcp").read_bytes()
        info.offset, info.length = len(data), (tmp_path / "value").stat().st_size
        (folder / "__0_0.distcp").write_bytes(data + (tmp_path / "value").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    known = manifest.read(folder)
    files = {name: manifest.describe(folder / name, ()) for name in known.files}
    manifest.write(folder, manifest.Manifest(1, 1, {}, files, known.tensors))
    with pytest.raises((CheckpointDamaged, pickle.UnpicklingError, torch_dcp.CheckpointException)):
        Run(1).state.load(tmp_path / "run")
    assert not (tmp_path / "touched").exists()


def save_forever(folder: str) -> None:
    torch.set_num_threads(1)
    weights = nn.Linear(64, 64)
    state = weft.TrainState(model=weights, keep_last=2)
    for step in range(1, 10_000):
        with torch.no_grad():
            weights.weight.fill_(step)
        state.save(folder, step)


def test_the_newest_complete_checkpoint_loads_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL at random moments of saves that follow one another: the same folder again and again."""
    draw, newest = random.Random(0), 0
    weights = nn.Linear(64, 64)
    state = weft.TrainState(model=weights)
    for at in range(KILLS):
        folder = tmp_path / str(at % 2)
        process = _forkserver.Process(target=save_forever, args=(str(folder),))
        process.start()
        until = time.monotonic() + 30
        while not CheckpointFolder(folder).newest_first() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.05)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        newest = CheckpointFolder(folder).newest_first()[0][0]
        assert state.load(folder, strict=True) == newest
        assert (weights.weight == newest).all()


def test_only_the_newest_checkpoints_stay_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    run = Run(0, keep_last=2)
    for step in (1, 2, 3, 3):
        run.state.save(tmp_path, step)
    run.state.wait()
    assert [step for step, _ in CheckpointFolder(tmp_path).newest_first()] == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000002", "step_000000003"]


def test_a_checkpoint_of_another_model_is_refused_with_names(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    weft.TrainState(model=model).save(tmp_path, 1, wait=True)
    with pytest.raises(CheckpointMismatch, match=r"model\.weight is .* \[5, 3\] here and .* \[4, 3\] there"):
        weft.TrainState(model=nn.Linear(3, 5)).load(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"it has no model\.0\.weight"):
        weft.TrainState(model=nn.Sequential(nn.Linear(3, 4))).load(tmp_path)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(CannotCheckpoint, match=r"logger: <Logger.*> \(of type Logger\) has no state_dict"):
        weft.TrainState(model=model, logger=logging.getLogger("weft"))
    with pytest.raises(CannotCheckpoint, match="optimizer: no single module"):
        weft.TrainState(model=model, optimizer=torch.optim.SGD(nn.Linear(3, 4).parameters()))
    with pytest.raises(CannotCheckpoint, match="keep_last"):
        weft.TrainState(model=model, keep_last=0)
    with pytest.raises(CannotCheckpoint, match="step"):
        weft.TrainState(model=model).save(tmp_path, -1)

    class Holder:
        def state_dict(self) -> Any:
            return {"path": Path("x")}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(CannotCheckpoint, match="holder: its state_dict"):
        weft.TrainState(model=model, holder=Holder()).save(tmp_path, 1)


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    run = Run(0)
    (tmp_path / "file").write_text("")
    run.state.save(tmp_path / "file", 1)
    with pytest.raises(CheckpointNotSaved, match="step 1 was not saved"):
        run.state.wait()
    run.state.save(tmp_path, 2, wait=True)


def test_a_writer_that_could_not_write_writes_the_next_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(0)
    run.state.save(tmp_path, 0, wait=True)
    writer = _writer_pid()
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run.state.save(tmp_path, 1)
    with pytest.raises(CheckpointNotSaved, match="rank 0: "):
        run.state.wait()
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    run.state.save(tmp_path, 2, wait=True)
    assert _writer_pid() == writer
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # that of Python 3.13
def test_an_index_may_name_its_folder(module: str) -> None:
    text = f"c{module}\nPosixPath\n(V/a/b\ntR.".encode()  # a call of the class, in the first protocol of pickle
    assert _IndexUnpickler(io.BytesIO(text)).load() == PurePosixPath("/a/b")


def test_training_goes_on_beside_slow_storage_and_saves_do_not_overlap(tmp_path: Path) -> None:
    """A writer that does nothing until the test says so: a save returns, the next one waits for it."""
    run = Run(0)
    run.state.save(tmp_path, 0, wait=True)
    os.kill(_writer_pid(), signal.SIGSTOP)
    run.state.save(tmp_path, 1)
    wanted = run.steps(2)
    second = threading.Thread(target=run.state.save, args=(tmp_path, 2))
    second.start()
    second.join(0.5)
    assert second.is_alive()
    assert [step for step, _ in CheckpointFolder(tmp_path).newest_first()] == [0]
    os.kill(_writer_pid(), signal.SIGCONT)
    second.join(60)
    run.state.wait()
    assert [step for step, _ in CheckpointFolder(tmp_path).newest_first()] == [2, 1, 0]
    (tmp_path / "step_000000002").rename(tmp_path / "newest")
    assert run.state.load(tmp_path, strict=True) == 1
    assert run.steps(2) == wanted


def _writer_pid() -> int:
    assert writer._writer is not None
    return writer._writer.pid


def test_a_writer_that_is_killed_is_an_error_with_the_cause_and_the_next_save_has_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(0)
    run.state.save(tmp_path, 1, wait=True)
    os.kill(_writer_pid(), signal.SIGSTOP)
    run.state.save(tmp_path, 2)
    killed = _writer_pid()
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(CheckpointNotSaved, match=rf"rank 0: process {killed}, .* was ended by SIGKILL"):
        run.state.wait()
    assert run.state.load(tmp_path, strict=True) == 1
    run.state.save(tmp_path, 2, wait=True)
    os.kill(_writer_pid(), signal.SIGKILL)  # between two saves: nothing is lost
    os.waitid(os.P_PID, _writer_pid(), os.WEXITED | os.WNOWAIT)
    with caplog.at_level(logging.WARNING):
        run.state.save(tmp_path, 3, wait=True)
    assert "another is started" in caplog.text
    assert run.state.load(tmp_path, strict=True) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_signals_of_a_cluster_do_not_end_a_writer(number: int, tmp_path: Path) -> None:
    run = Run(0)
    run.state.save(tmp_path, 1, wait=True)
    before = _writer_pid()
    os.kill(before, number)
    run.state.save(tmp_path, 2, wait=True)
    assert _writer_pid() == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def save_and_fork(folder: str, told: Any) -> None:
    torch.set_num_threads(1)
    weights = nn.Linear(8, 8)
    state = weft.TrainState(model=weights)
    state.save(folder, 1, wait=True)
    writer_pid = _writer_pid()
    if (fork := os.fork()) == 0:  # holds what it has inherited open
        time.sleep(60)
        os._exit(0)
    os.kill(writer_pid, signal.SIGSTOP)
    state.save(folder, 2)
    told.send((writer_pid, fork, os.readlink(f"/proc/{writer_pid}/fd/{writer._writer.memory.descriptor}")))
    time.sleep(60)


def test_a_writer_leaves_with_its_rank_and_the_memory_with_it(tmp_path: Path) -> None:
    """The rank is killed in the middle of a save, while a fork of it lives on."""
    here, there = multiprocessing.Pipe()
    rank = _forkserver.Process(target=save_and_fork, args=(str(tmp_path), there))
    rank.start()
    writer_pid, fork, memory = here.recv()
    assert memory.startswith("/memfd:weft")  # no name in a file system: it ends with those who have it open
    rank.kill()
    rank.join()
    os.kill(writer_pid, signal.SIGCONT)
    until = time.monotonic() + 30
    while Path(f"/proc/{writer_pid}/maps").exists() and _maps(writer_pid) and time.monotonic() < until:
        time.sleep(0.05)
    try:
        assert not _maps(writer_pid)
    finally:
        os.kill(fork, signal.SIGKILL)


def _maps(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def save_beside_a_killed_writer(rank: int, world: int, folder: str) -> None:
    run = Run(rank, init_device_mesh("cpu", (world,)))
    run.state.save(folder, 1, wait=True)
    if rank == 1:
        os.kill(_writer_pid(), signal.SIGSTOP)
    run.state.save(folder, 2)
    if rank == 1:
        os.kill(_writer_pid(), signal.SIGKILL)
    with pytest.raises(CheckpointNotSaved, match=r"rank 1: process .* was ended by SIGKILL"):
        run.state.wait()
    run.state.save(folder, 3, wait=True)
    assert Run(5, init_device_mesh("cpu", (world,))).state.load(folder) == 3


@pytest.mark.gloo
def test_a_killed_writer_of_one_rank_is_named_on_all(tmp_path: Path) -> None:
    run_ranks(save_beside_a_killed_writer, 2, str(tmp_path))


def save_what_only_one_rank_cannot(rank: int, world: int, folder: str) -> None:
    class Holder:
        def state_dict(self) -> Any:
            return {"path": Path("x")} if rank == 1 else {}

        def load_state_dict(self, state: Any) -> None: ...

    state = weft.TrainState(model=nn.Linear(3, 4), holder=Holder())
    with pytest.raises(CannotCheckpoint if rank == 1 else CheckpointNotSaved, match="holder: its state_dict"):
        state.save(folder, 1, wait=True)
    assert writer._last is not None
    writer._last.join(30)  # as at the end of a process


@pytest.mark.gloo
def test_a_state_that_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(save_what_only_one_rank_cannot, 2, str(tmp_path))


def test_the_manifest_says_which_graphs_the_run_had_and_scalers_are_saved(tmp_path: Path) -> None:
    model, scaler = nn.Linear(3, 4), torch.amp.GradScaler("cpu", init_scale=8.0)
    state = weft.TrainState(model=model, scaler=scaler)

    @weft.compile
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(model(x).sum())

    train_step(torch.ones(2, 3))
    state.save(tmp_path, 1, wait=True)
    graphs = manifest.read(CheckpointFolder(tmp_path).final(1)).graphs
    (digest,) = (digest for name, digest in graphs.items() if "scalers_are_saved" in name)
    assert len(digest) == 64
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    weft.TrainState(model=model, scaler=other).load(tmp_path)
    assert other.get_scale() == 8.0
    assert other.state_dict() == scaler.state_dict()


def test_a_checkpoint_needs_no_numpy(tmp_path: Path) -> None:
    # It is no requirement of torch's or weft's. The file stands for a numpy that is not installed, in the writer, too.
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError\n")
    program = """
import random, sys, torch, weft
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
step()
state = weft.TrainState(model=model, optimizer=optimizer)
state.save("checkpoints", 1)
state.wait()
saved, drawn = model.weight.tolist(), random.random()
step()
assert (state.load("checkpoints"), model.weight.tolist(), random.random()) == (1, saved, drawn)
assert not any(name.startswith("numpy") for name in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
