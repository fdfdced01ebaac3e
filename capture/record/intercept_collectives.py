"""Calls of `torch.distributed` during a capture, as functional collectives.

A call such as `dist.all_reduce(t, async_op=True)` is recorded as `_c10d_functional.all_reduce` where it is made, and
at `Work.wait()` as a `wait_tensor` and a copy into the user's buffer. All references to the functions are intercepted,
also those imported before by `from torch.distributed import all_reduce`.

As in torch, autograd does not see these calls: they write to the buffer's data.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import errors, thread_patches, torch_adapter
from weft.capture.record.collective_work import CapturedFuture, CapturedWork, Write
from weft.capture.user_code import user_line
from weft.distributed.ops import take_shard

Tensor = torch.Tensor
Sizes = Sequence[int | torch.SymInt] | None

_ops = torch.ops._c10d_functional
_SUM = dist.ReduceOp.SUM
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
_REFUSED = {
    **dict.fromkeys(
        ("send", "recv", "isend", "irecv", "batch_isend_irecv"),
        "ranks run the same graph, so there is no single sender; use all_to_all_single with split sizes",
    ),
    **dict.fromkeys(("barrier", "monitored_barrier"), "a graph orders its operations itself; take it out of the step"),
    **dict.fromkeys(
        (
            "all_gather_object",
            "gather_object",
            "broadcast_object_list",
            "scatter_object_list",
            "send_object_list",
            "recv_object_list",
        ),
        "Python objects are not in the graph; exchange them outside the step, or send a tensor",
    ),
    **dict.fromkeys(
        ("gather", "scatter", "reduce"),
        "one rank would do other work than the rest; use all_gather_into_tensor, broadcast or all_reduce",
    ),
}


@contextmanager
def functional_collectives() -> Iterator[None]:
    """While active, collectives of `torch.distributed` are recorded as functional operations.

    All functions with a functional counterpart are intercepted, also with `async_op=True`, and those that
    `torch.distributed.nn.functional` builds on them. Functional collectives that Python calls return waited plain
    tensors instead of AsyncCollectiveTensor, as they do in torch's own traces. Not reentrant.

    Raises:
        UncapturableCollective: a point-to-point call, a barrier, or a rooted or object collective, at the user's line.
        InvalidCollective: wrong arguments, at the user's line.
        UnwaitedCollective: at the end, where an asynchronous collective was never waited for.
    """
    capture = _CollectiveInterceptor()
    with ExitStack() as stack:
        for name, replacement in capture.replacements().items():
            stack.enter_context(torch_adapter.redirected_collective(name, replacement))
        stack.enter_context(torch_adapter.functional_collectives_waited())
        stack.enter_context(torch_adapter.gloo_all_to_all_without_scatter())
        placements = sys.modules.get("torch.distributed.tensor.placement_types")
        if placements is not None:
            stack.enter_context(thread_patches.replaced(placements, "mesh_scatter", _scatter_by_broadcast))
        yield
    capture.check_all_waited()


class _CollectiveInterceptor:
    """The replacements of the functions of `torch.distributed`, and the collectives that they issued."""

    def __init__(self) -> None:
        self._works: list[CapturedWork] = []
        self._coalescing: dict[str, list[_Call]] = {}

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """The replacements by name in `torch.distributed`, for all supported versions of torch."""
        intercepted = {
            "all_reduce": self.all_reduce,
            "all_reduce_coalesced": self.all_reduce_coalesced,
            "all_gather": self.all_gather,
            "all_gather_single": self.all_gather_into_tensor,
            "all_gather_into_tensor": self.all_gather_into_tensor,
            "_all_gather_base": self.all_gather_into_tensor,
            "all_gather_coalesced": self.all_gather_coalesced,
            "reduce_scatter": self.reduce_scatter,
            "reduce_scatter_single": self.reduce_scatter_tensor,
            "reduce_scatter_tensor": self.reduce_scatter_tensor,
            "_reduce_scatter_base": self.reduce_scatter_tensor,
            "all_to_all_single": self.all_to_all_single,
            "all_to_all": self.all_to_all,
            "broadcast": self.broadcast,
            "_coalescing_manager": self.coalescing_manager,
        }
        return {**intercepted, **{name: _refusal(name, remedy) for name, remedy in _REFUSED.items()}}

    def check_all_waited(self) -> None:
        """Raise UnwaitedCollective where a collective was issued and never waited for."""
        unwaited = [work for work in self._works if not work.waited]
        if unwaited:
            raise errors.UnwaitedCollective(unwaited[0].name, unwaited[0].line, len(unwaited))

    # ---- reductions and gathers

    def all_reduce(self, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
        call = _Call("all_reduce", group)
        data = _data(tensor, call, op)
        call.inputs, call.reduction, call.outputs = [data], call.reduction_name(op), [tensor]
        call.write = _into([data])
        return self._issue(call, async_op)

    def all_reduce_coalesced(
        self, tensors: Tensor | list[Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> CapturedFuture | None:
        call = _Call("all_reduce_coalesced", group)
        call.outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        call.same_dtype(*call.outputs)
        call.inputs = [_data(tensor, call, op) for tensor in call.outputs]
        call.reduction, call.write = call.reduction_name(op), _into(call.inputs)
        return self._future(call, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        call = _Call("all_gather_into_tensor", group)
        call.same_dtype(output_tensor, input_tensor)
        call.require(
            output_tensor.numel() == call.size * input_tensor.numel(),
            f"the output has {output_tensor.numel()} elements, {call.size} inputs {input_tensor.numel()}",
        )
        call.inputs, call.outputs = [_with_rows(_data(input_tensor))], [output_tensor]
        call.write = _into([_data(output_tensor)])
        return self._issue(call, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        call = _Call("reduce_scatter_tensor", group)
        call.same_dtype(output, input)
        call.require(
            input.numel() == call.size * output.numel(),
            f"the input has {input.numel()} elements for {call.size} outputs of {output.numel()}",
        )
        data = _data(input, call, op)
        # torch splits the memory of the input into equal parts, whatever its shape.
        call.inputs = [data if input.shape[1:] == output.shape[1:] and input.dim() > 0 else data.reshape(-1)]
        call.reduction, call.outputs, call.write = call.reduction_name(op), [output], _into([_data(output)])
        return self._issue(call, async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        call = _Call("all_gather", group)
        call.same_dtype(tensor, *tensor_list)
        call.require(len(tensor_list) == call.size, f"{len(tensor_list)} outputs for {call.size} ranks")
        outputs = [_data(t) for t in tensor_list]
        call.outputs = list(tensor_list)
        data = _data(tensor)
        if all(torch_adapter.surely(t.numel() == data.numel()) for t in outputs):
            call.inputs, call.write = [_with_rows(data)], _into_pieces(outputs)
        else:
            # The outputs differ in size: each rank sends its whole tensor to every rank.
            call.name, call.inputs = "all_to_all_single", [data.reshape(-1).repeat(call.size)]
            call.splits = [t.numel() for t in outputs], [data.numel()] * call.size
            call.write = _into_pieces(outputs)
        return self._issue(call, async_op)

    def all_gather_coalesced(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> CapturedFuture | None:
        call = _Call("all_gather_coalesced", group)
        call.require(
            len(output_tensor_lists) == call.size,
            f"{len(output_tensor_lists)} lists of outputs for {call.size} ranks",
        )
        call.inputs = [_with_rows(_data(tensor)) for tensor in input_tensor_list]
        call.outputs = [tensor for outputs in output_tensor_lists for tensor in outputs]
        writes = [_into_pieces([_data(t) for t in of_input]) for of_input in zip(*output_tensor_lists, strict=True)]

        def write(results: Sequence[Tensor]) -> None:
            for put, result in zip(writes, results, strict=True):
                put([result])

        call.write = write
        return self._future(call, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        call = _Call("reduce_scatter", group)
        call.same_dtype(output, *input_list)
        call.require(len(input_list) == call.size, f"{len(input_list)} inputs for {call.size} ranks")
        for tensor in input_list:
            call.require(
                tensor.numel() == output.numel(),
                "inputs of unequal sizes cannot be captured; pad them to one size",
            )
        call.inputs = [torch.cat([_data(tensor, call, op).reshape(-1) for tensor in input_list])]
        call.reduction, call.outputs, call.write = call.reduction_name(op), [output], _into([_data(output)])
        return self._issue(call, async_op)

    # ---- exchanges

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        call = _Call("all_to_all_single", group)
        call.same_dtype(output, input)
        call.splits = (
            call.split_sizes(output_split_sizes, output, "output"),
            call.split_sizes(input_split_sizes, input, "input"),
        )
        call.inputs, call.outputs, call.write = [_data(input)], [output], _into([_data(output)])
        return self._issue(call, async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        call = _Call("all_to_all", group)
        call.same_dtype(*output_tensor_list, *input_tensor_list)
        for name, given in (("outputs", output_tensor_list), ("inputs", input_tensor_list)):
            call.require(len(given) == call.size, f"{len(given)} {name} for {call.size} ranks")
        outputs = [_data(tensor) for tensor in output_tensor_list]
        inputs = [_data(tensor) for tensor in input_tensor_list]
        call.inputs = [torch.cat([tensor.reshape(-1) for tensor in inputs])]
        call.splits = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        call.outputs, call.write = list(output_tensor_list), _into_pieces(outputs)
        return self._issue(call, async_op)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        call = _Call("broadcast", group)
        call.require((src is None) != (group_src is None), "give exactly one of src and group_src")
        call.source = group_src if group_src is not None else call.rank_in_group(src)
        call.require(0 <= call.source < call.size, f"source {call.source} in a group of {call.size}")
        data = _data(tensor)
        call.inputs, call.outputs, call.write = [data], [tensor], _into([data])
        return self._issue(call, async_op)

    # ---- coalescing

    @contextmanager
    def coalescing_manager(
        self, group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[_CoalescingManager]:
        """While active, collectives of one kind on `group` are collected; at the end they become one operation."""
        name = _Call("_coalescing_manager", group).group_name
        if name in self._coalescing:
            raise errors.InvalidCollective("_coalescing_manager", "it is active for this group already", user_line())
        manager = _CoalescingManager()
        calls = self._coalescing[name] = []
        try:
            yield manager
        finally:
            del self._coalescing[name]
        if calls:
            work = self._launch(_coalesced(calls))
            if async_ops:
                manager.works.append(work)
            else:
                work.wait()

    # ---- issuing

    def _issue(self, call: _Call, async_op: bool) -> CapturedWork | _PartOfCoalesced | None:
        queue = self._coalescing.get(call.group_name)
        if queue is not None and call.name in _COALESCED:
            queue.append(call)
            return _PartOfCoalesced() if async_op else None
        work = self._launch(call)
        if async_op:
            return work
        work.wait()
        return None

    def _future(self, call: _Call, async_op: bool) -> CapturedFuture | None:
        """Issue one of the coalesced functions, which return a future instead of a Work."""
        work = self._issue(call, async_op)
        return work.get_future() if isinstance(work, CapturedWork) else None

    @torch.no_grad()
    def _launch(self, call: _Call) -> CapturedWork:
        work = CapturedWork(call.name, _results(call), call.write, call.outputs)
        self._works.append(work)
        return work


class _Call:
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
        raise errors.InvalidCollective(self.name, what, user_line())

    def require(self, condition: bool | torch.SymBool, what: str) -> None:
        """Fail unless `condition` holds. A condition that only the data decides is checked when the graph runs."""
        if isinstance(condition, torch.SymBool):
            line = user_line()
            torch._check(condition, lambda: str(errors.InvalidCollective(self.name, what, line)))
        elif not condition:
            self.fail(what)

    def same_dtype(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.require(isinstance(tensor, Tensor), f"a {type(tensor).__name__} was given for a tensor")
        dtypes = {tensor.dtype for tensor in tensors}
        self.require(len(dtypes) <= 1, f"tensors of different dtypes: {sorted(map(str, dtypes))}")

    def reduction_name(self, op: Any) -> str:
        for kind, name in _REDUCTIONS.items():
            if op == kind:
                return name
        self.fail(f"{op} has no functional form; scale the tensor and reduce with SUM")

    def rank_in_group(self, rank: int | None) -> int:
        ranks = dist.get_process_group_ranks(self.group)
        self.require(rank in ranks, f"rank {rank} is not in the group of {ranks}")
        return ranks.index(rank)  # type: ignore[arg-type]

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


_COALESCED = {
    "all_reduce": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_coalesced",
}
_OPERATIONS: dict[str, Callable[[_Call], Sequence[Tensor]]] = {
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


def _results(call: _Call) -> Sequence[Tensor]:
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


def _coalesced(calls: list[_Call]) -> _Call:
    """One call for several of one kind on one group."""
    first = calls[0]
    kinds = {(call.name, getattr(call, "reduction", None)) for call in calls}
    if len(kinds) > 1:
        first.fail(f"different collectives cannot be coalesced: {sorted(map(str, kinds))}")
    together = _Call(_COALESCED[first.name], first.group)
    together.inputs = [call.inputs[0] for call in calls]
    together.outputs = [call.outputs[0] for call in calls]
    if hasattr(first, "reduction"):
        together.reduction = first.reduction

    def write(results: Sequence[Tensor]) -> None:
        for call, result in zip(calls, results, strict=True):
            call.write([result])

    together.write = write
    return together


class _CoalescingManager:
    """The object that `with _coalescing_manager(...) as manager` gives the user."""

    def __init__(self) -> None:
        self.works: list[CapturedWork] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _PartOfCoalesced:
    """The handle of one collective inside a coalescing manager; only the manager can wait for it."""

    def wait(self, timeout: Any = None) -> None:
        raise errors.InvalidCollective("Work.wait", "the collective is coalesced; wait for the manager", user_line())


@torch.no_grad()
def _scatter_by_broadcast(
    output: Tensor,
    scatter_list: list[Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> None:
    """What `distribute_tensor` scatters along a dimension of a mesh, from one rank of it, in one graph for all ranks.

    That rank's chunks are broadcast, and each rank takes its own. All chunks have the shape of `output`.
    """
    group = mesh.get_group(mesh_dim).group_name
    chunks = torch.stack(list(scatter_list))
    received = _ops.wait_tensor(_ops.broadcast(chunks, group_src, group))
    output.copy_(take_shard(received, len(scatter_list), group)[0])


def _refusal(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise errors.UncapturableCollective(name, user_line(), remedy)

    return refuse


def _data(tensor: Tensor, call: _Call | None = None, reduction: Any = _SUM) -> Tensor:
    """The tensor's data as real numbers, detached from autograd: torch's collectives raise no version counter."""
    data = tensor.data
    if not data.is_complex():
        return data
    if call is not None and not dist.supports_complex(reduction):
        call.fail(f"complex numbers have no {reduction}")
    return torch.view_as_real(data)


def _with_rows(tensor: Tensor) -> Tensor:
    """A scalar as a row of one: an all-gather concatenates along dimension 0."""
    return tensor if tensor.dim() else tensor.reshape(1)


def _into(outputs: Sequence[Tensor]) -> Write:
    """Copies each result into its output, which may have another shape with the same number of elements."""

    def write(results: Sequence[Tensor]) -> None:
        for output, result in zip(outputs, results, strict=True):
            same = output.dim() == result.dim() and all(
                torch_adapter.surely(a == b) for a, b in zip(output.shape, result.shape, strict=True)
            )
            output.copy_(result if same else result.view(output.shape))

    return write


def _into_pieces(outputs: Sequence[Tensor]) -> Write:
    """Copies consecutive pieces of the one result into the outputs."""

    def write(results: Sequence[Tensor]) -> None:
        pieces = results[0].reshape(-1).split([output.numel() for output in outputs])
        for output, piece in zip(outputs, pieces, strict=True):
            output.copy_(piece.view(output.shape))

    return write
