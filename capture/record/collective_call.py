"""One call of a collective of `torch.distributed` during a capture: its checked arguments, and the functional operation
that is made of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft import errors, torch_adapter
from weft.capture.record.collective_work import Write
from weft.capture.user_code import user_line

Tensor = torch.Tensor
Sizes = Sequence[int | torch.SymInt] | None

SUM = dist.ReduceOp.SUM

_ops = torch.ops._c10d_functional
_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


class CollectiveCall:
    """One call of a collective: its checked arguments, from which the functional operation is made."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    write: Write
    reduction: str
    splits: tuple[list[Any], list[Any]]
    source: int

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        group = dist.group.WORLD if group is None else group
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            self.fail("this rank is not in the group; all ranks run the same graph, so call it on members only")
        if not isinstance(group, dist.ProcessGroup):
            self.fail(f"group is {group!r}, not a ProcessGroup; of a mesh, give mesh.get_group('name')")
        self.group = group
        self.group_name: str = group.group_name
        self.size = group.size()

    def fail(self, what: str) -> NoReturn:
        """Raise InvalidCollective at the user's line."""
        raise errors.InvalidCollective(self.name, what, user_line())

    def require(self, condition: bool | torch.SymBool, what: str) -> None:
        """Fail unless `condition` holds. A condition that only the data decides is checked when the graph runs."""
        if isinstance(condition, torch.SymBool):
            line = user_line()
            torch._check(condition, lambda: str(errors.InvalidCollective(self.name, what, line)))
        elif not condition:
            self.fail(what)

    def same_dtype(self, *tensors: Tensor) -> None:
        """Fail unless these are tensors of one dtype."""
        for tensor in tensors:
            self.require(isinstance(tensor, Tensor), f"a {type(tensor).__name__} was given for a tensor")
        dtypes = {tensor.dtype for tensor in tensors}
        self.require(len(dtypes) <= 1, f"tensors of different dtypes: {sorted(map(str, dtypes))}")

    def reduction_name(self, op: Any) -> str:
        """What the functional operations call a ``dist.ReduceOp``."""
        for kind, name in _REDUCTIONS.items():
            if op == kind:
                return name
        self.fail(f"{op} has no functional form; scale the tensor and reduce with SUM")

    def rank_in_group(self, rank: int | None) -> int:
        """The rank in the group of a rank of the world."""
        ranks = dist.get_process_group_ranks(self.group)
        self.require(rank in ranks, f"rank {rank} is not in the group of {ranks}")
        return ranks.index(rank)  # type: ignore[arg-type]

    def root(self, rank: int | None, in_group: int | None, name: str, default: int | None = None) -> int:
        """The rank in the group of the root, which is given as a global rank or as one in the group.

        Args:
            name: of the argument for the global rank.
            default: the global rank where neither is given; None: one must be.
        """
        rank = default if rank is None and in_group is None else rank
        self.require((rank is None) != (in_group is None), f"give exactly one of {name} and group_{name}")
        root = in_group if in_group is not None else self.rank_in_group(rank)
        self.require(0 <= root < self.size, f"{name} is rank {root} in a group of {self.size}")
        return root

    def split_sizes(self, sizes: Sizes, tensor: Tensor, which: str) -> list[Any]:
        """The split sizes along dimension 0 of `tensor`: equal ones where `sizes` is empty."""
        rows = tensor.shape[0]
        if not sizes:
            self.require(rows % self.size == 0, f"the {which}'s {rows} rows do not divide by {self.size} ranks")
            return [rows // self.size] * self.size
        self.require(len(sizes) == self.size, f"{len(sizes)} {which} split sizes for {self.size} ranks")
        for size in sizes:
            self.require(size >= 0, f"a negative {which} split size")
        total = sum(sizes)
        self.require(total == rows, f"the {which} has {rows} rows, its split sizes add up to {total}")
        return list(sizes)


COALESCED = {
    "all_reduce": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_coalesced",
}
_OPERATIONS: dict[str, Callable[[CollectiveCall], Sequence[Tensor]]] = {
    "all_reduce": lambda c: [_ops.all_reduce(c.inputs[0], c.reduction, c.group_name)],
    "all_reduce_coalesced": lambda c: _ops.all_reduce_coalesced(c.inputs, c.reduction, c.group_name),
    "all_gather": lambda c: [_ops.all_gather_into_tensor(c.inputs[0], c.size, c.group_name)],
    "all_gather_into_tensor": lambda c: [_ops.all_gather_into_tensor(c.inputs[0], c.size, c.group_name)],
    "all_gather_coalesced": lambda c: _ops.all_gather_into_tensor_coalesced(c.inputs, c.size, c.group_name),
    "reduce_scatter": lambda c: [_ops.reduce_scatter_tensor(c.inputs[0], c.reduction, c.size, c.group_name)],
    "reduce_scatter_tensor": lambda c: [_ops.reduce_scatter_tensor(c.inputs[0], c.reduction, c.size, c.group_name)],
    "reduce_scatter_coalesced": lambda c: _ops.reduce_scatter_tensor_coalesced(
        c.inputs, c.reduction, c.size, c.group_name
    ),
    "all_to_all_single": lambda c: [_ops.all_to_all_single(c.inputs[0], *c.splits, c.group_name)],
    "all_to_all": lambda c: [_ops.all_to_all_single(c.inputs[0], *c.splits, c.group_name)],
    "broadcast": lambda c: [_ops.broadcast(c.inputs[0], c.source, c.group_name)],
}


def results_of(call: CollectiveCall) -> Sequence[Tensor]:
    """Issue the operation of a call: of a coalesced one, one for each dtype. gloo takes no others."""
    if len({tensor.dtype for tensor in call.inputs}) < 2:
        return _OPERATIONS[call.name](call)
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in call.inputs):
        at = [at for at, tensor in enumerate(call.inputs) if tensor.dtype == dtype]
        part = copy.copy(call)
        part.inputs = [call.inputs[each] for each in at]
        for each, result in zip(at, _OPERATIONS[call.name](part), strict=True):
            results[each] = result
    return [results[at] for at in range(len(call.inputs))]


