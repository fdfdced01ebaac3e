"""Modules that torch's own wrappers manage, which no capture can follow."""

from __future__ import annotations

import sys

from torch import nn

from weft.errors import UncapturableWrapper


def refuse_wrapper_of_torch(module: nn.Module, path: str) -> None:
    """Called with each module that a step can reach.

    Raises:
        UncapturableWrapper: torch's own FSDP wraps it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # wraps nothing where nobody imported it
    if fsdp is None:
        return
    if isinstance(module, fsdp.FSDPModule):
        remedy = "use weft.fully_shard, which takes the same arguments"
        raise UncapturableWrapper(path or "the model", "torch.distributed.fsdp.fully_shard", remedy)
    if isinstance(module, fsdp.FullyShardedDataParallel):
        remedy = "use weft.fully_shard on the module inside it"
        raise UncapturableWrapper(path or "the model", "torch.distributed.fsdp.FullyShardedDataParallel", remedy)
