"""Kernels over lists of tensors, interpreted on the CPU against float64, and compiled for a GPU that is not there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multi_tensor_kernels import Symbol, assert_close, interpret
from step_builder import StepBuilder
from weft.inductor.multi_tensor import launch_plan as planning
from weft.inductor.multi_tensor.adam import Adam
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.multi_tensor.foreach import EXPRESSIONS, UNREAD, Foreach, Lists, Scalars, Step
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.sgd import Sgd
from weft.inductor.runtime.kernels import inspect_kernel
from weft.inductor.runtime.multi_tensor import Launcher

aten = torch.ops.aten
Tensor = torch.Tensor

# The interpreter divides what lies outside a mask, too.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")

SIZES = [1, 3, 1024, 0, 1025, 5000, 16]


def randoms(sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float32, low: float = -2.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(size, generator=generator) * (2.0 - low) + low).to(dtype) for size in sizes]


# ---- Adam


def adam_arguments(
    sizes: Sequence[int], amsgrad: bool, lr: Any = 0.01, dtype: torch.dtype = torch.float32
) -> list[Any]:
    params, grads = randoms(sizes, 0, dtype), randoms(sizes, 1, dtype)
    steps = [torch.tensor(float(at % 5)) for at in range(len(sizes))]
    averages, squares, largest = randoms(sizes, 2), randoms(sizes, 3, low=0.1), randoms(sizes, 4, low=0.1)
    states = [[s.to(dtype) for s in list_] for list_ in (averages, squares, largest if amsgrad else [])]
    return [params, grads, *states, steps, lr, None, None, None]


def adam_by_torch(call: Adam, arguments: Sequence[Any], grads: list[list[Tensor]]) -> list[Tensor]:
    """Steps of torch's plain Adam in float64 with the gradients of each."""
    params, _, averages, squares, largest, steps, lr, *_ = arguments
    leaves = [torch.nn.Parameter(p.double()) for p in params]
    kind = torch.optim.AdamW if call.decoupled else torch.optim.Adam
    betas = (float(torch.tensor(call.beta1)), float(torch.tensor(call.beta2)))
    optimizer = kind(
        leaves,
        lr=float(lr),
        betas=betas,
        eps=call.eps,
        weight_decay=call.weight_decay,
        amsgrad=call.amsgrad,
        maximize=call.maximize,
        foreach=False,
    )
    for at, leaf in enumerate(leaves):
        state = {"step": steps[at].clone(), "exp_avg": averages[at].double(), "exp_avg_sq": squares[at].double()}
        if call.amsgrad:
            state["max_exp_avg_sq"] = largest[at].double()
        optimizer.state[leaf] = state
    for grad in grads:
        for leaf, g in zip(leaves, grad, strict=True):
            leaf.grad = g.double()
        optimizer.step()
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if call.amsgrad else []), "step"]
    return [*(leaf.detach() for leaf in leaves), *(optimizer.state[leaf][name] for name in names for leaf in leaves)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize(("maximize", "weight_decay"), [(False, 0.0), (True, 0.1)])
def test_adam_equals_torch(decoupled: bool, amsgrad: bool, maximize: bool, weight_decay: float) -> None:
    call = Adam(decoupled, 0.9, 0.999, weight_decay, 1e-8, amsgrad, maximize)
    arguments = adam_arguments(SIZES, amsgrad)
    grads = [randoms(SIZES, 10 + at) for at in range(2)]
    expected = adam_by_torch(call, arguments, grads)
    arguments[1] = grads[0]
    interpret(call, arguments)
    arguments[1] = grads[1]
    assert_close(interpret(call, arguments), expected, 8.0)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("beta2", [0.999, 1.0])
def test_adam_of_zeros_infinities_and_nan_equals_torch(eps: float, beta2: float) -> None:
    """To the bit: a state without a gradient so far, infinities, NaNs, in all combinations."""
    odd = [0.0, -0.0, 1.0, -2.5, 1e-30, 1e-44, float("inf"), -float("inf"), float("nan")]
    average, square = (t.flatten() for t in torch.meshgrid(torch.tensor(odd), torch.tensor(odd).abs(), indexing="ij"))
    param, zero = torch.linspace(-1, 1, len(square)), torch.zeros_like(square)
    states = [[state.clone()] for state in (param, zero, average, square)]
    arguments = [*states, [], [torch.tensor(2.0)], 0.01, None, None, None]
    (new, *_) = interpret(Adam(True, 0.9, beta2, 0.0, eps), arguments)
    with np.errstate(all="ignore"):
        first, second = (np.float32(beta) for beta in (0.9, beta2))
        correction = np.sqrt(np.float32(1) - np.float32(np.float64(second) ** 3))
        size = np.float32(0.01) / (np.float32(1) - np.float32(np.float64(first) ** 3))
        denominator = np.sqrt(square.numpy() * second) / correction + np.float32(eps)
        expected = param.numpy() - size * (average.numpy() * first) / denominator
    torch.testing.assert_close(new, torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rate", [0.02, Symbol(0.02), torch.tensor(0.02), torch.tensor(0.02, dtype=torch.float64)])
def test_a_rate_is_constant_or_a_number_or_a_tensor(rate: Any) -> None:
    call = Adam(True, 0.9, 0.99, 0.1, 1e-8)
    arguments = adam_arguments([40], False, rate)
    expected = adam_by_torch(call, arguments, [arguments[1]])
    assert_close(interpret(call, arguments), expected)


def test_adam_clips_and_unscales_in_registers() -> None:
    call = Adam(True, 0.9, 0.999, 0.01, 1e-8)
    arguments = adam_arguments(SIZES, False)
    grads = [g.clone() for g in arguments[1]]
    arguments[7], arguments[8], arguments[9] = torch.tensor(0.25), torch.tensor(2.0), torch.tensor(0.0)
    expected = adam_by_torch(call, arguments, [[g * 0.125 for g in grads]])
    assert_close(interpret(call, arguments), expected)
    assert all(torch.equal(a, b) for a, b in zip(arguments[1], grads, strict=True))


def test_adam_changes_no_tensor_where_a_gradient_overflowed() -> None:
    call = Adam(True, 0.9, 0.999, 0.01, 1e-8, advance=False)
    arguments = adam_arguments(SIZES, False)
    arguments[9] = torch.tensor(1.0)
    before = [t.clone() for at in (0, 2, 3) for t in arguments[at]]
    results = interpret(call, arguments)
    assert all(torch.equal(a, b) for a, b in zip(results, before, strict=True))


def test_adam_of_bfloat16_rounds_once_a_tensor() -> None:
    call = Adam(True, 0.9, 0.999, 0.01, 1e-8)
    arguments = adam_arguments(SIZES, False, dtype=torch.bfloat16)
    expected = adam_by_torch(call, arguments, [arguments[1]])
    assert_close(interpret(call, arguments), expected, 0.51)


def test_tensors_of_several_dtypes_are_a_launch_each() -> None:
    call = Adam(True, 0.9, 0.999, 0.01, 1e-8)
    arguments = adam_arguments(SIZES, False)
    for list_ in arguments[:4]:
        list_[1] = list_[1].bfloat16()
        list_[4] = list_[4].bfloat16()
    expected = adam_by_torch(call, arguments, [arguments[1]])
    assert len(call.plan(arguments).launches) == 3
    results = interpret(call, arguments)
    assert_close(results, expected, 4.0)


def test_step_counts_of_long_training() -> None:
    call = Adam(True, 0.9, 0.999, 0.01, 1e-8)
    arguments = adam_arguments([2] * 200, False)
    arguments[5] = [torch.tensor(float(at * at * 7)) for at in range(200)]
    expected = adam_by_torch(call, arguments, [arguments[1]])
    assert_close(interpret(call, arguments), expected, 16.0)


# ---- SGD


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("maximize", "weight_decay"), [(False, 0.0), (True, 0.1)])
def test_sgd_equals_torch(first: bool, nesterov: bool, maximize: bool, weight_decay: float) -> None:
    call = Sgd(0.9, weight_decay, 0.0 if nesterov else 0.1, nesterov, maximize, first)
    params, grads, momenta = (randoms(SIZES, seed) for seed in range(3))
    leaves = [torch.nn.Parameter(p.double()) for p in params]
    optimizer = torch.optim.SGD(
        leaves,
        lr=0.05,
        momentum=0.9,
        weight_decay=weight_decay,
        dampening=call.dampening,
        nesterov=nesterov,
        maximize=maximize,
        foreach=False,
    )
    for leaf, grad, momentum in zip(leaves, grads, momenta, strict=True):
        leaf.grad = grad.double() * 0.5
        optimizer.state[leaf]["momentum_buffer"] = None if first else momentum.double()
    optimizer.step()
    expected = [*(leaf.detach() for leaf in leaves), *(optimizer.state[leaf]["momentum_buffer"] for leaf in leaves)]
    if first:
        momenta = [torch.full_like(m, torch.nan) for m in momenta]
    assert_close(interpret(call, [params, grads, momenta, Symbol(0.05), torch.tensor(0.5), None, None]), expected)


def test_the_first_momentum_of_a_negated_gradient_keeps_the_signs_of_zeros() -> None:
    call = Sgd(0.9, 0.0, 0.0, False, True, True)
    grad, leaf = torch.tensor([0.0, -0.0, 1.0]), torch.nn.Parameter(torch.ones(3))
    leaf.grad = grad.clone()
    optimizer = torch.optim.SGD([leaf], lr=0.1, momentum=0.9, maximize=True, foreach=False)
    optimizer.step()
    new = interpret(call, [[torch.ones(3)], [grad], [torch.zeros(3)], 0.1, None, None, None])
    assert torch.equal(new[1].signbit(), optimizer.state[leaf]["momentum_buffer"].signbit())


def test_sgd_without_momentum() -> None:
    call = Sgd(0.0, 0.1, 0.0, False, False, False)
    params, grads = randoms(SIZES, 0), randoms(SIZES, 1)
    expected = [p.double() - 0.1 * (g.double() + 0.1 * p.double()) for p, g in zip(params, grads, strict=True)]
    assert_close(interpret(call, [params, grads, [], torch.tensor(0.1), None, None, None]), expected)


# ---- norms


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(order: float, dtype: torch.dtype) -> None:
    tensors = randoms([*SIZES, 40_000], 0, dtype)
    expected = [torch.stack([t.double().norm(order) for t in tensors])]
    assert_close(interpret(Norm(order), [tensors]), expected)


@pytest.mark.parametrize("known", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_tensors_and_of_known_sums_of_squares(known: int, dtype: torch.dtype) -> None:
    tensors = randoms(SIZES, 0, dtype)
    squares = randoms([1056, 3, 1500][:known], 1, low=0.1)
    (norms,) = interpret(call := NormOfSquares(len(SIZES) + 5, torch.float32), [squares, tensors])
    exact = torch.cat([torch.cat([t.flatten().double() for t in tensors]).square(), *(s.double() for s in squares)])
    assert norms.shape == (len(SIZES) + 5,)
    torch.testing.assert_close(norms.norm().double(), exact.sum().sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms, call(squares, tensors)[0][0], rtol=1e-6, atol=0)
    (norms,) = interpret(NormOfSquares(known, torch.float32), [squares, []])
    torch.testing.assert_close(norms, torch.stack([s.sum().sqrt() for s in squares]))


def test_norms_are_deterministic() -> None:
    tensors = randoms([30_000, 5, 2000], 0)
    first, second = interpret(Norm(2.0), [tensors]), interpret(Norm(2.0), [tensors])
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts(dtype: torch.dtype) -> None:
    tensors = [*randoms(SIZES, 0), *randoms([30], 1, torch.bfloat16)]
    results = interpret(Cast(dtype), [tensors])
    assert all(torch.equal(result, t.to(dtype)) for result, t in zip(results, tensors, strict=True))


# ---- chains


OPERANDS: dict[Any, tuple[Any, ...]] = {
    aten._foreach_lerp.Scalar: (Lists(1, False), 0.3),
    aten._foreach_addcmul.Scalar: (Lists(1, False), Lists(2, False), 0.5),
    aten._foreach_addcmul.ScalarList: (Lists(1, False), Lists(2, False), Scalars(3)),
    aten._foreach_addcdiv.Scalar: (Lists(1, False), Lists(2, False), -0.5),
    aten._foreach_addcdiv.ScalarList: (Lists(1, False), Lists(2, False), Scalars(3)),
}
BY_OVERLOAD: dict[str, tuple[Any, ...]] = {
    "List": (Lists(1, False),),
    "Scalar": (0.7,),
    "ScalarList": (Scalars(3),),
    "Tensor": (Scalars(4),),
}


@pytest.mark.parametrize("op", EXPRESSIONS, ids=str)
def test_each_operation_of_a_chain(op: Any) -> None:
    further = OPERANDS.get(op, BY_OVERLOAD.get(op._overloadname, ()))
    if op is aten._foreach_copy.default:
        further = (Lists(1, False),)
    sizes = [5, 1025]
    lists = [randoms(sizes, seed, low=0.3) for seed in range(3)]
    arguments = [*lists, [0.4, 1.7], torch.tensor(0.6)]
    call = Foreach((Step(op, (Lists(0, False), *further), ()),), ((0, 0 if op in UNREAD else -1),))
    used = [0, *(o.at for o in further if not isinstance(o, float))]
    expected = [t.clone() for t in call(*arguments)[0]]
    results = interpret(call, [argument if at in used else [] for at, argument in enumerate(arguments)])
    assert_close(results, expected, 2.0)


def test_lerp_from_either_end() -> None:
    for weight in (0.2, 0.8):
        call = Foreach((Step(aten._foreach_lerp.Scalar, (Lists(0, False), Lists(1, False), weight), ()),), ((0, -1),))
        a, b = randoms([100], 0), randoms([100], 1)
        assert_close(interpret(call, [a, b]), call(a, b)[0], 2.0)


def test_a_chain_rounds_what_would_have_been_stored() -> None:
    """In bfloat16: (a + b) * b, an average in place, and the product kept too."""
    a, b = randoms(SIZES, 0, torch.bfloat16), randoms(SIZES, 1, torch.bfloat16)
    add = Step(aten._foreach_add.List, (Lists(0, False), Lists(1, False)), (("alpha", Scalars(2)),))
    mul = Step(aten._foreach_mul.List, (Lists(0, True), Lists(1, False)), ())
    call = Foreach((add, mul), ((1, -1), (0, 0)))
    expected = [tensor for list_ in call(a, b, 0.5) for tensor in list_]
    results = interpret(call, [a, b, Symbol(0.5)])
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert results[len(SIZES)].data_ptr() == a[0].data_ptr()


# ---- tables


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=50), st.sampled_from([1024, 2048, 16384]))
def test_chunks_cover_each_element_once(sizes: list[int], chunk: int) -> None:
    table = planning.chunk_table(sizes, [at + 7 for at in range(len(sizes))], chunk).tolist()
    seen: dict[int, list[range]] = {}
    for tensor, number, count, label in table:
        assert label == tensor + 7
        assert 0 < count <= chunk
        seen.setdefault(tensor, []).append(range(number * chunk, number * chunk + count))
    for tensor, size in enumerate(sizes):
        assert sorted(i for covered in seen.get(tensor, []) for i in covered) == list(range(size))
    ranges = planning.chunk_ranges(sizes, list(range(len(sizes))), chunk).tolist()
    for tensor, (first, count, label, _) in enumerate(ranges):
        assert label == tensor
        assert all(row[0] == tensor for row in table[first : first + count])
        assert count == len(seen.get(tensor, []))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_unaligned_tensors_give_the_same_results(sizes: list[int], random: Any) -> None:
    """Sizes and addresses of all kinds, aligned or not."""
    call = Sgd(0.9, 0.0, 0.0, False, False, False)
    memory = [torch.randn(sum(sizes) + 16 * len(sizes)) for _ in range(3)]
    lists: list[list[Tensor]] = [[], [], []]
    for store, list_ in zip(memory, lists, strict=True):
        at = 0
        for size in sizes:
            at += random.choice([0, 1, 4 - at % 4])
            list_.append(store[at : at + size])
            at += size
    params, grads, momenta = lists
    momenta_after = [0.9 * m.double() + g.double() for m, g in zip(momenta, grads, strict=True)]
    expected = [p.double() - 0.1 * m for p, m in zip(params, momenta_after, strict=True)]
    results = interpret(call, [params, grads, momenta, torch.tensor(0.1), None, None, None])
    assert_close(results, [*expected, *momenta_after])


