"""``warnings.warn`` in a step: each call warns where eager would warn at each call.

Which warnings are shown is for the filters to say. Most show a warning once for each line, and so does the capture,
which runs the step's Python once. Under the filter "always" the warning is recorded as a call that every step repeats.
Whether that filter applies is a guard.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.capture.record.opaque import opaque
from weft.capture.record.outside_calls import OutsideCalls, OutsideRead


@dataclass(frozen=True, eq=False)
class _Warning:
    """One warning of a line; called to issue it.

    Attributes:
        message, category, filename, line, module, registry: the arguments of ``warnings.warn_explicit``.
    """

    message: Any
    category: type[Warning]
    filename: str
    line: int
    module: str
    registry: dict[Any, Any]

    def __call__(self) -> None:
        where = self.filename, self.line, self.module, self.registry
        warnings.warn_explicit(self.message, self.category, *where)

    def always_shown(self) -> bool:
        """Whether the filters show it each time, found as :mod:`warnings` finds it."""
        for action, text, category, module, line in warnings.filters:
            matches = (text is None or text.match(str(self.message))) and issubclass(self.category, category)
            if matches and (module is None or module.match(self.module)) and line in (0, self.line):
                return action in ("always", "all")
        return False


def warning_replacements(calls: OutsideCalls) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): what stands in for ``warnings.warn`` while a step is captured."""
    yield warnings, "warn", _warn_through(warnings.warn, calls)


def _warn_through(original: Callable[..., None], calls: OutsideCalls) -> Callable[..., None]:
    @functools.wraps(original)
    def warn(
        message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **more: Any
    ) -> None:
        if calls.counts() and not more:
            warning = _at_line(message, category, sys._getframe(max(stacklevel, 1)))
            always = warning.always_shown()
            asked = f"whether {warning.category.__name__} of {warning.filename}:{warning.line} is always shown"
            if all(read.text != asked for read in calls.reads):
                calls.reads.append(OutsideRead(asked, warning.always_shown, always))
            if always:
                opaque(warning)()
                return
        original(message, category, stacklevel + 1, source, **more)

    return warn


def _at_line(message: Any, category: type[Warning] | None, frame: Any) -> _Warning:
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return _Warning(
        message, kind, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<string>"), registry
    )
