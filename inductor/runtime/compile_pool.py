"""Compiles kernels, in worker processes where there are many, and leaves them in the cache.

A worker is a fresh Python that imports triton and not torch (0.15 s), never touches CUDA, and reads and answers
one line a kernel. It ends when its input does. Several processes that need the same kernels (the ranks of one host)
share the work by themselves: each takes the kernels in an order of its own and skips what is in the cache by then.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path

from weft import errors, knobs, triton_adapter
from weft.inductor.runtime import kernel_cache
from weft.inductor.runtime.kernel_cache import Binary, Resources
from weft.inductor.runtime.kernel_source import KernelSource

log = logging.getLogger(__name__)

MOST_WORKERS = 16

# A kernel takes about 0.07 s and a worker 0.2 s to start: fewer are compiled here.
FEWEST_FOR_WORKERS = 5

# Loads of 16 bytes in PTX: four registers of 4 bytes, two of 8, or an asynchronous copy to shared memory.
_VECTOR_LOAD = re.compile(r"\bld\.global\S*\.(?:v4\.[bfsu]32|v2\.[bfsu]64)\b|\bcp\.async\.c[ag]\.\S+ .*?, 0x10\b")

_LOCAL_ARRAY = re.compile(r"\.local .*\b__local_depot\w*\[(\d+)\]")


def build(sources: Sequence[KernelSource], arch: int, workers: int | None = None) -> list[Binary]:
    """The compiled kernels of `sources` for sm_<arch>, in order, from the cache or compiled now. Needs no GPU.

    `workers` is how many processes compile; by default one less than there are cores, at most 16, and none (0) where
    that would not pay. Raises errors.KernelCompilationFailed, errors.CacheUnusable, errors.TritonMissing.
    """
    start = time.perf_counter()
    paths = {source: kernel_cache.path_of(source, arch) for source in sources}
    found = {source: kernel_cache.read(path) for source, path in paths.items()}
    missing = [source for source, binary in found.items() if binary is None]
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)) - 1, MOST_WORKERS)
        workers = workers if workers > 1 and len(missing) >= FEWEST_FOR_WORKERS else 0
    random.Random(os.getpid()).shuffle(missing)
    if workers:
        _compile_in_workers(missing, paths, arch, min(workers, len(missing)))
        found.update((source, kernel_cache.read(paths[source])) for source in missing)
    else:
        found.update((source, _compile_here(source, paths[source], arch)) for source in missing)
    level = logging.INFO if missing else logging.DEBUG
    log.log(level, "%d kernels, %d compiled, in %.2f s", len(paths), len(missing), time.perf_counter() - start)
    return [_present(found[source], paths[source]) for source in sources]


def _present(binary: Binary | None, path: Path) -> Binary:
    if binary is None:
        raise errors.CacheUnusable(str(path), OSError("a kernel just written there could not be read"))
    return binary


# ---- one kernel


def _compile_here(source: KernelSource, path: Path, arch: int) -> Binary:
    """Compile `source` into `path`, unless another process just did."""
    if (binary := kernel_cache.read(path)) is None:
        try:
            binary = _compile(source, arch)
        except Exception as error:
            raise errors.KernelCompilationFailed(source.name, _reason(error), source.text) from error
        kernel_cache.write(path, binary)
    return binary


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


def _compile_in_workers(sources: list[KernelSource], paths: dict[KernelSource, Path], arch: int, workers: int) -> None:
    """Have every source compiled into its path by `workers` processes, each fed by a thread of its own."""
    waiting = list(sources)
    failed: list[errors.WeftError] = []

    def feed(worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while waiting and not failed:
            try:
                source = waiting.pop()
            except IndexError:
                break
            try:
                print(json.dumps([str(paths[source]), arch, source.to_json()]), file=worker.stdin, flush=True)
                answer = worker.stdout.readline()
            except BrokenPipeError:
                answer = ""
            reason = json.loads(answer) if answer else f"the compiling process ended with status {worker.wait()}"
            if reason is not None:
                failed.append(errors.KernelCompilationFailed(source.name, reason, source.text))

    processes = [_start_worker() for _ in range(workers)]
    threads = [threading.Thread(target=feed, args=(worker,), daemon=True) for worker in processes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in processes:
            worker.kill()
        for worker in processes:
            worker.communicate()
    if failed:
        raise failed[0]


def _start_worker() -> subprocess.Popen[str]:
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        # The cache may have been chosen in Python, by knobs.override.
        "WEFT_CACHE_DIR": knobs.cache_dir,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )


def work() -> None:
    """What a worker does: for each line of its input compile one kernel, and answer null or why it could not."""
    # What compilers print goes to standard error: standard output belongs to the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        path, arch, source = json.loads(line)
        reason = None
        try:
            _compile_here(KernelSource.from_json(source), Path(path), arch)
        except errors.KernelCompilationFailed as error:
            reason = error.reason
        except errors.WeftError as error:
            reason = str(error)
        print(json.dumps(reason), file=answers, flush=True)
