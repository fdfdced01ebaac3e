"""Every registered hook runs in the trace, or the capture fails by naming it.

Hooks need no special treatment to be captured: the recorder sees what they do where autograd runs them. What could go
wrong is that one silently does not run. So each is counted while the step is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.modules import ModulePath
from weft.capture.state import State
from weft.errors import HookDidNotFire

_MODULE_HOOKS = {
    "_forward_pre_hooks": "forward-pre", "_forward_hooks": "forward",
    "_backward_pre_hooks": "full-backward-pre", "_backward_hooks": "full-backward",
}


@dataclass
class HookCount:
    """How often one hook fired: ``owner`` is the path of the tensor or module it was registered on."""

    owner: str
    kind: str
    name: str
    fired: int = 0
    expected: Callable[[], int | None] = lambda: None


class HookCounts:
    """Counts the hooks registered on the modules and leaf tensors a step can reach.

    Attributes:
        counts: one entry a hook.
        with_gradient: ids of the leaf tensors that autograd gave a gradient.
    """

    def __init__(self, state: State, path: ModulePath) -> None:
        self.counts: list[HookCount] = []
        self._state = state
        self._path = path
        self.with_gradient: set[int] = set()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Wrap each hook so that it counts itself; the dictionaries are put back after."""
        originals: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for hooks, owner, kind, expected in self._registered():
            originals.append((hooks, dict(hooks)))
            for key, hook in list(hooks.items()):
                hooks[key] = self._counting(hook, HookCount(owner, kind, _name(hook), expected=expected))
        try:
            yield
        finally:
            for hooks, before in originals:
                for key, hook in before.items():
                    if key in hooks:
                        hooks[key] = hook

    def _counting(self, hook: Callable[..., Any], count: HookCount) -> Callable[..., Any]:
        self.counts.append(count)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count.fired += 1
            return hook(*args, **kwargs)

        return counted

    def _registered(self) -> Iterator[tuple[dict[int, Any], str, str, Callable[[], int | None]]]:
        for module, path in list(self._state.modules.values()):
            for attribute, kind in _MODULE_HOOKS.items():
                if hooks := getattr(module, attribute):
                    calls = (lambda m=module: self._path.calls[id(m)]) if kind.startswith("forward") else lambda: None
                    yield hooks, path or type(module).__name__, kind, calls
        for tensor, path in list(self._state.leaves):
            for hooks in torch_adapter.registered_hooks(tensor):
                yield hooks, path, "gradient", lambda t=tensor: self._gradients(t)

    def _gradients(self, tensor: torch.Tensor) -> int | None:
        """At least once where the tensor has a new gradient; nothing is known of one that has none."""
        return 1 if id(tensor) in self.with_gradient else None

    def check(self) -> None:
        """Raise for a hook that did not run although what it hangs on did.

        Raises:
            HookDidNotFire: names the hook, its owner and both counts.
        """
        for count in self.counts:
            expected = count.expected()
            if expected is not None and count.fired < expected:
                raise HookDidNotFire(count.owner, count.kind, count.name, count.fired, expected)


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
