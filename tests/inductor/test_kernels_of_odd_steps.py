"""Generated kernels for steps that tests of the capture run with ATen's kernels: numbers, nothing, views of lists."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft import knobs, torch_adapter
from weft.errors import StepFailed
from weft.inductor.compiler import make_kernels
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.aliasing import storages
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten

EMPTY = nn.Parameter(torch.ones(0, 4))
GRU = nn.GRU(4, 4, batch_first=True)
WEIGHT = torch.randn(64, 64)


def gradient_of_nothing(x: torch.Tensor) -> torch.Tensor:
    EMPTY.grad = None
    F.mse_loss(EMPTY, EMPTY.detach() * 2).backward()
    return x * 2


def sums_of_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x.shape[0] / 3) + torch.add(x, x.shape[0])


def statistics_in_inference_mode(x: torch.Tensor) -> list[torch.Tensor]:
    norm = nn.BatchNorm1d(4)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            norm(x)
    return [norm.running_mean, norm.running_var]  # type: ignore[list-item]


def parts_that_are_read_late(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The products between want memory."""
    first, second = torch.unsafe_split((x * 2 + 1).sin(), 32)
    between = (first @ WEIGHT @ WEIGHT).tanh() @ WEIGHT
    return second @ WEIGHT + between, first @ WEIGHT


def rows_added_infinitely_often(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Into few rows and into many, some of which nothing is added to."""
    rows = torch.arange(0, 1200, 4)
    few = torch.ones(5, 4).index_add(0, torch.tensor([0, 3, 3]), x[:3], alpha=math.inf)
    return few, torch.ones(200_000, 4).index_add(0, rows, x, alpha=-math.inf)


def a_list_of_which_a_part_has_gaps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = x.t() * 1
    part = whole[:3]
    part.clamp_min_(0.1)
    torch._foreach_mul_([x.clone(), part], 2)
    return part + 1, whole * 2


def gradient_of_a_mean(x: torch.Tensor) -> torch.Tensor | None:
    x = x.detach().requires_grad_()
    F.huber_loss(x, x.detach() * 2).backward()
    return x.grad


# The first piece of a capture with 8 rows is as long as the last one.
PIECES = [torch.randn(n, 2) for n in (10, 11, 8, 7, 6)]
SIZES = [torch.randn(n, 4) for n in (3, 5, 7)]
BETWEEN = [torch.cat([torch.tensor(places), torch.randn(9)]) for places in ([2.0, 7.0], [0.0, 11.0], [4.0, 5.0])]

STEPS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "copy_ of a number": (lambda x: x.clone().copy_(2.5) + 1, [torch.ones(3)]),
    "copy_ of a number to halves": (lambda x: x.bfloat16().copy_(1 / 3) * 2, [torch.ones(3)]),
    "the gradient of a loss of nothing": (gradient_of_nothing, [torch.ones(2)]),
    "sums of tensors and sizes": (sums_of_numbers, SIZES),
    "a part whose end the data says": (lambda x: x[: -x[0].long()] * 2, [torch.arange(n, 9.0) for n in (1, 3)]),
    "softmax between places that the data says": (lambda x: x[x[0].long() : x[1].long()].softmax(0), BETWEEN),
    "a write through a view of a batch": (lambda x: (x[None].clamp_(min=0.5), x * 2)[1], SIZES),
    "rows added infinitely often": (rows_added_infinitely_often, [torch.rand(300, 4) + 1]),
    "a list of which a part has gaps": (a_list_of_which_a_part_has_gaps, [torch.randn(4, 6)]),
    "running statistics in inference mode": (statistics_in_inference_mode, [torch.randn(3, 4)]),
    "pieces of which the last is shorter": (lambda x: [part * 2 for part in x.split(4)], PIECES),
    "the gradient of a mean over a size": (gradient_of_a_mean, SIZES),
    "parts that are read late": (parts_that_are_read_late, [torch.randn(64, 64)]),
    "a recurrent network at other lengths": (lambda x: GRU(x)[0] * 2, [torch.randn(2, n, 4) for n in (3, 5, 7)]),
}


def by_kernels(graph: Any, *how: Any, **more: Any) -> Any:
    """The program of a graph as on a GPU, where kernels run and memory is planned."""
    return compile_aten(make_kernels(run_passes(graph, KERNEL_PASSES)), planned=True)


@pytest.mark.parametrize("name", STEPS)
def test_the_step_computes_what_eager_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, batches = STEPS[name]
    compiled = weft.compile(step)
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    with (
        knobs.override(verify_graphs=True, cache_dir=""),
        torch.no_grad() if "recurrent" in name else torch.enable_grad(),
    ):
        for x in batches:
            torch.testing.assert_close(compiled(x.clone()), step(x.clone()), rtol=1e-4, atol=1e-4)


def test_parts_of_a_kernels_result_lie_in_its_memory() -> None:
    """Memory is planned by what fakes share: a part in memory of its own would be read after its memory is given to
    another value."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            part + 1 for part in torch.unsafe_split(x * 2, 2) for part in torch.unsafe_split_with_sizes(part, [1, 1])
        ]

    graph = kernel_graph(weft.capture(step, torch.randn(4, 3)))
    for node in graph.graph.nodes:
        if "unsafe_split" in str(node.target):
            (source,) = node.all_input_nodes
            assert storages(node) == storages(source)


@pytest.mark.parametrize("kind", [torch.SymFloat, torch.SymBool])
def test_a_graph_of_numbers_alone_has_the_symbols_of_its_numbers(kind: type) -> None:
    graph = weft.capture(lambda x: x.sum().item() * 2 if kind is torch.SymFloat else (x > 0)[0].item(), torch.ones(3))
    number = next(node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), kind))
    alone = torch.fx.Graph()
    alone.placeholder("number").meta["val"] = number
    mode = torch_adapter.fake_mode_of(alone)
    assert torch_adapter.shape_env_of(mode) is torch_adapter.shape_env_of_number(number)


