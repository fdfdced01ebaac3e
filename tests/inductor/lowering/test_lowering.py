"""Lowerings against eager: samples of torch's database of operations, and cases that it lacks.

A sample becomes a graph of ATen operations (with its backward, for floats), the graph loop nests, and the oracle
computes the nests. Operations without a lowering run as they are, so that a failure is that of a lowering.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nest_eval import run_items
from opinfo_cases import database
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Input, Return, Role
from weft.inductor.codegen.kernel import supports
from weft.inductor.loop_ir.ir import Reduce
from weft.inductor.lowering import all_lowerings  # noqa: F401 - fills the table
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Loop, Lowered
from weft.inductor.lowering.registry import LOWERINGS
from weft.inductor.lowering.split import choose_split
from weft.inductor.passes.decompositions import decompositions

aten = torch.ops.aten


def traced(function: Callable[..., Any], args: Sequence[Any], mode: str = "fake") -> StepGraph:
    graph = make_fx(lambda *given: tuple(tree_leaves(function(*given))), tracing_mode=mode)(*args).graph
    results = graph.output_node().args[0]
    inputs = [Input(node.name, Role.BATCH, node.name) for node in graph.nodes if node.op == "placeholder"]
    return StepGraph(graph, inputs, [Return(at) for at in range(len(results))])


def lowered(function: Callable[..., Any], *args: Any) -> Lowered:
    step = traced(function, args)
    return lower(step, list(step.graph.nodes))


def check(function: Callable[..., Any], *args: Any, tolerance: float = 2e-5) -> Lowered:
    """Lower and compare with eager; integers must be equal."""
    result = lowered(function, *args)
    compare(result, function, args, tolerance)
    return result


def compare(
    result: Lowered,
    function: Callable[..., Any],
    args: Sequence[Any],
    tolerance: float,
    numbers: Mapping[str, int] | None = None,
) -> None:
    found = run_items(result, result.operations, args, numbers)
    for mine, wanted in zip(found, tree_leaves(function(*args)), strict=True):
        if isinstance(wanted, torch.Tensor):
            assert mine.dtype == wanted.dtype
            close = {"rtol": tolerance, "atol": tolerance} if wanted.dtype == torch.float32 else {}
            if wanted.dtype == torch.bfloat16:  # eager rounds after every operation
                close = {"rtol": 0.05, "atol": 0.05}
            torch.testing.assert_close(mine, wanted.detach(), equal_nan=True, **close)


def names(result: Lowered) -> Counter[str]:
    """How often each operation became nests."""
    return Counter(str(node.target) for node in {item.node for item in result.operations if isinstance(item, Loop)})


# ---- torch's database

_OPERATIONS = """
add sub mul div pow floor_divide remainder fmod neg abs sign reciprocal square sqrt rsqrt exp exp2 expm1 log log2
log1p sin cos tanh sigmoid erf floor ceil trunc round isnan isinf logical_not logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor bitwise_not eq ne lt le gt ge where clamp clamp_min clamp_max minimum maximum
nn.functional.relu nn.functional.leaky_relu nn.functional.hardtanh nn.functional.elu nn.functional.silu
nn.functional.gelu clone full full_like ones_like zeros_like new_full new_ones new_zeros fill arange eye to sum mean
prod any all amax amin max min argmax argmin var var_mean std std_mean linalg.vector_norm norm softmax log_softmax
nn.functional.nll_loss nn.functional.cross_entropy native_layer_norm nn.functional.layer_norm cat stack
constant_pad_nd flip slice_scatter select_scatter tril triu gather index_select __getitem__ nn.functional.embedding
index_put index_add scatter_add
"""
_SAMPLES = 4
_TYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
_BY_NAME = {op.name: op for op in database.op_db}

# The mean of one number is the number: what is left of its gradient is rounding, and eager's rounding differs.
_WIDTH_ONE = {"nn.functional.layer_norm", "native_layer_norm"}


def _cases() -> Iterator[tuple[str, torch.dtype]]:
    for name in _OPERATIONS.split():
        if name in _BY_NAME:
            yield from ((name, dtype) for dtype in _TYPES if dtype in _BY_NAME[name].supported_dtypes("cpu"))


def _samples(name: str, dtype: torch.dtype) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Functions of tensors: the operation, and for floats the gradients of its inputs too."""
    op = _BY_NAME[name]
    gradients = dtype.is_floating_point and op.supports_autograd
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), _SAMPLES):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def function(*tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec, at: Any = at) -> Any:
            given = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                given[i] = tensor
            first, args, kwargs = tree_unflatten(given, spec)
            result = op.op(first, *args, **kwargs)
            return (result, _gradients(result, tensors)) if gradients else result

        yield function, [leaves[i] for i in at]


