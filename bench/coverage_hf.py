"""Cases of ``model_coverage.py``: Hugging Face architectures in tiny configurations, in training mode with dropout.

Every architecture of the library's own tables of models is tried. A configuration is made tiny by the names of its
fields, so no list of models is kept here. What cannot be built or run eagerly in that size is not counted.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers  # type: ignore[missing-import] - of the machine that measures
from coverage_case import Case, Trained
from transformers.models.auto import configuration_auto, modeling_auto  # type: ignore[missing-import]

BATCH, TOKENS, LABELS, VOCABULARY, IMAGE, SAMPLES = 2, 16, 4, 128, 32, 4000

# The library's table of models, and the kind of batch that its models train on.
TABLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
# Sequence classifiers of architectures with a language-model head above are the same body, so they are left out.
SAME_BODY = ("causal", "masked", "seq2seq")

SMALL: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "embedding_size"], 32),
    **dict.fromkeys(["word_embed_proj_dim", "input_dim", "conv_dim_out", "output_hidden_size", "emb_dim"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_encoder_layers", "num_decoder_layers", "num_blocks"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "multi_query_group_num"], 2),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"], 64
    ),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"], 64),
    **dict.fromkeys(["head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_head"], 8),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "n_group", "topk_group"], 2),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["num_labels"], LABELS),
    **dict.fromkeys(["first_k_dense_replace"], 1),
    "image_size": IMAGE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def hf_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    bodies: set[str] = set()
    for kind, table in TABLES.items():
        for architecture, names in getattr(modeling_auto, table).items():
            if kind in SAME_BODY:
                bodies.add(architecture)
            elif kind == "sequence" and architecture in bodies:
                continue
            for name in [names] if isinstance(names, str) else names[:1]:
                found[f"{kind}/{architecture}"] = functools.partial(_case, kind, architecture, name)
    return found


def _case(kind: str, architecture: str, name: str) -> Trained:
    transformers.logging.set_verbosity_error()
    config = small_config(configuration_auto.CONFIG_MAPPING[architecture])
    model = getattr(transformers, name)(config).train()
    if sum(each.numel() for each in model.parameters()) > 30e6:
        raise ValueError("not made small by the names of its fields")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [_batch(kind, model, torch.Generator().manual_seed(at)) for at in range(3)]

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trained(step, batches, lambda: dict(model.state_dict()), model, loss_of)


def small_config(kind: Any) -> Any:
    """A tiny configuration of a class: its fields by the names in ``SMALL``, those of inner configurations too."""
    return kind(**_small_fields(kind))


def _small_fields(kind: Any) -> dict[str, Any]:
    default = kind()
    fields: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if key in SMALL and isinstance(value, (int, type(None))) and not isinstance(value, bool):
            if value is None and key not in ("head_dim", "num_key_value_heads"):
                continue
            fields[key] = SMALL[key]
    for key, inner in getattr(kind, "sub_configs", {}).items():
        if isinstance(getattr(default, key, None), transformers.PretrainedConfig):
            inner = type(getattr(default, key))
            fields[key] = _small_fields(inner)
            if "model_type" in inner.__dict__:
                fields[key]["model_type"] = inner.model_type
    return fields


def _batch(kind: str, model: Any, draw: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = lambda: torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=draw)
    if kind in ("causal", "masked", "seq2seq", "sequence"):
        ids = tokens()
        labels = torch.randint(0, 2, (BATCH,), generator=draw) if kind == "sequence" else tokens()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if kind == "image":
        config = model.config
        size = getattr(config, "image_size", IMAGE)
        size = size if isinstance(size, int) else IMAGE
        pixels = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=draw)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (BATCH,), generator=draw)}
    heard = model.main_input_name
    if heard == "input_values":
        sound = torch.randn(BATCH, SAMPLES, generator=draw)
    else:
        bins = next(
            (getattr(model.config, key) for key in ("num_mel_bins", "feature_size") if hasattr(model.config, key)), 80
        )
        sound = torch.randn(BATCH, 64, bins, generator=draw)
    labels = (
        torch.randint(3, 20, (BATCH, 4), generator=draw)
        if kind == "ctc"
        else torch.randint(0, 2, (BATCH,), generator=draw)
    )
    return {heard: sound, "labels": labels}
