"""A change of the state that a captured graph depends on causes a new capture, with the reason in the log."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, batches, mlp, snapshot
from weft import knobs, torch_adapter


class Setting:
    """A trainer whose step is compiled in one copy and not in another."""

    def __init__(self, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(mlp(), nn.Dropout(0.2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.scale = 2.0
        self.step: Any = weft.compile(self.plain_step) if compiled else self.plain_step

    def plain_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * self.scale
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


def _hook_on_parameter(s: Setting) -> None:
    s.model[0][0].weight.register_hook(lambda grad: grad * 0.5)


def _hook_after_accumulation(s: Setting) -> None:
    def double(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(2)

    s.model[0][0].bias.register_post_accumulate_grad_hook(double)


def _forward_hook(s: Setting) -> None:
    s.model[0].register_forward_hook(lambda module, args, output: output * 2)


def _forward_pre_hook(s: Setting) -> None:
    s.model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _backward_hook(s: Setting) -> None:
    s.model[0][2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))


def _freeze(s: Setting) -> None:
    s.model[0][0].weight.requires_grad_(False)


def _evaluate(s: Setting) -> None:
    s.model.eval()


def _weight_decay(s: Setting) -> None:
    s.optimizer.param_groups[0]["weight_decay"] = 0.5


def _betas(s: Setting) -> None:
    s.optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def _another_group(s: Setting) -> None:
    s.model[0][2].bias.requires_grad_()
    group = s.optimizer.param_groups[0]
    last = group["params"].pop()
    s.optimizer.add_param_group({"params": [last], "lr": 0.01})


def _attribute(s: Setting) -> None:
    s.scale = 3.0


def _another_layer(s: Setting) -> None:
    s.model[0][1] = nn.ReLU()


def _dropout_rate(s: Setting) -> None:
    s.model[1].p = 0.5


def _another_parameter(s: Setting) -> None:
    s.model[0][0].bias = nn.Parameter(torch.ones(8))


def _loaded_in_place_of(s: Setting) -> None:
    state = {name: value + 1 for name, value in s.model.state_dict().items()}
    s.model.load_state_dict(state, assign=True)


def _wider(s: Setting) -> None:
    s.model[0][0] = nn.Linear(8, 16)
    s.model[0][2] = nn.Linear(16, 8)
    _new_optimizer(s)


def _new_optimizer(s: Setting) -> None:
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=0.05, fused=True)


def _loaded_optimizer(s: Setting) -> None:
    state = s.optimizer.state_dict()
    state["state"] = {k: {n: v * 2 for n, v in entry.items()} for k, entry in state["state"].items()}
    s.optimizer.load_state_dict(state)


def _gradient_left(s: Setting) -> None:
    s.model[0][0].weight.grad = torch.ones(8, 8)


RECAPTURED: list[tuple[Callable[[Setting], None], str]] = [
    (_hook_on_parameter, "hook"),
    (_hook_after_accumulation, "hook"),
    (_forward_hook, "hook"),
    (_forward_pre_hook, "hook"),
    (_backward_hook, "hook"),
    (_freeze, "model.0.0.weight.requires_grad"),
    (_evaluate, "training"),
    (_weight_decay, "weight_decay"),
    (_betas, "betas"),
    (_another_group, "params|param_groups"),
    (_attribute, r"scale is 3\.0, was 2\.0"),
    (_another_layer, r"model\.0\.1"),
    (_dropout_rate, r"model\.1\.p is 0\.5, was 0\.2"),
    (_another_parameter, r"model\.0\.0\.bias"),
    (_loaded_in_place_of, r"model\.0\.0\.weight"),
    (_wider, r"model\.0\.0|optimizer"),
    (_new_optimizer, "optimizer"),
    (_loaded_optimizer, "optimizer"),
    (_gradient_left, r"model\.0\.0\.weight\.grad"),
]


def _learning_rate(s: Setting) -> None:
    s.optimizer.param_groups[0]["lr"] = 0.03


def _values(s: Setting) -> None:
    with torch.no_grad():
        for p in s.model.parameters():
            p.mul_(0.5)


def _loaded_into(s: Setting) -> None:
    s.model.load_state_dict({name: value + 1 for name, value in s.model.state_dict().items()})


def _memory(s: Setting) -> None:
    s.model[0][0].weight.data = s.model[0][0].weight.data.clone() * 2


def _seed(s: Setting) -> None:
    torch.manual_seed(99)


KEPT = [_learning_rate, _values, _loaded_into, _memory, _seed]


def _runs(change: Callable[[Setting], None], around: Callable[[], Any] = contextlib.nullcontext) -> list[Setting]:
    """The step compiled and not: a call, the change, two calls, compared after each."""
    pair = [Setting(True), Setting(False)]
    left: list[list[Any]] = []
    for s in pair:
        torch.manual_seed(1)
        seen: list[Any] = [s.step(batches()[0][0]).detach()]
        change(s)
        for (x,) in batches()[1:]:
            with around():
                seen.append(s.step(x).detach())
        left.append([*seen, snapshot(s.model), snapshot(s.optimizer), torch.get_rng_state()])
    assert_equal(left[0], left[1])
    return pair


@pytest.mark.parametrize(("change", "reason"), RECAPTURED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_change_that_matters_recaptures_with_the_reason(
    change: Callable[[Setting], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="weft"):
        ours, _ = _runs(change)
    # A parameter that the optimizer does not know keeps its gradient, which the third call finds.
    grad_stays = change in (_another_parameter, _loaded_in_place_of)
    assert len(ours.step.captures) == (3 if grad_stays else 2)
    told = [message for message in caplog.messages if "again (capture 2)" in message]
    assert len(told) == 1
    assert re.search(reason, told[0]), told[0]


@pytest.mark.parametrize("change", KEPT)
def test_a_change_that_does_not_matter_does_not_recapture(change: Callable[[Setting], None]) -> None:
    ours, _ = _runs(change)
    assert ours.step.captures == ["first call"]


def test_an_earlier_capture_is_reused() -> None:
    s = Setting(True)
    for training in (True, False, True, False):
        s.model.train(training)
        s.step(batches()[0][0])
    assert len(s.step.captures) == 2
    assert len(s.step.entries) == 2


# ---- the state of torch around the call


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (torch.no_grad, "grad mode is False, was True"),
        (torch.inference_mode, "grad mode|inference mode"),
        (_autocast, "autocast"),
        (_default_dtype, "default dtype is torch.float64"),
        (_deterministic, "deterministic algorithms is True"),
        (_matmul_precision, "float32 matmul precision is medium"),
    ],
)
def test_global_settings_of_torch_are_guarded(around: Callable[[], Any], reason: str) -> None:
    ours, _ = _runs(lambda s: None, around)
    captures = ours.step.captures
    assert len(captures) == 2
    assert re.search(reason, captures[1]), captures[1]


# ---- arguments


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (lambda: (X.double(),), "float64"),
        (lambda: (X.t().contiguous().t(),), "stride"),
        (lambda: (X[:1],), r"\[1, 8\]|size"),
        (lambda: (X[:0],), r"\[0, 8\]|size"),
        (lambda: (X[0],), r"\[8\]"),
        (lambda: (X.clone().requires_grad_(),), "requires_grad"),
        (lambda: (nn.Parameter(X.clone()),), "requires_grad|type"),
        (lambda: (X, 3.0), "structure"),
        (lambda: (X, None), "structure"),
        (lambda: ([X],), "structure"),
        (lambda: (X.tolist(),), "structure"),
    ],
)
def test_arguments_are_guarded(second: Callable[[], tuple[Any, ...]], reason: str) -> None:
    def step(x: Any, scale: float | None = 2.0) -> torch.Tensor:
        if isinstance(x, list):
            x = torch.tensor(x) if isinstance(x[0], list) else x[0]
        return (x * (scale or 1.0)).cos().sum(0)

    compiled = weft.compile(step)
    for args in ((X,), second(), (X,)):
        assert torch.equal(compiled(*args), step(*args))
    assert len(compiled.captures) == 2
    assert re.search(reason, compiled.captures[1]), compiled.captures[1]


@pytest.mark.parametrize("values", [(1, 2), (1.0, 2.0), ("a", "b"), (None, 1), (True, False), (1, True), (1, 1.0)])
def test_python_numbers_and_strings_are_guarded_by_value(values: tuple[Any, Any]) -> None:
    def step(x: torch.Tensor, option: Any) -> torch.Tensor:
        return x * {"a": 2, "b": 3, None: 4}.get(option, 5) + (option if isinstance(option, float) else 0)

    compiled = weft.compile(step)
    for value in (*values, *values):
        assert torch.equal(compiled(X, value), step(X, value))
    assert len(compiled.captures) == 2
    assert f"args[1] is {values[1]!r}, was {values[0]!r}" in compiled.captures[1]


def test_values_of_tensors_are_not_guarded() -> None:
    compiled = weft.compile(lambda x: x * 2)
    for at in range(4):
        assert torch.equal(compiled(X + at), (X + at) * 2)
    assert compiled.captures == ["first call"]


def test_aliasing_of_arguments_is_guarded() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    compiled = weft.compile(step)
    for _ in range(2):
        a, b = torch.zeros(3), torch.zeros(3)
        assert compiled(a, b).tolist() == [0, 0, 0]
        assert compiled(a, a).tolist() == [4, 4, 4]
        whole = torch.zeros(6)
        assert compiled(whole[:3], whole).tolist() == [2, 2, 2, 0, 0, 0]
    assert len(compiled.captures) == 3


# ---- too many captures


def test_many_captures_are_a_warning_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    compiled = weft.compile(lambda x, name: x * len(name))
    with knobs.override(recapture_limit=3), caplog.at_level(logging.WARNING, logger="weft"):
        for count in range(6):
            compiled(X, "a" * count)
    (message,) = [m for m in caplog.messages if "captured" in m]
    assert "args[1] is 'aaa', was" in message
    assert "mark_dynamic" in message


class Counting:
    """A trainer whose own counter has the name of a method that its step calls on other objects."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 0
        self.scale = 1.0

    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * self.scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_a_counter_named_like_a_method_is_not_guarded() -> None:
    compiled, eager = Counting(), Counting()
    train = weft.compile(compiled.train)
    for at in range(4):
        compiled.step = eager.step = at
        compiled.scale = eager.scale = 2.0 if at == 3 else 1.0
        x = torch.randn(3, 4)
        assert torch.equal(train(x), eager.train(x))
    assert len(train.captures) == 2
    assert "scale" in train.captures[1]


