"""Casts and copies that go, and those that must stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pass_runs import Run, same_bits, targets
from weft.inductor.passes.fold_casts import fold_casts, represents_exactly

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def folded(step: Callable[..., object], *args: torch.Tensor) -> tuple[int, int]:
    """How many copies are left of how many; the bits are the same."""
    run = Run(step, args, [fold_casts])
    assert same_bits(run, Run(step, args, []))
    counts = [targets(graph) for graph in (run.before, run.graph)]
    before, after = (count["aten._to_copy.default"] + count["aten.clone.default"] for count in counts)
    return before, after


def special(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that round badly: powers, a subnormal, the largest, infinity."""
    numbers = [0.1, -3.3, 1e-7, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max, float("inf"), -0.0]
    return torch.tensor(numbers, dtype=dtype)


def test_a_lossless_cast_and_its_inverse_are_dropped() -> None:
    assert folded(lambda x: x.float().bfloat16() * 2, special(bf16)) == (
        2,
        1,
    )  # the first is unused, and left to others


def test_a_lossy_cast_stays() -> None:
    assert folded(lambda x: x.bfloat16().float() * 2, special(f32)) == (2, 2)
    assert folded(lambda x: x.half().bfloat16() * 2, special(bf16)) == (2, 2)


@pytest.mark.parametrize(("narrow", "wide", "last"), [(bf16, f32, f16), (f32, f64, bf16), (f16, f32, bf16)])
def test_a_cast_over_a_wider_type_is_one_cast(narrow: torch.dtype, wide: torch.dtype, last: torch.dtype) -> None:
    run = Run(lambda x: x.to(wide).to(last) * 2, [special(narrow)], [fold_casts])
    (cast,) = [n for n in run.graph.graph.nodes if n.kwargs.get("dtype") == last]
    assert cast.args[0].op == "placeholder"
    assert same_bits(run, Run(lambda x: x.to(wide).to(last) * 2, [special(narrow)], []))


@pytest.mark.parametrize("first", [0, 4, 8])
def test_a_copy_of_rows_is_the_rows(first: int) -> None:
    """Those of each rank in a replicated tensor, the first rank's among them."""
    x = torch.randn(12, 4)
    assert folded(lambda x: (y := x * 2, y[first : first + 4].clone() + 1)[1], x) == (1, 0)
    assert folded(lambda x: (y := x * 2, y[first : first + 4].clone().view(2, 8)[1:] + 1)[1], x) == (1, 0)


@pytest.mark.parametrize(
    "step",
    [
        lambda y: y[4:8].clone().as_strided((2, 2), (4, 1), 0) + 1,  # counts from the beginning of the memory
        lambda y: y[4:8].clone().view(-1).as_strided((2, 2), (4, 1), 1) + 1,
        lambda y: y.view(-1)[1:17].clone() + 1,  # begins in the middle of 16 bytes
    ],
)
def test_a_copy_of_rows_that_readers_need_stays(step: Callable[..., torch.Tensor]) -> None:
    before, after = folded(lambda x: step(x * 2), torch.randn(12, 4))
    assert after == before


@pytest.mark.parametrize(
    "step",
    [
        lambda y: (part := y[4:8].clone(), y[4:8].add_(1), part + y[4:8])[2],  # the rows are written to
        lambda y: y[4:8].clone().t().clone().as_strided((2, 2), (1, 4), 0) + 1,  # a copy of a copy
        lambda y: y[4:8].clone()[1:].clone().as_strided((2, 2), (1, 4), 0) + 1,
        lambda y: y[4:8].clone()[1:].clone()[1:] + y[4:6].clone(),
        lambda y: (y[4:8].clone().mul_(2), y[4:8] + 1)[1] + y[4:8].clone().mul_(2),
        lambda y: (part := y[4:8].clone(), part[1:3].fill_(5), part + 1)[2],
        lambda y: (part := y[4:8].clone(), part.view(-1)[3:].mul_(2), part + y[4:8])[2],
        lambda y: y[4:8].clone().slice_scatter(torch.ones(2, 4), 0, 1, 3) + 1,
        lambda y: y[4:8].clone().as_strided_scatter(torch.ones(2, 2), (2, 2), (4, 1), 1) + 1,
        lambda y: y[4:8].clone().add_(1).as_strided((2, 2), (4, 1), 0) + 1,
    ],
)
def test_copies_of_rows_that_are_written_to_or_copied_again(step: Callable[..., torch.Tensor]) -> None:
    folded(lambda x: step(x * 2), torch.randn(12, 4))


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, f16, bf16, f32, f64]


