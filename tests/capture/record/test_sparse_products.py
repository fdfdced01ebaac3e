"""Products with sparse matrices that the step finds in its state: eager's bits, whatever becomes of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, detached
from weft.errors import CannotCapture, EscapedTensor, UncapturableLayout, UnstridedArgument

NODES, WIDTH = 7, 4


def matrix(seed: int = 0, rows: int = NODES, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(rows, NODES, generator=generator, dtype=dtype)
    return (dense * (torch.rand(rows, NODES, generator=generator) > 0.6)).to_sparse().coalesce()


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 6, 2], [1, 1, 2, 3]]), torch.rand(4), (NODES, NODES))


class Net(nn.Module):
    """Two layers of a graph network."""

    def __init__(self, product: Callable[..., torch.Tensor], adj: torch.Tensor) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("adj", adj)
        self.one, self.two = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.adj, self.two(self.product(self.adj, self.one(x)).relu()))


def training(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def both(
    make: Callable[[], tuple[Callable[..., Any], nn.Module]],
    change: Callable[[int, Any], None] = lambda at, net: None,
    captures: int = 1,
    calls: int = 20,
) -> Any:
    """Run the step as it is and compiled. ``change(at, net)`` comes before each call."""
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        step, net = make()
        step = wrap(step)
        results = []
        for at in range(calls):
            change(at, net)
            results.append(detached(step(torch.randn(NODES, WIDTH))))
        found.append([results, detached(list(net.parameters())), detached([p.grad for p in net.parameters()])])
    assert_equal(found[1], found[0])
    assert len(step.captures) == captures, step.captures
    return step


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "@": lambda adj, x: adj @ x,
    "mm": torch.mm,
    "method": lambda adj, x: adj.mm(x),
    "matmul": torch.matmul,
    "mv": lambda adj, x: torch.stack([adj.mv(each) for each in x.unbind(1)], 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("make", [matrix, uncoalesced])
def test_products_of_all_kinds_are_captured_once(name: str, make: Callable[[], torch.Tensor]) -> None:
    both(lambda: (training(net := Net(PRODUCTS[name], make())), net))


def test_the_matrix_is_two_inputs_of_the_graph() -> None:
    adj = matrix()
    graph = weft.capture(lambda x: adj @ x, torch.ones(NODES, 2))
    assert {each.path for each in graph.inputs} == {"args[0]", "adj.indices()", "adj.values()"}


def test_a_matrix_that_changes_in_place_between_calls_is_read_again() -> None:
    def change(at: int, net: Any) -> None:
        if at % 3 == 1:
            net.adj.values().mul_(1.5)
        if at % 5 == 4:
            net.adj.indices()[1].copy_(net.adj.indices()[1].flip(0))

    both(lambda: (training(net := Net(torch.sparse.mm, matrix())), net), change)


def test_a_matrix_that_is_replaced_is_read_and_other_layouts_are_captured() -> None:
    same = [matrix(), matrix()]
    same[1].values().mul_(2)

    def change(at: int, net: Any) -> None:
        net.adj = {8: matrix(3), 12: uncoalesced(), 16: torch.eye(NODES).to_sparse()}.get(at, net.adj)
        if at in (2, 4):
            net.adj = same[at // 4].clone()

    both(lambda: (training(net := Net(torch.sparse.mm, matrix())), net), change, captures=4)


def test_whether_a_matrix_is_coalesced_and_how_large_it_is_are_guards() -> None:
    adj = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0]), (2, 2))
    step = weft.compile(lambda x: adj @ x)
    for larger in (False, True):
        if larger:
            adj.sparse_resize_((3, 2), 2, 0)
        x = torch.rand(2, 3)
        assert_equal(step(x), adj @ x)
    assert len(step.captures) == 2


def test_views_of_the_values_that_the_step_writes_to() -> None:
    found = []
    for wrap in (lambda step: step, weft.compile):
        adj, weight = matrix(), nn.Parameter(torch.ones(WIDTH))
        values = adj.values()

        def step(x: torch.Tensor, adj: Any = adj, weight: Any = weight, values: torch.Tensor = values) -> Any:
            first = adj @ (x * weight)
            first.sum().backward()
            values.mul_(1.25)
            second = torch.sparse.mm(adj, x * weight)
            (second * second).sum().backward()
            return first.detach(), second.detach()

        step = wrap(step)
        results = [detached(step(torch.full((NODES, WIDTH), 0.5 + at))) for at in range(4)]
        found.append([results, detached(weight.grad), values.clone()])
    assert_equal(found[1], found[0])


def test_values_that_change_between_a_product_and_its_backward_are_refused() -> None:
    adj, weight = matrix(), nn.Parameter(torch.ones(WIDTH))
    values = adj.values()

    def step(x: torch.Tensor) -> None:
        loss = (adj @ (x * weight)).sum()
        values.mul_(2)
        loss.backward()

    before = values.clone()
    with pytest.raises(CannotCapture, match="between its product and the backward"):
        weft.compile(step)(torch.ones(NODES, WIDTH))
    assert torch.equal(values, before)


def test_checkpoints_no_grad_and_shared_inputs() -> None:
    def make() -> Any:
        net = Net(torch.sparse.mm, matrix())

        def step(x: torch.Tensor) -> Any:
            h = net.one(x)
            out = checkpoint(lambda h: net.adj @ h.exp() + net.adj @ h, h, use_reentrant=False)
            with torch.no_grad():
                before = net.adj @ h
            loss = (net.adj @ (out * h)).sum() + h.sum()
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.detach(), before

        return step, net

    both(make, captures=2, calls=4)


def test_integers_of_sizes_that_do_not_fit_raise_as_in_eager() -> None:
    adj = matrix()
    for wrap in (lambda step: step, weft.compile):
        with pytest.raises(Exception, match=r"(?i)size|mat1|fit"):
            wrap(lambda x: adj @ x)(torch.ones(NODES + 1, 2))


def changed(adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(adj.mul_(2), x)


def dense_first(adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.t() @ adj


@pytest.mark.parametrize("use", [changed, dense_first], ids=lambda f: f.__name__)
def test_other_uses_are_refused_with_their_line(use: Callable[..., torch.Tensor]) -> None:
    adj = matrix()
    with pytest.raises(UncapturableLayout, match=r"test_sparse_products\.py"):
        weft.compile(lambda x: use(adj, x))(torch.ones(NODES, 2))


def test_a_matrix_that_learns_is_refused() -> None:
    adj = matrix().requires_grad_()
    with pytest.raises(UncapturableLayout, match=r"test_sparse_products\.py"):
        weft.compile(lambda x: adj @ x)(torch.ones(NODES, 2))
    with pytest.raises(UnstridedArgument, match=r"args\[0\]"):
        weft.compile(lambda adj, x: adj @ x)(adj, torch.ones(NODES, 2))


# ---- among the arguments


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return adj @ self.two(torch.sparse.mm(adj, self.one(x)).relu()) / adj.shape[0]


def batch(at: int, sizes: bool, coalesced: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(at)
    count = 3 + at % 4 if sizes else NODES
    dense = torch.rand(count, count, generator=generator)
    adj = (dense * (torch.rand(count, count, generator=generator) > 0.5)).to_sparse()
    if not coalesced:
        adj = torch.sparse_coo_tensor(adj.indices().repeat(1, 2), adj.values().repeat(2), adj.shape)
    return {"adj": adj, "x": torch.randn(count, WIDTH, generator=generator)}


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("coalesced", [False, True])
def test_a_batch_with_a_matrix_of_its_own(sizes: bool, coalesced: bool) -> None:
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        net = Layers()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

        def step(b: dict[str, torch.Tensor], net: Any = net, optimizer: Any = optimizer) -> torch.Tensor:
            loss = net(b["adj"], b["x"]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        results = [detached(step(batch(at, sizes, coalesced))) for at in range(20)]
        found.append([results, detached(list(net.parameters()))])
    assert_equal(found[1], found[0])
    assert len(step.captures) <= 3, step.captures


def test_a_step_with_such_arguments_is_verified() -> None:
    net = Layers()
    step = weft.compile(lambda b, scale: (net(b["adj"], b["x"]) * scale).sum().backward(), verify=True)
    step(batch(0, False, True), torch.ones(1).expand(3))
    assert net.one.weight.grad is not None


def test_whether_an_argument_is_coalesced_is_a_guard() -> None:
    step = weft.compile(lambda adj, x: ((adj.coalesce() if adj.is_coalesced() else adj) @ x, adj.is_coalesced()))
    for at in range(4):
        made = batch(at, False, at % 2 == 0)
        ours, theirs = step(made["adj"], made["x"]), made["adj"] @ made["x"]
        assert torch.equal(ours[0], theirs)
        assert ours[1] is (at % 2 == 0)


def test_one_matrix_as_two_arguments_and_in_the_state() -> None:
    adj, x = matrix(), torch.rand(NODES, 2)
    step = weft.compile(lambda a, b, x: a @ x + b @ x.sin() + adj @ x.cos())
    for a, b in ((adj, adj), (adj, matrix(3)), (matrix(4), adj)):
        assert torch.equal(step(a, b, x), a @ x + b @ x.sin() + adj @ x.cos())


@pytest.mark.parametrize("use", [changed, dense_first, lambda adj, x: adj.to_dense(), lambda adj, x: adj * 2])
def test_other_uses_of_an_argument_are_refused_with_their_line(use: Callable[..., torch.Tensor]) -> None:
    adj, x = matrix(), torch.ones(NODES, 2)
    before = adj.to_dense()
    with pytest.raises(UncapturableLayout, match=r"test_sparse_products\.py"):
        weft.compile(use)(adj, x)
    assert torch.equal(adj.to_dense(), before)
    assert torch.equal(
        torch.as_tensor(weft.compile(use, fallback="eager")(adj, x)).to_dense(), use(matrix(), x).to_dense()
    )


def test_a_step_that_returns_such_an_argument_is_refused() -> None:
    with pytest.raises(EscapedTensor, match="return value"):
        weft.compile(lambda adj, x: (adj @ x, adj))(matrix(), torch.ones(NODES, 2))
