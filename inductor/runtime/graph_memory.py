"""How much memory a GPU needs for work that is replayed from CUDA graphs.

``torch.cuda.max_memory_allocated`` counts what was allocated and freed. A replay allocates nothing: it works in memory
that was set aside when it was recorded, of which torch counts as allocated only what is still held as a tensor.
"""

from __future__ import annotations

import torch


def graph_pool_bytes(device: torch.device | int | None = None) -> tuple[int, int]:
    """Bytes of the pools of CUDA graphs on a GPU: set aside, and counted as allocated among those."""
    index = device.index if isinstance(device, torch.device) else device
    index = torch.cuda.current_device() if index is None else index  # "cuda" alone is the current one
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)


def peak_memory(device: torch.device | int | None = None) -> int:
    """Most bytes in use at once since ``torch.cuda.reset_peak_memory_stats``, the pools of CUDA graphs counted whole.

    Reset after the calls that record (three are enough for most steps): those allocate what a replay only uses, and
    would be counted twice.
    """
    set_aside, counted = graph_pool_bytes(device)
    return torch.cuda.max_memory_allocated(device) + set_aside - counted
