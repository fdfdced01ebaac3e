"""Compiles kernels into the cache on disk, in worker processes where there are many.

A worker is a fresh Python process that imports triton but not torch (0.15 s, a second where Python keeps no bytecode)
and never initialises CUDA. It reads one line of JSON per kernel and answers with one line, the kernel or why there is
none. It ends at the end of its input. The ranks of one host need the same kernels and share the work without a
protocol: each takes them in its own random order and skips those in the cache. Where there is no cache, each compiles
all of them.

Within :func:`kept_workers`, workers serve one build after the other. They can be started before there are kernels
(:func:`start_workers`) and compile kernels that a later :func:`build` asks for (:func:`begin`), while this process
schedules the step.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft import errors, triton_adapter
from weft.inductor.cache import kernel_cache
from weft.inductor.cache.kernel_cache import Binary, Resources
from weft.inductor.codegen.kernel_source import KernelSource

log = logging.getLogger(__name__)

MOST_WORKERS = 16  # each imports triton, which takes memory. A choice.

# Workers that are started before the number of kernels is known: a model has tens of different ones. A choice.
_EARLY_WORKERS = 8

_NAMED = 3  # kernels that the log names. A choice.

# Compiling a kernel takes about 0.07 s, starting a worker 0.2 s: fewer kernels are compiled in this process.
FEWEST_FOR_WORKERS = 5

# Loads of 16 bytes in PTX: four registers of 4 bytes, two of 8, or an asynchronous copy to shared memory.
_VECTOR_LOAD = re.compile(r"\bld\.global\S*\.(?:v4\.[bfsu]32|v2\.[bfsu]64)\b|\bcp\.async\.c[ag]\.\S+ .*?, 0x10\b")

_LOCAL_ARRAY = re.compile(r"\.local .*\b__local_depot\w*\[(\d+)\]")


def build(sources: Sequence[KernelSource], arch: int, workers: int | None = None) -> list[Binary]:
    """The compiled kernels of ``sources``, in order, from the cache or compiled now. Needs no GPU.

    Args:
        sources: the kernels; equal ones are compiled once.
        arch: GPU architecture as triton numbers them, 90 for sm_90.
        workers: number of processes that compile. Default: one less than the CPU cores, at most 16, and 0 (compile in
            this process) below five kernels where none are started.

    Raises:
        KernelCompilationFailed: triton or ptxas rejects a kernel, or a worker died.
        TritonMissing: triton is not installed.
    """
    start = time.perf_counter()
    different = list(dict.fromkeys(sources))
    with kept_workers() as pool:
        under_way = {source: future for source in different if (future := pool.take(source, arch)) is not None}
        paths = {source: kernel_cache.path_of(source, arch) for source in different if source not in under_way}
        found = {source: kernel_cache.read(path) for source, path in paths.items()}
        binaries = {source: binary for source, binary in found.items() if binary is not None}
        missing = [source for source in paths if source not in binaries]
        if workers is None:
            workers = _usable_workers()
            # Workers that are there have imported triton, which takes longer than compiling a kernel.
            workers = workers if workers > 1 and (len(missing) >= FEWEST_FOR_WORKERS or pool.started) else 0
        if workers and missing:
            pool.submit(missing, arch, workers)
            under_way |= {source: pool.take(source, arch) for source in missing}
        else:
            binaries |= {source: _compile_here(source, paths[source], arch) for source in missing}
        binaries |= {source: future.result() for source, future in under_way.items() if future is not None}
    level = logging.INFO if missing or under_way else logging.DEBUG
    compiled = under_way.keys() | set(missing)
    names = f" ({', '.join(source.name for source in compiled)})" if 0 < len(compiled) <= _NAMED else ""
    seconds = time.perf_counter() - start
    log.log(level, "%d kernels, %d compiled%s, in %.2f s", len(different), len(compiled), names, seconds)
    return [binaries[source] for source in sources]


def begin(sources: Sequence[KernelSource], arch: int) -> None:
    """Begin to compile what is not in the cache, for a later :func:`build` within the same :func:`kept_workers`. Does
    nothing elsewhere, and where no workers would be used. A kernel that fails does so in :func:`build`."""
    pool, workers = _kept.pool, _usable_workers()
    if pool is None or not compiles_ahead():
        return
    missing = [each for each in dict.fromkeys(sources) if kernel_cache.read(kernel_cache.path_of(each, arch)) is None]
    if len(missing) >= FEWEST_FOR_WORKERS:
        pool.submit(missing, arch, workers)


def compiles_ahead() -> bool:
    """Whether :func:`begin` does something: within :func:`kept_workers`, where workers would be used."""
    return _kept.pool is not None and _usable_workers() > 1


def start_workers() -> None:
    """Start workers for kernels that are yet to be generated, within :func:`kept_workers`, where cores are free."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: the ranks of a host share its cores
    workers = min((_usable_workers() + 1) // max(ranks, 1) - 1, _EARLY_WORKERS)
    if _kept.pool is not None and workers > 1:
        _kept.pool.grow(workers)


def rebuild(source: KernelSource, arch: int) -> Binary:
    """``source`` compiled now, whatever the cache holds, which holds this one afterwards. Raises as :func:`build`."""
    binary = _compiled(source, arch)
    kernel_cache.write(kernel_cache.path_of(source, arch), binary)
    return binary


# ---- one kernel


def _compile_here(source: KernelSource, path: Path, arch: int) -> Binary:
    """Compile ``source`` into ``path``, unless another process has written it meanwhile."""
    if (binary := kernel_cache.read(path)) is None:
        binary = _compiled(source, arch)
        kernel_cache.write(path, binary)
    return binary


def _compiled(source: KernelSource, arch: int) -> Binary:
    try:
        return _compile(source, arch)
    except errors.TritonMissing:
        raise
    except Exception as error:
        raise errors.KernelCompilationFailed(source.name, _reason(error), source.text) from error


def _compile(source: KernelSource, arch: int) -> Binary:
    with triton_adapter.compiling():
        compiled = triton_adapter.compile_function(
            source.function(),
            source.signature,
            source.constants,
            source.divisible,
            source.num_warps,
            source.num_stages,
            arch,
            source.registers,
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        registers, local = triton_adapter.resource_usage(Path(file.name))
    # An array in local memory (the sine of 3.6 has one, for huge arguments) is no spill; stacks are whole 8 bytes.
    arrays = sum(-(-int(size) // 8) * 8 for size in _LOCAL_ARRAY.findall(compiled.ptx))
    spills = max(local - arrays, 0)
    vector_loads = len(_VECTOR_LOAD.findall(compiled.ptx))
    resources = Resources(registers, spills, compiled.shared, vector_loads)
    return Binary(compiled.name, compiled.cubin, compiled.num_warps, resources)


def _reason(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


# ---- many kernels


def _usable_workers() -> int:
    # Linux alone can say on which processors this process may run.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # One core stays for this process, which feeds the workers.
    return min(usable - 1, MOST_WORKERS)


@dataclass(frozen=True, eq=False)
class _Task:
    """A kernel to compile for sm_<arch>, the file that gets it, and where it is waited for."""

    source: KernelSource
    arch: int
    path: Path
    future: Future[Binary]


class _Workers:
    """Processes that compile, each fed by its own thread, and the kernels that were asked for and not taken yet."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._alive = 0  # threads
        self._waiting: list[_Task] = []
        self._futures: dict[tuple[KernelSource, int], Future[Binary]] = {}
        self._change = threading.Condition()
        self._closed = False

    @property
    def started(self) -> bool:
        """Whether processes are there."""
        return self._alive > 0

    def submit(self, sources: Sequence[KernelSource], arch: int, workers: int) -> None:
        """Ask for kernels that were not asked for yet, with up to ``workers`` processes."""
        with self._change:
            new = [source for source in sources if (source, arch) not in self._futures]
            # Ranks that took the same order would compile the same kernel at the same time.
            random.Random(os.getpid()).shuffle(new)
            # Paths are found here: knobs are not the same in another thread.
            tasks = [_Task(source, arch, kernel_cache.path_of(source, arch), Future()) for source in new]
            self._futures |= {(task.source, arch): task.future for task in tasks}
            self._waiting += tasks
            self._change.notify_all()
        self.grow(min(workers, len(self._waiting)))

    def take(self, source: KernelSource, arch: int) -> Future[Binary] | None:
        """The kernel that was asked for, once."""
        with self._change:
            return self._futures.pop((source, arch), None)

    def grow(self, workers: int) -> None:
        """Have at least so many processes."""
        with self._change:
            more = [_start_worker() for _ in range(workers - self._alive)]
            self._processes += more
            self._alive += len(more)
        for worker in more:
            threading.Thread(target=self._feed, args=(worker,), daemon=True).start()

    def close(self) -> None:
        """End all processes. What was not compiled is not needed any more."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for worker in self._processes:
            worker.kill()
        for worker in self._processes:
            worker.communicate()

    def _feed(self, worker: subprocess.Popen[str]) -> None:
        while (task := self._next()) is not None:
            try:
                if (binary := kernel_cache.read(task.path)) is None:
                    binary = _compiled_by(worker, task.source, task.arch)
                    kernel_cache.write(task.path, binary)
                task.future.set_result(binary)
            except Exception as error:  # noqa: BLE001 - it is raised where the kernel is asked for
                task.future.set_exception(error)
                if worker.poll() is not None:
                    break
        with self._change:
            self._alive -= 1
            left = self._waiting if self._alive == 0 else []
            while left and not self._closed:  # nobody is left to compile them
                task, reason = left.pop(), "all compiling processes ended"
                task.future.set_exception(errors.KernelCompilationFailed(task.source.name, reason, task.source.text))

    def _next(self) -> _Task | None:
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            return None if self._closed else self._waiting.pop()


class _Kept:
    """The workers of the compilations under way in this process."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.pool: _Workers | None = None


_kept = _Kept()


@contextmanager
def kept_workers() -> Iterator[_Workers]:
    """Keeps workers from one :func:`build` to the next. They end when no thread is in such a context any more."""
    with _kept.lock:
        _kept.users += 1
        pool = _kept.pool = _kept.pool or _Workers()
    try:
        yield pool
    finally:
        with _kept.lock:
            _kept.users -= 1
            last = _kept.users == 0
            _kept.pool = None if last else pool
        if last:
            pool.close()


def _compiled_by(worker: subprocess.Popen[str], source: KernelSource, arch: int) -> Binary:
    """What a worker compiles ``source`` to."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        print(json.dumps([arch, source.to_json()]), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    reply = json.loads(answer) if answer else {"reason": f"the compiling process ended with status {worker.wait()}"}
    if "reason" in reply:
        raise errors.KernelCompilationFailed(source.name, reply["reason"], source.text)
    return kernel_cache.from_bytes(base64.b64decode(reply["kernel"]))


def _start_worker() -> subprocess.Popen[str]:
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"
    # With this variable, triton would interpret kernels in the worker, which is to compile them.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )


def work() -> None:
    """Main loop of a worker: compiles the kernel of each input line, and answers with it or the reason for a failure.
    It neither reads nor writes the cache."""
    # Standard output carries the protocol, so the output of compilers is sent to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arch, source = json.loads(line)
        try:
            binary = _compiled(KernelSource.from_json(source), arch)
            reply = {"kernel": base64.b64encode(kernel_cache.to_bytes(binary)).decode()}
        except errors.KernelCompilationFailed as error:
            reply = {"reason": error.reason}
        except errors.WeftError as error:
            reply = {"reason": str(error)}
        print(json.dumps(reply), file=answers, flush=True)
