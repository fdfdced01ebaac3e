"""Lists of the collector's objects: complete, and harmless to threads that are filling tuples."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.record.collector_lists import CollectorList


class Marked:
    """An object that only this file makes."""


@pytest.fixture(autouse=True)
def paused() -> Iterator[None]:
    with garbage_collection_paused():
        yield


def test_objects_of_all_types_but_tuples_are_listed_once() -> None:
    marked = [Marked() for _ in range(1000)]
    inside = [(each, [each]) for each in marked]
    listed = CollectorList()
    assert {id(each) for each in listed.of_types([Marked])} == set(map(id, marked))
    others = listed.except_tuples()
    assert len(set(map(id, others))) == len(others)
    assert {id(each) for each in others} >= set(map(id, marked))
    assert tuple not in {type(each) for each in others}
    assert type(None) not in {type(each) for each in others}
    assert listed.ids() >= {*map(id, marked), *map(id, inside)}
    tuples = listed.tuples()
    assert all(
        tuples[id(each)] == list(map(id, each)) or tuples[id(each)][::-1] == list(map(id, each)) for each in inside
    )
    wanted = {id(each) for each in inside[::7]}
    assert {id(each) for each in listed.tuples_with(wanted)} == wanted


def test_a_generation_is_listed_alone() -> None:
    gc.collect()
    marked = Marked()
    assert CollectorList([0]).of_types([Marked]) == [marked]
    assert CollectorList([1, 2]).of_types([Marked]) == []


# Audit hooks are called at each look of the collector. They are Python, and cannot be removed.
sys.addaudithook(lambda event, args: None)


@pytest.mark.parametrize("ask", ["of_types", "except_tuples"])
def test_another_thread_may_fill_tuples(ask: str) -> None:
    listed, asked = CollectorList(), {"of_types": [[dict]]}
    assert not _failures_of_a_thread_that_fills_tuples(lambda: getattr(listed, ask)(*asked.get(ask, [])))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="300 tries on 3.14.10 disturbed no tuple")
def test_the_plain_list_does_disturb_other_threads() -> None:
    """What the test above looks for does happen."""
    assert _failures_of_a_thread_that_fills_tuples(lambda: len(gc.get_objects()), times=300)


def _failures_of_a_thread_that_fills_tuples(ask: Callable[[], Any], times: int = 6) -> list[SystemError]:
    failures: list[SystemError] = []
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            try:
                tuple(each for each in range(3000))
            except SystemError as error:
                failures.append(error)

    thread, interval = threading.Thread(target=fill), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(times):
            ask()
            if failures:
                break
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    return failures
