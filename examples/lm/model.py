"""A small transformer over bytes: RMSNorm, rotary positions, causal attention, SwiGLU.

Every module that owns a parameter or a buffer has `reset_parameters`, so the model can be built on the meta
device and initialised after it is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes. The defaults make 3.2 million parameters."""

    vocabulary: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 704
    length: int = 256


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated against each other."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(length, width // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        length, half = self.cos.shape
        frequency = 10_000.0 ** -(torch.arange(half, device=self.cos.device) / half)
        angle = torch.outer(torch.arange(length, device=self.cos.device), frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, length, width of a head] -> the same, rotated by position."""
        length = x.size(-2)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(config.length, config.width // config.heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """ids int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte, computed in float32."""
    return F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def sample(model: Transformer, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> bytes:
    """`prompt` and `count` more bytes drawn from the model, one at a time."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        ids = torch.tensor([text[-model.config.length :]], device=device)
        chance = (model(ids)[0, -1].float() / temperature).softmax(-1).cpu()
        text.append(int(torch.multinomial(chance, 1, generator=generator)))
    return bytes(text)
