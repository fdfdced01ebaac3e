"""Graph nodes of peer-access collectives, which run over symmetric memory instead of NCCL or gloo.

:func:`use_transport` replaces a collective of ``_c10d_functional`` by one call with the same results and waits. The
transports are:

``push``         :class:`PeerGather`: a kernel writes this rank's shards into the arenas of all ranks
``copy_engine``  :class:`CopyEngineGather`: copy engines read the arenas of peers and keep no SM busy
``pull``         :class:`PeerReduceScatter`: a kernel reads the arenas of all ranks and sums in float32
``copy_sum``     :class:`CopySumReduceScatter`: copy engines read the arenas of peers, then a kernel sums in float32
``one_shot``     :class:`PeerAllReduce`: a kernel of each rank reads the arenas of all ranks and sums everything
``two_shot``     :class:`PeerAllReduce`: each rank sums one part and writes it into the arenas of all ranks

A number behind the name (``pull_16``) is the number of programs of the kernel. A call says what is communicated and
where it is in the arena (:mod:`weft.inductor.transports.arena_layout` assigns that).
:mod:`weft.inductor.transports.peer_launch` runs it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of
from weft.capture.node_meta import meta_of
from weft.inductor.graph.aliasing import is_lazy, looks_into, read_by_storage, readers_of, share_storage
from weft.inductor.graph.collectives import (
    KINDS,
    collective_op,
    is_coalesced,
    payload_of,
    reduction_of,
    results_of,
    sum_dtype_of,
)
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.gpu import multiprocessors
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.wire_dtype import expand
from weft.inductor.transports.arena import ALIGNMENT
from weft.inductor.transports.kernels.reduce_scatter import LocalReduceScatter, PullReduceScatter
from weft.inductor.transports.kernels.shard_copy import TYPES as COPIED_TYPES
from weft.transport_rows import LIBRARIES, TRANSPORTS, parse_transport, peer_stream

Node = torch.fx.Node
TensorSpec = tuple[tuple[int, ...], torch.dtype]  # sizes and dtype of a contiguous tensor

aten = torch.ops.aten

# By transport, the class of its calls; whether or not the transport has a row.
_CLASSES: dict[str, type[PeerCall]] = {}

_NOT_BOUND = "weft.inductor.transports.instantiate.bind was not called"

# Dtypes that most kernels load and store.
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


@dataclass(frozen=True)
class PeerCall:
    """A peer-access collective as a call target. It takes a list of tensors and returns a list of results, which may be
    read after a wait.

    A subclass serves the transports that it names in ``transports``: for each, the values of fields that make a call
    one of that transport. :mod:`weft.inductor.graph.collectives` says what else a new transport needs.

    Attributes:
        group: the group's name in the graph.
        world: number of ranks of the group.
        programs: number of programs of its kernel; 0 for the kernel's default.
        offsets: bytes from the beginning of the arena, one per tensor in the arena; empty before
            :func:`weft.inductor.transports.arena_layout.lay_out`.
        opening_barrier: whether it starts with a barrier of all ranks, before its first access to the arena; see
            :mod:`weft.inductor.transports.arena`.
    """

    # The text of all fields is compared between ranks before memory is shared, so whatever changes how a call runs is
    # one.
    group: str
    world: int
    programs: int = 0
    offsets: tuple[int, ...] = ()
    opening_barrier: bool = False

    # Attributes by which passes recognise a call, see :mod:`weft.capture.node_kinds`. Fakes of results share storage as
    # the graph says, though the target is no operation of torch.
    collective: ClassVar[bool] = True
    shares_as_fakes: ClassVar[bool] = True
    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    kind: ClassVar[str]  # a name of weft.inductor.graph.collectives.KINDS
    dtypes: ClassVar[tuple[torch.dtype, ...]] = _TYPES  # that its kernels load and store
    reads_arena: ClassVar[bool] = False  # whether peers read its inputs from this rank's arena

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _CLASSES.update(dict.fromkeys(vars(cls).get("transports", ()), cls))

    @property
    def transport(self) -> str:
        """The name of its transport."""
        # By its fields: one class serves several transports (`one_shot`, `two_shot`).
        of_class = self.transports.items()
        return next(name for name, fields in of_class if all(getattr(self, f) == fields[f] for f in fields))

    @property
    def stream_name(self) -> str:
        """Name of its communication stream, see :mod:`weft.inductor.transports.comm_streams`."""
        return peer_stream(self.transport, KINDS[self.kind].stream)

    @classmethod
    def made(cls, transport: str, group: str, world: int, programs: int, reduction: str) -> PeerCall:
        """A call of one of its :attr:`transports`."""
        # Only reductions have a field `op`; the kind of an all-gather has none to give.
        fields: dict[str, Any] = {**cls.transports[transport], **({"op": reduction} if reduction else {})}
        return cls(group, world, programs, **fields)

    @classmethod
    def default_programs(cls, device: torch.device) -> int:
        """Number of programs where the transport's name gives none; 0 for the kernel's default."""
        return 0

    @property
    def in_arena(self) -> bool:
        """Whether its results are in the arena. Then they need no other memory, but must not outlive the step."""
        return False

    def arena_tensors(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[TensorSpec]:
        """Sizes and dtypes of its tensors in the arena: the results if :attr:`in_arena`, else copies of the inputs."""
        if self.in_arena:
            return [(tuple(val.shape), val.dtype) for val in outputs]
        # Shards are cast to the result's dtype before they are sent, which saves bytes. Gradients are sent as they are
        # and cast after the sum, which saves precision.
        narrow = KINDS[self.kind].sends_result_dtype
        pairs = zip(inputs, outputs, strict=True)
        return [(tuple(val.shape), result.dtype if narrow else val.dtype) for val, result in pairs]

    def staging_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of local memory, beside the arena, that the memory plan has to reserve for it."""
        return 0

    @property
    def __name__(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__qualname__).lower()

    def fake_result(self, recorded: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New contiguous tensors, for the graph's verifier; of a kind that is neither an all-gather nor a
        reduce-scatter, of the sizes of its inputs. The dtype that values are cast to on their way is in none
        of the attributes; it is that of ``recorded``."""
        # Dimension 0 is the one that torch's collectives gather and scatter along.
        parts = {"all_gather": (self.world, 1), "reduce_scatter": (1, self.world)}
        more, fewer = parts.get(self.kind, (1, 1))
        return [
            val.new_empty((val.shape[0] * more // fewer, *val.shape[1:]) if val.dim() else (), dtype=result.dtype)
            for val, result in zip(inputs, recorded, strict=True)
        ]

    def __call__(self, inputs: Any) -> Any:
        raise AssertionError(f"{self.__name__} has no memory yet: {_NOT_BOUND}")


@serializable
@dataclass(frozen=True)
class PeerGather(PeerCall):
    """All-gather of shards (rows, ...) by a kernel that pushes them into the arenas of all ranks. It casts on the way.
    Results are (world * rows, ...) in the arena, so a reader needs no copy."""

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"push": {}}
    kind: ClassVar[str] = "all_gather"

    @property
    def in_arena(self) -> bool:
        """True: peers write the results into the arena."""
        return True


@serializable
@dataclass(frozen=True)
class CopyEngineGather(PeerCall):
    """All-gather of shards (rows, ...) by copy engines. A kernel casts the shards into the arena; then every rank
    copies them from all peers to results (world * rows, ...) outside the arena.

    Attributes:
        copy_in_on_compute_stream: whether the compute stream runs the casting kernel, not the communication stream. On
            the communication stream it would wait for a free SM beside a large GEMM.
    """

    copy_in_on_compute_stream: bool = False

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"copy_engine": {}}
    kind: ClassVar[str] = "all_gather"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = COPIED_TYPES
    reads_arena: ClassVar[bool] = True


@serializable
@dataclass(frozen=True)
class PeerReduceScatter(PeerCall):
    """Reduce-scatter of (world * rows, ...) in the arena to (rows, ...). It sums in float32 in rank order, so that the
    result does not depend on timing.

    Attributes:
        op: "sum" or "avg".
        squares: whether the kernel also sums the squares of its results, see :class:`PeerSquares`.
    """

    op: str = "sum"
    squares: bool = False

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"pull": {}}
    kind: ClassVar[str] = "reduce_scatter"
    reads_arena: ClassVar[bool] = True
    kernel: ClassVar[type[PullReduceScatter]] = PullReduceScatter

    @property
    def sums(self) -> int:
        """Number of partial sums of squares, one per program; programs that do not run leave zeros."""
        # Of the launch, not of the work: the number must be known when the graph is rewritten, before kernels exist.
        return self.programs or self.kernel.programs


@serializable
@dataclass(frozen=True)
class CopySumReduceScatter(PeerReduceScatter):
    """A :class:`PeerReduceScatter` with the same bits, which copies the parts of peers into a local staging buffer by
    copy engines before its kernel sums them. The kernel then waits for no remote memory."""

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"copy_sum": {}}
    kernel: ClassVar[type[PullReduceScatter]] = LocalReduceScatter

    @classmethod
    def default_programs(cls, device: torch.device) -> int:
        """Its kernel has no barrier, so it fills the GPU whatever its size. All GPUs of a cluster are of one kind."""
        return multiprocessors(device) * LocalReduceScatter.programs_per_multiprocessor

    def staging_offsets(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Offsets in bytes of this rank's parts of ``specs`` in the staging buffer of one peer. The last entry is
        that buffer's size. Parts are aligned like tensors in the arena."""
        # The kernel loads 16 bytes at a time where every address of a row is aligned, those in the staging buffer too.
        parts = (-(-bytes_of(spec) // self.world // ALIGNMENT) * ALIGNMENT for spec in specs)
        return [*accumulate(parts, initial=0)]

    def staging_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of the staging buffers of all peers."""
        # This rank's own part is read in place, from its arena.
        return (self.world - 1) * self.staging_offsets(specs)[-1]


@serializable
@dataclass(frozen=True)
class PeerAllReduce(PeerCall):
    """All-reduce through the arena, in rank order, in float32; float64 and integers are reduced in their own dtype.

    Attributes:
        op: "sum", "avg", "max" or "min".
        shots: 1 or 2, see ``kernels/all_reduce.py``. With 2, the results are in the arena.
    """

    op: str = "sum"
    shots: int = 1

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"one_shot": {"shots": 1}, "two_shot": {"shots": 2}}
    kind: ClassVar[str] = "all_reduce"

    @property
    def in_arena(self) -> bool:
        """Whether it has two shots: peers then write the summed parts into the arena."""
        return self.shots == 2


@serializable
@dataclass(frozen=True)
class PeerWait:
    """The wait for a peer-access collective: blocks the compute stream until the collective that produces its argument
    has completed. Returns the argument."""

    waits: ClassVar[bool] = True
    shares_as_fakes: ClassVar[bool] = True
    __name__: ClassVar[str] = "peer_wait"

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"a wait for a collective that has no memory yet: {_NOT_BOUND}")


@serializable
@dataclass(frozen=True)
class PeerSquares:
    """The sums of squares of all results of a reduce-scatter, float32[:attr:`PeerReduceScatter.sums`]. The squares are
    those of the rounded results. Its argument is a result of the reduce-scatter after its wait."""

    shares_as_fakes: ClassVar[bool] = True
    free: ClassVar[bool] = True  # it launches nothing: the reduce-scatter has already written the sums
    __name__: ClassVar[str] = "peer_squares"

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"squares of a collective that has no memory yet: {_NOT_BOUND}")


def call_of(start: Node) -> PeerCall:
    """The call of a node that starts a peer-access collective."""
    assert isinstance(start.target, PeerCall)
    return start.target


def inputs_of(start: Node) -> list[Node]:
    """The input tensors of such a node."""
    (inputs,) = start.args
    return list(inputs)  # type: ignore[arg-type]


def arena_tensors_of(start: Node) -> list[TensorSpec]:
    """Sizes and dtypes of such a node's tensors in the arena, see :meth:`PeerCall.arena_tensors`."""
    return call_of(start).arena_tensors([used.meta["val"] for used in inputs_of(start)], start.meta["val"])


def bytes_of(spec: TensorSpec) -> int:
    """Bytes of a contiguous tensor."""
    sizes, dtype = spec
    return math.prod(sizes) * dtype.itemsize


# ---- support of transports


def call_classes() -> dict[str, type[PeerCall]]:
    """The class of calls of each transport that has a row, and whose file is imported."""
    return {name: of for name, of in _CLASSES.items() if name in TRANSPORTS}


def _class_of(name: str) -> type[PeerCall] | None:
    return _CLASSES.get(name) if name in TRANSPORTS else None


def is_held(node: Node, escaped: Set[Node]) -> bool:
    """Whether a result of a collective must not lie in the arena: the caller of this rank holds it after the step, that
    of another rank does (``meta["held"]``), or it is read by its storage.

    Args:
        escaped: see :func:`escaping`.
    """
    waits = waits_of(node)
    return bool(node.meta.get("held")) or not escaped.isdisjoint(waits) or any(map(read_by_storage, waits))


def unsupported_reason(step: StepGraph, node: Node, transport: str, escaped: Set[Node] | None = None) -> str | None:
    """Why ``transport`` does not support the collective that ``node`` starts, as a message; None if it does.

    It looks at the graph only. Rank 0 knows which results any rank holds (``meta["held"]``), so all ranks support what
    it chooses. Whether the ranks have peer access is another question: see
    :func:`weft.inductor.transports.symmetric_memory.reachable`.

    Args:
        escaped: the result of :func:`escaping`, from callers that ask about many collectives of one step.
    """
    name, _ = parse_transport(transport)
    if name in LIBRARIES:
        return None
    call_class = _class_of(name)
    if call_class is None:
        return f"there is no transport {transport}"
    transport_row, row = TRANSPORTS[name], collective_op(node.target)
    if row is None or row.kind.name not in transport_row.kinds:
        return f"{name} does not do {node.target}"
    # The wrapper asked for a sum in a wider dtype than is sent. A transport that sums in the wire dtype would lose
    # bits.
    if row.sum_dtype is not None and not transport_row.sums_in_float32:
        return f"{name} sums in the dtype that it sends"
    if row.further_operands:
        names = [row.op._schema.arguments[at].name for at in row.further_operands]
        return f"{name} has no place for the operands {names} of {node.target}"
    reduction = reduction_of(node)
    # From here on the tensors themselves: dtypes, sizes and strides that the kernels were written for.
    inputs, outputs = [used.meta["val"] for used in payload_of(node)], results_of(node)
    vals = [*inputs, *outputs]
    world = len(torch_adapter.group_ranks(step.groups[group_of(node)]))
    # A copy: no transport is faster than what the library does for one rank.
    if world == 1:
        return "the group is one rank"
    if reduction and reduction not in transport_row.reductions:
        return f"{name} does not reduce by {reduction}"
    # Offsets in the arena are constants, the same on all ranks.
    if any(type(n) is not int for val in vals for n in (*val.shape, *val.stride())):
        return "a size is not known before the step runs"
    # The bytes in memory are not the values: conj and neg views resolve on reading, which a peer does not do.
    if any(map(is_lazy, vals)):
        return "a tensor holds its values' negatives"
    # A kernel is compiled for one source and one wire dtype; its table has a row per tensor and no dtypes.
    if len({val.dtype for val in inputs}) > 1 or len({val.dtype for val in outputs}) > 1:
        return "the tensors are of several types"
    # Offsets, pointers and results go by position: one result per operand.
    if len(inputs) != len(outputs):
        return f"it gives {len(outputs)} tensors for {len(inputs)}"
    unknown = next((val.dtype for val in vals if val.dtype not in call_class.dtypes), None)
    if unknown is not None:
        return f"{name} does not move {unknown}"
    # The mean is a multiplication by 1 / world in the kernel's registers, which integers do not have.
    if reduction == "avg" and not outputs[0].dtype.is_floating_point:
        return "integers have no mean"
    # Kernels move contiguous chunks, and an empty tensor has no address for their tables.
    if not all(val.numel() and val.is_contiguous() for val in outputs):
        return "a result is empty or has gaps"
    # The next step reuses the arena, and a tensor's storage there is the whole arena.
    if results_in_arena(transport) and is_held(node, escaping(step) if escaped is None else escaped):
        return "a result is held after the step, or read by its storage: the arena is that of the next step too"
    return None


def results_in_arena(transport: str) -> bool:
    """Whether the results of a transport are in the arena; False for libraries and unknown names."""
    name, _ = parse_transport(transport)
    call_class = _class_of(name)
    # Asked of a call, since one class can have both: `two_shot` leaves its results in the arena, `one_shot` does not.
    return call_class is not None and call_class.made(name, "", 1, 0, "").in_arena


def use_transport(step: StepGraph, node: Node, transport: str) -> Node:
    """Replace the collective that ``node`` starts by a call of ``transport``, which must support it
    (:func:`unsupported_reason`). Changes ``step``.

    For a library ("nccl") the node stays. Casts that were merged into it (:mod:`weft.inductor.passes.wire_dtype`)
    become nodes again, because the library cannot cast.

    Returns the node that starts the collective afterwards.
    """
    name, programs = parse_transport(transport)
    if name in LIBRARIES:
        return node if sum_dtype_of(node) is None else expand(step, node)
    assert (why := unsupported_reason(step, node, transport)) is None, why
    world = len(torch_adapter.group_ranks(step.groups[group_of(node)]))
    # Calls of peers always take and return lists. A single tensor becomes a list of one, and its readers an element of
    # it.
    listed, inputs = is_coalesced(node), payload_of(node)
    call_class = call_classes()[name]
    programs = programs or call_class.default_programs(inputs[0].meta["val"].device)
    call = call_class.made(name, group_of(node), world, programs, reduction_of(node))
    if KINDS[call.kind].sends_result_dtype:
        sources = [_uncast(shard, waits_of(node)) for shard in inputs]
        # A kernel is specialised for one source dtype. With mixed ones, the casts stay nodes of the graph.
        inputs = sources if len({source.meta["val"].dtype for source in sources}) == 1 else inputs
    with step.graph.inserting_before(node):
        start = step.graph.call_function(call, (inputs,))
        # Capture order, parameter names and the user's lines go on to the new node: the verifier and messages name
        # collectives by them.
        start.meta = meta_of(node, val=node.meta["val"] if listed else [node.meta["val"]])
        result = start
        if not listed:
            result = step.graph.call_function(operator.getitem, (start, 0))
            result.meta = meta_of(node, val=node.meta["val"])
    # Before the uses are replaced: afterwards the waits hang on the new node.
    waits = waits_of(node)
    node.replace_all_uses_with(result)
    step.graph.erase_node(node)
    # torch's wait knows nothing of the event that this call records.
    for wait in waits:
        wait.target = PeerWait()
    return start


def _uncast(shard: Node, waits: Sequence[Node]) -> Node:
    """The source of a shard's cast, if the transport can cast it on the way; else the shard itself.

    Args:
        waits: for the collective, which reads its operands until then.
    """
    source: Any = shard
    cast = shard
    if shard.target is aten._to_copy.default and list(shard.kwargs) == ["dtype"]:
        source = shard.args[0]
    elif (list_ := multi_tensor_cast_of(shard)) is not None:
        source, cast = list_.args[0][shard.args[1]], list_  # type: ignore[index]
    inputs, outputs = source.meta["val"], shard.meta["val"]
    # float32 shards are what mixed precision casts. Each further source dtype would be another kernel to compile and
    # test.
    castable = inputs.dtype == torch.float32 and inputs.is_contiguous() and outputs.is_contiguous()
    # An optimizer may update the parameter before the collective has read it. The cast has the old values; reading the
    # parameter itself would make the update wait, or need a copy of the whole parameter.
    stays = castable and "inplace" not in shard.meta and not _is_written(source, cast, waits)
    return source if stays else shard


def _is_written(source: Node, after: Node, before: Sequence[Node]) -> bool:
    """Whether an operation writes to the memory of ``source`` behind the node ``after`` and in front of one of
    ``before``."""
    while looks_into(source) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return any(
        after < user and any(user < node for node in before) and share_storage(user, source)
        for user in readers_of(source)
    )


def multi_tensor_cast_of(element: Node) -> Node | None:
    """The multi-tensor cast that ``element`` is a result of; None for other nodes."""
    found: Any = element
    # Two steps: an element of a list, of the lists that a multi-tensor call returns.
    for _ in range(2):
        found = found.args[0] if found.target is operator.getitem else None
        if not isinstance(found, Node):
            return None
    return found if isinstance(found.target, Cast) else None
