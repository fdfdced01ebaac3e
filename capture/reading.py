"""Reading much of the Python state at once.

A step of a large model hangs on thousands of entries, looked at before every call while a GPU may be idle. Each costs
one look-up in C here, and no call of a Python function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import getitem
from typing import Any

import torch

from weft.capture.state import MISSING, Container, Place


class Places:
    """Places, read at once: for each what :meth:`Place.get` finds there."""

    def __init__(self, places: Sequence[Place]) -> None:
        in_dicts = [isinstance(place.container.obj, dict) for place in places]
        self._dicts = [place.container.obj if found else {} for place, found in zip(places, in_dicts, strict=True)]
        self._keys = [place.key for place in places]
        # Gradients, and arguments: the containers of those look at another object at every call.
        self._elsewhere = [(at, place) for at, place in enumerate(places) if not in_dicts[at]]
        self._inner = [(at, name) for at, place in enumerate(places) for name in place.inner]

    def read(self) -> list[Any]:
        """The values, aligned with the places; MISSING where there is none."""
        values = list(map(dict.get, self._dicts, self._keys, repeat(MISSING)))
        for at, place in self._elsewhere:
            values[at] = place.outer()
        for at, name in self._inner:
            values[at] = getattr(values[at], name, MISSING)
        return values


class Entries:
    """The entries of the containers of a walk, read at once. Each container looks at one object for good.

    Attributes:
        containers: those that were given, in another order: the entries of one follow those of the one before.
    """

    def __init__(self, containers: Sequence[Container]) -> None:
        dicts = [each for each in containers if isinstance(each.obj, dict)]
        sequences = [each for each in containers if isinstance(each.obj, (list, deque))]
        others = [each for each in containers if not isinstance(each.obj, (dict, list, deque))]
        self.containers = [*dicts, *sequences, *others]
        self._dicts = _objects(dicts), [key for each in dicts for key in each.before]
        self._sequences = _objects(sequences), [key for each in sequences for key in each.before]
        self._others = _objects(others), [_attribute(each) for each in others for _ in each.before]

    def read(self) -> list[Any]:
        """The values that the keys of the walk have now; MISSING where a dictionary has none.

        Raises:
            IndexError: a list is shorter than it was.
            ValueError: a variable that a function closes over has no value any more.
        """
        return [
            *map(dict.get, *self._dicts, repeat(MISSING)),
            *map(getitem, *self._sequences),
            *map(getattr, *self._others),
        ]


def _objects(containers: Sequence[Container]) -> list[Any]:
    """The object of each entry."""
    return [each.obj for each in containers for _ in each.before]


def _attribute(container: Container) -> str:
    """Where a leaf of autograd and a cell hold what is their one entry."""
    return "grad" if isinstance(container.obj, torch.Tensor) else "cell_contents"
