"""Plain `torch.distributed` calls under `functional_collectives` give the values of the originals."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from torch.distributed import all_reduce as imported_all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from harness import run_ranks
from weft import errors
from weft.capture.record.intercept_collectives import functional_collectives

pytestmark = pytest.mark.gloo
alias_of_all_gather = dist.all_gather_into_tensor


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 + rank)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


# Each case makes its tensors, calls a collective, and returns its handle, if any, and where results arrive.
Result = tuple[Any, Any]
Case = Callable[[int, int, bool], Result]


def reduce_with(op: Any, dtype: torch.dtype) -> Case:
    def case(rank: int, world: int, async_op: bool) -> Result:
        t = data(rank, 3, 5, dtype=dtype)
        return dist.all_reduce(t, op, async_op=async_op), t

    return case


def gather_concatenated(rank: int, world: int, async_op: bool) -> Result:
    out = torch.zeros(world * 2, 3)
    return alias_of_all_gather(out, data(rank, 2, 3), async_op=async_op), out


def gather_base(rank: int, world: int, async_op: bool) -> Result:
    out = torch.zeros(world)
    return dist._all_gather_base(out, data(rank, 1), async_op=async_op), out


def gather_scalars(rank: int, world: int, async_op: bool) -> Result:
    out = [torch.zeros(()) for _ in range(world)]
    return dist.all_gather(out, data(rank), async_op=async_op), out


def gather_list(rank: int, world: int, async_op: bool) -> Result:
    out = [torch.zeros(2, 3, dtype=torch.complex64) for _ in range(world)]
    return dist.all_gather(out, data(rank, 2, 3, dtype=torch.complex64), async_op=async_op), out


def scatter_tensor(rank: int, world: int, async_op: bool) -> Result:
    out = torch.zeros(2, 3)
    return dist.reduce_scatter_tensor(out, data(rank, 2 * world, 3), async_op=async_op), out


def scatter_list(rank: int, world: int, async_op: bool) -> Result:
    out = torch.zeros(3)
    pieces = [data(rank + 10 * i, 3) for i in range(world)]
    return dist.reduce_scatter(out, pieces, dist.ReduceOp.MAX, async_op=async_op), out


def exchange_even(rank: int, world: int, async_op: bool) -> Result:
    out = torch.zeros(2 * world, 3)
    return dist.all_to_all_single(out, data(rank, 2 * world, 3), async_op=async_op), out


def exchange_split(rank: int, world: int, async_op: bool) -> Result:
    sent = [(rank + peer) % 3 for peer in range(world)]  # symmetric, with zeros
    out = torch.zeros(sum(sent), 2)
    return dist.all_to_all_single(out, data(rank, sum(sent), 2), sent, sent, async_op=async_op), out


def broadcast_src(rank: int, world: int, async_op: bool) -> Result:
    t = data(rank, 4)
    return dist.broadcast(t, src=1, async_op=async_op), t


def broadcast_group_src(rank: int, world: int, async_op: bool) -> Result:
    t = data(rank, 4)
    return dist.broadcast(t, group=dist.group.WORLD, group_src=0, async_op=async_op), t


def reduce_coalesced(rank: int, world: int, async_op: bool) -> Result:
    ts = [data(rank, 3), data(rank + 5, 2, 2)]
    return dist.all_reduce_coalesced(ts, async_op=async_op), ts


def intermediate_of_autograd(rank: int, world: int, async_op: bool) -> Result:
    leaf = data(rank, 3).requires_grad_()
    squared = leaf.exp()
    work = dist.all_reduce(squared, async_op=async_op)
    if work is not None:
        work.wait()
    squared.sum().backward()  # exp saved its result: torch lets the collective change it
    return None, [squared.detach(), leaf.grad]


CASES: dict[str, Case] = {
    "sum": reduce_with(dist.ReduceOp.SUM, torch.float32),
    "sum_object": reduce_with(dist.ReduceOp(dist.ReduceOp.SUM), torch.bfloat16),
    "max": reduce_with(dist.ReduceOp.MAX, torch.int64),
    "min": reduce_with(dist.ReduceOp.MIN, torch.float64),
    "product": reduce_with(dist.ReduceOp.PRODUCT, torch.float32),
    "band": reduce_with(dist.ReduceOp.BAND, torch.int32),
    "bor": reduce_with(dist.ReduceOp.BOR, torch.int32),
    "bxor": reduce_with(dist.ReduceOp.BXOR, torch.int32),
    "complex": reduce_with(dist.ReduceOp.SUM, torch.complex64),
    **{
        f.__name__: f
        for f in (
            gather_concatenated,
            gather_base,
            gather_list,
            gather_scalars,
            scatter_tensor,
            scatter_list,
            exchange_even,
            exchange_split,
            broadcast_src,
            broadcast_group_src,
            reduce_coalesced,
            intermediate_of_autograd,
        )
    },
}


class Log(TorchDispatchMode):
    """The names of the collective operations and waits, and "copy" for each copy into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.ops.append(f"{func.namespace}.{func._opname}")
        elif func is torch.ops.aten.copy_.default:
            self.ops.append("copy")
        return func(*args, **(kwargs or {}))


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def compare_all(rank: int, world: int) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    logs = {}
    for name, case in CASES.items():
        _, plain = case(rank, world, False)
        for async_op in (False, True):
            with functional_collectives(), Log() as log:
                handle, captured = case(rank, world, async_op)
                assert (handle is None) == (not async_op or name == "intermediate_of_autograd"), name
                if handle is not None:
                    log.ops.append("user waits")
                    handle.wait()
            for a, b in zip(flat(captured), flat(plain), strict=True):
                assert torch.equal(a, b), (name, async_op, a, b)
        logs[name] = log.ops
    return logs


