"""Operations that write over operands nobody reads again: which do, and that no value changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from weft.capture.graph import StepGraph
from weft.capture.record.aot import Source, step_graph
from weft.capture.record.functional_ops import written_arguments
from weft.capture.step_interface import Role
from weft.inductor.passes.write_in_place import in_place_form, out_form, write_in_place
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.placement import writing_form
from weft.torch_adapter import OpOverload

Tensor = torch.Tensor
aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> StepGraph:
    """The StepGraph of a functional graph, as AOTAutograd hands it over; `copy_` into an input is an update."""
    module = make_fx(lambda *given: _as_tuple(function(*given)), tracing_mode="fake")(*inputs)
    return step_graph(module, [Source(f"x{at}", Role.BATCH) for at in range(len(inputs))])[0]


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def written(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Runs the program with and without the pass, compares all it leaves behind; the operations it does in place."""
    plain, changed = graph_of(function, *inputs), write_in_place(graph_of(function, *inputs)).check()
    left = []
    for graph in (plain, changed):
        mine = [x.clone() for x in inputs]
        left.append([*compile_aten(graph)(*mine), *mine])
    for a, b in zip(*left, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    forms = [form for node in changed.graph.nodes if (form := writing_form(node)) is not None]
    clones = sum(node.target is aten.clone.default for node in changed.graph.nodes)
    assert compile_aten(changed).source.count("aten_clone(") == clones
    return [str(form) for form in forms]


X, Y = torch.randn(4, 4), torch.randn(4, 4)

DONE: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a chain": (lambda x: x.sin().relu().mul(2), ["aten.relu_.default", "aten.mul_.Tensor"]),
    "through views": (lambda x: (x + 1).view(2, 8).relu().t(), ["aten.relu_.default"]),
    "an updated input": (lambda x: x.copy_(x + 1), ["aten.add_.Tensor"]),
    "an input updated in two operations": (
        lambda x: (y := (x + 1).relu(), x.copy_(y))[1],
        ["aten.add_.Tensor", "aten.relu_.default"],
    ),
    "the first of two": (lambda x, y: (x + 1) + (y + 1), ["aten.add_.Tensor"]),
    "the second of two": (lambda x, y: x * (y + 1), ["aten.mul.out"]),
    "of two that broadcast": (lambda x, y: (x[0] + 1) * (y + 1), ["aten.mul.out"]),
    "what has no in-place form": (
        lambda x, y: aten.gelu_backward(x * 2, y, approximate="tanh"),
        ["aten.gelu_backward.grad_input"],
    ),
    "the other operand of a backward": (
        lambda x, y: aten.threshold_backward(x, y * 2, 0),
        ["aten.threshold_backward.grad_input"],
    ),
    "one of three": (lambda x, y: torch.where(x > 0, x, y + 1), ["aten.where.self_out"]),
}
LEFT: dict[str, Callable[..., Any]] = {
    "an input": lambda x: x.relu(),
    "a value that is returned": lambda x: (y := x + 1, y.relu()),
    "a value that is read later": lambda x: (y := x + 1).relu() + y,
    "a value whose view is read later": lambda x: (y := x + 1, v := y[0], (y * 2, v + 1))[2],
    "a part of a value that is read": lambda x: (p := (x + 1).split(2), p[0].relu(), p[1] + 1)[1:],
    "a value read twice": lambda x: (y := x + 1, torch.mul(y, y))[1],
    "a value read through a view too": lambda x: (y := x + 1, torch.mul(y, y.t()))[1],
    "a result of another layout": lambda x: (x + 1).t().contiguous().unsqueeze(0) + x.expand(2, 4, 4),
    "a result of another type": lambda x: (x + 1) > 0,
    "an input updated otherwise": lambda x, y: (z := x * 2, x.copy_(y.sin()), z)[2],
    "what is not computed element by element": lambda x: aten._softmax_backward_data(x * 2, x, 1, torch.float32),
    "a part of a value, as a result": lambda x: (x + 1).split(2)[0].mul(2),
    "an input that is returned too": lambda x: (y := x + 1, x.copy_(y.relu()), y)[2],
}


@pytest.mark.parametrize("name", DONE)
def test_operations_with_a_dead_operand_write_in_place(name: str) -> None:
    function, forms = DONE[name]
    assert written(function, *[X, Y][: function.__code__.co_argcount]) == forms


