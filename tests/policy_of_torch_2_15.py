"""A mixed-precision policy as torch 2.15 has it, for tests on earlier versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class PolicyOfTorch215(MixedPrecisionPolicy):
    """Has what torch 2.15 added. Without a ``reduce_dtype``, it says that float32 parameters are reduced in float32."""

    param_dtype_override_fn: Callable[..., Any] | None = None
