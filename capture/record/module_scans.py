"""Which variables of the user's modules hold what has a stand-in, remembered from one attempt at a capture to the next.

A process may have a hundred thousand such variables, and to look at the object of each takes longer than to run a small
step. So a module is looked at again only where its variables have changed, by the version that Python keeps of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.capture.record.stand_ins import StandIns
from weft.torch_adapter import dict_version

Names = dict[str, Any]

# Ids of freed objects stay in the set of all attempts. It is made anew at this many times the ids of one attempt.
_LARGEST_GROWTH = 4


@dataclass
class _Scan:
    """One module.

    Attributes:
        names: its variables.
        found: the names of those that may have a stand-in, as keys.
        version: of the variables, where they are known to be the same as when they were looked at.
    """

    names: Names
    found: dict[str, None]
    version: int | None = None


class ModuleScans:
    """The modules that the last attempt has looked at. While it runs, stand-ins are among their variables."""

    def __init__(self) -> None:
        # Ids of all objects that had a stand-in in some attempt. Captures that follow arrays have more of them and
        # alternate with others: a set for each attempt would have all modules scanned again.
        self._ids: frozenset[int] = frozenset()
        self._scans: dict[int, _Scan] = {}

    def found(
        self, loaded: Iterable[Names], others: Iterable[Names], stand_ins: StandIns
    ) -> Iterator[tuple[Names, str, Any, Any]]:
        """(variables of a module, name, value, stand-in) of each value that has one.

        Args:
            loaded: the variables of loaded modules.
            others: those of modules that Python does not list, of which nothing is remembered: they may be freed.
            stand_ins: for their values.
        """
        known, self._scans = self._scans, {}
        added = stand_ins.by_id.keys() - self._ids
        if len(self._ids) > _LARGEST_GROWTH * len(stand_ins.by_id):
            known, self._ids = {}, frozenset()
        self._ids |= stand_ins.by_id.keys()
        for names in loaded:
            scan = known.get(id(names))
            if scan is None or scan.names is not names or scan.version != dict_version(names):
                stand_ins.in_values(names)  # learns which types are plain
                scan = _Scan(names, dict.fromkeys(stand_ins.may_have(names, self._ids)))
            elif added:
                scan.found |= dict.fromkeys([name for name, value in names.items() if id(value) in added])
            self._scans[id(names)] = scan
            for name in scan.found:
                value = names[name]
                if (new := stand_ins.of(value)) is not None:
                    yield names, name, value, new
        for names in others:
            yield from ((names, *each) for each in stand_ins.in_values(names))

    def replaced(self) -> None:
        """The stand-ins are in their places: what changes from here on is changed by the step."""
        for scan in self._scans.values():
            scan.version = dict_version(scan.names)

    def kept(self) -> None:
        """The step has ended: modules that it has changed are looked at again."""
        for scan in self._scans.values():
            if scan.version != dict_version(scan.names):
                scan.version = None

    def restored(self) -> None:
        """The stand-ins are gone."""
        for scan in self._scans.values():
            if scan.version is not None:
                scan.version = dict_version(scan.names)


MODULE_SCANS = ModuleScans()
