"""The modules whose weights tensor parallelism shards, by their features."""

from __future__ import annotations

from torch import Tensor, nn


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a Linear with its weight transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(module.weight, Tensor)


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a Linear, an Embedding, or transformers' Conv1D."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a projection; an Embedding's input features are its rows."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape  # type: ignore[misc]
    return int(rows), int(columns)