@pytest.mark.parametrize("world", [2, 4])
def test_values_are_those_of_torch_and_waits_stand_where_the_user_waits(world: int) -> None:
    for logs in run_ranks(compare_all, world, timeout=120.0):
        assert logs["sum"] == [
            "_c10d_functional.all_reduce",
            "user waits",
            "_c10d_functional.wait_tensor",
            "copy",
        ]
        for name, ops in logs.items():
            assert all(op.startswith("_c10d_functional.") or op in ("copy", "user waits") for op in ops), name
            if "user waits" in ops:
                assert "_c10d_functional.wait_tensor" not in ops[: ops.index("user waits")], name


def without_original(rank: int, world: int) -> None:
    """Forms that gloo itself has not, against what they mean."""
    everyone = [data(r, world, 3) for r in range(world)]
    with functional_collectives():
        out = [torch.zeros(3) for _ in range(world)]
        dist.all_to_all(out, list(everyone[rank]))
        assert all(torch.equal(out[r], everyone[r][rank]) for r in range(world))

        uneven = [data(r, r, 2) for r in range(world)]
        out = [torch.zeros(r, 2) for r in range(world)]
        dist.all_gather(out, uneven[rank])
        assert all(torch.equal(a, b) for a, b in zip(out, uneven, strict=True))

        stacked = torch.zeros(world, 2, 3)
        dist.all_gather_into_tensor(stacked, data(rank, 2, 3))
        assert torch.equal(stacked, torch.stack([data(r, 2, 3) for r in range(world)]))

        part = torch.zeros(3)
        dist._reduce_scatter_base(part, data(rank, world, 3))
        torch.testing.assert_close(part, torch.stack(everyone).sum(0)[rank])

        lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(world)]
        dist.all_gather_coalesced(lists, [data(rank, 3), data(rank, 2, 2)])
        for r in range(world):
            assert torch.equal(lists[r][0], data(r, 3))
            assert torch.equal(lists[r][1], data(r, 2, 2))


def test_forms_that_gloo_has_not() -> None:
    warnings.simplefilter("ignore")
    run_ranks(without_original, 3)


