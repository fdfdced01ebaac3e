"""Hooks under `weft.compile`: each kind on each target fires where eager fires it, or is an error."""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_cases import COMMUNICATING, LOCAL, cases, compare, table
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, batches, mlp, sgd, snapshot
from harness import run_ranks
from weft.errors import EscapedTensor, HookCountDiffers, HookDidNotFire, PythonStateChanged

Tensor = torch.Tensor
Made = tuple[Callable[[Tensor], Any], Any]


def scale_accumulated(factor: float) -> Callable[[Tensor], None]:
    def scale(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(factor)

    return scale


# ---- the matrix


@pytest.mark.gloo
@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in cases()))
def test_each_kind_of_hook_on_each_target_fires_as_in_eager(kind: str) -> None:
    """Hooks that communicate run on two ranks, the others in one process."""
    ranks = run_ranks(compare, 2, kind, COMMUNICATING, timeout=170)
    rows = [(case, first + second) for (case, first), (_, second) in zip(*ranks, strict=True)]
    rows += compare(0, 1, kind, LOCAL)
    print(table(rows))
    assert not [row for row in rows if row[1]]


# ---- several steps of one process, both ways


def training(register: Callable[[nn.Sequential, torch.optim.Optimizer], Any], wrap: Any) -> tuple[Any, ...]:
    """Train an mlp with the hooks that `register` puts on it; what each step returned and left behind."""
    torch.manual_seed(3)
    model = mlp()
    optimizer = sgd(model.parameters())
    noted = register(model, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    return [(step(x), snapshot(model)) for (x,) in batches()], noted, step


def assert_same_training(register: Callable[[nn.Sequential, torch.optim.Optimizer], Any], **options: Any) -> Any:
    """Train both ways and return the compiled step."""
    eager, eager_noted, _ = training(register, lambda step: step)
    compiled, noted, step = training(register, lambda step: weft.compile(step, **options))
    assert_equal(compiled, eager)
    assert_equal(noted, eager_noted)
    return step


def test_opaque_hooks_run_in_eager_order() -> None:
    def register(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
        noted: list[Any] = []

        def note(name: str) -> Callable[..., None]:
            return weft.opaque(lambda *args: noted.append(name))

        for at, layer in enumerate(model):
            layer.register_forward_pre_hook(note(f"pre {at}"))
            layer.register_forward_hook(note(f"forward {at}"))
            layer.register_full_backward_pre_hook(note(f"backward pre {at}"))
            layer.register_full_backward_hook(note(f"backward {at}"))
        for name, p in model.named_parameters():
            p.register_hook(note(f"gradient of {name}"))
            p.register_post_accumulate_grad_hook(note(f"accumulated {name}"))
        register_multi_grad_hook(list(model.parameters()), note("all"))
        register_multi_grad_hook(list(model.parameters()), note("any"), mode="any")
        optimizer.register_step_pre_hook(note("before step"))
        optimizer.register_step_post_hook(note("after step"))
        return noted

    assert_same_training(register)


def test_an_opaque_hook_sees_the_parameter_with_its_gradient_at_that_point() -> None:
    def register(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
        noted: list[Any] = []
        names = {p: name for name, p in model.named_parameters()}

        @weft.opaque
        def note(p: Tensor) -> None:
            others = [name for other, name in names.items() if other.grad is not None]
            noted.append((names[p], p.grad.clone(), p.detach().clone(), others))

        for p in names:
            p.register_post_accumulate_grad_hook(scale_accumulated(2))
            p.register_post_accumulate_grad_hook(note)
            p.register_post_accumulate_grad_hook(scale_accumulated(3))
        return noted

    assert_same_training(register)


def test_an_opaque_function_sees_the_state_at_its_point_of_the_step() -> None:
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(3)
        model, noted = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scale = torch.ones(())

        def step(
            x: Tensor, model: Any = model, optimizer: Any = optimizer, noted: Any = noted, scale: Any = scale
        ) -> None:
            @weft.opaque
            def look(where: str) -> None:
                grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                momenta = [s["momentum_buffer"].clone() for s in optimizer.state.values() if s]
                values = [p.detach().clone() for p in model.parameters()]
                noted.append(
                    (
                        where,
                        optimizer.param_groups[0]["lr"],
                        grads,
                        momenta,
                        values,
                        scale.clone(),
                        x.sum().item(),
                    )
                )

            look("before")
            model(x).square().mean().backward()
            look("after backward")
            scale.mul_(0.5)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            look("after clipping")
            optimizer.step()
            look("after step")
            optimizer.zero_grad()
            look("at the end")

        run = wrap(step)
        for at, (x,) in enumerate(batches()):
            optimizer.param_groups[0]["lr"] = 0.1 / (at + 1)
            run(x)
        results.append((noted, snapshot(model)))
    assert_equal(results[1], results[0])


def test_tensors_that_an_opaque_hook_keeps_keep_their_values() -> None:
    def register(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
        noted: list[Tensor] = []
        model[0].weight.register_hook(weft.opaque(noted.append))
        model[0].weight.register_post_accumulate_grad_hook(scale_accumulated(0))
        return noted

    assert_same_training(register)


def test_an_opaque_list_is_no_reason_to_capture_again() -> None:
    noted: list[float] = []
    model = mlp()

    def step(x: Tensor) -> None:
        hidden = model(x)
        hidden.register_hook(weft.opaque(lambda grad: noted.append(grad.norm().item())))
        hidden.sum().backward()
        model.zero_grad()

    compiled = weft.compile(step)
    for (x,) in batches():
        compiled(x)
    assert compiled.captures == ["first call"]
    assert len(noted) == 3


# ---- hooks that come and go


def on(model: Any, optimizer: Any, where: str) -> Any:
    """Register a hook that doubles what it gets (of optimizers: the gradients); returns its handle."""
    weight = model[0].weight
    double = lambda *grads: tuple(g * 2 for g in grads[-1]) if isinstance(grads[-1], tuple) else grads[-1] * 2
    doubled = lambda optimizer, args, kwargs: [p.grad.mul_(2) for p in optimizer.param_groups[0]["params"]] and None
    return {
        "gradient": lambda: weight.register_hook(double),
        "post-accumulate": lambda: weight.register_post_accumulate_grad_hook(scale_accumulated(2)),
        "multi-grad": lambda: register_multi_grad_hook([weight], lambda grads: grads[0].mul_(2)),
        "node": lambda: get_gradient_edge(weight).node.register_prehook(double),
        "forward": lambda: model[0].register_forward_hook(double),
        "forward-pre": lambda: model[0].register_forward_pre_hook(double),
        "full-backward": lambda: model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,)),
        "full-backward-pre": lambda: model[2].register_full_backward_pre_hook(double),
        "all modules": lambda: register_module_forward_hook(double),
        "optimizer": lambda: optimizer.register_step_pre_hook(doubled),
        "all optimizers": lambda: register_optimizer_step_pre_hook(doubled),
    }[where]()


SITES = {
    "gradient": r"hooks registered on .*0\.weight changed: .*had none",
    "post-accumulate": r"hooks registered on .*0\.weight changed: .*had none",
    "multi-grad": r"hooks registered on .*0\.weight changed: .*had none",
    "node": r"a node-pre hook was registered on .*0\.weight",
    "forward": r"\.0\._forward_hooks.* holds 1 entries, had 0",
    "forward-pre": r"\.0\._forward_pre_hooks.* holds 1 entries, had 0",
    "full-backward": r"\.2\._backward_hooks.* holds 1 entries, had 0",
    "full-backward-pre": r"\.2\._backward_pre_hooks.* holds 1 entries, had 0",
    "all modules": r"the forward hooks of everything holds 1 entries, had 0",
    "optimizer": r"the step-pre hooks of .* holds 1 entries, had 0",
    "all optimizers": r"the step-pre hooks of everything holds 1 entries, had 0",
}


@pytest.mark.parametrize("where", SITES)
def test_a_hook_registered_or_removed_later_captures_again(where: str) -> None:
    results, captures = [], []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(3)
        model = mlp()
        optimizer = sgd(model.parameters())
        keeps_the_node_alive = get_gradient_edge(model[0].weight).node  # noqa: F841

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        x = batches()[0][0]
        losses = [run(x), run(x)]
        handle = on(model, optimizer, where)
        try:
            losses += [run(x), run(x)]
        finally:
            handle.remove()
        losses += [run(x), run(x)]
        results.append((losses, snapshot(model)))
        captures = getattr(run, "captures", [])
    assert_equal(results[1], results[0])
    reasons = [why for why in captures if "hook" in why]
    assert len(reasons) in (1, 2), captures  # without the hook again, the first capture may serve
    assert re.search(SITES[where], reasons[0]), reasons


def test_a_hook_may_remove_itself() -> None:
    def register(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        def once(grad: Tensor) -> Tensor:
            handle.remove()
            return grad * 4

        def once_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            other.remove()
            return output * 4

        handle = model[0].weight.register_hook(once)
        other = model[0].register_forward_hook(once_forward)

    step = assert_same_training(register)
    assert len(step.captures) <= 3


@pytest.mark.parametrize("where", ["gradient", "post-accumulate", "node", "forward"])
def test_a_hook_that_the_step_registers_for_good(where: str) -> None:
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(3)
        model, done = mlp(), [False]
        optimizer = sgd(model.parameters())
        node = get_gradient_edge(model[0].weight).node

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer, done: Any = done) -> Tensor:
            if not done[0]:
                on(model, optimizer, where)
                done[0] = True
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        results.append(([run(x) for (x,) in batches()], snapshot(model)))
        assert node is get_gradient_edge(model[0].weight).node
    assert_equal(results[1], results[0])


def test_hooks_on_arguments() -> None:
    """A hook that the captured batch did not have captures again, the same code on another batch does not."""
    model, results = mlp(), []
    for wrap in (lambda step: step, weft.compile):

        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        run, factor, gradients = wrap(step), 2.0, []
        for at, (x,) in enumerate(batches(5)):
            x.requires_grad_()
            if at in (2, 3):
                x.register_hook(lambda grad: grad * factor)  # noqa: B023
            if at == 4:
                x.register_hook(lambda grad: grad * 5)
            run(x)
            gradients.append(x.grad)
        results.append(gradients)
    assert_equal(results[1], results[0])
    assert len(run.captures) == 3, run.captures
    assert "hooks" in run.captures[1]


# ---- Python side effects


def raising(error: type[Exception], match: str, register: Callable[[nn.Sequential, Any], Any]) -> None:
    with pytest.raises(error, match=match):
        training(lambda model, optimizer: register(model, optimizer), weft.compile)


KINDS: dict[str, Callable[[nn.Sequential, Callable[..., Any]], Any]] = {
    "gradient": lambda model, hook: model[0].weight.register_hook(hook),
    "post-accumulate": lambda model, hook: model[0].weight.register_post_accumulate_grad_hook(hook),
    "multi-grad": lambda model, hook: register_multi_grad_hook([model[0].weight], hook),
    "forward": lambda model, hook: model[0].register_forward_hook(hook),
    "full-backward": lambda model, hook: model[0].register_full_backward_hook(hook),
}


class Metrics:
    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_counts_as_in_eager(kind: str) -> None:
    def register(model: nn.Sequential, optimizer: Any) -> list[Any]:
        counts, metrics, fired = {"fired": 0}, Metrics(), 0

        def hook(*args: Any) -> None:
            nonlocal fired
            fired += 1
            metrics.count += 2
            counts.update(fired=counts["fired"] + 1)
            metrics.last = (fired, counts["fired"])

        KINDS[kind](model, hook)
        return [counts, vars(metrics)]

    step = assert_same_training(register)
    assert len(step.captures) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_appends_to_a_list_as_in_eager(kind: str) -> None:
    def register(model: nn.Sequential, optimizer: Any) -> list[Any]:
        kept: list[Any] = []
        KINDS[kind](
            model, lambda *args: kept.append((args[-1][0] if kind != "post-accumulate" else args[-1]).detach() * 2)
        )
        return kept

    assert len(assert_same_training(register).captures) == 2  # the second one finds gradients


def test_a_list_that_a_hook_appends_to_and_reads_is_an_error() -> None:
    def register(model: nn.Sequential, optimizer: Any) -> None:
        kept: list[Any] = []
        model[0].weight.register_hook(lambda grad: kept.append(len([*kept])))

    raising(PythonStateChanged, r"the step changed kept \(1 -> 2 entries\).*weft\.opaque", register)


def test_a_hook_that_stores_a_tensor_where_it_cannot_be_made_again_is_an_error() -> None:
    def register(model: nn.Sequential, optimizer: Any) -> None:
        metrics = Metrics()

        def hook(grad: Tensor) -> None:
            metrics.last = functools.partial(print, grad)

        model[0].weight.register_hook(hook)

    raising(EscapedTensor, r"metrics\.last holds a partial with tensors inside", register)


def test_a_hook_stores_a_tensor_in_an_object_as_in_eager() -> None:
    class Holder:
        def __init__(self, grad: Tensor) -> None:
            self.grad = grad

    def run(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        weight, metrics = nn.Parameter(torch.randn(3)), Metrics()

        def hook(grad: Tensor) -> None:
            metrics.last = Holder(grad * 2)

        weight.register_hook(hook)

        def step(x: Tensor) -> None:
            (weight * x).square().sum().backward()
            weight.grad = None

        stepped, found = wrap(step), []
        for at in range(3):
            stepped(torch.full((3,), float(at)))
            found.append(metrics.last)
        assert len({id(each) for each in found}) == 3
        return [each.grad for each in found]

    assert_equal(run(weft.compile), run(lambda step: step))


def test_activations_that_a_hook_collects_for_the_step() -> None:
    """The list is cleared by each step: it ends with what the last one put there, as in eager."""
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(3)
        model, kept = mlp(), []
        model[0].register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))

        def step(x: Tensor, model: Any = model, kept: Any = kept) -> Tensor:
            kept.clear()
            loss = model(x).mean() + kept[0].square().mean()
            loss.backward()
            return loss.detach()

        run = wrap(step)
        results.append(([run(x) for (x,) in batches()], [t.detach() for t in kept], snapshot(model)))
    assert_equal(results[1], results[0])


# ---- hooks that do not fire


def test_a_hook_that_was_silenced_is_named() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 2)

    def step(x: Tensor) -> None:
        hooks = model[0].weight._backward_hooks
        kept = dict(hooks)
        loss = model(x).sum()
        hooks.clear()
        loss.backward()
        hooks.update(kept)

    with pytest.raises(
        HookDidNotFire, match=r"gradient hook .*<lambda> on model\.0\.weight fired 0 times .* expected 1"
    ):
        weft.compile(step)(batches()[0][0])


