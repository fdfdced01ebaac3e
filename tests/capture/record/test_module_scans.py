"""Variables of modules with stand-ins: all are found, and modules that did not change are not looked at again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weft.capture.record.module_scans import ModuleScans
from weft.capture.record.stand_ins import PlainKinds, StandIns


class Generator:
    """Has a stand-in: a text with its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class Modules:
    """Two modules and their scans. An attempt puts the stand-ins in place, and takes them away again."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {"a": Generator(1), "b": len, "c": [1], "d": "text"}
        self.second: dict[str, Any] = {"e": self, "f": 1.5}
        self.by_id: dict[int, Any] = {id(len): "another len"}
        self.plain = PlainKinds()
        self.scans = ModuleScans()
        self.asked: list[Any] = []

    def of(self, value: Any) -> Any | None:
        self.asked.append(value)
        if (known := self.by_id.get(id(value))) is not None:
            return known
        if isinstance(value, Generator):
            return f"stand-in {value.number}"
        self.plain.add(type(value))
        return None

    def attempt(
        self, step: Callable[[], None] = lambda: None, others: Iterator[Any] | tuple[Any, ...] = ()
    ) -> set[Any]:
        """The stand-ins in place while the step runs."""
        self.asked.clear()
        found = list(self.scans.found([self.first, self.second], others, StandIns(self.by_id, self.of, self.plain)))
        for names, name, _, new in found:
            names[name] = new
        self.scans.replaced()
        step()
        self.scans.kept()
        for names, name, value, new in found:
            if names[name] is new:
                names[name] = value
        self.scans.restored()
        return {new for _, _, _, new in found}


@pytest.fixture
def modules() -> Modules:
    return Modules()


def test_what_did_not_change_is_not_looked_at_again(modules: Modules) -> None:
    assert modules.attempt() == {"stand-in 1", "another len"}
    assert {type(each) for each in modules.asked} == {Generator, type(len), list, Modules}
    for _ in range(2):
        assert modules.attempt() == {"stand-in 1", "another len"}
        assert modules.asked == [modules.first["a"], len]


def test_a_variable_that_changes_between_attempts_is_found(modules: Modules) -> None:
    modules.attempt()
    modules.second["f"] = Generator(2)
    modules.first["b"] = max
    assert modules.attempt() == {"stand-in 1", "stand-in 2"}


def test_a_variable_that_the_step_changes_is_found(modules: Modules) -> None:
    modules.attempt(lambda: modules.second.update(g=Generator(3)))
    assert modules.attempt(lambda: modules.first.update(b=Generator(4))) == {"stand-in 1", "stand-in 3", "another len"}
    assert modules.attempt() == {"stand-in 1", "stand-in 3", "stand-in 4"}


def test_another_function_that_is_replaced_is_found(modules: Modules) -> None:
    modules.first["b"] = max
    assert modules.attempt() == {"stand-in 1"}
    modules.by_id[id(max)] = "another max"
    assert modules.attempt() == {"stand-in 1", "another max"}


def test_functions_that_are_replaced_in_some_attempts_only(modules: Modules) -> None:
    modules.first |= {"b": max, "i": [max]}
    without, with_max = dict(modules.by_id), modules.by_id | {id(max): "another max"}
    for replaced, expected in ((without, {"stand-in 1"}), (with_max, {"stand-in 1", "another max"})) * 3:
        modules.by_id = replaced
        assert modules.attempt() == expected
    assert len(modules.asked) < 4, "modules were looked at again"


def test_ids_of_objects_that_are_gone_are_dropped(modules: Modules) -> None:
    for _ in range(50):
        modules.by_id = {id(len): "another len", id(Generator(6)): "another generator"}
        modules.attempt()
    assert len(modules.scans._ids) < 12


def test_nothing_is_remembered_of_modules_that_python_does_not_list(modules: Modules) -> None:
    other = {"h": Generator(5)}
    assert modules.attempt(others=(other,)) == {"stand-in 1", "stand-in 5", "another len"}
    assert all(scan.names is not other for scan in modules.scans._scans.values())


def test_a_type_is_forgotten_when_it_is_gone() -> None:
    kinds, known = PlainKinds(), set(PlainKinds().ids)
    kind = type("Local", (), {})
    kinds.add(kind)
    assert kinds.ids == known | {id(kind)}
    del kind
    gc.collect()
    assert kinds.ids == known