@pytest.mark.parametrize("name", LEFT)
def test_operations_whose_operand_is_read_later_do_not_write_in_place(name: str) -> None:
    """Neither `relu` nor `mul`; an addition of what they make to something else may be."""
    function = LEFT[name]
    forms = written(function, *[X, Y][: function.__code__.co_argcount])
    assert set(forms) <= {"aten.add_.Tensor"}


def test_batch_norm_updates_its_statistics_in_place() -> None:
    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, variance, True, 0.1, 1e-5)
        mean.copy_(out[3])
        variance.copy_(out[4])
        return out[0].relu()

    forms = written(function, torch.randn(3, 5, 4), torch.zeros(5), torch.ones(5))
    assert forms == ["aten._native_batch_norm_legit.default", "aten.relu_.default"]


def test_in_place_and_out_forms_of_operations() -> None:
    assert in_place_form(aten.index_add.default) is aten.index_add_.default
    assert out_form(aten.elu_backward.default) is aten.elu_backward.grad_input
    assert out_form(aten.add.Scalar) is None  # its form computes elsewhere and copies
    assert out_form(aten._softmax.default) is None
    for target in (aten.mm.default, aten.native_dropout.default, aten.bernoulli.p, F.relu):
        assert in_place_form(target) is None


def test_a_result_written_in_place_does_not_become_a_view() -> None:
    """Autograd refuses users that write to a view which a compiled function returns."""
    x = torch.randn(2, 6)
    for function in (lambda x: (x + 1).view(3, 4) * 2, lambda x: x.view(3, 4) + (x + 1).view(3, 4)):
        step = write_in_place(graph_of(function, x))
        assert any(writing_form(node) is not None for node in step.graph.nodes)
        with torch.no_grad():
            (found,) = compile_aten(step)(x)
        assert not found._is_view()
        assert torch.equal(found, function(x))


ELEMENTWISE = [
    op
    for packet in (getattr(aten, name) for name in dir(aten) if hasattr(getattr(aten, name), "overloads"))
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if out_form(op) is not None
]
VALUES: dict[str, Any] = {"number": 2, "int": 1, "float": 0.5, "bool": False}


def operands(op: OpOverload, dtype: torch.dtype) -> dict[str, Any]:
    """What `op` must be given, by the types in its schema."""
    draw = torch.Generator().manual_seed(0)
    needed = {a.name: str(a.type) for a in op._schema.arguments if not a.has_default_value()}
    made = {name: VALUES.get(kind) for name, kind in needed.items()}
    made |= {name: (torch.rand(5, 7, generator=draw) * 6).to(dtype) for name in made if needed[name] == "Tensor"}
    return made | ({"condition": made["condition"] > 3} if "condition" in made else {})


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_an_out_form_may_write_over_any_operand(op: OpOverload) -> None:
    """Each that the pass may use, whatever kernels are behind it."""
    found = written_arguments(out_form(op))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        try:
            wanted = op(**operands(op, dtype))
        except (RuntimeError, TypeError):
            continue  # no kernel for this type
        for name, value in operands(op, dtype).items():
            if isinstance(value, Tensor) and value.dtype == wanted.dtype:
                mine = operands(op, dtype)
                found.functional.op(**mine, **{found.writes[0][1]: mine[name]})
                torch.testing.assert_close(mine[name], wanted, rtol=0, atol=0, equal_nan=True)


def random_function(seed: int, length: int) -> Callable[[Tensor, Tensor], Any]:
    """Operations, views and in-place writes to the second input, of values picked at random."""

    def function(x: Tensor, y: Tensor) -> Any:
        choose = random.Random(seed)
        values = [x, y, x + y]
        for _ in range(length):
            a, b = choose.choice(values), choose.choice(values)
            make = choose.choice(
                [
                    lambda a, b: a + b,
                    lambda a, b: a.relu(),
                    lambda a, b: a * 0.5,
                    lambda a, b: a.t(),
                    lambda a, b: torch.cat([part.sigmoid() for part in a.split(2)]),
                    lambda a, b: a.view(-1).view(4, 4) if a.is_contiguous() else a.tanh(),
                    lambda a, b: torch.clamp(a, -1, 1),
                    lambda a, b: torch.where(b > 0, a, b),
                    lambda a, b: F.gelu(a).mul(b),
                ]
            )
            values.append(make(a, b))
        kept = choose.sample(values[2:], 2)
        last = values[-1].contiguous() + 0
        y.copy_(last)
        return kept[0] + 0, kept[1].sum(), last * 3

    return function


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**30), st.integers(2, 14))
def test_random_programs_compute_the_same_in_place(seed: int, length: int) -> None:
    written(random_function(seed, length), X, Y)