def test_unchanged_state_is_accepted_without_the_full_check() -> None:
    """No entry needs the closer look that an assignment would cost: a large model has thousands of them."""
    s = Setting(compiled=True)
    for (x,) in batches():
        s.step(x)
    guards = s.step.entries[0].guards
    call = torch_adapter.flatten((batches()[0], {}))
    assert guards.unchanged(*call)
    s.model[0][0].register_forward_hook(lambda *_: None)
    assert "holds 1 entries, had 0" in str(guards.failure(*call))


def test_a_loop_variable_with_the_name_of_a_method_is_no_state_of_the_step() -> None:
    """``optimizer.step()`` in the step, ``for step in range(3)`` around it, at the top level of a script."""
    program = inspect.cleandoc("""
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factor = 1.0

        @weft.compile
        def train_step(x):
            loss = model(x).sum() * factor
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for step in range(3):
            train_step(torch.ones(1, 2))
        before = list(train_step.captures)
        factor = 0.0
        assert train_step(torch.ones(1, 2)) == 0.0  # what is read is guarded all the same
        """)
    variables = {"torch": torch, "weft": weft}
    exec(compile(program, "<script>", "exec"), variables)
    assert variables["before"] == ["first call"]


class Held:
    def __init__(self) -> None:
        self.tensor, self.shift = torch.ones(2), torch.ones(2)


