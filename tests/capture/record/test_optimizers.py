"""Optimizers: torch's own and the user's, their state and their learning rate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_scaled import NormScaled

import weft
from both_ways import assert_equal, batches, both_ways, detached, mlp, snapshot, training

optim = torch.optim
Make = Callable[[Any], optim.Optimizer]


class SignMomentum(optim.Optimizer):
    """Made by hand; its state, a counter among it, comes to exist in the first step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["count"] = torch.tensor(0.0)
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(p.grad.sign(), alpha=0.1)
                p.add_(state["momentum"] / (1 - 0.9 ** state["count"]), alpha=-group["lr"])


class Averaged(optim.Optimizer):
    """Made by hand; keeps its state in attributes, by parameter and in a list, made from the first gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}
        self.signs: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not self.signs:
            self.signs = [p.grad.sign() for p in params]  # type: ignore[union-attr]
        for p, sign in zip(params, self.signs, strict=True):
            momentum = self.momenta.setdefault(p, torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
            p.sub_(momentum * sign.abs(), alpha=0.1)
            sign.copy_(p.grad.sign())  # type: ignore[union-attr]


class WithInitGroup(optim.Optimizer):
    """Made by hand; makes its state from gradients, in a method of the same name as torch's optimizers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def _init_group(self, group: Any, found: list[Any]) -> None:
        for p in group["params"]:
            self.state[p].setdefault("last", p.grad.clone())
            found.append(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            found: list[Any] = []
            self._init_group(group, found)
            for p in found:
                p.sub_(p.grad + self.state[p]["last"], alpha=0.1)
                self.state[p]["last"].copy_(p.grad)


def _with(kind: str, *flags: str, matrices: bool = False, **settings: Any) -> dict[str, Make]:
    """One optimizer of torch's, by default and with each of the flags on and off."""
    make = lambda p, **flag: getattr(optim, kind)([q for q in p if q.dim() == 2 or not matrices], **settings, **flag)
    variants = [(flag, on) for flag in flags for on in (True, False)]
    return {kind: make} | {f"{kind} {f}={on}": lambda p, f=f, on=on: make(p, **{f: on}) for f, on in variants}


# Besides those below. LBFGS takes a closure and SparseAdam sparse gradients: eager too refuses the step of this test.
OTHERS: dict[str, Make] = {
    **_with("Adadelta", "foreach"),
    **_with("Adagrad", "foreach", "fused", lr=0.1),
    **_with("Adam", "foreach", "amsgrad", lr=0.1),
    **_with("Adamax", "foreach"),
    **_with("NAdam", "foreach"),
    **_with("RMSprop", "foreach", "centered"),
    **_with("Rprop", "foreach", lr=0.1),
    **(_with("Muon", "nesterov", matrices=True) if hasattr(optim, "Muon") else {}),
    "state in attributes": lambda p: Averaged(p, lr=0.1),
    "state from gradients": lambda p: WithInitGroup(p, lr=0.1),
}
# Their steps compare numbers that they keep in tensors, or compute from them.
COMPARING: dict[str, Make] = {
    **_with("Adafactor", "foreach"),
    **_with("RAdam", "foreach"),
    **_with("ASGD", "foreach"),
    "norms": lambda p: NormScaled(p, lr=0.1),
}

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adam amsgrad fused": lambda p: optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    "adamw maximize": lambda p: optim.AdamW(p, lr=0.1, maximize=True, weight_decay=0.0),
    "adamw lr tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd momentum fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "own": lambda p: SignMomentum(p, lr=0.1),
}


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_eager(name: str) -> None:
    # Where the first step differs from the others (it makes the state itself), it is a graph of its own.
    both_ways(training(_loss, optimizer=OPTIMIZERS[name]), batches(4), captures=2 if name == "own" else 1)


SGD: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "nesterov": {"nesterov": True},
    "maximize": {"maximize": True},
    "weight decay": {"weight_decay": 0.1},
    "dampening": {"dampening": 0.3},
}


