"""Functions compiled by torch.jit.script are captured as they were written, modules by the operations of their graphs.

The eager step runs under ``torch.jit.optimized_execution(False)`` where bits are compared: TorchScript's optimizing
executor takes gradients by formulas of its own from the second call on. Modules of one class share their executors, so
no class here is trained both ways.
"""

from __future__ import annotations

import copy
import io
import math
import threading
from collections.abc import Callable
from typing import Any, List  # noqa: UP035

import pytest
import torch
from torch import nn

import weft
from weft.capture.record.recorder import OpRecorder
from weft.errors import ScriptedModule

aten = torch.ops.aten


@torch.jit.script
def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x.tanh() * by


@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return scaled(x, 2)


def test_the_python_function_is_recorded_and_the_scripted_one_stays() -> None:
    inside: list[bool] = []

    def written(x: torch.Tensor) -> torch.Tensor:
        inside.append(True)
        return x.sin()

    function = torch.jit.script(lambda_free)
    function._torchdynamo_inline = written  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    graph = weft.capture(step, torch.randn(4))
    targets = [node.target for node in graph.graph.nodes]
    assert inside
    assert aten.sin.default in targets
    assert aten.cos.default not in targets
    x = torch.randn(4)
    assert torch.equal(function(x), x.cos())  # outside a capture it is the compiled one again


def lambda_free(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def test_a_step_with_scripted_helpers_gives_what_it_gives_uncompiled() -> None:
    weight = torch.randn(4, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = twice(x * weight).square().sum()
        loss.backward()
        return loss

    x = torch.randn(4)
    for _ in range(4):  # the profiling executor has specialised the function by now
        wanted = step(x)
    assert weight.grad is not None
    gradient = weight.grad / 4
    weight.grad = None
    found = weft.compile(step)(x)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(weight.grad, gradient)


@torch.jit.script
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.dropout(self.norm(self.linear(x)).tanh() * 3)


class CallsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return tripled(self.linear(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        rounds = 0
        while bool(y.norm() > 1.0) and rounds < 5:
            y = y * 0.7
            rounds += 1
        assert bool(torch.isfinite(y).all()), "not finite"
        return y


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        if x.size(0) == 2:
            raise ValueError("two rows")
        total = torch.tensor(1.5)
        total += x.sum()
        return self.linear(x).view(x.size(0) * 2, -1) * total + torch.tensor([1.0, 2.0])


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hidden = torch.zeros(3, 4)
        self.register_buffer("decayed", torch.zeros(3, 4))

    def forward(self, x):  # type: ignore[no-untyped-def]
        y = self.linear(x) + self.hidden + self.decayed
        self.hidden = y.detach()
        self.decayed.mul_(0.5).add_(self.hidden)
        return y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x):  # type: ignore[no-untyped-def]
        self.count += 1
        return x * self.count


class Settings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1
        self.offsets = [1.0, 2.0]

    @torch.jit.export
    def scaled(self, x, by: float = 2.0):  # type: ignore[no-untyped-def]
        return x * by

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x) * self.scale + self.offsets[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 2)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.lstm(x.unsqueeze(1))[0]


class WithAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float().tanh()


class Inside(nn.Module):
    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.compiled = compiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(self.first(x))


class WithMethods(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled.scaled(x) + self.compiled.scaled(x, by=3.0) + self.compiled.linear(self.compiled(x))


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.ones(3, 4), check_trace=False)


def reloaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def train_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


ROWS = [torch.Generator().manual_seed(at) for at in range(6)]
BATCHES = [torch.randn(3, 4, generator=each) for each in ROWS]


def both(
    make: Callable[[], Any],
    batches: list[torch.Tensor] = BATCHES,
    before: Callable[[Any, int], Any] = lambda model, at: None,
    as_step: Callable[[Any], Callable[..., Any]] = train_step,
) -> tuple[Any, Any]:
    """Train one model eagerly without TorchScript's optimizations and its like compiled; compares all that they
    compute and hold, and returns the compiled step and its model."""
    found: list[list[Any]] = []
    models = []
    for compile_step in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        models.append(model := make())
        step = compile_step(as_step(model))
        found.append([])
        with torch.jit.optimized_execution(step is not None and compile_step is weft.compile):
            for at, batch in enumerate(batches):
                before(model, at)
                try:
                    found[-1].append(step(batch.clone()))
                except torch.jit.Error as error:  # type: ignore[attr-defined]
                    found[-1].append(str(error))
    for wanted, given in zip(*found, strict=True):
        assert type(wanted) is type(given)
        assert torch.equal(wanted, given) if isinstance(wanted, torch.Tensor) else wanted == given
    eager, compiled = (dict(model.state_dict()) for model in models)
    assert eager.keys() == compiled.keys()
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)
    return step, models[1]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.jit.script(Block()), id="scripted"),
        pytest.param(lambda: traced(Block()), id="traced"),
        pytest.param(lambda: reloaded(Block()), id="loaded"),
        pytest.param(lambda: Inside(torch.jit.script(Block())), id="inside"),
        pytest.param(lambda: Inside(torch.jit.freeze(torch.jit.script(Block()).eval())), id="frozen"),
        pytest.param(lambda: WithMethods(torch.jit.script(Settings())), id="methods"),
        pytest.param(lambda: torch.jit.script(Branching()), id="branches"),
        pytest.param(lambda: torch.jit.script(CallsFunction()), id="function"),
        pytest.param(lambda: torch.jit.script(Recurrent()), id="lstm"),
        pytest.param(lambda: torch.jit.script(WithAutocast()), id="autocast"),
        pytest.param(lambda: torch.jit.script(nn.MultiheadAttention(4, 2)), id="attention"),
    ],
)
def test_a_scripted_module_trains_as_it_does_without_optimizations(make: Callable[[], Any]) -> None:
    attention = lambda model: train_step(_FirstOfThree(model)) if "Attention" in str(model.original_name) else None
    as_step = lambda model: (hasattr(model, "original_name") and attention(model)) or train_step(model)
    both(make, as_step=as_step)


