"""Collectives that weft does not have: operations for as long as a block, and the registry as it was after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.inductor.graph import collectives


@contextmanager
def operations(**schemas: tuple[str, Callable[..., Any]]) -> Iterator[Any]:
    """``torch.ops.weft_c10d`` with further operations: by name the rest of the schema, and the rule for fakes."""
    rows, forms = list(collectives.COLLECTIVES), dict(collectives._BY_FORM)
    library = torch.library.Library("weft_c10d", "FRAGMENT")
    for name, (signature, fake) in schemas.items():
        library.define(name + signature)
        torch.library.register_fake(f"weft_c10d::{name}", fake, lib=library)
    try:
        yield torch.ops.weft_c10d
    finally:
        collectives.COLLECTIVES[:] = rows
        collectives._BY_FORM.clear()
        collectives._BY_FORM.update(forms)
        library._destroy()


def gathered(tensor: torch.Tensor, size: int, *_: Any) -> torch.Tensor:
    """The fake of an all-gather over ``size`` ranks."""
    return tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
