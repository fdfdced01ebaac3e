"""Sizes in bytes of the values and collectives of a graph, and their text."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.node_kinds import is_collective


def tensor_bytes(val: Any) -> int | None:
    """Bytes of a fake tensor, or of nested lists of them, at the sizes of the captured call.

    Numbers count 0 bytes. None where only the data decides a size.
    """
    if isinstance(val, (list, tuple)):
        sizes = [tensor_bytes(item) for item in val]
        return None if None in sizes else sum(size or 0 for size in sizes)
    if not isinstance(val, torch.Tensor):
        return 0
    shape = [torch_adapter.hint(size) for size in val.shape]
    return None if None in shape else math.prod(size or 0 for size in shape) * val.dtype.itemsize


def collective_bytes(node: torch.fx.Node) -> int | None:
    """Bytes of the larger side of a collective, which is the whole buffer, as bandwidth tests count it.

    None where only the data decides a size.
    """
    assert is_collective(node)
    sides = [
        tensor_bytes([used.meta["val"] for used in node.all_input_nodes]),
        tensor_bytes(node.meta["val"]),
    ]
    known = [side for side in sides if side is not None]
    return max(known) if len(known) == len(sides) else None


def format_bytes(size: int) -> str:
    """``12.5 KiB``; a whole number of bytes below 1 KiB."""
    scaled = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if scaled < 1024:
            return f"{int(scaled)} B" if unit == "B" else f"{scaled:.1f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} TiB"
