"""Settings of torch for the running thread that a step leaves changed, as ``torch.set_grad_enabled(False)`` does.

Each attempt at a capture begins with the settings of the call. A compiled step runs no Python: it would change them at
its first call only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.errors import OutsideEffect

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def settings_kept(step: Callable[..., Any]) -> Iterator[None]:
    """Around a run of a step: afterwards the settings are as before.

    Raises:
        OutsideEffect: the step has changed one of them, and ended well.
    """
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    changed = ""
    try:
        yield
    finally:
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                changed = changed or name
                write(before[name])
    if changed:
        code = getattr(inspect.unwrap(step), "__code__", None)
        place = type(step).__qualname__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        raise OutsideEffect(f"leaves {changed} changed for what runs after it,", place)


def _autocast_enabled(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    read = lambda: torch.is_autocast_enabled(device)
    return read, lambda enabled: torch.set_autocast_enabled(device, enabled)


def _autocast_dtype(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: torch.get_autocast_dtype(device), lambda dtype: torch.set_autocast_dtype(device, dtype)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    **{f"torch.is_autocast_enabled({each!r})": _autocast_enabled(each) for each in _DEVICES},
    **{f"torch.get_autocast_dtype({each!r})": _autocast_dtype(each) for each in _DEVICES},
    "torch.is_autocast_cache_enabled()": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}
