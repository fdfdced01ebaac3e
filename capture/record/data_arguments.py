"""Arguments that are data: objects of the user's classes with tensors inside, a batch among them.

They are taken apart as pytrees are, so that what such an object holds are arguments of their own: its tensors are
inputs of the graph, and each call may bring another object. An object with a model inside is no data: it is walked as
Python state is.
"""

from __future__ import annotations

import functools
import sys
from collections import UserDict
from dataclasses import is_dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.state.object_parts import ObjectForm, parts_of, structure_of
from weft.capture.state.type_facts import SIMPLE_KINDS
from weft.errors import UnregisteredType

# A choice: how many objects are looked at for a tensor. Batches have few; configurations may have many.
_MOST_LOOKED_AT = 200


def flat_arguments(call: Any) -> tuple[list[Any], Any]:
    """The leaves of arguments, and their structure.

    Raises:
        UnregisteredType: an object holds itself.
    """
    if _is_plain(call):
        return list(call[0]), _spec_of_leaves(len(call[0]))
    try:
        return torch_adapter.flatten(call)
    except RecursionError:
        if not _holds_itself(call):
            raise
        top = (*call[0], *call[1].values()) if type(call) is tuple else (call,)
        kinds = [type(each) for each in top if _holds_itself(each)]
        raise UnregisteredType([*kinds, object][0], "an argument", "it holds itself: ") from None


# Types that are leaves of every pytree. Most steps get only these, and torch takes 6 us to flatten one of them.
_PLAIN = frozenset({torch.Tensor, bool, int, float, str})


def _is_plain(call: Any) -> bool:
    if type(call) is not tuple or len(call) != 2 or type(call[0]) is not tuple or type(call[1]) is not dict:
        return False
    return not call[1] and _PLAIN.issuperset(map(type, call[0]))


@functools.cache  # the same object each time, so that guards need not compare it
def _spec_of_leaves(count: int) -> Any:
    """The structure of a call with as many positional arguments that are leaves, and no other arguments."""
    return torch_adapter.flatten(((0,) * count, {}))[1]


def register_data(tree: Any) -> None:
    """Have :func:`torch_adapter.flatten` take the data in ``tree`` apart.

    Raises:
        UnregisteredType: an object holds itself.
    """
    pending = [tree]
    while pending:
        for leaf in flat_arguments(pending.pop())[0]:
            if _is_data(leaf):
                if _holds_itself(leaf):
                    raise UnregisteredType(type(leaf), "an argument", "it holds itself: ")
                torch_adapter.register_parts(type(leaf), _flat, _made, _keys)
                pending.append(leaf)


def _is_data(obj: Any) -> bool:
    if type(obj) in SIMPLE_KINDS or isinstance(obj, torch.Tensor) or parts_of(obj) is None:
        return False
    return is_dataclass(obj) or isinstance(obj, UserDict) or (not callable(obj) and _holds_tensors(obj))


def _holds_itself(obj: Any) -> bool:
    """Whether a walk down from an object comes back to one that it came through."""
    pending: list[tuple[Any, bool]] = [(obj, False)]
    above, done = set[int](), set[int]()
    while pending:
        each, is_left = pending.pop()
        if is_left:
            above.discard(id(each))
            done.add(id(each))
        elif id(each) in above:
            return True
        elif id(each) not in done and (taken := parts_of(each)) is not None:
            above.add(id(each))
            pending += [(each, True), *((part, False) for part in taken.parts)]
    return False


def _holds_tensors(obj: Any) -> bool:
    """Whether tensors or arrays are in an object, and no module, optimizer or function."""
    numpy = sys.modules.get("numpy")
    data = torch.Tensor if numpy is None else (torch.Tensor, numpy.ndarray)
    found, pending, seen = False, [obj], set[int]()
    while pending and len(seen) < _MOST_LOOKED_AT:
        each = pending.pop()
        if isinstance(each, (torch.nn.Module, torch.optim.Optimizer)) or (
            callable(each) and not isinstance(each, type)
        ):
            return False
        if isinstance(each, data):
            found = True
        elif type(each) not in SIMPLE_KINDS and id(each) not in seen and (taken := parts_of(each)) is not None:
            pending += taken.parts
        seen.add(id(each))
    return found and not pending


_Context = tuple[ObjectForm, tuple[Any, ...]]


def _flat(obj: Any) -> tuple[list[Any], _Context]:
    form, keys, parts = structure_of(obj)  # type: ignore[misc]
    return parts, (form, tuple(keys))


def _made(parts: Any, context: _Context) -> Any:
    form, keys = context
    if form.is_fixed:
        return form.fixed(list(parts))
    made = form.empty()
    form.put(made, list(keys), list(parts))
    return made


def _keys(context: _Context, count: int) -> list[Any]:
    form, keys = context
    names = [(name,) for name in (*form.names, *(each.__name__ for each in form.slots))]
    return [*(keys or range(count - len(names))), *names]
