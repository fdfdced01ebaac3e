"""Where a shard lives between its uses: on the device that computes, or with `CPUOffloadPolicy` on the host.

With the policy, the sharded parameter, its gradient and so the optimizer's state are host tensors. A shard is copied to
the device before each all-gather, and its reduced gradient to the host. Both copies wait until they are done: the
optimizer, hooks on the parameter and whoever else looks at host memory know nothing of the device's streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from weft.errors import OffloadedToDevice


@dataclass(frozen=True)
class ShardHome:
    """The place of one parameter's shard and of the shard of its gradient.

    Args:
        device: the device that computes.
        policy: `CPUOffloadPolicy` for the host, in pinned memory if it says so and `device` is an accelerator.
    """

    device: torch.device
    policy: OffloadPolicy

    @property
    def is_host(self) -> bool:
        """Whether shards are kept on the host."""
        return isinstance(self.policy, CPUOffloadPolicy)

    def keep(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard`` where it lives; itself where it is there, or on the meta device."""
        if shard.is_meta:
            return shard
        if not isinstance(self.policy, CPUOffloadPolicy):
            return shard.to(self.device)
        shard = shard.to("cpu")
        return shard.pin_memory() if self.policy.pin_memory and self.device.type != "cpu" else shard

    def fetch(self, shard: torch.Tensor, path: str) -> torch.Tensor:
        """``shard`` of the parameter ``path`` on the device that computes.

        Raises OffloadedToDevice where something moved a shard off the host, and the optimizer with it.
        """
        if not self.is_host:
            return shard
        if shard.device.type != "cpu":
            raise OffloadedToDevice(path, shard.device)
        return shard.to(self.device)

    def keep_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The shard of a gradient where the shard of its parameter lives."""
        return grad.to("cpu") if self.is_host else grad