class Pair(NamedTuple):
    tensor: torch.Tensor
    scale: float


@pytest.mark.parametrize("name", ["tensor", "shift"])
def test_a_plain_tensor_that_is_made_to_require_grad_between_calls(name: str) -> None:
    held, weight = Held(), nn.Parameter(torch.ones(2))

    def step(x: torch.Tensor) -> Any:
        result = x * held.tensor * weight
        result.sum().backward()
        return held.tensor.requires_grad, held.shift.requires_grad, (x * held.tensor).requires_grad, weight.grad

    compiled = weft.compile(step)
    for at in range(4):
        found = []
        for run in (compiled, step):
            held.tensor.grad = held.shift.grad = weight.grad = None
            found.append([run(torch.ones(2)), held.tensor.grad])
        assert_equal(*found)
        getattr(held, name).requires_grad_(at % 2 == 0)
    assert len(compiled.captures) == 2


HOLDERS: dict[str, Callable[[torch.Tensor], tuple[Any, Callable[[Any], torch.Tensor]]]] = {
    "a tuple": lambda tensor: ((tensor,), lambda held: held[0]),
    "a tuple in a list": lambda tensor: ([(1, tensor)], lambda held: held[0][1]),
    "a named tuple": lambda tensor: (Pair(tensor, 1.0), lambda held: held.tensor),
    "a set": lambda tensor: ({tensor}, lambda held: next(iter(held))),
    "a default": lambda tensor: ((lambda found=tensor: found), lambda held: held()),
    "a partial": lambda tensor: (functools.partial(torch.Tensor.mul, tensor), lambda held: held(1.0)),
    "a weak reference": lambda tensor: (weakref.ref(tensor), lambda held: held()),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_so_it_is_wherever_the_tensor_is_held(holder: Any) -> None:
    found = []
    for compile_step in (weft.compile, lambda step: step):
        tensor, weight = torch.ones(2), nn.Parameter(torch.full((2,), 3.0))
        held, read = holder(tensor)

        def step(x: torch.Tensor, held: Any = held, read: Any = read, weight: nn.Parameter = weight) -> torch.Tensor:
            loss = (read(held) * x * weight).sum()
            loss.backward()
            weight.grad = None
            return loss.detach()

        run, rows = compile_step(step), []
        for at in range(5):
            if at == 2:
                tensor.requires_grad_()
            rows.append((run(torch.full((2,), at + 1.0)), None if tensor.grad is None else tensor.grad.clone()))
        found.append(rows)
    assert_equal(*found)


def test_a_tensor_that_is_held_weakly_stays_so() -> None:
    tensor = torch.ones(2)
    reference = weakref.ref(tensor)
    compiled = weft.compile(lambda x: x * 2 if reference() is None else x)
    assert_equal(compiled(torch.ones(2)), torch.ones(2))
    del tensor
    assert reference() is None
    assert_equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_so_it_is_where_the_step_returns_what_it_computes_with_it() -> None:
    table = torch.ones(2)
    compiled = weft.compile(lambda x: x * table)
    for required in (False, True, False):
        table.requires_grad_(required)
        assert compiled(torch.ones(2)).requires_grad is required
