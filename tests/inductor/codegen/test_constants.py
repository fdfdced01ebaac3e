"""Constants of generated kernels: signs of zeros, NaN, infinities, and constants that compare equal."""

from __future__ import annotations

import math

import pytest
import torch
from nest_check import check
from nests import load, op, store

from multi_tensor_kernels import interpret
from weft.inductor.codegen.canonical import canonical
from weft.inductor.codegen.triton_text import float32_literal, literal_text
from weft.inductor.loop_ir.ir import Call, Const, Index, Load, Nest, Position, Reduce, Value
from weft.inductor.multi_tensor.foreach import Foreach, Lists, Step
from weft.inductor.runtime.kernels import compile_kernels

f32, f64, i64 = torch.float32, torch.float64, torch.int64
ODD = [0.0, -0.0, math.nan, math.inf, -math.inf]
X = [1.5, -2.0, 0.0, -0.0, math.inf, -math.inf, math.nan]


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal, signs of zeros included; one NaN is as good as another."""
    both_nan = found.isnan() & wanted.isnan()
    return bool((both_nan | ((found == wanted) & (found.signbit() == wanted.signbit()))).all())


def run(value: Value, dtype: torch.dtype = f32) -> tuple[torch.Tensor, str]:
    """``value`` at each element of ``x``, which is ``X``, by its kernel; and the kernel's text."""
    buffers = {"x": torch.tensor(X, dtype=dtype), "y": torch.zeros(len(X), dtype=dtype)}
    generated = check(Nest((len(X),), (store("y", value, 1),)), buffers)
    kernel = compile_kernels([generated.source], torch.device("cpu"))[0]
    kernel.launch(generated.grid(), 0, *(buffers[name] for name in generated.buffers))
    return buffers["y"], generated.source.text


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("number", ODD, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_with_a_constant_gives_the_bits_of_eager(name: str, number: float, dtype: torch.dtype) -> None:
    x = load("x", 1, dtype=dtype)
    eager = getattr(torch, name)
    for args, wanted in (
        ((x, Const(number, dtype)), eager(torch.tensor(X, dtype=dtype), number)),
        ((Const(number, dtype), x), eager(torch.tensor(number, dtype=dtype), torch.tensor(X, dtype=dtype))),
    ):
        found, text = run(op(name, *args, dtype=dtype), dtype)
        assert same_bits(found, wanted), (found, wanted, text)
        assert "-0.0" not in text


@pytest.mark.parametrize("number", ODD, ids=str)
def test_a_stored_constant_keeps_its_bits(number: float) -> None:
    found, text = run(Const(number, f32))
    assert same_bits(found, torch.full([len(X)], number))
    assert "-0.0" not in text


@pytest.mark.parametrize("number", ODD, ids=str)
def test_a_selected_constant_keeps_its_bits(number: float) -> None:
    condition = op("gt", load("x", 1), Const(0.0, f32), dtype=torch.bool)
    found, _ = run(op("where", condition, Const(number, f32), load("x", 1)))
    assert same_bits(found, torch.where(torch.tensor(X) > 0, number, torch.tensor(X)))


@pytest.mark.parametrize("number", ODD, ids=str)
def test_a_masked_load_gives_its_constant_behind_the_mask(number: float) -> None:
    mask = op("lt", Position(0), Const(3, i64), dtype=torch.bool)
    found, text = run(Load("x", Index([(0, 1)]), f32, mask, number))
    assert same_bits(found, torch.tensor([*X[:3], *[number] * (len(X) - 3)]))
    assert "-0.0" not in text


def test_negation_keeps_the_signs_of_zeros() -> None:
    found, text = run(op("neg", load("x", 1)))
    assert same_bits(found, -torch.tensor(X))
    assert "-v" not in text


def test_zeros_of_both_signs_stay_apart_in_one_kernel() -> None:
    x = load("x", 1)
    found, _ = run(op("minimum", op("div", x, Const(0.0, f32)), op("div", x, Const(-0.0, f32))))
    x_ = torch.tensor(X)
    assert same_bits(found, torch.minimum(x_ / 0.0, x_ / -0.0))


def test_masked_loads_whose_constants_compare_equal_stay_apart() -> None:
    mask = op("lt", Position(0), Const(3, i64), dtype=torch.bool)
    zeros = [Load("x", Index([(0, 1)]), f32, mask, zero) for zero in (0.0, -0.0)]
    assert zeros[0] is not zeros[1]
    found, _ = run(op("div", Const(1.0, f32), zeros[1]))
    assert same_bits(found[3:], torch.full([len(X) - 3], -math.inf))


@pytest.mark.parametrize("name", ["neg", "abs", "reciprocal", "sqrt"])
@pytest.mark.parametrize("number", [0.0, -0.0, math.inf, math.nan, 4.0], ids=str)
def test_operations_on_constants_are_folded_to_the_bits_of_eager(name: str, number: float) -> None:
    folded = canonical(Nest((4,), (store("y", Call(name, (Const(number, f32),), f32), 1),))).nest.stores[0].value
    assert isinstance(folded, Const)
    assert same_bits(torch.tensor([folded.value]), getattr(torch, name)(torch.tensor([number])))


def test_constants_that_compare_equal_are_different_values() -> None:
    values = [Const(0.0, f32), Const(-0.0, f32), Const(1.0, f32), Const(1.0, f64)]
    values += [Const(1, i64), Const(True, torch.bool)]
    assert len({id(value) for value in values}) == len(values)
    assert Const(math.nan, f32) is Const(-math.nan, f32)


def test_a_sum_over_one_term_and_negative_zeros_is_that_term() -> None:
    hit = op("eq", Position(1), load("label", 1, 0, dtype=i64), dtype=torch.bool)
    total = Reduce("sum", (op("where", hit, load("x", 1, 0), Const(-0.0, f32)),), [1], f32)
    buffers = {"x": torch.tensor([1.0, 2.0]), "label": torch.tensor([0, 5]), "y": torch.ones(2)}
    check(Nest((2, 4), (store("y", total, 1, 0),)), buffers)


def test_literals() -> None:
    assert literal_text(1, f32) == "1.0"
    assert literal_text(True, i64) == "1"
    assert literal_text(1, torch.bool) == "True"
    assert literal_text(-0.0, i64) == "0"
    assert literal_text(-math.inf, f64) == 'float("-inf")'
    assert "-2147483648" in literal_text(-0.0, f32)
    assert float32_literal(0.1) == repr(torch.tensor(0.1).item())
    assert float32_literal(1e40) == 'float("inf")'


@pytest.mark.parametrize("number", [-0.0, math.inf, math.nan], ids=str)
def test_scalars_of_multi_tensor_kernels_keep_their_bits(number: float) -> None:
    aten = torch.ops.aten
    call = Foreach((Step(aten._foreach_mul.Scalar, (Lists(0, False), number), ()),), ((0, -1),))
    tensors = [torch.tensor(X), torch.tensor(X[:3])]
    for found, x in zip(interpret(call, [tensors]), tensors, strict=True):
        assert same_bits(found, x * number)


def test_a_list_of_tensors_negated_in_a_kernel_keeps_the_signs_of_zeros() -> None:
    call = Foreach((Step(torch.ops.aten._foreach_neg.default, (Lists(0, False),), ()),), ((0, -1),))
    (found,) = interpret(call, [[torch.tensor(X)]])
    assert same_bits(found, -torch.tensor(X))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("exponent", [-140, -130, -127, -126, -100, -99, 99, 100, 126])
def test_division_by_a_power_of_two_gives_the_bits_of_eager(exponent: int, dtype: torch.dtype) -> None:
    divisor = 2.0**exponent
    values = torch.tensor([1.5 * 2.0 ** (exponent // 2), *X[1:]], dtype=dtype)
    buffers = {"x": values, "y": torch.zeros(len(X), dtype=dtype)}
    quotient = op("div", load("x", 1, dtype=dtype), Const(divisor, dtype), dtype=dtype)
    generated = check(Nest((len(X),), (store("y", quotient, 1),)), buffers)
    kernel = compile_kernels([generated.source], torch.device("cpu"))[0]
    kernel.launch(generated.grid(), 0, *(buffers[name] for name in generated.buffers))
    assert same_bits(buffers["y"], values / torch.tensor(divisor, dtype=dtype)), generated.source.text


SMALL = torch.tensor([0.3, -0.3, 0.0, -0.0, 4.0, -4.0, 5.5, -5.5])


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, None) for name in ("round", "trunc", "ceil", "tanh", "expm1", "log1p")),
        *((name, other) for name in ("fmod", "remainder") for other in (2.0, -2.0)),
        ("pow", 3.0),
    ],
)
def test_results_of_zero_have_the_sign_of_eager(name: str, other: float | None, dtype: torch.dtype) -> None:
    x = SMALL.to(dtype)
    buffers = {"x": x, "y": torch.zeros_like(x)}
    args = (load("x", 1, dtype=dtype), *(() if other is None else (Const(other, dtype),)))
    result = op({"remainder": "mod"}.get(name, name), *args, dtype=dtype)
    generated = check(Nest((len(x),), (store("y", result, 1),)), buffers)
    kernel = compile_kernels([generated.source], torch.device("cpu"))[0]
    kernel.launch(generated.grid(), 0, *(buffers[name] for name in generated.buffers))
    wanted = getattr(torch, name)(x, *(() if other is None else (torch.tensor(other, dtype=dtype),)))
    zero = wanted == 0
    assert zero.any()
    assert same_bits(buffers["y"][zero], wanted[zero]), (buffers["y"], wanted)
