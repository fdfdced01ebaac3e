"""A capture leaves torch as it found it, whether it ends well or in an error."""

from __future__ import annotations

import gc
import math
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.nn
from torch import nn

import weft
from both_ways import batches, mlp

HOLDERS: list[Any] = [
    torch, torch.Tensor, torch.cuda, torch.random, torch.autograd, torch.autograd.graph,
    torch.optim.Optimizer, torch.optim.AdamW, nn.Module, nn.Parameter, torch.utils.checkpoint,
    dist, dist.distributed_c10d, dist._functional_collectives, dist.nn.functional, dist.device_mesh,
]  # fmt: skip


def _names() -> dict[str, Any]:
    """What the modules and classes that a capture could patch hold, with the cells of wrappers."""
    found: dict[str, Any] = {}
    for holder in HOLDERS:
        for name, value in list(vars(holder).items()):
            found[f"{holder.__name__}.{name}"] = value
            cells = value.__closure__ if isinstance(value, types.FunctionType) else None
            for at, cell in enumerate(cells or ()):
                found[f"{holder.__name__}.{name}[{at}]"] = cell.cell_contents
    return found


def _globals() -> dict[str, Any]:
    hooks, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    return {
        **{name: len(kept) for name, kept in vars(hooks).items() if _is_registry(name, kept)},
        "optimizer pre hooks": len(optimizers._global_optimizer_pre_hooks),
        "optimizer post hooks": len(optimizers._global_optimizer_post_hooks),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "gc": gc.isenabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "thread count": torch.get_num_threads(),
        "stance": _stance(),
    }


def _is_registry(name: str, value: Any) -> bool:
    return name.startswith("_global") and hasattr(value, "__len__")


def _stance() -> Any:
    if "torch._dynamo" not in sys.modules:
        return "default"
    return torch._dynamo.eval_frame._stance.stance


class Setting:
    def __init__(self) -> None:
        self.model = nn.Sequential(mlp(), nn.Dropout(0.1), torch.compile(nn.Linear(8, 8), backend="eager"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.fired: list[str] = []
        weight = self.model[0][0].weight
        self.hooks = [
            weight.register_hook(lambda grad: grad * 2),
            weight.register_post_accumulate_grad_hook(lambda p: None),
            self.model[0].register_forward_hook(lambda m, args, output: output),
            self.model[0].register_full_backward_hook(lambda m, inputs, outputs: None),
        ]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def failing(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.step(x)
        return loss if math.fsum([float(loss)]) > 0 else -loss

    def interrupted(self, x: torch.Tensor) -> torch.Tensor:
        self.model(x).sum().backward()
        raise KeyboardInterrupt

    def own_hooks(self) -> list[Any]:
        found: list[Any] = []
        for module in self.model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                found += vars(module)[name].values()
            found.append(vars(module).get("forward"))
        for p in self.model.parameters():
            found += [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
        return found


def _capture(s: Setting) -> None:
    weft.capture(s.step, *batches()[0])


def _compile(s: Setting) -> None:
    weft.compile(s.step)(*batches()[0])


def _verify(s: Setting) -> None:
    weft.compile(s.step, verify=True)(*batches()[0])


def _refused(s: Setting) -> None:
    with pytest.raises(weft.WeftError):
        weft.compile(s.failing)(*batches()[0])


def _interrupted(s: Setting) -> None:
    with pytest.raises(KeyboardInterrupt):
        weft.compile(s.interrupted)(*batches()[0])


def _fallen_back(s: Setting) -> None:
    weft.compile(s.failing, fallback="eager")(*batches()[0])


@pytest.mark.parametrize("act", [_capture, _compile, _verify, _refused, _interrupted, _fallen_back])
def test_nothing_is_left_patched(act: Any) -> None:
    s = Setting()
    s.step(*batches()[0])  # whatever torch itself loads or wraps at first use is there now
    weft.capture(lambda x: x * 2, torch.ones(2))
    names, settings, hooks = _names(), _globals(), s.own_hooks()
    act(s)
    after = _names()
    assert {name for name in names if after.get(name) is not names[name] and not _plain(names[name])} == set()
    assert _globals() == settings
    assert [id(hook) for hook in s.own_hooks()] == [id(hook) for hook in hooks]


def _plain(value: Any) -> bool:
    """Numbers and caches come and go; what matters is code."""
    code = types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, property, staticmethod
    return not isinstance(value, code)


def test_the_step_still_runs_uncompiled_after_a_failed_capture() -> None:
    s = Setting()
    _refused(s)
    before = [p.detach().clone() for p in s.model.parameters()]
    s.step(*batches()[0])
    assert all(not torch.equal(p, was) for p, was in zip(s.model.parameters(), before, strict=True))


def test_two_captures_do_not_see_each_other() -> None:
    s, t = Setting(), Setting()
    first, second = weft.compile(s.step), weft.compile(t.step)
    for (x,) in batches():
        first(x)
        second(x)
    assert first.captures == second.captures == ["first call"]
