"""Groups of loop nests that will be one kernel: their common axes, what they access there, and their nest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.inductor.loop_ir.axes import (
    AxisExpression,
    Factor,
    Substitution,
    size_hint,
    split_axes,
    substitute,
    substitute_stores,
)
from weft.inductor.loop_ir.ir import Call, Index, Int, Load, Nest, Store, Value, rewrite_stores
from weft.inductor.loop_ir.numbering import Numbered, number_of, numbered, renumbered
from weft.inductor.lowering.lowered_step import Extern, Loop
from weft.inductor.lowering.registry import convert, literal


class GroupMember(NamedTuple):
    """A nest of a group: over numbered buffers, the numbers that these have in the group, and its axes there."""

    form: Nest
    common: tuple[int, ...]
    substitution: tuple[tuple[int, AxisExpression], ...]


@dataclass
class FusionGroup:
    """Nests that will be one kernel, over common axes ``sizes``.

    Attributes:
        members: positions of the operations, and their axes in the group's.
        reads, writes: indices over the group's axes, by buffer. None in ``writes`` where a buffer is stored under a
            mask, at positions that the data decides, or by several stores.
        reduced: the sets of axes reduced over.
        first, last: positions of the first and the last member in the step.
    """

    sizes: list[Int]
    members: list[tuple[int, Substitution]]
    reads: dict[str, set[Index]]
    writes: dict[str, Index | None]
    # As sets of axes, since this is what decides the shape of a kernel (`codegen/kernel_plan.py`).
    reduced: set[frozenset[int]]
    first: int
    last: int
    # Calls take part as nodes of the dependence graph only.
    fixed: bool = False  # an extern

    @property
    def buffers(self) -> set[str]:
        """The buffers that its members read and write."""
        return set(self.reads) | set(self.writes)


def single(at: int, operation: Loop | Extern) -> FusionGroup:
    """The group of one operation."""
    if isinstance(operation, Extern):
        return FusionGroup([], [(at, {})], {}, {}, set(), at, at, fixed=True)
    nest, names = operation.form, operation.names
    reads: dict[str, set[Index]] = {}
    for load in nest.reads:
        reads.setdefault(names[load.buffer], set()).add(load.index)
    writes: dict[str, Index | None] = {}
    for store in nest.stores:
        name = names[store.buffer]
        plain = store.mask is None and name not in writes and not store.index.indirect
        writes[name] = store.index if plain else None
    # The identity: a group of one has its member's axes.
    same = {axis: AxisExpression(((axis, 1),)) for axis in range(len(nest.sizes))}
    reduced = {frozenset(value.over) for value in nest.reduces}
    return FusionGroup(list(nest.sizes), [(at, same)], reads, writes, reduced, at, at)


def accesses(group: FusionGroup, name: str) -> list[Index]:
    """The different indices at which a group reads and writes a buffer."""
    found = list(group.reads.get(name, ()))
    written = group.writes.get(name)
    return [*found, written] if written is not None and written not in found else found


def shared_axes(one: FusionGroup, two: FusionGroup, name: str) -> int:
    """How many axes two groups may have in common by their accesses of a buffer."""
    # The lesser of both sides: loops that only one of them has are not matched by this buffer.
    return min(max((len(i.strides) for i in accesses(g, name)), default=0) for g in (one, two))


def axes_of(group: FusionGroup) -> frozenset[int]:
    """The axes that a part of a joined group loops over."""
    indices = [index for reads in group.reads.values() for index in reads]
    indices += [index for index in group.writes.values() if index is not None]
    return frozenset().union(*(index.axes for index in indices), *group.reduced)


def is_row_part(narrow: frozenset[int], wide: frozenset[int], over: frozenset[int]) -> bool:
    """Whether ``narrow`` runs once a row where ``wide`` runs along the row too."""
    # Exactly the reduced axes are missing from the narrow part: neither fewer, nor some of the row's.
    return bool(over) and narrow | over == wide and not narrow & over


def points(sizes: Sequence[Int], over: Iterable[int]) -> float:
    """How many points the axes ``over`` have."""
    total = 1.0
    for axis in over:
        total *= size_hint(sizes[axis])
    return total


def over_common_axes(
    one: FusionGroup, two: FusionGroup, factors: list[Factor]
) -> tuple[FusionGroup, FusionGroup, FusionGroup]:
    """Both groups over common axes, together and each alone."""
    sizes: list[Int] = []
    left: list[tuple[int, int, Int]] = []
    right: list[tuple[int, int, Int]] = []
    for factor in factors:
        left.append((factor.left, len(sizes), factor.size))
        right.append((factor.right, len(sizes), factor.size))
        sizes.append(factor.size)
    for group, pairs in ((one, left), (two, right)):
        known = {axis for axis, _, _ in pairs}
        for axis, size in enumerate(group.sizes):
            # Axes that the shared buffer does not have stay as they are, one group's own.
            if axis not in known and size != 1:
                pairs.append((axis, len(sizes), size))
                sizes.append(size)
    a, b = _moved(one, left, sizes), _moved(two, right, sizes)
    reads = {name: a.reads.get(name, set()) | b.reads.get(name, set()) for name in {**a.reads, **b.reads}}
    both = FusionGroup(
        sizes,
        a.members + b.members,
        reads,
        {**a.writes, **b.writes},
        a.reduced | b.reduced,
        min(a.first, b.first),
        max(a.last, b.last),
    )
    return both, a, b


def _moved(group: FusionGroup, pairs: list[tuple[int, int, Int]], sizes: list[Int]) -> FusionGroup:
    substitution = split_axes(pairs, group.sizes)
    return FusionGroup(
        sizes,
        [(at, _through(old, substitution)) for at, old in group.members],
        {name: {substitute(index, substitution) for index in indices} for name, indices in group.reads.items()},
        {name: None if index is None else substitute(index, substitution) for name, index in group.writes.items()},
        # A reduced axis that was split is reduced along all its pieces.
        {frozenset(new for axis in over for new, _ in substitution[axis].terms) for over in group.reduced},
        group.first,
        group.last,
    )


def _through(old: Substitution, substitution: Mapping[int, AxisExpression]) -> Substitution:
    """Axes written in a group's axes, written in the joined group's."""
    return {
        axis: AxisExpression(
            # Composition of two linear substitutions; groups have no constants, as `align` asks for equal offsets.
            tuple((new, factor * step) for mid, factor in place.terms for new, step in substitution[mid].terms)
        )
        for axis, place in old.items()
    }


def fused(
    sizes: tuple[Int, ...],
    parts: tuple[GroupMember, ...],
    dtypes: tuple[torch.dtype | None, ...],
    needed: frozenset[int],
) -> Numbered:
    """Nests as one nest over ``sizes``, each reading what earlier ones stored from registers.

    Args:
        dtypes: of their buffers in memory, by number; None for one that is not in memory as a tensor.
        needed: the numbers of the buffers that are stored.
    """
    stores: list[Store] = []
    known: dict[str, tuple[Index, Value]] = {}
    for form, common, substitution in parts:
        moved = substitute_stores(renumbered(form, common).stores, dict(substitution))
        for store in _forward_stores(moved, known):
            dtype = dtypes[number_of(store.buffer)]
            assert dtype is not None, "a nest stores to no tensor"
            # Under a mask, a stored value alone is not what a reader finds in memory.
            if store.mask is None:
                known[store.buffer] = (store.index, convert(store.value, dtype))
            stores.append(store)
    return numbered(Nest(sizes, tuple([store for store in stores if number_of(store.buffer) in needed])))


def _forward_stores(stores: Sequence[Store], known: Mapping[str, tuple[Index, Value]]) -> list[Store]:
    """The stores, with loads of what was stored before replaced by the values."""
    if not known:
        return list(stores)

    def forward(value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer not in known:
            return value
        index, stored = known[value.buffer]
        # Fusion refuses groups with such a load (`_legal`). Left as it is, it is reported by the verifier.
        if index != value.index:
            return value
        if value.mask is None:
            return stored
        # The reader's own mask still decides what it sees.
        return Call("where", (value.mask, stored, literal(value.other, stored.dtype)), stored.dtype)

    return rewrite_stores(stores, forward)
