"""Repeated layers: their kernels are those of a compiler that looks at each layer anew, for the work of one layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama_steps import sharded_llama
from nest_eval import run_items

import weft
from weft.capture.graph import StepGraph
from weft.errors import MalformedNest
from weft.inductor.codegen import canonical
from weft.inductor.codegen.kernel import supports
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.fusion import fuse as fuse_module
from weft.inductor.fusion import inline as inline_module
from weft.inductor.fusion.fuse import fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.lowering import repeated_operations
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Loop
from weft.inductor.lowering.registry import Lowering
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes


class _Forgets(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextmanager
def each_layer_anew() -> Iterator[None]:
    """Inside, nothing that was concluded from one operation serves another."""
    with pytest.MonkeyPatch.context() as patch:
        init = repeated_operations.RepeatedOperations.__init__
        patch.setattr(
            repeated_operations.RepeatedOperations,
            "__init__",
            lambda self, lowered: (init(self, lowered), setattr(self, "_known", _Forgets()))[0],
        )
        for module in (inline_module, fuse_module):
            patch.setattr(module.functools, "cache", lambda function: function)
        patch.setattr(canonical, "_canonical", canonical._canonical.__wrapped__)
        yield


def text(step: StepGraph) -> list[str]:
    """A graph of kernels as text: every node with its operands, its kernel, its place in memory and its origins."""
    lines = []
    for node in step.graph.nodes:
        target: Any = node.target
        if isinstance(target, KernelCall):
            kernel = target.generated
            target = kernel.source.text, kernel.buffers, kernel.scalars, kernel.blocks, target.origins
        lines.append(f"{node.name} {node.op} {target} {node.args} {node.kwargs} {node.meta.get('val')}")
    return lines


class Block(torch.nn.Module):
    """A layer of a vision transformer with a gate, dropout, a depthwise convolution and an activation of its own."""

    def __init__(self, width: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width, bias=False)
        self.mix = torch.nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        mixed = self.mix((self.activation(gate) * value).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * F.dropout(self.down(mixed), 0.1, self.training)


def trained(layers: int) -> StepGraph:
    """A training step of ``layers`` blocks, of which every third has another activation."""
    signs = [functools.partial(F.elu, alpha=alpha) for alpha in (0.0, -0.0)]
    blocks = [Block(16, F.silu if at % 3 else signs[at > 0]) for at in range(layers)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return weft.capture(step, torch.randn(2, 8, 16))


def llama(layers: int) -> StepGraph:
    """A sharded Llama, moved to GPUs."""
    with weft.fake_world(4):
        return sharded_llama(layers, 512, clip=True)


@pytest.mark.parametrize("make", [trained, llama], ids=["vision", "llama"])
def test_the_kernels_are_those_of_each_layer_looked_at_anew(make: Callable[[int], StepGraph]) -> None:
    step = make(4)
    with weft.fake_world(4):
        graph = run_passes(step, KERNEL_PASSES)
        repeated = text(kernel_graph(graph))
        with each_layer_anew():
            assert text(kernel_graph(graph)) == repeated


def counted(counts: list[str], patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    run = getattr(module, name)

    @functools.wraps(run)
    def count(*args: Any, **kwargs: Any) -> Any:
        counts.append(name)
        return run(*args, **kwargs)

    patch.setattr(module, name, count)


def test_more_layers_ask_no_more_questions() -> None:
    """Of eight layers as many nests are made as of four: the first, the last and one between them differ."""

    def questions(layers: int) -> dict[str, int]:
        graph = run_passes(llama(layers), KERNEL_PASSES)
        asked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            counted(asked, patch, inline_module, "_inlined")
            counted(asked, patch, fuse_module, "fused")
            counted(asked, patch, Lowering, "nest")
            kernel_graph(graph)
        return {name: asked.count(name) for name in ("_inlined", "fused", "nest")}

    with weft.knobs.override(verify_graphs=False):
        assert questions(4) == questions(8)


def test_equal_layers_share_the_objects_of_their_loops() -> None:
    lowered = lower(*_nodes(run_passes(llama(4), KERNEL_PASSES)))
    loops = [operation for operation in lowered.operations if isinstance(operation, Loop)]
    assert len({id(loop.form) for loop in loops}) < len(loops) / 3
    assert len({loop.buffers for loop in loops}) > len(loops) / 2


def _nodes(step: StepGraph) -> tuple[StepGraph, list[torch.fx.Node]]:
    return step, list(step.graph.nodes)


def results(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """What the kernels of a function compute."""
    step = weft.capture(function, *inputs)
    given = [inputs[int(entry.path.removeprefix("args[").removesuffix("]"))] for entry in step.inputs]
    lowered = inline(lower(*_nodes(step)))
    return run_items(lowered, fuse(lowered, supports), given)


X, Y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
COUNTS = torch.tensor([3, -7, 0, 5])

# Pairs of operations that differ in one thing that a lowering sees.
PAIRS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "the same operand twice": (lambda x, y: [x * y, x * x, y * x], (X, Y)),
    "order of the operands": (lambda x, y: [x - y, y - x], (X, Y)),
    "strides": (lambda x, y: [x + y, x + y.t().contiguous().t()], (X, Y)),
    "offset": (lambda x, y: [x[1:] + y[1:], x[1:] + y[:-1]], (X, Y)),
    "signs of zero": (lambda x: [torch.copysign(x, torch.full_like(x, s)) for s in (0.0, -0.0)], (X,)),
    "truth and one": (lambda n: [n + 1, n + True, n.float() + 1, n == 1, n == True], (COUNTS,)),  # noqa: E712
    "dtype": (lambda n: [n // 2, n.float() // 2, n.to(torch.int8) // 2], (COUNTS,)),
    "dtype of the result": (lambda x: [x.sum(1), x.sum(1, dtype=torch.float32)], (X,)),
    "reduced dimensions": (lambda x: [x.sum(0), x.sum(1), x.sum((0, 1)), x.sum(1, keepdim=True)], (X,)),
    "views of other bases": (lambda x, y: [x.view(24).sum(), y.t().reshape(24).sum(), x.view(2, 12).sum(1)], (X, Y)),
    "results": (lambda x: [*x.max(1), *x.min(1), *x.sort(1)], (X,)),
    "an operand that is not there": (lambda x: [F.layer_norm(x, (6,)), F.layer_norm(x, (6,), x[0], x[1])], (X,)),
    "rows of an assignment": (
        lambda x, y, c, p: [
            x.index_put((torch.arange(4), c), y[:, 0]),
            y.index_put((p, c), y[:, 0]),
            y.index_put((torch.arange(3, -1, -1), c), y[:, 0]),
        ],
        (X, Y, torch.tensor([0, 5, 1, 2]), torch.tensor([2, 0, 3, 1])),
    ),
    "gradients of picked elements": (
        lambda x, y, c, p: list(torch.autograd.grad((x[torch.arange(4), c] * 2).sum() + (y[p, c] * 3).sum(), (x, y))),
        (
            X.clone().requires_grad_(),
            Y.clone().requires_grad_(),
            torch.tensor([0, 5, 1, 2]),
            torch.tensor([2, 0, 3, 1]),
        ),
    ),
    "memory order of what is reduced": (
        lambda a, b, d: [
            (a * b).view(-1, 4).sum(0),
            d.permute(2, 1, 0).clone(memory_format=torch.contiguous_format).view(-1, 4).sum(0),
        ],
        tuple(torch.randn(4, 64, 4, dtype=torch.float64) for _ in range(3)),
    ),
    "negatives": (lambda x, y: [torch.complex(x, y).imag + 1, torch.complex(x, y).conj().imag + 1], (X, Y)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_operations_that_differ_have_loops_of_their_own(name: str) -> None:
    function, inputs = PAIRS[name]
    # As users have it: with the knob, an operation that took another one's loops would be an error.
    with weft.knobs.override(verify_graphs=False):
        found = results(function, *inputs)
    for got, want in zip(found, function(*inputs), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
        if want.is_floating_point():
            assert torch.equal(got.signbit(), want.signbit())


def test_random_numbers_of_equal_operations_differ() -> None:
    step = weft.capture(lambda x: [F.dropout(x), F.dropout(x), torch.rand_like(x)], X.float())
    lowered = lower(*_nodes(run_passes(retarget(step), KERNEL_PASSES)))
    assert len({seed.name for seed in lowered.seeds}) == len(lowered.seeds) == 3
    read = [
        load for o in lowered.operations if isinstance(o, Loop) for load in o.nest.reads if load.buffer == "rng.seed"
    ]
    assert len({load.index.offset for load in read}) == len(lowered.seeds)


def test_an_operation_with_other_loops_than_an_equal_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that looks at something that the description of an operation lacks."""
    calls: list[str] = []
    result = Lowering.store

    def store(self: Lowering, value: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(self.node.name)
        result(self, value, *args, **kwargs)
        if len(calls) == 2:
            result(self, value, *args, **kwargs)

    monkeypatch.setattr(Lowering, "store", store)
    step = weft.capture(lambda x, y: [x.exp(), y.exp()], X, Y)
    with weft.knobs.override(verify_graphs=True), pytest.raises(MalformedNest, match="equal operation"):
        lower(*_nodes(step))
