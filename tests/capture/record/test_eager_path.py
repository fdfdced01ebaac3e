"""A capture takes the branches that the eager step takes, wherever those do not depend on data."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import library_that_asks
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import weft
from both_ways import batches, both_ways, mlp, training

NEVER, ALWAYS, OPEN = "never", "always", "data decides"


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# ---- numbers that are the same at every call


def test_counted_positions_decide() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        packed = (positions.diff(dim=-1) != 1).cumsum(-1)
        if not bool((packed[:, -1] == 0).all()):
            raise ValueError("a sequence of one piece")
        return _loss(model, x) * positions[1].max().item()

    both_ways(training(forward), batches())


def test_constants_of_a_view_that_was_written() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(2, 3)
        table[1].fill_(2.5)
        return _loss(model, x) * table.sum().item()

    both_ways(training(forward), batches())


@pytest.mark.parametrize("source", ["argument", "parameter", "draw"])
def test_what_depends_on_more_is_a_branch(source: str) -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        given = {"argument": lambda: x, "parameter": lambda: model[0].weight, "draw": lambda: torch.randn(3)}[source]()
        return _loss(model, x) * (2 if bool((given + torch.ones(1)).sum() > 0) else 3)

    compiled = both_ways(training(forward), batches(), captures=None)
    assert type(compiled.entries[0]).__name__ == "BranchingForm"


BOUNDS = [
    ("<", 0.0, NEVER),
    ("<", -1, NEVER),
    ("<", 1.0, ALWAYS),
    ("<", 0.5, OPEN),
    ("<=", 0.0, OPEN),
    ("<=", 1.0, ALWAYS),
    (">=", 0.0, ALWAYS),
    (">=", 1, NEVER),
    (">=", 0.1, OPEN),
    (">", 0.0, OPEN),
    (">", -0.5, ALWAYS),
    (">", 1.0, NEVER),
]


@pytest.mark.parametrize(("sign", "bound", "holds"), BOUNDS)
def test_a_draw_lies_between_zero_and_one(sign: str, bound: float, holds: str) -> None:
    """Layers dropped with probability 0 are not dropped; the generator moves on as it does in eager."""
    compare = {
        "<": torch.Tensor.__lt__,
        "<=": torch.Tensor.__le__,
        ">=": torch.Tensor.__ge__,
        ">": torch.Tensor.__gt__,
    }[sign]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if compare(torch.rand([]), bound):
            return _loss(model, x) * 3
        return torch.nn.functional.dropout(model(x), 0.5).square().mean()

    compiled = both_ways(training(forward), batches(), captures=None)
    assert (type(compiled.entries[0]).__name__ == "BranchingForm") == (holds == OPEN)
    if holds == OPEN:
        return
    dropped = "bernoulli" in str(compiled.entries[0].captured.graph)
    assert dropped == (holds == NEVER)


# ---- libraries that keep another path for traces


def test_libraries_see_tensors_and_numbers_as_in_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every way to ask, also in a module that is first imported by the step."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_by_the_step", raising=False)
    (tmp_path / "imported_by_the_step.py").write_text(Path(library_that_asks.__file__).read_text())

    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor) -> Any:
            import imported_by_the_step  # type: ignore[missing-import]

            loss = _loss(model, x)
            loss.backward()
            modules = library_that_asks, imported_by_the_step
            return loss, [library.answers(model[0].weight, x, loss.item()) for library in modules]

        return step, [model]

    both_ways(make, batches()[:2], captures=None)
    assert "isinstance" not in vars(library_that_asks)
    assert "type" not in vars(sys.modules["imported_by_the_step"])


def test_a_mask_of_ones_is_dropped_as_in_eager() -> None:
    """Attention without a mask is another kernel, with other last bits; each mask is looked at."""

    def forward(model: nn.Module, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        queries = model(x).reshape(2, 1, 16, 8)
        mask = library_that_asks.mask_or_none(keep)
        attended = nn.functional.scaled_dot_product_attention(queries, queries, queries, mask)
        return attended.square().mean()

    keep = torch.ones(2, 1, 1, 16, dtype=torch.bool)
    part = keep.clone()
    part[:, :, :, 8:] = False
    calls = [(x, keep if at != 1 else part) for at, (x,) in enumerate(batches(shape=(32, 8)))]
    compiled = both_ways(training(forward), calls, captures=None)
    assert type(compiled.entries[0]).__name__ == "BranchingForm"


def test_torch_and_other_threads_see_what_is_fake() -> None:
    begun = threading.Event()
    answers: list[Any] = []

    def ask() -> None:
        with FakeTensorMode():
            fake = torch.ones(1)
        answers.append(library_that_asks.answers(nn.Parameter(torch.ones(1)), fake, 1.0))

    def ask_meanwhile() -> None:
        begun.wait(20)
        ask()

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert eval("isinstance(x, kind)", {"kind": FakeTensor, "x": x, "__name__": "torch._meta"})
        assert not isinstance(x, FakeTensor)
        begun.set()
        while thread.is_alive():  # in a second attempt at the capture it has ended
            pass
        return _loss(model, x)

    thread = threading.Thread(target=ask_meanwhile)
    thread.start()
    weft.capture(training(forward)()[0], *batches()[0])
    thread.join()
    ask()
    during, after = answers
    assert during | {"in a mode": False} == after  # torch keeps that one for all threads
    assert after["isinstance"]
    assert after["class"] == "FakeTensor"