def coalesce(rank: int, world: int, captured: bool, kind: str, async_ops: bool) -> list[torch.Tensor]:
    warnings.simplefilter("ignore")
    tensors = [data(rank, 4), data(rank + 7, 2, 2)]
    with functional_collectives() if captured else nullcontext(), Log() as log:
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            if kind == "reduce":
                outs = tensors
                for t in tensors:
                    dist.all_reduce(t)
            elif kind == "gather":
                outs = [torch.zeros(world * t.shape[0], *t.shape[1:]) for t in tensors]
                for o, t in zip(outs, tensors, strict=True):
                    dist.all_gather_into_tensor(o, t)
            else:
                outs = [torch.zeros(4 // world), torch.zeros(2 // world, 2)]
                for o, t in zip(outs, tensors, strict=True):
                    dist.reduce_scatter_tensor(o, t)
        if async_ops:
            log.ops.append("user waits")
            manager.wait()
    if captured:
        issued = [op for op in log.ops if op not in ("copy", "_c10d_functional.wait_tensor", "user waits")]
        assert len(issued) == 1
        assert issued[0].endswith("_coalesced")
        waits = [i for i, op in enumerate(log.ops) if op == "_c10d_functional.wait_tensor"]
        assert not async_ops or min(waits) > log.ops.index("user waits")
    return outs


def coalescing_body(rank: int, world: int, kind: str, async_ops: bool) -> bool:
    plain = coalesce(rank, world, False, kind, async_ops)
    captured = coalesce(rank, world, True, kind, async_ops)
    return all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.parametrize("kind", ["reduce", "gather", "scatter"])
def test_a_coalescing_manager_makes_one_operation(kind: str, async_ops: bool) -> None:
    assert run_ranks(coalescing_body, 2, kind, async_ops) == [True, True]


def coalesce_dtypes(rank: int, world: int, kind: str) -> bool:
    """Tensors of two dtypes under one manager; eager gathers and reduces them one by one here, as gloo must."""
    warnings.simplefilter("ignore")

    def step(managed: bool, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        tensors, outs = [a.clone(), b.clone(), c.clone()], []
        with dist._coalescing_manager() if managed else nullcontext():
            for t in tensors:
                if kind == "reduce":
                    outs.append(t)
                    dist.all_reduce(t)
                elif kind == "gather":
                    outs.append(t.new_empty(world * t.shape[0], *t.shape[1:]))
                    dist.all_gather_into_tensor(outs[-1], t)
                else:
                    outs.append(t.new_empty(t.shape[0] // world, *t.shape[1:]))
                    dist.reduce_scatter_tensor(outs[-1], t)
        return outs

    given = data(rank, 4), data(rank + 7, 2, 2).double(), data(rank + 3, 2)
    ours = weft.compile(lambda *tensors: step(True, *tensors))(*given)
    return all(map(torch.equal, ours, step(False, *given)))


@pytest.mark.parametrize("kind", ["reduce", "gather", "scatter"])
def test_a_coalescing_manager_takes_several_dtypes(kind: str) -> None:
    assert run_ranks(coalesce_dtypes, 2, kind) == [True, True]


def functional_dtypes(rank: int, world: int) -> str:
    given = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(errors.InvalidCollective) as caught:
        weft.compile(lambda *tensors: funcol.all_reduce_coalesced(list(tensors), "sum", dist.group.WORLD))(*given)
    return str(caught.value)


def test_a_coalesced_operation_of_several_dtypes_is_refused_in_the_capture() -> None:
    for said in run_ranks(functional_dtypes, 2):
        assert "torch.float32, torch.float64" in said
        assert "test_collectives.py:" in said


def from_import_body(rank: int, world: int) -> list[str]:
    with functional_collectives(), Log() as log:
        imported_all_reduce(torch.ones(2))
    with Log() as after:
        imported_all_reduce(torch.ones(2))
    return log.ops + after.ops


def test_names_imported_before_are_served_and_given_back() -> None:
    for ops in run_ranks(from_import_body, 2):
        assert ops == [
            "_c10d_functional.all_reduce",
            "_c10d_functional.wait_tensor",
            "copy",
            "c10d.allreduce_",
        ]


def subgroup_body(rank: int, world: int) -> tuple[float, float, str]:
    group = dist.new_group([1, 2])
    with functional_collectives():
        if rank == 0:
            with pytest.raises(errors.InvalidCollective, match="not in the group") as caught:
                dist.all_reduce(torch.ones(1), group=group)
            return 0.0, 0.0, str(caught.value)
        a, b = torch.full((1,), float(rank)), torch.full((1,), float(rank))
        dist.all_reduce(a, group=group)
        dist.broadcast(b, src=2, group=group)
        return a.item(), b.item(), ""


def test_groups_of_some_ranks() -> None:
    outside, *inside = run_ranks(subgroup_body, 3)
    assert inside == [(3.0, 2.0, ""), (3.0, 2.0, "")]
    assert "test_collectives.py" in outside[2]


def future_body(rank: int, world: int, captured: bool) -> list[float]:
    """What a DDP communication hook does."""
    t = torch.full((2,), float(rank + 1))
    seen: queue.Queue[int] = queue.Queue()
    with functional_collectives() if captured else nullcontext():
        future = dist.all_reduce(t, async_op=True).get_future()
        halved = future.then(lambda f: f.value()[0].div_(world))
        twice = halved.then(lambda f: f.value() * 2)
        future.add_done_callback(lambda f: seen.put(len(f.value())))
        doubled = twice.wait()
        assert future.done()
    # Torch calls back in a thread of its own, which may be behind the wait.
    return [*doubled.tolist(), *t.tolist(), seen.get(timeout=30)]


@pytest.mark.parametrize("captured", [False, True])
def test_futures(captured: bool) -> None:
    assert run_ranks(future_body, 2, captured) == [[3.0, 3.0, 1.5, 1.5, 1]] * 2


def polling_body(rank: int, world: int) -> float:
    t = torch.ones(1)
    with functional_collectives():
        work = dist.all_reduce(t, async_op=True)
        assert isinstance(work, dist.Work)
        while not work.is_completed():
            pass
        assert work.result()[0] is t
    return t.item()


def test_a_loop_that_polls_ends() -> None:
    assert run_ranks(polling_body, 2) == [2.0, 2.0]


def differentiable(rank: int, world: int, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Outputs and gradients of torch's differentiable collectives, of both kinds."""
    warnings.simplefilter("ignore")
    results: list[torch.Tensor] = []

    def run(function: Callable[[torch.Tensor], Any], *shape: int) -> None:
        x = data(rank, *shape).requires_grad_()
        out = function(x)
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        torch.stack([(o * (i + 1 + rank)).sum() for i, o in enumerate(outs)]).sum().backward()
        assert x.grad is not None
        results.extend([*(o.detach() for o in outs), x.grad])

    sent = [(rank + peer) % 3 for peer in range(world)]
    run(dnn.all_reduce, 3)
    run(dnn.all_gather, 3)
    run(lambda x: dnn.all_to_all_single(torch.zeros(sum(sent), 2), x, sent, sent), sum(sent), 2)
    run(lambda x: dnn.all_to_all([torch.zeros(2) for _ in range(world)], list(x)), world, 2)
    run(lambda x: funcol.all_to_all_single_autograd(x, sent, sent, mesh), sum(sent), 2)
    run(lambda x: funcol.all_gather_tensor_autograd(x, 1, mesh), 3, 2)
    run(lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, mesh), 2 * world, 2)
    return results


def differentiable_body(rank: int, world: int) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    plain = differentiable(rank, world, mesh)
    with functional_collectives(), Log() as log:
        captured = differentiable(rank, world, mesh)
    assert not [op for op in log.ops if op.startswith("c10d.")]
    return all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))


def test_differentiable_collectives() -> None:
    assert run_ranks(differentiable_body, 3) == [True] * 3


def funcol_body(rank: int, world: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (world,))
    with functional_collectives():
        inside = type(funcol.all_reduce(torch.ones(2), "sum", mesh)).__name__
    return inside, type(funcol.all_reduce(torch.ones(2), "sum", mesh)).__name__


def test_functional_collectives_return_plain_tensors() -> None:
    assert run_ranks(funcol_body, 2) == [("Tensor", "AsyncCollectiveTensor")] * 2


def mistakes_body(rank: int, world: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    t, said = torch.ones(4), {}

    def expect(kind: type[Exception], name: str, act: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught, functional_collectives():
            act()
        said[name] = str(caught.value)

    refused = errors.UncapturableCollective
    expect(refused, "send", lambda: dist.send(t, 1 - rank))
    expect(refused, "isend", lambda: dist.isend(t, 1 - rank))
    expect(refused, "barrier", lambda: dist.barrier())
    expect(refused, "monitored_barrier", lambda: dist.monitored_barrier())
    expect(refused, "all_gather_object", lambda: dist.all_gather_object([None] * world, 1))
    wrong = errors.InvalidCollective
    expect(wrong, "size", lambda: dist.all_gather_into_tensor(torch.ones(5), t))
    expect(wrong, "dtype", lambda: dist.all_gather_into_tensor(torch.ones(8, dtype=torch.int32), t))
    expect(wrong, "even", lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)))
    expect(wrong, "splits", lambda: dist.all_to_all_single(torch.ones(4), t, [1, 3], [1, 2]))
    expect(wrong, "negative", lambda: dist.all_to_all_single(torch.ones(4), t, [5, -1], [2, 2]))
    expect(wrong, "list", lambda: dist.all_gather([t], t))
    expect(wrong, "group", lambda: dist.all_reduce(t, group="dp"))  # type: ignore[arg-type]
    expect(wrong, "premul", lambda: dist.all_reduce(t, dist._make_nccl_premul_sum(0.5)))
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    expect(wrong, "dtypes", lambda: dist.all_reduce_coalesced(mixed))
    with pytest.raises(ValueError, match="different dtypes"):  # eager, too
        dist.all_reduce_coalesced(mixed)
    expect(wrong, "source", lambda: dist.broadcast(t, group_src=7))
    expect(errors.UnwaitedCollective, "unwaited", lambda: dist.all_reduce(t, async_op=True))
    with pytest.raises(KeyError), functional_collectives():
        {}[dist.all_reduce(t, async_op=True)]  # the user's own error is not hidden by the missing wait
    dist.barrier()
    return said


def test_mistakes_name_the_line_and_the_remedy() -> None:
    for said in run_ranks(mistakes_body, 2):
        for name, text in said.items():
            assert "test_collectives.py:" in text, name
            assert "in <lambda>" in text, name
        assert "[1, 2]" not in said["splits"]
        assert "add up to 3" in said["splits"]
        assert "mesh.get_group" in said["group"]
        assert "SUM" in said["premul"]
        assert "all_to_all_single" in said["send"]
        assert "wait()" in said["unwaited"]


def unbacked_graph(rank: int, world: int) -> tuple[str, bool]:
    """Trace an exchange whose splits come from a tensor; run the graph with other splits."""

    def step(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sizes, arriving_sizes = counts.tolist(), arriving.tolist()
        out = x.new_empty(sum(arriving_sizes), x.shape[1])
        dist.all_to_all_single(out, x, arriving_sizes, sizes)
        return out

    def case(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [(rank + peer + shift) % 3 for peer in range(world)]
        return data(rank, sum(counts), 2), torch.tensor(counts)

    with functional_collectives():
        graph = make_fx(step, tracing_mode="symbolic")(*case(0))
    same = all(torch.equal(graph(*case(shift)), step(*case(shift))) for shift in range(3))
    return graph.code, same


def test_splits_from_a_tensor_stay_symbolic() -> None:
    for code, same in run_ranks(unbacked_graph, 3):
        assert code.count("_c10d_functional.all_to_all_single") == 2
        assert same


def test_on_fake_tensors_in_one_process() -> None:
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    try:

        def step(x: torch.Tensor) -> torch.Tensor:
            work = dist.all_reduce(x, async_op=True)
            out = x.new_empty(1024, 4)
            dist.all_gather_into_tensor(out, x * 2)
            work.wait()
            return out.sum() + x.sum()

        with functional_collectives():
            graph = make_fx(step, tracing_mode="fake")(torch.ones(4))
        names = [n.target.__name__ for n in graph.graph.nodes if "c10d" in str(n.target)]
        assert names == [
            "all_reduce.default",
            "all_gather_into_tensor.default",
            "wait_tensor.default",
            "wait_tensor.default",
        ]
    finally:
        dist.destroy_process_group()