def coalesced(calls: list[CollectiveCall]) -> CollectiveCall:
    """One call for several of one kind on one group."""
    first = calls[0]
    kinds = {(call.name, getattr(call, "reduction", None)) for call in calls}
    if len(kinds) > 1:
        first.fail(f"different collectives cannot be coalesced: {sorted(map(str, kinds))}")
    together = CollectiveCall(COALESCED[first.name], first.group)
    together.inputs = [call.inputs[0] for call in calls]
    together.outputs = [call.outputs[0] for call in calls]
    if hasattr(first, "reduction"):
        together.reduction = first.reduction

    def write(results: Sequence[Tensor]) -> None:
        for call, result in zip(calls, results, strict=True):
            call.write([result])

    together.write = write
    return together


def data_of(tensor: Tensor, call: CollectiveCall | None = None, reduction: Any = SUM) -> Tensor:
    """The tensor's data as real numbers, detached from autograd: torch's collectives raise no version counter."""
    data = tensor.data
    if not data.is_complex():
        return data
    if call is not None and not dist.supports_complex(reduction):
        call.fail(f"complex numbers have no {reduction}")
    return torch.view_as_real(data)


def with_rows(tensor: Tensor) -> Tensor:
    """A scalar as a row of one: an all-gather concatenates along dimension 0."""
    return tensor if tensor.dim() else tensor.reshape(1)


def into(outputs: Sequence[Tensor]) -> Write:
    """Copies each result into its output, which may have another shape with the same number of elements."""

    def write(results: Sequence[Tensor]) -> None:
        for output, result in zip(outputs, results, strict=True):
            same = output.dim() == result.dim() and all(
                torch_adapter.surely(a == b) for a, b in zip(output.shape, result.shape, strict=True)
            )
            output.copy_(result if same else result.view(output.shape))

    return write


def into_pieces(outputs: Sequence[Tensor]) -> Write:
    """Copies consecutive pieces of the one result into the outputs."""

    def write(results: Sequence[Tensor]) -> None:
        pieces = results[0].reshape(-1).split([output.numel() for output in outputs])
        for output, piece in zip(outputs, pieces, strict=True):
            output.copy_(piece.view(output.shape))

    return write