class Silent(nn.Module):
    """Runs its layers in ways that do not fire all hooks, in eager neither."""

    def __init__(self) -> None:
        super().__init__()
        self.bypassed = nn.Linear(8, 8)
        self.rescued = nn.Linear(8, 8)
        self.again = mlp()
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bypassed.forward(x)
        try:
            self.rescued(x[:, :3])
        except RuntimeError:
            x = self.rescued(x)
        return checkpoint(self.again, x, use_reentrant=False)


def test_hooks_that_eager_does_not_fire_either_are_no_error() -> None:
    results = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, verify=True)):
        torch.manual_seed(3)
        model, noted = Silent(), []
        optimizer = sgd(model.parameters())
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                weft.opaque(lambda *args, name=name, noted=noted: noted.append(f"pre {name}"))
            )
            module.register_forward_hook(weft.opaque(lambda *args, name=name, noted=noted: noted.append(name)))
            module.register_full_backward_hook(
                weft.opaque(lambda *args, name=name, noted=noted: noted.append(f"back {name}"))
            )
        for name, p in model.named_parameters():
            p.register_hook(weft.opaque(lambda grad, name=name, noted=noted: noted.append(name)))
            p.grad = torch.ones_like(p)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, model.bypassed.weight, retain_graph=True)
            loss.backward()
            model.unused.weight.grad = grad
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        results.append(([run(x) for (x,) in batches()], noted, snapshot(model)))
    assert_equal(results[1], results[0])


