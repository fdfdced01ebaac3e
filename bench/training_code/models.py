"""Models as people write them: recurrent, convolutional, attention, graphs, quantization, checkpointing, ties."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from coverage_case import CALLS, Trained
from torch import nn
from torch.nn.utils import parametrizations, rnn, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .pieces import adamw, convnet, features, images, mlp, piece, tokens, trained


def _language_model(model: nn.Module) -> Trained:
    optimizer = adamw(model)

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, tokens(), model)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8, padding_idx=0)
        options: dict[str, Any] = {"batch_first": True, "num_layers": 2, "dropout": 0.1}
        cells = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "bidirectional": nn.LSTM, "packed": nn.LSTM}
        both = kind == "bidirectional"
        self.kind, self.cell = kind, cells[kind](8, 8, bidirectional=both, **options)
        self.head = nn.Linear(16 if both else 8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        if self.kind == "packed":
            packed = rnn.pack_padded_sequence(h, torch.tensor([11, 9, 7, 5]), batch_first=True)
            out, _ = rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=h.shape[1])
        else:
            out, _ = self.cell(h)
        return self.head(out)


@piece("lstm", "gru", "rnn", "bidirectional", "packed")
def recurrent(kind: str) -> Trained:
    return _language_model(Recurrent(kind))


@piece("carried tuple", "carried attribute", "cell in a loop")
def recurrent_state(kind: str) -> Trained:
    """Truncated back-propagation: the hidden state goes from call to call."""
    embed, cell, head = nn.Embedding(32, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 32)
    step_cell = nn.LSTMCell(8, 8)
    optimizer = adamw(embed, cell, head, step_cell)
    carried: dict[str, Any] = {"state": (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))}

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if kind == "cell in a loop":
            h = c = torch.zeros(4, 8)
            outs = []
            for at in range(ids.shape[1] - 1):
                h, c = step_cell(embed(ids[:, at]), (h, c))
                outs.append(h)
            out = torch.stack(outs, 1)
        else:
            state = tuple(each.detach() for each in carried["state"])
            out, carried["state"] = cell(embed(ids[:, :-1]), state)
        loss = F.cross_entropy(head(out).transpose(1, 2), ids[:, 1:])
        loss.backward()
        optimizer.step()
        if kind == "carried attribute":
            carried["state"] = tuple(each.detach() for each in carried["state"])
        return loss.detach()

    return trained(train_step, tokens(), embed, cell, head)


class Decoder(nn.Module):
    """A GPT of one layer in the style of the small repositories."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wte, self.wpe = nn.Embedding(32, 16), nn.Embedding(16, 16)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))
        self.head = nn.Linear(16, 32, bias=False)
        if kind == "tied":
            self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=False)
        for name, p in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(16, dim=2)
        q, k, v = (each.view(b, t, 4, c // 4).transpose(1, 2) for each in (q, k, v))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        elif self.kind == "einsum":
            a = torch.einsum("bhqd,bhkd->bhqk", q, k).div(2.0)
            y = torch.einsum("bhqk,bhkd->bhqd", a.masked_fill(self.mask[:, :, :t, :t] == 0, -1e9).softmax(-1), v)
        else:
            a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            a = a.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(a, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.size(1) <= 16, f"Cannot forward a sequence of length {ids.size(1)}"
        x = self.wte(ids) + self.wpe(torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device))
        if self.kind == "checkpointed":
            x = checkpoint(self.block, x, use_reentrant=False)
        elif self.kind == "reentrant":
            x = checkpoint(self.block, x, use_reentrant=True)
        else:
            x = self.block(x)
        return self.head(self.ln_f(x))


@piece("plain", "tied", "sdpa", "einsum", "checkpointed", "reentrant")
def decoder(kind: str) -> Trained:
    return _language_model(Decoder(kind))


@piece("encoder", "multihead", "padded", "transformer")
def torch_transformers(kind: str) -> Trained:
    embed, head = nn.Embedding(32, 16), nn.Linear(16, 32)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
    both = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    optimizer = adamw(embed, head, encoder, attention, both)

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        x, target = embed(ids[:, :-1]), ids[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        if kind == "encoder":
            x = encoder(x, mask=causal, is_causal=True)
        elif kind == "multihead":
            x = attention(x, x, x, attn_mask=causal, need_weights=False)[0]
        elif kind == "padded":
            x = encoder(x, src_key_padding_mask=ids[:, :-1] == 0)
        else:
            x = both(x, x, tgt_mask=causal, tgt_is_causal=True)
        loss = F.cross_entropy(head(x).flatten(0, 1), target.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, tokens(), embed, head, encoder, attention, both)


class Rotary(nn.Module):
    """A modern decoder layer: RMSNorm, rotary positions cached for the longest length, grouped heads, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.w1, self.w2, self.w3 = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.max_cached = 0

    def freqs(self, length: int) -> torch.Tensor:
        if length > self.max_cached:
            angles = torch.outer(torch.arange(length).float(), 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4)))
            self.register_buffer("cached", torch.polar(torch.ones_like(angles), angles), persistent=False)
            self.max_cached = length
        return self.cached[:length]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.freqs(x.shape[1])[None, :, None]).flatten(3).type_as(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        h = self.norm1(x)
        q, k, v = (each.unflatten(-1, (-1, 4)) for each in (self.q(h), self.k(h), self.v(h)))
        q, k = self.rotate(q), self.rotate(k)
        k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return (x + self.w2(F.silu(self.w1(h)) * self.w3(h))) @ self.embed.weight.t()


@piece()
def rotary_decoder() -> Trained:
    return _language_model(Rotary())


class Experts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.gate, self.head = nn.Embedding(32, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 32)
        self.experts = nn.ModuleList(mlp(8, 16, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).view(-1, 8)
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            if self.kind == "dense":
                out = out + expert(x) * (weights * (chosen == at)).sum(-1, keepdim=True)
                continue
            rows, slots = torch.where(chosen == at)
            if self.kind == "skip empty" and rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return self.head(out).view(*ids.shape, -1)


@piece("dense", "gathered", "skip empty")
def mixture_of_experts(kind: str) -> Trained:
    return _language_model(Experts(kind))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)])
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.down[0](x))
        x = self.up(F.silu(self.norm(self.down[1](skip))))
        return self.out(torch.cat([F.interpolate(x, size=skip.shape[-2:], mode="bilinear"), skip], dim=1))


@piece("segmentation", "channels last", "upsampled", "pixel shuffle")
def image_to_image(kind: str) -> Trained:
    model: nn.Module = Unet()
    if kind == "upsampled":
        model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(8, 4, 1))
    elif kind == "pixel shuffle":
        model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.PixelShuffle(2))
    if kind == "channels last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = adamw(model)

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        if kind == "channels last":
            x = x.to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), y[:, None, None].expand(-1, 16, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, images(), model)


@piece(
    "resnet",
    "spectral norm",
    "weight norm",
    "parametrized",
    "frozen norm",
    "sync norm",
    "pooling",
    "sequential checkpoint",
)
def convolutional(kind: str) -> Trained:
    model: nn.Module = convnet()
    if kind == "spectral norm":
        model[0] = spectral_norm(model[0])  # type: ignore[index, operator]
    elif kind == "weight norm":
        model[0] = weight_norm(model[0])  # type: ignore[index, operator]
    elif kind == "parametrized":
        parametrizations.weight_norm(model[-1])  # type: ignore[index]
    elif kind == "frozen norm":
        for each in model.modules():
            if isinstance(each, nn.BatchNorm2d):
                each.eval().requires_grad_(False)
    elif kind == "sync norm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif kind == "pooling":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.AvgPool2d(3), nn.Flatten(), nn.LazyLinear(4))
        model(torch.zeros(1, 3, 16, 16))
    optimizer = adamw(model)

    def train_step(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "sequential checkpoint":
            logits = checkpoint_sequential(model, 3, batch[0], use_reentrant=False)
        else:
            logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), (logits.argmax(1) == batch[1]).float().mean()

    return trained(train_step, images(), model)


@piece("gcn", "gat", "scatter", "sparse", "edges vary")
def graph_networks(kind: str) -> Trained:
    nodes, first, second = 10, nn.Linear(8, 16), nn.Linear(16, 4)
    score = nn.ModuleDict({"16": nn.Linear(32, 1), "4": nn.Linear(8, 1)})
    optimizer = adamw(first, second, score)
    draw = torch.Generator().manual_seed(6)
    sizes = (20, 24, 28) if kind == "edges vary" else (20,) * CALLS
    batches = [(torch.randn(nodes, 8, generator=draw), torch.randint(0, nodes, (2, n), generator=draw)) for n in sizes]

    def propagate(h: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        if kind == "sparse":
            adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (nodes, nodes))
            return torch.sparse.mm(adjacency, h)
        if kind == "gat":
            e = F.leaky_relu(score[str(h.shape[1])](torch.cat([h[source], h[target]], -1))).squeeze(-1)
            e = (e - e.max()).exp()
            total = torch.zeros(nodes).index_add(0, target, e)
            return torch.zeros_like(h).index_add(0, target, h[source] * (e / total[target])[:, None])
        if kind == "scatter":
            index = target[:, None].expand(-1, h.shape[1])
            return torch.zeros_like(h).scatter_reduce(0, index, h[source], reduce="mean")
        degree = torch.bincount(target, minlength=nodes).clamp(min=1).float()
        return torch.zeros_like(h).index_add_(0, target, h[source]) / degree[:, None]

    def train_step(batch: Any) -> torch.Tensor:
        h, edges = batch
        out = propagate(second(F.relu(propagate(first(h), edges))), edges)
        loss = F.cross_entropy(out, torch.arange(nodes) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, batches, first, second, score)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features) * 0.01),
            nn.Parameter(torch.zeros(base.out_features, rank)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(F.dropout(x, 0.1, self.training), self.a), self.b) * 2.0


class Rounded(torch.autograd.Function):
    """Quantization with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return (x / scale).round().clamp(-127, 127) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Quantized(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, Rounded.apply(self.weight), self.bias)


class StochasticDepth(nn.Module):
    def __init__(self, inner: nn.Module, p: float = 0.5) -> None:
        super().__init__()
        self.inner, self.p = inner, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x + self.inner(x)
        keep = torch.empty(x.shape[0], 1).bernoulli_(1 - self.p).div_(1 - self.p)
        return x + self.inner(x) * keep


class Codebook(nn.Module):
    """A vector quantizer with moving averages and counts, as VQ-VAE repositories have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(8, 8))
        self.register_buffer("size", torch.zeros(8))
        self.register_buffer("average", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.cdist(x, self.embed).argmin(1)
        one_hot = F.one_hot(index, 8).type(x.dtype)
        if self.training:
            self.size.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.average.data.mul_(0.9).add_(one_hot.t() @ x.detach(), alpha=0.1)
            self.embed.data.copy_(self.average / (self.size + 1e-5).unsqueeze(1))
        return x + (F.embedding(index, self.embed) - x).detach()


BLOCKS: list[tuple[str, Any]] = [
    ("lora", lambda: nn.Sequential(Lora(nn.Linear(8, 8)), nn.ReLU(), Lora(nn.Linear(8, 4)))),
    ("quantized", lambda: nn.Sequential(Quantized(8, 16), nn.ReLU(), Quantized(16, 4))),
    ("stochastic depth", lambda: nn.Sequential(StochasticDepth(mlp(8, 16, 8)), nn.Linear(8, 4))),
    ("codebook", lambda: nn.Sequential(nn.Linear(8, 8), Codebook(), nn.Linear(8, 4))),
    (
        "maxout",
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.Unflatten(1, (8, 2)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 4)
        ),
    ),
    ("bilinear", lambda: Bilinear()),
    ("embedding bag", lambda: Bagged()),
    ("hooks", lambda: Hooked()),
    ("jit script", lambda: torch.jit.script(mlp(8, 16, 4))),
    ("double", lambda: mlp(8, 16, 4).double().float()),
    (
        "dropout kinds",
        lambda: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.2), nn.SELU(), nn.Dropout(0.3), nn.Linear(8, 4)),
    ),
    ("batch norm 1d", lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 4))),
    (
        "instance norm",
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(8, 4)
        ),
    ),
]


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(8, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(-1))


class Bagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(8, 4, mode="sum"), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.bag(x.argsort(-1)[:, :3])


class Hooked(nn.Module):
    """Activations collected by a forward hook, as feature extractors and auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = mlp(8, 16, 4), {}
        self.body[1].register_forward_hook(lambda module, args, out: self.seen.__setitem__("relu", out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        return out + self.seen["relu"].mean()


@piece(*BLOCKS)
def blocks(variant: tuple[str, Any]) -> Trained:
    model = variant[1]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train_step(batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, features(), model)
