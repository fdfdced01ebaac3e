"""What a script finds in place of parts of torch while it is planned.

torch's own data parallelism communicates in ways that a capture does not see. weft's has the same arguments and
meaning, so a script that uses torch's is planned as if it used weft's. Functions whose work depends on values, which a
plan does not have, leave their tensors as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from weft.distributed.ddp import replicate
from weft.distributed.fsdp import fully_shard
from weft.thread_patches import Patches

# Initialisers that draw again until values are in range, or sort what they drew.
_INITIALISERS = ("trunc_normal_", "orthogonal_", "sparse_")


class PlannedDataParallel(nn.Module):
    """Replaces ``DistributedDataParallel``: the same module under ``module``, replicated by weft."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = replicate(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward inside are not reduced."""
        module: Any = self.module
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)


def patch_torch(patches: Patches) -> None:
    """Register all replacements of this file."""
    patches.function(torch_fsdp, "fully_shard", fully_shard)
    patches.attribute(nn.parallel.DistributedDataParallel, "__init__", _planned_init)
    patches.function(torch, "compile", _uncompiled)
    patches.attribute(nn.Module, "compile", lambda module, *args, **kwargs: None)
    patches.function(dcp, "load", lambda state_dict, *args, **kwargs: None)
    for saving in ("save", "async_save"):
        patches.function(dcp, saving, lambda *args, **kwargs: None)
    patches.function(torch, "save", lambda *args, **kwargs: None)
    for name in _INITIALISERS:
        patches.function(nn.init, name, lambda tensor, *args, **kwargs: tensor)


def _planned_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the initialiser of DistributedDataParallel. The class itself stays: it is an abstract one, and those
    cannot be replaced."""
    self.__class__ = PlannedDataParallel
    self.__init__(*args, **kwargs)


def _uncompiled(model: Any = None, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Replaces ``torch.compile``: modules and functions are captured as they are written."""
    return (lambda function: function) if model is None else model