class _FirstOfThree(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def test_the_executor_with_optimizations_is_close_to_the_captured_step() -> None:
    _, model = both(
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).double(),
        [each.double() for each in BATCHES],
    )
    torch.manual_seed(0)
    eager: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).double()
    optimized = train_step(eager)
    for batch in BATCHES:
        optimized(batch.double())
    for wanted, given in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-14)


def test_a_module_whose_executor_was_optimized_before_the_capture() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softplus())
    scripted: Any = torch.jit.script(copy.deepcopy(plain))
    for _ in range(4):
        scripted(BATCHES[0]).sum().backward()
    scripted.zero_grad()
    assert torch.equal(weft.compile(train_step(scripted))(BATCHES[1]), train_step(plain)(BATCHES[1]))
    assert all(map(torch.equal, scripted.parameters(), plain.parameters()))


def test_a_capture_runs_no_executor_of_the_module_and_changes_no_setting_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()))
    settings: list[bool] = []
    record = OpRecorder._record

    def other_thread() -> None:
        while not settings:
            pass
        settings.append(torch._C._get_graph_executor_optimize())

    def recorded(*args: Any) -> Any:
        if not settings:
            settings.append(torch._C._get_graph_executor_optimize())
        while len(settings) < 2:
            pass
        return record(*args)

    monkeypatch.setattr(OpRecorder, "_record", recorded)
    thread = threading.Thread(target=other_thread)
    thread.start()
    weft.capture(lambda x: module(x), torch.ones(3, 4))
    thread.join()
    assert settings == [False, True]
    assert torch._C._get_graph_executor_optimize()
    module(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="optimized_plan_"):  # it was the first call: the second one optimizes
        module.get_debug_state()
    module(torch.ones(3, 4))
    assert module.get_debug_state()


def test_training_and_other_attributes_are_guards() -> None:
    step, _ = both(lambda: torch.jit.script(Block()), before=lambda model, at: model.train(at % 3 != 1))
    assert len(step.entries) == 2

    def change(model: Any, at: int) -> None:
        model.scale, model.offsets = at // 2, [float(at // 3), 0.0]

    both(lambda: torch.jit.script(Settings()), before=change)

    def sets(model: Any) -> Callable[..., Any]:
        train = train_step(model)

        def step(x: torch.Tensor) -> torch.Tensor:
            model.scale = 7
            return train(x)

        return step

    assert both(lambda: torch.jit.script(Settings()), as_step=sets)[1].scale == 7


