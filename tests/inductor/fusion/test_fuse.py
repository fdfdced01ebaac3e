"""Inlining and fusion: captured steps computed kernel by kernel by the oracle give eager's results, in few kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from nest_eval import run_items

import weft
from weft.inductor.codegen.kernel import supports
from weft.inductor.fusion.fuse import FusedLoops, fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.retarget import retarget
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Extern, Loop
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes


def randn(*sizes: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Float64, so that the order of sums does not show."""
    return torch.randn(*sizes, dtype=torch.float64, generator=generator)


def kernels(function: Callable[..., Sequence[torch.Tensor]], *inputs: torch.Tensor) -> list[FusedLoops]:
    """The kernels of a function, after showing that they compute what it does."""
    step = weft.capture(function, *inputs)
    given = [inputs[int(entry.path.removeprefix("args[").removesuffix("]"))] for entry in step.inputs]
    lowered = inline(lower(step, list(step.graph.nodes)))
    items = fuse(lowered, supports)
    results = run_items(lowered, items, given)
    unfused = run_items(lowered, list(lowered.operations), given)
    for expected, fused, plain in zip(function(*inputs), results, unfused, strict=True):
        torch.testing.assert_close(plain, expected)
        torch.testing.assert_close(fused, expected)
    return [item for item in items if isinstance(item, FusedLoops)]


