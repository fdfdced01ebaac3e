"""``Tensor.numpy()`` in a step, and arrays of the Python state that a step fills: eager's values and eager's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twenty_calls import CALLS, comparable

import weft
from both_ways import assert_equal
from weft.errors import CannotCapture, NumpyOnTensor, UncapturableDraw

F = nn.functional


class Trainer:
    """A model, and what training code keeps of its results."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.losses: list[Any] = []
        self.confusion = np.zeros((4, 4))
        self.priorities = np.ones(16)
        self.history = np.full(CALLS, np.nan)
        self.calls = 0

    def train(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.model(x)
        loss = F.cross_entropy(scores, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss, scores


def loss_value(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss, _ = t.train(x, y)
    t.losses.append(loss.detach().cpu().numpy())
    print(f"loss {loss.data.numpy():.4f}", loss.detach().numpy())
    return loss.detach().numpy(), float(loss.detach().numpy()), loss.detach().numpy().item()


def metrics(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss, scores = t.train(x, y)
    predicted = scores.detach().cpu().numpy().argmax(axis=1)
    right = predicted == y.numpy()
    return right.mean(), np.sort(scores.detach().numpy(), axis=0), np.bincount(predicted, minlength=4), loss.item()


def arrays_of_tensors(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = np.stack([row.numpy() for row in x])
    return np.asarray(x).sum(0), np.array([x.mean(), 1.0]), rows.mean(), torch.from_numpy(np.clip(x.numpy(), 0, 1))


def parts(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    array = t.train(x, y)[1].detach().numpy()
    return array[0], array.T, array[::2, 1:], array.reshape(-1), array.shape, [float(each) for each in array[0]]


def seen_through(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    weight = t.model.weight.detach().numpy()
    before = weight.sum()
    t.train(x, y)
    return before, weight.sum(), weight.copy(), t.model.weight.numpy(force=True)[0]


def branches(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.train(x, y)[0].detach().numpy()
    return "large" if loss > 1.4 else "small", bool(loss > 0.5)


def counted(t: Trainer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Arrays of the state, with computed values written to drawn and computed places."""
    share = t.priorities**0.6
    share = share / share.sum()
    rows = np.random.choice(16, 4, p=share)
    _, scores = t.train(x, y)
    t.priorities[rows] = scores.detach().abs().mean(1).numpy()
    np.add.at(t.confusion, (y.numpy(), scores.detach().numpy().argmax(1)), 1)
    t.history[t.calls] = scores.mean().item()
    t.calls += 1
    return share[rows], t.confusion.trace() / t.confusion.sum(), t.priorities.max()


STEPS = [loss_value, metrics, arrays_of_tensors, parts, seen_through, branches, counted]


@pytest.mark.parametrize("step", STEPS)
def test_arrays_have_eagers_values(step: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        np.random.seed(0)
        trainer = Trainer()
        run = wrap(step)
        results = []
        for at in range(CALLS):
            generator = torch.Generator().manual_seed(at)
            x, y = torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)
            results.append(comparable(run(trainer, x, y)))
            kept = [trainer.losses, trainer.confusion, trainer.priorities, trainer.history]
            results.append(comparable([kept, trainer.model.weight, np.random.rand()]))
        found.append([results, capfd.readouterr().out])
    assert_equal(found[1], found[0])
    assert len(run.captures) <= (6 if step in (metrics, parts, branches) else 3), run.captures


def test_an_array_shares_the_memory_that_it_shares_in_eager() -> None:
    trainer = Trainer()

    @weft.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = trainer.train(x, y)[0].detach()
        return loss, loss.numpy(), trainer.model.weight.detach().numpy()

    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        loss, array, weight = step(x, y)
        assert np.shares_memory(loss.numpy(), array)
        assert np.shares_memory(trainer.model.weight.detach().numpy(), weight)
        before = weight.copy()
        step(x, y)
        assert (weight != before).any()
        assert_equal(torch.from_numpy(weight), trainer.model.weight.detach())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x * 2).requires_grad_().numpy(),
        lambda x: x.bfloat16().numpy(),
        lambda x: x.to(torch.complex64).conj().numpy(),
        lambda x: x.to("meta").numpy(),
    ],
)
def test_what_torch_refuses_is_refused_with_its_words(step: Callable[..., Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as eager:
        step(torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)) as compiled:
        weft.compile(step)(torch.ones(3))
    assert str(compiled.value) == str(eager.value)


def test_what_has_no_place_in_a_graph_names_the_line() -> None:
    def writes(x: torch.Tensor) -> Any:
        x.numpy()[0] = 3.0
        return x.sum()

    with pytest.raises(UncapturableDraw, match=r"write to a copy: x.numpy\(\).copy\(\)") as caught:
        weft.compile(writes)(torch.ones(3))
    assert "test_numpy_of_tensors.py" in str(caught.value)
    with pytest.raises(NumpyOnTensor, match=r"x.detach\(\).cpu\(\).numpy\(\), which is captured"):
        weft.compile(lambda x: np.linalg.norm(x))(torch.ones(3))


def test_sizes_that_vary() -> None:
    step = weft.compile(lambda x: (x.numpy().mean(), x.numpy().shape[0], torch.from_numpy(x.numpy() * 2)))
    for count in range(2, 14):
        x = torch.arange(count * 3.0).reshape(count, 3)
        assert_equal(step(x), (x.numpy().mean(), count, x * 2))
    assert len(step.captures) <= 3


def test_arrays_in_the_python_of_a_composite_operation_are_refused_with_a_remedy_that_works() -> None:
    library = torch.library.Library("weft_test_arrays", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: torch.from_numpy(x.numpy() * 2), "CompositeImplicitAutograd")

    @torch.library.custom_op("weft_test_arrays::doubled_whole", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    doubled.register_fake(torch.empty_like)
    x = torch.ones(3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            with pytest.raises(CannotCapture, match=r"torch\.library\.custom_op"):
                weft.compile(lambda x: torch.ops.weft_test_arrays.doubled(x))(x)
            assert_equal(weft.compile(lambda x: doubled(x))(x), x * 2)


FROM_PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row of a result": lambda x: torch.from_numpy((x * 2)[1].numpy()) + 0,
    "a part of such a row": lambda x: torch.from_numpy((x * 2)[1].numpy()[1:]) + 0,
    "a column of an argument's row": lambda x: torch.from_numpy(x[1].numpy()[:, 1]) + 0,
    "as_tensor of a slice's row": lambda x: torch.as_tensor(x[1:].numpy()[0]) * 2,
    "transposed": lambda x: torch.from_numpy(x[1].numpy().T) + 0,
    "of a transposed result": lambda x: torch.from_numpy((x * 2).transpose(0, 2)[1].numpy()[:, 1]) + 0,
    "of no elements": lambda x: torch.from_numpy((x * 2)[1:1].numpy()) + 1,
}


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("name", FROM_PARTS)
def test_a_tensor_of_an_array_of_a_part_begins_where_the_part_does(name: str, offset: int) -> None:
    function, memory = FROM_PARTS[name], torch.randn(40)
    compiled = weft.compile(function)
    for at in (offset, offset + 5):
        x = memory[at : at + 24].view(2, 3, 4)
        assert_equal(compiled(x), function(x))


def test_writes_through_the_array_of_a_part_reach_its_tensor() -> None:
    def step(x: torch.Tensor) -> Any:
        whole = (x * 2).transpose(0, 2)
        part = torch.from_numpy(whole[1].numpy()[:, 1])
        part.mul_(3)
        return whole, part

    x = torch.randn(2, 3, 4)
    assert_equal(weft.compile(step)(x), step(x))
