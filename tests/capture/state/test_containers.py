"""Containers and sets of names that take short ways, against what they stand for."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.capture.state.code_names import AttributeNames
from weft.capture.state.containers import MISSING, AllBut, Container
from weft.capture.state.followed_names import FollowedNames
from weft.capture.state.type_facts import FactsOfTypes

NAMES = st.sampled_from("abcdef")
SETS = st.frozensets(NAMES)
VALUES = st.sampled_from([1, 1.0, True, None, "text", MISSING])
ENTRIES = st.dictionaries(NAMES, st.sampled_from([1, 2.0, None, "text"]))


def differences(before: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """(old, new) of each entry that differs."""
    keys = before.keys() | now.keys()
    pairs = {key: (before.get(key, MISSING), now.get(key, MISSING)) for key in keys}
    return {key: (old, new) for key, (old, new) in pairs.items() if type(old) is not type(new) or old != new}


@given(
    ENTRIES,
    st.none() | SETS | st.lists(NAMES, max_size=2).map(lambda names: AllBut(*names)),
    SETS,
    SETS,
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from([dict, OrderedDict]),
)
def test_changes_of_a_dictionary_are_those_of_its_entries_that_count(
    found: dict[str, Any],
    keys: frozenset[str] | AllBut | None,
    absent: frozenset[str],
    left_out: frozenset[str],
    writes: list[tuple[str, Any]],
    kind: type[dict[str, Any]],
) -> None:
    if isinstance(keys, frozenset):
        keys |= absent
    counts = lambda name: keys is None or (name in keys and name not in left_out)
    shown = lambda obj: {
        **{name: MISSING for name in absent if name not in obj},
        **{name: value for name, value in obj.items() if counts(name)},
    }
    obj = kind(found)
    container = Container(obj, "obj", keys, None, absent, left_out)
    before = shown(obj)
    for name, value in writes:
        if value is MISSING:
            obj.pop(name, None)
        else:
            obj[name] = value
    assert {key: (old, new) for key, old, new in container.changes()} == differences(before, shown(obj))
    container.restore()
    assert not [*container.changes()]
    assert differences(before, shown(obj)) == {}
    if keys is None:
        assert [*obj] == [*found]


@pytest.mark.parametrize("write", [lambda values: values.append(3), lambda values: values.reverse()])
def test_changes_of_a_list_are_seen(write: Any) -> None:
    values = [1, 2]
    container = Container(values, "values")
    assert not [*container.changes()]
    write(values)
    assert [*container.changes()]
    container.restore()
    assert values == [1, 2]


@given(st.lists(st.tuples(SETS, SETS, SETS, SETS), max_size=4), SETS)
def test_names_by_which_an_object_is_followed_are_counted_once(
    visits: list[tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]], known: frozenset[str]
) -> None:
    followed = FollowedNames(AttributeNames(lambda: None), FactsOfTypes()).none(known)
    reference, names = set(known), frozenset[str]()
    for more, left_out, absent, slots in visits:
        names |= more  # names of code only become more
        absent -= left_out  # what an object lacks has no plain value
        new = followed.grow(names, left_out, absent, slots)
        assert (new.names - new.left_out) | new.absent | new.slots == ((names - left_out) | absent | slots) - reference
        assert new.absent == absent - reference
        assert new.slots == slots - reference
        reference |= (names - left_out) | absent | slots
        assert {name for name in "abcdef" if name in followed} == reference