def grads(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def test_a_chain_of_pointwise_operations_is_one_kernel() -> None:
    def chain(x, y):
        return (torch.relu(x * y + 1).exp(),)

    (kernel,) = kernels(chain, randn(64, 128), randn(64, 128))
    assert len(kernel.nest.stores) == 1
    assert kernel.reads == {"args_0", "args_1"}


def test_pointwise_operations_fuse_across_views() -> None:
    def heads(x):
        y = (x * 2).view(4, 8, 16, 64).transpose(1, 2)
        return ((y + 1).transpose(1, 2).reshape(4, 8, 1024).sin(),)

    (kernel,) = kernels(heads, randn(4, 8, 1024))
    assert len(kernel.nest.sizes) == 1


def test_a_value_with_two_readers_is_computed_and_read_once() -> None:
    def residual(x, y, w):
        s = x + y
        return s, F.rms_norm(s, (256,), w)

    (kernel,) = kernels(residual, randn(32, 256), randn(32, 256), randn(256))
    assert kernel.reads == {"args_0", "args_1", "args_2"}
    assert len(kernel.nest.stores) == 2


def test_layer_norm_backward_is_one_pass_and_two_small_sums() -> None:
    x, w, b = (randn(512, 256), randn(256), randn(256))

    def step(x, w, b, dy):
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        return grads((F.layer_norm(x, (256,), w, b) * dy).sum(), x, w, b)

    whole, *small = kernels(step, x, w, b, randn(512, 256))
    assert {"args_0", "args_3"} <= whole.reads
    assert not {"args_0", "args_3"} & frozenset().union(*(kernel.reads for kernel in small))


def test_backward_of_a_handwritten_rms_norm_is_one_pass_and_a_small_sum() -> None:
    """With the residual's gradient added: what is done once a row stands between its sum and the row's elements."""
    x, w, dy, residual = (randn(512, 256), randn(256), randn(512, 256), randn(512, 256))

    def step(x, w, dy, residual):
        x, w = (t.detach().requires_grad_() for t in (x, w))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        dx, dw = grads((x * scale * w * dy).sum(), x, w)
        return dx + residual, dw

    found = kernels(step, x, w, dy, residual)
    whole = [kernel for kernel in found if len(kernel.nest.sizes) > 1 and len(kernel.nest.stores) > 1]
    assert len(whole) == 1
    assert len(found) <= 3  # the scale of each row, the pass over the rows, the sum of its partial sums


def test_cross_entropy_forward_and_backward_share_a_kernel() -> None:
    def step(logits, labels):
        logits = logits.detach().requires_grad_()
        loss = F.cross_entropy(logits, labels)
        return loss.detach(), *grads(loss, logits)

    found = kernels(step, randn(64, 500), torch.randint(0, 500, (64,)))
    whole = [load for k in found for load in k.nest.reads if load.buffer == "args_0" and not load.index.indirect]
    assert len(whole) == 1


def test_swiglu_backward_is_one_kernel() -> None:
    def step(gate, up, dy):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        return grads((F.silu(gate) * up * dy).sum(), gate, up)

    assert len(kernels(step, *(randn(64, 256) for _ in range(3)))) == 1


@pytest.mark.parametrize(("stage", "count"), [("forward", 2), ("backward", 1)])
def test_recomputed_operations_fuse_with_backward_and_not_with_forward(stage: str, count: int) -> None:
    step = weft.capture(lambda x: (x.sin(), x.cos()), randn(128, 128))
    first, again = (node for node in step.graph.nodes if node.op == "call_function")
    first.meta["stage"] = stage
    again.meta |= {"stage": "backward", "recomputed": True}
    assert len(fuse(inline(lower(step, list(step.graph.nodes))), supports)) == count


def test_both_gradients_of_swiglu_are_one_kernel_when_silu_is_recomputed() -> None:
    def step(gate, up, w):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        return torch.autograd.grad(((F.silu(gate) * up) @ w).square().sum(), [gate, up])

    graph = run_passes(weft.capture(step, randn(64, 256), randn(64, 256), randn(256, 32)), KERNEL_PASSES)
    assert any(node.meta.get("recomputed") for node in graph.graph.nodes)
    found = fuse(inline(lower(graph, list(graph.graph.nodes))), supports)
    of_gate = [item for item in found if isinstance(item, FusedLoops) and "args_0" in item.reads]
    assert [len(kernel.nest.stores) for kernel in of_gate] == [1, 2], "forward's product, and both gradients"


def test_rope_is_one_kernel_each_way() -> None:
    def step(q, cos, sin):
        rotated = torch.cat((-q[..., 32:], q[..., :32]), -1)
        return (q * cos + rotated * sin,)

    assert len(kernels(step, randn(2, 4, 16, 64), randn(16, 64), randn(16, 64))) == 1


def test_bias_gradient_fuses_with_gelu_backward() -> None:
    def step(x, bias, dy):
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        return grads((F.gelu(x + bias) * dy).sum(), x, bias)

    found = kernels(step, randn(512, 256), randn(256), randn(512, 256))
    assert sum("args_0" in k.reads for k in found) == 1


def test_bias_gradient_fuses_with_the_backward_of_the_preceding_norm() -> None:
    """A view counts its rows as one dimension; of an odd number of tokens, they are still split as the norm's are."""
    sizes = 64, 197, 64

    def step(x, w, b, dy):
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        dx, dw, db = grads((F.layer_norm(x, (64,), w, b) * dy).sum(), x, w, b)
        return dx, dw, db, dx.view(-1, 64).sum(0)

    found = kernels(step, randn(*sizes), randn(64), randn(64), randn(*sizes))
    largest = max(found, key=lambda kernel: len(kernel.nodes))
    assert {"native_layer_norm_backward", "sum_2"} <= {node.name for node in largest.nodes}


def test_kernels_before_and_after_a_matmul_keep_their_order() -> None:
    def step(x, w):
        h = torch.relu(x)
        y = h @ w
        return h + y, (y * 2).sum(0)

    kernels(step, randn(64, 64), randn(64, 64))


@pytest.mark.parametrize("seed", range(12))
def test_kernels_of_random_programs_match_eager(seed: int) -> None:
    """Random chains of pointwise operations, reductions, views and concatenations."""
    random = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=random))

    plan = [(pick(9), pick(64), pick(64)) for _ in range(14)]

    def program(x, y):
        values = [x, y]
        for kind, a, b in plan:
            p, q = values[a % len(values)], values[b % len(values)]
            made = [
                lambda p, q: p + q,
                lambda p, q: p * 0.5 + q,
                lambda p, q: torch.tanh(p),
                lambda p, q: p - q.mean(-1, keepdim=True),
                lambda p, q: p * torch.softmax(q, -1),
                lambda p, q: p.transpose(0, 1).contiguous().transpose(0, 1) + q.sum(0),
                lambda p, q: torch.cat((p[:, 16:], q[:, :16]), 1),
                lambda p, q: (p.reshape(-1, 8, 4) + 1).reshape(p.shape),
                lambda p, q: torch.where(p > 0, p, q.amax(1, keepdim=True)),
            ][kind](p, q)
            values.append(made)
        return tuple(values[2:][-4:])

    generator = torch.Generator().manual_seed(100 + seed)
    kernels(program, randn(48, 32, generator=generator), randn(48, 32, generator=generator))


