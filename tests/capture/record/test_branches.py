"""Steps that branch on values read from tensors: equal to eager in every branch, with one read for each branch."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checking_functions import CHECKING
from torch import distributions, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from both_ways import Make, assert_equal, batches, both_ways, detached, mlp, sgd, snapshot, training
from weft import knobs
from weft.errors import CannotCapture, TooManyPaths

BATCHES = [x for (x,) in batches(8)]
SPOILED = [x.clone() for x in BATCHES]
for at in (2, 3, 5):
    SPOILED[at][0, 0] = float("nan")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    """Distributions check their parameters, as they do by default; torch.compile switches that off in the process."""
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    yield
    distributions.Distribution.set_default_validate_args(before)


# ---- functions of one tensor: what is asked, and how


def of_tensor(x: torch.Tensor) -> Any:
    return x * 2 if x.sum() > 1 else x


def of_number(x: torch.Tensor) -> Any:
    number = x.sum().item()
    return x * 2 if number > 2 else x - number


def of_two_numbers(x: torch.Tensor) -> Any:
    low, high = x.min().item(), x.max().item()
    return x if high + low > 0.3 else x * 2


def of_truth(x: torch.Tensor) -> Any:
    return x + 1 if (x > 1.6).any() else x.relu().sum()


def of_number_as_truth(x: torch.Tensor) -> Any:
    return x + 1 if x.sum().round().remainder(3).item() else x * 3


def of_count(x: torch.Tensor) -> Any:
    count = (x > 0).sum().remainder(3).item()
    return sum((x * at for at in range(count)), x)


def of_int(x: torch.Tensor) -> Any:
    return [x] * int((x > 0).sum().remainder(3) + 0.5)


def of_truncated(x: torch.Tensor) -> Any:
    return x * int(x.sum().remainder(3).item() - 1)


def of_sizes(x: torch.Tensor) -> Any:
    rows = (x > 0).sum().remainder(2) + 2
    return F.interpolate(x[None, None], size=(rows, 3)), torch.zeros(2, rows)


def of_size(x: torch.Tensor) -> Any:
    found = x[x > 0]
    return found * 2 if found.shape[0] > 16 else found


def of_unique(x: torch.Tensor) -> Any:
    found = (x > 0.9).sum(1).unique()
    return x if found.shape[0] == 1 else found * 2


def of_listed(x: torch.Tensor) -> Any:
    return [x * 2 if positive else x for positive in (x.sum(1) > 0).tolist()]


def of_equal(x: torch.Tensor) -> Any:
    return x if torch.equal(x.relu()[0], x[0].abs()) else x * 2


def of_index(x: torch.Tensor) -> Any:
    return x[x.sum(1).argmax().item()] * 2


def of_one_hot(x: torch.Tensor) -> Any:
    return F.one_hot((x > 0).sum(1).remainder(3))


def of_loop(x: torch.Tensor) -> Any:
    while x.norm() > 4:
        x = x / 1.2
    return x


def of_nested(x: torch.Tensor) -> Any:
    if x.sum() > 0:
        x = x * 2
        if x[0].sum() > 0:
            return x.t()
    elif x[1].sum() > 0:
        x = -x
    return x + (1 if x.mean() > 0 else 2)


def of_nan(x: torch.Tensor) -> Any:
    return x * 2 if math.isnan(x[0, 0].log().item()) else x


def of_numpy(x: torch.Tensor) -> Any:
    number = np.maximum(x.sum().item(), 0.5) * 2
    return (x if np.isfinite(x[0, 0].log().item()) else x * number), number, np.float64(2) * x[0, 0].item()


def of_answer_used_twice(x: torch.Tensor) -> Any:
    positive = x.sum().item() > 0
    return (x if positive else -x) * (2 if positive else 3)


def in_try(x: torch.Tensor) -> Any:
    try:
        x = x * 2 if x.sum() > 0 else x * 3
    except Exception:  # noqa: BLE001 - what ends a capture passes by
        x = x * 4
    finally:
        x = x + 1
    return x


def in_bare_try(x: torch.Tensor) -> Any:
    try:
        x = x * 2 if x.sum() > 0 else x * 3
    except:  # noqa: E722 - what ends a capture passes through here
        x = x * 4
    return x + 7 if x.mean() > 0.1 else x


FUNCTIONS = [
    *(of_tensor, of_number, of_two_numbers, of_truth, of_number_as_truth, of_count, of_int, of_size, of_unique),
    *(of_listed, of_equal, of_index, of_one_hot, of_loop, of_nested, of_answer_used_twice, in_try),
    *(in_bare_try, of_nan, of_numpy, of_truncated, of_sizes),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_branches_equals_eager(function: Callable[..., Any]) -> None:
    ours = weft.compile(function)
    taken = 0
    for x in [*BATCHES, *BATCHES[:3]]:
        assert_equal(detached(ours(x.clone())), detached(function(x.clone())))
        taken = len(ours.captures)
    assert len(ours.entries) == 1
    assert (taken > 1) == (
        function not in (of_truncated, of_equal, of_index, of_sizes)
    )  # these keep a number that the data decides
    for x in BATCHES:  # all branches are known by now
        assert_equal(detached(ours(x)), detached(function(x)))
    assert len(ours.captures) == taken


def _in_inference_mode(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return 1 if (x > 0).sum() else 2


TWO_OUTCOMES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a count as truth": lambda x: x * 2 if (x[0] > 0).sum().remainder(7) else x,
    "a float as truth": lambda x: x * 2 if x[0].relu().sum() else x,
    "not a float": lambda x: x * 2 if not x[0, :1].relu() else x,
    "nan as truth": lambda x: x * 2 if x[0, 0].log() else x,
    "is_nonzero": lambda x: (torch.is_nonzero((x > 0).sum()), x[0, 0].relu().is_nonzero()),
    "in inference mode": _in_inference_mode,
    "allclose": lambda x: x if torch.allclose(x[:1], x[:1].abs()) else x * 2,
    "allclose with options": lambda x: x[0].allclose(x[1], atol=1.5, equal_nan=True),
    "equal": lambda x: torch.equal(x[0, :2], x[0, :2].abs()),
    "equal of other sizes": lambda x: x.equal(x[0]),
    "covariance": lambda x: (torch.cov(x), torch.corrcoef(x), torch.cov(x, correction=0)),
    "gradient of a covariance": lambda x: torch.autograd.grad(torch.cov(y := x.clone().requires_grad_()).sum(), y),
}


@pytest.mark.parametrize("name", TWO_OUTCOMES)
def test_a_branch_with_two_outcomes_is_captured_once_for_each(name: str) -> None:
    function = TWO_OUTCOMES[name]
    ours = weft.compile(function)
    for x in [*BATCHES, torch.zeros_like(BATCHES[0]), torch.ones_like(BATCHES[0])]:
        assert_equal(detached(ours(x.clone())), detached(function(x.clone())))
    assert len(ours.captures) <= 3, ours.captures  # and once up to the question


LEAVES_OUT: dict[str, Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]] = {}


def _leaves_out(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    LEAVES_OUT[step.__name__] = step
    return step


@_leaves_out
def rows_of_each(x: torch.Tensor, chosen: torch.Tensor, experts: Any) -> torch.Tensor:
    out = torch.zeros_like(x)
    for at, expert in enumerate(experts):
        rows = (chosen == at).nonzero().squeeze(-1)
        if rows.numel() == 0:
            continue
        out = out.index_add(0, rows, expert(x[rows]))
    return out


@_leaves_out
def none_of_each(x: torch.Tensor, chosen: torch.Tensor, experts: Any) -> torch.Tensor:
    out = torch.zeros_like(x)
    for at, expert in enumerate(experts):
        mask = chosen == at
        if not mask.any():
            continue
        out[mask] = expert(x[mask])
    return out


@pytest.mark.parametrize("name", ["all", "each", "more than none"])
def test_what_is_done_about_numbers_that_are_not_finite_is_not_captured_before_it_happens(name: str) -> None:
    """None of what the branches do can be captured."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        if name == "all" and torch.isnan(loss).any():
            torch.save(net.state_dict(), "not there/net.pt")
        for parameter in net.parameters() if name == "each" else ():
            if not parameter.isfinite().all():
                torch.save(parameter, "not there/parameter.pt")
            if parameter.isnan().any():
                breakpoint()
        if name == "more than none" and len(loss.isinf().nonzero()) > 0:
            open("not there/losses.txt")  # noqa: SIM115
        return loss

    both_ways(training(forward, lambda: nn.Linear(4, 4)), batches(shape=(2, 4)), captures=None)


