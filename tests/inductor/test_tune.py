"""Algorithms of products: which shapes they are chosen for, what is measured and kept, and what programs call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft import knobs
from weft.inductor import tune
from weft.inductor.runtime import products
from weft.inductor.runtime.autotune import fastest
from weft.inductor.runtime.cublas_lt import Product, Shape
from weft.inductor.runtime.products import product_callables, shape_of

Tensor = torch.Tensor
aten = torch.ops.aten


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    with knobs.override(cache_dir=str(tmp_path)):
        yield tmp_path


# ---- the table


def refuse() -> list[float]:
    raise AssertionError("not to be measured")


def test_the_fastest_is_measured_once_for_what_it_is_about(cache: Path) -> None:
    measured: list[int] = []

    def measure() -> list[float]:
        measured.append(1)
        return [2.0, 1.0, 3.0]

    assert fastest({"gpu": "H200"}, ["a", "b", "c"], measure) == "b"
    assert fastest({"gpu": "H200"}, ["a", "b", "c"], refuse) == "b"
    assert fastest({"gpu": "H200"}, ["c", "b", "a"], refuse) == "b"
    fastest({"gpu": "H100"}, ["a", "b", "c"], measure)
    fastest({"gpu": "H200"}, ["a", "b", "d"], measure)
    assert len(measured) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"choice": "d"}', b'{"choice": ["a"]}'])
def test_a_damaged_or_foreign_entry_is_measured_again(content: bytes, cache: Path) -> None:
    fastest({"gpu": "H200"}, ["a", "b"], lambda: [1.0, 2.0])
    (entry,) = (cache / "autotune").iterdir()
    assert json.loads(entry.read_bytes())["gpu"] == "H200"
    entry.write_bytes(content)
    assert fastest({"gpu": "H200"}, ["a", "b"], lambda: [2.0, 1.0]) == "b"


# ---- shapes


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


FITTING = {
    "rows": (matrix(64, 32), matrix(32, 16)),
    "columns": (matrix(32, 64).t(), matrix(16, 32).t()),
    "parts of rows": (matrix(64, 48)[:, :32], matrix(32, 24)[:, :16]),
}
OTHERS = {
    "float32": (matrix(64, 32, torch.float32), matrix(32, 16, torch.float32)),
    "rows that are not aligned": (matrix(64, 36)[:, :32], matrix(32, 16)),
    "a result that is not aligned": (matrix(64, 32), matrix(32, 12)),
    "rows that lie over each other": (matrix(1, 1000).view(-1).as_strided((64, 32), (8, 1)), matrix(32, 16)),
    "every other column": (matrix(64, 64)[:, ::2], matrix(32, 16)),
    "one row": (matrix(1, 32), matrix(32, 16)),
}


@pytest.mark.parametrize("name", FITTING)
def test_shapes_that_algorithms_are_chosen_for(name: str) -> None:
    assert Shape.of(*FITTING[name]).fits


@pytest.mark.parametrize("name", OTHERS)
def test_shapes_that_are_left_to_cublas(name: str) -> None:
    assert not Shape.of(*OTHERS[name]).fits


def test_products_on_a_cpu_are_left_alone() -> None:
    build = StepBuilder()
    a, b = (build.input(torch.randn(64, 64).bfloat16()) for _ in range(2))
    assert shape_of(build.call(aten.mm.default, a, b)) is None


# ---- graphs


@pytest.mark.parametrize("first", [True, False])
def test_products_get_what_rank_0_found_for_their_shapes(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another rank nothing is measured, and a shape that rank 0 does not have is left to cuBLAS."""
    build = StepBuilder()
    x, y = (build.input(torch.randn(64, 64).bfloat16()) for _ in range(2))
    nodes = [build.call(aten.mm.default, a, b) for a, b in ((x, y), (y, x), (x, x))]
    build.returns(*nodes)
    shapes = [Shape((64, n, n, 1), (n, 64, 64, 1), torch.bfloat16) for n in (32, 64, 32)]
    found = {shapes[0]: "0a", shapes[1]: ""}
    measured: list[Shape] = []

    def fastest_of(shape: Shape) -> str:
        measured.append(shape)
        return found[shape]

    monkeypatch.setattr(tune, "_LEAST", 0)
    monkeypatch.setattr(tune, "shape_of", dict(zip(nodes, shapes, strict=True)).get)
    monkeypatch.setattr(tune, "_fastest", fastest_of)
    published: list[str] = []

    def of_first_rank(about: str, find: Callable[[], str]) -> str:
        published.append(find())
        return published[0] if first else json.dumps(json.loads(published[0])[1:])

    monkeypatch.setattr(tune, "of_first_rank", of_first_rank)
    with knobs.override(autotune=True):
        tune.tune_products(build.build(), everywhere=True)
    assert measured == [shapes[0], shapes[1]]
    assert [node.meta.get("algorithm") for node in nodes] == (["0a", None, "0a"] if first else [None] * 3)


