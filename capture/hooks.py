"""Every registered hook runs in the trace, or the capture fails by naming it.

Hooks need no special treatment to be captured: the recorder sees what they do where autograd runs them. What
could go wrong is that one silently does not run. So each is counted while the step is captured, and what each
hangs on is counted apart from it: calls of modules, gradients that autograd accumulated, steps of optimizers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.modules import ModulePath
from weft.capture.registrations import registrations, user_hook
from weft.capture.state import State
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
        owner: path of the tensor, module or optimizer it was registered on; for one registered by the step on
            something else, the line that did it.
        kind: ``gradient``, ``forward``, ``step-pre`` and so on.
        name: of the user's function.
        fired: how often it ran.
        expected: how often it had to run at least, None where only a comparison with the eager step can tell.
    """

    owner: str
    kind: str
    name: str
    fired: int = 0
    expected: Expected = lambda: None


class HookCounts:
    """Counts hooks while a step runs: those on the modules, leaf tensors and optimizers it can reach, those
    on all modules or optimizers, and those that the step itself registers.

    Args:
        state: what the step can reach.
        path: follows the modules it enters.
        arguments: leaf tensors among its arguments that require grad, with their names.

    Attributes:
        counts: one entry a hook.
    """

    def __init__(self, state: State, path: ModulePath, arguments: list[tuple[torch.Tensor, str]]) -> None:
        self.counts: list[HookCount] = []
        self._state = state
        self._path = path
        self._sites = [
            *state.sites,
            *(site for leaf, name in arguments for site in state.sites_of(leaf, name)),
        ]
        self._owners = {id(leaf): name for leaf, name in [*state.leaves, *arguments]}
        self._leaves = {name: leaf for leaf, name in [*state.leaves, *arguments]}
        self._accumulated: Counter[str] = Counter()
        self._stepped: Counter[tuple[int, str]] = Counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Wrap each hook so that it counts itself; the dictionaries are put back after."""
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

        @functools.wraps(hook, assigned=(), updated=())
        def counted(*args: Any, **kwargs: Any) -> Any:
            count.fired += 1
            return hook(*args, **kwargs)

        setattr(counted, _COUNTED, True)
        return counted

    def _registered_inside(self, owner: Any, kind: str, hook: Any) -> Any:
        """Count a hook that the step registers, unless it is torch's own or counted already."""
        if hasattr(hook, _COUNTED) or _root(hook).startswith("torch."):
            return hook
        name = self._owners.get(id(owner)) or self._state.modules.get(id(owner), (None, ""))[1] or user_line()
        return self._counting(hook, name, kind)

    def _count_gradients(self, name: str) -> Any:
        count = lambda grads: self._accumulated.update([name])
        return torch_adapter.accumulator(self._leaves[name]).register_prehook(count)

    # ---- what is registered, and how often it must run

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

    # ---- what came of it

    def check(self) -> None:
        """Raise for a hook that did not run although what it hangs on did.

        Raises:
            HookDidNotFire: names the hook, its owner and both counts.
        """
        for count in self.counts:
            expected = count.expected()
            if expected is not None and count.fired < expected:
                raise HookDidNotFire(count.owner, count.kind, count.name, count.fired, expected)

    def compare(self, eager: HookCounts) -> None:
        """Raise for a hook that fired another number of times here than in the eager step.

        Raises:
            HookCountDiffers: names the hook, its owner and both counts.
        """
        here, there = self.totals(), eager.totals()
        for key in [*there, *here]:
            if here[key] != there[key]:
                raise HookCountDiffers(*key, there[key], here[key])

    def totals(self) -> Counter[tuple[str, str, str]]:
        """How often hooks fired, by owner, kind and name; hooks alike in all three taken together."""
        totals: Counter[tuple[str, str, str]] = Counter()
        for count in self.counts:
            totals[count.owner, count.kind, count.name] += count.fired
        return totals


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    for key, hook in before.items():
        if key in hooks:
            hooks[key] = hook


def _root(hook: Any) -> str:
    """The outer two names of the module that a hook's function is from."""
    module = getattr(user_hook(hook), "__module__", None) or type(hook).__module__
    return ".".join([*module.split("."), ""][:2])


def _name(hook: Any) -> str:
    hook = user_hook(hook)
    return getattr(hook, "__qualname__", type(hook).__qualname__)
