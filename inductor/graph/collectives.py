"""The registry of collectives: what the compiler knows of each collective operation, kind and transport.

Three tables. :data:`KINDS`: what moves between the ranks, from which the cost model takes the traffic.
:data:`COLLECTIVES`: one row an operation, with its operands and its other forms. :data:`TRANSPORTS`: what can carry
which kinds. Passes, cost model, schedule and transports ask these tables and compare no operation's name, so a new
collective is a row here and its implementation, and a new transport is a row here and its file.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from weft import knobs, torch_adapter
from weft.inductor.graph import widening_ops  # noqa: F401 (defines torch.ops.weft_c10d)
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_c10d = torch.ops._c10d_functional
_weft = torch.ops.weft_c10d


class Traffic(enum.Enum):
    """Who sends to whom. RING: to the next rank, around the group. PAIRWISE: every rank to every other one.
    POINT_TO_POINT: one rank to one other."""

    RING = enum.auto()
    PAIRWISE = enum.auto()
    POINT_TO_POINT = enum.auto()


class NcclTree(enum.Enum):
    """Where NCCL also has a tree over the nodes. ONE_RANK_PER_NODE: its PAT algorithm."""

    ALWAYS = enum.auto()
    ONE_RANK_PER_NODE = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True)
class CollectiveKind:
    """What a collective does, whichever operation asks for it.

    Attributes:
        name: as in the files that describe clusters.
        stream: "gather", "reduce" or "exchange": collectives of one group with the same run one after the other.
        traffic: who sends to whom.
        laps: how often the tensor goes around the ring.
        sends_all: on the ring, every rank passes on the whole tensor, not (n - 1)/n of it.
        tree: whether NCCL has a tree for it.
        sends_result_dtype: a transport may cast the payload before it sends it.
    """

    name: str
    stream: str
    traffic: Traffic = Traffic.RING
    laps: int = 1
    sends_all: bool = False
    tree: NcclTree = NcclTree.NEVER
    sends_result_dtype: bool = False


KINDS: dict[str, CollectiveKind] = {
    kind.name: kind
    for kind in (
        CollectiveKind("all_gather", "gather", tree=NcclTree.ONE_RANK_PER_NODE, sends_result_dtype=True),
        CollectiveKind("reduce_scatter", "reduce", tree=NcclTree.ONE_RANK_PER_NODE),
        CollectiveKind("all_reduce", "reduce", laps=2, tree=NcclTree.ALWAYS),
        CollectiveKind("broadcast", "gather", sends_all=True),
        CollectiveKind("all_to_all", "exchange", Traffic.PAIRWISE),
        CollectiveKind("send_recv", "exchange", Traffic.POINT_TO_POINT),
    )
}


@dataclass(frozen=True)
class CollectiveOp:
    """A collective operation and its forms. A step's graph holds ``op`` and ``coalesced``.

    Attributes:
        op: the functional operation.
        kind: what it does.
        coalesced: the same for a list of tensors, as one call; None where there is none.
        in_place: writes the result over the payload.
        coalesced_in_place: ``coalesced``, in place.
        others: further forms of torch, which no graph of a step holds.
        payload: position of the tensor, or the list of tensors, that is communicated.
        reduction: position of the name of the reduction ("sum", "avg", ...); None where nothing is reduced.
        sum_dtype: position of the dtype to sum in, where it is an operand. A library has no such operation.
        library: what a library runs instead, on a payload cast to ``sum_dtype``; None for ``op`` itself. The coalesced
            form is that row's.
        waited_early: its result is smaller than its payload, or its payload is used nowhere else: waiting for it frees
            memory, so its wait must not come too late.
    """

    op: OpOverload
    kind: CollectiveKind
    coalesced: OpOverload | None = None
    in_place: OpOverload | None = None
    coalesced_in_place: OpOverload | None = None
    others: tuple[OpOverload, ...] = ()
    payload: int = 0
    reduction: int | None = None
    sum_dtype: int | None = None
    library: OpOverload | None = None
    waited_early: bool = False

    @property
    def forms(self) -> Iterator[OpOverload]:
        """Every operation of the row."""
        forms = self.op, self.coalesced, self.in_place, self.coalesced_in_place, *self.others
        return (form for form in forms if form is not None)


def _forms(*names: str) -> tuple[OpOverload, ...]:
    """Those of these operations that this torch has: 2.11 has fewer than 2.13."""
    return tuple(getattr(_c10d, name).default for name in names if hasattr(_c10d, name))


ALL_GATHER = CollectiveOp(
    _c10d.all_gather_into_tensor.default,
    KINDS["all_gather"],
    coalesced=_c10d.all_gather_into_tensor_coalesced.default,
    others=_forms("all_gather_into_tensor_out"),
)
REDUCE_SCATTER = CollectiveOp(
    _c10d.reduce_scatter_tensor.default,
    KINDS["reduce_scatter"],
    coalesced=_c10d.reduce_scatter_tensor_coalesced.default,
    others=_forms("reduce_scatter_tensor_out"),
    reduction=1,
    waited_early=True,
)
WIDENING_REDUCE_SCATTER = CollectiveOp(
    _weft.reduce_scatter_tensor.default,
    KINDS["reduce_scatter"],
    coalesced=_weft.reduce_scatter_tensor_coalesced.default,
    reduction=1,
    sum_dtype=4,
    library=REDUCE_SCATTER.op,
)
ALL_REDUCE = CollectiveOp(
    _c10d.all_reduce.default,
    KINDS["all_reduce"],
    coalesced=_c10d.all_reduce_coalesced.default,
    in_place=_c10d.all_reduce_.default,
    coalesced_in_place=_c10d.all_reduce_coalesced_.default,
    reduction=1,
)
ALL_TO_ALL = CollectiveOp(_c10d.all_to_all_single.default, KINDS["all_to_all"], waited_early=True)
BROADCAST = CollectiveOp(_c10d.broadcast.default, KINDS["broadcast"], others=_forms("broadcast_"))
_SENDS = tuple(
    CollectiveOp(op, KINDS["send_recv"], payload=payload)
    for name, payload in (("isend", 0), ("irecv", 0), ("batch_p2p_ops", 3))
    for op in _forms(name)
)

COLLECTIVES: list[CollectiveOp] = [
    ALL_GATHER,
    REDUCE_SCATTER,
    WIDENING_REDUCE_SCATTER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    *_SENDS,
]

_BY_FORM: dict[Any, CollectiveOp] = {form: row for row in COLLECTIVES for form in row.forms}


def register(row: CollectiveOp) -> None:
    """Add a collective. Its namespace must be one of those that ``capture.node_kinds`` knows."""
    COLLECTIVES.append(row)
    _BY_FORM.update(dict.fromkeys(row.forms, row))


def collective_op(target: Any) -> CollectiveOp | None:
    """The row that an operation is a form of; None for everything that is no collective operation."""
    return _BY_FORM.get(target)


def kind_of(node: Node) -> CollectiveKind:
    """What the collective that ``node`` starts does: an operation, or a call over peers, which names its kind.

    Raises:
        KeyError: the registry does not know the operation.
    """
    row = collective_op(node.target)
    return row.kind if row is not None else KINDS[getattr(node.target, "kind", str(node.target))]


def is_kind(node: Node, kind: CollectiveKind) -> bool:
    """Whether the node calls an operation of this kind, for one tensor or for several."""
    row = collective_op(node.target)
    return row is not None and row.kind is kind


def reduction_of(node: Node) -> str:
    """How a collective operation reduces; "" for one that does not."""
    row = _BY_FORM[node.target]
    return "" if row.reduction is None else str(node.args[row.reduction])


def sum_dtype_of(node: Node) -> torch.dtype | None:
    """The dtype that a collective sums in, where it is an operand of its own."""
    row = collective_op(node.target)
    return None if row is None or row.sum_dtype is None else node.args[row.sum_dtype]  # type: ignore[return-value]


def in_place_collective(target: Any) -> OpOverload | None:
    """The form of a collective operation that writes over its payload; None where there is none."""
    row = collective_op(target)
    if row is None:
        return None
    return row.in_place if target is row.op else row.coalesced_in_place if target is row.coalesced else None


# ---- transports


@dataclass(frozen=True)
class TransportRow:
    """What can carry collectives.

    Attributes:
        name: as in ``knobs.transports`` and in the files that describe clusters.
        kinds: the kinds of collectives that it carries; empty for a library, which carries all.
        reductions: the reductions that it can make.
        sums_in_float32: it reduces in float32 whatever dtype it sends.
        reads_all: every rank reads the whole tensors of all others, instead of a ring.
    """

    name: str
    kinds: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()
    sums_in_float32: bool = False
    reads_all: bool = False


_GATHERS, _SUMS, _ANY = ("all_gather",), ("sum", "avg"), ("sum", "avg", "max", "min")

TRANSPORTS: dict[str, TransportRow] = {
    row.name: row
    for row in (
        TransportRow("nccl"),
        TransportRow("gloo"),
        TransportRow("push", _GATHERS),
        TransportRow("copy_engine", _GATHERS),
        TransportRow("pull", ("reduce_scatter",), _SUMS, sums_in_float32=True),
        TransportRow("copy_sum", ("reduce_scatter",), _SUMS, sums_in_float32=True),
        TransportRow("one_shot", ("all_reduce",), _ANY, reads_all=True),
        TransportRow("two_shot", ("all_reduce",), _ANY),
    )
}

LIBRARIES = tuple(row.name for row in TRANSPORTS.values() if not row.kinds)
"""Transports that carry every collective, by its ``library`` form."""
LIBRARY = LIBRARIES[0]
"""What carries a collective that no transport was chosen for."""


def parse_transport(name: str) -> tuple[str, int]:
    """A transport's name and its number of programs ("pull_16"), 0 where none is given."""
    found = re.fullmatch(r"(.*?)(?:_(\d+))?", name)
    assert found is not None
    return found[1], int(found[2] or 0)


