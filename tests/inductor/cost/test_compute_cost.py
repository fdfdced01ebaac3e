"""Prices of nodes: operations against torch's own counter, bytes counted by hand, rates against what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_graphs import example
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

import weft
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost import gemm_shapes
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.collective_cost import UNBACKED
from weft.inductor.cost.compute_cost import ComputeCosts, is_free
from weft.inductor.cost.gemm_shapes import Gemm, GemmRates
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.multi_tensor.one_hot import OneHotSum
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.shared_scatter import SharedScatter
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes

Node = torch.fx.Node

aten = torch.ops.aten
H200 = load_cluster("h200x8").gpu
COSTS = ComputeCosts(H200)
BF16 = torch.bfloat16


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node that calls an operation on bfloat16 tensors of the sizes given, or on tensors like those given."""
    build = StepBuilder()

    def given(arg: Any) -> Any:
        if isinstance(arg, torch.Size):
            return build.input(torch.empty(arg, dtype=BF16))
        if isinstance(arg, torch.Tensor):
            return build.input(torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype))
        return [*map(given, arg)] if isinstance(arg, list) else arg

    return build.call(target, *map(given, args), **kwargs)


def size(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


def named(step: StepGraph, name: str) -> Node:
    return next(node for node in step.graph.nodes if name in str(node.target))


# ---- operations


def convolution(
    *, transposed: bool = False, groups: int = 1, stride: tuple[int, ...] = (2, 1), padding: tuple[int, ...] = (1, 0)
) -> list[Any]:
    """The arguments of a convolution behind its weight."""
    return [None, [*stride], [*padding], [1, 2], transposed, [0, 0], groups]


def backward(mask: list[bool], *, transposed: bool = False, groups: int = 1) -> list[Any]:
    _, *numbers = convolution(transposed=transposed, groups=groups)
    return [[8], *numbers, mask]


CALLS: list[Callable[[], Node]] = [
    lambda: call(aten.mm.default, size(30, 20), size(20, 50)),
    lambda: call(aten.addmm.default, size(50), size(30, 20), size(20, 50), beta=0.5),
    lambda: call(aten.bmm.default, size(7, 30, 20), size(7, 20, 50)),
    lambda: call(aten.baddbmm.default, size(7, 30, 50), size(7, 30, 20), size(7, 20, 50)),
    lambda: call(aten.convolution.default, size(2, 4, 9, 12), size(8, 4, 3, 3), *convolution()),
    lambda: call(aten.convolution.default, size(2, 4, 9, 12), size(8, 2, 3, 3), *convolution(groups=2)),
    lambda: call(aten.convolution.default, size(2, 4, 9, 12), size(4, 8, 3, 3), *convolution(transposed=True)),
    lambda: call(aten.convolution.default, size(2, 4, 9, 9), size(8, 4, 3, 3), *convolution(stride=(3,), padding=(1,))),
    *(
        lambda mask=mask: call(
            aten.convolution_backward.default, size(2, 8, 5, 8), size(2, 4, 9, 12), size(8, 4, 3, 3), *backward(mask)
        )
        for mask in ([True, True, True], [True, False, False], [False, True, False])
    ),
    lambda: call(
        aten.convolution_backward.default,
        size(2, 8, 17, 16),
        size(2, 4, 9, 12),
        size(4, 8, 3, 3),
        *backward([True, True, False], transposed=True),
    ),
]


@pytest.mark.parametrize("make", CALLS)
def test_operations_are_those_that_torch_counts(make: Callable[[], Node]) -> None:
    node = make()
    found = gemm_shapes.gemms_of(node, lambda tensor: tuple(map(int, tensor.shape)))
    assert found is not None
    vals = torch.fx.node.map_arg(node.args, lambda used: used.meta["val"])
    counted = flop_registry[node.target.overloadpacket](*vals, **node.kwargs, out_val=node.meta["val"])  # type: ignore
    assert sum(gemm.operations for gemm in found) == counted


def attention(
    heads: int, keys: int, length: int, width: int, *, causal: bool, dtype: torch.dtype = BF16, batch: int = 1
) -> list[Node]:
    """Attention and its backward."""
    one, other = (torch.empty(batch, n, length, width, dtype=dtype, device="meta") for n in (heads, keys))
    sums = torch.empty(batch, heads, length, 1, device="meta")
    seed = torch.empty((), dtype=torch.long, device="meta")
    forward = call(aten._scaled_dot_product_cudnn_attention.default, one, other, other, None, True, 0.0, causal, False)
    more = (sums, seed, seed, None, None, None, length, length, 0.0, causal)
    return [
        forward,
        call(aten._scaled_dot_product_cudnn_attention_backward.default, one, one, other, other, one, *more),
    ]


def test_attention_cost_equals_measurements() -> None:
    """114 ms for the 32 layers of Llama 8B at 8192 tokens, of which backward has five products to forward's two."""
    forward, back = (COSTS.seconds(node) for node in attention(32, 8, 8192, 128, causal=True))
    assert 32 * (forward + back) == pytest.approx(0.114, rel=0.04)
    assert back / forward == pytest.approx(2.5 * 610 / 518, rel=0.03)  # backward sums the gradients of shared heads


def working(node: Node) -> float:
    """Seconds without those of one launch."""
    return COSTS.seconds(node) - H200.launch_latency


def test_long_causal_attention_does_half_and_heads_of_keys_do_not_count() -> None:
    ratios = []
    for length in (512, 4096, 65536):
        causal, whole = (COSTS.seconds(attention(32, 8, length, 128, causal=c)[0]) for c in (True, False))
        ratios.append(whole / causal)
        for shared in (32, 1):
            assert COSTS.seconds(attention(32, shared, length, 128, causal=True)[0]) == causal
    # Blocks on the diagonal count as a whole, and programs end at different times.
    assert ratios == sorted(ratios)
    assert 1.0 <= ratios[0] < 1.6
    assert ratios[-1] == pytest.approx(2.0, rel=0.02)


def test_attention_has_the_rate_of_its_dtype_and_fills_the_gpu() -> None:
    half, single = (working(attention(32, 32, 4096, 128, causal=True, dtype=d)[0]) for d in (BF16, torch.float32))
    assert single / half == pytest.approx(H200.matmul["bfloat16"] / H200.matmul["float32"])
    few, full = (working(attention(heads, heads, 1024, 128, causal=False)[0]) for heads in (1, 33))
    assert 2 * few == pytest.approx(full)  # eight programs, and two waves


# Microseconds of cuDNN's attention on an H200 with torch 2.11, 26 November 2026, replayed in a CUDA graph: forward and
# backward of a batch of sequences, heads (of queries, of keys), tokens, width, whether it is causal.
ATTENTION_TIMES = [
    ((8, 12, 12, 1024, 64, True), 47.5, 149.0),
    ((16, 12, 12, 512, 64, False), 37.9, 124.0),
    ((64, 12, 12, 197, 64, False), 47.2, 156.8),
    ((32, 16, 16, 128, 64, True), 13.7, 55.9),
    ((1, 32, 8, 8192, 64, True), 628.9, 1685.5),
    ((8, 12, 12, 1024, 32, False), 63.0, 171.8),
    ((8, 16, 16, 512, 128, True), 32.4, 118.4),
    ((1, 32, 8, 8192, 128, False), 1639.2, 4703.2),
]


@pytest.mark.parametrize(("shape", "forward", "backward"), ATTENTION_TIMES)
def test_attention_of_narrow_heads_and_short_sequences_costs_what_was_measured(
    shape: tuple[int, int, int, int, int, bool], forward: float, backward: float
) -> None:
    batch, heads, shared, length, width, causal = shape
    nodes = attention(heads, shared, length, width, causal=causal, batch=batch)
    assert [COSTS.seconds(node) * 1e6 for node in nodes] == pytest.approx([forward, backward], rel=0.12)


# The same of the memory-efficient kernels, 29 November 2026: batch, heads, tokens, width, dtype, and the bias.
EFFICIENT_TIMES = [
    ((64, 12, 197, 64, BF16, "learnt"), 150.7, 420.1),
    ((64, 12, 197, 64, BF16, "fixed"), 151.2, 392.8),
    ((64, 12, 197, 64, BF16, "none"), 115.6, 360.9),
    ((8, 12, 1024, 64, BF16, "learnt"), 303.3, 748.5),
    ((8, 12, 2048, 128, BF16, "none"), 1211.7, 3821.6),
    ((8, 12, 512, 128, BF16, "learnt"), 115.2, 325.2),
    ((64, 12, 64, 32, BF16, "none"), 12.2, 21.1),
    ((64, 12, 257, 128, BF16, "fixed"), 365.7, 1307.5),
    ((8, 12, 1024, 64, torch.float32, "learnt"), 920.0, 2162.6),
    ((64, 12, 128, 64, torch.float32, "none"), 119.5, 282.5),
    ((64, 12, 577, 32, torch.float32, "fixed"), 2386.5, 5287.1),
]


@pytest.mark.parametrize(("shape", "forward", "backward"), EFFICIENT_TIMES)
def test_memory_efficient_attention_costs_what_was_measured(
    shape: tuple[int, int, int, int, torch.dtype, str], forward: float, backward: float
) -> None:
    batch, heads, length, width, dtype, added = shape
    one = torch.empty(batch, heads, length, width, dtype=dtype, device="meta")
    bias = torch.empty(1, heads, length, length, dtype=dtype, device="meta") if added != "none" else None
    sums, seed = torch.empty(batch, heads, length, device="meta"), torch.empty((), dtype=torch.long, device="meta")
    wanted = [True, True, True, added == "learnt"]
    nodes = [
        call(aten._scaled_dot_product_efficient_attention.default, one, one, one, bias, True, 0.0, False),
        call(
            aten._scaled_dot_product_efficient_attention_backward.default,
            *(one, one, one, one, bias, one, sums, seed, seed, 0.0, wanted, False),
        ),
    ]
    assert [COSTS.seconds(node) * 1e6 for node in nodes] == pytest.approx([forward, backward], rel=0.25)


def test_attention_on_a_cpu_is_priced_as_on_a_gpu() -> None:
    shape = size(1, 32, 4096, 128)
    on_cpu = call(aten._scaled_dot_product_flash_attention_for_cpu.default, shape, shape, shape, 0.0, True)
    assert COSTS.seconds(on_cpu) == COSTS.seconds(attention(32, 32, 4096, 128, causal=True)[0])


def test_the_backward_of_a_convolution_is_two_products() -> None:
    gradient, given, weight = size(2, 6, 5, 8), size(2, 4, 9, 12), size(6, 2, 3, 3)
    node = call(aten.convolution_backward.default, gradient, given, weight, *backward([True, True, False], groups=2))
    found = gemm_shapes.gemms_of(node, lambda tensor: tuple(map(int, tensor.shape)))
    assert found == [Gemm(2, 2 * 5 * 8, 2 * 9, 3, aligned=2), Gemm(2, 3, 2 * 9, 2 * 5 * 8, aligned=2)]


# ---- rates


def llama_products(tokens: int) -> float:
    """Seconds of the products of Llama 8B, three for each weight."""
    weights = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    shapes = [(shape, 32) for shape in weights] + [((128256, 4096), 1)]
    total = 0.0
    for (out, into), count in shapes:
        for m, n, k in ((tokens, out, into), (tokens, into, out), (out, into, tokens)):
            total += count * COSTS.seconds(call(aten.mm.default, size(m, k), size(k, n)))
    return total


def test_gemm_costs_of_a_llama_equal_measurements() -> None:
    assert llama_products(8192) == pytest.approx(0.512, rel=0.02)
    assert llama_products(2048) == pytest.approx(0.122, rel=0.10)


RATES = GemmRates(operations=7.2e14, bandwidth=4.28e12, itemsize=2, launch=2e-6, multiprocessors=132)


def seconds_of(m: int, n: int, k: int, count: int = 1) -> float:
    return gemm_shapes.seconds(Gemm(count, m, n, k), RATES)


# Microseconds of GEMMs [m, k] x [k, n] with cuBLAS on an H200 with torch 2.11, 26 November 2026, replayed in a CUDA
# graph: of bfloat16, with operands in memory and not in caches, and batches of float32.
GEMM_TIMES = [
    ((1, 8192, 3072, 768), 63.7),
    ((1, 8192, 768, 3072), 56.9),
    ((1, 768, 768, 8192), 21.5),
    ((1, 3072, 768, 4096), 29.5),
    ((1, 1024, 1024, 1024), 6.4),
    ((1, 4096, 14336, 4096), 769.8),
    ((1, 512, 2048, 8192), 26.0),
    ((128, 512, 64, 512), 22.9),
    ((96, 1024, 1024, 64), 66.6),
]
FLOAT32_GEMM_TIMES = [
    ((128, 512, 512, 64), 144.4),
    ((128, 64, 512, 512), 98.5),
    ((64, 196, 768, 384), 209.7),
    ((1, 8192, 512, 512), 90.2),
]


@pytest.mark.parametrize(("shape", "measured"), GEMM_TIMES)
def test_gemms_of_bfloat16_cost_what_was_measured(shape: tuple[int, int, int, int], measured: float) -> None:
    assert _gemm_microseconds(shape, BF16) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("shape", "measured"), FLOAT32_GEMM_TIMES)
