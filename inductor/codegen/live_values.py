"""Which values of a row are live while it is reduced.

Goes in: a nest and the axes of a row. Comes out: for each value the longest chain of reductions below it
(:func:`depths`), and how many values must be kept across a reduction (:func:`live_across_reductions`). The first
decides how often a kernel walks a row, the second whether registers hold it meanwhile.
"""

from __future__ import annotations

from weft.inductor.codegen.canonical import is_position
from weft.inductor.loop_ir.ir import Load, Nest, Reduce, Value, ordered


def live_across_reductions(nest: Nest, over: frozenset[int], shared: frozenset[Value] = frozenset()) -> int:
    """How many values of every position of a row are live across a reduction of the row, at the worst reduction.

    These are values that are computed before and used after it, or the loads that they come from, whichever are fewer:
    a value can be recomputed from loads that are live. What is used after a reduction only is loaded there. Loads in
    ``shared`` are live anyway and do not count.
    """
    depth = depths(nest, over)
    # A pass is numbered by the reductions before it, so a use at depth d happens between barriers d and d + 1.
    uses: dict[Value, list[int]] = {}
    for user in nest.values():
        # A reduction of the row reads its operand before its result exists: one barrier earlier.
        when = depth[user] - (isinstance(user, Reduce) and not over.isdisjoint(user.over))
        for operand in user.operands():
            uses.setdefault(operand, []).append(when)
    for store in nest.stores:
        for value in store.values():
            uses.setdefault(value, []).append(depth[store.value])
    # Values that do not change along the row are a register for the whole program, and positions are computed again.
    wide = [v for v in uses if not v.axes.isdisjoint(over) and not is_position(v)]
    # A load happens where it is first used; anything else as soon as its operands are there.
    first = {v: min(uses[v]) if isinstance(v, Load) else depth[v] for v in wide}
    most = 0
    # A reduction of the row is a barrier: no position goes on before all have been read.
    for barrier in range(1, max(depth.values()) + 1):
        crossing = [v for v in wide if first[v] < barrier <= max(uses[v])]
        loads = {v for v in ordered(crossing) if isinstance(v, Load) and v in first and first[v] < barrier} - shared
        most = max(most, min(len(crossing), len(loads)))
    return most


def depths(nest: Nest, over: frozenset[int]) -> dict[Value, int]:
    """For each value, the longest chain of reductions along ``over`` that it depends on, itself included."""
    depth: dict[Value, int] = {}
    for value in nest.values():
        # Operands come first in `values`, so one walk is enough.
        below = max((depth[operand] for operand in value.operands()), default=0)
        depth[value] = below + (isinstance(value, Reduce) and not over.isdisjoint(value.over))
    return depth
