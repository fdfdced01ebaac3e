"""Functions of torch's that a program has replaced by its own, which call the original.

    original = torch.Tensor.exp
    torch.Tensor.exp = lambda tensor: original(tensor) * 2

Torch tells a function mode which function is called by its name. It finds the user's there, when the user's has called
the original. A mode that calls it, as modes do, runs it twice.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from weft.source_files import is_user_file


def original_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function of torch's that runs; called by a mode's ``__torch_function__`` with the function that it got."""
    if type(func) is not types.FunctionType or not is_user_file(func.__code__.co_filename):
        return func
    caller = sys._getframe(2)
    if caller.f_code is not torch.overrides.handle_torch_function.__code__:  # called by C code
        name = next((name for name, value in vars(torch.Tensor).items() if value is func), None)
        return func if name is None else getattr(super(torch.Tensor, torch.Tensor), name)
    frame = caller.f_back
    if frame is None or frame.f_code is func.__code__:  # one of the user's that asks modes itself
        return func
    # A function of torch's in Python. It gives all of its arguments, so its defaults do not matter.
    cells = tuple(types.CellType(frame.f_locals[name]) for name in frame.f_code.co_freevars)
    return types.FunctionType(frame.f_code, frame.f_globals, None, None, cells)
