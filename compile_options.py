"""The options of ``weft.compile`` and of ``CompiledStep``, checked."""

from __future__ import annotations

import inspect
from typing import Any

from weft.argument_checks import ArgumentChecks
from weft.inductor.compiler import MODES


def check_options(
    checks: ArgumentChecks, step: Any, mode: Any, dynamic: Any, verify: Any, fallback: Any, replay_every: Any
) -> None:
    """Refuse a step that cannot be called, and options of other types or values than the ones documented."""
    below = isinstance(step, (classmethod, staticmethod, property))
    remedy = "Write @weft.compile below that decorator" if below else "Write @weft.compile above a function"
    checks.function_or_callable("step", step, remedy)
    if inspect.iscoroutinefunction(step):
        remedy = "Move the training step to an ordinary function, call that"
        raise checks.wrong_type("step", step, "a function that runs when it is called", remedy)
    checks.one_of("mode", mode, list(MODES))
    checks.boolean("dynamic", dynamic, optional=True)
    checks.boolean("verify", verify, optional=True)
    checks.one_of("fallback", fallback, [None, "eager"])
    if replay_every is not None:
        checks.number("replay_every", replay_every, least=1, whole=True)
