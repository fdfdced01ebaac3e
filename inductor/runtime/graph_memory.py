"""Peak GPU memory of a program that replays CUDA graphs.

``torch.cuda.max_memory_allocated`` does not see it. A replay allocates nothing: it uses the graph's private pool, which
was reserved at the recording, and torch counts of that pool only the tensors that are still alive.
"""

from __future__ import annotations

import torch


def graph_pool_bytes(device: torch.device | int | None = None) -> tuple[int, int]:
    """Bytes of the CUDA graph pools on a GPU: (reserved, of which torch counts as allocated)."""
    index = device.index if isinstance(device, torch.device) else device
    index = torch.cuda.current_device() if index is None else index  # "cuda" alone is the current one
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)


def peak_memory(device: torch.device | int | None = None) -> int:
    """Peak bytes in use since ``torch.cuda.reset_peak_memory_stats``, with the CUDA graph pools counted whole.

    Reset after the calls that record (three are enough for most steps). Their allocations in the pools would be counted
    twice.
    """
    reserved, counted = graph_pool_bytes(device)
    return torch.cuda.max_memory_allocated(device) + reserved - counted
