"""Models of transformers whose steps branch on sizes in tensors or leave torch, where the library is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")


def vilt() -> tuple[Any, Any]:
    """Images of two widths, with masks: sizes of an interpolation are in tensors."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViltConfig(
        **sizes, vocab_size=100, max_position_embeddings=32, image_size=64, patch_size=16, num_labels=5
    )
    config.max_image_length = 12

    def batch(at: int) -> dict[str, torch.Tensor]:
        width = 48 + 16 * (at % 2)
        mask = torch.ones(2, 64, width, dtype=torch.int64)
        mask[1, :, 32:] = 0
        words = torch.randint(0, 100, (2, 9))
        pixels = {"pixel_values": torch.randn(2, 3, 64, width), "pixel_mask": mask}
        return {"input_ids": words, "attention_mask": torch.ones_like(words), **pixels, "labels": torch.rand(2, 5)}

    return transformers.ViltForQuestionAnswering(config), batch


def detr() -> tuple[Any, Any]:
    """Other numbers of objects at each call, which scipy matches with the predictions."""
    pytest.importorskip("scipy")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        **layers, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=6, num_labels=4,
    )  # fmt: skip

    def objects(count: int) -> dict[str, torch.Tensor]:
        return {"class_labels": torch.randint(0, 4, (count,)), "boxes": torch.rand(count, 4) * 0.3 + 0.2}

    def batch(at: int) -> dict[str, Any]:
        pixels = {"pixel_values": torch.randn(2, 3, 64, 64), "pixel_mask": torch.ones(2, 64, 64, dtype=torch.int64)}
        return {**pixels, "labels": [objects(1 + at % 3), objects(2)]}

    return transformers.DetrForObjectDetection(config), batch


@pytest.mark.parametrize(("build", "captures"), [(vilt, 6), (detr, 3)])
def test_training_is_that_of_eager(build: Any, captures: int) -> None:
    torch.manual_seed(0)
    model, batch = build()
    models = [model.train(), copy.deepcopy(model).train()]

    def training(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(batch: dict[str, Any]) -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager, compiled = training(models[0]), weft.compile(training(models[1]))
    for at in range(5):
        losses = []
        for step in (eager, compiled):
            torch.manual_seed(at)
            losses.append(step(batch(at)))
        assert torch.equal(losses[1], losses[0])
    states = [each.state_dict() for each in models]
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
    assert len(compiled.captures) <= captures, compiled.captures