def windows_of_a_buffer() -> tuple[Callable[[torch.Tensor], Any], torch.Tensor]:
    flat = torch.arange(12.0)
    windows = flat[4:].unfold(0, 3, 2)

    def step(x: torch.Tensor) -> Any:
        old = windows.clone()
        windows[1].add_(x[:3])
        return old * 2, windows * 1

    return step, flat


def test_values_that_share_memory_are_written_by_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a kernel run in no order: of two elements at one place, either could be left there."""
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    (eager, wanted), (ours, found) = windows_of_a_buffer(), windows_of_a_buffer()
    compiled = weft.compile(ours)
    with knobs.override(verify_graphs=True, cache_dir=""):
        for call in range(3):
            x = torch.full((4,), call + 1.0)
            torch.testing.assert_close(compiled(x), eager(x))
            assert found.equal(wanted)


def test_a_window_behind_its_buffer_is_read_by_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """``as_strided`` counts from the start of the storage, in which an argument begins anywhere."""
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    step = lambda x: x.as_strided((2, 2), (1, 2), 7).add_(100) * 1
    compiled, wanted, found = weft.compile(step), torch.arange(20.0), torch.arange(20.0)
    with knobs.override(verify_graphs=True, cache_dir=""):
        torch.testing.assert_close(compiled(found[5:15]), step(wanted[5:15]))
    assert found.equal(wanted)


def views_of_updated_state(s: Any, x: torch.Tensor) -> list[torch.Tensor]:
    s.flat.copy_(x * 2)
    first, second = s.flat.chunk(2)
    s.square.copy_(x.view(2, 2).t())
    if s.branches and x.sum() > 3:
        s.late.add_(x)
    s.complex.mul_(1j)
    more = s.square.view(4), s.square.t(), s.square.diagonal(), s.late[1:], s.complex.conj(), s.complex.real
    return [first, second.view(1, 2), s.flat.detach(), s.flat.view(torch.int32), *more, s.flat * 1]


def run_with_views(branches: bool, wrap: Callable[[Any], Any]) -> list[Any]:
    """The values and the memory of what three calls return, to which their caller writes."""
    s = SimpleNamespace(flat=torch.ones(4), square=torch.zeros(2, 2), late=torch.arange(4.0), branches=branches)
    s.complex = torch.ones(3, dtype=torch.complex64)
    state = [s.flat, s.square, s.late, s.complex]
    run = wrap(lambda x: views_of_updated_state(s, x))
    found: list[Any] = []
    for call in range(3):
        views = run(torch.full((4,), call + 1.0))
        found.append([[view.untyped_storage()._cdata == t.untyped_storage()._cdata for t in state] for view in views])
        for view in views:
            view.add_(1)
        found.append([tensor.tolist() for tensor in (*views, *state)])
    return found


@pytest.mark.parametrize("branches", [False, True])
def test_views_of_updated_state_lie_in_it(branches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel computes the new value in memory of its own, from which it is copied."""
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    with knobs.override(verify_graphs=True, cache_dir=""):
        assert run_with_views(branches, weft.compile) == run_with_views(branches, lambda step: step)


def seen_by_opaque(wrap: Callable[[Any], Any]) -> list[Any]:
    """What an opaque function sees of the parameters and momenta between backward and the optimizer's step."""
    model, seen = nn.Linear(4, 4), list[Any]()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @weft.opaque
    def look() -> None:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        seen.append([tensor.detach().clone() for tensor in (*model.parameters(), *momenta)])

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()

    run = wrap(step)
    for call in range(3):
        run(torch.full((2, 4), call + 1.0))
    return seen


def test_an_opaque_function_sees_the_state_before_it_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums a gradient may compute the new parameter too, long before the optimizer's step."""
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    with knobs.override(verify_graphs=True, cache_dir=""):
        torch.testing.assert_close(seen_by_opaque(weft.compile), seen_by_opaque(lambda step: step))


def trained_with_rates_of_numpys(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    weight = nn.Parameter(torch.linspace(-1, 1, 4))
    optimizer = torch.optim.RMSprop([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run, found = wrap(step), []
    for rate in np.linspace(0.1, 0.2, 4):
        optimizer.param_groups[0]["lr"] = rate
        run(torch.arange(4.0))
        found.append(weight.detach().clone())
    return found


def test_a_kernel_takes_numbers_of_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    with knobs.override(verify_graphs=True, cache_dir=""):
        torch.testing.assert_close(
            trained_with_rates_of_numpys(weft.compile), trained_with_rates_of_numpys(lambda step: step)
        )


FAILING: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "bernoulli": lambda x, p: torch.empty_like(x).bernoulli_(p) * x,
    "dropout": lambda x, p: torch.native_dropout(x, p, True)[0],
    "smooth_l1_loss": lambda x, beta: F.smooth_l1_loss(x, x * 2, beta=beta),
}


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("wrong", [-0.5, math.nan])
@pytest.mark.parametrize("name", FAILING)
def test_numbers_that_atens_kernels_refuse_are_refused(
    name: str, wrong: float, varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["weft.program_form"], "compile_graph", by_kernels)
    step = FAILING[name]
    compiled = weft.compile(step)
    with knobs.override(verify_graphs=True, cache_dir=""):
        for number in (0.1, 0.2, 0.3) if varies else ():
            compiled(torch.ones(3), number)
        with pytest.raises(RuntimeError):
            step(torch.ones(3), wrong)
        with pytest.raises(StepFailed):
            compiled(torch.ones(3), wrong)
