"""How long the stages of a compilation take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Runs things and remembers how long each took: seconds of this process's CPU time, which other work on the machine
    does not lengthen; summed where a name comes again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, run: Callable[[], T]) -> T:
        started = time.process_time()
        result = run()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - started
        return result

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
