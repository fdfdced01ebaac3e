"""The methods that register hooks, and a way to see registrations as they happen.

Torch has six methods that register hooks on tensors and modules, besides those of autograd's nodes. While a step is
captured, each registration that the step itself makes goes through here, so that the hook can be counted
(:mod:`weft.capture.record.hook_counts`). Afterwards the user's own functions are what is registered.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from weft import torch_adapter
from weft.capture.state.containers import Container
from weft.thread_patches import present, replaced

_METHODS = (
    (torch.Tensor, "register_hook", "gradient"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "post-accumulate-grad"),
    (torch.nn.Module, "register_forward_pre_hook", "forward-pre"),
    (torch.nn.Module, "register_forward_hook", "forward"),
    (torch.nn.Module, "register_full_backward_pre_hook", "full-backward-pre"),
    (torch.nn.Module, "register_full_backward_hook", "full-backward"),
)


@dataclass(frozen=True)
class HookSite:
    """Where hooks of one kind are registered on one leaf tensor.

    Attributes:
        owner: path of the tensor.
        kind: of the hooks.
        read: returns their dictionary as it is now, None where torch has made none yet.
        before: the hooks that were registered when the walk was made.
    """

    owner: str
    kind: str
    read: Callable[[], dict[int, Any] | None]
    before: dict[int, Any]


def sites_of(leaf: torch.Tensor, path: str) -> list[HookSite]:
    """Where hooks can be registered on a leaf that requires grad: the tensor and its autograd node. None where it has
    no such node, because then no hook of it ever runs."""
    sites: list[HookSite] = []
    if (node := torch_adapter.accumulator(leaf)) is None:
        return sites
    for at, (kind, hooks) in enumerate(torch_adapter.tensor_hooks(leaf)):
        read: Callable[[], Any] = lambda at=at: torch_adapter.tensor_hooks(leaf)[at][1]
        sites.append(HookSite(path, kind, read, dict(hooks or {})))
    for kind, hooks in torch_adapter.node_hooks(node):
        sites.append(HookSite(path, kind, lambda hooks=hooks, node=node: hooks, dict(hooks)))
    return sites


def new_hooks(sites: list[HookSite], known: dict[int, Any]) -> Iterator[Container]:
    """The dictionaries of hooks that are on leaves without hooks now; they are ``known`` from then on, by their ids."""
    for site in sites:
        if (hooks := site.read()) and not site.before and id(hooks) not in known:
            known[id(hooks)] = hooks
            container = Container(hooks, f"the {site.kind} hooks of {site.owner}")
            container.before = {}
            yield container


def user_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the user registered. Torch wraps a multi-grad hook in a function of its own."""
    if getattr(hook, "__module__", "") != torch.autograd.graph.__name__:
        return hook
    inside = inspect.getclosurevars(hook).nonlocals.get("fn", hook)
    return getattr(inside, "__wrapped__", inside)


@contextlib.contextmanager
def registrations(exchange: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """While active, register ``exchange(owner, kind, hook)`` in place of each hook that this thread registers.

    At the end the original hooks are put back where they are still registered. ``owner`` is the tensor or module. It
    is None for a hook on an autograd node, because torch does not say which node.
    """
    registered: list[tuple[RemovableHandle, Any]] = []

    def through(register: Callable[..., RemovableHandle], kind: str) -> Callable[..., RemovableHandle]:
        @functools.wraps(register)
        def with_exchange(owner: Any, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
            handle = register(owner, exchange(owner, kind, hook), *args, **kwargs)
            registered.append((handle, hook))
            return handle

        return with_exchange

    on_node = torch_adapter.node_registrations(
        lambda hook: exchange(None, "node", hook), lambda handle, hook: registered.append((handle, hook))
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_node)
            for owner, name, kind in _METHODS:
                stack.enter_context(replaced(owner, name, through(present(owner, name), kind)))
            yield
    finally:
        for handle, hook in registered:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = hook
