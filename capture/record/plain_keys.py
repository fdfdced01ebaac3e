"""Symbolic numbers that a step makes keys of dictionaries: ``return {epoch: loss}``.

A key is hashed when it is put there, which makes the number a guard by its value
(:mod:`weft.capture.record.plain_numbers`). What leaves the step must have that value for its key, and no symbol.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.capture.record.plain_numbers import plain_number
from weft.capture.state.containers import Container

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


@contextlib.contextmanager
def plain_keys_in_state(containers: Iterable[Container]) -> Iterator[None]:
    """At the end of the step, put plain numbers for symbolic ones among the keys that it has put into dictionaries of
    the state, while it is still recorded: outside, symbols have no hash."""
    try:
        yield
    finally:
        for container in containers:
            if type(obj := container.obj) in _DICTS:
                _make_plain(obj)
                for key in obj.keys() - container.before.keys():
                    make_keys_plain(obj[key], lambda each: False)


def make_keys_plain(value: Any, is_own: Callable[[Any], bool]) -> None:
    """Put plain numbers for symbolic ones among the keys in a value, in place.

    Args:
        value: what the step left: containers in containers.
        is_own: whether an object is the user's, whose keys are followed otherwise.
    """
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        inner = _inside(each)
        if inner is None or id(each) in seen or is_own(each):
            continue
        seen.add(id(each))
        pending.extend(inner)
        if type(each) in _DICTS:
            _make_plain(each)


def _inside(value: Any) -> Iterable[Any] | None:
    """What is in a container; None for all else."""
    if type(value) in _DICTS:
        return list(value.values())
    if type(value) is list or isinstance(value, tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(getattr(value, "__dict__", {}).values())
    return None


def _make_plain(value: dict[Any, Any]) -> None:
    """The same for the keys of one dictionary alone. Their order stays."""
    if any(map(_holds_symbols, value)):
        items = [(plain_key(key), item) for key, item in value.items()]
        value.clear()
        for key, item in items:
            value[key] = item


def keep_entries(entries: dict[Any, Any], is_kept: Callable[[Any, Any], bool]) -> None:
    """Remove the other entries of a dictionary, also those whose keys have no hash outside of the capture."""
    left = [(key, value) for key, value in entries.items() if is_kept(key, value)]
    if len(left) < len(entries):
        entries.clear()
        entries.update((key, value) for key, value in left if not _holds_symbols(key))


def plain_key(key: Any) -> Any:
    """A key with plain numbers for symbolic ones."""
    if isinstance(key, _SYMBOLIC):
        value = plain_number(key)
        return key if value is None else value
    if type(key) in (tuple, frozenset):
        return type(key)(map(plain_key, key)) if _holds_symbols(key) else key
    return key


def _holds_symbols(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return any(map(_holds_symbols, key))
    return isinstance(key, _SYMBOLIC)
