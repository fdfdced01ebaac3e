"""One training run of the demo: a sharded model, its optimizer, its step, and how they are made from a seed.

The same run in three kinds, which differ in who shards and whether the step is compiled:

    compiled   weft.fully_shard, and the step is decorated with weft.compile
    eager      weft.fully_shard, the step runs as it is written
    peer       torch.distributed.fsdp.fully_shard, the step runs as it is written
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import weft
from lm.data import Corpus, batch, validation_batches
from lm.model import Config, Transformer, next_byte_loss

Kind = Literal["compiled", "eager", "peer"]
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """How long, how much at once, how fast. `batch` counts the sequences of one rank."""

    steps: int = 320
    batch: int = 4
    peak_rate: float = 3e-3
    warmup: int = 30
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0


class Trainer:
    """A model and all that it takes to train it by one step at a time."""

    def __init__(
        self,
        kind: Kind,
        config: Config,
        settings: Settings,
        corpus: Corpus,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.settings = settings
        self.corpus = corpus
        self.device = device
        self.rank, self.world = mesh.get_local_rank(), mesh.size()
        self.length = config.length
        torch.manual_seed(settings.seed)
        self.model = (peer_model if kind == "peer" else weft_model)(config, mesh, device)
        self.optimizer = AdamW(
            self.model.parameters(),
            lr=settings.peak_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        step = make_step(self.model, self.optimizer, settings.max_norm)
        self.step: Step = weft.compile(step) if kind == "compiled" else step
        self.done = 0

    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the next step: the loss of this rank's part of the batch, the norm of the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.done, self.settings)
        ids, labels = batch(
            self.corpus.train,
            self.done,
            self.rank,
            self.world,
            self.settings.batch,
            self.length,
            self.settings.seed,
        )
        self.done += 1
        return self.step(ids.to(self.device), labels.to(self.device))

    @torch.no_grad()
    def validate(self, batches: int) -> float:
        """Mean loss over all ranks, nats per byte, on `batches` batches spread over the validation text."""
        parts = validation_batches(
            self.corpus.validation, batches, self.rank, self.world, self.settings.batch, self.length
        )
        losses = [next_byte_loss(self.model, ids.to(self.device), labels.to(self.device)) for ids, labels in parts]
        return mean_over_ranks(torch.stack(losses).mean())

    def unsharded(self) -> Transformer:
        """A plain copy of the model with whole weights. All ranks must call it."""
        state = {name: whole(value) for name, value in self.model.state_dict().items()}
        with torch.device(self.device):
            plain = Transformer(self.model.config)
        plain.load_state_dict(state)
        return plain


def make_step(model: Transformer, optimizer: Optimizer, max_norm: float) -> Step:
    """An ordinary training step."""

    def train_step(ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = next_byte_loss(model, ids, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), whole(norm)

    return train_step


def weft_model(config: Config, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """The model sharded by weft, bottom-up, from the meta device: no rank ever holds the whole of it."""
    with torch.device("meta"):
        model = Transformer(config)
    policy = weft.MixedPrecisionPolicy(**precision(device))
    for block in model.blocks:
        weft.fully_shard(block, mesh=mesh, mp_policy=policy)
    weft.fully_shard(model, mesh=mesh, mp_policy=policy)
    weft.materialize(model, device=device)
    return model


def peer_model(config: Config, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """The same weights sharded by torch. Built whole: torch draws other numbers for a sharded model."""
    with device:
        model = Transformer(config)
    policy = fsdp.MixedPrecisionPolicy(**precision(device))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def precision(device: torch.device) -> dict[str, Any]:
    """On a GPU compute in bfloat16 and reduce in float32; on a CPU all is float32."""
    if device.type == "cuda":
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return {}


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < settings.warmup:
        return settings.peak_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.peak_rate * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, progress))))


def whole(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a DTensor stands for; any other tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