@pytest.mark.parametrize("name", SGD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_of_sgd_with_momentum_has_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, -1e-42, 3.0e38, -0.1]
    gradient = torch.tensor(special, dtype=dtype).repeat(2, 1)
    as_bits = torch.int32 if dtype is torch.float32 else torch.int16

    def run(wrap: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        weights = [torch.zeros(2, len(special), dtype=dtype), torch.ones(len(special), 2, dtype=dtype).T]
        model = torch.nn.ParameterList(weights)
        optimizer = optim.SGD(model.parameters(), lr=0.1, **{"momentum": 0.9, **SGD[name]})

        def step() -> None:
            for weight in model:
                (weight * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step, found = wrap(step), []
        for _ in range(3):
            step()
            kept = [*model, *(optimizer.state[p]["momentum_buffer"] for p in model)]
            found += [(each.detach().view(as_bits).tolist(), each.stride(), each.dtype) for each in kept]
        return step, found

    step, found = run(weft.compile)
    expected = run(lambda step: step)[1]
    if name == "fused" and dtype is torch.bfloat16:  # torch's kernel gives other numbers from one run to the next
        assert found[:4] == expected[:4]
        return
    assert found == expected
    assert len(step.captures) == (2 if name == "dampening" else 1), step.captures


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), 1.5])
def test_momentum_of_complex_parameters_has_the_bits_of_eager(value: float) -> None:
    found: list[Any] = []
    for wrap in (weft.compile, lambda step: step):
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, weight: Any = weight, optimizer: Any = optimizer) -> None:
            weight.grad = torch.complex(x, -x.abs())
            optimizer.step()

        step = wrap(step)
        for _ in range(2):
            step(torch.full((2,), value))
            state = torch.view_as_real(optimizer.state[weight]["momentum_buffer"])
            found.append(state.view(torch.int32).tolist())
    assert found[:2] == found[2:]


