"""What runs while recording is paused: for real, and out of sight of the capture's own modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from weft import torch_adapter
from weft.torch_adapter import TorchDispatchMode


@contextlib.contextmanager
def operations_for_real(count: Callable[[], None], modes: tuple[TorchDispatchMode, ...]) -> Iterator[None]:
    """Operations inside run under ``modes`` alone, each after a call of ``count``.

    The capture's modes are off, not told to let operations pass: DTensor takes a fake mode that it finds active for its
    own. It then placed the state of an optimizer by real operations on tensors of the size of whole parameters.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_adapter.real_tensors())
        for mode in (*modes, _Counting(count)):
            stack.enter_context(mode)
        yield


class _Counting(TorchDispatchMode):
    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see OpRecorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._count()
        return func(*args, **(kwargs or {}))
