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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of
from weft.capture.node_meta import meta_of
from weft.inductor.graph.aliasing import is_lazy, read_by_storage
from weft.inductor.graph.collectives import (
    LIBRARIES,
    TRANSPORTS,
    collective_op,
    parse_transport,
    reduction_of,
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

Node = torch.fx.Node
TensorSpec = tuple[tuple[int, ...], torch.dtype]  # sizes and dtype of a contiguous tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class PeerCall:
    """A peer-access collective as a call target. It takes a list of tensors and returns a list of results, which may be
    read after a wait.

    Attributes:
        group: the group's name in the graph.
        world: number of ranks of the group.
        programs: number of programs of its kernel; 0 for the kernel's default.
        offsets: bytes from the beginning of the arena, one per tensor in the arena; empty before
            :func:`weft.inductor.transports.arena_layout.lay_out`.
        opening_barrier: whether it starts with a barrier of all ranks, before its first access to the arena; see
            :mod:`weft.inductor.transports.arena`.
    """

    group: str
    world: int
    programs: int = 0
    offsets: tuple[int, ...] = ()
    opening_barrier: bool = False

    collective: ClassVar[bool] = True
    shares_as_fakes: ClassVar[bool] = True
    kind: ClassVar[str]  # a name of weft.inductor.graph.collectives.KINDS
    stream_name: ClassVar[str]  # name of its communication stream, see weft.inductor.transports.comm_streams
    reads_arena: ClassVar[bool] = False  # whether peers read its inputs from this rank's arena

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
        narrow = self.kind == "all_gather"
        pairs = zip(inputs, outputs, strict=True)
        return [(tuple(val.shape), result.dtype if narrow else val.dtype) for val, result in pairs]

    @property
    def __name__(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__qualname__).lower()

    def fake_result(self, recorded: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New contiguous tensors, for the graph's verifier. The dtype that values are cast to on their way is in none
        of the attributes; it is that of ``recorded``."""
        parts = {"all_gather": (self.world, 1), "reduce_scatter": (1, self.world)}
        more, fewer = parts.get(self.kind, (1, 1))
        return [
            val.new_empty((val.shape[0] * more // fewer, *val.shape[1:]) if val.dim() else (), dtype=result.dtype)
            for val, result in zip(inputs, recorded, strict=True)
        ]

    def __call__(self, inputs: Any) -> Any:
        raise AssertionError(f"{self.__name__} has no memory yet: peer_launch.bind was not called")


@serializable
@dataclass(frozen=True)
class PeerGather(PeerCall):
    """All-gather of shards (rows, ...) by a kernel that pushes them into the arenas of all ranks. It casts on the way.
    Results are (world * rows, ...) in the arena, so a reader needs no copy."""

    kind: ClassVar[str] = "all_gather"
    stream_name: ClassVar[str] = "gather"

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
        the communication
            stream it would wait for a free SM beside a large GEMM.
    """

    copy_in_on_compute_stream: bool = False

    kind: ClassVar[str] = "all_gather"
    stream_name: ClassVar[str] = "copies"
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

    kind: ClassVar[str] = "reduce_scatter"
    stream_name: ClassVar[str] = "reduce"
    reads_arena: ClassVar[bool] = True
    kernel: ClassVar[type[PullReduceScatter]] = PullReduceScatter

    @property
    def sums(self) -> int:
        """Number of partial sums of squares, one per program; programs that do not run leave zeros."""
        return self.programs or self.kernel.programs


@serializable
@dataclass(frozen=True)
class CopySumReduceScatter(PeerReduceScatter):
    """A :class:`PeerReduceScatter` with the same bits, which copies the parts of peers into a local staging buffer by
    copy engines before its kernel sums them. The kernel then waits for no remote memory."""

    kernel: ClassVar[type[PullReduceScatter]] = LocalReduceScatter

    def staging_offsets(self, specs: Sequence[TensorSpec]) -> list[int]:
        """Offsets in bytes of this rank's parts of ``specs`` in the staging buffer of one peer. The last entry is
        that buffer's size. Parts are aligned like tensors in the arena."""
        parts = (-(-bytes_of(spec) // self.world // ALIGNMENT) * ALIGNMENT for spec in specs)
        return [*accumulate(parts, initial=0)]

    def staging_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of the staging buffers of all peers, local memory that the memory plan has to reserve."""
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

    kind: ClassVar[str] = "all_reduce"
    stream_name: ClassVar[str] = "reduce"

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
        raise AssertionError(
            "a wait for a collective that has no memory yet: weft.inductor.transports.peer_launch.bind was not called"
        )


@serializable
@dataclass(frozen=True)
class PeerSquares:
    """The sums of squares of all results of a reduce-scatter, float32[:attr:`PeerReduceScatter.sums`]. The squares are
    those of the rounded results. Its argument is a result of the reduce-scatter after its wait."""

    shares_as_fakes: ClassVar[bool] = True
    free: ClassVar[bool] = True  # it launches nothing: the reduce-scatter has already written the sums
    __name__: ClassVar[str] = "peer_squares"

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        raise AssertionError(
            "squares of a collective that has no memory yet: weft.inductor.transports.instantiate.bind was not called"
        )


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

_Constructor = Callable[[str, int, int, str], PeerCall]
# Constructors of the transports' calls. The row of a transport in TRANSPORTS says which collectives it supports.
_CONSTRUCTORS: dict[str, _Constructor] = {
    "push": lambda group, world, programs, op: PeerGather(group, world, programs),
    "copy_engine": lambda group, world, programs, op: CopyEngineGather(group, world),
    "pull": lambda group, world, programs, op: PeerReduceScatter(group, world, programs, op=op),
    "copy_sum": lambda group, world, programs, op: CopySumReduceScatter(group, world, programs, op=op),
    "one_shot": lambda group, world, programs, op: PeerAllReduce(group, world, programs, op=op),
    "two_shot": lambda group, world, programs, op: PeerAllReduce(group, world, programs, op=op, shots=2),
}

# Dtypes that the kernels load and store.
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def unsupported_reason(step: StepGraph, node: Node, transport: str) -> str | None:
    """Why ``transport`` does not support the collective that ``node`` starts, as a message; None if it does.

    It looks at the graph only, so all ranks get the same answer. Whether the ranks have peer access is another
    question: see :func:`weft.inductor.transports.symmetric_memory.reachable`.
    """
    name, _ = parse_transport(transport)
    if name in LIBRARIES:
        return None
    if name not in _CONSTRUCTORS:
        return f"there is no transport {transport}"
    transport_row, row = TRANSPORTS[name], collective_op(node.target)
    if row is None or row.kind.name not in transport_row.kinds:
        return f"{name} does not do {node.target}"
    if row.sum_dtype is not None and not transport_row.sums_in_float32:
        return f"{name} sums in the dtype that it sends"
    reduction = reduction_of(node)
    inputs, outputs = _fake_operands(node)
    vals = [*inputs, *outputs]
    world = len(torch_adapter.group_ranks(step.groups[group_of(node)]))
    if world == 1:
        return "the group is one rank"
    if reduction and reduction not in transport_row.reductions:
        return f"{name} does not reduce by {reduction}"
    if any(type(n) is not int for val in vals for n in (*val.shape, *val.stride())):
        return "a size is not known before the step runs"
    if any(map(is_lazy, vals)):
        return "a tensor holds its values' negatives"
    if len({val.dtype for val in inputs}) > 1 or len({val.dtype for val in outputs}) > 1:
        return "the tensors are of several types"
    known = COPIED_TYPES if name == "copy_engine" else _TYPES
    unknown = next((val.dtype for val in vals if val.dtype not in known), None)
    if unknown is not None:
        return f"{name} does not move {unknown}"
    if reduction == "avg" and not outputs[0].dtype.is_floating_point:
        return "integers have no mean"
    if not all(val.numel() and val.is_contiguous() for val in outputs):
        return "a result is empty or has gaps"
    # The next step reuses the arena, and a tensor's storage there is the whole arena.
    if results_in_arena(transport) and any(wait in escaping(step) for wait in waits_of(node)):
        return "a result is held after the step, and would lie in memory that the next step uses"
    if results_in_arena(transport) and any(map(read_by_storage, waits_of(node))):
        return "a result is read by its storage, and would lie in that of the arena"
    return None


def results_in_arena(transport: str) -> bool:
    """Whether the results of a transport are in the arena; False for libraries and unknown names."""
    name, _ = parse_transport(transport)
    return name in _CONSTRUCTORS and _CONSTRUCTORS[name]("", 1, 0, "sum").in_arena


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
    operand: Any = node.args[0]
    listed = isinstance(operand, (list, tuple))
    inputs = [*operand] if listed else [operand]
    if name == "copy_sum" and not programs:
        # Its kernel has no barrier, so it fills the GPU whatever its size. All GPUs of a cluster are of one kind.
        device = inputs[0].meta["val"].device
        programs = multiprocessors(device) * LocalReduceScatter.programs_per_multiprocessor
    call = _CONSTRUCTORS[name](group_of(node), world, programs, reduction_of(node))
    if call.kind == "all_gather":
        sources = [_uncast(shard) for shard in inputs]
        # A kernel is specialised for one source dtype. With mixed ones, the casts stay nodes of the graph.
        inputs = sources if len({source.meta["val"].dtype for source in sources}) == 1 else inputs
    with step.graph.inserting_before(node):
        start = step.graph.call_function(call, (inputs,))
        start.meta = meta_of(node, val=node.meta["val"] if listed else [node.meta["val"]])
        result = start
        if not listed:
            result = step.graph.call_function(operator.getitem, (start, 0))
            result.meta = meta_of(node, val=node.meta["val"])
    waits = waits_of(node)
    node.replace_all_uses_with(result)
    step.graph.erase_node(node)
    for wait in waits:
        wait.target = PeerWait()
    return start


def _uncast(shard: Node) -> Node:
    """The source of a shard's cast, if the transport can cast it on the way; else the shard itself."""
    source: Any = shard
    if shard.target is aten._to_copy.default and list(shard.kwargs) == ["dtype"]:
        source = shard.args[0]
    elif (list_ := multi_tensor_cast_of(shard)) is not None:
        source = list_.args[0][shard.args[1]]  # type: ignore[index]
    inputs, outputs = source.meta["val"], shard.meta["val"]
    castable = inputs.dtype == torch.float32 and inputs.is_contiguous() and outputs.is_contiguous()
    return source if castable and "inplace" not in shard.meta else shard


def multi_tensor_cast_of(element: Node) -> Node | None:
    """The multi-tensor cast that ``element`` is a result of; None for other nodes."""
    found: Any = element
    for _ in range(2):
        found = found.args[0] if found.target is operator.getitem else None
        if not isinstance(found, Node):
            return None
    return found if isinstance(found.target, Cast) else None


def _fake_operands(node: Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The fake inputs and outputs of a collective of the graph, as lists."""
    inputs, outputs = node.args[0], node.meta["val"]
    inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    return [used.meta["val"] for used in inputs], list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]  # type: ignore