def test_hooks_on_parameters_that_copies_stand_in_for() -> None:
    """Neither way fires the hook of a parameter while a copy of it is used in its place."""

    def make(wrap: Any) -> tuple[Any, ...]:
        torch.manual_seed(3)
        model = mlp()
        torch.nn.utils.parametrizations.weight_norm(model[0])
        for p in model.parameters():
            p.register_hook(lambda grad: grad * 2)

        def step(x: Tensor) -> list[Tensor]:
            copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            torch.func.functional_call(model, copies, (x,)).square().mean().backward()
            loss = model(x).square().mean()
            loss.backward()
            return [loss.detach(), *(copy.grad for copy in copies.values())]

        step = wrap(step)
        return [step(x) for (x,) in batches()], snapshot(model)

    eager = make(lambda step: step)
    assert_equal(make(lambda step: weft.compile(step, verify=True)), eager)


def test_verify_compares_how_often_hooks_fired() -> None:
    model = mlp()
    model[2].register_forward_hook(lambda module, args, output: output * 2)

    def step(x: Tensor) -> Tensor:
        x = model[0](x)
        # A question that nothing can guard: the capture and the eager run have other callers.
        return model[2](x) if sys._getframe(1).f_globals["__name__"] == "weft.verify" else x

    with pytest.raises(
        HookCountDiffers,
        match=r"forward hook .*<lambda> on model\.2 fired 1 times in the eager step and 0 times",
    ):
        weft.compile(step, verify=True)(batches()[0][0])


