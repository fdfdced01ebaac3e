"""Run a function of a test file on several real processes.

    def body(rank: int, world: int, size: int) -> float:
        ...                                   # the default process group exists here

    def test_it() -> None:
        results = run_ranks(body, 2, 16)      # [what rank 0 returned, what rank 1 returned]

Processes are forked from one server (multiprocessing's `forkserver`) that has torch and weft already
imported, so a call on two ranks costs about a tenth of a second and every call starts from clean global
state: nothing that one test leaves behind (seeds, default dtypes, DTensor's caches of meshes) reaches the
next.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Once a rank has failed, the others are given this long (seconds) to fail of themselves and tell their side.
GRACE = 5.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rank_server"])


class RanksFailed(Exception):
    """One or more ranks raised, died or hung. The text holds every rank's story.

    `errors` maps each rank that raised to its exception (or, where that cannot be pickled, to a RuntimeError
    with the same text), earliest first; the earliest is also this one's `__cause__`.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RanksTimedOut(RanksFailed):
    """Not every rank was done in time. The text holds the stack of each rank that was still running."""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(rank, world, *args)` on `world` processes in one process group; results in rank order.

    `fn` is a module-level function of a test file. Arguments and results travel by pickle: plain values and
    plain tensors. `timeout` is in seconds for the whole call. `backend="nccl"` gives each rank the GPU of its
    number and skips the test where there are fewer GPUs.

    Raises RanksFailed with every rank's traceback, RanksTimedOut with every running rank's stack.
    """
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    _start_server()
    # The store's server lives here, outside the ranks, so that a rank that dies does not take it along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        job = _Job(
            file=inspect.getfile(fn),
            module=fn.__module__,
            qualname=fn.__qualname__,
            args=pickle.dumps(args),
            world=world,
            backend=backend,
            port=store.port,
            timeout=timeout,
            stacks=folder,
        )
        ranks = [_Rank.start(rank, job) for rank in range(world)]
        try:
            failed = _collect(ranks, timeout)
            return _results(ranks, failed, job)
        finally:
            for rank in ranks:
                rank.end(timeout)


@dataclass(frozen=True)
class ScriptRun:
    """How a script ended, and all that it and its threads wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_script(
    file: Path, *arguments: str, timeout: float = 170.0, variables: Mapping[str, str] | None = None
) -> ScriptRun:
    """Run `file` as `python file arguments` does, in its folder, in a process forked from the server.

    `variables` are added to its environment. This saves the seconds that importing torch and weft takes. It is not for
    tests of what an import does, nor of variables that weft reads when it is imported: the server has imported it.
    """
    _start_server()
    with tempfile.TemporaryDirectory(prefix="script") as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        process = _context.Process(target=_script_main, args=(str(file), arguments, variables or {}, *map(str, paths)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        return ScriptRun(process.exitcode, *(path.read_text() if path.exists() else "" for path in paths))


def run_script_on_ranks(
    file: Path, world: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> list[ScriptRun]:
    """Run `file` on `world` processes at once, with the environment variables that torchrun sets; in rank order.

    `variables` are added to these.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    _start_server()  # not by two threads at once: it changes this process's environment for a moment

    def run(rank: int) -> ScriptRun:
        of_rank = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        return run_script(file, *arguments, variables={**of_rank, **(variables or {})})

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def _script_main(file: str, arguments: tuple[str, ...], variables: Mapping[str, str], stdout: str, stderr: str) -> None:
    """The life of a process that runs a script: its files become the process's standard output and error."""
    for number, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(variables)
    # As in a process that Python started: `__main__` is the script, and the search path begins with its folder.
    os.chdir(Path(file).parent)
    sys.argv, sys.path[0:0] = [file, *arguments], [str(Path(file).parent)]
    module = ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)


@functools.cache
def _start_server() -> None:
    """Have the server import what it must now, so that no call's time is spent on it."""
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))  # rank_server.py takes it back
        process = _context.Process(target=int)
        process.start()
    process.join()


@dataclass(frozen=True)
class _Job:
    """What a rank is asked to do. `stacks` is the folder into which ranks write their stacks when asked."""

    file: str
    module: str
    qualname: str
    args: bytes
    world: int
    backend: str
    port: int
    timeout: float
    stacks: str

    def stack_file(self, rank: int) -> Path:
        return Path(self.stacks) / f"rank{rank}"


@dataclass
class _Rank:
    """The parent's view of one rank: its process, and once it has reported, whether it returned and what."""

    number: int
    process: BaseProcess
    connection: Connection
    reported: bool = False
    value: Any = None
    error: BaseException | None = None
    story: str = ""

    @staticmethod
    def start(number: int, job: _Job) -> _Rank:
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank_main, args=(number, job, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Rank(number, process, ours)

    def receive(self) -> None:
        """Take the rank's report; an end of file means that it died without one."""
        self.reported = True
        try:
            returned, payload, self.story = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join()
            self.story = f"died without a word, exit code {self.process.exitcode}\n"
            self.error = RuntimeError(self.story.strip())
            return
        if returned:
            self.value = pickle.loads(payload)
        else:
            self.error = pickle.loads(payload)

    def end(self, timeout: float) -> None:
        """Wait `timeout` seconds for a rank that has returned, which may complete a save at its end; kill others."""
        if self.process.is_alive() and not (self.reported and self.error is None):
            self.process.kill()
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _collect(ranks: list[_Rank], timeout: float) -> list[_Rank]:
    """Take reports until all ranks have reported or time is up; after a first failure only GRACE is left.

    Returns the ranks that failed, earliest first.
    """
    failed: list[_Rank] = []
    deadline = time.monotonic() + timeout
    while waiting := {rank.connection: rank for rank in ranks if not rank.reported}:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            rank.receive()
            if rank.error is not None:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE)
    return failed


def _results(ranks: list[_Rank], failed: list[_Rank], job: _Job) -> list[Any]:
    """The values in rank order, or the exception that tells what went wrong."""
    stuck = [rank for rank in ranks if not rank.reported]
    if not stuck and not failed:
        return [rank.value for rank in ranks]
    for rank in stuck:
        rank.story = _stack_of(rank, job)
    title = f"{job.qualname} on {job.world} ranks: {len(failed)} failed, {len(stuck)} still running"
    stories = [f"--- rank {rank.number} ---\n{rank.story}" for rank in (*failed, *stuck)]
    kind = RanksFailed if failed else RanksTimedOut
    errors = {rank.number: rank.error for rank in failed if rank.error is not None}
    raise kind("\n".join([title, *stories]), errors) from next(iter(errors.values()), None)


def _stack_of(rank: _Rank, job: _Job) -> str:
    """Ask a running rank for the stacks of all of its threads."""
    file = job.stack_file(rank.number)
    if rank.process.pid is None or not file.exists():
        return "still starting\n"
    os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while not file.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.05)
    return file.read_text() or "gave no stack\n"


def _rank_main(rank: int, job: _Job, connection: Connection) -> None:
    """The life of one rank process."""
    with open(job.stack_file(rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        try:
            value = _run(rank, job)
            report = (True, pickle.dumps(value), "")
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises is the parent's to judge
            report = (False, _pickled_error(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(report))
        connection.close()
        if dist.is_initialized() and report[0]:
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
    sys.stdout.flush()
    sys.stderr.flush()


def _run(rank: int, job: _Job) -> Any:
    torch.set_num_threads(1)
    # torch's default generator has the same fixed seed in every process; Python's and numpy's differ by run.
    random.seed(rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(job.world), LOCAL_WORLD_SIZE=str(job.world))
    if job.backend == "gloo":
        # What picks a device by looking for one must find the CPU, on a machine with GPUs too.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if job.backend == "nccl":
        # Nothing of weft uses NVLink multicast, and sharing memory refuses to go on where it may be on.
        os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
    device = torch.device("cuda", rank) if job.backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    target: Any = _load(job.file, job.module)
    for name in job.qualname.split("."):
        target = getattr(target, name)
    patience = datetime.timedelta(seconds=job.timeout)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=patience)
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=job.world, timeout=patience, device_id=device
    )
    # A rank that ends at once would close its connections while another still makes its own.
    store.set(f"harness/connected/{rank}", "")
    store.wait([f"harness/connected/{other}" for other in range(job.world)])
    return target(rank, job.world, *pickle.loads(job.args))


def _load(file: str, name: str) -> ModuleType:
    """Import the test file under the name that pytest gave it, so that its classes unpickle on both sides."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # noqa: BLE001 - an exception that cannot travel is sent as its text
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
