"""Blocks of long rows that stay in registers between the walks along them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from nest_check import check
from nests import cross_entropy, load, op, rms_norm, softmax, store

from weft import knobs, triton_adapter
from weft.inductor.codegen.kernel import GeneratedKernel, generate
from weft.inductor.loop_ir.ir import Const, Index, Nest, Reduce, Store
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.kernels import compile_kernels

bf16, f16, f32, i64 = torch.bfloat16, torch.float16, torch.float32, torch.int64

BLOCK = 8192  # elements


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with knobs.override(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


def made(nest: Nest, dtype: torch.dtype) -> GeneratedKernel:
    names = {one.buffer for one in nest.reads} | set(nest.writes)
    return generate(nest, {name: i64 if name == "label" else dtype for name in names})


def softmax_backward(rows: int, width: int) -> Nest:
    y, dy = load("y", width, 1), load("dy", width, 1)
    product = op("mul", y, dy)
    total = Reduce("sum", (product,), [1], f32)
    return Nest((rows, width), (store("dx", op("sub", product, op("mul", y, total)), width, 1),))


@pytest.mark.parametrize(
    ("nest", "dtype", "blocks"),
    [
        (cross_entropy(8192, 128256), bf16, 7),  # 28 registers of a thread, four a block
        (cross_entropy(8192, 128256), f16, 7),
        (softmax(8192, 65536), f32, 3),  # eight a block
        (softmax(16, 32768), bf16, 4),  # all there are
        (softmax(8192, 50258), bf16, 6),  # rows start at words, if not at 16 bytes
        (rms_norm(8192, 40960), bf16, 3),  # the sums of a block, and the weight, want eight registers each
        (softmax(8192, 50257), bf16, 0),  # every other row starts inside a word
        (cross_entropy(8192, 128256), f32, 0),  # three blocks are less than a quarter
        (softmax_backward(8192, 128256), bf16, 0),
        (softmax(8192, 32768), bf16, 0),  # the rows under way stay in the cache
    ],
)
def test_as_many_blocks_are_held_as_registers_are_left_for(nest: Nest, dtype: torch.dtype, blocks: int) -> None:
    source, width = made(nest, dtype).source, nest.sizes[1]
    assert isinstance(width, int)
    assert len(re.findall(r"resident\d+ = load_packed\(", source.text)) == blocks
    full = width // source.constants["RBLOCK"] * source.constants["RBLOCK"]
    loops = [f"for r_start in range({blocks * BLOCK}, {full}, RBLOCK):"]
    backwards = f"for r_start in range({full - BLOCK}, {(blocks - 1) * BLOCK}, -RBLOCK):"
    loops = [] if blocks * BLOCK == full else [*loops, backwards] if blocks else loops * 2
    assert re.findall(r"for r_start .*", source.text) == loops


@pytest.mark.parametrize(
    ("nest", "dtype"),
    [
        (softmax(8192, 65536), f32),
        (softmax(8192, 50258), bf16),
        (rms_norm(8192, 40960), bf16),
        (cross_entropy(20000, 128256), bf16),  # positions of 64 bits
    ],
)
def test_what_is_held_fits_and_lies_where_it_is_needed(nest: Nest, dtype: torch.dtype) -> None:
    (binary,) = compile_pool.build([made(nest, dtype).source], 90, workers=0)
    assert binary.resources.spills == 0
    assert binary.resources.registers <= 64
    assert binary.resources.shared <= 128, "elements that change threads go through shared memory"


@pytest.mark.parametrize(("stored", "blocks"), [(bf16, 5), (f32, 3)])
def test_fewer_blocks_are_held_where_what_is_stored_changes_threads(stored: torch.dtype, blocks: int) -> None:
    """Rows that start at 16 bytes become rows that start anywhere."""
    padded = softmax(2048, 50264)
    y = replace(padded.stores[0], index=Index([(0, 50257), (1, 1)]))
    nest = Nest((2048, 50257), (y, *padded.stores[1:]))
    source = generate(nest, {"x": bf16, "lse": f32, "y": stored}).source
    (binary,) = compile_pool.build([source], 90, workers=0)
    assert len(re.findall(r"resident\d+ = load_packed\(", source.text)) == blocks
    assert binary.resources.shared > 1024, "elements change threads"
    assert binary.resources.spills == 0


@pytest.mark.parametrize(
    ("nest", "dtype", "asked"),
    [
        (cross_entropy(8192, 128256), bf16, 7 * BLOCK),
        (softmax(528, 65536), f32, 3 * BLOCK),
        (softmax(132, 65536), f32, 0),  # no multiprocessor has a second row
        (softmax(8192, 50258), bf16, 0),  # most rows do not start at 16 bytes
        (cross_entropy(8192, 128256), f32, 0),  # none held
    ],
)
def test_the_cache_is_asked_for_what_the_next_program_will_hold(nest: Nest, dtype: torch.dtype, asked: int) -> None:
    source, (rows, width) = made(nest, dtype).source, nest.sizes
    lines = re.findall(r"prefetch\(in0 \+ (.*), (\d+), ARCH, ALIGNED\)", source.text)
    assert [int(size) for _, size in lines] == [asked * dtype.itemsize] * (asked > 0)
    for where, _ in lines:
        for x in (0, 1, rows - 133, rows - 132, rows - 1):
            start = eval(where, {"tl": SimpleNamespace(minimum=min), "x": x})
            assert start == min(x + 132, rows - 1) * width
    (binary,) = compile_pool.build([source], 90, workers=0)
    assert binary.resources.spills == 0


def test_the_last_walk_reads_first_what_was_read_last() -> None:
    """The part of a block that stands behind the loop, and the loop's blocks, the last one first."""
    text = made(cross_entropy(8192, 128256), bf16).source.text
    assert re.findall(r" r_start = 122880|for r_start in (.*):", text) == [
        "range(57344, 122880, RBLOCK)",
        "",
        "",
        "range(114688, 49152, -RBLOCK)",
    ]


