"""Steps that cannot be captured: the error names the user's line and the remedy, and no state has changed."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import weft
from both_ways import assert_equal, batches, mlp, snapshot
from weft.errors import (
    CannotCapture,
    EscapedTensor,
    NumpyOnTensor,
    UncapturableLayout,
    UncapturableMutation,
    UnregisteredType,
    UnstridedArgument,
    WeftError,
)


class Held:
    """An object with a tensor inside that pytrees do not know, of a class that says how one is made."""

    def __new__(cls, tensor: torch.Tensor) -> Held:
        return object.__new__(cls)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Setting:
    """Everything a step may change, in a state that is easy to tell from another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(mlp(), nn.Dropout(0.3), nn.BatchNorm1d(8))
        self.model.register_buffer("extra", torch.zeros(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.numbers = {"count": 0}
        self.kept: list[Any] = []
        self.model[0][0].weight.grad = torch.ones(8, 8)

    def train(self, x: torch.Tensor) -> torch.Tensor:
        """Changes all there is: parameters, gradients, optimizer, buffers, attributes, generator."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.model.extra = self.model.extra + torch.rand(3)
        self.kept.append(loss.detach())
        x.mul_(2)
        return loss

    def all(self) -> list[Any]:
        state = [snapshot(self.model), snapshot(self.optimizer), dict(self.numbers), list(self.kept)]
        return [*state, torch.get_rng_state(), len(self.optimizer.state), dict(vars(self.model[0]))]


# Each refused step, and the line of it that the message must show. `math.fsum` needs the floats themselves.


def branch(s: Setting, loss: torch.Tensor) -> Any:
    if math.fsum([float(loss)]) > 0.1:  # HERE
        return loss * 2
    return loss


def item(s: Setting, loss: torch.Tensor) -> Any:
    scale = loss.item()
    return loss * math.fsum([scale])  # HERE


def float_of(s: Setting, loss: torch.Tensor) -> Any:
    return [0] * int(math.fsum([loss]))  # HERE


def list_of_parameter(s: Setting, loss: torch.Tensor) -> Any:
    if math.fsum(s.model[0][0].bias.tolist()) > 0:  # HERE
        return loss * 2
    return loss


def numpy_of_loss(s: Setting, loss: torch.Tensor) -> Any:
    return np.linalg.norm(loss.detach())  # HERE


def numpy_of_parameter(s: Setting, loss: torch.Tensor) -> Any:
    return np.linalg.norm(s.model[0][0].weight.data)  # HERE


def loop_over_data(s: Setting, loss: torch.Tensor) -> Any:
    while math.fsum([float(loss)]) > 0.1:  # HERE
        loss = loss / 2
    return loss


def in_a_helper(s: Setting, loss: torch.Tensor) -> Any:
    def helper(value: torch.Tensor) -> bool:
        return math.fsum([float(value)]) > 0.1  # HERE

    return loss * 2 if helper(loss) else loss


def reshaped(s: Setting, loss: torch.Tensor) -> Any:
    s.model[0][0].bias.data = torch.zeros(7)  # HERE
    return loss


def resized_under_a_view(s: Setting, loss: torch.Tensor) -> Any:
    rows = loss.detach().expand(2, 3).contiguous()
    view = rows.detach()
    torch.mul(torch.ones(4, 3), 2, out=rows)  # HERE
    return view


VALUES = [branch, item, float_of, list_of_parameter, loop_over_data, in_a_helper]
REFUSED: list[tuple[Callable[..., Any], type[WeftError]]] = [
    *((step, CannotCapture) for step in VALUES),
    (numpy_of_loss, NumpyOnTensor),
    (numpy_of_parameter, NumpyOnTensor),
    (reshaped, UncapturableMutation),
    (resized_under_a_view, UncapturableMutation),
]


def _marked_line(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize(("refused", "error"), REFUSED, ids=lambda value: value.__name__)
def test_the_error_names_the_users_line(refused: Callable[..., Any], error: type[WeftError]) -> None:
    s = Setting()
    with pytest.raises(error) as caught:
        weft.compile(lambda x: refused(s, s.train(x)))(*batches()[0])
    assert re.search(rf"test_refusals\.py:{_marked_line(refused)}\b", str(caught.value))


@pytest.mark.parametrize("refused", VALUES)
def test_the_error_names_the_remedy(refused: Callable[..., Any]) -> None:
    s = Setting()
    with pytest.raises(CannotCapture, match=r"torch\.where(.|\n)*weft\.opaque(.|\n)*fallback=\"eager\""):
        weft.compile(lambda x: refused(s, s.train(x)))(*batches()[0])


def test_sparse_arguments_are_refused() -> None:
    with pytest.raises(UnstridedArgument, match=r"args\[0\].*to_dense"):
        weft.compile(lambda x: x * 2)(torch.eye(3).to_sparse_csr())


def test_kernels_that_read_numbers_while_they_take_apart() -> None:
    def step(x: torch.Tensor, at: torch.Tensor) -> Any:
        return torch.ops.aten.tensor_split.tensor_indices_or_sections(x, at)  # HERE

    with pytest.raises(CannotCapture, match=rf"test_refusals\.py:{_marked_line(step)}(.|\n)*read the numbers"):
        weft.compile(step)(torch.arange(6), torch.tensor([2, 3]))


def chosen(x: torch.Tensor) -> Any:
    return flex_attention(*(x[None, None],) * 3)  # HERE


SPARSE = torch.eye(4).to_sparse()


def multiplied(x: torch.Tensor) -> Any:
    return torch.sparse.mm(SPARSE * 2, x)  # HERE


def quantized(x: torch.Tensor) -> Any:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize()  # HERE


def blocked(x: torch.Tensor) -> Any:
    return x.to_mkldnn().to_dense()  # HERE


@pytest.mark.parametrize(
    ("step", "error", "why"),
    [
        (quantized, UncapturableLayout, "fake_quantize"),
        (blocked, UncapturableLayout, "dense"),
        (chosen, CannotCapture, "in Python"),
        (multiplied, UncapturableLayout, "dense"),
    ],
)
def test_what_kernels_and_tracers_read_is_refused_with_its_line(step: Any, error: type[WeftError], why: str) -> None:
    with pytest.raises(error, match=rf"test_refusals\.py:{_marked_line(step)}(.|\n)*{why}"):
        weft.compile(step)(torch.ones(4, 8))


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)

    def step(ids: torch.Tensor) -> None:
        table(ids).sum().backward()  # HERE

    with pytest.raises(UncapturableLayout, match=rf"test_refusals\.py:{_marked_line(step)}.*sparse=False"):
        weft.compile(step)(torch.tensor([1, 2]))
    weft.compile(step, fallback="eager")(torch.tensor([1, 2]))
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


# ---- Python state


def kept_in_an_object(s: Setting, loss: torch.Tensor) -> Any:
    s.numbers["last"] = functools.partial(print, loss)  # type: ignore[assignment]
    return loss


def raises_by_itself(s: Setting, loss: torch.Tensor) -> Any:
    raise ValueError("the step's own")


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (kept_in_an_object, EscapedTensor, r"numbers\['last'\] holds a partial.*register"),
    ],
)
def test_changes_of_python_state_are_refused(refused: Callable[..., Any], error: type[WeftError], message: str) -> None:
    s = Setting()
    with pytest.raises(error, match=message):
        weft.compile(lambda x: refused(s, s.train(x)))(*batches()[0])


# ---- arguments


def test_an_argument_of_an_unregistered_type_is_refused() -> None:
    with pytest.raises(UnregisteredType, match=r"args\[0\]\['batch'\] is a .*Held.*register_pytree_node"):
        weft.compile(lambda batch: batch["batch"].tensor)({"batch": Held(torch.ones(2))})


# ---- nothing has changed


@pytest.mark.parametrize(
    "refused",
    [branch, numpy_of_parameter, reshaped, kept_in_an_object],
    ids=lambda value: value.__name__,
)
def test_a_failed_capture_changes_nothing(refused: Callable[..., Any]) -> None:
    s = Setting()
    before = s.all()
    (x,) = batches()[0]
    kept = x.clone()
    for _ in range(2):
        with pytest.raises(WeftError):
            weft.compile(lambda x: refused(s, s.train(x)))(x)
        assert_equal(s.all(), before)
        assert torch.equal(x, kept)


def test_the_errors_of_the_step_itself_come_through() -> None:
    s = Setting()
    with pytest.raises(ValueError, match="the step's own"):
        weft.compile(lambda x: raises_by_itself(s, s.train(x)))(*batches()[0])


def test_an_error_in_a_shape_comes_through() -> None:
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1"):
        weft.compile(lambda x: x @ torch.ones(3, 3))(torch.ones(2, 2))


# ---- falling back


def test_fallback_trains_uncompiled_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(**options: Any) -> list[Any]:
        s = Setting()
        step: Any = lambda x: branch(s, s.train(x))
        step = weft.compile(step, **options) if options else step
        return [[step(x.clone()).detach() for (x,) in batches()], *s.all()[:6]]

    with caplog.at_level(logging.WARNING, logger="weft"):
        ours = run(fallback="eager")
    assert_equal(ours, run())
    said = [record.getMessage() for record in caplog.records if "uncompiled" in record.getMessage()]
    assert len(said) == 1
    assert f"test_refusals.py:{_marked_line(branch)}" in said[0]


def test_fallback_is_not_for_the_steps_own_errors() -> None:
    s = Setting()
    with pytest.raises(ValueError, match="the step's own"):
        weft.compile(lambda x: raises_by_itself(s, s.train(x)), fallback="eager")(*batches()[0])


def test_a_module_that_is_converted_after_its_use_is_refused_by_name() -> None:
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        result = module.bfloat16()(x.bfloat16()).float()
        module.float()
        return result

    with pytest.raises(CannotCapture, match=r"test_refusals\.py(.|\n)*converted to another dtype(.|\n)*autocast"):
        weft.compile(step)(torch.ones(3))
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, before)
