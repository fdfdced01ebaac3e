"""``torch.compile(backend="weft")`` inside the trainers of Lightning and transformers, where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft.backend
from weft.capture.graph import StepGraph

Trained = tuple[list[float], list[torch.Tensor]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph]:
    """The graphs that reach the compiler, in order."""
    torch.compiler.reset()
    seen: list[StepGraph] = []
    make = weft.backend._program
    monkeypatch.setattr(weft.backend, "_program", lambda step, mode: (seen.append(step), make(step, mode))[1])
    return seen


def same(train: Callable[[bool], Trained], graphs: list[StepGraph]) -> None:
    """Eager and compiled have the same losses and the same parameters, bit for bit."""
    losses, parameters = train(False)
    assert not graphs
    found, trained = train(True)
    assert graphs, "nothing was compiled"
    assert len(losses) > 4
    assert found == losses
    assert all(map(torch.equal, trained, parameters))


def test_lightning_with_automatic_optimization_and_logged_losses(graphs: list[StepGraph]) -> None:
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)}

        def on_train_batch_end(self, *args: Any) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def train(compiled: bool) -> Trained:
        lightning.seed_everything(0, verbose=False)
        x = torch.randn(256, 16)
        model = Regression()
        if compiled:
            model.net = torch.compile(model.net, backend="weft")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, gradient_clip_val=1.0, enable_checkpointing=False, **quiet
        )
        trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32))
        return model.losses, [p.detach().clone() for p in model.parameters()]

    same(train, graphs)


def test_the_trainer_of_transformers(graphs: list[StepGraph], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1, **sizes)
    ids = (torch.arange(64)[:, None] + torch.arange(16)) % 97
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def train(compiled: bool) -> Trained:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if compiled:
            model.compile(backend="weft")
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            max_steps=6,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, [p.detach().clone() for p in model.parameters()]

    same(train, graphs)