def tuned_where_ranks_differ(rank: int, world: int, asks: int) -> list[str | None]:
    """Rank ``asks`` alone asks for tuning, and every rank would find another algorithm."""
    build = StepBuilder()
    x = build.input(torch.randn(64, 64).bfloat16())
    build.returns(node := build.call(aten.mm.default, x, x))
    shape = Shape((64, 64, 64, 1), (64, 64, 64, 1), torch.bfloat16)
    said: list[str | None] = []
    with (
        mock.patch.object(tune, "_LEAST", 0),
        mock.patch.object(tune, "shape_of", {node: shape}.get),
        mock.patch.object(tune, "_fastest", return_value=f"0{rank}"),
        knobs.override(autotune=rank == asks, peer_timeout_s=20),
    ):
        for everywhere in (True, False, True):
            node.meta.pop("algorithm", None)
            tune.tune_products(build.build(), everywhere)
            said.append(node.meta.get("algorithm"))
    return said


@pytest.mark.parametrize("asks", [0, 1])
def test_rank_0_says_for_all_whether_and_how(asks: int) -> None:
    found = run_ranks(tuned_where_ranks_differ, 2, asks)
    together = "00" if asks == 0 else None
    alone = [f"0{rank}" if rank == asks else None for rank in range(2)]
    assert found == [[together, alone[rank], together] for rank in range(2)]


# ---- programs


def test_programs_call_the_chosen_ones_where_matrices_lie_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.randn(5000).bfloat16()
    store = store[(-store.data_ptr() // 2) % 8 :]  # its address is a multiple of 16

    def at(first: int, rows: int, columns: int) -> Tensor:
        return store[first : first + rows * columns].view(rows, columns)

    a, b, c = at(0, 16, 32), at(512, 32, 24), at(1280, 16, 24)
    ran: list[bool] = []

    class Counted:
        def __init__(self, shape: Shape, device: torch.device) -> None:
            self.adds = shape.adds

        def run(self, algorithm: Any, a: Tensor, b: Tensor, result: Tensor) -> None:
            assert algorithm.raw[:2] == b"\x01\x02"
            ran.append(self.adds)
            result.copy_(result + a @ b if self.adds else a @ b)

    monkeypatch.setattr(products, "product_of", Counted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    calls = product_callables({Shape.of(a, b): "0102", Shape.of(a, b, True): "0102"})
    mm, mm_out, addmm_ = (calls[op] for op in (aten.mm.default, aten.mm.out, aten.addmm_.default))
    wanted = a @ b
    assert torch.equal(mm(a, b), wanted)
    assert mm_out(a, b, out=c) is c
    assert torch.equal(c, wanted)
    assert addmm_(c, a, b) is c
    torch.testing.assert_close(c, wanted * 2)
    assert ran == [False, False, True]
    torch.testing.assert_close(addmm_(c, a, b, beta=0.5, alpha=2), wanted * 3)
    # Another shape, other strides, an address that is no multiple of 16 bytes, and a result that does not lie in rows.
    torch.testing.assert_close(mm(at(0, 8, 32), b), at(0, 8, 32) @ b)
    torch.testing.assert_close(mm(at(0, 32, 16).t(), b), at(0, 32, 16).t() @ b)
    torch.testing.assert_close(mm(at(1, 16, 32), b), at(1, 16, 32) @ b)
    torch.testing.assert_close(mm_out(a, b, out=at(1280, 24, 16).t()), wanted)
    assert len(ran) == 3
    assert product_callables({}) == {}


# ---- on a GPU


def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    hidden = (x @ w.t()).relu()
    return (hidden @ v.t()).square().sum() + (x @ w.t()[:, : x.shape[1]]).sum()


@pytest.mark.gpu
def test_every_algorithm_computes_every_product() -> None:
    for operands in FITTING.values():
        a, b = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").normal_() for t in operands)
        for adds in (False, True):
            product = Product(Shape.of(a, b, adds), a.device)
            algorithms = product.algorithms()
            assert algorithms
            for algorithm in algorithms:
                result = torch.randn(a.shape[0], b.shape[1], device="cuda").bfloat16()
                wanted = a.double() @ b.double() + (result.double() if adds else 0)
                product.run(algorithm, a, b, result)
                torch.testing.assert_close(result.double(), wanted, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_tuned_step_computes_what_an_eager_one_does(cache: Path, graphs: bool, monkeypatch: Any) -> None:
    """By the last guesses, so that they are others than cuBLAS would take."""
    monkeypatch.setattr(tune, "_LEAST", 0)
    asked: list[list[float]] = []

    def last(about: Any, alternatives: Sequence[str], measure: Callable[[], list[float]]) -> str:
        asked.append(measure())
        ran.clear()  # what counts is what the program calls
        assert len(asked[-1]) == len(alternatives) > 1
        return alternatives[-1]

    monkeypatch.setattr(tune, "fastest", last)
    ran: list[Shape] = []
    plain: Callable[..., None] = Product.run

    def counted(self: Product, *arguments: Any) -> None:
        ran.append(self.shape)
        plain(self, *arguments)

    x, w, v = (torch.randn(*sizes, device="cuda").bfloat16() / 8 for sizes in ((256, 128), (512, 128), (64, 512)))

    def step(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (w, v)]
        loss = layer(x, *leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    wanted = step(x.double(), w.double(), v.double())
    monkeypatch.setattr(Product, "run", counted)
    with knobs.override(autotune=True, cuda_graphs=graphs):
        found = weft.compile(step)(x, w, v)
    assert len(ran) >= 3
    assert all(time > 0 for times in asked for time in times)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05 * float(exact.abs().mean()))
