"""Generated kernels compiled for sm_90 as a GPU would run them: what they need, and how they reach memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nests import (
    column_sum,
    cross_entropy,
    dropout_add,
    gelu_backward_and_sum,
    layer_norm_backward,
    layer_norm_backward_past_a_residual,
    load,
    op,
    rms_norm,
    rms_norm_backward_past_a_residual,
    rope,
    softmax,
    swiglu,
    transpose,
)

from weft import knobs, triton_adapter
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.loop_ir.ir import Call, Load, Nest, Reduce
from weft.inductor.runtime import compile_pool

bf16, f32, i64 = torch.bfloat16, torch.float32, torch.int64

# A multiprocessor's registers, and what one program may have of its memory.
REGISTERS, SHARED = 65536, 227 * 1024

# Nest, buffers that are not bfloat16, loads of 16 bytes in the text of the compiled kernel.
KERNELS = {
    "rms_norm_768": (rms_norm(4096, 768), {"scale": f32}, 2),
    "rms_norm_4096": (rms_norm(4096, 4096), {"scale": f32}, 4),
    "rms_norm_16384": (rms_norm(4096, 16384), {"scale": f32}, 8),
    "softmax_4096": (softmax(8192, 4096), {"lse": f32}, 2),
    "softmax_online": (softmax(8192, 128256), {"lse": f32}, 2),
    "cross_entropy": (cross_entropy(8192, 128256), {"loss": f32, "label": i64}, 2),
    "swiglu": (swiglu(8192, 8192), {}, 2),
    "swiglu_float32": (swiglu(8192, 8192), {"gate": f32, "up": f32, "y": f32}, 4),
    "rope": (rope(4096, 32, 128), {}, 6),
    "transpose": (transpose(16, 1024, 4096), {}, 2),
    "column_sum": (column_sum(64, 128, 4096), {"y": f32}, 8),
    "column_sum_finish": (column_sum(1, 264, 4096), {"x": f32}, 8),
    "layer_norm_backward_768": (layer_norm_backward(264, 16, 768), dict.fromkeys(["mean", "rstd", "dw", "db"], f32), 5),
    "layer_norm_backward_4096": (
        layer_norm_backward(264, 16, 4096),
        dict.fromkeys(["mean", "rstd", "dw", "db"], f32),
        6,
    ),
    "layer_norm_backward_8192": (
        layer_norm_backward(264, 16, 8192),
        dict.fromkeys(["mean", "rstd", "dw", "db"], f32),
        8,
    ),
    "dropout_add": (dropout_add(8192, 4096), {"seed": i64}, 2),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    with knobs.override(cache_dir=str(tmp_path)):
        yield


def compiled(nest: Nest, other: dict[str, torch.dtype]) -> tuple[compile_pool.Binary, int]:
    """The kernel of a nest over bfloat16 (or ``other``) buffers, and its number of threads."""
    names = {load.buffer for load in nest.reads} | set(nest.writes)
    source = generate(nest, {name: other.get(name, bf16) for name in names}).source
    return compile_pool.build([source], 90, workers=0)[0], source.num_warps * 32


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_and_load_16_bytes_at_once(name: str) -> None:
    nest, other, loads = KERNELS[name]
    binary, threads = compiled(nest, other)
    needs = binary.resources
    assert needs.spills == 0
    assert needs.registers * threads <= REGISTERS
    assert needs.shared <= SHARED
    assert needs.vector_loads >= loads


def test_rows_that_do_not_fit_into_registers_are_refused() -> None:
    nest = layer_norm_backward(264, 16, 16384)
    assert supports(nest) is None
    third = Reduce("sum", (Load("x", nest.stores[0].index, f32),), [1], f32)
    nest = Nest(nest.sizes, (*nest.stores, replace(nest.stores[2], buffer="third", value=third)))
    assert "fit into registers" in (supports(nest) or "")


@pytest.mark.parametrize(
    ("nest", "other", "loads"),
    [
        (layer_norm_backward(128, 32, 16384), ["mean", "rstd", "dw", "db"], 6),
        (layer_norm_backward_past_a_residual(128, 32, 16384), ["rstd", "dw", "db"], 10),
    ],
    ids=["layer_norm", "all_of_layer_norm"],
)
def test_rows_of_16384_are_loaded_again_and_hardly_spilled(nest: Nest, other: list[str], loads: int) -> None:
    """The sums of two columns take half of all registers; what is spilled stays in the first-level cache."""
    binary, threads = compiled(nest, dict.fromkeys(other, f32))
    needs = binary.resources
    assert needs.registers * threads <= REGISTERS
    assert needs.spills <= 32
    assert needs.shared <= 32 * 1024, "the rest of the memory is the cache that holds the row"
    assert needs.vector_loads == loads * 16384 // (8 * threads)


def test_threads_of_kernels_with_many_tensors_have_fewer_elements() -> None:
    for nest, other, elements in (
        (swiglu(8192, 8192), {}, 16),
        (swiglu(8192, 8192), dict.fromkeys(["gate", "up", "y"], f32), 16),
        (rope(4096, 32, 128), {}, 8),
    ):
        binary, threads = compiled(nest, other)
        assert 1024 // threads == elements
        assert binary.resources.registers <= 48


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("width", "columns", "stages"), [(1000, 0, 1), (1536, 512, 3), (1024, 1024, 3), (8192, 1024, 2)]
)
def test_stored_and_summed_tiles_are_computed_once(rows: int, width: int, columns: int, stages: int) -> None:
    nest = gelu_backward_and_sum(256, rows, width)
    source = generate(nest, {**dict.fromkeys(["x", "bias", "dy", "dx"], bf16), "db": f32}).source
    text = compiled_for(90, source).ptx
    elements = source.constants["RBLOCK"] * source.constants["XBLOCK"] // (32 * source.num_warps)
    # Triton 3.6 computes some tiles of loops with loads ahead in two layouts, whether they are summed or stored first,
    # and once without loads ahead. Which of the two is faster there has not been measured.
    times = 2 if stages == 3 and triton_adapter.version().startswith("3.6.") else 1
    assert text.count("ex2.approx") == times * elements
    assert (source.constants["XBLOCK"] == columns) is (columns > 0)
    assert (f"num_stages={stages}" in source.text) is (columns > 0)


@pytest.mark.parametrize(
    ("kind", "others", "ahead"), [(bf16, 4, True), (bf16, 5, False), (f32, 1, True), (f32, 2, False)]
)
def test_rows_in_flight_leave_room_for_all_programs(kind: torch.dtype, others: int, ahead: bool) -> None:
    """Of the 192 KiB that loads in flight may have, where a multiprocessor has eight programs of four warps."""
    nest = gelu_backward_and_sum(256, 32, 8192)
    dx, db = nest.stores
    value = dx.value
    for at in range(others):
        value = op("add", value, load(f"more{at}", 32 * 8192, 8192, 1))
    nest = replace(nest, stores=(replace(dx, value=value), replace(db, value=Reduce("sum", (value,), [1], f32))))
    names = ["x", "bias", "dy", "dx", *(f"more{at}" for at in range(others))]
    source = generate(nest, {**dict.fromkeys(names, kind), "db": f32}).source
    assert ("num_stages=2" in source.text) is ahead
    assert 8 * compiled_for(90, source).shared <= SHARED


def test_a_number_of_a_row_is_not_copied_for_each_column() -> None:
    nest = gelu_backward_and_sum(256, 32, 8192)
    dx, db = nest.stores
    value = op("mul", dx.value, load("mean", 32, 1, 0))
    nest = replace(nest, stores=(replace(dx, value=value), replace(db, value=Reduce("sum", (value,), [1], f32))))
    source = generate(nest, {**dict.fromkeys(["x", "bias", "dy", "dx"], bf16), "db": f32, "mean": f32}).source
    assert "num_stages" not in source.text


@pytest.mark.parametrize(("arch", "most"), [(90, SHARED), (80, 99 * 1024)])
@pytest.mark.parametrize("width", [8192, 16384])
@pytest.mark.parametrize("into", ["dx", "past"])
def test_loads_in_flight_fit_into_what_a_program_may_have(arch: int, most: int, width: int, into: str) -> None:
    """Where a result goes into the place of a gradient that is read, too. The least that there is before sm_90."""
    nest = rms_norm_backward_past_a_residual(264, 32, width)
    nest = replace(nest, stores=(replace(nest.stores[0], buffer=into), *nest.stores[1:]))
    made = compiled_for(arch, generate(nest, dict.fromkeys(["x", "dy", "past", "w", "dw", into], f32)).source)
    assert made.shared <= most


def compiled_for(arch: int, source: KernelSource) -> Any:
    """As triton compiles a kernel for sm_<arch>."""
    how = source.divisible, source.num_warps, source.num_stages, arch, source.registers
    with triton_adapter.compiling():
        return triton_adapter.compile_function(source.function(), source.signature, source.constants, *how)


@pytest.mark.parametrize(("arch", "tensors"), [(90, 3), (80, 0)])
def test_the_next_row_of_16384_is_asked_for_where_one_instruction_can(arch: int, tensors: int) -> None:
    nest = layer_norm_backward_past_a_residual(128, 32, 16384)
    names = {load.buffer for load in nest.reads} | set(nest.writes)
    source = generate(nest, {name: f32 if name in ("rstd", "dw", "db") else bf16 for name in names}).source
    made = compiled_for(arch, source)
    assert made.ptx.count("cp.async.bulk.prefetch.L2.global") == tensors


@pytest.mark.parametrize(
    ("nest", "wide", "ahead"),
    [
        (layer_norm_backward_past_a_residual(264, 16, 4096), bf16, 2),
        (layer_norm_backward_past_a_residual(264, 16, 4096), f32, 2),
        (layer_norm_backward_past_a_residual(264, 16, 8192), bf16, 2),
        (rms_norm_backward_past_a_residual(264, 16, 8192), bf16, 2),
        (rms_norm_backward_past_a_residual(264, 16, 8192), f32, 2),
        (rms_norm_backward_past_a_residual(128, 32, 16384), bf16, 1),
    ],
)
def test_a_row_is_in_flight_while_another_is_computed(nest: Nest, wide: torch.dtype, ahead: int) -> None:
    """There is room for two rows of three tensors, beside those of another program where registers leave room for it;
    of the longest for one, with the weight that is loaded for each."""
    parts, _, width = (int(size) for size in nest.sizes)
    other = dict.fromkeys(["dw", "db", "rstd"], f32)
    binary, threads = compiled(nest, {**dict.fromkeys(["x", "dy", "past", "w", "dx"], wide), **other})
    needs = binary.resources
    room = ahead * (3 if ahead == 2 else 4) * width * wide.itemsize
    beside = min(-(-parts // 132), REGISTERS // (needs.registers * threads))
    assert room <= needs.shared <= room + 512
    assert beside * needs.shared <= SHARED
    assert needs.spills == 0 or ahead == 1


def test_four_random_numbers_come_from_one_counter() -> None:
    nest = dropout_add(64, 4096)
    names = ["x", "residual", "y"]
    text = generate(nest, {**dict.fromkeys(names, bf16), "seed": i64}).source.text
    assert "uniform_quads" in text
    odd = dropout_add(64, 4097)
    # The position starts at any number in a row, but all rows are one: x counts through.
    assert "uniform_quads" in generate(odd, {**dict.fromkeys(names, bf16), "seed": i64}).source.text


def test_what_is_loaded_behind_the_reductions_does_not_count_as_kept() -> None:
    """The weight and the residual of a norm's backward leave room for rows of 8192 and sums of two columns."""
    nest = layer_norm_backward(264, 16, 8192)
    dx, *sums = nest.stores
    later = Load("later", dx.index, f32)
    nest = Nest(nest.sizes, (replace(dx, value=Call("add", (dx.value, later), f32)), *sums))
    assert supports(nest) is None
    binary, threads = compiled(nest, dict.fromkeys(["mean", "rstd", "dw", "db"], f32))
    assert binary.resources.spills == 0
    assert binary.resources.registers * threads <= REGISTERS


