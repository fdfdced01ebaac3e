"""The tail of captured steps as multi-tensor calls: the same bits with ATen, the same values with the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from both_ways import assert_equal
from multi_tensor_kernels import assert_close, interpret
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.tracer import capture_step
from weft.inductor.compiler import make_kernels
from weft.inductor.multi_tensor.adam import Adam
from weft.inductor.multi_tensor.foreach import Foreach
from weft.inductor.multi_tensor.norm import Norm
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.sgd import Sgd
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.tensor_lists import replace_elements, same_layouts
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")

aten = torch.ops.aten
optim = torch.optim
Tensor = torch.Tensor
Make = Callable[[Any], optim.Optimizer]


def captured(
    make: Make, clip: bool | None = None, keep: bool = False, autocast: bool = False
) -> tuple[StepGraph, list[Any]]:
    """The second step of a small model, and real inputs for it. `clip` is clip_grad_norm_'s foreach."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 30))
    optimizer = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=clip)
        optimizer.step()
        if not keep:
            optimizer.zero_grad()
        return loss

    x = torch.randn(4, 8)
    step(x)
    return _with_inputs(capture_step(step, (x,)))


def _with_inputs(captured: CapturedStep) -> tuple[StepGraph, list[Any]]:
    values = [place.get() for place in captured.places]
    return captured.graph, [v.detach().clone() if isinstance(v, Tensor) else v for v in values]


def calls(graph: StepGraph) -> list[type]:
    return [type(node.target) for node in graph.graph.nodes if isinstance(node.target, MultiTensor)]


