"""Attributes that a step looked for on tensors and did not find are still missing: ``hasattr(p, "main_grad")``."""

from __future__ import annotations

from weft import state_checks
from weft.capture.guards.steady_checks import Steady
from weft.capture.state.tensor_attributes import MissingAttributes


class MissingAttributeGuard:
    """Guards what a step looked for. Most tensors have no attributes of a program's own at all: they are compared
    together.

    Args:
        missing: the tensors, and what was looked for.
    """

    def __init__(self, missing: MissingAttributes) -> None:
        self._looked_for = list(missing.found.values())
        self._have_none = lambda: False
        self._have_others: list[tuple[dict[str, object], set[str]]] = []
        self._watch()

    def __len__(self) -> int:
        return len(self._looked_for)

    def listed(self) -> list[str]:
        """What must hold."""
        return [f"{path}.{name} is missing" for _, path, names in self._looked_for for name in sorted(names)]

    def holds(self) -> bool:
        """Whether no attribute is there. False only means that :meth:`failure` must be asked."""
        return self._have_none() and not any(not names.isdisjoint(found) for found, names in self._have_others)

    def steady(self) -> Steady:
        """What holds only if :meth:`holds` would."""
        return Steady(rest=self.holds) if self._have_others else Steady([self._have_none])

    def failure(self) -> str | None:
        """Which attribute is there now."""
        for attributes, path, names in self._looked_for:
            if there := sorted(names & attributes.keys()):
                return f"{path}.{there[0]} is there, and was missing"
        self._watch()
        return None

    def _watch(self) -> None:
        """Compare those together that still have no attributes."""
        self._have_none = state_checks.all_empty([each for each, *_ in self._looked_for if not each])
        self._have_others = [(each, names) for each, _, names in self._looked_for if each]
