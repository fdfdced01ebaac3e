"""Attributes that a step looks for on the user's tensors and does not find: ``hasattr(p, "main_grad")``.

Python asks a class for ``__getattr__`` when an attribute is missing. While a step is captured, tensors have one that
notes who was asked for what. That the attribute is missing is a guard then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.state.origin import is_walked_module
from weft.capture.user_code import called_by_user
from weft.short_tracebacks import users_mistake


@contextlib.contextmanager
def missing_attributes_noted(note: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Inside, ``note`` is called with tensors and the names of attributes that the user's code, that of libraries and
    of weft's wrappers included, does not find on them in this thread. What torch asks for its own ends does not count.
    """
    thread = threading.get_ident()

    def missing(tensor: torch.Tensor, name: str) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__")
        if threading.get_ident() == thread and (called_by_user() or is_walked_module(asks)):
            note(tensor, name)
        kind = torch.Tensor if isinstance(tensor, FakeTensor) else type(tensor)  # as eager says it
        text = f"{kind.__name__!r} object has no attribute {name!r}"
        # Python suggests names of ``obj``: its class has the same. The tensor would outlive the capture with the error.
        raise users_mistake(AttributeError(text, name=name, obj=kind))

    setattr(torch.Tensor, "__getattr__", missing)  # noqa: B010
    try:
        yield
    finally:
        delattr(torch.Tensor, "__getattr__")
