"""The registry of collectives: what the compiler knows of each collective operation and kind.

Two tables. :data:`KINDS`: what moves between the ranks, from which the cost model takes the traffic.
:data:`COLLECTIVES`: one row an operation, with its operands and its other forms. A third, of transports, is
:mod:`weft.transport_rows`. Cost model, schedule and transports ask these tables what an operation does and name no
operation; benchmarks and the results of peer transports go by the name of its kind. So do passes, but for those that
write one operation for another: these take both from the rows below (``REDUCE_SCATTER.op``), because they put the
operands of one into the places of the other.

A new collective of a kind that exists is its operation and its row here (:func:`register`). The operation is defined
with ``torch.library`` in the namespace ``weft_c10d``, with an implementation and a fake one, as ``widening_ops.py``
does. The implementation calls operations of ``_c10d_functional``, whose results ``wait_tensor`` can wait for. A call of
it in a step, followed by ``_c10d_functional.wait_tensor``, is captured as any operation is. It must give what the plain
operation of its kind gives, since transports may carry it instead. Beside them, a new

- operation that users call through ``torch.distributed`` has its function replaced in
  ``capture/record/intercept_collectives.py`` (``replacements``, ``_OPERATIONS``), and is no longer in its ``_REFUSED``;
- operation whose wait on a CPU can be interrupted is issued in ``inductor/runtime/gloo_collectives.py``, since each
  method of torch's process groups has other arguments. Without an entry it runs as it is;
- kind is in :data:`KINDS`, among the ``kinds`` of a library in the cluster descriptions (``inductor/cost/clusters``),
  without which it has no price, and in ``nccl_benchmarks``, which measures it: bandwidths are data. Traffic that is
  none of :class:`Traffic` needs its formula in ``collective_cost`` (``_fastest``).

A new transport is its row in :data:`weft.transport_rows.TRANSPORTS`, a serializable subclass of
``peer_calls.PeerCall``, the graph's node, whose ``transports`` has the row's name, and one of
``peer_launch.BoundPeerCall`` (``class _Mine(BoundPeerCall, transport="mine")``), which runs it; kernels are in
``inductor/transports/kernels``. Peer transports carry operations whose only operands are tensors, group and reduction
(``peer_calls.unsupported_reason``). Beside them:

- a file of its own is imported by ``apply_transports``, since nothing else names its classes;
- of a kind that no peer transport carries yet, ``PeerCall.fake_result`` gives the size of the result;
- ``symm_mem_benchmarks`` measures it (tensors by kind, too) and cluster descriptions have its numbers: without them it
  is never chosen;
- if peers read its inputs at other times than between its barriers (``arena.py`` says which), ``arena_layout`` and
  ``verify_arena`` must know when: both rely on these times to let memory be used again.
"""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import COLLECTIVE_NAMESPACES, GROUP_ARGUMENTS, unregistered
from weft.errors import InvalidCollectiveRow
from weft.inductor.graph import widening_ops  # noqa: F401 (defines torch.ops.weft_c10d)
from weft.torch_adapter import OpOverload
from weft.transport_rows import TRANSPORTS, parse_transport, peer_transports

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
        stream: name of the queue that it runs in: "gather", "reduce" or "exchange". A group has one communicator per
            name, which runs one collective at a time, in the order of issue. "gather" also says that it brings
            parameters.
        traffic: who sends to whom.
        laps: how often the tensor goes around the ring, for traffic in a ring.
        sends_all: on the ring, every rank passes on the whole tensor, not (n - 1)/n of it.
        tree: whether NCCL has a tree for it.
        sends_result_dtype: what is sent has the dtype of the result: transports cast before they send, and a cast
            before the collective in the graph may become part of it.
    """

    name: str
    stream: str
    traffic: Traffic = Traffic.RING
    laps: int = 1
    sends_all: bool = False
    tree: NcclTree = NcclTree.NEVER
    sends_result_dtype: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it brings what other ranks have: parameters."""
        return self.stream == "gather"

    @property
    def reduces(self) -> bool:
        """Whether it combines what all ranks have: gradients."""
        return self.stream == "reduce"


KINDS: dict[str, CollectiveKind] = {
    kind.name: kind
    for kind in (
        # Of these kinds NCCL has a ring; a tree for all-reduces only, and PAT, which needs one rank per node. See
        # NCCL's src/graph/tuning.cc. Only an all-gather sends the dtype of its result: a reduction that rounds before
        # it adds would lose bits.
        CollectiveKind("all_gather", "gather", tree=NcclTree.ONE_RANK_PER_NODE, sends_result_dtype=True),
        CollectiveKind("reduce_scatter", "reduce", tree=NcclTree.ONE_RANK_PER_NODE),
        # Around the ring twice: a reduce-scatter and an all-gather.
        CollectiveKind("all_reduce", "reduce", laps=2, tree=NcclTree.ALWAYS),
        # On the stream of gathers, because it brings parameters.
        CollectiveKind("broadcast", "gather", sends_all=True),
        CollectiveKind("all_to_all", "exchange", Traffic.PAIRWISE),
        CollectiveKind("send_recv", "exchange", Traffic.POINT_TO_POINT),
    )
}


