"""A library that asks in many ways whether it is being traced, as libraries do; eager says no to all of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import overrides
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

KINDS = (FakeTensor, torch.fx.Proxy)
_instance_of = isinstance


@functools.singledispatch
def name_of(value: Any) -> str:
    return "other"


@name_of.register
def _(value: torch.Tensor) -> str:
    return "tensor"


@name_of.register
def _(value: FakeTensor) -> str:
    return "tensor"


class Meta(type):
    """A class may be made while a step runs."""


def answers(parameter: torch.nn.Parameter, tensor: torch.Tensor, number: float) -> dict[str, Any]:
    class Made(metaclass=Meta):
        pass

    class MadeMeta(type):
        pass

    return {
        "isinstance": isinstance(tensor, FakeTensor),
        "attribute": isinstance(tensor, torch._subclasses.FakeTensor),
        "kinds": isinstance(tensor, KINDS),
        "nested": isinstance(tensor, ((fake_tensor.FakeTensor,), int)),
        "union": isinstance(tensor, FakeTensor | torch.fx.Proxy),
        "held": _instance_of(tensor, FakeTensor),
        "tensor": isinstance(tensor, torch.Tensor),
        "float tensor": isinstance(tensor, torch.FloatTensor),
        "type": type(tensor) is torch.Tensor,
        "type of a parameter": type(parameter) is torch.nn.Parameter,
        "name": type(tensor).__name__,
        "class": tensor.__class__.__name__,
        "is class": tensor.__class__ is torch.Tensor,
        "mapped": [kind.__name__ for kind in map(type, (tensor, number))],
        "number": isinstance(number, float),
        "number in a tuple": isinstance(number, (int, float)),
        "number in a union": isinstance(number, int | float),
        "symbolic": isinstance(number, (torch.SymFloat, torch.SymInt)),
        "type of a number": type(number) is float,
        "by type": {float: "float", torch.SymFloat: "symbol"}[type(number)],
        "types": (isinstance(Meta, type), type(Meta) is type, type(Made) is Meta, issubclass(Meta, type)),
        "made": (isinstance(Made, type), type(MadeMeta) is type, isinstance(MadeMeta("A", (), {}), MadeMeta)),
        "new type": type("New", (dict,), {})(a=1)["a"],
        "dispatched": name_of(tensor),
        "compiling": (torch.compiler.is_compiling(), torch.compiler.is_exporting(), torch.jit.is_tracing()),
        "modes": len(_python_dispatch._get_current_dispatch_mode_stack()),
        "mode": _python_dispatch._get_current_dispatch_mode() is None,
        "in a mode": is_in_torch_dispatch_mode(),
        "function modes": len(overrides._get_current_function_mode_stack()),
        "overridden": overrides.has_torch_function((tensor,)),
        "fake mode": detect_fake_mode([tensor]) is None,
        "is fake": fake_tensor.is_fake(tensor),
        "functorch": torch._C._functorch.is_batchedtensor(tensor),
    }


def mask_or_none(mask: torch.Tensor) -> torch.Tensor | None:
    """Keeps a mask of ones where it is traced, since it cannot be looked at there."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(mask, FakeTensor)
    return None if not traced and bool(mask.all()) else mask