def test_layer_drop_with_pythons_random_numbers() -> None:
    """Each call draws anew, and hooks run on the path that it takes."""

    x = batches()[0][0]

    def make(wrap: Any) -> Any:
        torch.manual_seed(0)
        model = mlp()
        model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        random.seed(0)

        def step(x: Tensor) -> Tensor:
            x = model[0](x)
            loss = (model[2](x) if random.random() < 0.5 else x).sum()
            loss.backward()
            return loss.detach()

        step = wrap(step)
        return [step(x) for _ in range(8)], random.getstate(), snapshot(model)

    random.seed(0)
    assert len({random.random() < 0.5 for _ in range(8)}) == 2, "both paths are taken"
    before = random.getstate()
    try:
        assert_equal(make(weft.compile), make(lambda step: step))
    finally:
        random.setstate(before)


def test_verify_with_every_kind_of_hook() -> None:
    def register(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
        noted: list[str] = []
        for where in SITES:
            if not where.startswith("all"):
                on(model, optimizer, where)
        for kind in KINDS.values():
            kind(model, weft.opaque(lambda *args: noted.append("opaque")))
        return [noted, get_gradient_edge(model[0].weight).node][:1]

    assert_same_training(register, verify=True)


def test_a_capture_counts_every_hook() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[0].weight.register_hook(lambda grad: grad * 2)

    def step(x: Tensor) -> None:
        for part in x.split(2):
            hidden = model(part)
            hidden.register_hook(lambda grad: grad * 2)
            hidden.sum().backward()

    compiled = weft.compile(step)
    compiled(batches()[0][0])
    counts = compiled.entries[0].captured.hooks.totals()
    fired = {(owner.split("/")[-1].split(":")[0], kind): n for (owner, kind, _), n in counts.items()}
    assert fired == {
        ("model.0", "forward"): 2,
        ("model.0.weight", "gradient"): 2,
        ("test_hooks.py", "gradient"): 2,
    }


# ---- with wrapped modules


def wrapped(rank: int, world: int, kind: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,))
    results = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, verify=True)):
        torch.manual_seed(3)
        model, noted = mlp(), []
        if kind == "replicate":
            weft.replicate(model, mesh=mesh)
        else:
            weft.fully_shard(model[0], mesh=mesh)
            weft.fully_shard(model, mesh=mesh)
        optimizer = sgd(model.parameters())
        for name, p in model.named_parameters():
            p.register_hook(lambda grad: grad * 0.5)
            p.register_post_accumulate_grad_hook(scale_accumulated(3))
            p.register_post_accumulate_grad_hook(
                weft.opaque(lambda p, name=name, noted=noted: noted.append((name, local(p.grad).clone())))
            )
        model[0].register_forward_hook(lambda module, args, output: output * 1.5)
        model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        model[2].register_forward_pre_hook(
            weft.opaque(lambda module, args, noted=noted: noted.append(args[0].detach().clone()))
        )

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = wrap(step)
        losses = [run(x + rank) for (x,) in batches()]
        results.append((losses, noted, [local(p).detach() for p in model.parameters()]))
    assert_equal(results[1], results[0])
    return results[1][0]


def local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["replicate", "fully_shard"])
def test_hooks_on_wrapped_modules(kind: str) -> None:
    first, second = run_ranks(wrapped, 2, kind)
    assert not torch.equal(first[0], second[0])