def test_tensors_that_a_script_assigns_or_writes_are_state() -> None:
    _, model = both(lambda: torch.jit.script(Hidden()))
    torch.manual_seed(0)
    eager: Any = torch.jit.script(Hidden())
    step = train_step(eager)
    with torch.jit.optimized_execution(False):
        for batch in BATCHES:
            step(batch)
    assert torch.equal(model.hidden, eager.hidden)


@pytest.mark.parametrize("make", [lambda: torch.jit.script(Sized()), lambda: traced(nn.Sequential(nn.Linear(4, 4)))])
def test_other_sizes_are_no_sizes_of_the_first_call(make: Callable[[], Any]) -> None:
    both(make, [torch.randn(rows, 4) for rows in (3, 5, 2, 6, 4, 3, 2)])


def test_sizes_that_a_trace_computes_with_and_a_traced_function() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(x.size(0) * 2 // 1, -1) + torch.tensor(3.0)

    # As a trace, a function has the branch of the example; in Python it would have another one for other sizes.
    function: Any = torch.jit.trace(lambda x: x.relu() if x.shape[0] > 3 else x.sin(), torch.ones(3, 4))

    class Calls(Inside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(super().forward(x))

    both(lambda: Calls(traced(View())), [torch.randn(rows, 4) for rows in (3, 5, 7, 4)])


def test_hooks_of_python_around_a_scripted_module() -> None:
    def make() -> Any:
        model = Inside(torch.jit.script(Block()))
        model.register_forward_hook(lambda module, args, out: out * 2)
        model.compiled.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        model.compiled.norm.weight.register_post_accumulate_grad_hook(tripled_gradient)
        return model

    def tripled_gradient(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(3)

    def doubled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        return out * 2 if isinstance(module, torch.jit.ScriptModule) else None

    hook = nn.modules.module.register_module_forward_hook(doubled)
    try:
        both(make)
    finally:
        hook.remove()


def test_an_error_of_the_script_is_the_error_of_the_step() -> None:
    module = torch.jit.script(Sized())
    with pytest.raises(torch.jit.Error, match="two rows"):  # type: ignore[attr-defined]
        weft.compile(lambda x: module(x))(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="forward"):  # of TorchScript: a wrong argument
        weft.compile(lambda x: module(x, nonsense=3))(torch.ones(3, 4))


class Forks(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return torch.jit.wait(torch.jit.fork(twice, x))


class Prints(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        print("rows", x.size(0))
        return x


class Ignores(nn.Module):
    @torch.jit.ignore
    def python(self, x):  # type: ignore[no-untyped-def]
        return x.sin()

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.python(x)


class ReadsList(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        numbers: list[int] = torch.jit.annotate(List[int], x[0].long().tolist())  # noqa: UP006
        return x * numbers[0]


class MakesText(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x * len(f"{x.sum()}")


class MakesTensor(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x * torch.tensor([x.size(0), 1, 1, 1])


class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = [[1], [2]]

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x * self.table[1][0]


class TakesGradient(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        y = x.detach().requires_grad_()
        return x * torch.autograd.grad([y.sin().sum()], [y])[0]


class ReadsNumber(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x * math.sqrt(x.abs().sum().item())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, "it changes self.count"),
        (Forks, "torch.jit.fork"),
        (Prints, "print"),
        (Ignores, "torch.jit.ignore"),
        (ReadsList, "tolist"),
        (MakesText, "the value of a tensor"),
        (MakesTensor, "a tensor of a list of numbers"),
        (NestedLists, "the attribute table"),
        (ReadsNumber, "the value of a tensor"),
    ],
)
def test_what_a_capture_cannot_follow_is_refused_by_name(kind: Any, why: str) -> None:
    module: Any = torch.jit.script(kind())
    before = getattr(module, "count", None)

    def step(x: torch.Tensor) -> torch.Tensor:
        return module(x).sum()

    with pytest.raises(ScriptedModule, match=rf"{kind.__name__} at .*test_torchscript.py.*{why}"):
        weft.compile(step)(torch.ones(2, 4))
    assert getattr(module, "count", None) == before
    assert torch.equal(
        weft.compile(step, fallback="eager")(torch.ones(2, 4)), torch.jit.script(kind())(torch.ones(2, 4)).sum()
    )


def test_a_scripted_module_that_is_not_called_does_not_matter() -> None:
    module = torch.jit.script(nn.Linear(4, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if isinstance(module, nn.Module) else x

    assert torch.equal(weft.compile(step)(torch.ones(3)), torch.ones(3).sin())
