"""Minimum cuts against all cuts there are."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inductor.passes.min_cut import FlowGraph

COUNT = 7
VERTEX = st.integers(0, COUNT - 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(VERTEX, VERTEX, st.integers(0, 9)), max_size=30))
def test_cuts_are_minimum_and_nearest_to_the_sink(edges: list[tuple[int, int, int]]) -> None:
    source, sink = 0, COUNT - 1
    graph = FlowGraph(COUNT)
    for edge in edges:
        graph.add(*edge)
    value, on_sink_side = graph.minimum_cut(source, sink)
    cuts = {}
    for inner in itertools.product((False, True), repeat=COUNT - 2):
        sides = (False, *inner, True)
        cuts[sides] = sum(room for tail, head, room in edges if not sides[tail] and sides[head])
    assert value == min(cuts.values())
    assert cuts[tuple(on_sink_side)] == value
    minimum = [sides for sides, room in cuts.items() if room == value]
    assert sum(on_sink_side) == min(map(sum, minimum))


def test_long_chains_need_no_recursion() -> None:
    graph = FlowGraph(20_000)
    for vertex in range(19_999):
        graph.add(vertex, vertex + 1, 5 if vertex != 12_345 else 3)
    value, on_sink_side = graph.minimum_cut(0, 19_999)
    assert value == 3
    assert [on_sink_side[12_345], on_sink_side[12_346]] == [False, True]