def reads_all(transport: str) -> bool:
    """Whether each rank reads the whole tensors of all others; False for a transport that is not known."""
    row = TRANSPORTS.get(parse_transport(transport)[0])
    return row is not None and row.reads_all


def transports_of(kind: CollectiveKind, *, sums_in_float32: bool = False) -> list[str]:
    """Names of the transports beside libraries that carry a kind.

    Args:
        sums_in_float32: only those that reduce in float32 whatever they send.
    """
    rows = (row for row in TRANSPORTS.values() if kind.name in row.kinds)
    return [row.name for row in rows if row.sums_in_float32 or not sums_in_float32]


def knob_allows(transports: list[str]) -> bool:
    """Whether ``knobs.transports`` allows one of these transports, with any number of programs."""
    names = {parse_transport(name.strip())[0] for name in knobs.transports.split(",")}
    return bool(names & {*transports, "all"})


# ---- process groups


def ranks_on_a_host(group: str) -> int:
    """How many ranks a process group has that lies on one host, as torchrun numbers ranks. 0 for a group on several
    hosts, and for one that this process does not have. The same on all ranks if all hosts have equally many processes.
    """
    try:
        ranks = torch_adapter.group_ranks(group)
    except RuntimeError:
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return len(ranks) if not here or len({rank // here for rank in ranks}) == 1 else 0
