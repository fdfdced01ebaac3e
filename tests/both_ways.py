"""Run a training step as it is and compiled, from the same start, and compare all that both leave behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

import weft

Step = Callable[..., Any]
# Makes a step and lists what it changes (modules, optimizers, tensors), anew at each call.
Make = Callable[[], tuple[Step, list[Any]]]

SEED = 7


def both_ways(make: Make, calls: Sequence[tuple[Any, ...]], *, captures: int | None = 1, **options: Any) -> Any:
    """Make the step twice, run one as it is and one under `weft.compile(**options)`, assert that they agree.

    Compared bit for bit after all `calls` (one tuple of arguments each, cloned for each run): what each call
    returned, the arguments themselves, everything the step changes, and the state of the random generator.
    The number of captures is asserted too, unless it is None. Returns the compiled step.
    """
    steps: list[Any] = []
    eager = _run(make, calls, lambda step: step)
    compiled = _run(make, calls, lambda step: steps.append(weft.compile(step, **options)) or steps[0])
    assert_equal(compiled, eager)
    assert captures is None or len(steps[0].captures) == captures, steps[0].captures
    return steps[0]


def _run(make: Make, calls: Sequence[tuple[Any, ...]], wrap: Callable[[Step], Step]) -> dict[str, Any]:
    torch.manual_seed(SEED)
    step, changed = make()
    step = wrap(step)
    arguments = tree_map_only(torch.Tensor, _fresh, list(calls))
    results = [detached(step(*args)) for args in arguments]
    return {
        "results": results,
        "arguments": detached(arguments),
        "changed": [snapshot(thing) for thing in changed],
        "generator": torch.get_rng_state(),
    }


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def detached(tree: Any) -> Any:
    """A copy whose tensors nothing will change."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def snapshot(thing: Any) -> Any:
    """A copy of the state of a module (gradients and flags included), an optimizer, or a tree of tensors."""
    if isinstance(thing, nn.Module):
        parameters = dict(thing.named_parameters())
        return detached(
            {
                "state": dict(thing.state_dict()),
                "grads": {name: p.grad for name, p in parameters.items()},
                "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
            }
        )
    return detached(thing.state_dict() if isinstance(thing, torch.optim.Optimizer) else thing)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Same structure, and every leaf the same to the bit (NaN equals NaN)."""
    a, a_spec = tree_flatten_with_path(ours)
    b, b_spec = tree_flatten_with_path(theirs)
    assert a_spec == b_spec, f"{a_spec}\n{b_spec}"
    for (path, x), (_, y) in zip(a, b, strict=True):
        where = "".join(map(str, path))
        if isinstance(y, torch.Tensor):
            assert isinstance(x, torch.Tensor), where
            assert x.dtype == y.dtype, where
            assert x.shape == y.shape, where
            assert x.stride() == y.stride(), f"{where}: strides {x.stride()} and {y.stride()}"
            far = (x.double() - y.double()).abs()
            assert torch.equal(x.nan_to_num(), y.nan_to_num()), f"{where}: {far.max()}"
        else:
            assert x == y, f"{where}: {x!r} and {y!r}"


def mlp(width: int = 8) -> nn.Sequential:
    """Two layers, `width` features in and out."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def training(
    forward: Callable[..., torch.Tensor],
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Make:
    """The usual step: `forward(model, *args)` is the loss, then backward, step and zero_grad."""

    def make() -> tuple[Step, list[Any]]:
        net = model()
        opt = optimizer(net.parameters())

        def step(*args: Any) -> torch.Tensor:
            loss = forward(net, *args)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return step, [net, opt]

    return make


def batches(count: int = 3, shape: tuple[int, ...] = (4, 8)) -> list[tuple[torch.Tensor]]:
    """Argument lists of one random tensor each."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator),) for _ in range(count)]
