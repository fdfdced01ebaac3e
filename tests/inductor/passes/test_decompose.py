"""Operations written in simpler ones: the same numbers, the same layouts, once for each kind of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from pass_runs import Run, close, distinct, targets
from weft.capture.graph import StepGraph
from weft.inductor.graph.inline_function import trace
from weft.inductor.passes import decompose as module
from weft.inductor.passes.decompose import decompose
from weft.inductor.passes.decompositions import decompositions, functionalized_decompositions
from weft.inductor.passes.pipeline import KERNEL_PASSES

aten = torch.ops.aten


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def with_gradient(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """A step that returns a value and its gradient by each argument."""

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        leaves = [value.detach().requires_grad_() for value in values]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]

    return step, list(args)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], set[str]]] = {
    "addcmul": (lambda x, y: torch.addcmul(x, y, y.sin(), value=0.3), ((3, 4), (4,)), {"addcmul"}),
    "bce_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        ((3, 4), (3, 4)),
        {"binary_cross_entropy_with_logits"},
    ),
    "elu": (lambda x: F.elu(x), ((3, 4),), {"elu_backward"}),
    "glu": (lambda x: F.glu(x), ((3, 4),), {"glu", "glu_backward"}),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), ((2, 4, 3), (4,)), {"native_group_norm"}),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((3, 4, 2, 2), (4,), (4,)),
        {"native_batch_norm_backward"},
    ),
    "hardsigmoid": (lambda x: F.hardsigmoid(x), ((3, 4),), {"hardsigmoid", "hardsigmoid_backward"}),
    "hardswish": (lambda x: F.hardswish(x * 3), ((3, 4),), {"hardswish", "hardswish_backward"}),
    "huber": (lambda x, y: F.huber_loss(x, y), ((3, 4), (3, 4)), {"huber_loss", "huber_loss_backward"}),
    "leaky": (lambda x: F.leaky_relu(x), ((3, 4),), {"leaky_relu_backward"}),
    "logsigmoid": (lambda x: F.logsigmoid(x), ((3, 4),), {"log_sigmoid_forward", "log_sigmoid_backward"}),
    "logsumexp": (lambda x: x.logsumexp(-1), ((3, 4),), {"logsumexp"}),
    "masked": (lambda x: x.masked_fill(x.detach() > 0, 2.0), ((3, 4),), {"masked_fill"}),
    "mish": (lambda x: F.mish(x), ((3, 4),), {"mish", "mish_backward"}),
    "mse": (lambda x, y: F.mse_loss(x, y), ((3, 4), (3, 4)), {"mse_loss", "mse_loss_backward"}),
    "prelu": (lambda x, w: F.prelu(x, w), ((3, 4), (4,)), {"_prelu_kernel", "_prelu_kernel_backward"}),
    "repeat": (lambda x: x.repeat(2, 1, 3), ((3, 4),), {"repeat"}),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), ((3, 4), (4,)), {"_fused_rms_norm"}),
    "roll": (lambda x: x.roll((-1, 2), (0, 1)), ((3, 4),), {"roll"}),
    "select": (lambda x: x[1] * x[:, 1].sum(), ((3, 4),), {"select_backward"}),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), ((2, 4, 3, 3),), {"pixel_shuffle", "pixel_unshuffle"}),
    "slice": (lambda x: x[:, :2] * x[:, 2:], ((3, 4),), {"slice_backward"}),
    "softplus": (lambda x: F.softplus(x), ((3, 4),), {"softplus", "softplus_backward"}),
    "split": (lambda x: (p := x.split(2, -1))[0] * p[1] + x.chunk(3)[1][:, :2], ((3, 4),), {"split"}),
    "split_sizes": (lambda x: x.split([1, 3], -1)[1], ((3, 4),), {"split_with_sizes"}),
    "stack": (lambda x, y: torch.stack([x, y.exp()], 1), ((3, 4), (3, 4)), {"stack"}),
    "tanh": (lambda x: x.tanh().relu() * x.sigmoid(), ((3, 4),), {"tanh_backward", "threshold_backward"}),
    "unbind": (lambda x: (p := x.unbind(1))[0] * p[-1], ((3, 4),), {"unbind"}),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2.0), ((1, 2, 3, 3),), {"upsample_nearest2d"}),
}


# Taken apart by autograd already, on some devices and versions.
COMPOSITE = {"_fused_rms_norm", "pixel_unshuffle", "pixel_shuffle", "_prelu_kernel", "roll"}


def names(step: StepGraph) -> set[str]:
    return {name.split(".")[1] for name in targets(step) if name.startswith("aten.")}


@pytest.mark.parametrize("name", CASES)
def test_a_decomposition_computes_the_same_in_float64(name: str) -> None:
    function, shapes, gone = CASES[name]
    step, args = with_gradient(function, *(doubles(*shape) for shape in shapes))
    plain, run = Run(step, args, []), Run(step, args, [decompose])
    close(run, plain, rtol=1e-7, atol=1e-9)
    assert [t.stride() for t in run.outcome] == [t.stride() for t in plain.outcome]
    assert not gone & names(run.graph)
    assert gone <= names(run.before) | COMPOSITE
    assert not any(name.startswith("prims") for name in targets(run.graph))


@pytest.mark.parametrize("name", ["bce_logits", "glu", "group_norm", "mse", "select", "slice", "stack", "tanh"])
@pytest.mark.parametrize("size", [3, 5])
def test_dynamic_sizes_stay_dynamic(name: str, size: int) -> None:
    function, shapes, gone = CASES[name]
    dynamic = [at for at, shape in enumerate(shapes) if shape[0] == shapes[0][0]]

    def arguments(first: int) -> list[torch.Tensor]:
        return [doubles(first if at in dynamic else shape[0], *shape[1:]) for at, shape in enumerate(shapes)]

    step, _ = with_gradient(function)
    args = arguments(3)
    for at in dynamic:
        weft.mark_dynamic(args[at], 0)
    plain, run = (Run(step, args, passes, again=arguments(size)) for passes in ([], [decompose]))
    close(run, plain, rtol=1e-7, atol=1e-9)
    assert not gone & names(run.graph)


def test_each_kind_of_operands_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counting(function: Any, node: Any, *args: Any) -> Any:
        seen.append(str(node.target))
        return trace(function, node, *args)

    monkeypatch.setattr(module, "trace", counting)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = F.hardswish(x)
        return x + F.hardswish(x[:2]).sum()

    run = Run(step, [torch.randn(4, 3)], [decompose])
    assert targets(run.before)["aten.hardswish.default"] == 6
    assert seen.count("aten.hardswish.default") == 2


def test_decomposed_results_do_not_share_memory_with_operands() -> None:
    """One layer feeds the next; were their values thought to be one tensor, the wrong one would be read."""
    layers = nn.Sequential(*(nn.GroupNorm(2, 4) for _ in range(3))).double()
    step, args = with_gradient(lambda x: layers(x) + layers[0](x).view(-1).view(2, 4, 3), doubles(2, 4, 3))
    run = Run(step, args, [decompose])
    values = [n.meta["val"] for n in run.graph.graph.nodes if n.op == "call_function" and "mul" in str(n.target)]
    assert len({val.untyped_storage()._cdata for val in values}) == len(values)
    close(run, Run(step, args, []), rtol=1e-7, atol=1e-9)


def test_decomposed_nodes_inherit_lines_modules_and_stages() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x, x.detach() * 2)

    run = Run(step, [torch.randn(3)], [decompose])
    (old,) = [n for n in run.before.graph.nodes if "mse_loss" in str(n.target)]
    new = [n for n in run.graph.graph.nodes if n.meta.get("frames") and "mul" not in n.name]
    assert new
    assert all(n.meta["frames"] == old.meta["frames"] and n.meta["stage"] == "forward" for n in new)


def test_running_statistics_are_updated() -> None:
    norm = nn.BatchNorm2d(4).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (norm(x) * x).sum()
        loss.backward()
        return loss.detach()

    run = Run(step, [doubles(3, 4, 2, 2)], [decompose])
    close(run, Run(step, [doubles(3, 4, 2, 2)], []), rtol=1e-7, atol=1e-9)
    assert not any("batch_norm" in name for name in targets(run.graph))


def test_batch_norm_of_cudnn_keeps_no_scratch_space() -> None:
    """Its backward alone reads what forward keeps for it: once that is decomposed, forward is too."""

    def step(norm: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        module = nn.BatchNorm2d(4)

        def run(x: torch.Tensor) -> torch.Tensor:
            out = norm(x, module.weight, module.bias, module.running_mean, module.running_var)
            (out * x).sum().backward()
            return out.detach()

        return run

    x = doubles(3, 4, 2, 2).float()
    run = Run(step(lambda *given: aten.cudnn_batch_norm(*given, True, 0.1, 1e-5)[0]), [x], [decompose])
    plain = Run(step(lambda x, w, b, *stats: F.batch_norm(x, *stats, w, b, training=True)), [x], [])
    close(run, plain, rtol=1e-5, atol=1e-5)
    assert not any("batch_norm" in name for name in targets(run.graph))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_cudnn_is_the_same_function(training: bool) -> None:
    """Its arguments in other order, forward with scratch space, against the CPU's own batch norm."""

    x, w, b, grad, mean, var = (
        doubles(3, 4, 2),
        doubles(4),
        doubles(4),
        doubles(2, 3, 4).view(3, 4, 2),
        doubles(4),
        doubles(4).exp(),
    )
    forward = functionalized_decompositions()[aten.cudnn_batch_norm.default]
    out, saved, rstd, reserve, *running = forward(x, w, b, mean, var, training, 0.1, 1e-5)
    theirs = mean.clone(), var.clone()
    expected, their_mean, their_rstd = aten.native_batch_norm(x, w, b, *theirs, training, 0.1, 1e-5)
    torch.testing.assert_close((out, *running), (expected, *theirs))
    assert reserve is None
    if training:
        backward = decompositions()[aten.cudnn_batch_norm_backward.default]
        ours = backward(x, grad, w, mean, var, saved, rstd, 1e-5, None)
        mask = [True, True, True]
        back = aten.native_batch_norm_backward(grad, x, w, mean, var, their_mean, their_rstd, True, 1e-5, mask)
        torch.testing.assert_close(tuple(ours), tuple(back))