def test_chunks_are_smaller_where_there_are_more_multiprocessors() -> None:
    sizes = [1 << 22]
    assert [planning.chunk_elements(sizes, count) for count in (16, 132, 264)] == [16384, 2048, 1024]


def test_a_row_of_addresses_says_whether_all_are_aligned() -> None:
    a, b = torch.zeros(64), torch.zeros(64)
    table = planning.pointer_table([[t.data_ptr() for t in row] for row in ([a, b], [a, b[1:]], [a[4:], b[8:]])])
    assert table[2::3].tolist() == [1, 0, 1]
    assert table[3:5].tolist() == [a.data_ptr(), b.data_ptr() + 4]


def test_a_call_holds_nothing_of_what_it_was_tensors_or_made() -> None:
    build = StepBuilder()
    tensors = [torch.randn(40), torch.randn(3, 5)]
    node = build.call(Norm(2.0), [build.input(value) for value in tensors], val=[[torch.empty(2)]])
    launcher = Launcher(node)
    ((norms,),) = launcher(tensors)
    torch.testing.assert_close(norms, torch.stack([value.norm() for value in tensors]))
    alive = [weakref.ref(tensor) for tensor in (*tensors, norms)]
    del build, node, tensors, norms
    gc.collect()
    assert not any(reference() is not None for reference in alive)