def test_every_operation_is_in_exactly_one_kernel() -> None:
    def step(x):
        y = x.exp()
        return y.sum(1), y.sum(0), y @ y.t()

    x = randn(96, 96)
    graph = weft.capture(step, x)
    lowered = inline(lower(graph, list(graph.graph.nodes)))
    items = fuse(lowered, supports)
    written = [name for item in items if isinstance(item, FusedLoops) for name in item.nest.writes]
    assert len(written) == len(set(written))
    assert {name for op in lowered.operations if isinstance(op, Loop) for name in op.writes} >= set(written)


def test_rope_backward_is_one_kernel() -> None:
    """The two halves of a product are windows on it that a join swaps: each is computed where it is read."""

    def rotate(x, cos, sin, dy):
        x = x.detach().requires_grad_()
        first, second = x.chunk(2, -1)
        return grads(((x * cos + torch.cat((-second, first), -1) * sin) * dy).sum(), x)

    (kernel,) = kernels(rotate, randn(2, 4, 8, 16), randn(8, 16), randn(8, 16), randn(2, 4, 8, 16))
    assert kernel.reads == {"args_1", "args_2", "args_3"}


def test_cpu_operations_of_a_gpu_step_are_not_lowered() -> None:
    """A coin that decides on a layer is drawn on the CPU; kernels and their seeds are for the GPU."""
    graph = weft.capture(lambda x: (torch.rand(4) + 1, x.exp()), randn(8))
    nodes = list(graph.graph.nodes)
    for node in nodes:
        if node.name == "exp" or node.op == "placeholder":
            with graph.results[0].meta["val"].fake_mode:
                node.meta["val"] = torch.empty(8, dtype=torch.float64, device="cuda")
    lowered = lower(graph, nodes)
    assert [op.node.name for op in lowered.operations if isinstance(op, Loop)] == ["exp"]
    assert not lowered.seeds


def picks(x, w, at):
    labelled = torch.gather(x @ w, 1, at)
    return ((labelled + torch.gather(x @ (w * 2), 1, at)).sum(0),)


@pytest.mark.parametrize("columns", [4, 64])
def test_a_small_gather_of_a_large_operand_is_not_inlined_past_a_call(columns: int) -> None:
    found = kernels(picks, randn(32, 16), randn(16, 64), torch.randint(64, (32, columns)))
    (reader,) = (kernel for kernel in found if "mm_1" in kernel.reads)
    assert ("mm" in reader.reads) == (columns == 64)


def test_large_operands_of_small_gathers_are_freed_early() -> None:
    """Two tensors of 524 MB, of which a few elements of each row are added."""
    with weft.fake_world(1):
        inputs = (torch.zeros(4096, 256, device="cuda"), torch.zeros(256, 32000, device="cuda"))
        step = retarget(weft.capture(picks, *inputs, torch.zeros(4096, 4, dtype=torch.long, device="cuda")))
        made = kernel_graph(run_passes(step, KERNEL_PASSES))
    assert liveness(made).peak < 650e6


def test_joins_that_would_wait_for_each_other_are_undone() -> None:
    """A group with an early and a late member leads back to an operation in front of it."""

    def step(y0: torch.Tensor, a0: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        y = y0.softmax(-1)
        e = y @ w
        a = a0.softmax(-1)
        b = (a + e).softmax(-1)
        m = a @ w
        n = m @ w
        return b, (n + y).softmax(-1)

    assert len(kernels(step, randn(64, 64), randn(64, 64), randn(64, 64))) >= 3


def test_operations_are_not_joined_around_effects_that_stay_in_order() -> None:
    def step(x: torch.Tensor, z: torch.Tensor) -> Sequence[torch.Tensor]:
        a = x.softmax(-1)
        drawn = torch.multinomial(a, 1)
        r = torch.multinomial(z, 64)
        return drawn, (a + r).softmax(-1)

    captured = weft.capture(step, torch.rand(64, 64), torch.rand(64, 64))
    items = fuse(inline(lower(captured, list(captured.graph.nodes))), supports)
    draws = [item.node.name for item in items if isinstance(item, Extern) and "multinomial" in item.node.name]
    assert draws == ["multinomial", "multinomial_1"]