@pytest.mark.parametrize("narrow", DTYPES)
@pytest.mark.parametrize("wide", DTYPES)
def test_exactly_represented_dtypes_hold_every_value(narrow: torch.dtype, wide: torch.dtype) -> None:
    """All values of 8 and 16 bits, the extreme ones of wider types; half precision is no subset of bfloat16."""
    if narrow.itemsize <= 2 and narrow != torch.bool:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16) if narrow.itemsize == 2 else torch.arange(256).byte()
        values = bits.view(narrow)
    elif narrow.is_floating_point:
        info = torch.finfo(narrow)
        values = torch.tensor([info.max, info.min, info.tiny, 1 + info.eps], dtype=narrow)
    elif narrow == torch.bool:
        values = torch.tensor([False, True])
    else:
        info = torch.iinfo(narrow)
        values = torch.tensor([info.max, info.min, info.max - 1], dtype=narrow)
    values = values[~values.isnan()] if narrow.is_floating_point else values
    if represents_exactly(wide, narrow):
        assert torch.equal(values.to(wide).to(narrow), values)
        if narrow.is_floating_point or narrow == torch.bool:
            assert torch.equal(values.to(wide).double(), values.double())


def test_wider_dtypes_represent_narrower_ones_exactly() -> None:
    for wide, narrow in [
        (f32, bf16),
        (f32, f16),
        (f64, f32),
        (f32, torch.int16),
        (f64, torch.int32),
        (torch.int64, torch.uint8),
    ]:
        assert represents_exactly(wide, narrow)
        assert not represents_exactly(narrow, wide)


def test_copies_of_values_that_are_not_written_are_dropped() -> None:
    assert folded(lambda x: x.clone().exp() + x.contiguous().clone(), torch.randn(3)) == (2, 0)


def test_a_returned_copy_stays_a_copy() -> None:
    run = Run(lambda x: x.clone(), [torch.ones(3)], [fold_casts])
    assert run.outcome[0].data_ptr() != run.outcome[1].data_ptr()
    assert targets(run.graph)["aten.clone.default"] == 1


def test_a_copy_in_another_layout_stays() -> None:
    assert folded(lambda x: x.t().clone(memory_format=torch.contiguous_format).view(-1) * 2, torch.randn(2, 3)) == (
        1,
        1,
    )


def test_a_copy_taken_before_a_write_keeps_the_old_value() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.copy_(y * 1)
        y.copy_(old)
        return (old - x).sum()

    x, y = torch.randn(3), torch.randn(3)
    run = Run(step, [x, y], [fold_casts])
    assert torch.equal(run.outcome[1], y)
    assert torch.equal(run.outcome[2], x)
    assert same_bits(run, Run(step, [x, y], []))


def test_equal_casts_get_equal_keywords() -> None:
    """Backward writes out layout and device, which are those there are."""
    run = Run(
        lambda x: torch.ops.aten._to_copy(x, dtype=bf16, layout=torch.strided, device=x.device) * 2,
        [special(f32)],
        [fold_casts],
    )
    (cast,) = [n for n in run.graph.graph.nodes if "_to_copy" in str(n.target)]
    assert dict(cast.kwargs) == {"dtype": bf16}