@dataclass(frozen=True)
class CollectiveOp:
    """A collective operation and its forms. A step's graph holds ``op`` and ``coalesced``, which are functional.

    Attributes:
        op: the functional operation. One argument, ``group_name`` or ``group``, names its process group; ``group_size``
            is how many ranks that has; sizes of parts, which may differ between ranks, are arguments ``..split_sizes``.
        kind: what it does.
        coalesced: the same for a list of tensors, as one call; None where there is none. All other arguments are those
            of ``op``.
        in_place: writes the result over the payload.
        coalesced_in_place: ``coalesced``, in place.
        others: further forms of torch, which are recognised if a graph has them, and which no pass introduces:
            in-place forms too, to which no pass rewrites.
        payload: position of the tensor, or the list of tensors, that is communicated. 0 where there is ``coalesced``.
        reduction: position of the name of the reduction ("sum", "avg", ...); None where nothing is reduced.
        sum_dtype: position of the dtype to sum in, where it is an operand. NCCL and gloo have no kernel for such an
            operation; ``library`` names what runs instead.
        library: the operation without that argument, otherwise with the same ones, which sums in the dtype of its
            payload; None for ``op`` itself. Its own row has the coalesced form.
        waited_early: its result is smaller than its payload, or its payload is used nowhere else: waiting for it frees
            memory, so its wait must not come too late. It matters for steps without a schedule: on CPUs, and on GPUs
            without a description of the cluster.
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

    @property
    def further_operands(self) -> tuple[int, ...]:
        """Positions of operands that only this operation has: all but the payload, the group and its size, reduction
        and sum dtype. Transports beside libraries have no place for them."""
        known = self.payload, self.reduction, self.sum_dtype
        arguments = enumerate(self.op._schema.arguments)
        names = (*GROUP_ARGUMENTS, "group_size")
        return tuple(at for at, argument in arguments if at not in known and argument.name not in names)


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
# What mixed precision asks for: bfloat16 gradients, summed in float32. Transports over peers do that with narrow
# traffic; for a library the operands are cast before.
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

COLLECTIVES: list[CollectiveOp] = []
_BY_FORM: dict[Any, CollectiveOp] = {}


def register(row: CollectiveOp) -> None:
    """Add a collective. :class:`CollectiveOp` says what its arguments must be called and where they stand. A cluster
    description must have an entry for its kind, where steps on GPUs are to be scheduled.

    Raises:
        InvalidCollectiveRow: the row does not describe its operation.
    """
    _check(row)
    if row not in COLLECTIVES:
        COLLECTIVES.append(row)
    _BY_FORM.update(dict.fromkeys(row.forms, row))


def _check(row: CollectiveOp) -> None:
    def require(condition: object, what: str, remedy: str) -> None:
        if not condition:
            raise InvalidCollectiveRow(str(row.op), what, remedy)

    namespaces = " or ".join(COLLECTIVE_NAMESPACES)
    require(KINDS.get(row.kind.name) is row.kind, f"its kind {row.kind.name!r} is not in KINDS", "Add the kind first")
    library = None if row.library is None else _BY_FORM.get(row.library)
    for form in row.forms:
        require(form.namespace in COLLECTIVE_NAMESPACES, f"{form} is no collective", f"Define it in {namespaces}")
        require(_BY_FORM.get(form, row) == row, f"{form} has a row already", "Give it one row")
        # A group is found by the name of its argument: passes rewrite it, and costs depend on its ranks.
        groups = sum(argument.name in GROUP_ARGUMENTS for argument in form._schema.arguments)
        what = f"{groups or 'none'} of the arguments of {form} names its process group"
        require(groups == 1, what, f"Call one argument {GROUP_ARGUMENTS[0]}; several groups are several collectives")
    count = len(row.op._schema.arguments)
    for name in ("payload", "reduction", "sum_dtype"):
        at = getattr(row, name)
        require(at is None or 0 <= at < count, f"it has no argument {at}, its {name}", "Give a position")
    require(
        row.coalesced is None or row.payload == 0, "the payload of its coalesced form is not first", "Move it there"
    )
    if row.sum_dtype is not None:
        what = "libraries cannot sum in another dtype than they send"
        require(library is not None, what, "Name a registered operation that they run instead, as library")
        require(row.coalesced is None or (library and library.coalesced), what, "Give library a coalesced form")


for _row in (ALL_GATHER, REDUCE_SCATTER, WIDENING_REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, *_SENDS):
    register(_row)


def collective_op(target: Any) -> CollectiveOp | None:
    """The row that an operation is a form of; None for everything that is no collective operation."""
    return _BY_FORM.get(target)


def waits_for_gather(wait: Node) -> bool:
    """Whether a wait is for an all-gather, alone or in a coalesced call."""
    start = wait.all_input_nodes[0]
    start = start.all_input_nodes[0] if start.target is operator.getitem else start
    row = collective_op(start.target)
    return row is not None and row.kind == ALL_GATHER.kind


def _row_of(node: Node) -> CollectiveOp:
    row = _BY_FORM.get(node.target)
    if row is None:
        raise unregistered(node)
    return row


def kind_of(node: Node) -> CollectiveKind:
    """What the collective that ``node`` starts does: an operation, or a call over peers, which names its kind.

    Raises:
        UnregisteredCollective: the registry does not know the operation.
    """
    by_peers = node.target not in _BY_FORM and getattr(node.target, "kind", None)
    return KINDS[by_peers] if by_peers else _row_of(node).kind


def is_kind(node: Node, kind: CollectiveKind) -> bool:
    """Whether the node calls an operation of this kind, for one tensor or for several. False for a call over peers,
    unlike :func:`kind_of`: passes ask it for what they may rewrite, and such calls are final."""
    row = collective_op(node.target)
    return row is not None and row.kind is kind


def is_single(node: Node, kind: CollectiveKind) -> bool:
    """Whether the node calls an operation of this kind for one tensor, in its functional form."""
    row = collective_op(node.target)
    return row is not None and row.kind is kind and node.target is row.op


def single_calls(step: StepGraph, kind: CollectiveKind | None = None) -> list[Node]:
    """The nodes of ``step`` that call a collective operation for one tensor, see :func:`is_single`, in order; those of
    any kind by default. No other node is looked at: torch keeps a table of the calls of each operation."""
    ops = [row.op for row in COLLECTIVES if kind is None or row.kind is kind]
    return sorted(node for op in ops for node in step.graph.find_nodes(op="call_function", target=op, sort=False))


def reduction_of(node: Node) -> str:
    """How a collective operation reduces; "" for one that does not.

    Raises:
        UnregisteredCollective: the registry does not know the operation.
    """
    row = _row_of(node)
    return "" if row.reduction is None else str(node.args[row.reduction])


def sum_dtype_of(node: Node) -> torch.dtype | None:
    """The dtype that a collective sums in, where it is an operand of its own; None for any other node."""
    row = collective_op(node.target)
    return None if row is None or row.sum_dtype is None else node.args[row.sum_dtype]  # type: ignore[return-value]


def payload_of(node: Node) -> list[Node]:
    """The tensors that a collective communicates, in order, each as often as it is given: of an operation by its row,
    of a call over peers its one operand."""
    row = collective_op(node.target)
    at = 0 if row is None else row.payload
    payload: Any = node.args[at]
    return list(payload) if isinstance(payload, (list, tuple)) else [payload]


def results_of(node: Node) -> list[Any]:
    """The fake tensors that a collective gives, one for each of :func:`payload_of`."""
    results = node.meta["val"]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def is_coalesced(node: Node) -> bool:
    """Whether a collective gives a list of tensors."""
    return isinstance(node.meta["val"], (list, tuple))


def other_operands(node: Node) -> list[tuple[str, Any]]:
    """The operands of a collective but its payload, by name; none of a call over peers."""
    row, found = collective_op(node.target), []
    schema = getattr(node.target, "_schema", None)
    for at, argument in enumerate(schema.arguments if schema is not None else ()):
        if at != (0 if row is None else row.payload):
            found.append((argument.name, node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)))
    return found


def shared_operands(node: Node) -> str:
    """What all ranks must give alike to a collective, as text: the dtypes of its payload, and all other operands but
    the sizes of parts, which differ between ranks. Of operands that are nodes it says only that they are."""
    dtypes = [str(used.meta["val"].dtype) for used in payload_of(node)]
    # Nodes differ in name between ranks that compute different things, and their values are data.
    operands = [(name, value) for name, value in other_operands(node) if "split_sizes" not in name]
    return f"{dtypes} {torch.fx.node.map_arg(operands, lambda _: 'a node')}"


def in_place_collective(target: Any) -> OpOverload | None:
    """The form of a collective operation that writes over its payload; None where there is none."""
    row = collective_op(target)
    if row is None:
        return None
    return row.in_place if target is row.op else row.coalesced_in_place if target is row.coalesced else None


# ---- transports


def transports_of(kind: CollectiveKind, *, sums_in_float32: bool = False) -> list[str]:
    """Names of the transports beside libraries that carry a kind.

    Args:
        sums_in_float32: only those that reduce in float32 whatever they send.
    """
    rows = (TRANSPORTS[name] for name in peer_transports() if kind.name in TRANSPORTS[name].kinds)
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
    # Consecutive ranks share a host, as torchrun starts them. Asking all hosts would be a rendezvous, in a place that
    # only looks at the graph.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return len(ranks) if not here or len({rank // here for rank in ranks}) == 1 else 0
