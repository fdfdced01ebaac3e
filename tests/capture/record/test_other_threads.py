"""Another thread reads numbers of the Python state while a step is captured, which are symbols then."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.capture.record.recorder import OpRecorder

READS: dict[str, Callable[[Any], Any]] = {
    "text": lambda n: f"{n} {n!r} {n:.2f} {str(n)} " + "%.1f" % n,  # noqa: RUF010, UP031
    "arithmetic": lambda n: (n + 1, 2.5 * n, 7 - n, n / 4, n // 2, n % 3, n**2, -n, abs(n), divmod(n, 2)),
    "both": lambda n: (n + n, n * n, n == n),
    "comparisons": lambda n: (n > 1, n <= 3, n == 2, n != 2, n in (1, 2), max(n, 2) + 0),
    "conversions": lambda n: (int(n), float(n), bool(n), hash(n), round(n), math.floor(n)),
    "types": lambda n: (isinstance(n, (int, float)), {n: 1}[n]),
}


class State:
    """Two numbers that the step changes."""

    def __init__(self) -> None:
        self.count, self.rate = 1, 0.75


@pytest.mark.parametrize("name", READS)
def test_it_computes_with_their_values_and_leaves_no_guards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, read, found, original = State(), READS[name], list[Any](), OpRecorder.emit
    asked: list[bool] = []

    def read_both() -> None:
        for number, plain in ((state.count, int), (state.rate, float)):
            found.append((hasattr(number, "node"), read(number), read(plain(number))))

    def reads() -> None:
        while True:
            if asked:
                read_both()
                if not asked.pop():
                    return

    def emit(*args: Any, **kwargs: Any) -> Any:
        asked.append(True)
        while asked:  # neither locks nor threads may be used in a step
            pass
        return original(*args, **kwargs)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.count += 1
        state.rate *= 0.5
        return x * state.count * state.rate

    def guards() -> list[str]:
        state.count, state.rate = 1, 0.75
        compiled = weft.compile(step)
        for _ in range(2):
            compiled(torch.ones(2))
        return [re.sub(r"[a-z]+[0-9]+", "number", str(each)) for each in compiled.entries[0].guards.listed()]

    expected = guards()
    thread = threading.Thread(target=reads)
    thread.start()
    monkeypatch.setattr(OpRecorder, "emit", emit)
    try:
        assert guards() == expected
    finally:
        asked.append(False)
        thread.join()
    assert any(is_symbol for is_symbol, *_ in found)
    for _, ours, plain in found:
        assert ours == plain
        assert type(ours) is type(plain)


def test_methods_of_symbols_are_put_back() -> None:
    before = {name: value for kind in (torch.SymInt, torch.SymFloat) for name, value in vars(kind).items()}
    weft.compile(lambda x: x * 2)(torch.ones(2))
    assert before == {name: value for kind in (torch.SymInt, torch.SymFloat) for name, value in vars(kind).items()}
