"""The text: the Python source of the standard library that this interpreter came with, as bytes.

The split is by file, so no function is half in one part: a file belongs to validation where the first byte of
the SHA-256 of its path (relative to the library, with forward slashes) is divisible by ten. Tests, installed
packages and tables of characters are left out. Files come in the order of their paths, joined by a zero byte.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

VOCABULARY = 256
MAX_TRAIN_BYTES = 8_000_000
MAX_VALIDATION_BYTES = 1_000_000
LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Corpus:
    """Two 1-D uint8 tensors of bytes, and the number of files behind each."""

    train: torch.Tensor
    validation: torch.Tensor
    train_files: int
    validation_files: int


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the files under `root` (the standard library unless told) into the two parts."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.split("/")):
            parts[is_validation(path)].append((root / path).read_bytes())
    return Corpus(
        train=_as_tensor(parts[False], MAX_TRAIN_BYTES),
        validation=_as_tensor(parts[True], MAX_VALIDATION_BYTES),
        train_files=len(parts[False]),
        validation_files=len(parts[True]),
    )


def is_validation(path: str) -> bool:
    """Whether the file of that relative path belongs to validation: about one file in ten."""
    return hashlib.sha256(path.encode()).digest()[0] % 10 == 0


def _as_tensor(files: list[bytes], limit: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\0".join(files)[:limit]), dtype=torch.uint8)


def batch(
    text: torch.Tensor, step: int, rank: int, world: int, size: int, length: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step: ids and the bytes that follow them, int64 [size, length].

    All ranks draw the same `world * size` places in the text and each takes its own, so a step depends on the
    seed and the step number alone.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length - 1, (world * size,), generator=generator)
    return _windows(text, starts[rank * size : (rank + 1) * size], length)


def validation_batches(
    text: torch.Tensor, count: int, rank: int, world: int, size: int, length: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of `count` batches spread evenly over the text."""
    starts = torch.linspace(0, len(text) - length - 2, count * world * size).long().view(count, world, size)
    return [_windows(text, starts[i, rank], length) for i in range(count)]


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Bigram:
    """The next byte from the one before it: counts over a text, plus one."""

    def __init__(self, text: torch.Tensor) -> None:
        pairs = text[:-1].long() * VOCABULARY + text[1:].long()
        counts = torch.zeros(VOCABULARY**2).scatter_add(0, pairs, torch.ones(len(pairs)))
        self.log_probability = F.normalize(counts.view(VOCABULARY, VOCABULARY) + 1, p=1, dim=1).log()

    def loss(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Mean cross entropy in nats per byte."""
        return -self.log_probability[ids, labels].mean().item()
