"""One check in the place of many, for a step whose state has not changed for some calls.

Each guard compares thousands of objects by a few calls of compiled code, with Python around each. While nothing changes
between calls, the Python in between decides nothing. Then all compiled checks of all guards run in one call, and after
it only what is compared in Python. That is faster by a third: the compiled checks read so much memory that the Python
after each would have to be read into the nearest cache anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from weft import state_checks

# Calls in a row that find everything as before, after which the checks are joined. To try it costs as much as one
# check; where a part is not ready, the next try is after twice as many calls.
_CALM = 3


class Steady(NamedTuple):
    """What holds only if a part of the check would hold, with nothing changed that other parts rely on.

    Attributes:
        checks: made by :mod:`weft.state_checks`.
        rest: what is compared besides.
    """

    checks: Iterable[Callable[[], bool]] = ()
    rest: Callable[[], bool] | None = None


class GuardPart(NamedTuple):
    """A part of the check of a call.

    Attributes:
        holds: asks it.
        steady: what may be asked in its place until it fails; None where that is not known yet. Without it the part
            itself is asked always.
    """

    holds: Callable[[], bool]
    steady: Callable[[], Steady | None] | None = None


class SteadyChecks:
    """The parts of a check, asked one after the other or joined.

    Args:
        parts: by name, in the order in which they are asked: each relies on those before it.
    """

    def __init__(self, parts: dict[str, GuardPart]) -> None:
        self._parts = parts
        self._asked = [part.holds for part in parts.values()]
        self._joined: list[Callable[[], bool]] = []
        self._calm, self._wait = 0, _CALM  # calls in a row that found nothing changed; until the next try

    def hold(self) -> bool:
        """Whether all parts hold."""
        if self._joined:
            for holds in self._joined:  # without a generator, which costs as much as the short checks
                if not holds():
                    self.separate()
                    break
            else:
                return True
        for holds in self._asked:
            if not holds():
                self._calm = 0
                return False
        self._calm += 1
        if self._calm >= self._wait and state_checks.compiled() is not None:
            self._join()
        return True

    def separate(self) -> None:
        """Ask the parts themselves again: what they compare with may be another state from now on."""
        self._joined.clear()
        self._calm = 0

    def _join(self) -> None:
        self._calm = 0
        checks: list[Callable[[], bool]] = []
        rest: list[Callable[[], bool]] = []
        for part in self._parts.values():
            steady = Steady(rest=part.holds) if part.steady is None else part.steady()
            if steady is None:
                self._wait *= 2
                return
            checks += steady.checks
            rest += [] if steady.rest is None else [steady.rest]
        self._joined = [*state_checks.joined(checks), *rest]
