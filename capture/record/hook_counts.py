"""Counts how often each hook fires during a capture; a hook that did not run is an error that names it.

Hooks need no special treatment to be captured: autograd and modules run them, and the recorder sees their operations.
The danger is a hook that silently does not run. So every hook is wrapped in a counter while the step is captured. The
events that must trigger hooks are counted independently: calls of modules, gradients that autograd accumulated, steps
of optimizers. :meth:`HookCounts.check` compares the two counts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.module_path import ModulePath
from weft.capture.state.hook_registrations import registrations, sites_of, user_hook
from weft.capture.state.reachable_state import ReachableState
from weft.capture.user_code import user_line
from weft.errors import HookCountDiffers, HookDidNotFire

_MODULE_HOOKS = {
    "_forward_pre_hooks": "forward-pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "full-backward-pre",
    "_backward_hooks": "full-backward",
}
_COUNTED = "__weft_counted__"
Expected = Callable[[], int | None]


@dataclass
class HookCount:
    """How often one hook fired.

    Attributes:
        owner: path of the tensor, module or optimizer that it is registered on. For another object on which the step
            registered it: the user's line.
        kind: ``gradient``, ``forward``, ``step-pre`` and so on.
        name: of the user's function.
        fired: how often it ran.
        expected: returns how often it had to run at least; None where only a comparison with the eager step can tell.
    """

    owner: str
    kind: str
    name: str
    fired: int = 0
    expected: Expected = lambda: None


class HookCounts:
    """Counts hooks while a step runs.

    These are the hooks on the modules, leaf tensors and optimizers that the step can reach, the global hooks of all
    modules or optimizers, and the hooks that the step itself registers.

    Args:
        state: what the step can reach.
        path: follows the modules that the step enters.
        arguments: leaf tensors among its arguments that require grad, with their paths.

    Attributes:
        counts: one entry per hook.
    """

    def __init__(self, state: ReachableState, path: ModulePath, arguments: list[tuple[torch.Tensor, str]]) -> None:
        self.counts: list[HookCount] = []
        self._state = state
        self._path = path
        self._sites = [
            *state.sites,
            *(site for leaf, name in arguments for site in sites_of(leaf, name)),
        ]
        self._owners = {id(leaf): name for leaf, name in [*state.leaves, *arguments]}
        self._leaves = {name: leaf for leaf, name in [*state.leaves, *arguments]}
        self._accumulated: Counter[str] = Counter()
        self._stepped: Counter[tuple[int, str]] = Counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """While active, each hook is wrapped in a counter; afterwards the dictionaries hold the original hooks."""
        with contextlib.ExitStack() as stack:
            for hooks, owner, kind, expected in list(self._registered()):
                stack.callback(_put_back, hooks, dict(hooks))
                for key, hook in list(hooks.items()):
                    if _root(hook) != "weft.capture":
                        present: Expected = lambda key=key, hooks=hooks, expected=expected: (
                            expected() if key in hooks else None
                        )
                        hooks[key] = self._counting(hook, owner, kind, present)
            for name in {site.owner for site in self._sites if site.read()}:
                stack.callback(self._count_gradients(name).remove)
            stack.enter_context(registrations(self._registered_inside))
            steps = [
                lambda optimizer, kind=kind: self._stepped.update([(id(optimizer), kind)])
                for kind in ("step-pre", "step-post")
            ]
            stack.enter_context(torch_adapter.around_optimizer_steps(*steps))
            yield
        self._sites, self._owners, self._leaves = [], {}, {}  # arguments must not outlive their call

    def _counting(self, hook: Any, owner: str, kind: str, expected: Expected = lambda: None) -> Any:
        count = HookCount(owner, kind, _name(hook), expected=expected)
        self.counts.append(count)
        counting = threading.get_ident()

        @functools.wraps(hook, assigned=(), updated=())
        def counted(*args: Any, **kwargs: Any) -> Any:
            count.fired += threading.get_ident() == counting  # another thread may call the module too
            return hook(*args, **kwargs)

        setattr(counted, _COUNTED, True)
        return counted

    def _registered_inside(self, owner: Any, kind: str, hook: Any) -> Any:
        """A counter around a hook that the step registers, unless it is torch's own, weft's own, or counted already."""
        if hasattr(hook, _COUNTED) or _root(hook).startswith(("torch.", "weft.capture")):
            return hook
        name = self._owners.get(id(owner)) or self._state.modules.get(id(owner), (None, ""))[1] or user_line()
        return self._counting(hook, name, kind)

    def _count_gradients(self, name: str) -> Any:
        counting = threading.get_ident()
        count = lambda grads: self._accumulated.update([name] if threading.get_ident() == counting else [])
        return torch_adapter.accumulator(self._leaves[name]).register_prehook(count)

    # ---- registered hooks, and how often they must run

    def _registered(self) -> Iterator[tuple[dict[int, Any], str, str, Expected]]:
        for module, path in list(self._state.modules.values()):
            for attribute, kind in _MODULE_HOOKS.items():
                if hooks := getattr(module, attribute):
                    yield hooks, path or type(module).__name__, kind, self._calls(kind, id(module))
        for site in self._sites:
            if hooks := site.read():
                yield hooks, site.owner, site.kind, lambda name=site.owner: self._accumulated[name]
        for optimizer, path in self._state.optimizers:
            for kind, hooks in torch_adapter.optimizer_hooks(optimizer):
                if hooks:
                    key = id(optimizer), kind
                    yield hooks, path, kind, lambda key=key: self._stepped[key]
        for kind, hooks in torch_adapter.global_hooks():
            if hooks:
                yield hooks, f"all {'optimizers' if 'step' in kind else 'modules'}", kind, lambda: None

    def _calls(self, kind: str, module: int) -> Expected:
        if kind == "forward-pre":
            return lambda: self._path.calls[module]
        return (lambda: self._path.finished[module]) if kind == "forward" else lambda: None

    # ---- checks

    def check(self) -> None:
        """Raise for a hook that did not run although the event that triggers it happened.

        Raises:
            HookDidNotFire: names the hook, its owner and both counts.
        """
        for count in self.counts:
            expected = count.expected()
            if expected is not None and count.fired < expected:
                raise HookDidNotFire(count.owner, count.kind, count.name, count.fired, expected)

    def compare(self, eager: HookCounts) -> None:
        """Raise for a hook that fired a different number of times than in the eager step.

        Raises:
            HookCountDiffers: names the hook, its owner and both counts.
        """
        captured, expected = self.totals(), eager.totals()
        for key in [*expected, *captured]:
            if captured[key] != expected[key]:
                raise HookCountDiffers(*key, expected[key], captured[key])

    def totals(self) -> Counter[tuple[str, str, str]]:
        """How often hooks fired, by owner, kind and name; hooks that agree in all three are added up."""
        totals: Counter[tuple[str, str, str]] = Counter()
        for count in self.counts:
            totals[count.owner, count.kind, count.name] += count.fired
        return totals


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    for key, hook in before.items():
        if key in hooks:
            hooks[key] = hook


def _root(hook: Any) -> str:
    """The first two parts of the dotted name of the module that defines a hook's function."""
    module = getattr(user_hook(hook), "__module__", None) or type(hook).__module__
    return ".".join([*module.split("."), ""][:2])


def _name(hook: Any) -> str:
    hook = user_hook(hook)
    return getattr(hook, "__qualname__", type(hook).__qualname__)
