"""Functions compiled by ``torch.jit.script``, while a step is captured.

TorchScript's executor measures the tensors that a function is called with and then fuses it by a compiler of its own.
On fake tensors both go wrong: what was fused for a GPU reads memory that is not there. A capture runs the Python
function that was compiled instead, whose operations it can see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter


@contextlib.contextmanager
def script_functions_as_written() -> Iterator[None]:
    """While active, a scripted function is the Python function it was made from, where it was made from one."""
    kind: Any = torch.jit.ScriptFunction
    compiled = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        written = torch_adapter.scripted_from(function)
        return compiled(function, *args, **kwargs) if written is None else written(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = compiled
