"""``plan="auto"``: training by the derived plan equals training of the whole model, and what cannot be sharded is left
alone with its reason."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import weft
import weft.errors
from harness import run_ranks
from weft.distributed.dtensor import AutoPlan, ColwiseParallel, RowwiseParallel, SequenceParallel

WIDTH, HEADS, KEY_HEADS, VOCABULARY, LENGTH = 32, 8, 4, 4096, 6
DEPTH = WIDTH // HEADS


class Attention(nn.Module):
    """Grouped-query attention with a norm of each query head, as Qwen3 has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, KEY_HEADS * DEPTH), nn.Linear(WIDTH, KEY_HEADS * DEPTH)
        self.query_norm = nn.RMSNorm(DEPTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query_norm(self.query(x).unflatten(-1, (-1, DEPTH))).transpose(1, 2)
        key, value = (each(x).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for each in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Decoder(nn.Module):
    def __init__(self, *parts: Callable[[], nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block(*(make() for make in parts)) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def kinds(plan: AutoPlan) -> dict[str, str]:
    return {pattern: type(style).__name__ for pattern, style in plan.styles.items()}


def test_a_decoder_is_sharded_in_groups() -> None:
    with torch.device("meta"):
        model = Decoder(Attention, Gated)
    plan = weft.tensor_parallel_plan(model, 4)
    assert kinds(plan) == {
        "layers.*.parts.*.query": "ColwiseParallel",
        "layers.*.parts.*.key": "ColwiseParallel",
        "layers.*.parts.*.value": "ColwiseParallel",
        "layers.*.parts.*.query_norm": "SequenceParallel",
        "layers.*.parts.*.out": "RowwiseParallel",
        "layers.*.parts.*.gate": "ColwiseParallel",
        "layers.*.parts.*.up": "ColwiseParallel",
        "layers.*.parts.*.down": "RowwiseParallel",
        "embedding": "RowwiseParallel",
        "head": "ColwiseParallel",
    }
    norm = plan.styles["layers.*.parts.*.query_norm"]
    assert isinstance(norm, SequenceParallel)
    assert norm.sequence_sharding[0].dim == 2  # heads, in [batch, length, heads, depth]
    assert not plan.left_alone


def test_the_model_is_left_as_it_was() -> None:
    model = Decoder(Attention, Gated)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    weft.tensor_parallel_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())


def test_the_plan_is_the_same_in_a_fake_world() -> None:
    with weft.fake_world(8):
        assert kinds(weft.tensor_parallel_plan(Decoder(Attention, Gated), 2)) == kinds(
            weft.tensor_parallel_plan(Decoder(Attention, Gated), 4)
        )
        assert len(weft.tensor_parallel_plan(Decoder(Attention, Gated), 2).styles) == 10
        ids = torch.ones(1, 4, dtype=torch.long)
        assert len(weft.tensor_parallel_plan(Decoder(Attention, Gated), 2, (ids,)).styles) == 10


class Caching(nn.Module):
    """Keeps what it computes in its first call, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), 0
        self.register_buffer("base", torch.arange(4.0))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = self.base.exp()
        return self.down(F.gelu(self.up(x))) + self.table.sum()


def test_what_forward_keeps_is_not_kept_from_the_examination() -> None:
    model = Decoder(Caching)
    weft.tensor_parallel_plan(model, 2)
    parts = [module for module in model.modules() if isinstance(module, Caching)]
    assert [(part.calls, part.table) for part in parts] == [(0, None)] * 2


class Locked(nn.Module):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.lock = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def test_a_model_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(weft.errors.InvalidArgument, match="cannot be copied"):
        weft.tensor_parallel_plan(Locked(), 2, (torch.ones(2, WIDTH),))


# ---- what is left alone


class Feed(nn.Module):
    """Two Linears, and what an example does between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], inner: int = 64, read: int | None = None) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, inner), nn.Linear(read or inner, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Scaled(nn.Module):
    """A parameter that all features share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


class NormBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class ReadTwice(nn.Module):
    """The result of the first Linear is also added to the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(F.gelu(y)) + y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fused and split in halves": (
        lambda: Feed(lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], 128, 64),
        "is not cut as",
    ),
    "softmax over features": (lambda: Feed(lambda y: y.softmax(-1)), "is not cut as"),
    "reversed features": (lambda: Feed(lambda y: y.flip(-1)), "is not cut as"),
    "sums over features": (lambda: Feed(lambda y: y.cumsum(-1)), "is not cut as"),
    "interleaved heads": (lambda: Feed(lambda y: y.unflatten(-1, (8, -1)).mT.flatten(-2)), "is not cut as"),
    "a number of heads in the code": (lambda: Feed(lambda y: y.view(1, -1, 8, 8).flatten(2)), "part of the features"),
    "a constant for each feature": (lambda: Feed(lambda y: y * torch.ones(64)), "does not run on a part"),
    "a sum that loses marks": (
        lambda: Feed(lambda y: y + torch.nan_to_num(y, 0.0).sum(-1, keepdim=True)),
        "other numbers on a part",
    ),
    "a threshold over features": (
        lambda: Feed(lambda y: y * (y.detach() > torch.nan_to_num(y).mean(-1, keepdim=True))),
        "other numbers on a part",
    ),
    "a norm over all features": (NormBetween, "needs all features"),
    "a parameter between": (Scaled, "scale is used between"),
    "read by two": (ReadTwice, "its outputs go to"),
    "not divisible": (lambda: Feed(F.gelu, 63), "63 features of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rank_cannot_compute_alone_is_left_alone(name: str) -> None:
    make, reason = REFUSED[name]
    plan = weft.tensor_parallel_plan(Decoder(Attention, make), 2)
    up = next(pattern for pattern in plan.left_alone if pattern.endswith(".up"))
    assert reason in plan.left_alone[up]
    assert isinstance(plan.styles["layers.*.parts.*.out"], RowwiseParallel)
    assert f"{up}" in str(plan)


class Sometimes(nn.Module):
    """Only the first of two layers is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feed(F.gelu) for _ in range(2))

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        return self.layers[1](self.layers[0](x)) if both else self.layers[0](x)


def test_a_layer_that_the_example_does_not_call_is_left_alone() -> None:
    with pytest.raises(weft.errors.InvalidArgument, match=r"did not call layers\.1\.up"):
        weft.tensor_parallel_plan(Sometimes(), 2, (torch.ones(2, WIDTH),))
    plan = weft.tensor_parallel_plan(Sometimes(), 2, {"x": torch.ones(2, WIDTH), "both": True})
    assert kinds(plan) == {"layers.*.up": "ColwiseParallel", "layers.*.down": "RowwiseParallel"}


def test_fewer_key_heads_than_ranks_leave_attention_alone() -> None:
    plan = weft.tensor_parallel_plan(Decoder(Attention, Gated), 8)
    assert "layers.*.parts.*.key" in plan.left_alone
    assert isinstance(plan.styles["layers.*.parts.*.gate"], ColwiseParallel)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x))) * scale


def test_a_model_whose_input_is_not_known_needs_an_example() -> None:
    with pytest.raises(weft.errors.InvalidArgument, match="example="):
        weft.tensor_parallel_plan(Opaque(), 2)
    plan = weft.tensor_parallel_plan(Opaque(), 2, (torch.zeros(2, WIDTH), torch.ones(())))
    assert kinds(plan) == {"one": "ColwiseParallel", "two": "RowwiseParallel"}
    plan = weft.tensor_parallel_plan(Opaque(), 2, {"x": torch.zeros(2, WIDTH), "scale": torch.ones(())})
    assert kinds(plan) == {"one": "ColwiseParallel", "two": "RowwiseParallel"}


def test_an_example_that_does_not_fit_and_a_model_without_groups_are_named() -> None:
    with pytest.raises(weft.errors.InvalidArgument, match="does not run on a small input"):
        weft.tensor_parallel_plan(Opaque(), 2, (torch.zeros(2, 3),))
    with pytest.raises(weft.errors.InvalidArgument, match="no group of Linears fits"):
        weft.tensor_parallel_plan(nn.Sequential(nn.Linear(4, 3)), 2, (torch.zeros(2, 4),))


# ---- numbers


def train(model: nn.Module, batches: list[Any], compiled: bool) -> list[Tensor]:
    """Losses of three steps with clipping, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        found = model(**batch) if isinstance(batch, dict) else model(batch)
        logits = found if isinstance(found, Tensor) else found.logits
        loss = logits.logsumexp(-1).square().mean() + logits.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run = weft.compile(step, mode="bitwise") if compiled else step
    losses = [run(batch) for batch in batches]
    return [*losses, *(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())]


def own_model(name: str) -> nn.Module:
    return Decoder(Attention, Gated, tied=name == "tied")


def library_model(name: str) -> nn.Module:
    import transformers as library  # type: ignore[missing-import]

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    }
    grouped = sizes | {"num_key_value_heads": 4}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    makers: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: library.LlamaForCausalLM(library.LlamaConfig(**grouped)),
        "qwen3": lambda: library.Qwen3ForCausalLM(library.Qwen3Config(**grouped, head_dim=16)),
        "gemma": lambda: library.GemmaForCausalLM(library.GemmaConfig(**grouped, head_dim=16)),
        "bert": lambda: library.BertForMaskedLM(library.BertConfig(**sizes, **dropped)),
        "gpt2": lambda: library.GPT2LMHeadModel(
            library.GPT2Config(
                n_embd=64, n_layer=2, n_head=8, vocab_size=4096, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            )
        ),
        "vit": lambda: library.ViTForImageClassification(
            library.ViTConfig(**{**sizes, **dropped, "image_size": 32, "patch_size": 8})
        ),
    }
    return makers[name]()


