"""Algorithms of large matrix products, measured where ``knobs.autotune`` asks for it.

cuBLAS takes the first of the algorithms that it would try. Alternatives are run in turns, several in flight, on random
numbers: what a product draws depends on them, and power holds a GPU back. One that is not faster by a hundredth is not
taken, which is how far measurements of one lie apart. Measured in turns on an H200, others compute a layer of Llama 8B
in 0.96 of the time, single products in 0.90; its steps, which power holds back, take as long as without. All ranks
compute by what rank 0 has found, so that they compute the same of the same; its knob says for all whether to measure.

Changes numerics: another algorithm may add up in another order.
"""

from __future__ import annotations

import ctypes
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from weft import knobs
from weft.capture.graph import StepGraph
from weft.errors import CacheUnusable
from weft.inductor.comm.consensus import of_first_rank
from weft.inductor.runtime import cublas_lt
from weft.inductor.runtime.autotune import fastest
from weft.inductor.runtime.cublas_lt import Product, Shape, product_of
from weft.inductor.runtime.products import shape_of

log = logging.getLogger(__name__)

Tensor = torch.Tensor

_LEAST = 10**10  # operations, some 15 us
_ROUNDS, _CALLS = 6, 2
_WORTH = 0.99
_PLAIN = ""  # the choice of cuBLAS


def tune_products(step: StepGraph, everywhere: bool) -> StepGraph:
    """Give each large product of ``step`` on a GPU the algorithm that is fastest there, in ``meta["algorithm"]``, where
    ``knobs.autotune`` asks for it.

    Changes ``step``.

    Args:
        everywhere: whether all ranks call this, for the same step: they take what rank 0 finds.
    """
    nodes = [(node, shape) for node in step.graph.nodes if (shape := shape_of(node)) and shape.operations >= _LEAST]
    shapes = dict.fromkeys(shape for _, shape in nodes)
    find = lambda: json.dumps([[_words(shape), _fastest(shape)] for shape in shapes if knobs.autotune])
    text = of_first_rank("products", find) if everywhere else find()
    found = {json.dumps(words): algorithm for words, algorithm in json.loads(text)}
    for node, shape in nodes:
        if algorithm := found.get(json.dumps(_words(shape)), _PLAIN):
            node.meta["algorithm"] = algorithm
    return step


def _words(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "dtype": str(shape.dtype)}


def _fastest(shape: Shape) -> str:
    """An algorithm in hexadecimal digits."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        product = product_of(shape, device)
        found = [algorithm.hex() for algorithm in product.algorithms()]
        about = {"gpu": torch.cuda.get_device_name(device), "cublasLt": cublas_lt.version(), "product": _words(shape)}

        def measure() -> list[float]:
            times = _milliseconds(product, found, device)
            torch.cuda.empty_cache()
            return times

        return fastest(about, [_PLAIN, *found], measure)
    except (RuntimeError, CacheUnusable) as error:  # no memory is left, say
        log.warning("cuBLAS chooses the algorithm of products of %s: %s", shape, error)
        return _PLAIN


def _milliseconds(product: Product, algorithms: list[str], device: torch.device) -> list[float]:
    """Of cuBLAS's choice, lengthened by what another has to be better by, then of the others."""
    shape = product.shape
    a, b = (_random(matrix, shape.dtype, device) for matrix in (shape.a, shape.b))
    result = torch.zeros(shape.a[0], shape.b[1], dtype=shape.dtype, device=device)
    plain = (lambda: result.addmm_(a, b)) if shape.adds else lambda: torch.mm(a, b, out=result)
    runs: list[Callable[[], Any]] = [plain]
    for algorithm in algorithms:
        words = ctypes.create_string_buffer(bytes.fromhex(algorithm), 64)
        runs.append(lambda words=words: product.run(words, a, b, result))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)] for _ in range(_ROUNDS)]
    for row in events:
        row[0].record()
        for run, event in zip(runs, row[1:], strict=True):
            for _ in range(_CALLS):
                run()
            event.record()
    torch.cuda.synchronize(device)
    # The first round warms up.
    times = [statistics.median(row[at].elapsed_time(row[at + 1]) for row in events[1:]) for at in range(len(runs))]
    return [times[0] * _WORTH / _CALLS, *(time / _CALLS for time in times[1:])]


def _random(matrix: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of a generator of their own: a step draws what it would have drawn."""
    rows, columns, *strides = matrix
    generator = torch.Generator(device).manual_seed(0)
    last = (rows - 1) * strides[0] + (columns - 1) * strides[1]
    flat = torch.randn(last + 1, dtype=dtype, device=device, generator=generator)
    flat *= 2.0**-6  # hundreds of products are added up, in float16 too
    return flat.as_strided((rows, columns), strides)