# ---- on a GPU


def big(call: str, dtype: torch.dtype) -> tuple[MultiTensor, list[Any], int]:
    """A call on tensors of 64 Mi elements in all, and how many arrays of `dtype` its main kernel reads."""
    meta = [torch.empty(1 << 26, dtype=dtype, device="meta")]
    scalar = torch.empty((), device="meta")
    if call == "norm":
        return Norm(2.0), [meta], 1
    if call == "sgd":
        return Sgd(0.9, 0.1, 0.0, True, False, False), [meta, meta, meta, 0.1, scalar, None, None], 3
    if call == "foreach":
        steps = (Step(aten._foreach_addcdiv.Scalar, (Lists(0, False), Lists(1, False), Lists(2, False), -0.5), ()),)
        return Foreach(steps, ((0, 0),)), [meta, meta, meta], 3
    steps_ = [torch.empty((), device="meta")]
    arguments = [meta, meta, meta, meta, meta, steps_, 0.1, scalar, scalar, scalar]
    return Adam(True, 0.9, 0.999, 0.01, 1e-8, amsgrad=True), arguments, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd", "norm", "foreach"])
def test_kernels_for_hopper_load_16_bytes_and_spill_nothing(name: str, dtype: torch.dtype) -> None:
    call, arguments, arrays = big(name, dtype)
    for launch in call.plan(arguments).launches:
        resources = inspect_kernel(launch.kernel)
        assert resources.spills == 0
        assert resources.registers <= 128
        if "CHUNK" in launch.kernel.constants:
            assert resources.vector_loads >= arrays
