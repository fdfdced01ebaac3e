"""The module whose forward is running, for the metadata of nodes and for counting hooks.

Hooks on all modules, which only the capturing thread sees, keep a stack of the modules that a step has entered. The
recorder asks for the path of the innermost one at each node.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.state.reachable_state import ReachableState


def _made_nothing(module: Any) -> bool:
    return False


class ModulePath:
    """Follows the modules a step enters, by their dotted paths from the outermost one.

    Attributes:
        calls: how often each module was called, by its id.
        finished: how often its forward returned a value. An exception can also end a forward, as checkpointing does.
    """

    def __init__(self, state: ReachableState) -> None:
        self.calls: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        self._state = state
        self._is_made: Callable[[Any], bool] = _made_nothing
        self._stack: list[str] = []

    def current(self) -> str:
        """Dotted path of the innermost running module, "" outside of modules."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def followed(self, is_made: Callable[[Any], bool] = _made_nothing) -> Iterator[None]:
        """While active, calls of modules by this thread are followed.

        Args:
            is_made: whether the step made a module.
        """
        before = self._is_made
        self._is_made = is_made
        try:
            with torch_adapter.around_module_calls(self._enter, self._leave):
                yield
        finally:
            self._is_made = before  # which may hold the capture; this object outlives it

    def _enter(self, module: torch.nn.Module) -> None:
        self.calls[id(module)] += 1
        known = self._state.modules.get(id(module))
        if known is None and self._is_made(module):  # its tensors are values of the step, no state of later calls
            self._stack.append(type(module).__name__)
            return
        if known is None:
            self._state.add(module, type(module).__name__)
        self._stack.append(self._state.modules[id(module)][1])

    def _leave(self, module: torch.nn.Module, output: Any) -> None:
        self.finished[id(module)] += output is not None
        self._stack.pop()
