"""Training steps of the usual kinds of models, at sizes of real ones, captured without computing anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step


class LlamaBlock(nn.Module):
    """Attention with grouped queries and rope, SwiGLU, RMSNorm before both."""

    def __init__(self, dim: int = 2048, heads: int = 32, groups: int = 8, hidden: int = 8192) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, dim // heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(2))
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q = self._heads(self.q(y), self.heads)
        k, v = (self._heads(part, self.groups) for part in self.kv(y).chunk(2, dim=-1))
        cos, sin = _rotation(x.shape[1], self.size)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.size)).transpose(1, 2)


def _rotation(length: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-two, one], dim=-1) * sin).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 32000, dim: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.block = LlamaBlock(dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embedding(ids))))


class Block(nn.Module):
    """Of GPT-2 (causal, with dropout) or of a vision transformer."""

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.o(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        grown = F.gelu(self.up(self.norms[1](x)), approximate="tanh" if self.causal else "none")
        return x + F.dropout(self.down(grown), self.dropout, self.training)


class GPT2(nn.Module):
    def __init__(self, vocabulary: int = 50257, dim: int = 768, length: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.block, self.norm = Block(dim, dim // 64, 0.1, causal=True), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.block(F.dropout(x, 0.1, self.training))))


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 768, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, 197, dim))
        self.block, self.norm = Block(dim, dim // 64, 0.0, causal=False), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


class ConvNet(nn.Module):
    """The stem of a ResNet and one residual block with its shortcut."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 1, 1, bias=False), nn.BatchNorm2d(2 * width),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(width, 2 * width, 1, 2, bias=False), nn.BatchNorm2d(2 * width))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        return self.head(F.relu(self.block(x) + self.short(x)).mean((2, 3)))


class Recommender(nn.Module):
    """DLRM: bags of rows of tables and dense features, their products in pairs, two perceptrons."""

    def __init__(self, tables: int = 8, rows: int = 100_000, dim: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, dim), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 1024), nn.ReLU(), nn.Linear(1024, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        dense = self.dense(features)
        bags = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        rows = torch.stack([dense, *(bag.to(dense.dtype) for bag in bags)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1))


class Experts(nn.Module):
    """A mixture of experts that each token is sent to two of, as every token's rows gathered by expert."""

    def __init__(self, dim: int = 1024, hidden: int = 2048, experts: int = 8, capacity: int = 1024) -> None:
        super().__init__()
        self.capacity = capacity
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)[: self.up.shape[0] * self.capacity]
        rows = tokens[order // 2].view(self.up.shape[0], self.capacity, -1)
        gate, up = torch.bmm(rows, self.up.to(rows.dtype)).chunk(2, dim=-1)
        made = torch.bmm(F.silu(gate) * up, self.down.to(rows.dtype)).flatten(0, 1)
        made = made * weights.flatten()[order].unsqueeze(-1).to(made.dtype)
        return x + torch.zeros_like(tokens, dtype=made.dtype).index_add(0, order // 2, made).view_as(x)


def _tokens(model: nn.Module, vocabulary: int, batch: int, length: int) -> tuple[nn.Module, list[Tensor], Callable]:
    ids = torch.zeros(batch, length, dtype=torch.long)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())

    return model, [ids, ids.clone()], loss


def _images(model: nn.Module, batch: int) -> tuple[nn.Module, list[Tensor], Callable]:
    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    return model, [torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)], loss


def _clicks(model: nn.Module, batch: int) -> tuple[nn.Module, list[Tensor], Callable]:
    def loss(features: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(features, ids).float().squeeze(1), clicked)

    return model, [torch.zeros(batch, 13), torch.zeros(batch, 8, 4, dtype=torch.long), torch.zeros(batch)], loss


def _squares(model: nn.Module, batch: int, length: int, dim: int) -> tuple[nn.Module, list[Tensor], Callable]:
    def loss(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    return model, [torch.zeros(batch, length, dim)], loss


_MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor], Callable]]] = {
    "llama": lambda: _tokens(Llama(), 32000, 2, 2048),
    "gpt2": lambda: _tokens(GPT2(), 50257, 8, 1024),
    "vit": lambda: _images(VisionTransformer(), 64),
    "convnet": lambda: _images(ConvNet(), 64),
    "dlrm": lambda: _clicks(Recommender(), 8192),
    "moe": lambda: _squares(Experts(), 4, 1024, 1024),
}

EXAMPLES = list(_MODELS)


def example(name: str) -> StepGraph:
    """A whole step of ``name``: forward and backward under bfloat16 autocast, clipping, AdamW."""
    with fake_world(1):
        with torch.device("cuda"):
            model, arguments, loss_of = _MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(*args: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(*args)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return capture_step(step, tuple(arguments)).graph
