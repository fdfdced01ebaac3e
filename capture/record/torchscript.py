"""Functions and modules compiled by ``torch.jit.script``, while a step is captured.

TorchScript's executor profiles the tensors that a function is called with and then fuses it by a compiler of its own.
On fake tensors both go wrong: a kernel that was fused for a GPU reads memory that does not exist. A capture runs the
Python function from which the script was compiled, so that it sees the operations.

A scripted module is refused. Its operations could be seen: the executor dispatches them, and without its optimizations
it takes fake tensors. But the graph would not have eager's bits. From the second call on the executor takes gradients
by formulas of its own (of ``tanh``, ``pow``, ``softplus``). Their results differ in the last bits from those of the
first call, which are autograd's. So the numbers depend on how often the module was called, and with which shapes: that
is state of the executor that no graph repeats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.user_code import user_line
from weft.errors import ScriptedModule
from weft.thread_patches import present, replaced


@contextlib.contextmanager
def script_functions_uncompiled() -> Iterator[None]:
    """While active, a call of a scripted function runs the Python function that it was compiled from, if any.

    Raises:
        ScriptedModule: inside, where a method of a scripted module is called.
    """
    kind: Any = torch.jit.ScriptFunction
    method: Any = torch.ScriptMethod  # type: ignore[attr-defined]
    compiled = present(kind, "__call__")

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = torch_adapter.scripted_from(function)
        return compiled(function, *args, **kwargs) if source is None else source(*args, **kwargs)

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        raise ScriptedModule(function.owner._type().name(), user_line())

    with replaced(kind, "__call__", call), replaced(method, "__call__", refuse):
        yield
