"""The body of a loop over rows, split into passes over the row at its reductions.

A row that registers cannot hold across a reduction is loaded again after it, from the L1 cache: only results of row
reductions and the column sums stay in registers. Reductions that do not depend on each other share a pass. Loads that
are first used in a later pass are issued before the first one, so that a row waits for memory once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.inductor.codegen.canonical import is_position
from weft.inductor.loop_ir.ir import Load, Reduce, ReductionResult, Store, Value


@dataclass(frozen=True)
class RowPass:
    """One pass over a row: everything up to some of its reductions, or after the last ones.

    Attributes:
        values: the values that are computed, operands first.
        accumulated: the column sums that add this row up.
        stores: the stores of this pass.
        row_reductions: the reductions that end the pass; none depends on another.
        early_loads: loads that a later pass is the first to use.
        live_out: values of the whole row (no position of it) that a later pass uses.
    """

    values: Sequence[Value]
    accumulated: Sequence[Reduce]
    stores: Sequence[Store]
    row_reductions: Sequence[Reduce] = ()
    early_loads: Sequence[Load] = ()
    live_out: frozenset[Value] = frozenset()


def row_passes(
    whole: RowPass, along: frozenset[int], across: frozenset[int], depth: Mapping[Value, int]
) -> list[RowPass]:
    """The body of the loop as passes over a row, in order.

    Args:
        along: the axes of a row.
        across: the axes of the loop.
        depth: for each value, the longest chain of row reductions that it depends on.
    """
    inside = frozenset(whole.values)
    reductions = [v for v in whole.values if isinstance(v, Reduce) and not along.isdisjoint(v.over)]
    # Within a pass, reductions of fewer values first: what the others need besides is not in registers yet.
    reductions.sort(key=lambda reduce: (depth[reduce], len(_needed([reduce], set(), inside))))
    # By depth: reductions of one depth do not depend on each other.
    row_reductions = [list(group) for _, group in itertools.groupby(reductions, lambda reduce: depth[reduce])]
    first = _first_passes(whole.values, row_reductions)
    last = len(row_reductions)
    # One pass for each depth, and one more for what comes after the last reduction.
    roots: list[list[Value]] = [*(list[Value](group) for group in row_reductions), []]
    stores: list[list[Store]] = [[] for _ in roots]
    accumulated: list[list[Reduce]] = [[] for _ in roots]
    read = {value.buffer for value in whole.values if isinstance(value, Load)}
    for store in whole.stores:
        # A buffer that is also read is overwritten in the last pass: earlier ones load it again.
        at = last if store.buffer in read else max(first.get(value, 0) for value in store.values())
        stores[at].append(store)
        roots[at] += store.values()
    rows = [v for v in whole.values if isinstance(v, Load) and _of_rows(v, along, across)]
    loaded = [_needed(here, set(itertools.chain(*row_reductions[:at])), inside) for at, here in enumerate(roots)]
    for reduce in whole.accumulated:
        earliest = max(first.get(arg, 0) for arg in reduce.args)
        wanted = _needed(reduce.args, set(reductions), inside).intersection(rows)
        # In the last pass that loads its operands anyway: passes with row reductions need more registers.
        accumulated[next((at for at in range(last, earliest, -1) if wanted <= loaded[at]), earliest)].append(reduce)
    found: list[list[Value]] = []
    done: set[Value] = set()
    live_out: set[Value] = set()
    for group, sums, here in zip([*row_reductions, []], accumulated, roots, strict=True):
        needed = _needed([*here, *(arg for reduce in sums for arg in reduce.args)], done, inside)
        live_out |= needed & done
        computed = [value for value in whole.values if value in needed and value not in done]
        # Only values without a position in the row survive a pass. Tiles are computed again from the L1 cache.
        done |= {value for value in computed if along.isdisjoint(value.axes)}
        done |= {value for value in whole.values if isinstance(value, ReductionResult) and value.reduce in group}
        found.append([value for value in computed if value not in group])
    later = {value for values in found[1:] for value in values}
    # A load with a mask or an indirect index has to wait for these, so it is not issued early.
    early_loads = [v for v in rows if v in later and v not in found[0] and not v.operands()]
    # Early loads belong to the first pass. Passes that came out empty are left out.
    parts = zip(found, accumulated, stores, [*row_reductions, []], strict=True)
    return [
        RowPass(*part, [] if at else early_loads, frozenset(live_out)) for at, part in enumerate(parts) if any(part)
    ]


def _first_passes(values: Sequence[Value], row_reductions: Sequence[Sequence[Reduce]]) -> dict[Value, int]:
    """The first pass in which each value can be used."""
    # A reduction ends its pass: its result can be used from the next one on.
    behind: dict[Value, int] = {reduce: at + 1 for at, group in enumerate(row_reductions) for reduce in group}
    first: dict[Value, int] = {}
    for value in values:
        first[value] = behind.get(value, max((first.get(operand, 0) for operand in value.operands()), default=0))
    return first


def _of_rows(load: Load, along: frozenset[int], across: frozenset[int]) -> bool:
    """Whether a load is of one row; weights, which all rows share, are not."""
    # Weights stay in the cache over all rows, so their loads need not be issued early.
    return not (along.isdisjoint(load.axes) or across.isdisjoint(load.axes) or is_position(load))


def _needed(roots: Sequence[Value], done: set[Value], inside: frozenset[Value]) -> set[Value]:
    """The values in the loop that ``roots`` depend on; values in ``done`` are leaves."""
    needed: set[Value] = set()
    stack = [root for root in roots if root in inside]
    while stack:
        value = stack.pop()
        if value in needed:
            continue
        needed.add(value)
        # What an earlier pass left in a register ends the search.
        if value not in done:
            stack += (operand for operand in value.operands() if operand in inside)
    return needed