@pytest.mark.parametrize("name", LEAVES_OUT)
def test_a_loop_that_leaves_nothing_out_is_captured_at_once(name: str) -> None:
    def make() -> tuple[Callable[..., Any], list[Any]]:
        router, experts = nn.Linear(8, 3), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        parameters = [*router.parameters(), *experts.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            gates = router(x).softmax(-1)
            chosen = (chosen + gates.round().long().sum(-1) * 0).clamp(0, 2)
            out = LEAVES_OUT[name](x, chosen, experts) * gates.gather(1, chosen[:, None])
            optimizer.zero_grad(set_to_none=False)
            (out - x).square().mean().backward()
            optimizer.step()
            return out.detach()

        for p in parameters:
            p.grad = torch.zeros_like(p)
        return step, [router, experts]

    full, none = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0, 0, 2, 2, 2, 0])
    calls = [(x, full.roll(at)) for at, (x,) in enumerate(batches(4, (6, 8)))]
    both_ways(make, calls, captures=1)
    both_ways(make, [*calls, (calls[0][0], none), *calls], captures=2)


class _Reads(TorchDispatchMode):
    """Counts the values that are read from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "reads"), [(of_tensor, 1), (of_two_numbers, 2), (of_answer_used_twice, 1), (of_number, 1)]
)
def test_a_branch_reads_what_eager_reads(function: Callable[..., Any], reads: int) -> None:
    ours = weft.compile(function)
    for x in BATCHES:
        ours(x)
    with _Reads() as counted:
        ours(BATCHES[0])
    assert counted.count == reads


def test_a_step_without_branches_has_one_program_and_reads_nothing() -> None:
    def step(x: torch.Tensor) -> Any:
        return x.sum().item() + 1, torch.where(x > 0, x, -x)

    ours = weft.compile(step)
    ours(BATCHES[0])
    assert type(ours.entries[0]).__name__ == "ProgramForm"
    assert "branch(" not in str(ours.entries[0].captured.graph)


# ---- training steps


def nan_guard(optimizer: Callable[..., torch.optim.Optimizer] = sgd) -> Make:
    def make() -> tuple[Any, list[Any]]:
        net = mlp()
        opt = optimizer(net.parameters())

        def step(x: torch.Tensor) -> Any:
            loss = net(x).square().mean()
            if not torch.isfinite(loss):
                opt.zero_grad()
                return loss * 2
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return step, [net, opt]

    return make


def averaged() -> tuple[Any, list[Any]]:
    net = nn.Linear(8, 8)
    opt = sgd(net.parameters())
    average = torch.optim.swa_utils.AveragedModel(net)

    def step(x: torch.Tensor) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(net)
        return loss

    return step, [net, opt, average]


def between_optimizers() -> tuple[Any, list[Any]]:
    """A generator is trained when its discriminator is good enough."""
    one, other = mlp(), mlp()
    first, second = torch.optim.Adam(one.parameters()), torch.optim.AdamW(other.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        loss = other(one(x).detach()).square().mean()
        loss.backward()
        second.step()
        second.zero_grad()
        if loss > 0.05:
            gain = -other(one(x)).mean()
            gain.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            return loss, gain
        return loss

    return step, [one, other, first, second]


def in_hooks() -> tuple[Any, list[Any]]:
    net = mlp()
    opt = sgd(net.parameters())
    net[0].weight.register_hook(lambda grad: grad / 2 if grad.norm() > 0.06 else grad)
    net[2].register_full_backward_hook(lambda module, into, out: None if out[0].sum() > 0 else (into[0] * 2,))

    def step(x: torch.Tensor) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step, [net, opt]


def before_backward() -> tuple[Any, list[Any]]:
    """What autograd saved travels over the branch; the other path backpropagates from elsewhere."""
    net = mlp()
    opt = sgd(net.parameters())

    def step(x: torch.Tensor) -> Any:
        hidden = net(x)
        loss = hidden.square().mean()
        if loss > 0.25:
            (loss * 2).backward()
        else:
            hidden.sum().backward()
        opt.step()
        opt.zero_grad()
        return hidden

    return step, [net, opt]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Any = None
        self.positive = False
        self.kept: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.calls += 1
        if y.sum() > 0:
            self.last, self.positive = y.detach(), True
            self.kept["y"] = y.detach() * 2
        else:
            self.positive = False
            self.kept.pop("y", None)
        return y


def effects() -> tuple[Any, list[Any]]:
    model = Counting()
    state: dict[str, Any] = {}

    def step(x: torch.Tensor) -> Any:
        y = model(x).sum() if model.calls < 5 else model(x).mean()
        state.update(last=model.last, positive=model.positive, **model.kept)
        return y

    return step, [model, state]


def old_values_and_views() -> tuple[Any, list[Any]]:
    """Values from before a write, views of what is written, and writes that are taken back, over several branches."""
    buffer, other, flat = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(32)

    def step(x: torch.Tensor) -> Any:
        before = torch.empty(4, 8)
        before.copy_(buffer)
        row = buffer[1]
        buffer.add_(x)
        other.copy_(before)
        if buffer.sum() > 0:
            row.mul_(2)
            buffer[0] = before[0]
        if row.sum() > 0:
            flat.copy_(buffer.flatten())
            buffer.zero_()
        if x.sum() > 2:
            buffer.copy_(before)
        return row, before, buffer.t()[0]

    return step, [[buffer, other, flat]]


def draws() -> tuple[Any, list[Any]]:
    net, drop = mlp(), nn.Dropout(0.5)
    random.seed(3)

    def step(x: torch.Tensor) -> Any:
        y = drop(net(x))
        if y.sum() > 0:
            y = y + torch.rand(8)
            if random.random() < 0.5:
                y = drop(y)
        else:
            y = y - torch.randn(8)
        return y + torch.rand(1) + random.random()

    return step, [net]


def literals() -> tuple[Any, list[Any]]:
    total = torch.zeros(())

    def step(x: torch.Tensor) -> Any:
        limit, best = torch.tensor(0.5), torch.tensor([1.0, 2.0])
        if x.sum() > limit:
            best += x.sum()
            total.add_(limit)
            return best
        limit *= 2
        return limit, total + limit

    return step, [[total]]


def checked_distributions() -> tuple[Any, list[Any]]:
    net = mlp()
    opt = sgd(net.parameters())

    def step(x: torch.Tensor) -> Any:
        out = net(x)
        choice = distributions.Categorical(logits=out)
        action = choice.sample()
        loss = -choice.log_prob(action).mean() - distributions.Normal(out, x.exp()).log_prob(x).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return action

    return step, [net, opt]


def clipped() -> tuple[Any, list[Any]]:
    net = mlp()
    opt = sgd(net.parameters())

    def step(x: torch.Tensor) -> Any:
        net(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, error_if_nonfinite=True)
        opt.step()
        opt.zero_grad()
        return norm

    return step, [net, opt]


STEPS: list[tuple[Make, list[torch.Tensor], int]] = [
    (nan_guard(), SPOILED, 3),
    (nan_guard(lambda p: torch.optim.AdamW(p, lr=0.1)), SPOILED, 3),
    (averaged, BATCHES[:6], 0),
    (between_optimizers, BATCHES, 0),
    (in_hooks, BATCHES, 0),
    (before_backward, BATCHES, 3),
    (effects, BATCHES, 0),
    (old_values_and_views, [*BATCHES, *BATCHES], 0),
    (draws, BATCHES, 0),
    (literals, BATCHES, 3),
    (checked_distributions, BATCHES[:6], 0),
    (clipped, BATCHES[:6], 1),
]
NAMES = ["nan_guard_sgd", "nan_guard_adamw", *(make.__name__ for make, _, _ in STEPS[2:])]


@pytest.mark.parametrize(("make", "inputs", "captures"), STEPS, ids=NAMES)
def test_a_step_that_branches_equals_eager(make: Make, inputs: list[torch.Tensor], captures: int) -> None:
    ours = both_ways(make, [(x,) for x in inputs], captures=captures or None)
    assert type(ours.entries[0]).__name__ == "BranchingForm"


# ---- questions of which one outcome is an error


@pytest.mark.parametrize("step", CHECKING, ids=lambda step: step.__name__)
def test_a_check_is_captured_once_and_fails_as_in_eager(step: Callable[..., Any]) -> None:
    def outcome(called: Callable[..., Any], x: torch.Tensor) -> Any:
        try:
            return detached(called(x))
        except (AssertionError, ValueError, RuntimeError) as error:
            return type(error), str(error)

    good, nan, large = BATCHES[0], SPOILED[2], BATCHES[0] + 200
    ours = weft.compile(step)
    for x in (good, good * 2):
        assert_equal(outcome(ours, x), outcome(step, x))
    assert len(ours.captures) == 1
    for x in (nan, large, good, nan, large):
        assert_equal(outcome(ours, x), outcome(step, x))
    ours = weft.compile(step)
    for x in (nan, good):  # the check fails in the first call
        assert_equal(outcome(ours, x), outcome(step, x))


# ---- paths that end with an exception, and captures that fail


def raising(written: bool, exits: bool) -> Make:
    def make() -> tuple[Any, list[Any]]:
        net = mlp()
        opt = sgd(net.parameters())
        seen: dict[str, Any] = {}
        kept: list[Any] = []

        def step(x: torch.Tensor) -> Any:
            loss = net(x).square().mean()
            loss.backward()
            if written:
                opt.step()
            noise = torch.rand(2)
            seen["noise"] = noise
            if not math.isfinite(loss.item()):
                if exits:
                    print("the loss is", loss.item())
                    sys.exit(3)
                if written:
                    raise ValueError("the loss is not finite")
                raise ValueError(f"the loss is {loss.item()} after {x[0, 1].item():.3f}")
            opt.step()
            opt.zero_grad()
            return loss, noise

        def caught(x: torch.Tensor) -> Any:
            try:
                return step_of[0](x)
            except (ValueError, SystemExit) as error:
                kept.append(detached([p.grad for p in net.parameters()]))
                opt.zero_grad()
                return str(error)

        step_of = [step]
        caught.inner = step_of  # type: ignore[attr-defined]
        return caught, [net, opt, seen, kept]

    return make


@pytest.mark.parametrize(("written", "exits"), [(False, False), (True, False), (False, True)])
def test_a_branch_that_raises_raises_as_eager_and_leaves_what_eager_leaves(
    written: bool, exits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(7)
        caught, changed = raising(written, exits)()
        if compiled:
            caught.inner[0] = weft.compile(caught.inner[0])
        results = [detached(caught(x)) for x in SPOILED]
        assert len(changed[3]) == (6 if written else 3)
        found.append([results, *map(snapshot, changed), torch.get_rng_state(), capsys.readouterr().out])
    assert_equal(found[1], found[0])


def test_a_branch_that_cannot_be_captured_falls_back_from_where_the_call_began() -> None:
    def make() -> tuple[Any, list[Any]]:
        net, drop = mlp(), nn.Dropout(0.5)
        opt = torch.optim.AdamW(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            loss = drop(net(x)).square().mean()
            loss.backward()
            opt.step()
            if x.sum() > 5:
                opt.param_groups[0]["lr"] = math.fsum([float(loss)])
            opt.zero_grad()
            return loss

        return step, [net, opt]

    ours = both_ways(make, [(x,) for x in BATCHES], captures=None, fallback="eager")
    assert ours._uncompiled
    step, _ = make()
    with pytest.raises(CannotCapture, match=r"math\.fsum"):
        weft.compile(step)(BATCHES[0].abs())


@pytest.mark.parametrize("make", [nan_guard(), effects, draws])
def test_the_first_call_is_verified(make: Make) -> None:
    torch.manual_seed(0)
    step, _ = make()
    ours = weft.compile(step, verify=True)
    for x in BATCHES[:3]:
        ours(x)


def test_branches_on_symbolic_sizes() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x * x.shape[0]
        return y.t() @ y if y.sum() > 0 else y.sum(0, keepdim=True)

    ours = weft.compile(step, dynamic=True)
    generator = torch.Generator().manual_seed(2)
    for rows in (3, 5, 4, 7, 6, 9, 3):
        x = torch.randn(rows, 6, generator=generator)
        assert_equal(ours(x), step(x))
    assert len(ours.entries) == 1


def test_a_guard_that_fails_captures_the_step_anew() -> None:
    settings = {"scale": 2}

    def step(x: torch.Tensor) -> Any:
        return x * settings["scale"] if x.sum() > 0 else x

    ours = weft.compile(step)
    for scale in (2, 3, 2):
        settings["scale"] = scale
        for x in BATCHES[:5]:
            assert_equal(ours(x), step(x))
    assert len(ours.entries) == 2


def test_only_what_may_be_used_later_is_kept_over_a_branch() -> None:
    net = mlp()

    def step(x: torch.Tensor) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        return loss if loss > 1 else loss * 2

    graph = weft.capture(step, BATCHES[0]).graph
    cut = next(node for node in graph.nodes if getattr(node.target, "__name__", "") == "branch")
    sizes = [tuple(node.meta["val"].shape) for node in cut.kwargs["held"] if hasattr(node.meta["val"], "shape")]
    # The loss, what compares it, and the gradients: no activation, and nothing of the backward.
    assert sorted(sizes) == sorted([(), (), *(tuple(p.shape) for p in net.parameters())])


class Asking(nn.Module):
    """A layer that asks, in its own code, whether its input is small: at each call, or until it no longer is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.how == "loops":
            while x.abs().mean() < 1:
                x = x * 2
            return x
        if x.abs().mean() < 1:
            return x * 4
        if self.how == "reads":
            math.fsum([float(x.mean())])  # which no capture can hold
        return x


