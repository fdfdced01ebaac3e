"""The body of a loop over rows, cut behind the reductions of a row.

Rows that registers cannot hold from one reduction to the next are loaded again behind it, from the first-level cache:
nothing but numbers of the row as a whole, and the sums of columns, lives on. Reductions that do not wait for each other
share a pass over the row. What is first used behind a reduction is asked for in front of all of them, so that a row
waits for memory once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.inductor.codegen.canonical import is_position
from weft.inductor.ir import Load, Part, Reduce, Store, Value


@dataclass(frozen=True)
class Segment:
    """What is done up to reductions of a row, or behind the last ones.

    Attributes:
        values: what is computed, operands first.
        gathered: the sums of columns that take the row in.
        stores: what is stored.
        ends: the reductions behind all that, none of which waits for another.
        ahead: loads that a later segment is the first to use.
        kept: values of the row as a whole that a later segment uses.
    """

    values: Sequence[Value]
    gathered: Sequence[Reduce]
    stores: Sequence[Store]
    ends: Sequence[Reduce] = ()
    ahead: Sequence[Load] = ()
    kept: frozenset[Value] = frozenset()


def segments(
    whole: Segment, along: frozenset[int], across: frozenset[int], depth: Mapping[Value, int]
) -> list[Segment]:
    """The body of the loop as segments, in order.

    Args:
        along: the axes of a row.
        across: the axes that the loop walks along.
        depth: how many reductions of the row lie one behind the other up to each value.
    """
    inside = frozenset(whole.values)
    reductions = [v for v in whole.values if isinstance(v, Reduce) and not along.isdisjoint(v.over)]
    # Those of fewer values first: what others need besides is not yet in registers.
    reductions.sort(key=lambda reduce: (depth[reduce], len(_needed([reduce], set(), inside))))
    ends = [list(group) for _, group in itertools.groupby(reductions, lambda reduce: depth[reduce])]
    first = _first_segments(whole.values, ends)
    last = len(ends)
    roots: list[list[Value]] = [*(list[Value](group) for group in ends), []]
    stores: list[list[Store]] = [[] for _ in roots]
    gathered: list[list[Reduce]] = [[] for _ in roots]
    read = {value.buffer for value in whole.values if isinstance(value, Load)}
    for store in whole.stores:
        # What is loaded again must not have been overwritten.
        at = last if store.buffer in read else max(first.get(value, 0) for value in store.values())
        stores[at].append(store)
        roots[at] += store.values()
    rows = [v for v in whole.values if isinstance(v, Load) and _of_rows(v, along, across)]
    loaded = [_needed(here, set(itertools.chain(*ends[:at])), inside) for at, here in enumerate(roots)]
    for reduce in whole.gathered:
        earliest = max(first.get(arg, 0) for arg in reduce.args)
        wanted = _needed(reduce.args, set(reductions), inside).intersection(rows)
        # Where its rows are loaded anyway, the last time: a pass with sums along the row needs more registers.
        gathered[next((at for at in range(last, earliest, -1) if wanted <= loaded[at]), earliest)].append(reduce)
    found: list[list[Value]] = []
    done: set[Value] = set()
    kept: set[Value] = set()
    for group, sums, here in zip([*ends, []], gathered, roots, strict=True):
        needed = _needed([*here, *(arg for reduce in sums for arg in reduce.args)], done, inside)
        kept |= needed & done
        computed = [value for value in whole.values if value in needed and value not in done]
        done |= {value for value in computed if along.isdisjoint(value.axes)}
        done |= {value for value in whole.values if isinstance(value, Part) and value.reduce in group}
        found.append([value for value in computed if value not in group])
    later = {value for values in found[1:] for value in values}
    ahead = [v for v in rows if v in later and v not in found[0] and not v.operands()]
    parts = zip(found, gathered, stores, [*ends, []], strict=True)
    return [Segment(*part, [] if at else ahead, frozenset(kept)) for at, part in enumerate(parts) if any(part)]


def _first_segments(values: Sequence[Value], ends: Sequence[Sequence[Reduce]]) -> dict[Value, int]:
    """The first segment in which each value can be used."""
    behind: dict[Value, int] = {reduce: at + 1 for at, group in enumerate(ends) for reduce in group}
    first: dict[Value, int] = {}
    for value in values:
        first[value] = behind.get(value, max((first.get(operand, 0) for operand in value.operands()), default=0))
    return first


def _of_rows(load: Load, along: frozenset[int], across: frozenset[int]) -> bool:
    """Whether a load is of a row, and no other row shares it."""
    return not (along.isdisjoint(load.axes) or across.isdisjoint(load.axes) or is_position(load))


def _needed(roots: Sequence[Value], done: set[Value], inside: frozenset[Value]) -> set[Value]:
    """What ``roots`` are computed from in the loop; of what is done, only what is used directly."""
    needed: set[Value] = set()
    stack = [root for root in roots if root in inside]
    while stack:
        value = stack.pop()
        if value in needed:
            continue
        needed.add(value)
        if value not in done:
            stack += (operand for operand in value.operands() if operand in inside)
    return needed
