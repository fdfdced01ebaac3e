"""Which module's forward is running."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from weft.capture.state import State


class ModulePath:
    """Follows the modules a step enters, by their dotted paths from the outermost one.

    Attributes:
        calls: how often each module (its id) was called.
        finished: how often it returned something; a forward can also be left by an exception, as
            checkpointing does.
    """

    def __init__(self, state: State) -> None:
        self.calls: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        self._state = state
        self._stack: list[str] = []

    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with warnings.catch_warnings():
                # The hooks that torch would warn of here are the two above.
                warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self.calls[id(module)] += 1
        if id(module) not in self._state.modules:
            self._state.add(module, type(module).__name__)
        self._stack.append(self._state.modules[id(module)][1])

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.finished[id(module)] += output is not None
        self._stack.pop()
