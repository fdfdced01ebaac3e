"""Collectives of a graph that run over memory which peers share, in the place of a library's.

A collective of ``_c10d_functional`` becomes one call, with the same results and the same waits, by what
:func:`use_transport` is told:

``push``         :class:`PeerGather`: a kernel writes this rank's shards into the arenas of all
``copy_engine``  :class:`CopyEngineGather`: copies from the arenas of peers, which keep no multiprocessor busy
``pull``         :class:`PeerReduceScatter`: a kernel sums what lies in the arenas of all, in float32
``copy_sum``     :class:`CopySumReduceScatter`: copies from the arenas of peers, which a kernel then sums, in float32
``one_shot``     :class:`PeerAllReduce`: a kernel sums all of what lies in the arenas of all
``two_shot``     the same, each rank a part of it, which it writes into the arenas of all

A number behind the name (``pull_16``) is how many programs the kernel has. The calls say what is communicated and where
in the arena it lies (:mod:`weft.inductor.comm.layout`); :mod:`weft.inductor.comm.bound` runs them.
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
from weft.capture.graph import StepGraph, group_of
from weft.inductor.comm.arena import ALIGNMENT
from weft.inductor.comm.kernels.deposit import TYPES as DEPOSITED
from weft.inductor.comm.kernels.reduce_scatter import LandedSum, PullReduceScatter
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.escapes import escaping
from weft.inductor.passes.order import waits_of
from weft.inductor.passes.wire_dtype import WIDENING, WIDENING_COALESCED, expand
from weft.inductor.runtime.geometry import read_by_storage

Node = torch.fx.Node
Kind = tuple[tuple[int, ...], torch.dtype]  # of a contiguous tensor: its sizes, its dtype

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class PeerCall:
    """A collective over peers: called with a list of tensors, it returns a list of results, to be waited for.

    Attributes:
        group: the group's name in the graph.
        world: how many ranks it has.
        programs: of its kernel; 0 for as many as the kernel has by itself.
        offsets: where each member lies in the arena, in bytes; empty as long as that is not decided.
        opens: whether all ranks meet before anything of it is done, see :mod:`weft.inductor.comm.arena`.
    """

    group: str
    world: int
    programs: int = 0
    offsets: tuple[int, ...] = ()
    opens: bool = False

    collective: ClassVar[bool] = True
    shares_as_fakes: ClassVar[bool] = True
    kind: ClassVar[str]  # as weft.inductor.comm.collective_cost calls it
    lane: ClassVar[str]  # what carries it, see weft.inductor.comm.streams
    reads_arena: ClassVar[bool] = False  # whether peers read its inputs from the arena

    @property
    def in_arena(self) -> bool:
        """Whether its results lie in the arena."""
        return False

    def members(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> list[Kind]:
        """What lies in the arena, for inputs and results like these."""
        if self.in_arena:
            return [(tuple(val.shape), val.dtype) for val in made]
        narrow = self.kind == "all_gather"  # shards are cast before they are sent
        pairs = zip(given, made, strict=True)
        return [(tuple(val.shape), result.dtype if narrow else val.dtype) for val, result in pairs]

    @property
    def __name__(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__qualname__).lower()

    def __call__(self, inputs: Any) -> Any:
        raise AssertionError(f"{self.__name__} has no memory yet: weft.inductor.comm.bound.bind was not called")


@dataclass(frozen=True)
class PeerGather(PeerCall):
    """All-gather of shards (rows, ...) into the arena, cast on the way; results are (world * rows, ...)."""

    kind: ClassVar[str] = "all_gather"
    lane: ClassVar[str] = "gather"

    @property
    def in_arena(self) -> bool:
        return True


@dataclass(frozen=True)
class CopyEngineGather(PeerCall):
    """All-gather of shards (rows, ...), cast into the arena, to (world * rows, ...) in memory of their own.

    Attributes:
        ahead: whether the compute stream brings shards into the arena, not the lane.
    """

    ahead: bool = False

    kind: ClassVar[str] = "all_gather"
    lane: ClassVar[str] = "copies"
    reads_arena: ClassVar[bool] = True


@dataclass(frozen=True)
class PeerReduceScatter(PeerCall):
    """Reduce-scatter of (world * rows, ...) in the arena into (rows, ...), summed in float32 in the order of the ranks.

    Attributes:
        op: "sum" or "avg".
        squares: whether somebody wants the sums of the squares of its results, see :class:`PeerSquares`.
    """

    op: str = "sum"
    squares: bool = False

    kind: ClassVar[str] = "reduce_scatter"
    lane: ClassVar[str] = "reduce"
    reads_arena: ClassVar[bool] = True
    kernel: ClassVar[type[PullReduceScatter]] = PullReduceScatter

    @property
    def sums(self) -> int:
        """How many sums of squares there are, one a program, zeros among them where fewer programs run."""
        return self.programs or self.kernel.programs


@dataclass(frozen=True)
class CopySumReduceScatter(PeerReduceScatter):
    """The same, with the same bits, of parts that are copied to this rank before they are summed."""

    kernel: ClassVar[type[PullReduceScatter]] = LandedSum

    def landing(self, members: Sequence[Kind]) -> list[int]:
        """Where this rank's parts of ``members`` land in what is copied from one rank, and then how much that is, in
        bytes."""
        parts = (-(-bytes_of(member) // self.world // ALIGNMENT) * ALIGNMENT for member in members)
        return [*accumulate(parts, initial=0)]

    def landed_bytes(self, members: Sequence[Kind]) -> int:
        """Bytes that are copied from all peers, for which there has to be memory."""
        return (self.world - 1) * self.landing(members)[-1]


@dataclass(frozen=True)
class PeerAllReduce(PeerCall):
    """All-reduce through the arena, in float32 (float64, integers: in themselves) in the order of the ranks.

    Attributes:
        op: "sum", "avg", "max" or "min".
        shots: 1 or 2, see ``kernels/all_reduce.py``. The results of two lie in the arena.
    """

    op: str = "sum"
    shots: int = 1

    kind: ClassVar[str] = "all_reduce"
    lane: ClassVar[str] = "reduce"

    @property
    def in_arena(self) -> bool:
        return self.shots == 2


@dataclass(frozen=True)
class PeerWait:
    """Holds the compute stream until the collective that gives its argument has ended; returns the argument."""

    waits: ClassVar[bool] = True
    shares_as_fakes: ClassVar[bool] = True
    __name__: ClassVar[str] = "peer_wait"

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        raise AssertionError(
            "a wait for a collective that has no memory yet: weft.inductor.comm.bound.bind was not called"
        )


@dataclass(frozen=True)
class PeerSquares:
    """Called with a result of a reduce-scatter, after its wait: the sums of the squares of all its results, as they are
    rounded, float32[:attr:`PeerReduceScatter.sums`]."""

    shares_as_fakes: ClassVar[bool] = True
    free: ClassVar[bool] = True  # it reads nothing
    __name__: ClassVar[str] = "peer_squares"

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        raise AssertionError(
            "squares of a collective that has no memory yet: weft.inductor.comm.bind.bind was not called"
        )


def call_of(start: Node) -> PeerCall:
    """What a node calls that starts a collective over peers."""
    assert isinstance(start.target, PeerCall)
    return start.target


def inputs_of(start: Node) -> list[Node]:
    """The tensors that such a node is given."""
    (inputs,) = start.args
    return list(inputs)  # type: ignore[arg-type]


def members_of(start: Node) -> list[Kind]:
    """What of such a node lies in the arena."""
    return call_of(start).members([used.meta["val"] for used in inputs_of(start)], start.meta["val"])


def bytes_of(kind: Kind) -> int:
    sizes, dtype = kind
    return math.prod(sizes) * dtype.itemsize


# ---- what can be carried

_GATHERS = (_c10d.all_gather_into_tensor.default, _c10d.all_gather_into_tensor_coalesced.default)
_REDUCES = (
    _c10d.reduce_scatter_tensor.default,
    _c10d.reduce_scatter_tensor_coalesced.default,
    WIDENING,
    WIDENING_COALESCED,
)
_ALL_REDUCES = (_c10d.all_reduce.default, _c10d.all_reduce_coalesced.default)

_Maker = Callable[[str, int, int, str], PeerCall]
_TRANSPORTS: dict[str, tuple[tuple[Any, ...], tuple[str, ...], _Maker]] = {
    "push": (_GATHERS, ("",), lambda group, world, programs, op: PeerGather(group, world, programs)),
    "copy_engine": (_GATHERS, ("",), lambda group, world, programs, op: CopyEngineGather(group, world)),
    "pull": (
        _REDUCES,
        ("sum", "avg"),
        lambda group, world, programs, op: PeerReduceScatter(group, world, programs, op=op),
    ),
    "copy_sum": (
        _REDUCES,
        ("sum", "avg"),
        lambda group, world, programs, op: CopySumReduceScatter(group, world, programs, op=op),
    ),
    "one_shot": (
        _ALL_REDUCES,
        ("sum", "avg", "max", "min"),
        lambda group, world, programs, op: PeerAllReduce(group, world, programs, op=op),
    ),
    "two_shot": (
        _ALL_REDUCES,
        ("sum", "avg", "max", "min"),
        lambda group, world, programs, op: PeerAllReduce(group, world, programs, op=op, shots=2),
    ),
}
LIBRARIES = ("nccl", "gloo")

# What kernels load and store.
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def why_not(step: StepGraph, node: Node, transport: str) -> str | None:
    """Why ``transport`` cannot carry the collective that ``node`` starts, in words; None where it can.

    Says nothing of whether the ranks can reach each other: see :func:`weft.inductor.comm.symmetric.reachable`.
    """
    name, _ = _parsed(transport)
    if name in LIBRARIES:
        return None
    if name not in _TRANSPORTS:
        return f"there is no transport {transport}"
    operations, ops, _ = _TRANSPORTS[name]
    if node.target not in operations:
        return f"{name} does not do {node.target}"
    given, made = _members(node)
    vals = [*given, *made]
    world = len(torch_adapter.group_ranks(step.groups[group_of(node)]))
    if world == 1:
        return "the group is one rank"
    if _op(node) not in ops:
        return f"{name} does not reduce by {_op(node)}"
    if any(type(n) is not int for val in vals for n in (*val.shape, *val.stride())):
        return "a size is not known before the step runs"
    if len({val.dtype for val in given}) > 1 or len({val.dtype for val in made}) > 1:
        return "the tensors are of several types"
    known = DEPOSITED if name == "copy_engine" else _TYPES
    unknown = next((val.dtype for val in vals if val.dtype not in known), None)
    if unknown is not None:
        return f"{name} does not move {unknown}"
    if _op(node) == "avg" and not made[0].dtype.is_floating_point:
        return "integers have no mean"
    if not all(val.numel() and val.is_contiguous() for val in made):
        return "a result is empty or has gaps"
    if lies_in_arena(transport) and any(wait in escaping(step) for wait in waits_of(node)):
        return "a result is held after the step, and would lie in memory that the next step uses"
    if lies_in_arena(transport) and any(map(read_by_storage, waits_of(node))):
        return "a result is read by its storage, and would lie in that of the arena"
    return None


def lies_in_arena(transport: str) -> bool:
    """Whether the results of what a transport over peers carries lie in the arena; what is not known carries none."""
    name, _ = _parsed(transport)
    return name in _TRANSPORTS and _TRANSPORTS[name][2]("", 1, 0, "sum").in_arena


def use_transport(step: StepGraph, node: Node, transport: str) -> Node:
    """Let ``transport`` carry the collective that ``node`` starts, which :func:`why_not` must allow. Changes ``step``.

    Returns the node that starts it then. With the name of a library ("nccl") the node stays, but for casts that it
    took over (:mod:`weft.inductor.passes.wire_dtype`), which the library cannot do.
    """
    name, programs = _parsed(transport)
    if name in LIBRARIES:
        return expand(step, node) if node.target in (WIDENING, WIDENING_COALESCED) else node
    assert (why := why_not(step, node, transport)) is None, why
    world = len(torch_adapter.group_ranks(step.groups[group_of(node)]))
    call = _TRANSPORTS[name][2](group_of(node), world, programs, _op(node))
    taken: Any = node.args[0]
    listed = isinstance(taken, (list, tuple))
    inputs = [*taken] if listed else [taken]
    if call.kind == "all_gather":
        sources = [_uncast(shard) for shard in inputs]
        # A kernel takes shards of one type.
        inputs = sources if len({source.meta["val"].dtype for source in sources}) == 1 else inputs
    with step.graph.inserting_before(node):
        start = step.graph.call_function(call, (inputs,))
        start.meta = {key: value for key, value in node.meta.items() if key != "inplace"}
        result = start
        if not listed:
            start.meta["val"] = [node.meta["val"]]
            result = step.graph.call_function(operator.getitem, (start, 0))
            result.meta = dict(node.meta)
            result.meta.pop("inplace", None)
    waits = waits_of(node)
    node.replace_all_uses_with(result)
    step.graph.erase_node(node)
    for wait in waits:
        wait.target = PeerWait()
    return start


def _uncast(shard: Node) -> Node:
    """What a shard is a cast of, where moving it can as well cast it; else itself."""
    source: Any = shard
    if shard.target is aten._to_copy.default and list(shard.kwargs) == ["dtype"]:
        source = shard.args[0]
    elif (list_ := cast_list(shard)) is not None:
        source = list_.args[0][shard.args[1]]  # type: ignore[index]
    given, made = source.meta["val"], shard.meta["val"]
    castable = given.dtype == torch.float32 and given.is_contiguous() and made.is_contiguous()
    return source if castable and "inplace" not in shard.meta else shard


def cast_list(element: Node) -> Node | None:
    """The cast of many tensors that a node is an element of the result of, None for other nodes."""
    found: Any = element
    for _ in range(2):
        found = found.args[0] if found.target is operator.getitem else None
        if not isinstance(found, Node):
            return None
    return found if isinstance(found.target, Cast) else None


def _parsed(transport: str) -> tuple[str, int]:
    """The name of a transport and its number of programs, 0 where it says none."""
    found = re.fullmatch(r"(.*?)(?:_(\d+))?", transport)
    assert found is not None
    return found[1], int(found[2] or 0)


def _members(node: Node) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The fakes of what a collective takes and of what it gives."""
    given, made = node.args[0], node.meta["val"]
    inputs = given if isinstance(given, (list, tuple)) else [given]
    return [used.meta["val"] for used in inputs], list(made) if isinstance(made, (list, tuple)) else [made]  # type: ignore


def _op(node: Node) -> str:
    """How a collective reduces; "" for a gather."""
    return "" if node.target in _GATHERS else str(node.args[1])