LIKE_LAYERS: dict[str, tuple[list[float], int]] = {
    # By factors of the weights of the layers, how often the first call captures.
    "one answer": ([0.1] * 8, 2),
    "another in the middle": ([0.1] * 4 + [9.0] + [0.1] * 3, 4),
    "each another": ([0.1, 9.0] * 4, 9),
    "loops": ([0.1] * 3, 0),
    "reads": ([9.0, 0.1, 0.1], 0),
}


@pytest.mark.parametrize("name", LIKE_LAYERS)
def test_layers_that_ask_in_turn_are_captured_by_the_answer_of_the_one_before(name: str) -> None:
    factors, captures = LIKE_LAYERS[name]
    torch.manual_seed(3)
    net = nn.Sequential(*(Asking(name) for _ in factors))
    with torch.no_grad():
        for layer, factor in zip(net, factors, strict=True):
            layer.linear.weight.mul_(factor)
    for x in BATCHES[:4]:
        wanted = net(x)
        if name == "reads":
            with pytest.raises(CannotCapture, match="fsum"):
                weft.compile(net)(x)
            continue
        ours = weft.compile(net)
        assert_equal(detached(ours(x)), detached(wanted))
        assert_equal(detached(ours(x)), detached(wanted))
        if captures:
            assert len(ours.captures) <= captures


