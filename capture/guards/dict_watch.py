"""Which of many dictionaries were changed.

A change of a dictionary gives it another version. Nearly all dictionaries of a program never change: those are
compared in groups, each by one call in C. A dictionary of a group that does change is compared alone from then on, so
that its group is made anew once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft import state_checks, torch_adapter
from weft.capture.guards.steady_checks import Steady

# A change makes one group anew, at about 2 us a dictionary; a group more costs 0.3 us a call.
_GROUP = 256
_NEVER = -1  # no dictionary has this version


class _Probe:
    """An object with an attribute."""


def _attributes_are_seen() -> bool:
    """Whether an assignment to an attribute gives the object's dictionary another version."""
    probe = _Probe()
    probe.attribute = 0  # type: ignore[attr-defined]
    before = torch_adapter.dict_version(vars(probe))
    probe.attribute = 1  # type: ignore[attr-defined]
    return torch_adapter.dict_version(vars(probe)) != before


# Python 3.13.0 tells nobody of an assignment to an attribute while the values of attributes are in the object itself
# (https://github.com/python/cpython/issues/125608; from 3.13.1 on it does).
_ATTRIBUTES_ARE_SEEN = _attributes_are_seen()


def _move_out_of_object(attributes: dict[Any, Any]) -> None:
    """Let a dictionary of attributes hold their values itself from now on: ``popitem`` makes it do so."""
    key = "_weft_moved"
    attributes[key] = None
    last, value = attributes.popitem()
    if last != key:  # another thread has added an attribute meanwhile
        attributes[last] = value
        del attributes[key]


class DictWatch:
    """The dictionaries and the versions of them that were accepted last; none at first.

    Args:
        dicts: the dictionaries; the same objects from call to call.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        if not _ATTRIBUTES_ARE_SEEN:
            for each in dicts:
                if type(each) is dict:
                    _move_out_of_object(each)
        self._dicts = dicts
        self._accepted = [_NEVER] * len(dicts)
        self._restless: set[int] = set()  # those that changed since they were accepted, or can be in no group
        self._is_settled = False  # whether all others are in groups
        self._groups: list[tuple[list[int], Callable[[], bool]]] = []
        self._set_alone(range(len(dicts)))

    def changes(self) -> dict[int, int]:
        """The number of each dictionary that has another version than accepted, and that version."""
        found: dict[int, int] = {}
        for numbers, holds in self._groups:
            if not holds():
                found |= self._differing(numbers, self._read(numbers))
        return found | self.changes_alone() if self._alone else found

    def changes_alone(self) -> dict[int, int]:
        """The same of those dictionaries that are compared alone."""
        alone = list(map(torch_adapter.dict_version, self._alone_dicts))
        return {} if alone == self._alone_versions else self._differing(self._alone, alone)

    def steady(self) -> list[Callable[[], bool]] | None:
        """Checks that hold as long as :meth:`changes` finds no more than :meth:`changes_alone`; None where a call may
        put other dictionaries into groups."""
        return [holds for _, holds in self._groups] if self._is_settled else None

    def steady_or(self, holds: Callable[[], bool], rest: Callable[[], bool] | None = None) -> Steady | None:
        """The checks of :meth:`steady`, with ``rest``; ``holds`` instead where a dictionary is compared alone."""
        groups = self.steady()
        if groups is None:
            return None
        return Steady(rest=holds) if self._alone else Steady(groups, rest)

    @property
    def alone(self) -> frozenset[int]:
        """The numbers of the dictionaries that are compared alone."""
        return self._alone_set

    def accept(self, changes: dict[int, int]) -> None:
        """Let the versions that :meth:`changes` returned be the accepted ones."""
        is_expected = self._is_settled and changes.keys() <= self._alone_set
        if is_expected and not changes:
            return
        self._restless |= {number for number in changes if self._accepted[number] != _NEVER}
        for number, version in changes.items():
            self._accepted[number] = version
        if is_expected:
            self._alone_versions = [self._accepted[number] for number in self._alone]
            return
        kept, loose = [], list(self._alone)
        for numbers, holds in self._groups:
            if changes.keys().isdisjoint(numbers):
                kept.append((numbers, holds))
            else:
                loose += numbers
        self._groups = kept
        # What was accepted for the first time may be at its first of many changes: it waits until the next call.
        steady = [number for number in loose if number not in self._restless and number not in changes]
        self._restless.update(self._group(steady))
        self._set_alone([number for number in loose if number in self._restless or number in changes])
        self._is_settled = self._alone_set <= self._restless

    def _group(self, numbers: Sequence[int]) -> list[int]:
        """Compare these together from now on; those are returned for which that cannot be."""
        alone: list[int] = []
        for start in range(0, len(numbers), _GROUP):
            group = list(numbers[start : start + _GROUP])
            holds = state_checks.unchanged_dicts([self._dicts[number] for number in group])
            # What another thread changed since it was accepted must not pass for the accepted version.
            if holds is None or self._differing(group, self._read(group)):
                alone += group
            else:
                self._groups.append((group, holds))
        return alone

    def _set_alone(self, numbers: Sequence[int]) -> None:
        self._alone = list(numbers)
        self._alone_set = frozenset(numbers)
        self._alone_dicts = [self._dicts[number] for number in numbers]
        self._alone_versions = [self._accepted[number] for number in numbers]

    def _read(self, numbers: Sequence[int]) -> list[int]:
        return [torch_adapter.dict_version(self._dicts[number]) for number in numbers]

    def _differing(self, numbers: Sequence[int], versions: Sequence[int]) -> dict[int, int]:
        pairs = zip(numbers, versions, strict=True)
        return {number: version for number, version in pairs if version != self._accepted[number]}
