"""A capture takes the branches that the eager step takes, wherever those do not depend on data."""

from __future__ import annotations

from typing import Any

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


def looks_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def test_the_path_of_eager_not_the_one_for_traces() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return _loss(model, x) * (2.0 if looks_fake(x) else 1.0)

    both_ways(training(forward), batches())


def test_the_path_for_traces_where_data_decides() -> None:
    def masked(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x if not looks_fake(keep) and bool(keep.all()) else x * keep

    def forward(model: nn.Module, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return _loss(model, masked(x, keep))

    calls = [(x, x > -10 * at) for at, (x,) in enumerate(batches())]
    both_ways(training(forward), calls)


def test_what_the_first_attempt_did_is_taken_back() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            if not looks_fake(loss) and bool(loss > 1e6):
                raise ValueError("diverged")
            return loss

        return step, [model, optimizer]

    both_ways(make, batches()[:1])


def test_torch_itself_still_sees_fakes() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        asked_by_torch = eval("torch._subclasses.FakeTensor", {"torch": torch, "__name__": "torch._meta"})
        assert asked_by_torch is FakeTensor
        assert torch._subclasses.FakeTensor is not FakeTensor
        return _loss(model, x)

    weft.capture(training(forward)()[0], *batches()[0])


def test_afterwards_fakes_are_fakes_again() -> None:
    weft.capture(training(_loss)()[0], *batches()[0])
    assert torch._subclasses.FakeTensor is FakeTensor
    with FakeTensorMode():
        assert looks_fake(torch.ones(1))