def test_a_fused_step_of_parameters_of_which_some_have_momentum_raises_as_in_eager() -> None:
    errors: list[str] = []
    for wrap in (weft.compile, lambda step: step):
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

        def step(
            x: torch.Tensor, both: bool, first: Any = first, second: Any = second, optimizer: Any = optimizer
        ) -> None:
            (second(first(x)) if both else first(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = wrap(step)
        step(torch.ones(2, 3), False)
        with pytest.raises(TypeError) as raised:
            step(torch.ones(2, 3), True)
        errors.append(str(raised.value))
    assert errors[0].split("\n")[0] == errors[1].split("\n")[0]


def test_momentum_is_made_when_a_parameter_first_has_a_gradient() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        groups = [{"params": model["b"].parameters()}, {"params": model["a"].parameters(), "momentum": 0.0}]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, used: bool) -> torch.Tensor:
            x = model["a"](x)
            loss = (model["b"](x) if used else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, [model, optimizer]

    both_ways(make, [(torch.ones(2, 3), used) for used in (False, True, True, False)], captures=3)


@pytest.mark.parametrize("name", OTHERS)
def test_state_that_is_made_in_the_first_step_equals_eager(name: str) -> None:
    late = name.startswith(("Rprop", "Muon", "state"))
    both_ways(training(_loss, optimizer=OTHERS[name]), batches(4), captures=2 if late else 1)


@pytest.mark.parametrize("name", COMPARING)
def test_an_optimizer_that_compares_numbers_of_each_parameter_takes_few_captures(name: str) -> None:
    def layers() -> torch.nn.Module:
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        for each in model:
            torch.nn.init.zeros_(each.bias)
        return model

    def run(wrap: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        step, changed = training(_loss, layers, COMPARING[name])()
        step = wrap(step)
        return step, [[detached(step(x)) for (x,) in batches(7)], *map(snapshot, changed)]

    step, found = run(weft.compile)
    assert_equal(found, run(lambda step: step)[1])
    assert len(step.captures) <= 3, step.captures


@pytest.mark.parametrize("zeroed", ["model", "optimizer"])
@pytest.mark.parametrize("options", [{}, {"max_iter": 4}, {"max_iter": 4, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_trains_with_a_compiled_closure(options: dict[str, Any], zeroed: str) -> None:
    """What the refusal of its step inside of a compiled one says to do. Its state gets longer from call to call."""

    def run(wrap: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, **options)

        def closure(x: torch.Tensor) -> torch.Tensor:
            (model if zeroed == "model" else optimizer).zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss

        closure = wrap(closure)
        losses = [optimizer.step(lambda x=x: closure(x)).detach() for (x,) in batches(6)]
        return closure, [losses, snapshot(model)]

    step, found = run(weft.compile)
    assert_equal(found, run(lambda step: step)[1])
    assert len(step.captures) <= 2, step.captures


@pytest.mark.parametrize("how", ["a tensor", "a dictionary"])
def test_state_that_a_step_reads_without_its_optimizer_is_guarded(how: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    entry = optimizer.state[weight]
    buffer = entry["momentum_buffer"]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        return (buffer if how == "a tensor" else entry["momentum_buffer"]) * 2

    compiled = weft.compile(step)
    assert torch.equal(compiled(), step())
    buffer.add_(1)
    assert torch.equal(compiled(), step())
    entry["momentum_buffer"] = torch.full((3,), 7.0)
    assert torch.equal(compiled(), step())


def test_every_optimizer_of_torch_is_in_one_of_the_tests() -> None:
    kinds = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    tested = {name.split()[0] for name in [*OTHERS, *COMPARING]}
    assert kinds - tested == {"Optimizer", "LBFGS", "SparseAdam", "SGD", "AdamW"}


@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd", "adamw foreach", "rmsprop"])
def test_a_schedule_of_learning_rates_is_one_capture(name: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        step, changed = training(_loss, optimizer=OPTIMIZERS[name])()
        step = wrap(step)
        schedule = optim.lr_scheduler.CosineAnnealingLR(changed[1], T_max=5)
        losses = []
        for (x,) in batches(5):
            losses.append(step(x).detach())
            schedule.step()
        return step, [losses, *map(snapshot, changed)]

    compiled, ours = run(weft.compile)
    _, theirs = run(lambda step: step)
    assert_equal(ours, theirs)
    assert compiled.captures == ["first call"]
    assert len({round(loss.item(), 6) for loss in ours[0]}) == 5


def test_parameter_groups_have_their_own_settings() -> None:
    def grouped(parameters: Any) -> optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.3}, {"params": rest, "weight_decay": 0.5}]
        return optim.AdamW(groups, lr=0.1, fused=True)

    both_ways(training(_loss, optimizer=grouped), batches())


@pytest.mark.parametrize("kind", [optim.AdamW, SignMomentum])
def test_two_optimizers_in_one_step(kind: Callable[..., optim.Optimizer]) -> None:
    def make() -> tuple[Any, list[Any]]:
        first, second = mlp(), mlp()
        one = kind(first.parameters(), lr=0.1)
        sgd = optim.SGD(second.parameters(), lr=0.05, momentum=0.9)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = _loss(first, x)
            loss.backward()
            one.step()
            one.zero_grad()
            other = second(first(x).detach()).abs().mean()
            other.backward()
            sgd.step()
            sgd.zero_grad()
            return loss, other

        return step, [first, second, one, sgd]

    both_ways(make, batches(), captures=1 if kind is optim.AdamW else 2)


def test_an_optimizer_stepped_every_other_call() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = optim.AdamW(model.parameters(), lr=0.1, fused=True)

        def step(x: torch.Tensor, update: bool) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step, [model, optimizer]

    calls = [(x, at % 2 == 1) for at, (x,) in enumerate(batches(6))]
    both_ways(make, calls, captures=2)  # with an update, and without one, which reads no state


def test_clipping_and_the_norm_it_returns() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            _loss(model, x).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return step, [model]

    both_ways(make, batches())


def test_an_average_of_weights_with_foreach() -> None:
    def make() -> tuple[Any, list[Any]]:
        model, average = mlp(), mlp()
        average.requires_grad_(False)
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
            return loss

        return step, [model, average]

    both_ways(make, batches())


def test_training_goes_on_from_a_loaded_optimizer() -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        step, (model, optimizer) = training(_loss, optimizer=OPTIMIZERS["adamw fused"])()
        step = wrap(step)
        step(batches()[0][0])
        saved = detached(model.state_dict()), detached(optimizer.state_dict())
        step(batches()[1][0])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [detached(step(batches()[2][0])), snapshot(model), snapshot(optimizer)]

    assert_equal(run(weft.compile), run(lambda step: step))


def test_a_learning_rate_does_not_import_the_exporter() -> None:
    """Which takes longer than the capture of a small step."""
    module = "torch.export._trace"
    source = f"import sys; from weft.capture.toy import capture_toy; capture_toy(); print('{module}' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False"]
