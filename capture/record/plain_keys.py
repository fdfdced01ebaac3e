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
    """At the end of the step, replace symbolic numbers by their values among the keys of dictionaries of the state. The
    step is still recorded then: outside of the recording, symbolic numbers have no hash."""
    # Only what the step has added is searched: the globals of a module may hold a large dataset, and a container does
    # not know all their keys.
    keys = {id(each.obj): set(each.obj) for each in containers if type(each.obj) in _DICTS}
    try:
        yield
    finally:
        for container in containers:
            if type(obj := container.obj) in _DICTS:
                _make_plain(obj)
                for key in obj.keys() - keys.get(id(obj), container.before.keys()):
                    make_keys_plain(obj[key], lambda each: False)


def make_keys_plain(value: Any, is_own: Callable[[Any], bool]) -> None:
    """Replace symbolic numbers by their values among the keys in a value, in place.

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
    """The same for the keys of one dictionary, without what its values hold. The order of the keys stays."""
    if any(map(_holds_symbols, value)):
        items = [(plain_key(key), item) for key, item in value.items()]
        value.clear()
        for key, item in items:
            value[key] = item


def keep_entries(entries: dict[Any, Any], is_kept: Callable[[Any, Any], bool]) -> None:
    """Remove the entries of a dictionary for which ``is_kept(key, value)`` is false. Where one is removed, those with
    symbolic numbers in their keys go too: such keys have no hash outside of the capture."""
    left = [(key, value) for key, value in entries.items() if is_kept(key, value)]
    if len(left) < len(entries):
        entries.clear()
        entries.update((key, value) for key, value in left if not _holds_symbols(key))


def plain_key(key: Any) -> Any:
    """A key with the values of symbolic numbers in their places."""
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
