"""What is remembered of the loaded modules is asked anew where one was loaded, replaced or removed."""

from __future__ import annotations

import sys
import types

import pytest

from weft.capture.loaded_modules import names_of_modules, remembered


def test_a_question_is_asked_again_where_the_modules_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    @remembered
    def count() -> int:
        asked.append(1)
        return len(asked)

    assert [count(), count()] == [1, 1]
    monkeypatch.setitem(sys.modules, "a_module_of_this_test", types.ModuleType("a_module_of_this_test"))
    assert [count(), count()] == [2, 2]
    monkeypatch.setitem(sys.modules, "a_module_of_this_test", types.ModuleType("a_module_of_this_test"))
    assert [count(), count()] == [3, 3]
    monkeypatch.delitem(sys.modules, "a_module_of_this_test")
    assert [count(), count()] == [4, 4]


def test_names_are_those_of_the_loaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of_modules() == sys.modules.keys()
    monkeypatch.setitem(sys.modules, "a_module_of_this_test", types.ModuleType("a_module_of_this_test"))
    assert names_of_modules() == sys.modules.keys()