def test_a_result_that_would_alias_an_operand_stays_whole() -> None:
    """Of integers torch's decomposition hands back what it was given."""
    run = Run(lambda x: torch.nan_to_num(x), [torch.arange(3)], [decompose])
    assert run.outcome[0].data_ptr() != run.outcome[1].data_ptr()


OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: F.hardswish(x),
    lambda x, y: torch.addcmul(x, y, y, value=2.0),
    lambda x, y: torch.stack([x, y]).sum(0),
    lambda x, y: x.split(2, -1)[1].repeat(1, 2),
    lambda x, y: x.roll(1, 0),
    lambda x, y: F.mse_loss(x, y) + x,
    lambda x, y: x.masked_fill_(y > 0.3, 0.5),
    lambda x, y: x.addcmul_(y, y, value=0.1),
    lambda x, y: x.unbind(0)[1].expand(3, 4) * y,
    lambda x, y: x.t().contiguous().t() + y,
    lambda x, y: x[1:].fill_(0.5).sum() + y,
    lambda x, y: x[0].copy_(y[1]) + x,
    lambda x, y: F.softplus(x) - y.logsumexp(0),
    lambda x, y: x.tril_().norm() + y,
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(range(len(OPERATIONS))), st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_random_programs_of_decomposed_operations_equal_eager(program: list[tuple[int, int, int]]) -> None:
    """All passes over programs with views, writes and what is decomposed: eager to rounding, inputs included."""

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        known = list(values)
        for operation, a, b in program * 2:
            known.append(OPERATIONS[operation](known[a % len(known)], known[b % len(known)]))
        return known[2:]

    args = [doubles(3, 4), doubles(4, 3).t()]
    run = Run(step, args, KERNEL_PASSES)
    eager = [arg.clone() for arg in args]
    expected = distinct(step(*eager))
    torch.testing.assert_close(run.outcome[: len(expected)], expected, rtol=1e-9, atol=1e-9, check_stride=False)
    left = run.outcome[len(expected) :]
    known = {id(t) for t in left}
    assert len(known) <= 2
    for got in left:
        assert any(torch.allclose(got, e, rtol=1e-9, atol=1e-9) for e in eager if e.shape == got.shape)
