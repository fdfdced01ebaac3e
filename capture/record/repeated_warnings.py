"""``warnings.warn`` in a step: each call warns where eager would warn at each call.

Which warnings are shown is for the filters to say. Most show a warning once for each line, and so does the capture,
which runs the step's Python once. Under the filter "always" the warning is recorded as a call that every step repeats.
Whether that filter applies is a guard, where the step did not set it itself. A warning that the step collects in a list
of its own (``catch_warnings(record=True)``) is seen by nobody else, and is not repeated.
"""

from __future__ import annotations

import contextlib
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
        own_filter: whether the step set the filter that shows it.
    """

    message: Any
    category: type[Warning]
    filename: str
    line: int
    module: str
    registry: dict[Any, Any]
    own_filter: bool

    def __call__(self) -> None:
        where = self.filename, self.line, self.module, self.registry
        with warnings.catch_warnings() if self.own_filter else contextlib.nullcontext():
            if self.own_filter:
                warnings.simplefilter("always")
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
    collecting: list[warnings.catch_warnings[Any]] = []
    enter, leave = warnings.catch_warnings.__enter__, warnings.catch_warnings.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if (collected := enter(self)) is not None:
            collecting.append(self)
        return collected

    @functools.wraps(leave)
    def left(self: Any, *why: Any) -> None:
        if self in collecting:
            collecting.remove(self)
        leave(self, *why)

    yield warnings.catch_warnings, "__enter__", entered
    yield warnings.catch_warnings, "__exit__", left
    yield warnings, "warn", _warn_through(warnings.warn, calls, collecting)


def _warn_through(original: Callable[..., None], calls: OutsideCalls, collecting: list[Any]) -> Callable[..., None]:
    filters = warnings.filters  # catch_warnings puts a copy there

    @functools.wraps(original)
    def warn(
        message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **more: Any
    ) -> None:
        if not collecting and calls.counts() and not more:
            own_filter = warnings.filters is not filters
            warning = _at_line(message, category, sys._getframe(max(stacklevel, 1)), own_filter)
            always = warning.always_shown()
            asked = f"whether {warning.category.__name__} of {warning.filename}:{warning.line} is always shown"
            if not own_filter and all(read.text != asked for read in calls.reads):
                calls.reads.append(OutsideRead(asked, warning.always_shown, always))
            if always:
                opaque(warning)()
                return
        original(message, category, stacklevel + 1, source, **more)

    return warn


def _at_line(message: Any, category: type[Warning] | None, frame: Any, own_filter: bool) -> _Warning:
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    return _Warning(
        message, kind, frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<string>"), registry, own_filter
    )