def test_a_program_with_a_multiprocessor_for_itself_has_all_the_registers() -> None:
    names = ["x", "dy", "w", "dx", "mean", "rstd", "dw", "db"]
    registers = lambda parts: (
        generate(layer_norm_backward(parts, 32, 2048), dict.fromkeys(names, bf16)).source.registers
    )
    assert registers(132) == 255
    assert registers(133) is None


@pytest.mark.parametrize(
    ("nest", "dtype", "warps", "tile"),
    [
        (cross_entropy(8192, 128256), bf16, 32, 8192),  # seven of these blocks stay in registers
        (cross_entropy(1024, 128256), bf16, 32, 8192),
        (cross_entropy(8192, 128256), f32, 32, 16384),
        (softmax(8192, 32768), bf16, 16, 4096),  # the rows of four programs a multiprocessor stay in the cache
        (softmax(300, 128256), bf16, 16, 4096),  # three rounds of large programs, the last of them for few
        (softmax(16, 32768), bf16, 32, 8192),
        (softmax(8192, 50257), bf16, 32, 16384),
        (rms_norm(1024, 131072), bf16, 32, 16384),
        (rms_norm(1024, 131072), f32, 32, 8192),
        (softmax(2, 1 << 20), f32, 32, 16384),
    ],
)
def test_programs_for_rows_that_are_read_again_are_large_where_the_cache_is_short(
    nest: Nest, dtype: torch.dtype, warps: int, tile: int
) -> None:
    names = {load.buffer for load in nest.reads} | set(nest.writes)
    source = generate(nest, {name: i64 if name == "label" else dtype for name in names}).source
    assert (source.num_warps, source.constants["RBLOCK"]) == (warps, tile)
    (binary,) = compile_pool.build([source], 90, workers=0)
    assert binary.resources.spills == 0
    assert binary.resources.registers * 32 * warps <= REGISTERS


