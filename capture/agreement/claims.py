"""What the members of one process group must hold alike, and members of different groups need not.

Ranks of different groups hold the same text of a step, in which a group is named by its mesh axis. Beside the text they
compare claims: which group each rank means by each name, how many elements it sends to and receives from each member in
an exchange of unequal parts, and in which order it communicates its parameters.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.agreement.carried_parameters import parameter_orders
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, sizes_differ_by_rank


class Disagreement(NamedTuple):
    """Ranks whose claims exclude each other: what they disagree about, and the group or exchange that it concerns."""

    ranks: list[int]
    what: str
    concerns: str


@dataclass(frozen=True)
class Claims:
    """The claims of one rank.

    Attributes:
        groups: by the name of a group, an identity that all of its members share, and how many they are.
        exchanges: by the position of an all-to-all among the collectives, the elements that this rank sends and
            receives, by the number of the partner in the world as text. Only those of unequal parts that are known.
        orders: see :func:`weft.capture.agreement.carried_parameters.parameter_orders`.
    """

    groups: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    exchanges: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]] = field(default_factory=dict)
    orders: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def posted(self) -> list[Any]:
        """As JSON holds it."""
        return [self.groups, self.exchanges, self.orders]


NO_CLAIMS = Claims()


def claims_of(step: StepGraph) -> Claims:
    """The claims of this rank about the groups and collectives of ``step``."""
    exchanges = {}
    for at, node in enumerate(step.collectives()):
        if not sizes_differ_by_rank(node.target) or even_part(node) is not None:
            continue
        receives, sends = _parts(node, "output_split_sizes"), _parts(node, "input_split_sizes")
        if sends is not None and receives is not None:
            partners = [str(rank) for rank in torch_adapter.group_ranks(step.groups[group_of(node)])]
            exchanges[str(at)] = dict(zip(partners, sends, strict=True)), dict(zip(partners, receives, strict=True))
    groups = {name: _identity(group) for name, group in sorted(step.groups.items())}
    return Claims(groups, exchanges, parameter_orders(step))


def _identity(group: str) -> tuple[str, int]:
    # Torch's name of a group is the same on all of its members, which find each other in the store by it.
    ranks = torch_adapter.group_ranks(group)
    return hashlib.sha256(f"{group} {ranks}".encode()).hexdigest()[:16], len(ranks)


def even_part(node: torch.fx.Node) -> int | None:
    """The elements of each part, sent or received, of an all-to-all whose parts are all equal; None for others."""
    parts = [_parts(node, "output_split_sizes"), _parts(node, "input_split_sizes")]
    found = {size for part in parts for size in part} if None not in parts else set()  # type: ignore[union-attr]
    return found.pop() if len(found) == 1 else None


def _parts(node: torch.fx.Node, argument: str) -> list[int] | None:
    """Elements of each part of an all-to-all; None where only the data decides them."""
    at = next(at for at, each in enumerate(node.target._schema.arguments) if each.name == argument)  # type: ignore[union-attr]
    sizes: Any = node.args[at]
    row = node.meta["val"].shape[1:].numel()
    if type(row) is not int or any(type(size) is not int for size in sizes):
        return None
    return [size * row for size in sizes]


def disagreement(posted: Mapping[int, list[Any]]) -> Disagreement | None:
    """The first claims of ranks that exclude each other, from what each rank has posted."""
    groups = {rank: each[0] for rank, each in posted.items()}
    for name in dict.fromkeys(name for each in groups.values() for name in each):
        claimed = {rank: tuple(each[name]) for rank, each in groups.items() if name in each}
        counts = Counter(claimed.values())
        # Whoever claims an identity is a member, so as many must claim it as there are members.
        if odd := [rank for rank, (identity, size) in claimed.items() if counts[identity, size] != size]:
            return Disagreement(odd, f"mean different process groups by {name!r}", f"={name}")
    for rank, (_, exchanges, _) in posted.items():
        for at, (sends, _) in exchanges.items():
            for partner, size in sends.items():
                expected = posted[int(partner)][1].get(at, [{}, {}])[1].get(str(rank))
                if expected != size:
                    what = f"exchange parts of other sizes: rank {rank} sends {size} elements to rank {partner}, which "
                    what += f"expects {'a size that its data decides' if expected is None else expected}"
                    return Disagreement(sorted({rank, int(partner)}), what, "all_to_all_single")
    return None


def shared_orders(posted: Sequence[list[Any]]) -> list[str]:
    """For each rank, the order of the parameters in those kinds of collectives that carry the same parameters on all
    ranks, as a text. The texts of all ranks must be equal.

    Args:
        posted: what each rank has posted (:meth:`Claims.posted`).
    """
    kinds = sorted({kind for _, _, orders in posted for kind in orders})
    same = [kind for kind in kinds if len({orders.get(kind, [""])[0] for _, _, orders in posted}) == 1]
    return [" ".join(orders[kind][1] for kind in same) for _, _, orders in posted]


def linked(posted: Mapping[int, list[Any]]) -> bool:
    """Whether the groups that ranks have posted link all ranks to each other, directly or through other ranks."""
    parts: list[tuple[set[int], set[str]]] = []  # ranks that are linked, and their groups
    for rank, (groups, *_) in posted.items():
        ranks, names = {rank}, {identity for identity, _ in groups.values()}
        apart = []
        for part in parts:
            if part[1].isdisjoint(names):
                apart.append(part)
            else:
                ranks, names = ranks | part[0], names | part[1]
        parts = [*apart, (ranks, names)]
    return len(parts) == 1
