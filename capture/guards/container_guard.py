"""Guards on what the containers of the Python state hold.

A step of a large model depends on thousands of entries, most of them in dictionaries that nobody changes: those of
modules and of optimizers. Every change of a dictionary gives it a new version. So a call compares versions, and looks
at the entries of those dictionaries alone that were changed since the last call.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, compress, repeat
from typing import Any

import torch

from weft import state_checks
from weft.capture.guards.argument_guards import matches
from weft.capture.guards.dict_watch import DictWatch
from weft.capture.guards.steady_checks import Steady
from weft.capture.state.absent_graphs import AutogradRole
from weft.capture.state.containers import (
    MISSING,
    SIMPLE,
    Attributes,
    Container,
    Content,
    StatePlace,
    TensorLike,
    holder_of,
    without_overrides,
)
from weft.capture.state.state_reader import EntryReader


class ContainerGuard:
    """Guards on the entries of all containers: tensors must look alike, all other values must match.

    Attributes:
        generation: grows when an entry is found to be another object that matches.
    """

    def __init__(self, containers: Sequence[Container]) -> None:
        self._filled_first = sorted(containers, key=lambda each: not each.before)
        sized = [each for each in containers if _is_sized(each)]
        self._are_empty = state_checks.all_empty([without_overrides(each.obj) for each in sized if not each.before])
        self._dicts = [_DictGuard(each) for each in containers if _is_dictionary(each) and each.before]
        self._watch = DictWatch([each.container.obj for each in self._dicts])
        # An empty dictionary may be filled without a new version (see `torch_adapter.dict_version`).
        self._unfilled: list[_DictGuard] = []
        # An OrderedDict can change its order without a change of its version.
        self._reorderable = [each for each in self._dicts if each.is_reorderable]
        self.generation = 0
        self._entries = EntryReader([each for each in containers if not _is_dictionary(each)])
        self._expected = [value for each in self._entries.containers for value in each.guarded().values()]
        owners = [each for each in self._entries.containers for _ in each.guarded()]
        self._gradients = [at for at, each in enumerate(owners) if isinstance(each.obj, torch.Tensor)]
        lists = [each for each in sized if each.before and not isinstance(each.obj, dict)]
        self._kept = {id(each) for each in [*lists, *(each.container for each in self._dicts)]}
        self._lists = [without_overrides(each.obj) for each in lists]
        self._counts = [len(each.before) for each in lists]

    def entries(self) -> list[Any]:
        """The values of all entries, as they were last accepted."""
        return [*self._expected, *chain.from_iterable(each.expected for each in self._dicts)]

    def labels(self) -> list[str]:
        """How the user would write each of :meth:`entries`."""
        others = [each.label(key) for each in self._entries.containers for key in each.guarded()]
        return others + [each.container.label(key) for each in self._dicts for key in each.keys]

    def listed(self) -> list[str]:
        """The conditions as text."""
        expected = self._expected_of()
        return [
            f"{each.label(key)} is {_shown(value)}"
            for each in self._filled_first
            for key, value in expected[id(each)].items()
        ]

    def holds(self) -> bool:
        """Whether all entries match the expected ones. If they do, the present entries are expected from now on."""
        if not self._are_empty() or (self._lists and list(map(len, self._lists)) != self._counts):
            return False
        # Read before the entries: what another thread changes meanwhile is another version at the next call.
        changes = self._watch.changes()
        filled = self._unfilled and any(each.contents for each in self._unfilled)
        if (changes or filled) and not self._changed_match(changes):
            return False
        self._watch.accept(changes)
        if self._reorderable and not all(each.is_in_order() for each in self._reorderable):
            return False
        return self._others_match()

    def steady(self) -> Steady | None:
        """What holds only if :meth:`holds` would, without a change of :attr:`generation`."""
        groups, entries = self._watch.steady(), self._entries.steady(self._expected)
        if groups is None or entries is None:
            return None
        compared, others_are = entries
        compared_whole = set(map(id, self._entries.whole))  # with their lengths
        parts = [at for at, each in enumerate(self._lists) if id(each) not in compared_whole]
        lists, counts = [self._lists[at] for at in parts], [self._counts[at] for at in parts]
        reorderable, alone, unfilled = self._reorderable, self._watch.alone, self._unfilled

        def rest() -> bool:
            return (
                (not unfilled or not any(each.contents for each in unfilled))
                and (not alone or self._alone_match())
                and (not lists or list(map(len, lists)) == counts)
                and (not reorderable or all(each.is_in_order() for each in reorderable))
                and (others_are is None or others_are())
            )

        is_compared = not unfilled and not alone and not lists and not reorderable and others_are is None
        return Steady([self._are_empty, *groups, *compared], None if is_compared else rest)

    def _alone_match(self) -> bool:
        """Whether those dictionaries that change often hold the same objects."""
        if not (changes := self._watch.changes_alone()):
            return True
        before = self.generation, len(self._unfilled)
        if not self._changed_match(changes) or (self.generation, len(self._unfilled)) != before:
            return False
        self._watch.accept(changes)
        return True

    def _changed_match(self, changes: Collection[int]) -> bool:
        """Whether the dictionaries that may have changed have entries that match."""
        asked = [*(self._dicts[at] for at in changes), *self._unfilled]
        unfilled = [each for each in asked if not each.contents]  # to be emptied is a change
        for each in asked:
            now = each.matching()
            if now is None:
                return False
            if now is not each.expected:
                each.expected = now
                self.generation += 1
        self._unfilled = unfilled
        return True

    def _others_match(self) -> bool:
        """Whether the entries match that are in no dictionary."""
        try:
            if self._entries.all_are(self._expected):
                return True
            now = self._entries.read()
        except ValueError:
            return False
        if not _all_match(now, self._expected):
            return False
        self._expected = now
        self.generation += 1
        return True

    def release_gradients(self) -> bool:
        """Remember of gradients what they must be like, and not the tensors. Returns whether any was held."""
        held = [at for at in self._gradients if isinstance(self._expected[at], torch.Tensor)]
        for at in held:  # in the list itself, which the reader of entries has too
            self._expected[at] = TensorLike.of(self._expected[at])
        return bool(held)

    def failure(self) -> str | None:
        """The first entry that does not match, as text; None where all match."""
        if self.holds():
            return None
        expected = self._expected_of()
        failures = (_failure(each, expected[id(each)]) for each in self._filled_first)
        in_order = all(each.is_in_order() for each in self._dicts)
        return next(filter(None, failures), None if in_order else "the keys of a dictionary are in another order")

    def keeps(self, place: StatePlace) -> bool:
        """Whether the object at a place, the wrapper if it is one, stays the same while :meth:`holds` is true and
        :attr:`generation` does not grow."""
        guarded = id(place.container) in self._kept and place.key in place.container.guarded()
        return guarded and not place.items

    def watches(self, container: Container) -> bool:
        """Whether no entry of a container is another object while all of :meth:`steady` holds."""
        at = next((at for at, each in enumerate(self._dicts) if each.container is container), -1)
        return self.steady() is not None and at >= 0 and at not in self._watch.alone

    def _expected_of(self) -> dict[int, dict[Any, Any]]:
        """The expected entries of each container, by its id."""
        containers = self._entries.containers
        guarded = [each.guarded() for each in containers]
        ends = accumulate(map(len, guarded))
        found: dict[int, dict[Any, Any]] = {id(each): {} for each in self._filled_first}
        for each, keys, end in zip(containers, guarded, ends, strict=True):
            found[id(each)] = dict(zip(keys, self._expected[end - len(keys) : end], strict=True))
        for each in self._dicts:
            found[id(each.container)] = dict(zip(each.keys, each.expected, strict=True))
        return found


class _DictGuard:
    """Guards on the entries of one dictionary.

    Attributes:
        container: the dictionary.
        contents: it, for ``bool`` and ``len``; no code of the user's runs.
        keys, expected: the guarded entries.
    """

    def __init__(self, container: Container) -> None:
        self.container = container
        self.contents = without_overrides(container.obj)
        self.keys = list(container.guarded())
        self.expected = list(container.guarded().values())
        self._holder = holder_of(type(container.obj))
        self._is_sized = _is_sized(container)
        self._order = list(container.before)
        self._is_guarded = [key not in container.by_value for key in container.before]

    @property
    def is_reorderable(self) -> bool:
        """Whether its entries can change their order and nothing else."""
        return self._is_sized and isinstance(self.container.obj, OrderedDict) and len(self._order) > 1

    def is_in_order(self) -> bool:
        """Whether the keys are those that there were, in their order: code that goes through them sees it."""
        if not self._is_sized:
            return True
        now = list(self._holder.__iter__(self.container.obj))
        return len(now) == len(self._order) and all(map(_is_same_key, now, self._order))

    def matching(self) -> list[Any] | None:
        """The present entries where they match the expected ones, None where they do not; the expected ones themselves
        where they are the same objects."""
        if not self.is_in_order():
            return None
        obj = self.container.obj
        if self._is_sized:  # the keys are known, and to look them up might run code of theirs
            now = list(compress(self._holder.values(obj), self._is_guarded))
        else:
            now = list(map(dict.get, repeat(obj), self.keys, repeat(MISSING)))
        if all(map(operator.is_, now, self.expected)):
            return self.expected
        return now if _all_match(now, self.expected) else None


def _all_match(now: list[Any], expected: list[Any]) -> bool:
    return all(value is before or matches(value, before) for value, before in zip(now, expected, strict=True))


def _failure(container: Container, expected: dict[Any, Any]) -> str | None:
    now = container.entries()
    if _is_sized(container) and len(now) != len(container.before):
        return f"{container.path} holds {len(now)} entries, had {len(container.before)}"
    for key, before in expected.items():
        value = now.get(key, MISSING)
        if not matches(value, before):
            now_is = "missing" if value is MISSING else _shown(value, "another")
            return f"{container.label(key)} is {now_is}, was {_shown(before, 'a')}"
    return None


def _shown(value: Any, article: str = "the same") -> str:
    if isinstance(value, torch.Tensor):
        leaf = not AutogradRole.of(value).replaceable
        return f"{article if leaf else 'a'} tensor {value.dtype} {list(value.shape)}"
    return repr(value) if isinstance(value, SIMPLE) else f"{article} {type(value).__qualname__}"


def _is_same_key(one: Any, other: Any) -> bool:
    same = one is other or (hash(one) == hash(other) and bool(one == other))
    return same and type(one) is type(other)  # True is no 1 to code that goes through the keys


def _is_sized(container: Container) -> bool:
    """Whether the number of entries is guarded."""
    return container.keys is None and isinstance(container.obj, (dict, list, deque))


def _is_dictionary(container: Container) -> bool:
    """Whether the entries of a container are those of a dictionary."""
    return isinstance(container.obj, dict) and not isinstance(container, (Attributes, Content))