def sharded_differences(rank: int, world: int, make: Callable[[str], nn.Module], names: list[str]) -> list[str]:
    """Where training by the derived plan, eager or compiled, leaves training of the whole model."""
    wrong = []
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for name in names:
        torch.manual_seed(0)
        whole = make(name).double()  # Adam turns the rounding errors of gradients that are zero into steps
        draws = torch.Generator().manual_seed(1)
        batches: list[Any] = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=draws) for _ in range(3)]
        if name == "vit":
            images = [torch.randn(2, 3, 32, 32, generator=draws, dtype=torch.float64) for _ in range(3)]
            batches = [{"pixel_values": image} for image in images]
        expected = train(copy.deepcopy(whole), batches, compiled=False)
        results = []
        for compiled in (False, True):
            model = weft.parallelize(copy.deepcopy(whole), mesh["tp"], "auto")
            results.append(train(model, batches, compiled))
        if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
            wrong.append(f"{name}: compiled is not eager")
        for at, (one, other) in enumerate(zip(results[0], expected, strict=True)):
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-8):
                wrong.append(f"{name}: result {at} is off by {(one - other).abs().max():.2e}")
    return wrong


def own_differences(rank: int, world: int, names: list[str]) -> list[str]:
    return sharded_differences(rank, world, own_model, names)


def library_differences(rank: int, world: int) -> list[str]:
    return sharded_differences(rank, world, library_model, ["llama", "qwen3", "gemma", "bert", "gpt2", "vit"])


@pytest.mark.parametrize(("world", "names"), [(2, ["own", "tied"]), (4, ["tied"])])
def test_training_by_the_derived_plan_equals_the_whole_model(world: int, names: list[str]) -> None:
    assert run_ranks(own_differences, world, names, timeout=150) == [[]] * world


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_library_models_by_the_derived_plan_equal_the_whole_model() -> None:
    assert run_ranks(library_differences, 2, timeout=240) == [[]] * 2