def test_a_path_that_cannot_be_captured_is_no_likely_one() -> None:
    """The first layer reads a number as Python needs it, once; what the others are expected to do is no error."""
    net = nn.Sequential(*(Asking("reads") for _ in range(3)))
    with torch.no_grad():
        for layer in net:
            layer.linear.weight.mul_(0.1)
    ours = weft.compile(net)
    assert_equal(detached(ours(BATCHES[0])), detached(net(BATCHES[0])))


def test_ever_new_outcomes_end_with_an_error_that_names_the_line() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * len(range(len(x.nonzero())))  # the line

    ours = weft.compile(step)
    with knobs.override(path_limit=3):
        for x in (torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)):
            assert_equal(ours(x), step(x))
        with pytest.raises(TooManyPaths, match=r"# the line"):
            ours(torch.zeros(3))


def test_a_float_that_python_needs_is_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * 2 if x.sum() > 0 and math.fsum([x.mean()]) > 0.1 else x

    ours = weft.compile(step)
    with pytest.raises(CannotCapture, match=r"x\.mean"):
        ours(BATCHES[0].abs())


def test_explain_and_capture_show_a_step_up_to_its_first_branch() -> None:
    explained = weft.explain(of_tensor, BATCHES[0])
    assert "branch(" in str(explained.step_graph)
    assert "branch(" in str(weft.capture(of_tensor, BATCHES[0]))


