"""Transformers of Llama-3 shape, as a workload to measure with: grouped-query attention, RMSNorm, SwiGLU, rotary
positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``width`` is the residual stream, ``hidden`` the inner width of a feed-forward block."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 128_256
    base: float = 500_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward for one token: 6 a weight, and causal attention."""
        attention = self.width * (2 * self.heads + 2 * self.key_heads) * self.head_width
        weights = self.layers * (attention + 3 * self.width * self.hidden) + self.width * self.vocabulary
        return 6.0 * weights + 6.0 * self.layers * self.width * length


SHAPES = {
    "70b": Shape(layers=80, width=8192, heads=64, key_heads=8, hidden=28_672),
    "8b": Shape(layers=32, width=4096, heads=32, key_heads=8, hidden=14_336),
    "1b": Shape(layers=16, width=2048, heads=32, key_heads=8, hidden=8192),
    "tiny": Shape(layers=2, width=256, heads=4, key_heads=2, hidden=512, vocabulary=1024),
}


class Norm(nn.Module):
    """RMS norm computed in float32, scaled in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


def angles(length: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions: each float32 [length, 1, head_width / 2]."""
    steps = torch.arange(0, shape.head_width, 2, device=device, dtype=torch.float32) / shape.head_width
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * shape.base**-steps
    return turns.cos()[:, None], turns.sin()[:, None]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each head's vector by its position's angles. x: [batch, length, heads, head_width]."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.key_heads * shape.head_width
        self.attention_norm, self.feed_norm = Norm(shape.width), Norm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        inner = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], -1, self.shape.head_width)
        query = rotated(self.query(x).view(heads), cos, sin).transpose(1, 2)
        key = rotated(self.key(x).view(heads), cos, sin).transpose(1, 2)
        value = self.value(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """Token ids in, mean cross-entropy (float32) out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels: int64 [batch, length]."""
        x = self.embedding(ids)
        cos, sin = angles(ids.shape[1], self.shape, ids.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())