@pytest.mark.parametrize(("width", "lies"), [(128256, (1, 1024, 8)), (50260, (2, 1024, 4)), (50257, (16, 1024, 1))])
def test_a_thread_keeps_one_result_of_a_softmax_whatever_the_alignment_of_rows(
    width: int, lies: tuple[int, int, int]
) -> None:
    source = generate(softmax(8192, width), {"x": bf16, "y": bf16, "lse": f32}).source
    assert f"tl.reshape(v0, [{', '.join(map(str, lies))}])" in source.text
    compiled = triton_adapter.compile_function(
        source.function(), source.signature, source.constants, source.divisible, 32, 1, 90, source.registers
    )
    assert compiled.ptx.count("shfl.sync") == 2 * (5 + 5), "threads exchange values behind the loop only"


@pytest.mark.parametrize(("rows", "past"), [(8192, True), (64, False)])
def test_what_goes_past_rows_that_wait_in_the_cache_is_let_go_where_it_is_much(rows: int, past: bool) -> None:
    text = generate(softmax(rows, 128256), dict.fromkeys(["x", "y", "lse"], bf16)).source.text
    stores = [line for line in text.splitlines() if "tl.store(out0" in line]
    # Of seven blocks that are held, a loop, and a part behind it.
    assert [line.endswith('eviction_policy="evict_first")') for line in stores] == [past] * 9