def _gradients(result: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [out for out in tree_leaves(result) if isinstance(out, torch.Tensor) and out.requires_grad]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not inputs:
        return []
    weights = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape) for out in outputs]
    found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _unknown(node: torch.fx.Node) -> bool:
    """Whether the data decides a size."""
    return any(isinstance(t, torch.Tensor) and None in map(_int, t.shape) for t in tree_leaves(node.meta.get("val")))


def _int(size: Any) -> int | None:
    return size if type(size) is int else None


def _plain(step: StepGraph) -> bool:
    """Whether every value is an input's or an operation's, of a size known when traced."""
    return bool(step.placeholders) and not any(node.op == "get_attr" or _unknown(node) for node in step.graph.nodes)


@pytest.mark.parametrize(("name", "dtype"), list(_cases()), ids=lambda value: str(value).removeprefix("torch."))
def test_lowerings_of_opinfo_samples_match_eager(name: str, dtype: torch.dtype) -> None:
    ran = 0
    for function, tensors in _samples(name, dtype):
        if name in _WIDTH_ONE and tensors[0].shape[-1:] == (1,):
            continue
        step = traced(function, tensors)
        if not _plain(step):
            continue
        result = lower(step, list(step.graph.nodes))
        compare(result, function, tensors, 2e-5)
        ran += 1
    if not ran:
        pytest.skip("every sample reads a constant of its own")


def test_opinfo_samples_use_most_lowerings() -> None:
    first = dict(reversed([*_cases()]))  # of each operation its first dtype, which is a float's where it has one
    steps = (traced(*sample) for name, dtype in first.items() for sample in itertools.islice(_samples(name, dtype), 1))
    used = {node.target for step in steps if _plain(step) for node in step.graph.nodes} & set(LOWERINGS)
    print(f"\n{len(LOWERINGS)} operations have a lowering, samples of the database use {len(used)}")
    assert len(used) > 80
    assert not set(LOWERINGS) & set(decompositions()), "decomposed before its lowering could see it"


# ---- cases of our own


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_views_are_read_as_strided_operands() -> None:
    x = _x(6, 8)
    result = check(lambda a, b: (a.t()[2:, ::2] * b[:, None] + a[0, 3], a.expand(2, 6, 8).sum(0)), x, _x(6))
    assert not result.reasons


