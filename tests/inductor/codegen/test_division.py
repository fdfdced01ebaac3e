"""Quotients of float32 have the bits of ATen's on a GPU: floor, a comparison or a cast to integers shows the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nests import load, op, store

import weft
from weft import triton_adapter
from weft.inductor.codegen.kernel import generate
from weft.inductor.loop_ir.ir import Const, Nest, Reduce, Value

f32 = torch.float32


def ptx(nest: Nest) -> str:
    """Of the kernel of a nest of float32 buffers."""
    source = generate(nest, dict.fromkeys("xyz", f32)).source
    made = triton_adapter.compile_function(
        source.function(), source.signature, source.constants, source.divisible, source.num_warps, 1, 90
    )
    return made.ptx


@pytest.mark.parametrize("divisor", [load("y", 0, 1), load("y", 1, 0), load("y", 0, 0), Const(3.0, f32)], ids=str)
def test_a_quotient_is_rounded_correctly_whatever_the_divisor(divisor: Value) -> None:
    text = ptx(Nest((64, 128), (store("z", op("floor", op("div", load("x", 128, 1), divisor)), 128, 1),)))
    assert "div.rn.f32" in text
    assert "div.full.f32" not in text


def test_a_softmax_divides_approximately() -> None:
    powers = op("exp", load("x", 128, 1))
    text = ptx(Nest((64, 128), (store("z", op("div", powers, Reduce("sum", (powers,), (1,), f32)), 128, 1),)))
    assert "div.rn.f32" not in text


WHOLE = torch.arange(-1000.0, 1001.0).repeat(3, 1)

QUOTIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number": lambda x: x / 49.0,
    "floor of number": lambda x: (x / 49.0).floor(),
    "trunc by number": lambda x: torch.div(x, 49.0, rounding_mode="trunc"),
    "floor by number": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc by tensor": lambda x: torch.div(x, x[:1] + 0.5, rounding_mode="trunc"),
    "row": lambda x: (x / x[:, 890:891]).floor(),
    "column": lambda x: (x / x[1]).floor(),
    "one element": lambda x: (x / x[0, 890]).to(torch.int64),
    "largest": lambda x: (x / x.abs().amax(1, keepdim=True)) == 1,
    "a scale": lambda x: (x / (x.abs().amax() / 127.0)).round(),
    "sum": lambda x: x / (x > 0).sum(1, keepdim=True),
    "halves": lambda x: x.bfloat16() / 3.0,
    "double": lambda x: x.double() / 49.0,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_have_the_bits_of_eager(name: str) -> None:
    x = WHOLE.cuda()
    found, wanted = weft.compile(QUOTIENTS[name])(x), QUOTIENTS[name](x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
