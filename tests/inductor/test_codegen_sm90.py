"""Generated kernels compiled for sm_90 as a GPU would run them: what they need, and how they reach memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nests import (
    column_sum,
    cross_entropy,
    dropout_add,
    layer_norm_backward,
    layer_norm_backward_past_a_residual,
    rms_norm,
    softmax,
    swiglu,
    transpose,
)

from weft import knobs
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.ir import Call, Load, Nest, Reduce
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
        (layer_norm_backward(128, 32, 16384), ["mean", "rstd", "dw", "db"], 8),
        (layer_norm_backward_past_a_residual(128, 32, 16384), ["rstd", "dw", "db"], 11),
    ],
    ids=["layer_norm", "all_of_layer_norm"],
)
def test_rows_of_16384_are_loaded_again_and_hardly_spilled(nest: Nest, other: list[str], loads: int) -> None:
    """The sums of two columns take half of all registers; what is spilled stays in the first-level cache."""
    binary, threads = compiled(nest, dict.fromkeys(other, f32))
    needs = binary.resources
    assert needs.registers * threads <= REGISTERS
    assert needs.spills <= 96
    assert needs.shared <= 32 * 1024, "the rest of the memory is the cache that holds the row"
    assert needs.vector_loads == loads * 16384 // (8 * threads)


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