def test_state_is_restored_after_a_capture_that_ends_at_a_branch() -> None:
    make = nan_guard()
    step, (net, opt) = make()
    before = snapshot(net), snapshot(opt)
    weft.capture(step, BATCHES[0])
    assert_equal((snapshot(net), snapshot(opt)), before)


def test_cond_is_a_branch_as_in_eager() -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(3, 3)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = net(x)
            y = torch.cond(y.sum() > 0, lambda y: y.sin() * 2, lambda y: (y * y).cos(), (y,))
            loss = torch.cond(True, lambda y: y.square(), torch.sum, (y,)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        draw = torch.Generator().manual_seed(1)
        losses = [step(torch.randn(4, 3, generator=draw)) for _ in range(12)]
        if isinstance(step, weft.CompiledStep):
            assert len(step.captures) <= 5, step.captures
        return losses, snapshot(net)

    assert_equal(run(weft.compile), run(lambda step: step))


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.ASGD, torch.optim.NAdam])
def test_an_optimizer_that_asks_for_the_steps_of_each_parameter_is_captured_at_most_three_times(kind: Any) -> None:
    def make() -> tuple[Any, list[Any]]:
        net = nn.Sequential(*(mlp() for _ in range(3)))
        opt = kind(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        return step, [net, opt]

    assert len(both_ways(make, [(x,) for x in BATCHES], captures=None).captures) <= 3


def test_counts_that_are_answered_wrongly_because_the_call_has_changed_them_do_no_harm() -> None:
    """The second and later questions of a path are captured when the first counts are one further."""

    def make() -> tuple[Any, list[Any]]:
        counts = [torch.tensor(float(at)) for at in range(4)]

        def step(x: torch.Tensor) -> torch.Tensor:
            for count in counts:
                count.add_(1)
            for count in counts:
                x = x * 2 if count.item() % 3 == 0 else x + count
                count.add_(1)
            return x

        return step, [counts]

    both_ways(make, [(x,) for x in [*BATCHES, *BATCHES]], captures=None)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_whole_numbers_among_the_arguments_answer_questions_at_once(kind: torch.dtype) -> None:
    masks = [torch.tensor(each).to(kind) for each in ([1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1])]

    def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
        mask = mask.clone()
        mask[:1].fill_(1)  # the question is about what it holds now
        if mask.all():
            return x.sum()
        if mask[:2].all():
            return x[:2].sum() * 2
        return x * mask

    ours = weft.compile(step)
    x = torch.randn(3)
    assert_equal(ours(x, masks[0]), step(x, masks[0]))
    assert len(ours.captures) == 1  # two questions, one capture
    for mask in (*masks, *masks):
        assert_equal(ours(x, mask), step(x, mask))
    assert len(ours.captures) == 3, ours.captures  # one for each other way


def test_questions_about_floats_and_the_model_are_left_to_the_program() -> None:
    weight = torch.ones(3, dtype=torch.int64)

    def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
        x = x * 2 if (mask * weight).all() else x
        return x + 1 if x.sum() > 0 else x

    ours = weft.compile(step)
    for x in (torch.ones(3), -torch.ones(3)):
        assert_equal(ours(x, torch.ones(3, dtype=torch.int64)), step(x, torch.ones(3, dtype=torch.int64)))
    assert len(ours.captures) == 4, ours.captures
