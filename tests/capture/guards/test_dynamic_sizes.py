"""Sizes that change: which stay symbolic, which become numbers, and what is logged. Results equal eager bit for bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.errors import MarkedDynamicSpecialised

FEATURES = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def equal_to_eager(
    make: Callable[[nn.Module], Callable[..., Any]],
    calls: Iterable[tuple[Tensor, ...]],
    captures: int,
    *,
    mark: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> weft.CompiledStep:
    """Run every call on one model eagerly and on its twin compiled; results, gradients and the number of
    captures."""
    ours, theirs = model(), model()
    eager, compiled = make(theirs), weft.compile(make(ours), **options)
    for args in calls:
        mine = [arg.clone(memory_format=torch.preserve_format) if arg.is_contiguous() else arg for arg in args]
        for arg in mine if mark else []:
            mark(arg)
        ours.zero_grad()
        theirs.zero_grad()
        expected, got = eager(*args), compiled(*mine)
        assert torch.equal(got, expected), f"{got} instead of {expected} for {[tuple(arg.shape) for arg in args]}"
        for (name, mine_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine_p.grad, theirs_p.grad), name
    assert len(compiled.captures) == captures, compiled.captures
    return compiled


def mean_step(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = module(x).sum() / x.size(0)
        loss.backward()
        return loss.detach()

    return step


def batches(*sizes: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(size, FEATURES),) for size in sizes]


def symbols(compiled: weft.CompiledStep) -> list[str]:
    return [str(size) for size in compiled.entries[0].captured.sizes.sizes]


def test_a_size_that_changed_once_is_symbolic_from_then_on() -> None:
    compiled = equal_to_eager(mean_step, batches(4, 7, 9, 3, 2, 100), captures=2)
    assert symbols(compiled) == ["args[0].size(0)"]


def test_sizes_zero_and_one_have_graphs_of_their_own() -> None:
    compiled = equal_to_eager(mean_step, [], captures=0)
    assert not compiled.entries

    def sums(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = module(x).sum() + (x + torch.ones(x.size(0), 1)).sum()
            loss.backward()
            return loss.detach()

        return step

    # 4; symbolic from 2 up; 1; 0; and each of them again
    equal_to_eager(sums, batches(4, 5, 1, 0, 8, 1, 0, 2, 4), captures=4)


def test_a_first_batch_of_one_does_not_fix_the_size() -> None:
    equal_to_eager(mean_step, batches(1, 4, 5, 6, 1), captures=2)


def test_marked_sizes_are_symbolic_at_once() -> None:
    mark = lambda x: weft.mark_dynamic(x, 0)
    compiled = equal_to_eager(mean_step, batches(4, 5, 9), captures=1, mark=mark)
    assert symbols(compiled) == ["args[0].size(0)"]


def test_dynamic_true_keeps_every_size_symbolic() -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        weight = next(module.parameters())

        def step(x: Tensor) -> Tensor:
            loss = (x.unsqueeze(-1) * weight[0]).square().sum() + 0 * sum(p.sum() for p in module.parameters())
            loss.backward()
            return loss.detach()

        return step

    compiled = equal_to_eager(
        step_of, [(torch.randn(3, 4),), (torch.randn(5, 2),), (torch.randn(2, 7),)], captures=1, dynamic=True
    )
    assert symbols(compiled) == ["args[0].size(0)", "args[0].size(1)"]


def test_dynamic_false_captures_every_size() -> None:
    compiled = equal_to_eager(mean_step, batches(4, 5, 6, 4, 5), captures=3, dynamic=False)
    assert not symbols(compiled)


def test_static_marks_win_over_automatic_dynamic() -> None:
    equal_to_eager(mean_step, batches(4, 5, 6, 4), captures=3, mark=lambda x: weft.mark_static(x, 0))


def test_a_mark_outside_the_dimensions_is_refused() -> None:
    with pytest.raises(IndexError, match="dim is 2, and the tensor has 2 dimensions"):
        weft.mark_dynamic(torch.zeros(2, 2), 2)


# ---- what the step assumes of its sizes


def two_sizes(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        same = x + y if x.shape == y.shape else x.sum() + y.sum() + torch.zeros_like(x)
        loss = module(same).sum()
        loss.backward()
        return loss.detach()

    return step


def test_two_sizes_assumed_equal_are_held_to_it() -> None:
    pairs = [(3, 3), (4, 4), (5, 5), (5, 4), (6, 7), (7, 7)]
    calls = [(torch.randn(a, FEATURES), torch.randn(b, FEATURES)) for a, b in pairs]
    equal_to_eager(two_sizes, calls, captures=3)


def test_the_range_that_a_branch_assumes_is_held() -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = module(x).sum() * (3.0 if x.size(0) > 8 else 1.0)
            loss.backward()
            return loss.detach()

        return step

    compiled = equal_to_eager(step_of, batches(4, 5, 8, 9, 20, 2, 6), captures=3)
    assert "> 8" in " ".join(compiled.captures) or "<= 8" in " ".join(compiled.captures)


def test_a_size_used_by_python_alone_is_a_guard() -> None:
    """The argument itself does not reach the graph."""

    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = module(torch.ones(x.shape[0], FEATURES)).sum()
            loss.backward()
            return loss.detach()

        return step

    equal_to_eager(step_of, batches(4, 5, 6), captures=2)
    equal_to_eager(step_of, batches(4, 5), captures=2, dynamic=False)


def test_the_same_tensor_passed_twice_is_told_from_two() -> None:
    x, y = torch.randn(4, FEATURES), torch.randn(4, FEATURES)

    def step_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def step(a: Tensor, b: Tensor) -> Tensor:
            loss = module(a - 2 * b).sum()
            loss.backward()
            return loss.detach()

        return step

    compiled, eager = weft.compile(step_of(model())), step_of(model())
    for args in ((x, x), (x, y), (y, y)):
        assert torch.equal(compiled(*args), eager(*args))


def test_requires_grad_of_an_argument_is_a_guard() -> None:
    def step(x: Tensor) -> Tensor:
        loss = (x * x).sum()
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    compiled = weft.compile(step)
    plain, leaf = torch.randn(4), torch.randn(4, requires_grad=True)
    compiled(plain)
    compiled(leaf)
    assert torch.equal(leaf.grad, 2 * leaf.detach())


# ---- strides


def test_slices_of_longer_rows_keep_symbolic_strides() -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        table = nn.Embedding(16, FEATURES)
        table.weight.data = torch.linspace(-1, 1, 16 * FEATURES).view(16, FEATURES)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            loss = (module(table(ids)).squeeze(-1) * labels).sum() / math.prod(ids.shape)
            loss.backward()
            return loss.detach()

        return step

    rows = [torch.randint(0, 16, (3, length)) for length in (5, 9, 12, 30)]
    compiled = equal_to_eager(step_of, [(row[:, :-1], row[:, 1:]) for row in rows], captures=2)
    assert "args[0].stride(0)" in symbols(compiled)


def test_another_layout_of_the_same_sizes_is_another_graph() -> None:
    """`view` of a transposed tensor fails; the graph of a contiguous one must not be used for it."""

    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            flat = x.reshape(-1)[:FEATURES] if not x.is_contiguous() else x.view(-1)[-FEATURES:]
            loss = module(flat).sum()
            loss.backward()
            return loss.detach()

        return step

    wide = [torch.randn(7, n) for n in (8, 9, 10)]
    tall = [torch.randn(n, 7).t() for n in (8, 11)]
    equal_to_eager(step_of, [(x,) for x in (*wide, *tall)], captures=3)


# ---- sizes that Python turns into numbers


def fixed_to_ten(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = module(x).sum() * (2.0 if x.size(0) == 10 else 1.0)  # the line that fixes it
        loss.backward()
        return loss.detach()

    return step


def test_a_comparison_that_holds_fixes_the_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.capture.record.dynamic_sizes"):
        compiled = equal_to_eager(fixed_to_ten, batches(4, 10, 5, 6, 10, 7), captures=3)
    lines = [record.getMessage() for record in caplog.records if "specialised" in record.getMessage()]
    assert len(lines) == 1
    assert "args[0].size(0) is fixed to 10" in lines[0]
    assert "test_dynamic_sizes.py" in lines[0]
    assert "in step" in lines[0]
    assert [str(s) for entry in compiled.entries for s in entry.captured.specialised] == [
        lines[0].removeprefix("specialised: ")
    ]


def test_a_comparison_that_does_not_hold_excludes_one_value() -> None:
    compiled = equal_to_eager(fixed_to_ten, batches(4, 5, 6, 10, 7, 10), captures=3)
    assert "!= 10" in compiled.captures[2]


def test_a_marked_size_must_not_be_fixed() -> None:
    x = torch.randn(10, FEATURES)
    weft.mark_dynamic(x, 0)
    module = model()
    message = r"args\[0\]\.size\(0\).*10 at .*test_dynamic_sizes\.py:\d+ in step"
    with pytest.raises(MarkedDynamicSpecialised, match=message):
        weft.compile(fixed_to_ten(module))(x)
    assert all(p.grad is None for p in module.parameters())


def test_a_size_that_may_be_dynamic_may_be_fixed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.capture.record.dynamic_sizes"):
        equal_to_eager(fixed_to_ten, batches(10, 4, 5), captures=2, mark=lambda x: weft.maybe_mark_dynamic(x, 0))
    assert "args[0].size(0) is fixed to 10" in caplog.text


def test_an_assertion_on_the_shape_fixes_it() -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            assert x.shape == (10, FEATURES)
            loss = module(x).sum()
            loss.backward()
            return loss.detach()

        return step

    compiled = equal_to_eager(step_of, batches(10, 10), captures=1, dynamic=True)
    assert [(s.size, s.value) for s in compiled.entries[0].captured.specialised] == [
        ("args[0].size(0)", 10),
        ("args[0].size(1)", FEATURES),
    ]
    with pytest.raises(AssertionError):
        compiled(torch.randn(11, FEATURES))


def square_root(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = (module(x) / math.sqrt(x.shape[-1]) * math.sqrt(x.shape[0])).sum()
        loss.backward()
        return loss.detach()

    return step


def test_math_on_sizes() -> None:
    equal_to_eager(square_root, batches(4, 4), captures=1)
    equal_to_eager(square_root, batches(4, 5, 6, 7), captures=2)


def test_math_on_sizes_as_a_result() -> None:
    module = model()

    def step(x: Tensor) -> Any:
        module(x).sum().backward()
        return torch.sym_sqrt(x.shape[0])

    compiled = weft.compile(step, dynamic=True)
    assert [compiled(torch.ones(size, FEATURES)) for size in (4, 5, 6)] == [math.sqrt(size) for size in (4, 5, 6)]


def scaled_by_numbers(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        n = x.shape[0]
        loss = (module(x) * (n / 3) / (1.5 + n)).sum() * math.ceil(n / 2) - math.floor(n * 0.7) + round(n / 3)
        loss.backward()
        return loss.detach()

    return step


def test_quotients_and_roundings_of_sizes() -> None:
    equal_to_eager(scaled_by_numbers, batches(4, 5, 6, 7), captures=2)


def test_an_argument_that_requires_grad_keeps_its_sizes(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, FEATURES, requires_grad=True)
    weft.mark_dynamic(x, 0)
    with caplog.at_level(logging.INFO, "weft.capture.record.dynamic_sizes"):
        weft.compile(mean_step(model()))(x)
    assert "args[0].size(0) is fixed to 4 by requires_grad" in caplog.text


# ---- how often


def test_too_many_captures_are_a_warning_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft"), weft.knobs.override(recapture_limit=2):
        compiled = equal_to_eager(mean_step, batches(3, 4, 5, 6, 7), captures=5, dynamic=False)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "step was captured 3 times" in warnings[0].getMessage()
    assert "args[0] is torch.float32 [5, 6]" in warnings[0].getMessage()
    assert len([r for r in caplog.records if "capturing step again" in r.getMessage()]) == 4
    assert compiled.captures[0] == "first call"


def test_a_dictionary_of_tensors_with_one_size_in_common() -> None:
    def step_of(module: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = (module(batch["x"]).squeeze(-1) * batch["weight"]).sum()
            loss.backward()
            return loss.detach()

        return step

    ours = model()
    eager, compiled = step_of(model()), weft.compile(step_of(ours))
    for size in (3, 5, 6, 7):
        batch = {"x": torch.randn(size, FEATURES), "weight": torch.rand(size)}
        assert torch.equal(compiled(batch), eager(batch))
        ours.zero_grad()
    assert len(compiled.captures) == 2
    assert symbols(compiled) == ["args[0]['weight'].size(0)", "args[0]['x'].size(0)"] or symbols(compiled) == [
        "args[0]['x'].size(0)",
        "args[0]['weight'].size(0)",
    ]


# ---- operations whose rules want numbers


def through(operation: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        weight = next(module.parameters())

        def step(x: Tensor) -> Tensor:
            loss = operation(x * weight[0]).abs().sum() + 0 * sum(p.sum() for p in module.parameters())
            loss.backward()
            return loss.detach()

        return step

    return step_of


SYMBOLIC = {
    "pad": lambda x: F.pad(x, (0, 0, 1, 2), value=2.0),
    "im2col": lambda x: F.unfold(x[None, None], 2),
    "diagonal_copy": torch.diagonal_copy,
    "rfft": lambda x: torch.fft.rfft(x, dim=0),
    "qr": lambda x: torch.linalg.qr(x)[1],
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], torch.ones(FEATURES, FEATURES).expand(1, -1, -1)),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, FEATURES, FEATURES)),
    "lstm": lambda x: LSTM(x[None])[0],
    "tril_indices": lambda x: x[torch.ones(x.shape[0], x.shape[0]).tril().argmax(1)],
}


@pytest.mark.parametrize("operation", SYMBOLIC.values(), ids=SYMBOLIC)
def test_sizes_stay_symbolic_through(operation: Callable[[Tensor], Tensor]) -> None:
    compiled = equal_to_eager(through(operation), batches(7, 9, 12, 8), captures=2)
    assert symbols(compiled) == ["args[0].size(0)"]


NUMBERS = {"hardshrink": F.hardshrink, "softshrink": F.softshrink}
LSTM = nn.LSTM(FEATURES, 3)


@pytest.mark.parametrize("operation", NUMBERS.values(), ids=NUMBERS)
def test_what_has_no_rule_for_symbols_is_captured_for_each_size(
    operation: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "weft.compile"):
        equal_to_eager(through(operation), batches(7, 9, 7, 9, 8), captures=3)
    assert len([r for r in caplog.records if "captured with sizes as numbers" in r.getMessage()]) == 1


def test_a_step_that_raises_for_a_size_raises_and_stays_dynamic() -> None:
    def step_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            if x.shape[0] > 10:
                raise ValueError("too long")
            loss = module(x).sum()
            loss.backward()
            return loss.detach()

        return step

    compiled = equal_to_eager(step_of, batches(4, 5), captures=2)
    with pytest.raises(ValueError, match="too long"):
        compiled(torch.randn(11, FEATURES))
    compiled(torch.randn(7, FEATURES))
    assert symbols(compiled) == ["args[0].size(0)"]
    captures = len(compiled.captures)
    compiled(torch.randn(8, FEATURES))
    assert len(compiled.captures) == captures
