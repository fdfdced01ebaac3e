"""Numbers of numpy's in the Python state that change: ``self.best = np.minimum(self.best, loss.item())``.

Such a number is a guard by its value until it is seen to change. From then on a node reads it at the beginning of each
call, and the step gets the stand-in that numbers have which numpy computes. That a number of the same type is at the
place is a guard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from weft.capture.record.array_recorder import ArrayRecorder
from weft.capture.record.number_tables import entries_at
from weft.capture.record.python_numbers import is_number_of_numpy, is_rate_of_numpy
from weft.capture.state.containers import Container, StatePlace
from weft.capture.state.patterns import OfType
from weft.capture.step_interface import Role


class NumberAtPlace:
    """The target of a node that reads a number.

    Args:
        place: of the number.
    """

    def __init__(self, place: StatePlace) -> None:
        self._place = place
        self.__name__ = self.__qualname__ = "number_of_numpy"
        self.__module__ = __name__

    def __call__(self) -> Any:
        return self._place.outer()


class NumpyNumbers:
    """The numbers of numpy's in the state that change.

    Args:
        containers: of the state.
        changing: paths of what changes.
    """

    def __init__(self, containers: Iterable[Container], changing: Collection[str]) -> None:
        self._found = [
            (container, key, value)
            for container, key, value in entries_at(containers, changing)
            if is_number_of_numpy(value) and not is_rate_of_numpy(value, container)
        ]

    def __bool__(self) -> bool:
        return bool(self._found)

    def put_into(self, arrays: ArrayRecorder) -> None:
        """Put stand-ins into the entries that hold one of the numbers."""
        for container, key, value in self._found:
            place = container.place_of(key, Role.SCALAR)
            container.stand_in(key, arrays.call(NumberAtPlace(place), (), scratch=lambda value=value: value))
            container.by_value[key] = OfType(type(value))
