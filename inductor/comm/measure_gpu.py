"""What a GPU (or a CPU, for want of one) does in a second: copies, matrix products, attention."""

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
from weft.inductor.comm.cluster import Gpu, shipped_gpu
from weft.inductor.runtime.kernels import arch_of

_REPEATS = 5
_CALLS = 4
_LAUNCHES = 100
# A GPU is occupied for so many times as long as the host needs to give it what is timed, but not for longer (seconds).
_LEAD = 2.0
_MOST_LEAD = 0.1
# Seconds of products before those that are timed: a step keeps a GPU as warm, and its clock as low.
_WARM = 0.5
_HEAD_WIDTH = 128


@dataclass(frozen=True)
class Work:
    """What is timed.

    Attributes:
        copy: bytes of a tensor that is copied.
        products: (m, k, n) of matrix products [m, k] x [k, n], whose rates are averaged by their operations.
        beside: those that collectives run beside, which together are a round.
        tokens, heads: of an attention of heads of 128.
    """

    copy: int
    products: tuple[tuple[int, int, int], ...]
    beside: tuple[tuple[int, int, int], ...]
    tokens: int
    heads: int


# A layer of Llama 8B at 8192 tokens: into and out of its feed-forward, the gradient of its weight, a narrow product.
_PRODUCTS = ((8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 14336), (8192, 4096, 1024))
# The same at 2048 tokens. These take few waves of programs, so that multiprocessors which a collective holds cost them
# whole waves, as in a step; and a GPU that computes them is not held by its power alone.
_BESIDE = ((2048, 4096, 14336), (2048, 14336, 4096), (4096, 2048, 14336), (2048, 4096, 4096))
LARGE = Work(1 << 30, _PRODUCTS, _BESIDE, 8192, 32)


def measure_gpu(device: torch.device, work: Work = LARGE) -> Gpu:
    """The rates of ``device``, a GPU or the CPU; with ``LARGE`` about a second on a GPU."""
    on_gpu = device.type == "cuda"
    forward, backward = _attention(device, work)
    floating = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    rates = {name: _products(device, work, dtype, "highest") for name, dtype in floating.items()}
    if on_gpu:
        rates["tf32"] = _products(device, work, torch.float32, "high")
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


def seconds_of(run: Callable[[], object], device: torch.device, calls: int = _CALLS, *, ahead: bool = False) -> float:
    """How long ``run`` takes on ``device``: the median over a few rounds of ``calls`` calls, after one to warm up.

    Args:
        ahead: on a GPU, let the host be ahead, as it is in a step: what calls cost the host does not count then, nor
            what ranks come late to the first. The GPU rests meanwhile, and computes faster for a while.
    """
    run()
    lead = _lead(run, device, calls) if ahead and device.type == "cuda" else 0.0

    def round_() -> float:
        if lead:
            with torch.cuda.device(device):
                torch_adapter.occupy_gpu(lead)
            run()
        return elapsed(run, device, calls) / calls

    return statistics.median(round_() for _ in range(_REPEATS))


def _lead(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds in which the host has surely given all of a round."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    return min(_LEAD * (calls + 1) * (time.perf_counter() - started), _MOST_LEAD)


def elapsed(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds until ``device`` has done what ``calls`` calls of ``run`` give it; what it was given before left out."""
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
    """Bytes a second, read and written."""
    source, target = (torch.empty(work.copy, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * work.copy / seconds_of(lambda: target.copy_(source), device)


def _products(device: torch.device, work: Work, dtype: torch.dtype, precision: str) -> float:
    """Operations a second; ``precision`` is that of ``torch.set_float32_matmul_precision``."""
    operations = seconds = 0.0
    with _precision(precision):
        for m, k, n in work.products:
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
            product = lambda a=a, b=b: a @ b
            _warm(product, device)
            operations += 2 * m * k * n
            seconds += seconds_of(product, device)
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
    """Operations a second of causal attention, forward and backward, by the kernel that torch picks."""
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
    """Seconds of a kernel with next to nothing to do; on a GPU without the host, from a CUDA graph."""
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
