"""Every kind of hook on every target, in every variant: training runs that differ in one hook.

A case trains a small model for a few steps, uncompiled or compiled, with one hook registered; :func:`train`
returns everything the run leaves behind, so that two runs can be compared bit for bit. A hook counts its
firings in a tensor (``model.fired``), which is part of the step and so is counted by the compiled step as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import weft

Tensor = torch.Tensor

# The second step finds what the first left behind: gradients, optimizer state, counts.
STEPS = 2
COMMUNICATING = ("sync", "async", "functional")
LOCAL = ("plain", "state", "opaque")
VARIANTS = (*COMMUNICATING, *LOCAL)


class Case(NamedTuple):
    """One cell of the matrix: what kind of hook, on what, doing what."""

    kind: str
    target: str
    variant: str


class Model(nn.Module):
    """Two hidden layers. ``tap`` sees them in every forward; ``fired`` and ``total`` are written by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("fired", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.tap: Callable[[Tensor, Tensor, Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        deeper = torch.tanh(self.second(hidden))
        if self.tap is not None:
            self.tap(x, hidden, deeper)
        return self.last(deeper)


@dataclass
class Run:
    """One training run: the model, what is registered outside it, what opaque hooks saw."""

    model: Model
    optimizer: torch.optim.Optimizer
    variant: str
    x: Tensor
    seen: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    prepare: Callable[[Tensor], None] = lambda x: None

    def count(self) -> None:
        self.model.fired.add_(1)

    def changed(self, t: Tensor) -> Tensor:
        """What the hook of this variant makes of a tensor."""
        self.count()
        t = t.detach().clone()
        if self.variant == "plain":
            return t * 0.5 + 0.125
        if self.variant == "sync":
            dist.all_reduce(t)
            return t / 2
        if self.variant == "async":
            work = dist.all_reduce(t, async_op=True)
            doubled = self.model.total * 2
            work.wait()
            return t / 2 + doubled
        if self.variant == "functional":
            return funcol.wait_tensor(funcol.all_reduce(t, "sum", dist.group.WORLD)) / 2
        self.model.total.add_(t.sum())
        return t + self.model.total * 0.01

    def differentiable(self, t: Tensor) -> Tensor:
        """:meth:`changed` for what autograd goes on from: the output of a module."""
        if self.variant == "plain":
            self.count()
            return t * 0.5 + 0.125
        return t + (self.changed(t) - t.detach()) * 0.5

    def note(self, *values: Any) -> None:
        """What an opaque hook does: reads numbers, keeps tensors."""
        for value in values:
            self.seen.append(
                value if isinstance(value, str) else (value.detach().double().sum().item(), value.detach())
            )


# ---- what is registered, by kind


def on_tensor(run: Run) -> Callable[[Tensor], Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda grad: run.note("gradient", grad))
    return lambda grad: run.changed(grad)


def on_accumulated(run: Run) -> Callable[[Tensor], Any]:
    def change(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.copy_(run.changed(leaf.grad))

    if run.variant == "opaque":
        return weft.opaque(lambda leaf: run.note("accumulated", leaf, leaf.grad))
    return change


def on_many(run: Run) -> Callable[[Any], None]:
    def change(grads: Any) -> None:
        first = next(g for g in ([grads] if isinstance(grads, Tensor) else grads) if g is not None)
        run.model.total.add_(run.changed(first).sum())

    if run.variant == "opaque":
        return weft.opaque(lambda grads: run.note("many", *([grads] if isinstance(grads, Tensor) else grads)))
    return change


def on_node(run: Run) -> Callable[[Any, Any], Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda inputs, outputs: run.note("node", *(g for g in (*inputs, *outputs) if g is not None)))

    def change(inputs: Any, outputs: Any) -> Any:
        if inputs:
            return tuple(None if g is None else run.changed(g) for g in inputs)
        run.model.total.add_(run.changed(outputs[0]).sum())  # a node that accumulates hands nothing on
        return None

    return change


def before_node(run: Run) -> Callable[[Any], Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda outputs: run.note("node", *outputs))
    return lambda outputs: tuple(None if g is None else run.changed(g) for g in outputs)


def forward(run: Run) -> Callable[..., Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda module, args, output: run.note(type(module).__name__, *args, output))
    return lambda module, args, output: run.differentiable(output)


def forward_pre(run: Run) -> Callable[..., Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda module, args: run.note(type(module).__name__, *args))
    return lambda module, args: (run.differentiable(args[0]),)


def backward(run: Run) -> Callable[..., Any]:
    if run.variant == "opaque":
        return weft.opaque(
            lambda module, inputs, outputs: run.note(
                type(module).__name__, *(g for g in inputs if g is not None), *outputs
            )
        )
    return lambda module, inputs, outputs: tuple(None if g is None else run.changed(g) for g in inputs)


def backward_pre(run: Run) -> Callable[..., Any]:
    if run.variant == "opaque":
        return weft.opaque(lambda module, outputs: run.note(type(module).__name__, *outputs))
    return lambda module, outputs: tuple(run.changed(g) for g in outputs)


def around_step(run: Run) -> Callable[..., Any]:
    def gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        return (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for grad in gradients(optimizer):
            grad.copy_(run.changed(grad))

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        run.note(
            f"lr {optimizer.param_groups[0]['lr']:.6f}",
            optimizer.param_groups[0]["params"][0],
            *gradients(optimizer),
        )
        run.note(*(v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)))

    return weft.opaque(look) if run.variant == "opaque" else change


_MODULE_KINDS: dict[str, tuple[Callable[[Run], Any], str, Callable[[Any], Any]]] = {
    "forward": (forward, "register_forward_hook", nn_module.register_module_forward_hook),
    "forward-pre": (forward_pre, "register_forward_pre_hook", nn_module.register_module_forward_pre_hook),
    "full-backward": (backward, "register_full_backward_hook", nn_module.register_module_full_backward_hook),
    "full-backward-pre": (
        backward_pre,
        "register_full_backward_pre_hook",
        nn_module.register_module_full_backward_pre_hook,
    ),
}
_TENSOR_KINDS: dict[str, tuple[Callable[[Run], Any], Callable[[Tensor, Any], Any]]] = {
    "Tensor.register_hook": (on_tensor, lambda t, hook: t.register_hook(hook)),
    "post-accumulate-grad": (on_accumulated, lambda t, hook: t.register_post_accumulate_grad_hook(hook)),
    "multi-grad all": (on_many, lambda t, hook: register_multi_grad_hook([t], hook)),
    "multi-grad any": (on_many, lambda t, hook: register_multi_grad_hook([t], hook, mode="any")),
    "Node.register_hook": (on_node, lambda t, hook: node_of(t).register_hook(hook)),
    "Node.register_prehook": (before_node, lambda t, hook: node_of(t).register_prehook(hook)),
}
_OPTIMIZER_KINDS = {
    "optimizer step-pre": ("register_step_pre_hook", register_optimizer_step_pre_hook),
    "optimizer step-post": ("register_step_post_hook", register_optimizer_step_post_hook),
}


def node_of(t: Tensor) -> Any:
    """The autograd node that makes a tensor's gradient final: of a leaf the one that accumulates it."""
    return t.grad_fn or torch.autograd.graph.get_gradient_edge(t).node


def cases(only: str | None = None) -> list[Case]:
    """All cells of the matrix that mean something: a hook on accumulation needs a leaf, and so on."""
    cells = []
    for kind in _TENSOR_KINDS:
        leaf_only = kind == "post-accumulate-grad"
        targets = ["parameter", "parameter, inside", "input", "input, inside"]
        cells += [(kind, target) for target in ([] if leaf_only else ["intermediate"]) + targets]
        if "multi" in kind:
            cells.append((kind, "parameters and intermediates"))
    cells += [
        (kind, target)
        for kind in _MODULE_KINDS
        for target in ("module", "whole model", "module, inside", "all modules")
    ]
    cells += [(kind, target) for kind in _OPTIMIZER_KINDS for target in ("optimizer", "all optimizers")]
    return [Case(kind, target, variant) for kind, target in cells for variant in VARIANTS if only in (None, kind)]


def register(case: Case, run: Run) -> None:
    """Register the case's hook, or have the step register it."""
    if case.kind in _MODULE_KINDS:
        _register_on_module(case, run)
    elif case.kind in _OPTIMIZER_KINDS:
        method, everywhere = _OPTIMIZER_KINDS[case.kind]
        one = getattr(run.optimizer, method)
        run.handles.append((one if case.target == "optimizer" else everywhere)(around_step(run)))
    else:
        _register_on_tensor(case, run)


def _register_on_module(case: Case, run: Run) -> None:
    make, method, everywhere = _MODULE_KINDS[case.kind]
    if case.target == "all modules":
        run.handles.append(everywhere(make(run)))
    elif case.target == "module, inside":

        def tap(x: Tensor, hidden: Tensor, deeper: Tensor) -> None:
            run.kept.append(getattr(run.model.last, method)(make(run)))

        run.model.tap = tap
    else:
        run.handles.append(getattr(run.model if case.target == "whole model" else run.model.second, method)(make(run)))


def _register_on_tensor(case: Case, run: Run) -> None:
    make, attach = _TENSOR_KINDS[case.kind]
    hook, model = make(run), run.model
    if case.target == "parameter":
        run.handles += [node_of(model.second.weight), attach(model.second.weight, hook)]
    elif case.target == "input":

        def prepare(x: Tensor) -> None:
            run.handles += [node_of(x), attach(x, hook)]

        run.prepare = prepare
    elif case.target == "parameters and intermediates":
        mode = case.kind.split()[1]
        model.tap = lambda x, h, d: run.kept.append(
            register_multi_grad_hook([model.first.weight, d, h], hook, mode=mode)
        )
    else:

        def tap(x: Tensor, hidden: Tensor, deeper: Tensor) -> None:
            on = {"intermediate": hidden, "input, inside": x, "parameter, inside": model.second.weight}[case.target]
            run.kept += [node_of(on), attach(on, hook)]

        model.tap = tap


# ---- runs


def begin(case: Case | None, rank: int, compiled: bool, **options: Any) -> tuple[Run, Callable[[Tensor], Tensor]]:
    """A run and its step, compiled or not, with the case's hook registered."""
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as in every later step
    run = Run(model, optimizer, case.variant if case else "plain", torch.empty(0))
    if case is not None:
        register(case, run)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        for handle in run.kept:
            if hasattr(handle, "remove"):
                handle.remove()
        run.kept.clear()
        return loss.detach()

    return run, weft.compile(step, **options) if compiled else step


def batch(rank: int, at: int) -> Tensor:
    """The rank's batch of a step, a leaf that requires grad."""
    generator = torch.Generator().manual_seed(100 * at + rank)
    return torch.randn(5, 4, generator=generator).requires_grad_()


class Outcome(NamedTuple):
    """What a run left behind: values by name, firings, and what opaque hooks saw."""

    values: dict[str, Tensor]
    fired: int
    seen: list[Any]


def train(case: Case | None, rank: int, compiled: bool, **options: Any) -> Outcome:
    """Train for ``STEPS`` steps and return all losses, gradients and parameters of all steps."""
    run, step = begin(case, rank, compiled, **options)
    values: dict[str, Tensor] = {}
    try:
        for at in range(STEPS):
            x = batch(rank, at)
            run.prepare(x)
            values[f"loss {at}"] = step(x)
            named = [*run.model.named_parameters(), ("x", x)]
            for name, p in named:
                values[f"{name} {at}"] = p.detach().clone()
                if p.grad is not None:
                    values[f"{name}.grad {at}"] = p.grad.clone()
            values.update({f"{name} {at}": b.clone() for name, b in run.model.named_buffers()})
    finally:
        for handle in run.handles:
            if hasattr(handle, "remove"):
                handle.remove()
    seen = [entry if isinstance(entry, str) else (entry[0], entry[1].clone()) for entry in run.seen]
    return Outcome(values, int(run.model.fired.item()), seen)


def differences(eager: Outcome, compiled: Outcome) -> list[str]:
    """Names of what is not the same, bit for bit."""
    names = [f"only one has {name}" for name in eager.values.keys() ^ compiled.values.keys()]
    names += [
        n for n in eager.values.keys() & compiled.values.keys() if not torch.equal(eager.values[n], compiled.values[n])
    ]
    if eager.fired != compiled.fired:
        names.append(f"fired {eager.fired} times eager, {compiled.fired} compiled")
    if len(eager.seen) != len(compiled.seen):
        names.append(f"opaque hook saw {len(eager.seen)} values eager, {len(compiled.seen)} compiled")
    for at, (a, b) in enumerate(zip(eager.seen, compiled.seen, strict=False)):
        same = a == b if isinstance(a, str) or isinstance(b, str) else a[0] == b[0] and torch.equal(a[1], b[1])
        if not same:
            names.append(f"opaque hook saw {a} eager, {b} compiled at {at}")
            break
    return sorted(names)


def compare(rank: int, world: int, kind: str, variants: Sequence[str]) -> list[tuple[Case, list[str]]]:
    """What differs between the two ways, for the cases of a kind in these variants, on each rank."""
    rows = []
    for case in cases(kind):
        if case.variant not in variants:
            continue
        eager = train(case, rank, compiled=False)
        wrong = differences(eager, train(case, rank, compiled=True))
        fired = eager.seen if case.variant == "opaque" else eager.fired
        rows.append((case, wrong if fired else [*wrong, "the hook never fired"]))
    return rows


def table(rows: Iterable[tuple[Case, list[str]]]) -> str:
    """One line a kind and target, one column a variant: ``=`` where both ways agreed, else what differs."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for case, wrong in rows:
        lines.setdefault((case.kind, case.target), {})[case.variant] = (
            "=" if not wrong else f"{len(wrong)} differ: {wrong[0]}"
        )
    head = f"{'kind':24} {'target':28} " + " ".join(f"{variant:10}" for variant in VARIANTS)
    body = [
        f"{k:24} {t:28} " + " ".join(f"{cells.get(v, '-'):10}" for v in VARIANTS) for (k, t), cells in lines.items()
    ]
    return "\n".join([head, *body])
