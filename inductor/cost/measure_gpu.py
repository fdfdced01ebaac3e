"""Measure the rates of a GPU, or of the CPU if there is no GPU: copies, GEMMs, attention, launches."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft import torch_adapter
from weft.inductor.cost.cluster import Gpu, shipped_gpu
from weft.inductor.runtime.kernels import arch_of

# Timed rounds, whose median counts, and calls in each. Choices.
_REPEATS = 5
_CALLS = 4
# Launches in a call that measures one launch: 2 us are too short for events, which resolve 0.5 us.
_LAUNCHES = 100
# Before a timed round, the GPU is kept busy for _LEAD times as long as the host needs to launch the round, at most for
# _MOST_LEAD seconds.
_LEAD = 2.0
_MOST_LEAD = 0.1
# Seconds of GEMMs before those that are timed. They bring the GPU to the temperature and clock that it has in a step.
_WARM = 0.5
_HEAD_WIDTH = 128


@dataclass(frozen=True)
class Work:
    """The sizes of what is timed.

    Attributes:
        copy: bytes of the tensor that is copied.
        gemms: (m, k, n) of GEMMs [m, k] x [k, n]. The rate is that of all together.
        beside: (m, k, n) of the GEMMs that run beside collectives; together one round.
        tokens, heads: of attention with heads of width 128.
    """

    copy: int
    gemms: tuple[tuple[int, int, int], ...]
    beside: tuple[tuple[int, int, int], ...]
    tokens: int
    heads: int


# GEMMs of a layer of Llama 8B at 8,192 tokens: into and out of the feed-forward, a weight gradient, and a narrow one.
_PRODUCTS = ((8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 14336), (8192, 4096, 1024))
# The same at 2,048 tokens. These take few waves of programs, so multiprocessors that a collective occupies cost whole
# waves, as in a step. GEMMs of 8,192 rows are bound by the GPU's power instead, which hides the interference.
_BESIDE = ((2048, 4096, 14336), (2048, 14336, 4096), (4096, 2048, 14336), (2048, 4096, 4096))
LARGE = Work(1 << 30, _PRODUCTS, _BESIDE, 8192, 32)


def measure_gpu(device: torch.device, work: Work = LARGE) -> Gpu:
    """The rates of ``device``, a GPU or the CPU. With ``LARGE``, about ten seconds on a GPU, most to warm up."""
    on_gpu = device.type == "cuda"
    forward, backward = _attention(device, work)
    floating = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    rates = {name: _gemm_rate(device, work, dtype, "highest") for name, dtype in floating.items()}
    if on_gpu:
        rates["tf32"] = _gemm_rate(device, work, torch.float32, "high")
        properties = torch.cuda.get_device_properties(device)
        known = shipped_gpu(properties.name)
        name, memory = known.name if known else properties.name, properties.total_memory
        parts = properties.multi_processor_count
    else:
        name, parts = f"CPU {platform.machine()}", os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(
        name=name,
        arch=arch_of(device) if on_gpu else 0,
        memory=memory,
        copy_bandwidth=_copy(device, work),
        launch_latency=_launch(device),
        matmul=rates,
        attention_forward=forward,
        attention_backward=backward,
        multiprocessors=parts,
    )


def seconds_of(run: Callable[[], object], device: torch.device, *, ahead: bool = False) -> float:
    """Seconds of ``run`` on ``device``: the median over a few rounds of some calls, after one call to warm up.

    Args:
        ahead: on a GPU, let the host run ahead, as it does in a step. Then neither launch times on the host count, nor
            the late arrival of ranks at the first call. The GPU idles meanwhile, so its clock is higher for a while:
            do not use it for GEMMs.
    """
    run()
    lead = _lead(run, device, _CALLS) if ahead and device.type == "cuda" else 0.0

    def round_() -> float:
        # The GPU is kept busy while the host launches, so that the calls then run back to back.
        if lead:
            with torch.cuda.device(device):
                torch_adapter.occupy_gpu(lead)
            run()
        return elapsed(run, device, _CALLS) / _CALLS

    return statistics.median(round_() for _ in range(_REPEATS))


def _lead(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds in which the host has certainly launched all calls of a round."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    return min(_LEAD * (calls + 1) * (time.perf_counter() - started), _MOST_LEAD)


def elapsed(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds that ``device`` takes for ``calls`` calls of ``run``, without work that was launched before."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _copy(device: torch.device, work: Work) -> float:
    """Bytes per second of a copy, reads plus writes."""
    source, target = (torch.empty(work.copy, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * work.copy / seconds_of(lambda: target.copy_(source), device)


def _gemm_rate(device: torch.device, work: Work, dtype: torch.dtype, precision: str) -> float:
    """Operations per second of the GEMMs; ``precision`` is the argument of ``torch.set_float32_matmul_precision``."""
    operations = seconds = 0.0
    with _precision(precision):
        for m, k, n in work.gemms:
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
            gemm = lambda a=a, b=b: a @ b
            # A cold GPU runs the first GEMMs at a clock that no step has.
            _warm(gemm, device)
            operations += 2 * m * k * n
            seconds += seconds_of(gemm, device)
    return operations / seconds


def _warm(run: Callable[[], object], device: torch.device) -> None:
    until = time.perf_counter() + _WARM
    while device.type == "cuda" and time.perf_counter() < until:
        elapsed(run, device, _CALLS)


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _attention(device: torch.device, work: Work) -> tuple[float, float]:
    """Operations per second of causal attention, forward and backward, with the kernel that torch picks."""
    shape = (1, work.heads, work.tokens, _HEAD_WIDTH)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    operations = 2 * work.tokens**2 * work.heads * _HEAD_WIDTH  # two products, half of each masked

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward = seconds_of(attend, device)
    result = attend()
    grad = torch.randn_like(result)
    backward = seconds_of(lambda: torch.autograd.grad(result, (query, key, value), grad, retain_graph=True), device)
    return operations / forward, 2.5 * operations / backward


def _launch(device: torch.device) -> float:
    """Seconds of a kernel of 8 elements. On a GPU it is measured in a CUDA graph, without the time of the host."""
    value = torch.zeros(8, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            value.add_(1)

    if device.type != "cuda":
        return seconds_of(launches, device) / _LAUNCHES
    with torch.cuda.device(device):
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        return seconds_of(graph.replay, device) / _LAUNCHES
