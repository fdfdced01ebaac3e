"""Compiles kernels into the cache on disk, in worker processes where there are many.

A worker is a fresh Python process that imports triton but not torch (0.15 s) and never initialises CUDA. It reads one
line of JSON per kernel and answers with one line, the kernel or why there is none. It ends at the end of its input. The
ranks of one host need the same kernels and share the work without a protocol: each takes them in its own random order
and skips those in the cache. Where there is no cache, each compiles all of them.
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
from collections.abc import Sequence
from pathlib import Path

from weft import errors, triton_adapter
from weft.inductor.cache import kernel_cache
from weft.inductor.cache.kernel_cache import Binary, Resources
from weft.inductor.codegen.kernel_source import KernelSource

log = logging.getLogger(__name__)

MOST_WORKERS = 16  # each imports triton, which takes memory. A choice.

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
            this process) below five kernels.

    Raises:
        KernelCompilationFailed: triton or ptxas rejects a kernel, or a worker died.
        TritonMissing: triton is not installed.
    """
    start = time.perf_counter()
    paths = {source: kernel_cache.path_of(source, arch) for source in sources}
    found = {source: kernel_cache.read(path) for source, path in paths.items()}
    missing = [source for source, binary in found.items() if binary is None]
    if workers is None:
        # Linux alone can say on which processors this process may run.
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # One core stays for this process, which feeds the workers.
        workers = min(usable - 1, MOST_WORKERS)
        workers = workers if workers > 1 and len(missing) >= FEWEST_FOR_WORKERS else 0
    # Ranks that took the same order would compile the same kernel at the same time.
    random.Random(os.getpid()).shuffle(missing)
    binaries: dict[KernelSource, Binary] = {source: binary for source, binary in found.items() if binary is not None}
    if workers:
        binaries |= _compile_in_workers(missing, paths, arch, min(workers, len(missing)))
    else:
        binaries |= {source: _compile_here(source, paths[source], arch) for source in missing}
    level = logging.INFO if missing else logging.DEBUG
    log.log(level, "%d kernels, %d compiled, in %.2f s", len(paths), len(missing), time.perf_counter() - start)
    return [binaries[source] for source in sources]


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


def _compile_in_workers(
    sources: list[KernelSource], paths: dict[KernelSource, Path], arch: int, workers: int
) -> dict[KernelSource, Binary]:
    """Compile every source with ``workers`` processes, each fed by its own thread, which also writes its path."""
    waiting = list(sources)
    binaries: dict[KernelSource, Binary] = {}
    failed: list[errors.WeftError] = []

    def feed(worker: subprocess.Popen[str]) -> None:
        while waiting and not failed:
            try:
                # A list's `pop` is atomic. Another thread may have taken the last one since the test.
                source = waiting.pop()
            except IndexError:
                break
            try:
                if (binary := kernel_cache.read(paths[source])) is None:
                    binary = _compiled_by(worker, source, arch)
                    kernel_cache.write(paths[source], binary)
                binaries[source] = binary
            except errors.WeftError as error:
                failed.append(error)

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
    return binaries


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