def test_gemms_of_float32_cost_what_was_measured(shape: tuple[int, int, int, int], measured: float) -> None:
    assert _gemm_microseconds(shape, torch.float32) == pytest.approx(measured, rel=0.2)


def _gemm_microseconds(shape: tuple[int, int, int, int], dtype: torch.dtype) -> float:
    count, m, n, k = shape
    one, other = (torch.empty(count, *sides, dtype=dtype, device="meta") for sides in ((m, k), (k, n)))
    return COSTS.seconds(call(aten.bmm.default, one, other)) * 1e6


def test_rows_that_start_between_vectors_are_slow() -> None:
    """1,150 us for the gradient of GPT-2's embedding, whose rows have 50,257 elements, and 828 us for BERT's."""
    for rows, tokens, measured in ((50257, 2048, 1150), (30522, 4096, 828)):
        transposed = torch.empty(tokens, rows, dtype=BF16, device="meta").t()
        node = call(aten.mm.default, transposed, size(tokens, 768))
        assert COSTS.seconds(node) * 1e6 == pytest.approx(measured, rel=0.1)
        padded = torch.empty(tokens, -(-rows // 8) * 8, dtype=BF16, device="meta").t()
        assert COSTS.seconds(call(aten.mm.default, padded, size(tokens, 768))) < 0.4 * COSTS.seconds(node)


def test_groups_of_rows_and_of_the_contracted_dimension_are_gemms() -> None:
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    weights, rows = torch.empty(8, 1024, 7168, dtype=BF16, device="meta"), size(8192, 1024)
    shape_of = lambda tensor: tuple(map(int, tensor.shape))
    forward = call(aten._grouped_mm.default, rows, weights, offsets)
    assert gemm_shapes.gemms_of(forward, shape_of) == [Gemm(8, 1024, 7168, 1024)]
    gradient = call(aten._grouped_mm.default, torch.empty(8192, 7168, dtype=BF16).t(), rows, offsets)
    assert gemm_shapes.gemms_of(gradient, shape_of) == [Gemm(8, 7168, 1024, 1024)]
    assert COSTS.operations(forward) == COSTS.operations(gradient) == 2 * 8192 * 1024 * 7168


# Microseconds of cuDNN's convolutions of channels-last bfloat16 on an H200 (torch 2.11): forward, and the gradients of
# the input and the weights. Samples, channels, pixels along a side, window, stride.
DEPTHWISE_TIMES = [
    ((64, 128, 56, 7, 1), 187.1, 596.4),
    ((64, 512, 14, 7, 1), 62.2, 160.9),
    ((128, 672, 14, 5, 1), 72.6, 205.4),
    ((128, 144, 56, 5, 2), 109.7, 509.7),
    ((128, 144, 56, 3, 1), 102.8, 313.7),
    ((128, 480, 14, 3, 1), 24.9, 79.9),
    ((128, 96, 112, 3, 2), 140.2, 665.1),
    ((128, 672, 14, 5, 2), 41.9, 894.2),
]


def convolutions(
    images: torch.Tensor, filters: torch.Tensor, stride: int, groups: int, mask: list[bool]
) -> tuple[Node, Node]:
    """A convolution and its backward, without a bias."""
    samples, _, pixels, _ = images.shape
    side, window = (pixels - 1) // stride + 1, filters.shape[2]
    result = torch.empty(samples, filters.shape[0], side, side, dtype=BF16, device="meta")
    numbers = ([stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], groups)
    forward = call(aten.convolution.default, images, filters, None, *numbers)
    return forward, call(aten.convolution_backward.default, result, images, filters, None, *numbers, mask)


@pytest.mark.parametrize(("shape", "forward", "backward_"), DEPTHWISE_TIMES)
def test_depthwise_convolutions_cost_what_was_measured(
    shape: tuple[int, int, int, int, int], forward: float, backward_: float
) -> None:
    batch, channels, pixels, window, stride = shape
    images = torch.empty(batch, channels, pixels, pixels, dtype=BF16, device="meta")
    filters = torch.empty(channels, 1, window, window, dtype=BF16, device="meta")
    found, back = convolutions(images, filters, stride, channels, [True, True, False])
    assert COSTS.seconds(found) * 1e6 == pytest.approx(forward, rel=0.25)
    assert COSTS.seconds(back) * 1e6 == pytest.approx(backward_, rel=0.25)


@pytest.mark.parametrize(
    ("channels", "window", "forward", "backward_"),
    [(64, 7, 892.9, 571.9), (32, 3, 245.5, 263.0), (16, 3, 238.7, 258.0)],
)
def test_convolutions_of_images_cost_what_was_measured(
    channels: int, window: int, forward: float, backward_: float
) -> None:
    images = torch.empty(128, 3, 224, 224, dtype=BF16, device="meta")
    filters = torch.empty(channels, 3, window, window, dtype=BF16, device="meta")
    found, back = convolutions(images, filters, 2, 1, [False, True, False])
    assert COSTS.seconds(found) * 1e6 == pytest.approx(forward, rel=0.1)
    assert COSTS.seconds(back) * 1e6 == pytest.approx(backward_, rel=0.3)


@pytest.mark.parametrize(("sizes", "measured"), [((49, 49, 32), 116.9), ((49, 32, 49), 88.3), ((32, 49, 49), 116.9)])
def test_many_small_products_take_the_time_of_their_tiles(sizes: tuple[int, int, int], measured: float) -> None:
    """Attention of Swin's windows."""
    m, k, n = sizes
    assert batch_of(12288, m, k, n) == pytest.approx(measured, rel=0.2)


def batch_of(count: int, m: int, k: int, n: int) -> float:
    """Microseconds of a product of batches of matrices."""
    one = torch.empty(count, m, k, dtype=BF16, device="meta")
    return COSTS.seconds(call(aten.bmm.default, one, torch.empty(count, k, n, dtype=BF16, device="meta"))) * 1e6


@pytest.mark.parametrize(("count", "columns", "size", "measured"), [(38809, 12, 732, 40.6), (8192, 1, 8192, 79.7)])
def test_one_hot_sums_cost_what_was_measured(count: int, columns: int, size: int, measured: float) -> None:
    rows = torch.empty(count, columns, dtype=BF16, device="meta")
    index = torch.empty(count, dtype=torch.int64, device="meta")
    assert COSTS.seconds(call(OneHotSum(size), [rows], index, [])) * 1e6 == pytest.approx(measured, rel=0.15)


def test_scattered_sums_cost_what_was_measured() -> None:
    scores = torch.empty(96, 512, 512, dtype=BF16, device="meta")
    index = torch.empty(512, 512, dtype=torch.int64, device="meta")
    scattered = call(aten.scatter_add.default, scores, -1, index.expand(96, 512, 512), scores)
    assert COSTS.seconds(scattered) * 1e6 == pytest.approx(266, rel=0.1)
    shared = call(SharedScatter(512), [scores], index)
    assert COSTS.seconds(shared) * 1e6 == pytest.approx(113.5, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "channels", "measured"),
    [(401_407, 144, 124), (100_351, 240, 56), (1_605_631, 96, 269), (401_407, 192, 119)],
)
def test_kernels_that_read_parts_of_rows_cost_what_was_measured(rows: int, channels: int, measured: float) -> None:
    """Normalisation by channel: 144 channels are read 16 at a time where the number of rows is odd."""

    def step(x: torch.Tensor, y: torch.Tensor, *of_channels: torch.Tensor) -> torch.Tensor:
        mean, deviation, weight, bias = of_channels
        return ((x - mean) * deviation * weight + bias + y).to(torch.bfloat16)

    with weft.fake_world(1):
        batch = [torch.empty(rows, channels, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        graph = weft.capture(step, *batch, *(torch.empty(channels, device="cuda") for _ in range(4)))
        kernels = kernel_graph(run_passes(graph, KERNEL_PASSES)).graph.nodes
        found = [COSTS.seconds(node) for node in kernels if isinstance(node.target, KernelCall)]
    assert len(found) == 1
    assert found[0] * 1e6 == pytest.approx(measured, rel=0.1)


def test_a_kernel_of_one_point_takes_the_time_of_a_launch() -> None:
    with weft.fake_world(1):
        graph = weft.capture(lambda x: x * 2, torch.empty((), device="cuda"))
        kernels = kernel_graph(run_passes(graph, KERNEL_PASSES)).graph.nodes
        (found,) = [COSTS.seconds(node) for node in kernels if isinstance(node.target, KernelCall)]
    assert found == pytest.approx(H200.launch_latency, rel=1e-3)


def test_a_large_product_has_the_rate_of_large_products() -> None:
    assert seconds_of(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 7.2e14)


def test_a_product_takes_whole_waves() -> None:
    full, one_more = seconds_of(132 * 128, 256, 512), seconds_of(133 * 128, 256, 512)
    assert one_more > 1.1 * full  # smaller tiles lose less, and take more waves
    assert seconds_of(2 * 132 * 128, 256, 512) == pytest.approx(2 * full)


def test_little_to_sum_costs_more_for_each_operation() -> None:
    rates = [k / seconds_of(8192, 8192, k) for k in (64, 256, 1024, 8192)]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]


def test_few_tiles_share_the_summed_dimension() -> None:
    whole_wave = seconds_of(132 * 128, 256, 65536)
    assert seconds_of(256, 256, 65536) < 0.2 * whole_wave


@settings(max_examples=60, deadline=None)
@given(*[st.integers(1, 20_000)] * 3, st.integers(1, 64))
def test_no_product_is_faster_than_its_share_of_the_gpu(m: int, n: int, k: int, count: int) -> None:
    fastest = 7.2e14 * 1.05  # what a wave that is quite full gains over the large product
    gemm = Gemm(count, m, n, k)
    assert seconds_of(m, n, k, count) >= gemm.operations / fastest
    assert seconds_of(m + 1, n, k, count) >= 0.99 * seconds_of(m, n, k, count)


def test_a_product_is_never_faster_than_its_bytes() -> None:
    node = call(aten.mm.default, size(1, 16384), size(16384, 16384))
    moved = 2 * (16384 + 16384**2 + 16384)
    assert COSTS.seconds(node) == pytest.approx(H200.launch_latency + moved / H200.copy_bandwidth)


def test_dtypes_have_rates_of_their_own() -> None:
    def gemm(dtype: torch.dtype) -> float:
        square = torch.empty(8192, 8192, dtype=dtype, device="meta")
        return 2 * 8192**3 / (COSTS.seconds(call(aten.mm.default, square, square)) - H200.launch_latency)

    assert gemm(torch.bfloat16) == pytest.approx(H200.matmul["bfloat16"])
    assert gemm(torch.float32) == pytest.approx(H200.matmul["float32"])
    assert gemm(torch.complex64) == pytest.approx(min(H200.matmul.values()))
    images, filters = torch.empty(64, 256, 56, 56), torch.empty(256, 256, 3, 3)
    convolved = call(aten.convolution.default, images, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    rate = 2 * 64 * 56 * 56 * 256 * 256 * 9 / COSTS.seconds(convolved)
    assert H200.matmul["float32"] < 0.8 * H200.matmul["tf32"] < rate  # as torch does by default
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert gemm(torch.float32) == pytest.approx(H200.matmul["tf32"])
    finally:
        torch.set_float32_matmul_precision(before)


# ---- bytes


def moving(moved: int) -> float:
    return H200.launch_latency + moved / H200.copy_bandwidth


def test_other_operations_read_and_write() -> None:
    assert COSTS.seconds(call(aten.add.Tensor, size(64, 128), size(64, 128))) == moving(3 * 64 * 128 * 2)
    assert COSTS.seconds(call(aten.sum.dim_IntList, size(64, 128), [1])) == moving((64 * 128 + 64) * 2)


def test_expanded_operands_are_read_once() -> None:
    row = torch.empty(1, 128, device="meta").expand(64, 128)
    assert COSTS.bytes(call(aten.mul.Tensor, row, torch.empty(64, 128, device="meta"))) == (128 + 2 * 64 * 128) * 4


def test_a_table_is_read_as_far_as_rows_are_taken() -> None:
    ids = torch.empty(10, dtype=torch.long, device="meta")
    assert COSTS.bytes(call(aten.embedding.default, size(100_000, 64), ids)) == 10 * 8 + 2 * 10 * 64 * 2


def test_a_generated_kernel_moves_its_bytes() -> None:
    x = torch.empty(64, 1024)
    graph = kernel_graph(run_passes(weft.capture(lambda x: F.silu(x) * 2, x)))
    (node,) = (node for node in graph.graph.nodes if isinstance(node.target, KernelCall))
    assert COSTS.seconds(node) == moving(2 * 64 * 1024 * 4)


def test_a_generated_kernel_of_symbolic_sizes_moves_those_of_the_captured_call() -> None:
    x = torch.empty(7, 1024)
    weft.mark_dynamic(x, 0)
    graph = kernel_graph(run_passes(weft.capture(lambda x: F.silu(x) * 2, x)))
    (node,) = (node for node in graph.graph.nodes if isinstance(node.target, KernelCall))
    assert COSTS.bytes(node) == 2 * 7 * 1024 * 4


def test_a_size_that_only_the_data_decides_is_as_said() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        rows = x.sum().int().item()
        torch._check(rows >= 2)
        torch._check(rows <= 64)
        return torch.ones(rows, 8) * 2

    (node,) = weft.capture(step, torch.ones(4)).graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert COSTS.bytes(node) == 2 * UNBACKED * 8 * 4


def test_an_optimizer_reads_and_writes_lists() -> None:
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = run_passes(weft.capture(step, torch.ones(2, 64)), [fuse_optimizer])
    (node,) = (node for node in graph.graph.nodes if isinstance(node.target, MultiTensor))
    elements, counters = 64 * 32 + 32, 2
    assert COSTS.bytes(node) == pytest.approx((7 * elements + 2 * counters) * 4, rel=0.01)


# ---- what takes nothing


def test_views_and_elements_of_lists_are_free() -> None:
    step = example("gpt2")
    for name in ("view", "transpose", "getitem", "split"):
        node = named(step, f"{name}.") if name != "getitem" else named(step, name)
        assert is_free(node)
        assert COSTS.seconds(node) == 0
    assert all(is_free(node) for node in step.placeholders)


def test_a_reshape_is_free_unless_it_copies() -> None:
    x = torch.empty(4, 6, device="meta")
    assert is_free(call(aten.reshape.default, x, [6, 4]))
    assert is_free(call(aten.reshape.default, x.t(), [2, 3, 4]))
    assert COSTS.seconds(call(aten.reshape.default, x.t(), [4, 6])) == moving(2 * 4 * 6 * 4)


def test_memory_that_is_not_written_is_free() -> None:
    assert is_free(call(aten.empty.memory_format, [64], dtype=BF16))
    assert not is_free(call(aten.zeros.default, [64], dtype=BF16))


@pytest.mark.parametrize("name", ["llama", "convnet", "dlrm", "moe", "vit"])
def test_every_node_of_a_step_has_a_price(name: str) -> None:
    for node in example(name).graph.nodes:
        seconds = COSTS.seconds(node)
        assert math.isfinite(seconds)
        assert (seconds == 0) == is_free(node)
        assert is_free(node) or seconds >= H200.launch_latency