class WithKernels(torch.fx.Interpreter):
    """Runs a graph with ATen, and with interpreted kernels what has them."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, MultiTensor):
            return super().call_function(target, args, kwargs)
        results = iter(interpret(target, [[t.clone() for t in a] if _is_tensors(a) else a for a in args]))
        return [[next(results) for _ in list_] for list_ in target(*args)]


def _is_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and all(isinstance(item, Tensor) for item in argument)


def fused(graph: StepGraph) -> StepGraph:
    return fuse_optimizer(graph.copy()).check()


def run_aten(graph: StepGraph, inputs: list[Any]) -> Any:
    inputs = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    return compile_aten(graph)(*inputs), inputs


CASES: dict[str, tuple[Make, bool | None, list[type]]] = {
    "adamw": (lambda p: optim.AdamW(p, lr=0.01, fused=True), None, [Adam]),
    "adamw, clipped": (lambda p: optim.AdamW(p, lr=0.01, fused=True), False, [Norm, Adam]),
    "adamw, clipped by foreach": (lambda p: optim.AdamW(p, lr=0.01, fused=True), True, [Norm, Adam]),
    "adam, amsgrad": (lambda p: optim.Adam(p, lr=0.01, fused=True, amsgrad=True, weight_decay=0.1), None, [Adam]),
    "adamw, lr tensor": (lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True), None, [Adam]),
    "sgd": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True, nesterov=True), True, [Norm, Sgd]),
    "sgd, no momentum": (lambda p: optim.SGD(p, lr=0.1, fused=True), None, [Sgd]),
    "sgd, foreach": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
        True,
        [Norm, Foreach],
    ),
    "adam, foreach": (lambda p: optim.Adam(p, lr=0.01, foreach=True, amsgrad=True), None, [Foreach, Foreach]),
    "rmsprop, foreach": (lambda p: optim.RMSprop(p, lr=0.01, foreach=True, momentum=0.9), None, [Foreach, Foreach]),
    "adagrad, foreach": (lambda p: optim.Adagrad(p, lr=0.01, foreach=True), None, [Foreach, Foreach]),
}


@pytest.mark.parametrize("name", CASES)
def test_clipping_and_the_optimizer_are_fused_bit_for_bit(name: str) -> None:
    make, clip, expected = CASES[name]
    graph, inputs = captured(make, clip)
    tail = fused(graph)
    assert calls(tail) == expected
    left = [str(node.target) for node in tail.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any("_foreach" in name or "_fused" in name for name in left)
    assert_equal(run_aten(tail, inputs), run_aten(graph, inputs))
    plain = torch.fx.Interpreter(torch.fx.GraphModule({}, graph.graph)).run(*inputs)
    ours = WithKernels(torch.fx.GraphModule({}, tail.graph)).run(*inputs)
    assert_close(ours, plain, 32.0)


def test_fused_optimizers_run_beside_generated_kernels() -> None:
    make, clip, _ = CASES["adamw, clipped"]
    graph, inputs = captured(make, clip)
    program = compile_aten(use_kernels(make_kernels(fused(graph))))
    ours = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    program(*ours)
    _, expected = run_aten(graph, inputs)
    tensors = [(a, b) for a, b in zip(ours, expected, strict=True) if isinstance(a, Tensor)]
    assert_close([a for a, _ in tensors], [b for _, b in tensors], 64.0)


@pytest.mark.parametrize("name", ["adamw, clipped", "sgd", "sgd, foreach", "adam, foreach"])
def test_a_program_runs_the_kernels_in_place(name: str) -> None:
    make, clip, _ = CASES[name]
    graph, inputs = captured(make, clip)
    program = compile_aten(use_kernels(fused(graph)))
    assert "copy_(" not in program.source
    assert "clone(" not in program.source
    ours = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    returned = program(*ours)
    expected_returned, expected = run_aten(graph, inputs)
    pairs = zip((*returned, *ours), (*expected_returned, *expected), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    assert_close([a for a, _ in tensors], [b for _, b in tensors], 32.0)


def test_values_that_are_read_later_are_not_overwritten() -> None:
    build = StepBuilder()
    a, b = lists(build, 2)
    doubled = build.write(aten._foreach_mul_.Scalar, a, 2.0)
    build.returns(*build.pick(build.call(aten._foreach_add.List, a, b)), *doubled)
    program = compile_aten(use_kernels(fused(build.build())))
    inputs = [torch.randn(5), torch.randn(7), torch.randn(5), torch.randn(7)]
    before = [tensor.clone() for tensor in inputs]
    results = program(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert_close(results, [*(x + y for x, y in zip(before[:2], before[2:], strict=True)), *(2 * x for x in before[:2])])


def test_a_gradient_that_is_kept_is_clipped_in_memory() -> None:
    graph, inputs = captured(lambda p: optim.AdamW(p, lr=0.01, fused=True), True, keep=True)
    tail = fused(graph)
    (adam,) = [node for node in tail.graph.nodes if isinstance(node.target, Adam)]
    assert adam.args[7] is None
    assert Foreach in calls(tail)
    assert_equal(run_aten(tail, inputs), run_aten(graph, inputs))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_are_read_in_the_dtype_of_autocast(name: str, kept: bool) -> None:
    """In half precision; those that are kept, or whose norm is taken, are read as the parameter has them."""
    make, clip, _ = CASES[name]
    graph, inputs = captured(make, clip, kept, autocast=True)
    tail = fused(graph)
    (update,) = [node for node in tail.graph.nodes if isinstance(node.target, (Adam, Sgd))]
    wanted = torch.float32 if kept or clip else torch.bfloat16
    assert {grad.meta["val"].dtype for grad in update.args[1]} == {wanted}
    assert_equal(run_aten(tail, inputs), run_aten(graph, inputs))
    plain = torch.fx.Interpreter(torch.fx.GraphModule({}, graph.graph)).run(*inputs)
    ours = WithKernels(torch.fx.GraphModule({}, tail.graph)).run(*inputs)
    assert_close(ours, plain, 32.0)


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """Weights of depthwise convolutions and their gradients differ in nothing else."""

    def node(stride: tuple[int, ...]) -> torch.fx.Node:
        made = torch.fx.Graph().placeholder("x")
        made.meta["val"] = torch.empty_strided((8, 1, 3, 3), stride)
        return made

    contiguous, last, other = node((9, 9, 3, 1)), node((9, 1, 3, 1)), node((9, 1, 1, 3))
    assert same_layouts([[contiguous], [last]])
    assert not same_layouts([[contiguous], [other]])


def test_two_groups_share_the_clipping() -> None:
    def make(parameters: Any) -> optim.Optimizer:
        first, *rest = parameters
        return optim.AdamW([{"params": [first], "lr": 0.3}, {"params": rest, "weight_decay": 0.5}], fused=True)

    graph, inputs = captured(make, True)
    tail = fused(graph)
    assert calls(tail) == [Norm, Adam, Adam]
    assert all(n.args[7] is not None for n in tail.graph.nodes if isinstance(n.target, Adam))
    assert_equal(run_aten(tail, inputs), run_aten(graph, inputs))


def test_the_optimizer_of_sharded_parameters_is_fused() -> None:
    with weft.fake_world(2, target_device="cuda"):
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("data",))
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        weft.fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=True)

        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        graph = weft.capture(step, torch.randn(4, 8))
    tail = fused(graph)
    assert calls(tail) == [Norm, Adam]
    assert len(tail) < len(graph)
    assert len(tail.collectives()) == len(graph.collectives())


# ---- chains that end


def lists(build: StepBuilder, count: int, sizes: tuple[int, ...] = (5, 7)) -> list[list[Any]]:
    return [[build.input(torch.randn(size)) for size in sizes] for _ in range(count)]


def both(build: StepBuilder) -> StepGraph:
    """The fused graph, after comparing what it computes."""
    graph = build.build()
    tail = fused(graph)
    torch.manual_seed(3)
    inputs = [torch.randn(tuple(node.meta["val"].shape)) for node in graph.placeholders]
    plain = torch.fx.Interpreter(torch.fx.GraphModule({}, graph.graph)).run(*inputs)
    assert_close(WithKernels(torch.fx.GraphModule({}, tail.graph)).run(*inputs), plain, 2.0)
    return tail


def test_a_chain_ends_at_the_first_outside_reader() -> None:
    build = StepBuilder()
    a, b = lists(build, 2)
    added = build.pick(build.call(aten._foreach_add.List, a, b))
    between = build.call(aten.sum.default, added[0])
    scaled = build.pick(build.call(aten._foreach_mul.Tensor, added, between))
    build.returns(*added, *scaled)
    assert calls(both(build)) == [Foreach, Foreach]


def test_lists_in_another_order_are_not_one_chain() -> None:
    build = StepBuilder()
    a, b = lists(build, 2, (5, 5))
    added = build.pick(build.call(aten._foreach_add.List, a, b))
    crossed = build.pick(build.call(aten._foreach_mul.List, added[::-1], b))
    build.returns(*crossed)
    assert calls(both(build)) == [Foreach, Foreach]


def test_chains_of_different_sizes_run_side_by_side() -> None:
    build = StepBuilder()
    a, b = lists(build, 2)
    c, d = lists(build, 2, (3, 4, 5))
    first = build.pick(build.call(aten._foreach_add.List, a, b))
    second = build.pick(build.call(aten._foreach_add.List, c, d))
    first = build.pick(build.call(aten._foreach_sqrt.default, build.pick(build.call(aten._foreach_abs.default, first))))
    second = build.pick(build.call(aten._foreach_neg.default, second))
    build.returns(*first, *second)
    assert calls(both(build)) == [Foreach, Foreach]


def test_only_the_last_value_written_in_place_takes_the_memory() -> None:
    build = StepBuilder()
    a, b = lists(build, 2)
    added = build.write(aten._foreach_add_.List, a, b)
    doubled = build.write(aten._foreach_mul_.Scalar, added, 2.0)
    build.returns(*added)
    for placeholder, value in zip(a, doubled, strict=True):
        build.update(placeholder, value)
    tail = both(build)
    (node,) = [n for n in tail.graph.nodes if isinstance(n.target, Foreach)]
    assert node.target.kept == ((0, -1), (1, 0))


def test_tensors_with_gaps_and_other_dtypes_are_left_to_aten() -> None:
    build = StepBuilder()
    a = [build.input(torch.randn(6)) for _ in range(2)]
    spaced = [build.call(aten.slice.Tensor, node, 0, 0, 6, 2) for node in a]
    build.returns(*build.pick(build.call(aten._foreach_neg.default, spaced)))
    integers = [build.input(torch.ones(3, dtype=torch.int64))]
    build.returns(*build.pick(build.call(aten._foreach_neg.default, integers)))
    assert calls(fused(build.build())) == []


@pytest.mark.parametrize("view", [False, True])
def test_norms_that_the_step_returns_are_left_alone(view: bool) -> None:
    build = StepBuilder()
    (a,) = lists(build, 1)
    norms = build.pick(build.call(aten._foreach_norm.Scalar, a, 2.0))
    kept = build.call(aten.unsqueeze.default, norms[0], 0) if view else norms[0]
    build.returns(build.call(aten.stack.default, norms), kept)
    assert calls(fused(build.build())) == []


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_norms_that_are_read_one_by_one_become_one_call(order: float) -> None:
    build = StepBuilder()
    (a,) = lists(build, 1)
    first, *others = build.pick(build.call(aten._foreach_norm.Scalar, a, order))
    divided = build.call(aten.div.Scalar, first, 3.0)
    build.returns(build.call(aten.mul.Tensor, build.call(aten.stack.default, [divided, *others]), 2.0))
    assert calls(both(build)) == ([Norm] if order < 3 else [])


def test_stacked_and_concatenated_norms_become_one_call() -> None:
    build = StepBuilder()
    (a,) = lists(build, 1)
    norms = build.pick(build.call(aten._foreach_norm.Scalar, a, 2.0))
    stacked = build.call(aten.cat.default, [build.call(aten.unsqueeze.default, norm, 0) for norm in norms])
    build.returns(build.call(aten.linalg_vector_norm.default, stacked))
    assert calls(fused(build.build())) == [Norm]


@pytest.mark.parametrize(
    ("reads", "together"),
    [
        ([(aten.linalg_vector_norm.default,)], True),
        ([(aten.linalg_vector_norm.default, 1.0)], False),
        ([(aten.pow.Tensor_Scalar, 2.0), (aten.pow.Tensor_Scalar, 0.5), (aten.linalg_vector_norm.default, 2.0)], True),
        ([(aten.pow.Tensor_Scalar, 2.0), (aten.linalg_vector_norm.default, 2.0)], False),
        ([(aten.pow.Tensor_Scalar, 0.5), (aten.linalg_vector_norm.default, 2.0)], False),
        ([(aten.mul.Tensor, 2.0), (aten.linalg_vector_norm.default, 2.0)], False),
    ],
)
def test_norms_are_together_if_only_their_sum_of_squares_is_read(reads: list[tuple[Any, ...]], together: bool) -> None:
    build = StepBuilder()
    (a,) = lists(build, 1)
    found = build.call(aten.stack.default, build.pick(build.call(aten._foreach_norm.Scalar, a, 2.0)))
    for target, *arguments in reads:
        found = build.call(target, found, *arguments)
    build.returns(found)
    step = fused(build.build())
    (norm,) = (node.target for node in step.graph.nodes if isinstance(node.target, Norm))
    assert norm.together is together


def test_stacks_of_other_values_are_not_fused_as_norms() -> None:
    build = StepBuilder()
    (a,) = lists(build, 1)
    rows = [build.call(aten.unsqueeze.default, build.call(aten.reshape.default, node, [-1]), 0) for node in a[:1]]
    build.returns(build.call(aten.cat.default, rows))
    assert calls(fused(build.build())) == []


def test_elements_are_replaced_at_once_as_they_are_one_by_one() -> None:
    """Readers of several elements, in lists too, and the users of everything."""

    def built() -> tuple[StepGraph, list[torch.fx.Node]]:
        build = StepBuilder()
        x = build.input(torch.zeros(4))
        values = [build.call(op, x, val=x.meta["val"]) for op in 3 * (aten.sin.default, aten.cos.default)]
        sums = [
            build.call(aten.add.Tensor, values[a], values[b], val=x.meta["val"]) for a, b in ((0, 1), (2, 0), (1, 5))
        ]
        listed = build.call(aten.stack.default, [*values[:3], *values], val=torch.zeros(9, 4))
        build.returns(*sums, listed, *values)
        return build.build(), values

    (one, first), (other, second) = built(), built()
    for old, new in zip(first[:3], first[3:], strict=True):
        old.replace_all_uses_with(new)
    replace_elements(zip(second[:3], second[3:], strict=True))
    assert str(one) == str(other)
    assert [sorted(user.name for user in node.users) for node in one.graph.nodes] == [
        sorted(user.name for user in node.users) for node in other.graph.nodes
    ]
