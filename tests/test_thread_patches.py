"""Replacements of attributes that one thread sees and other threads do not."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.thread_patches import Patches, present, replaced


def in_another_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(10)
    return results[0]


class Animal:
    def name(self) -> str:
        return "animal"

    @staticmethod
    def legs() -> int:
        return 4

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @property
    def age(self) -> int:
        return 1


class Dog(Animal):
    pass


def read() -> list[Any]:
    dog = Dog()
    return [dog.name(), Dog.legs(), Dog.kind(), dog.age]


@pytest.mark.parametrize(
    ("name", "replacement", "seen"),
    [
        ("name", lambda self: "cat", ["cat", 4, "Dog", 1]),
        ("legs", staticmethod(lambda: 3), ["animal", 3, "Dog", 1]),
        ("kind", classmethod(lambda cls: cls.__name__ * 2), ["animal", 4, "DogDog", 1]),
        ("age", property(lambda self: 2), ["animal", 4, "Dog", 2]),
    ],
)
@pytest.mark.parametrize("owner", [Animal, Dog])
def test_members_of_a_class_are_replaced_in_one_thread(owner: type, name: str, replacement: Any, seen: Any) -> None:
    before = dict(vars(owner))
    plain = read()
    with replaced(owner, name, replacement):
        assert read() == seen
        assert in_another_thread(read) == plain
    assert read() == plain
    assert dict(vars(owner)) == before


def test_the_innermost_replacement_counts_and_can_call_the_next_one() -> None:
    with replaced(math, "sqrt", lambda x: -1.0):
        outer = present(math, "sqrt")
        with replaced(math, "sqrt", lambda x: outer(x) * 2):
            assert math.sqrt(4) == -2.0
        assert math.sqrt(4) == -1.0
    assert math.sqrt(4) == 2.0


def test_threads_that_end_in_any_order_do_not_restore_each_others_replacements() -> None:
    module = types.ModuleType("module")
    module.f = original = lambda: "original"
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen: dict[str, Any] = {}

    def first() -> None:
        with replaced(module, "f", lambda: "first"):
            first_is_in.set()
            second_is_in.wait(10)
            seen["first"] = module.f()
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(10)
        with replaced(module, "f", lambda: "second"):
            second_is_in.set()
            first_is_out.wait(10)
            seen["second"] = module.f()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {"first": "first", "second": "second"}
    assert module.f is original


def test_a_function_is_replaced_under_every_name_and_one_imported_meanwhile_is_restored() -> None:
    holder = types.ModuleType("weft_test_holder")
    holder.seed = original = torch.manual_seed
    patches = Patches()
    patches.function(torch, "manual_seed", lambda seed: "replaced")
    import sys

    sys.modules["weft_test_holder"] = holder
    try:
        patches.apply()
        assert torch.manual_seed(1) == holder.seed(1) == "replaced"
        assert isinstance(in_another_thread(lambda: holder.seed(1)), torch.Generator)
        holder.late = torch.manual_seed
        patches.undo()
        assert holder.seed is holder.late is torch.manual_seed is original
    finally:
        del sys.modules["weft_test_holder"]


def test_a_replaced_class_makes_and_recognises_objects_of_both_kinds() -> None:
    module = types.ModuleType("module")
    module.Animal = Animal
    with replaced(module, "Animal", type("Robot", (), {})):
        robot, animal = module.Animal(), in_another_thread(lambda: module.Animal())
        assert type(robot).__name__ == "Robot"
        assert type(animal) is Animal
        assert isinstance(robot, module.Animal)
        assert isinstance(animal, module.Animal)
        assert in_another_thread(lambda: isinstance(robot, module.Animal)) is False
        assert type(in_another_thread(lambda: type("Cat", (module.Animal,), {})())).__name__ == "Cat"
    assert module.Animal is Animal


def test_a_replacement_that_the_user_made_meanwhile_stays() -> None:
    module = types.ModuleType("module")
    module.f = lambda: "original"
    mine = lambda: "mine"
    with replaced(module, "f", lambda: "replaced"):
        module.f = mine
    assert module.f is mine
