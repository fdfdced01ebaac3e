"""What the layout of kernels depends on, of the GPU that a step runs on."""

from __future__ import annotations

import torch

# Multiprocessors of an H100 (SXM) and of an H200: for kernels that are generated where there is no GPU.
HOPPER_MULTIPROCESSORS = 132


def multiprocessors(device: torch.device | str) -> int:
    """How many multiprocessors a GPU has, as its driver says; those of an H200 for any device without a driver.

    Ranks lay out the same kernels because all GPUs of a cluster are of one kind.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