@pytest.mark.parametrize("name", ["and", "or", "xor"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_operators_of_python_below_dtensor(name: str, dtype: torch.dtype) -> None:
    """Where DTensor's code writes ``a | b``, below autograd, the graph has the operator itself."""
    operator = getattr(torch.ops.aten, f"__{name}__")
    a, b = (torch.randint(0, 2 if dtype == torch.bool else 99, (5, 7)).to(dtype) for _ in range(2))
    assert not check(lambda a, b: operator.Tensor(a, b), a, b).reasons
    assert not check(lambda a: operator.Scalar(a, True if dtype == torch.bool else 6), a).reasons


def test_a_cast_to_half_precision_rounds_inside_a_kernel() -> None:
    x = _x(64) * 100
    result = check(lambda a: a.bfloat16().float() - a.half().float(), x)
    assert "round_bfloat16" in "".join(str(item.nest) for item in result.operations if isinstance(item, Loop))


def test_type_promotion_of_numbers_and_tensors_matches_eager() -> None:
    i, h, b = torch.arange(5), _x(5, dtype=torch.bfloat16), torch.tensor([True, False, True, True, False])
    result = check(lambda i, h, b: (i * 2.5, i / 2, h * 3, h + i, b + 1, b + b, b * b, i // 2, i % -3), i, h, b)
    assert not result.reasons


def test_comparisons_round_numbers_as_eager_does() -> None:
    values = torch.tensor([0.1, 0.3, -0.1], dtype=torch.bfloat16)
    check(lambda x, i: (x < 0.1, x == 0.1, x >= 0.3, i < 2.5), values, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_division_of_floats_rounds_as_eager_does(mode: str) -> None:
    x = torch.tensor([7.0, -7.0, 0.3, 5.5, 1.0, -1.0, float("inf"), float("nan"), 0.0])
    y = torch.tensor([2.0, 2.0, 0.1, -2.5, 0.1, 0.0, 2.0, 1.0, 0.0])
    assert not check(lambda a, b: torch.div(a, b, rounding_mode=mode), x, y).reasons


def test_min_max_and_clamp_propagate_nan() -> None:
    x = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 1.0, -1.0]])
    check(lambda a: (a.amax(1), a.amin(1), a.clamp(0, 2), torch.maximum(a, a.flip(0)), a.relu(), a.max(1)), x)


def test_results_have_the_strides_of_the_fake_tensors() -> None:
    x = _x(2, 3, 4, 5).to(memory_format=torch.channels_last)
    result = check(lambda a: (a + 1, a.clone(), F.softmax(a, 1), a.transpose(0, 3).exp()), x)
    for node in result.step.results:
        assert result.operands[node].strides == node.meta["val"].stride()


# ---- reductions in two stages


def test_split_reductions_use_divisors_where_possible() -> None:
    columns = choose_split((64, 197, 768), (0, 1), [(197 * 768, 768, 1)], 132)
    assert columns is not None
    assert {axis: cut.outer for axis, cut in columns.items()} == {0: 1, 1: 197}
    tokens = choose_split((8192, 4096), (0,), [(4096, 1)], 132)
    assert tokens is not None
    assert 132 <= tokens[0].outer <= 264
    assert tokens[0].outer * tokens[0].inner == 8192


@pytest.mark.parametrize(("columns", "programs"), [(16, 8), (96, 8), (256, 8), (4096, 64)])
def test_few_columns_are_split_into_more_parts(columns: int, programs: int) -> None:
    """Two programs a multiprocessor, of four warps, would wait for memory most of the time."""
    split = choose_split((1 << 20, columns), (0,), [(columns, 1)], 132)
    assert split is not None
    made = split[0].outer * -(-columns // 64) / 132
    assert programs / 2 <= made <= 2 * programs


def test_parts_of_columns_lie_as_the_operand_does() -> None:
    """Sums over images with channels innermost: a program writes neighbouring channels to neighbouring elements."""
    images = _x(64, 40, 14, 14).to(memory_format=torch.channels_last)
    result = check(lambda x: x.sum((0, 2, 3)), images)
    (part,) = (buffer for name, buffer in result.buffers.items() if "part" in name)
    assert part.strides[1] == 1
    assert math.prod(part.sizes) == 1 + sum(
        (n - 1) * stride for n, stride in zip(part.sizes, part.strides, strict=True)
    )


def test_a_reduction_of_operands_that_lie_across_each_other_is_split_as_columns() -> None:
    """One program a column would load a sector for each element of the second operand."""
    along, across = (150528, 1, 196), (150528, 768, 1)
    assert choose_split((64, 196, 768), (0, 1), [along], 132) is None
    split = choose_split((64, 196, 768), (0, 1), [along, across], 132)
    assert split is not None
    assert 132 <= split[0].outer * split[1].outer <= 264
    assert choose_split((64, 196, 768), (0, 1), [along, across, along], 132) is None  # most lie along memory


def test_gradients_of_a_layer_norm_are_split_by_how_its_operands_lie() -> None:
    """Gradients of weight and bias where the input is transposed, and where it is a transposed result of memory that is
    not."""
    norm = _with_gradients(lambda x, w, b: F.layer_norm(x, (40,), w, b), (1, 2))
    w, b = _x(40), _x(40)
    transposed = _x(64, 40, 196).transpose(1, 2)
    images = _x(64, 40, 14, 14).to(memory_format=torch.channels_last)
    for x in (transposed, images.flatten(2).transpose(1, 2), _x(64, 196, 40)):
        result = check(norm, x, w, b)
        stages = [item for item in result.operations if isinstance(item, Loop) and "backward" in item.node.name]
        assert len(stages) >= 2, "the sums have two stages"


def test_reductions_with_enough_results_are_not_split() -> None:
    assert choose_split((4096, 768), (1,), [(768, 1)], 132) is None
    assert choose_split((4096, 50257), (0,), [(50257, 1)], 132) is None
    assert choose_split((300, 700), (0, 1), [(700, 1)], 132) == choose_split((300, 700), (0, 1), [(700, 1)], 132)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((64, 197, 12), (0, 1)),
        ((1031, 20), (0,)),  # prime: the last part is shorter
        ((1031, 97), (0, 1)),
        ((7, 6, 5000), (0, 2)),
        ((31, 7, 16, 23), (0, 2, 3)),
    ],
)
def test_two_stage_reductions_match_eager(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    x = _x(*shape) + 1
    result = check(
        lambda a: (a.sum(dims), a.mean(dims), a.amax(dims), (a > 4).any(-1), torch.var_mean(a, dims), a.std(dims)),
        x,
        tolerance=2e-4,
    )
    first = result.step.results[0].name
    stages = [item.nest for item in result.operations if isinstance(item, Loop) and item.node.name == first]
    assert len(stages) == 2
    assert all(any(isinstance(value, Reduce) for value in nest.values()) for nest in stages)


@pytest.mark.parametrize("shape", [(10007, 3), (3, 10007), (101, 103, 5), (10007,)])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_variances_of_all_elements_are_two_kernels(shape: tuple[int, ...], mode: str) -> None:
    """Sizes without divisors, and symbolic ones: the last part of one axis is shorter, other axes are reduced too."""
    variance = lambda x: torch.var_mean(x)
    step = traced(variance, [_x(*shape)], mode)
    result = lower(step, list(step.graph.nodes))
    assert [supports(item.nest) for item in result.operations if isinstance(item, Loop)] == [None, None]
    if mode == "fake":
        compare(result, variance, [_x(*shape)], 2e-5)


def test_two_stage_argmax_and_argmin_match_eager() -> None:
    x = _x(1031, 40)
    check(lambda a: (a.argmax(), a.argmin(), a.max(0), a.min(0)), torch.cat([x, x]))


# ---- families


def _with_gradients(function: Callable[..., torch.Tensor], wanted: Sequence[int]) -> Callable[..., Any]:
    def both(*args: torch.Tensor) -> Any:
        given = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
        out = function(*given)
        return out, torch.autograd.grad(out.square().sum(), [given[i] for i in wanted])

    return both


@pytest.mark.parametrize("width", [(48,), (12, 48)])
def test_layer_norm_and_its_gradients_match_eager(width: tuple[int, ...]) -> None:
    x, w, b = _x(6, 64, 12, 48).double(), _x(*width).double(), _x(*width).double()
    norm = _with_gradients(lambda x, w, b: F.layer_norm(x, width, w, b), (0, 1, 2))
    assert names(check(norm, x, w, b))["aten.native_layer_norm_backward.default"] == 1


def test_layer_norm_of_bfloat16_computes_in_float32() -> None:
    x, w = _x(16, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    result = lowered(lambda x, w: F.layer_norm(x, (64,), w), x, w)
    (found,) = run_items(result, result.operations, [x, w])
    wanted = F.layer_norm(x.double(), (64,))
    assert (found.double() - wanted).abs().max() <= (wanted.bfloat16().double() - wanted).abs().max() * 1.01


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_and_its_gradient_match_eager(reduction: str, weighted: bool) -> None:
    scores, labels = _x(300, 17), torch.randint(0, 17, (300,), generator=torch.Generator().manual_seed(0))
    labels[::7] = -100
    weight = [torch.rand(17)] * weighted

    def loss(scores: torch.Tensor, labels: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels, *weight, reduction=reduction)

    assert not check(_with_gradients(loss, (0,)), scores, labels, *weight).reasons


def test_advanced_indexing_matches_eager() -> None:
    x, i, j = _x(5, 4, 6), torch.tensor([[0, -1, 3], [2, 1, -5]]), torch.tensor([1, -2, 0])
    result = check(lambda x, i, j: (x[i], x[:, j], x[i, j], x[i, :, j], x[:, j, j]), x, i, j)
    assert not result.reasons


def test_sums_by_index_into_few_rows_match_eager() -> None:
    rows, at = _x(8, 100, 5), torch.randint(0, 4, (8, 100), generator=torch.Generator().manual_seed(1))
    result = check(
        lambda g, i: (
            aten.embedding_dense_backward(g, i, 4, 1, False),
            torch.zeros(4, 5).index_put([i - 4], g, accumulate=True),
            torch.ones(4, 5).index_add(0, i[0], g[0], alpha=2),
            torch.ones(8, 4).scatter_add(1, i, g[..., 0]),
        ),
        rows,
        at,
        tolerance=2e-4,
    )
    assert not result.reasons


MASKED: dict[str, Callable[..., torch.Tensor]] = {
    "a number": lambda x, mask, row, number: x.index_put([mask], number),
    "whole rows": lambda x, mask, row, number: x.index_put([mask[:, 0]], number),
    "one row for all": lambda x, mask, row, number: x.index_put([mask[:, 0]], row),
    "one row with its own dimension": lambda x, mask, row, number: x.index_put([mask[:, 0]], row[None]),
    "columns, a value per row": lambda x, mask, row, number: aten.index_put.default(x, [None, mask[0]], row[:4, None]),
    "columns, one value": lambda x, mask, row, number: aten.index_put.default(x, [None, mask[0]], row[:1]),
    "added": lambda x, mask, row, number: x.index_put([mask], number, accumulate=True),
}


@pytest.mark.parametrize("number", [-0.0, 3.0, float("nan")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_assignments_by_a_mask_match_eager(name: str, dtype: torch.dtype, number: float) -> None:
    x, row, mask = (10 * _x(4, 6)).to(dtype), (3 * _x(6)).to(dtype), _x(4, 6) < 0
    value = torch.tensor(number).nan_to_num(7.0).long() if dtype == torch.int64 else torch.tensor(number).to(dtype)
    assert not check(MASKED[name], x, mask, row, value, tolerance=0.0).reasons


def test_values_by_the_number_of_selected_elements_stay_with_aten() -> None:
    x, mask = _x(4, 6), torch.tensor([True, False, True, False])
    assert lowered(lambda x, m: x.index_put([m], x[:2]), x, mask).reasons["aten.index_put.default"] == 1
    assert lowered(lambda x, m, i: x.index_put([i, m], x[0, :2]), x, mask.new_ones(6), torch.tensor([1])).reasons


def test_sums_by_index_into_many_rows_stay_with_aten() -> None:
    rows, at = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.int64)
    result = lowered(lambda g, i: aten.embedding_dense_backward(g, i, 50000, -1, False), rows, at)
    assert result.reasons["aten.embedding_dense_backward.default"] == 1


ONE_A_ROW: dict[str, Callable[..., torch.Tensor]] = {
    "a value per row": lambda x, at, values: x.index_put([torch.arange(4), at], values),
    "one value": lambda x, at, values: x.index_put([torch.arange(4), at], values[0]),
    "one value with its own dimension": lambda x, at, values: x.index_put([torch.arange(4), at], values[:1]),
    "counted from the end": lambda x, at, values: x.index_put([torch.arange(4), at - 6], values),
    "added": lambda x, at, values: x.index_put([torch.arange(0, 4), at], values, accumulate=True),
    "scattered": lambda x, at, values: x.scatter(1, at[:, None], values[:, None]),
    "one number scattered": lambda x, at, values: x.scatter(-1, at[:, None], 0.1),
    "scattered along rows": lambda x, at, values: x.t().scatter(0, at[None], values[None]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONE_A_ROW)
def test_an_assignment_of_one_element_a_row_is_a_choice_at_each_element(name: str, dtype: torch.dtype) -> None:
    x, values, at = (10 * _x(4, 6)).to(dtype), (3 * _x(4)).to(dtype), torch.tensor([5, 0, 3, 0])
    assert not check(ONE_A_ROW[name], x, at, values, tolerance=0.0).reasons


def test_other_assignments_by_index_are_left_to_aten() -> None:
    x, at = _x(4, 6), torch.tensor([5, 0, 3, 0])
    others: list[Callable[..., torch.Tensor]] = [
        lambda x, i: x.index_put([torch.arange(3, -1, -1), i], x[:, 0]),  # rows in another order
        lambda x, i: x.index_put([torch.arange(1, 4), i[:3]], x[:3, 0]),  # not all rows
        lambda x, i: x.index_put([i[:, None] % 4, i], x[0, :4]),  # several elements of a row
    ]
    for other in others:
        assert lowered(other, x, at).reasons["aten.index_put.default"] == 1
    assert lowered(lambda x, i: x.scatter(1, i[:2, None], 1.0), x, at).reasons["aten.scatter.value"] == 1
    assert lowered(lambda x, i: x.scatter(1, i[None], x), x, at).reasons["aten.scatter.src"] == 1


def test_dropout_applies_and_scales_its_mask() -> None:
    x = _x(64, 256)
    result = lowered(lambda x: aten.native_dropout(x, 0.25, True), x)
    out, kept = run_items(result, result.operations, [x])
    assert result.seeds
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0))


def test_every_random_operation_has_its_own_seed() -> None:
    result = lowered(lambda x: (torch.rand_like(x), torch.randn_like(x), aten.bernoulli.p(x, 0.5)), _x(8))
    loads = {str(load) for item in result.operations if isinstance(item, Loop) for load in item.nest.reads}
    assert loads == {"rng.seed[0]", "rng.seed[1]", "rng.seed[2]"}


def test_small_concatenations_are_loads_and_large_ones_are_stores() -> None:
    x, y = _x(3, 4), _x(3, 2)
    few = check(lambda a, b: (torch.cat([a, b, a], 1), torch.cat([a.half(), b], -1)), x, y)
    assert not few.reasons
    tiny = check(lambda a, b: torch.cat([a[0], b[0]] * 10), x, y)
    assert tiny.reasons == {"aten.cat.default": 1}
    many = check(lambda a, b: torch.cat([a, b, a, b, a]), x, _x(3, 4) + 1)
    assert not many.reasons
    offsets = [item.nest.stores[0].index.offset for item in many.operations if isinstance(item, Loop)]
    assert offsets[:5] == [0, 12, 24, 36, 48]


def test_padding_and_cropping_match_eager() -> None:
    result = check(lambda a: (F.pad(a, (1, 2, 3, 0)), F.pad(a, (0, -1), value=2.0), F.pad(a, (-1, 3))), _x(4, 1, 5))
    assert not result.reasons


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (2, 2, 0), ((3, 2), (1, 2), (1, 0)), (5, 3, 2)])
def test_pooling_and_its_gradients_match_eager(size: Any, stride: Any, padding: Any) -> None:
    x = _x(2, 3, 13, 16)
    x[0, 0, 4:8, 4:8] = float("nan")
    x[0, 1] = -float("inf")
    result = check(_with_gradients(lambda a: F.avg_pool2d(a, size, stride, padding), (0,)), _x(2, 3, 13, 16))
    assert not result.reasons
    assert not check(lambda a: F.avg_pool2d(a, size, stride, padding, count_include_pad=False), x).reasons
    assert not check(lambda a: F.max_pool2d(a, size, stride, padding, return_indices=True), x).reasons
    ties = _x(2, 3, 13, 16).round().to(memory_format=torch.channels_last)
    assert not check(_with_gradients(lambda a: F.max_pool2d(a, size, stride, padding), (0,)), ties).reasons


def test_empty_tensors_stay_with_aten() -> None:
    assert check(lambda a: (a + 1, a.sum(0), a.cumsum(0)), torch.zeros(0, 3)).reasons


# ---- symbolic sizes


def _norm_and_loss(x: torch.Tensor, labels: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(F.layer_norm(x, x.shape[-1:]), labels)
    return loss, torch.autograd.grad(loss, x)


DYNAMIC: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, i: (x * x.shape[0], x.t().contiguous(), torch.arange(x.shape[0]), x[1:] + x[:-1]),
    "reductions": lambda x, i: (x.sum(0), x.mean(), x.amax(1), x.argmax(0), torch.var_mean(x, 0), x.softmax(1)),
    "layout": lambda x, i: (torch.cat([x, x]), torch.cat([x] * 6), F.pad(x, (1, 2)), x.flip(0)),
    "gathers": lambda x, i: (x[i], F.embedding(i, x), x.gather(0, i[:, None].expand(-1, 48)), x.index_select(0, i)),
    "losses": _norm_and_loss,
}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("rows", [53, 2777])
def test_symbolic_nests_match_eager_at_other_sizes(name: str, rows: int) -> None:
    function, labels = DYNAMIC[name], torch.Generator().manual_seed(0)
    step = traced(function, (_x(3000, 48), torch.randint(0, 48, (3000,), generator=labels)), "symbolic")
    args = (_x(rows, 48), torch.randint(0, 48, (rows,), generator=labels))
    numbers = {
        str(torch_adapter.expression(size)): length
        for node, arg in zip(step.placeholders, args, strict=True)
        for size, length in zip(node.meta["val"].shape, arg.shape, strict=True)
        if isinstance(size, torch.SymInt)
    }
    result = lower(step, list(step.graph.nodes))
    assert numbers
    assert set(result.reasons) <= {"aten.sym_size.int"}
    compare(result, function, args, 2e-4, numbers)


def test_a_reduction_is_split_by_how_what_it_reads_lies_in_memory() -> None:
    """The gradient of an average of images is recorded with pixels innermost, the image has channels innermost."""

    def scale_gradient(average: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        spread = average[:, :, None, None].expand(images.shape) / 49
        return (spread * images).sum((0, 2, 3))

    average, images = torch.rand(64, 256), torch.rand(64, 256, 7, 7)
    (_, *rest) = [item for item in lowered(scale_gradient, average, images).operations if isinstance(item, Loop)]
    assert sum(bool(item.nest.reduces) for item in rest) == 1  # along memory, 256 programs fill the GPU
    last = images.to(memory_format=torch.channels_last)
    result = check(scale_gradient, average, last)
    assert sum(bool(item.nest.reduces) for item in result.operations if isinstance(item, Loop)) == 2
