"""The garbage collector while graphs are made, and what it finds afterwards."""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Iterator

import pytest

from weft.capture import garbage_collection
from weft.capture.garbage_collection import garbage_collection_paused


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if collecting else gc.disable)()


def test_nothing_is_walked_inside_and_young_collections_do_not_walk_it_later() -> None:
    begun: list[int] = []
    note = lambda phase, info: begun.append(info["generation"]) if phase == "start" else None
    gc.callbacks.append(note)
    try:
        with garbage_collection_paused():
            circles = [Circle() for _ in range(20_000)]
            assert not begun
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert sum(gc.get_count()[:1]) < 1000
    watched = weakref.ref(circles[0])
    del circles
    gc.collect(0)
    assert watched() is not None
    gc.collect()
    assert watched() is None


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() >= frozen > 0


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with garbage_collection_paused():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), garbage_collection_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_garbage_that_pauses_leave_behind_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "_LARGEST_SHARE", math.inf)
    monkeypatch.setattr(garbage_collection._pauses, "_not_before", 0.0)
    between = garbage_collection._FULL_COLLECTION_AFTER
    watched = []
    for _ in range(3 * between):
        with garbage_collection_paused():
            watched.append(weakref.ref(Circle()))
    assert sum(each() is not None for each in watched) <= between


def test_full_collections_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, collections = [0.0], []

    def collect() -> None:
        collections.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(garbage_collection, "time", types.SimpleNamespace(process_time=lambda: now[0]))
    monkeypatch.setattr(garbage_collection, "_pauses", pauses := garbage_collection._Pauses())
    monkeypatch.setattr(gc, "collect", collect)
    while now[0] < 1000:
        now[0] += 0.01
        with garbage_collection_paused():
            pass
    assert 20 < len(collections) <= 1 + 1000 * garbage_collection._LARGEST_SHARE
    assert collections[0] < 3  # after 200 pauses
    assert pauses._count == 0
