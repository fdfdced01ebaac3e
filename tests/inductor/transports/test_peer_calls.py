"""Steps whose collectives run over shared memory compute what they compute over gloo, on real processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import peer_steps
import pytest
import torch
import torch.distributed as dist
from peer_steps import COPIES, KERNELS, model, over_peers, sharded, step_of, train
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import RanksFailed, run_ranks
from weft import errors, host_processes, knobs
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.transports import arena_layout
from weft.inductor.transports.peer_launch import BoundPeerCall

pytestmark = pytest.mark.gloo


def both(
    rank: int,
    world: int,
    bf16: bool,
    transports: list[str],
    sizes: tuple[int, int],
    kernels: bool,
    planned: bool = False,
) -> str:
    """Train over gloo and over peers, compare bits; the text of the program over peers. Kernels make other bits than
    ATen, so they are compared with themselves."""
    nets = [sharded(model(*sizes), bf16) for _ in range(2)]
    plain = over_peers(step_of(nets[0]), ["gloo"], kernels) if kernels else step_of(nets[0])
    expected = train(plain, nets[0], rank)
    compiled = over_peers(step_of(nets[1]), transports, kernels, planned=planned)
    torch.testing.assert_close(train(compiled, nets[1], rank), expected, rtol=0, atol=0)
    return compiled.programs[0].source


def calls(source: str) -> Counter[str]:
    """How often a program calls what communicates."""
    names = re.findall(r"\b(\w*c10d\w*|peer_[a-z_]+?|copy_[a-z]+_gather|copy_sum_[a-z_]+?|\w+_out)(?:_\d+)?\(", source)
    return Counter(name for name in names if name != "peer_wait")


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("transports", "names"),
    [
        (KERNELS, {"peer_gather", "peer_reduce_scatter", "peer_all_reduce"}),
        (COPIES, {"copy_engine_gather", "copy_sum_reduce_scatter", "peer_all_reduce"}),
    ],
    ids=["kernels", "copies"],
)
def test_sharded_training_on_two_ranks_is_the_same_to_the_bit(
    bf16: bool, transports: list[str], names: set[str]
) -> None:
    source, _ = run_ranks(both, 2, bf16, transports, (7, 13), False, timeout=120)
    assert set(calls(source)) == names


@pytest.mark.parametrize(("transports", "lies"), [(KERNELS, "peer_reduce_scatter"), (COPIES, "copy_engine_gather")])
def test_with_its_memory_planned_a_step_is_the_same_to_the_bit(transports: list[str], lies: str) -> None:
    source, _ = run_ranks(both, 2, True, transports, (8, 16), True, True, timeout=120)
    assert re.search(rf"{lies}(_\d+)?\(\s*\[[^\]]*\],\s*out=\[part\(", source)


@pytest.mark.parametrize("kernels", [False, True], ids=["aten", "generated"])
def test_what_is_reduced_is_made_where_peers_read_it(kernels: bool) -> None:
    """Sizes that the ranks divide: nothing is padded, and products and kernels write into the arena."""
    source, _ = run_ranks(both, 2, True, KERNELS, (8, 16), kernels, timeout=120)
    assert calls(source)["aten_mm_out"] == 4
    assert bool(re.search(r"out=\[None, \w+\]", source)) is kernels


def clipped(rank: int, world: int, transports: list[str]) -> str:
    """Train with gradients that are clipped, over gloo and over peers; the text of the program over peers."""
    nets = [sharded(model(8, 16), True) for _ in range(2)]
    expected = train(step_of(nets[0], clip=0.05), nets[0], rank)
    compiled = over_peers(step_of(nets[1], clip=0.05), transports, passes=[*peer_steps.PASSES, fuse_optimizer])
    torch.testing.assert_close(train(compiled, nets[1], rank), expected, rtol=1e-5, atol=1e-6)
    return compiled.programs[0].source


@pytest.mark.parametrize("transports", [KERNELS, COPIES], ids=["kernels", "copies"])
def test_the_norm_of_gradients_takes_squares_from_their_sums(transports: list[str]) -> None:
    """But for those that are reduced together with the head's and the embedding's, of rows that two ranks do not
    divide: they are read."""
    for source in run_ranks(clipped, 2, transports, timeout=120):
        (squares, read) = re.findall(r"= normofsquares(?:_\d+)?\([^\[]*\[([^\]]*)\],\s*\[([^\]]*)\]", source)[0]
        assert 0 < squares.count("peer_squares") == source.count("= peer_squares")
        assert 0 < len(read.split(",")) <= 8, read


def dropped(rank: int, world: int) -> tuple[int, int]:
    """How many collectives with memory of their own there are while a step that has them is, and afterwards."""
    net = sharded(model(8, 16))
    compiled = over_peers(step_of(net), COPIES, kernels=True)
    train(compiled, net, rank)
    bound = lambda: sum(isinstance(found, BoundPeerCall) for found in gc.get_objects())
    before = bound()
    sys.modules["weft.program_form"].compile_graph = None  # type: ignore[attr-defined] - it knows the step
    del compiled, net
    for _ in range(3):
        gc.collect()
    return before, bound()


def test_a_step_that_is_dropped_leaves_no_collective_with_its_memory_behind() -> None:
    for before, after in run_ranks(dropped, 2, timeout=120):
        assert before > 0
        assert after == 0


# ---- ranks that are not equally fast


def hurried(rank: int, world: int, transports: list[str]) -> None:
    """Train on ranks that dawdle at random, each at other places."""
    nets = [sharded(model(8, 16, blocks=4)) for _ in range(2)]
    expected = train(step_of(nets[0]), nets[0], rank)
    dawdle = random.Random(rank)
    start, wait = BoundPeerCall.__call__, BoundPeerCall.wait

    def starts(bound: BoundPeerCall, inputs: list[torch.Tensor], out: Any = None) -> list[torch.Tensor]:
        time.sleep(dawdle.choice([0, 0, 0, 0.005, 0.05]))
        return start(bound, inputs, out)

    def waits(bound: BoundPeerCall) -> None:
        wait(bound)
        time.sleep(dawdle.choice([0, 0, 0, 0, 0, 0.005, 0.05]))

    BoundPeerCall.__call__, BoundPeerCall.wait = starts, waits  # type: ignore[method-assign]
    got = train(over_peers(step_of(nets[1]), transports), nets[1], rank)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("transports", [KERNELS, COPIES], ids=["kernels", "copies"])
def test_training_stands_ranks_that_dawdle(transports: list[str]) -> None:
    run_ranks(hurried, 2, transports, timeout=120)


def gathered_twice(rank: int, world: int, with_barriers: bool) -> tuple[float, float, tuple[bool, ...]]:
    """What rank 1, which is slow to read a result, reads of it, and what it should."""
    plans = []
    plan = arena_layout.plan

    def planned(*args: Any) -> arena_layout.ArenaPlan:
        plans.append(found := plan(*args))
        return found if with_barriers else replace(found, opening_barriers=(False,) * len(found.opening_barriers))

    arena_layout.plan = planned

    def gathered(values: torch.Tensor) -> torch.Tensor:
        out = torch.empty(world * len(values))
        dist.all_gather_into_tensor(out, values)
        return out

    def step(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = gathered(values).sum()
        return first, gathered(values + first).sum()

    compiled = over_peers(step, ["push"])
    wait = BoundPeerCall.wait

    def waits(bound: BoundPeerCall) -> None:
        wait(bound)
        time.sleep(2.0 * rank)

    BoundPeerCall.wait = waits  # type: ignore[method-assign]
    values = torch.full((64,), 1.0 + rank)
    return compiled(values)[0].item(), 64 * sum(1.0 + each for each in range(world)), plans[0].opening_barriers


def test_a_slow_ranks_results_are_not_overwritten() -> None:
    for seen, wanted, barriers in run_ranks(gathered_twice, 2, True):
        assert seen == wanted
        assert barriers == (True, True)


def test_without_barriers_they_are() -> None:
    """Otherwise the test above would show nothing."""
    (first, wanted, _), (second, _, _) = run_ranks(gathered_twice, 2, False)
    assert first == wanted
    assert second != wanted


# ---- more than two ranks, other wrappers, other groups


def sums(rank: int, world: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """The errors of reduce-scatters and all-reduces over peers and over gloo, against float64."""
    mine = torch.randn(world * 5000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    exact = torch.empty(len(mine), dtype=torch.float64)
    dist.all_reduce(exact.copy_(mine))

    def scatter(values: torch.Tensor) -> torch.Tensor:
        out = torch.empty(5000)
        dist.reduce_scatter_tensor(out, values.float())
        return out

    def reduce(values: torch.Tensor) -> torch.Tensor:
        out = values.to(torch.float32, copy=True)
        dist.all_reduce(out)
        return out.clone()

    found = {}
    scattered = {"pull": "peer_reduce_scatter", "copy_sum": "copy_sum_reduce_scatter"}
    for name, step in (("pull", scatter), ("copy_sum", scatter), ("one_shot", reduce), ("two_shot", reduce)):
        wanted = exact[rank * 5000 : rank * 5000 + 5000] if name in scattered else exact
        compiled = over_peers(step, [name])
        found[name] = tuple(call(mine).double().sub(wanted).square().mean().sqrt().item() for call in (compiled, step))
        assert set(calls(compiled.programs[0].source)) == {scattered.get(name, "peer_all_reduce")}
        # What is summed in float32 goes over the wire as it is.
        assert ("_to_copy" in compiled.programs[0].source) == (name not in scattered and dtype == torch.bfloat16)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_four_ranks_are_as_exact_as_gloos(dtype: torch.dtype) -> None:
    for found in run_ranks(sums, 4, dtype):
        for peers, gloo in found.values():
            assert peers <= 1.05 * gloo + 1e-8
            assert peers < 2e-7 * 4


def reduced(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Reduce-scatters of all sorts by copies and by pulls. Where the copies of each land, and how many bytes."""
    sizes = [(1,), (7, 3), (64, 40), (5,), (256, 16), (3000,)]
    draw = torch.Generator().manual_seed(rank)
    given = [torch.randn(world * size[0], *size[1:], generator=draw).to(torch.bfloat16) for size in sizes]

    def scatter(values: list[torch.Tensor], dtype: torch.dtype, op: Any) -> list[torch.Tensor]:
        made = []
        for value in values:
            out = torch.empty(len(value) // world, *value.shape[1:], dtype=dtype)
            dist.reduce_scatter_tensor(out, value.to(dtype), op)
            made.append(out)
        return made

    def step(values: list[torch.Tensor]) -> list[torch.Tensor]:
        wide = scatter(values[:5], torch.float32, dist.ReduceOp.AVG)
        again = [value + made.sum().to(value.dtype) for value, made in zip(values[3:], wide[:3], strict=True)]
        return [*wide, *scatter(again, torch.bfloat16, dist.ReduceOp.SUM)]

    expected = over_peers(step, ["pull"])(given)
    copied = over_peers(step, ["copy_sum"])
    started: dict[BoundPeerCall, None] = {}
    start = BoundPeerCall.__call__
    BoundPeerCall.__call__ = lambda bound, inputs: started.update({bound: None}) or start(bound, inputs)  # type: ignore
    for _ in range(2):
        torch.testing.assert_close(copied(given), expected, rtol=0, atol=0)
    assert set(calls(copied.programs[0].source)) == {"copy_sum_reduce_scatter"}
    landings = [bound._staged for bound in started]  # type: ignore[attr-defined]
    return [landing.data_ptr() for landing in landings], [landing.nbytes for landing in landings]


def test_copies_that_a_kernel_sums_give_the_bits_of_pulls_through_one_stretch_of_memory() -> None:
    for addresses, sizes in run_ranks(reduced, 4, timeout=120):
        assert len(set(addresses)) == 1
        assert len(sizes) > 2
        assert min(sizes) < max(sizes)


def added_up(rank: int, world: int) -> list[bool]:
    """Sums of products that are added up in place and then reduced. Of each reduction, whether it found its input in
    the arena."""
    draw = torch.Generator().manual_seed(rank)
    left, right = torch.randn(2, 3, 16, 8 * world, generator=draw).to(torch.bfloat16).unbind(0)

    def scatter(value: torch.Tensor) -> torch.Tensor:
        out = value.new_empty(len(value) // world, *value.shape[1:])
        dist.reduce_scatter_tensor(out, value)
        return out

    def step(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = scatter(left[0].t().contiguous())  # behind it the arena is free
        total = torch.mm(left[1].t() + first.sum() * 0, right[1])
        for at in range(3):
            total.addmm_(left[at].t(), right[at])
        return first, scatter(total)

    expected = step(left, right)
    compiled = over_peers(step, ["pull"])
    found: list[bool] = []
    copy_in = BoundPeerCall._copy_in

    def watch(bound: BoundPeerCall, inputs: Any) -> None:
        found.append(inputs[0].data_ptr() == bound._slot_addresses[0])
        copy_in(bound, inputs)

    BoundPeerCall._copy_in = watch  # type: ignore[method-assign]
    for _ in range(2):
        torch.testing.assert_close(compiled(left, right), expected, rtol=0, atol=0)
    return found


def test_what_is_added_up_in_place_is_added_up_in_the_arena() -> None:
    assert run_ranks(added_up, 2, timeout=120) == [[False, True] * 2] * 2


def replicated(rank: int, world: int, transports: list[str]) -> str:
    def wrapped() -> Any:
        return weft.replicate(model())

    nets = [wrapped() for _ in range(2)]
    expected = train(step_of(nets[0]), nets[0], rank)
    compiled = over_peers(step_of(nets[1]), transports)
    torch.testing.assert_close(train(compiled, nets[1], rank), expected, rtol=0, atol=0)
    return compiled.programs[0].source


@pytest.mark.parametrize("transport", ["one_shot", "two_shot"])
def test_replicated_training_on_two_ranks_is_the_same_to_the_bit(transport: str) -> None:
    source, _ = run_ranks(replicated, 2, [transport], timeout=120)
    assert set(calls(source)) == {"peer_all_reduce"}


def hybrid(rank: int, world: int) -> tuple[str, float]:
    """Sharded over one axis, replicated over another: two groups, each with an arena of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    nets = [model() for _ in range(2)]
    for net in nets:
        for block in net[1:-1]:
            weft.fully_shard(block, mesh=mesh)
        weft.fully_shard(net, mesh=mesh)
    expected = train(step_of(nets[0]), nets[0], rank)
    compiled = over_peers(step_of(nets[1]), KERNELS)
    torch.testing.assert_close(train(compiled, nets[1], rank), expected, rtol=0, atol=0)
    return compiled.programs[0].source


def test_groups_of_a_mesh_communicate_beside_each_other() -> None:
    """Sums over two ranks have one order, so here too every bit is gloo's."""
    source = run_ranks(hybrid, 4, timeout=180)[0]
    assert {"peer_gather", "peer_reduce_scatter", "peer_all_reduce"} <= set(calls(source))


# ---- ranks that cannot


def apart(rank: int, world: int) -> tuple[str, list[str], str]:
    host_processes.host = lambda: f"host{rank} x"  # type: ignore[assignment]
    nets = [sharded(model()) for _ in range(2)]
    expected = train(step_of(nets[0]), nets[0], rank)
    carried: list[str] = []
    apply = peer_steps.use_transports

    def applied(step: Any, library: str) -> None:
        apply(step, library)
        carried.extend(node.meta["transport"] for node in step.collectives())

    peer_steps.use_transports = applied
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft.inductor.transports.apply_transports").addHandler(handler)
    compiled = over_peers(step_of(nets[1]), KERNELS)
    torch.testing.assert_close(train(compiled, nets[1], rank), expected, rtol=0, atol=0)
    return compiled.programs[0].source, carried, "\n".join(records)


def test_ranks_that_cannot_share_memory_stay_with_the_library_and_are_told_why() -> None:
    for source, carried, log in run_ranks(apart, 2, timeout=120):
        assert not any(name.startswith("peer") for name in calls(source))
        assert set(carried) == {"gloo"}
        for name in KERNELS:
            assert f"{name} does not carry collectives over world: they are on different hosts" in log


# ---- ranks that do not come


def missing(rank: int, world: int, dies: bool, seconds: float = 1.5) -> tuple[float, str]:
    """The last rank does not come to a step whose turn ranks no longer compare; what the others are told, and when."""
    net = sharded(model())
    store = dist.distributed_c10d._get_default_store()
    with knobs.override(peer_timeout_s=seconds):
        step = over_peers(step_of(net), KERNELS)
        train(step, net, rank, 6)
    if rank == world - 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"told {rank}" for rank in range(world - 1)])
        return 0.0, ""
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    with knobs.override(ring_dir=str(folder)), pytest.raises((errors.PeerTimeout, errors.PeerLost)) as caught:
        train(step, net, rank, 1)
    waited = time.monotonic() - started
    (ring,) = (json.loads(file.read_text()) for file in folder.iterdir())
    assert ring["why"].startswith(type(caught.value).__name__)
    *before, last = ring["collectives"]
    assert last["what"].startswith("peer_gather of ")
    assert last["state"] == "issued"
    assert {each["state"] for each in before} == {"ended"}
    assert len(before) > 30
    assert last["bytes"] > 0
    assert type(caught.value) is (errors.PeerLost if dies else errors.PeerTimeout)
    assert caught.value.rank == world - 1
    with pytest.raises(type(caught.value)):  # from then on, at once
        train(step, net, rank, 1)
    store.set(f"told {rank}", "")
    return waited, str(caught.value)


def test_a_rank_that_is_late_ends_the_others() -> None:
    *others, _ = run_ranks(missing, 3, False, timeout=60)
    for waited, text in others:
        assert waited < 15
        assert "rank 2 (axis 'world') did not come to peer_gather of " in text
        assert re.search(r"of \d tensors of net\.\d at .*peer_steps.py:\d+ in step", text) or "of net" in text
        assert "within 1.5 s" in text


def dying(rank: int, world: int) -> None:
    waited, text = missing(rank, world, True)
    assert "rank 1 (axis 'world') died" in text
    assert waited < 15
    raise ValueError("all of that is so")


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(dying, 2, timeout=60)
    assert "all of that is so" in str(caught.value)
