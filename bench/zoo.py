"""Models that people train, from their libraries with random weights: Hugging Face transformers and timm.

Each is a :class:`Workload`: how to build it, what a batch of it is, and the size of batch that a user would pick on a
GPU of 140 GiB. ``tiny`` builds the same layers at toy sizes, for a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One model to train.

    Attributes:
        name: as people know it.
        family: the library it comes from, ``"hf"`` or ``"timm"``.
        batch: samples a step.
        length: tokens a sample, or pixels along each side of an image.
        settings: what the library is told beyond its own defaults.
        tiny: settings that make it small, in place of those.
        kind: the class in transformers, or the name in timm.
        dtype: of the weights. Experts are multiplied in the dtype of their weights whatever autocast says, so a
            mixture of experts is trained with bfloat16 ones.
    """

    name: str
    family: str
    kind: str
    batch: int
    length: int
    settings: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def build(self, *, tiny: bool = False, dropout: bool = True) -> nn.Module:
        """The model in training mode, on torch's default device, with weights drawn from torch's generator."""
        settings = {**self.settings, **(self.tiny if tiny else {})}
        model = _BUILDERS[self.family](self.kind, settings, dropout)
        if not dropout:
            _stop_dropout(model)
        return model.to(self.dtype).train()

    def batches(self, count: int, device: torch.device, *, tiny: bool = False) -> list[Batch]:
        """``count`` random batches, the same ones at every call: int64 tokens [batch, length], or float32 images."""
        draws = torch.Generator(device).manual_seed(0)
        samples, length = (2, 32) if tiny else (self.batch, self.length)
        integers = functools.partial(torch.randint, 1, device=device, generator=draws)
        if self.family == "hf":
            vocabulary = 256 if tiny else self.settings["vocab_size"]
            return [
                {name: integers(vocabulary, (samples, length)) for name in ("input_ids", "labels")}
                for _ in range(count)
            ]
        side = self.tiny.get("img_size", 64) if tiny else length
        classes = self.tiny["num_classes"] if tiny else 1000
        return [
            {
                "images": torch.randn(samples, 3, side, side, device=device, generator=draws),
                "labels": integers(classes, (samples,)),
            }
            for _ in range(count)
        ]

    def loss(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """The mean cross-entropy of one batch."""
        if self.family == "hf":
            return model(**batch).loss
        return F.cross_entropy(model(batch["images"]), batch["labels"])


def _transformer(kind: str, settings: dict[str, Any], dropout: bool) -> nn.Module:
    import transformers  # type: ignore[missing-import] - of the machine that measures

    architecture = getattr(transformers, kind)
    config = architecture.config_class(**settings)
    if not dropout:
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
    return architecture(config)


def _vision(kind: str, settings: dict[str, Any], dropout: bool) -> nn.Module:
    import timm  # type: ignore[missing-import] - of the machine that measures

    return timm.create_model(kind, **settings)


def _stop_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("p", "drop_prob"):  # of nn.Dropout, of timm's DropPath
            if type(getattr(module, name, None)) is float:
                setattr(module, name, 0.0)


_BUILDERS: dict[str, Callable[[str, dict[str, Any], bool], nn.Module]] = {"hf": _transformer, "timm": _vision}

_NO_CACHE = {"use_cache": False}
_BERT_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LLAMA_TINY = {**_BERT_TINY, "num_key_value_heads": 2}


def _llama_like(vocabulary: int, width: int, hidden: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        **_NO_CACHE,
    }


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": 50257, "n_embd": width, "n_layer": layers, "n_head": heads, **_NO_CACHE}


def _encoder(vocabulary: int, **more: Any) -> dict[str, Any]:
    """BERT-base sizes."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        **more,
    }


_GPT2_TINY = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
_VIT_TINY = {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_BART = {
    "vocab_size": 50265,
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    **_NO_CACHE,
}
_BART_TINY = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_SWIN_TINY = {
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 32,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 10,
}
_OPT_TINY = {"vocab_size": 256, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2}

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "llama-1b",
        "hf",
        "LlamaForCausalLM",
        2,
        2048,
        {**_llama_like(128256, 2048, 8192, 16, 32, 8), "tie_word_embeddings": True, "max_position_embeddings": 8192},
        _LLAMA_TINY,
    ),
    Workload("llama-160m", "hf", "LlamaForCausalLM", 8, 1024, _llama_like(32000, 768, 3072, 12, 12, 12), _LLAMA_TINY),
    Workload("gpt2", "hf", "GPT2LMHeadModel", 8, 512, _gpt2(768, 12, 12), _GPT2_TINY),
    Workload("gpt2-medium", "hf", "GPT2LMHeadModel", 8, 512, _gpt2(1024, 24, 16), _GPT2_TINY),
    Workload("bert-base", "hf", "BertForMaskedLM", 16, 512, _encoder(30522), _BERT_TINY),
    Workload(
        "roberta-base",
        "hf",
        "RobertaForMaskedLM",
        16,
        512,
        _encoder(50265, max_position_embeddings=514, type_vocab_size=1),
        _BERT_TINY,
    ),
    Workload(
        "distilbert",
        "hf",
        "DistilBertForMaskedLM",
        16,
        512,
        {"vocab_size": 30522},
        {"vocab_size": 256, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    Workload("albert-base", "hf", "AlbertForMaskedLM", 16, 512, _encoder(30000), {**_BERT_TINY, "embedding_size": 32}),
    Workload(
        "deberta-v3-base",
        "hf",
        "DebertaV2ForMaskedLM",
        8,
        512,
        _encoder(128100, **_DEBERTA),
        {**_BERT_TINY, "position_buckets": 8},
    ),
    Workload("electra-base", "hf", "ElectraForMaskedLM", 16, 512, _encoder(30522, embedding_size=768), _BERT_TINY),
    Workload(
        "opt-125m",
        "hf",
        "OPTForCausalLM",
        8,
        512,
        {"vocab_size": 50272, **_NO_CACHE},
        {**_OPT_TINY, "num_attention_heads": 4},
    ),
    Workload(
        "qwen2-0.5b",
        "hf",
        "Qwen2ForCausalLM",
        4,
        1024,
        {**_llama_like(151936, 896, 4864, 24, 14, 2), "tie_word_embeddings": True},
        _LLAMA_TINY,
    ),
    Workload(
        "qwen3-0.6b",
        "hf",
        "Qwen3ForCausalLM",
        4,
        1024,
        {**_llama_like(151936, 1024, 3072, 28, 16, 8), "head_dim": 128, "tie_word_embeddings": True},
        {**_LLAMA_TINY, "head_dim": 16},
    ),
    Workload(
        "mixtral-tiny",
        "hf",
        "MixtralForCausalLM",
        4,
        1024,
        {**_llama_like(32000, 1024, 3584, 4, 16, 4), "num_local_experts": 8},
        {**_LLAMA_TINY, "num_local_experts": 4},
        torch.bfloat16,
    ),
    Workload(
        "t5-small",
        "hf",
        "T5ForConditionalGeneration",
        16,
        512,
        {"vocab_size": 32128, "decoder_start_token_id": 0, **_NO_CACHE},
        {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    Workload("bart-base", "hf", "BartForConditionalGeneration", 8, 512, _BART, _BART_TINY),
    Workload("resnet50", "timm", "resnet50", 128, 224, {}, {"layers": (1, 1, 1, 1), "num_classes": 10}),
    Workload("vit-base", "timm", "vit_base_patch16_224", 64, 224, {}, _VIT_TINY),
    Workload(
        "convnext-base",
        "timm",
        "convnext_base",
        64,
        224,
        {},
        {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64), "num_classes": 10},
    ),
    Workload("swin-tiny", "timm", "swin_tiny_patch4_window7_224", 64, 224, {}, _SWIN_TINY),
    Workload("deit-base", "timm", "deit_base_distilled_patch16_224", 64, 224, {}, _VIT_TINY),
    Workload("efficientnet-b0", "timm", "efficientnet_b0", 128, 224, {}, {"num_classes": 10}),
    Workload(
        "mixer-b16",
        "timm",
        "mixer_b16_224",
        64,
        224,
        {},
        {"img_size": 32, "num_classes": 10},
    ),
    Workload("beit-base", "timm", "beit_base_patch16_224", 64, 224, {}, _VIT_TINY),
    Workload("regnety-032", "timm", "regnety_032", 128, 224, {}, {"num_classes": 10}),
    Workload("mobilenetv3-large", "timm", "mobilenetv3_large_100", 128, 224, {}, {"num_classes": 10}),
)
