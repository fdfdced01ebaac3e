"""Calls of `torch.distributed` during a capture, as functional collectives.

A call such as `dist.all_reduce(t, async_op=True)` is recorded as `_c10d_functional.all_reduce` where it is made, and
at `Work.wait()` as a `wait_tensor` and a copy into the user's buffer. All references to the functions are intercepted,
also those imported before by `from torch.distributed import all_reduce`.

As in torch, autograd does not see these calls: they write to the buffer's data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import errors, thread_patches, torch_adapter
from weft.capture.record import rooted_collectives
from weft.capture.record.collective_call import (
    COALESCED,
    SUM,
    CollectiveCall,
    Sizes,
    coalesced,
    data_of,
    into,
    into_pieces,
    results_of,
    with_rows,
)
from weft.capture.record.collective_work import CapturedFuture, CapturedWork
from weft.capture.user_code import user_line
from weft.distributed.ops import take_shard

Tensor = torch.Tensor
_ops = torch.ops._c10d_functional
_REFUSED = {
    **dict.fromkeys(
        ("send", "recv", "isend", "irecv"),
        "a capture sees one rank, so the other side is not known; use batch_isend_irecv or all_to_all_single, on all "
        "ranks of the group",
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
}


@contextmanager
def functional_collectives() -> Iterator[None]:
    """While active, collectives of `torch.distributed` are recorded as functional operations.

    All functions with a functional counterpart are intercepted, also with `async_op=True`, and those that
    `torch.distributed.nn.functional` builds on them. Functional collectives that Python calls return waited plain
    tensors instead of AsyncCollectiveTensor, as they do in torch's own traces. Not reentrant.

    Raises:
        UncapturableCollective: a single send or receive, a barrier, or a collective of objects, at the user's line.
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
        self._coalescing: dict[str, list[CollectiveCall]] = {}

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
            "reduce": self.reduce,
            "gather": self.gather,
            "scatter": self.scatter,
            "batch_isend_irecv": self.batch_isend_irecv,
            "_check_op": _check_point_to_point,
            "_coalescing_manager": self.coalescing_manager,
        }
        return {**intercepted, **{name: _refusal(name, remedy) for name, remedy in _REFUSED.items()}}

    def check_all_waited(self) -> None:
        """Raise UnwaitedCollective where a collective was issued and never waited for."""
        unwaited = [work for work in self._works if not work.waited]
        if unwaited:
            raise errors.UnwaitedCollective(unwaited[0].name, unwaited[0].line, len(unwaited))

    # ---- reductions and gathers

    def all_reduce(self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
        call = CollectiveCall("all_reduce", group)
        data = data_of(tensor, call, op)
        call.inputs, call.reduction, call.outputs = [data], call.reduction_name(op), [tensor]
        call.write = into([data])
        return self._issue(call, async_op)

    def all_reduce_coalesced(
        self, tensors: Tensor | list[Tensor], op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> CapturedFuture | None:
        call = CollectiveCall("all_reduce_coalesced", group)
        call.outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        call.same_dtype(*call.outputs)
        call.inputs = [data_of(tensor, call, op) for tensor in call.outputs]
        call.reduction, call.write = call.reduction_name(op), into(call.inputs)
        return self._future(call, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        call = CollectiveCall("all_gather_into_tensor", group)
        call.same_dtype(output_tensor, input_tensor)
        call.require(
            output_tensor.numel() == call.size * input_tensor.numel(),
            f"the output has {output_tensor.numel()} elements, {call.size} inputs {input_tensor.numel()}",
        )
        call.inputs, call.outputs = [with_rows(data_of(input_tensor))], [output_tensor]
        call.write = into([data_of(output_tensor)])
        return self._issue(call, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        call = CollectiveCall("reduce_scatter_tensor", group)
        call.same_dtype(output, input)
        call.require(
            input.numel() == call.size * output.numel(),
            f"the input has {input.numel()} elements for {call.size} outputs of {output.numel()}",
        )
        data = data_of(input, call, op)
        # torch splits the memory of the input into equal parts, whatever its shape.
        call.inputs = [data if input.shape[1:] == output.shape[1:] and input.dim() > 0 else data.reshape(-1)]
        call.reduction, call.outputs, call.write = call.reduction_name(op), [output], into([data_of(output)])
        return self._issue(call, async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        call = CollectiveCall("all_gather", group)
        call.same_dtype(tensor, *tensor_list)
        call.require(len(tensor_list) == call.size, f"{len(tensor_list)} outputs for {call.size} ranks")
        outputs = [data_of(t) for t in tensor_list]
        call.outputs = list(tensor_list)
        data = data_of(tensor)
        if all(torch_adapter.surely(t.numel() == data.numel()) for t in outputs):
            call.inputs, call.write = [with_rows(data)], into_pieces(outputs)
        else:
            # The outputs differ in size: each rank sends its whole tensor to every rank.
            call.name, call.inputs = "all_to_all_single", [data.reshape(-1).repeat(call.size)]
            call.splits = [t.numel() for t in outputs], [data.numel()] * call.size
            call.write = into_pieces(outputs)
        return self._issue(call, async_op)

    def all_gather_coalesced(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> CapturedFuture | None:
        call = CollectiveCall("all_gather_coalesced", group)
        call.require(
            len(output_tensor_lists) == call.size,
            f"{len(output_tensor_lists)} lists of outputs for {call.size} ranks",
        )
        call.inputs = [with_rows(data_of(tensor)) for tensor in input_tensor_list]
        call.outputs = [tensor for outputs in output_tensor_lists for tensor in outputs]
        writes = [into_pieces([data_of(t) for t in of_input]) for of_input in zip(*output_tensor_lists, strict=True)]

        def write(results: Sequence[Tensor]) -> None:
            for put, result in zip(writes, results, strict=True):
                put([result])

        call.write = write
        return self._future(call, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        call = CollectiveCall("reduce_scatter", group)
        call.same_dtype(output, *input_list)
        call.require(len(input_list) == call.size, f"{len(input_list)} inputs for {call.size} ranks")
        for tensor in input_list:
            call.require(
                tensor.numel() == output.numel(),
                "inputs of unequal sizes cannot be captured; pad them to one size",
            )
        call.inputs = [torch.cat([data_of(tensor, call, op).reshape(-1) for tensor in input_list])]
        call.reduction, call.outputs, call.write = call.reduction_name(op), [output], into([data_of(output)])
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
        call = CollectiveCall("all_to_all_single", group)
        call.same_dtype(output, input)
        call.splits = (
            call.split_sizes(output_split_sizes, output, "output"),
            call.split_sizes(input_split_sizes, input, "input"),
        )
        call.inputs, call.outputs, call.write = [data_of(input)], [output], into([data_of(output)])
        return self._issue(call, async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        call = CollectiveCall("all_to_all", group)
        call.same_dtype(*output_tensor_list, *input_tensor_list)
        for name, given in (("outputs", output_tensor_list), ("inputs", input_tensor_list)):
            call.require(len(given) == call.size, f"{len(given)} {name} for {call.size} ranks")
        outputs = [data_of(tensor) for tensor in output_tensor_list]
        inputs = [data_of(tensor) for tensor in input_tensor_list]
        call.inputs = [torch.cat([tensor.reshape(-1) for tensor in inputs])]
        call.splits = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        call.outputs, call.write = list(output_tensor_list), into_pieces(outputs)
        return self._issue(call, async_op)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        call = CollectiveCall("broadcast", group)
        call.source = call.root(src, group_src, "src")
        data = data_of(tensor)
        call.inputs, call.outputs, call.write = [data], [tensor], into([data])
        return self._issue(call, async_op)

    # ---- with a root, and between two ranks

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        return self._issue(rooted_collectives.reduce(tensor, dst, op, group, group_dst), async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:
        return self._issue(rooted_collectives.gather(tensor, gather_list, dst, group, group_dst), async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        return self._issue(rooted_collectives.scatter(tensor, scatter_list, src, group, group_src), async_op)

    def batch_isend_irecv(self, p2p_op_list: list[dist.P2POp]) -> list[CapturedWork]:
        return rooted_collectives.batch(p2p_op_list, self._launch)

    # ---- coalescing

    @contextmanager
    def coalescing_manager(
        self, group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[_CoalescingManager]:
        """While active, collectives of one kind on `group` are collected; at the end they become one operation."""
        name = CollectiveCall("_coalescing_manager", group).group_name
        if name in self._coalescing:
            raise errors.InvalidCollective("_coalescing_manager", "it is active for this group already", user_line())
        manager = _CoalescingManager()
        calls = self._coalescing[name] = []
        try:
            yield manager
        finally:
            del self._coalescing[name]
        if calls:
            work = self._launch(coalesced(calls))
            if async_ops:
                manager.works.append(work)
            else:
                work.wait()

    # ---- issuing

    def _issue(self, call: CollectiveCall, async_op: bool) -> CapturedWork | _PartOfCoalesced | None:
        queue = self._coalescing.get(call.group_name)
        if queue is not None and call.name in COALESCED:
            queue.append(call)
            return _PartOfCoalesced() if async_op else None
        work = self._launch(call)
        if async_op:
            return work
        work.wait()
        return None

    def _future(self, call: CollectiveCall, async_op: bool) -> CapturedFuture | None:
        """Issue one of the coalesced functions, which return a future instead of a Work."""
        work = self._issue(call, async_op)
        return work.get_future() if isinstance(work, CapturedWork) else None

    @torch.no_grad()
    def _launch(self, call: CollectiveCall) -> CapturedWork:
        work = CapturedWork(call.name, results_of(call), call.write, call.outputs)
        self._works.append(work)
        return work


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


def _check_point_to_point(op: Any) -> None:
    """What torch checks of a P2POp, which may be made with references to the functions as they were before."""
    known = [thread_patches.original(function) for function in (dist.isend, dist.irecv)]
    if thread_patches.original(op) not in known:
        raise errors.InvalidCollective("P2POp", "op is neither dist.isend nor dist.irecv", user_line())


def _refusal(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise errors.UncapturableCollective(name, user_line(), remedy)

    return refuse