def test_what_is_computed_of_held_numbers_is_computed_again() -> None:
    """Or the numbers that the first walk made of the words would wait in registers, twice as many."""
    source = made(cross_entropy(8192, 128256), bf16).source
    (binary,) = compile_pool.build([source], 90, workers=0)
    assert source.text.count("unpack(opaque_copy(resident") == 7
    # What is not held is widened by one instruction a number, in both walks.
    assert source.text.count("widen_bfloat16(tl.load(") == 4
    moves = 'if ARCH > 0:\n        return tl.inline_asm_elementwise("mov'
    assert source.text.count(moves) == 1
    kept = replace(source, text=source.text.replace(moves, moves.replace(">", "<")))
    (worse,) = compile_pool.build([kept], 90, workers=0)
    assert binary.resources.spills == 0 < worse.resources.spills


@pytest.mark.parametrize(
    ("dtype", "width"), [(bf16, 3 * BLOCK), (bf16, 20002), (f16, 20002), (f32, 20001), (f32, 35000)]
)
def test_rows_with_held_blocks_are_what_they_should_be(dtype: torch.dtype, width: int) -> None:
    """All of a row held; a part of a block behind them; a loop between the two where a block takes eight registers."""
    rows = 3
    x = torch.randn(rows * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[width:] *= 30
    x[2 * width : 2 * width + 9000] = -math.inf
    buffers = {"x": x, "label": torch.tensor([0, width - 1, 5000])}
    buffers |= {"dx": torch.zeros(rows * width), "loss": torch.zeros(rows)}
    kernel = check(cross_entropy(rows, width), buffers)
    held = re.findall(r"resident\d+ = load_packed", kernel.source.text)
    assert len(held) == min(7 if dtype != f32 else 3, width // BLOCK)


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_nothing_wider_than_an_element_is_loaded_where_arguments_start_anywhere(dtype: torch.dtype) -> None:
    """A GPU traps at the address of a word that is no multiple of its size, and at a bulk prefetch off 16 bytes."""
    source = made(softmax(528, 65536), dtype).source
    for each, prefetches, bytes_ in ((source, 1, 16), (source.unaligned(), 0, dtype.itemsize)):
        how = each.divisible, each.num_warps, each.num_stages, 90, each.registers
        with triton_adapter.compiling():
            text = triton_adapter.compile_function(each.function(), each.signature, each.constants, *how).ptx
        loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", text)
        assert text.count("cp.async.bulk.prefetch") == prefetches
        assert max(int(vector or 1) * int(bits) // 8 for vector, bits in loads) == bytes_


def test_a_row_that_starts_inside_a_word_is_what_it_should_be() -> None:
    width = 20000
    x = torch.randn(2 * width + 1, generator=torch.Generator().manual_seed(2)).to(bf16)[1:]
    kernel = made(softmax(2, width), bf16)
    (compiled,) = compile_kernels([kernel.source.unaligned()], torch.device("cpu"))
    found = {"x": x, "y": torch.zeros(2 * width, dtype=bf16), "lse": torch.zeros(2, dtype=bf16)}
    compiled.launch(kernel.grid(()), 0, *(found[name] for name in kernel.buffers))
    exact = x.view(2, width).double().softmax(1).flatten()
    assert "load_packed" in kernel.source.text
    torch.testing.assert_close(found["y"].double(), exact, rtol=1e-2, atol=0)


def test_overlapping_rows_have_no_resident_blocks() -> None:
    """A window of a series starts an element behind the one before: every other inside a word."""
    window = load("x", 1, 1)
    top = Reduce("max", (window,), [1], f32)
    total = Reduce("sum", (op("exp", op("sub", window, top)),), [1], f32)
    nest = Nest((8192, 65536), (store("y", op("div", op("exp", op("sub", window, top)), total), 65536, 1),))
    assert "held" not in made(nest, bf16).source.text


def test_a_row_that_is_overwritten_is_read_before() -> None:
    width = 20000
    nest = softmax(2, width)
    over = Nest(nest.sizes, tuple(Store("x", s.index, s.value) if s.buffer == "y" else s for s in nest.stores))
    x = torch.randn(2 * width, generator=torch.Generator().manual_seed(0)).to(bf16)
    kernel = check(over, {"x": x, "lse": torch.zeros(2)}, tolerance=1e-2)
    assert "resident1 = load_packed(io0 + 8192 + x * 20000," in kernel.source.text


def test_three_passes_use_resident_blocks_in_each() -> None:
    """A sum, the sum of what is apart from its mean times the mean's sign, and a store that needs both."""
    width = 20000
    x = load("x", width, 1)
    mean = op("mul", Reduce("sum", (x,), [1], f32), Const(1 / width, f32))
    deviation = Reduce("sum", (op("abs", op("sub", x, mean)),), [1], f32)
    nest = Nest((2, width), (store("y", op("div", op("sub", x, mean), deviation), width, 1),))
    buffers = {"x": torch.randn(2 * width, generator=torch.Generator().manual_seed(1)).to(bf16)}
    kernel = check(nest, buffers | {"y": torch.zeros(2 * width, dtype=bf16)}, tolerance=1e-2)
    assert kernel.source.text.count("unpack(resident") == 2
    assert kernel.source.text.count("unpack(opaque_copy(resident") == 4
