"""Messages of errors that torch raises: they show the numbers of each call, in the words of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional

import weft
from weft.capture.record.shown_symbols import ShownSymbols
from weft.errors import TextOfValue


def _wrapped(x: Tensor, calls: int) -> None:
    try:
        x.view(-1, 7)
    except RuntimeError as error:
        raise ValueError(f"cannot view it: {error}") from error


def _of_users(x: Tensor, calls: int) -> None:
    raise ValueError(f"s0 s1 {tuple(x.shape)} {calls}")


STEPS: dict[str, Callable[[Tensor, int], Any]] = {
    "a size": lambda x, calls: functional.cross_entropy(x, torch.zeros(11, dtype=torch.long)),
    "a product of sizes": lambda x, calls: x.view(-1, 7),
    "an error from another": _wrapped,
    "a float": lambda x, calls: functional.dropout(x, calls + 1.0),
    "a number": lambda x, calls: x.reshape(3, calls + 100),
    "a number and a size": lambda x, calls: x.narrow(0, 0, x.shape[0] + calls),
    "a text of the user's": _of_users,
}


@pytest.mark.parametrize("name", STEPS)
def test_messages_show_the_numbers_of_the_call(name: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        total = torch.zeros(())
        counted = SimpleNamespace(calls=0)

        def step(x: Tensor) -> Any:
            counted.calls += 1
            total.add_(1)
            return STEPS[name](x, counted.calls) if total > 0 else None

        compiled, found = wrap(step), []
        for rows in (4, 5, 6, 8, 5):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                compiled(torch.ones(rows, 5))
            cause = caught.value.__cause__
            found.append((caught.type, str(caught.value), str(cause), counted.calls, total.item()))
        return found

    assert run(weft.compile) == run(lambda step: step)


CAUGHT: dict[str, Callable[[Tensor], Any]] = {
    "a size of a view": lambda x: x.view(-1, 7),
    "an argument of a function in C++": lambda x: x.narrow(0, 0, 100),
    "a check in Python": lambda x: functional.cross_entropy(x, torch.zeros(11, dtype=torch.long)),
    "sizes in a list": lambda x: functional.binary_cross_entropy(x, torch.ones(2)),
    "an index": lambda x: x[100],
    "a number of elements": lambda x: x.item(),
    "sizes of a broadcast": lambda x: x + torch.ones(3, 7),
    "sizes of a broadcast in place": lambda x: torch.zeros(2, 2).add_(x),
    "sizes of a product": lambda x: x @ torch.ones(7, 2),
    "an error of another class": lambda x: x.split([1, 1]),
    "dimensions": lambda x: x.permute(0, 1, 2),
    "a dtype": lambda x: torch.zeros(2, dtype=torch.long).add_(0.5),
    "a negative size": lambda x: torch.zeros(-x.shape[0]),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_errors_that_the_step_catches_are_those_of_the_kernels(name: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        found: list[Any] = []

        def step(x: Tensor) -> Tensor:
            try:
                CAUGHT[name](x)
            except (RuntimeError, ValueError, IndexError) as error:
                found.append((type(error), str(error)))
                found.append(error)
            return x.sum()

        compiled = wrap(step)
        for rows in (4, 5, 6, 8, 5):
            found.append(compiled(torch.ones(rows, 5)).item())
        return [(type(each), each.args, each.__context__) if isinstance(each, Exception) else each for each in found]

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("form", ["size {}", "size {} + 1", "size 2*{}"])
def test_a_symbol_that_torch_was_not_asked_to_show_is_refused(form: str) -> None:
    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(4, ConstantSource("rows"), DimDynamic.DYNAMIC)
    size = shape_env.create_symintnode(symbol, hint=4)
    symbols = SimpleNamespace(shape_env=shape_env, knows=lambda symbol: True)
    shown = ShownSymbols(SimpleNamespace(symbols=symbols, late_texts=[]))  # type: ignore[arg-type]
    with pytest.raises(TextOfValue):
        shown.mark_messages(RuntimeError(form.format(symbol)))
    with shown.noted():
        message = f"size {size}"
    shown.mark_messages(RuntimeError(message))
    if form != "size {}":  # the symbol alone was asked, not the expression
        with pytest.raises(TextOfValue):
            shown.mark_messages(RuntimeError(form.format(symbol)))
