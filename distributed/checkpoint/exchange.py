"""Short texts between ranks, over a gloo group of their own.

Checkpoints are written in a background thread, so they must not share a group with the step: two threads that use one
group issue their collectives in an order that differs between ranks.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from weft import torch_adapter

_TIMEOUT = datetime.timedelta(minutes=10)


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    Making one is collective.

    Attributes:
        rank, world_size: of this process.
        group: the gloo group; None where this process is alone.
    """

    def __init__(self) -> None:
        self.world_size = torch_adapter.world_size()
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.world_size > 1 else None
        self.rank = dist.get_rank() if self.group is not None else 0

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        if self.group is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(text.encode())]), group=self.group)
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self.group)
        return [bytes(got[: int(size)].tolist()).decode() for got, size in zip(texts, sizes, strict=True)]

    def first(self, text: str) -> str:
        """The text of rank 0."""
        return self.gather(text if self.rank == 0 else "")[0]
