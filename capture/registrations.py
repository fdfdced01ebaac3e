"""Where hooks are registered: what the user's function is, and seeing registrations as they happen."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from weft import torch_adapter

_METHODS = (
    (torch.Tensor, "register_hook", "gradient"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "post-accumulate-grad"),
    (torch.nn.Module, "register_forward_pre_hook", "forward-pre"),
    (torch.nn.Module, "register_forward_hook", "forward"),
    (torch.nn.Module, "register_full_backward_pre_hook", "full-backward-pre"),
    (torch.nn.Module, "register_full_backward_hook", "full-backward"),
)


def user_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the user registered: of a multi-grad hook the one inside torch's own function."""
    if getattr(hook, "__module__", "") != torch.autograd.graph.__name__:
        return hook
    inside = inspect.getclosurevars(hook).nonlocals.get("fn", hook)
    return getattr(inside, "__wrapped__", inside)


@contextlib.contextmanager
def registrations(exchange: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Register ``exchange(owner, kind, hook)`` in place of each hook registered inside.

    Those that are left at the end are put back. ``owner`` is the tensor or module, None of a hook on an autograd
    node (torch does not say which).
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
    originals = [(owner, name, getattr(owner, name), kind) for owner, name, kind in _METHODS]
    for owner, name, register, kind in originals:
        setattr(owner, name, through(register, kind))
    try:
        with on_node:
            yield
    finally:
        for owner, name, register, _ in originals:
            setattr(owner, name, register)
        for handle, hook in registered:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks[handle.id] = hook
