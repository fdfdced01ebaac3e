"""The kernels of transports on four processes, in triton's interpreter: results, races, late ranks and dead ones."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import harness
from harness import run_ranks
from peers_harness import MAX_POLLS, Here, make
from weft.inductor.transports.kernels import failure
from weft.inductor.transports.kernels.all_gather import PushGather
from weft.inductor.transports.kernels.all_reduce import OneShotAllReduce, TwoShotAllReduce
from weft.inductor.transports.kernels.failure import Failure, FailureKind
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.kernels.reduce_scatter import PullReduceScatter
from weft.inductor.transports.kernels.reduction import RankReduction

Tensor = torch.Tensor
bf16, f16, f32, f64, i64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64

WORLD = 4
BLOCK = 512
SMALL = {"block": BLOCK, "warps": 4, "programs": 3}
SECONDS = 150.0  # of a test that takes 6 on two cores of its own
PATTERN = 0xA5  # of bytes that nobody may write


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make(tmp_path, WORLD)


# ---- what all ranks can make without each other


def random_sizes(draw: random.Random, count: int) -> tuple[int, ...]:
    """Sizes of all kinds: around those where something changes, any others, some larger than a chunk."""
    sizes = []
    for _ in range(count):
        near = draw.choice([1, WORLD, BLOCK // 4, BLOCK, 2 * BLOCK]) + draw.randint(-2, 2)
        size = draw.choice([max(1, near), draw.randint(1, 700)])
        sizes.append(draw.choice([size, -(-size // 16) * 16]) if draw.random() < 0.85 else draw.choice([4, 8]) * BLOCK)
    return tuple(sizes)


def whole_chunks(transport: PeerKernel, rows: list[list[int]]) -> int:
    """How many chunks are moved 16 bytes at a time."""
    aligned = torch.tensor([all(word % 16 == 0 for word in row) for row in rows])
    member, _, count, _ = transport.chunks.unbind(1)
    return int((aligned[member.long()] & (count == transport.chunk)).sum())


def values(seed: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank has: numbers of many magnitudes, ties of rounding, and now and then no number."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (size,), generator=generator, dtype=dtype)
    x = torch.randn(size, generator=generator, dtype=f64) * 2.0 ** torch.randint(-8, 8, (size,), generator=generator)
    chosen = torch.rand(size, generator=generator)
    x = torch.where(chosen < 0.1, 1.0 + 2.0**-8 * torch.randint(0, 8, (size,), generator=generator), x)
    x[chosen > 0.999] = torch.inf
    x[chosen > 0.9995] = torch.nan
    return x.to(dtype)


def combined(reduction: RankReduction, ranks: list[Tensor]) -> Tensor:
    """The values of all ranks one after the other, in float32."""
    function = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction.op]
    wide = f32 if ranks[0].dtype in (bf16, f16) else ranks[0].dtype
    total = ranks[0].to(wide)
    for other in ranks[1:]:
        total = function(total, other.to(wide))
    return total * reduction.scale if reduction.scale != 1.0 else total


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, any NaN being as good as another."""
    nan = ours.isnan() & theirs.isnan() if ours.is_floating_point() else torch.zeros(ours.shape, dtype=torch.bool)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.dtype.itemsize]
    return torch.equal(ours.view(bits)[~nan], theirs.view(bits)[~nan])


class Memory:
    """Members in a stretch of bytes that is all PATTERN elsewhere: each at 16 bytes, or anywhere its type may start."""

    def __init__(
        self, draw: random.Random, sizes: tuple[int, ...], dtype: torch.dtype, place: Tensor | None = None
    ) -> None:
        self.dtype, self.sizes, self.offsets, end = dtype, sizes, [], 0
        for size in sizes:
            end += draw.randint(0, 3) * dtype.itemsize
            end += -end % draw.choice([16, 16, 16, dtype.itemsize])
            self.offsets.append(end)
            end += size * dtype.itemsize
        self.bytes = torch.empty(end + 64, dtype=torch.uint8) if place is None else place[: end + 64]
        assert len(self.bytes) == end + 64, "the buffer is too small"
        self.bytes.fill_(PATTERN)

    @property
    def tensors(self) -> list[Tensor]:
        pairs = zip(self.offsets, self.sizes, strict=True)
        return [self.bytes[at : at + size * self.dtype.itemsize].view(self.dtype) for at, size in pairs]

    @property
    def addresses(self) -> list[int]:
        return [self.bytes.data_ptr() + offset for offset in self.offsets]

    def fill(self, contents: list[Tensor]) -> None:
        for tensor, content in zip(self.tensors, contents, strict=True):
            tensor.copy_(content)

    def check(self, expected: list[Tensor]) -> None:
        """Every member is as expected, and nothing beside them was written."""
        for at, (ours, theirs) in enumerate(zip(self.tensors, expected, strict=True)):
            assert same(ours, theirs), f"member {at} of {len(ours)}: {ours} and not {theirs}"
        outside = torch.ones(len(self.bytes), dtype=torch.bool)
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            outside[offset : offset + size * self.dtype.itemsize] = False
        assert (self.bytes[outside] == PATTERN).all()


# ---- results


def gathers(rank: int, world: int, path: str, members: int) -> None:
    here = Here(path, rank, world)
    for case, (source, wire) in enumerate([(f32, bf16), (bf16, bf16), (f32, f16), (f32, f32), (f16, f32)]):
        draw = random.Random(case)
        sizes = random_sizes(draw, members)
        shards = Memory(draw, sizes, source)
        shards.fill([values(at, rank, size, source) for at, size in enumerate(sizes)])
        whole = Memory(draw, tuple(size * world for size in sizes), wire, here.buffer)
        transport = PushGather(world=world, sizes=sizes, source=source, wire=wire, **SMALL)
        rows = transport.rows(shards.addresses, whole.offsets)
        assert 0 < whole_chunks(transport, rows) < len(transport.chunks)
        here.launch(transport, rows)
        expected = [[values(at, peer, size, source).to(wire) for peer in range(world)] for at, size in enumerate(sizes)]
        whole.check([torch.cat(member) for member in expected])
    assert here.failure() is None


def test_gathered_members_are_the_cast_shards_of_all_ranks(path: str) -> None:
    run_ranks(gathers, WORLD, path, 150, timeout=SECONDS)


def reduce_scatters(rank: int, world: int, path: str, members: int) -> None:
    here = Here(path, rank, world)
    cases = [
        (bf16, f32, RankReduction("sum", 1 / world), True),
        (f32, f32, RankReduction(), True),
        (f16, f16, RankReduction("sum", 0.3), True),
        (bf16, bf16, RankReduction("max"), False),
        (f32, bf16, RankReduction("min"), False),
    ]
    for case, (wire, result, reduction, squares) in enumerate(cases):
        draw = random.Random(case)
        sizes = random_sizes(draw, members)
        whole = Memory(draw, tuple(size * world for size in sizes), wire, here.buffer)
        whole.fill([values(at, rank, size * world, wire) for at, size in enumerate(sizes)])
        results = Memory(draw, sizes, result)
        transport = PullReduceScatter(
            world=world, sizes=sizes, wire=wire, result=result, reduction=reduction, squares=squares, **SMALL
        )
        sums = [torch.full(transport.grid[:1], torch.nan)] if squares else []
        rows = transport.rows(results.addresses, whole.offsets)
        assert 0 < whole_chunks(transport, rows) < len(transport.chunks)
        here.launch(transport, rows, *sums)
        expected = []
        for at, size in enumerate(sizes):
            slices = [values(at, peer, size * world, wire)[rank * size :][:size] for peer in range(world)]
            expected.append(combined(reduction, slices).to(result))
        results.check(expected)
        if squares:
            ours, exact = sums[0].double().sum(), torch.cat(expected).double().square().sum()
            assert (ours.isnan() and exact.isnan()) or ours == exact or abs(ours - exact) < 1e-5 * exact
    assert here.failure() is None


def test_reduced_parts_are_sums_in_float32_in_the_order_of_the_ranks(path: str) -> None:
    run_ranks(reduce_scatters, WORLD, path, 100, timeout=SECONDS)


def all_reduces(rank: int, world: int, path: str, members: int) -> list[list[Tensor]]:
    """Returns what the ranks have to agree on, bit for bit."""
    here = Here(path, rank, world)
    cases = [
        (f32, f32, f32, RankReduction()),
        (None, bf16, f32, RankReduction("sum", 1 / world)),
        (f32, bf16, bf16, RankReduction()),
        (i64, i64, i64, RankReduction()),
        (None, f32, f32, RankReduction("max")),
        (f64, f64, f64, RankReduction("min")),
    ]
    found = []
    for case, (source, wire, result, reduction) in enumerate(cases):
        for two_shots in (False, True):
            draw = random.Random(case)
            sizes = random_sizes(draw, members)
            given = [[values(at, peer, size, source or wire) for peer in range(world)] for at, size in enumerate(sizes)]
            inputs = [[tensor.to(wire) for tensor in member] for member in given]
            whole = Memory(draw, sizes, wire, here.buffer)
            own: list[list[int]] = []
            if source is None:
                whole.fill([member[rank] for member in inputs])
            else:
                sources = Memory(draw, sizes, source)
                sources.fill([member[rank] for member in given])
                own = [sources.addresses]
            sums = [combined(reduction, member) for member in inputs]
            common = {"world": world, "sizes": sizes, "wire": wire, "source": source, "reduction": reduction, **SMALL}
            if two_shots:
                two = TwoShotAllReduce(**common)
                rows = two.rows(*own, whole.offsets)
                assert 0 < whole_chunks(two, rows) < len(two.chunks)
                here.launch(two, rows)
                whole.check([total.to(wire) for total in sums])
                found.append([tensor.clone() for tensor in whole.tensors])
            else:
                one = OneShotAllReduce(**common, result=result)
                results = Memory(draw, sizes, result)
                rows = one.rows(*own, results.addresses, whole.offsets)
                assert 0 < whole_chunks(one, rows) < len(one.chunks)
                here.launch(one, rows)
                results.check([total.to(result) for total in sums])
                found.append([tensor.clone() for tensor in results.tensors])
    assert here.failure() is None
    return found


def test_all_ranks_get_the_same_sums_in_one_shot_and_in_two(path: str) -> None:
    first, *others = run_ranks(all_reduces, WORLD, path, 60, timeout=SECONDS)
    for other in others:
        assert all(same(a, b) for a, b in zip(itertools.chain(*first), itertools.chain(*other), strict=True))


# ---- races

SIZES = (700, 3, 64)


class Rounds:
    """One member list that every kernel works on, over and over, with inputs that change from round to round."""

    def __init__(self, path: str, rank: int, world: int, *, barriers: bool = True, max_polls: int = MAX_POLLS) -> None:
        self.here, self.rank, self.world = Here(path, rank, world, max_polls), rank, world
        self.naps = random.Random(rank)
        draw = random.Random(0)
        self.whole = Memory(draw, tuple(size * world for size in SIZES), f32, self.here.buffer)
        self.parts = Memory(draw, SIZES, f32)
        self.results = Memory(draw, self.whole.sizes, f32)
        common = {"world": world, "wire": f32, "entry_barrier": barriers, "exit_barrier": barriers, **SMALL}
        self.gather = PushGather(sizes=SIZES, source=f32, **common)
        self.reduce_scatter = PullReduceScatter(sizes=SIZES, result=f32, **common)
        self.one_shot = OneShotAllReduce(sizes=self.whole.sizes, result=f32, **common)
        self.two_shot = TwoShotAllReduce(sizes=self.whole.sizes, **common)

    def nap(self) -> None:
        time.sleep(self.naps.choice([0, 0, 0.002, 0.02]))

    def inputs(self, round: int, rank: int) -> list[Tensor]:
        """Integers, so that sums are what they are in any order."""
        return [torch.arange(size) % 97 + 1000.0 * round + 10.0 * rank for size in self.whole.sizes]

    def gather_round(self, round: int) -> None:
        self.parts.fill([tensor[: len(tensor) // self.world] for tensor in self.inputs(round, self.rank)])
        self.nap()
        self.here.launch(self.gather, self.gather.rows(self.parts.addresses, self.whole.offsets), collective=round)
        self.nap()
        every = [self.inputs(round, peer) for peer in range(self.world)]
        shards = [[tensor[: len(tensor) // self.world] for tensor in rank] for rank in every]
        self.whole.check([torch.cat(member) for member in zip(*shards, strict=True)])

    def reduce_scatter_round(self, round: int) -> None:
        self.whole.fill(self.inputs(round, self.rank))
        self.nap()
        rows = self.reduce_scatter.rows(self.parts.addresses, self.whole.offsets)
        self.here.launch(self.reduce_scatter, rows, collective=round)
        self.parts.check([t.chunk(self.world)[self.rank] for t in self.sums(round)])

    def one_shot_round(self, round: int) -> None:
        self.whole.fill(self.inputs(round, self.rank))
        self.nap()
        rows = self.one_shot.rows(self.results.addresses, self.whole.offsets)
        self.here.launch(self.one_shot, rows, collective=round)
        self.results.check(self.sums(round))

    def two_shot_round(self, round: int) -> None:
        self.whole.fill(self.inputs(round, self.rank))
        self.nap()
        self.here.launch(self.two_shot, self.two_shot.rows(self.whole.offsets), collective=round)
        self.nap()
        self.whole.check(self.sums(round))

    def sums(self, round: int) -> list[Tensor]:
        every = [self.inputs(round, peer) for peer in range(self.world)]
        return [torch.stack(member).sum(0) for member in zip(*every, strict=True)]

    def one(self, round: int, kind: str) -> None:
        getattr(self, f"{kind}_round")(round)


KINDS = ["gather", "reduce_scatter", "one_shot", "two_shot"]


def many_rounds(rank: int, world: int, path: str, rounds: int) -> Failure | None:
    these = Rounds(path, rank, world)
    for round in range(rounds):
        these.one(round, random.Random(round).choice(KINDS))
    return these.here.failure()


def test_repeated_collectives_over_the_same_memory_with_delayed_ranks(path: str) -> None:
    assert run_ranks(many_rounds, WORLD, path, 40, timeout=SECONDS) == [None] * WORLD


def rounds_without_barriers(rank: int, world: int, path: str) -> list[str]:
    """The kinds of rounds that go wrong where rank 2 comes when all others are done."""
    these = Rounds(path, rank, world, barriers=False)
    here, wrong = these.here, []
    for at, kind in enumerate(KINDS):
        these.whole.bytes.fill_(PATTERN)
        here.meet()
        while rank == 2 and any(here.buffers[peer][-1] != at + 1 for peer in (0, 1, 3)):
            time.sleep(0.01)
        try:
            these.one(at, kind)
        except AssertionError:
            wrong.append(kind)
        here.buffer[-1] = at + 1
        here.meet()
    return wrong


def test_without_barriers_repeated_collectives_give_wrong_results(path: str) -> None:
    wrong = run_ranks(rounds_without_barriers, WORLD, path, timeout=SECONDS)
    assert [wrong[rank] for rank in (0, 1, 3)] == [KINDS] * 3


def meetings(rank: int, world: int, path: str, first: int) -> None:
    """What each rank writes before a barrier all others read after it. ``first`` is the epoch of the first barrier."""
    here = Here(path, rank, world)
    naps = random.Random(rank)
    here.pad[: 2 * world].fill_(first)
    here.meet(slots=3 * world)  # all have filled theirs
    for round in range(30):
        here.buffer[0] = round
        time.sleep(naps.choice([0, 0, 0.01]))
        here.meet(slots=round % 2 * world)
        assert [int(buffer[0]) for buffer in here.buffers] == [round] * world
        here.meet(slots=round % 2 * world)
    assert here.failure() is None


@pytest.mark.parametrize("first", [0, 2**31 - 10, 2**32 - 10])
def test_barriers_go_on_where_epochs_wrap_around(path: str, first: int) -> None:
    run_ranks(meetings, WORLD, path, first, timeout=SECONDS)


# ---- ranks that do not come


def late(rank: int, world: int, path: str, max_polls: int) -> tuple[Failure | None, Failure | None]:
    here = Here(path, rank, world, max_polls)
    here.meet(collective=6)
    time.sleep(2.0 * (rank == 1))
    before = here.failure()
    here.meet(collective=7)
    return before, here.failure()


def test_barriers_wait_for_a_late_rank(path: str) -> None:
    assert run_ranks(late, WORLD, path, 20_000, timeout=SECONDS) == [(None, None)] * WORLD


def dies(rank: int, world: int, path: str, folder: str) -> None:
    """Rounds until there is a failure. Rank 2 is killed, wherever it may be then."""
    these = Rounds(path, rank, world, max_polls=1000)
    for round in itertools.count():
        if rank == 2 and round == 1:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
        with contextlib.suppress(AssertionError):
            these.one(round, KINDS[round % 4])
        if (found := these.here.failure()) is not None:
            told = {"round": round, **dataclasses.asdict(found)}
            Path(folder, f"rank{rank}").write_text(json.dumps(told))
            return


def test_a_dead_rank_is_named_by_all_others_and_nobody_hangs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long the others have from the death on. They need 1000 readings of their slots, 2 seconds.
    monkeypatch.setattr(harness, "GRACE", 60.0)
    with pytest.raises(harness.RanksFailed) as caught:
        run_ranks(dies, WORLD, path, str(tmp_path), timeout=SECONDS)
    assert list(caught.value.errors) == [2]
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1, 3)]
    assert [one["rank"] for one in told] == [2, 2, 2]
    assert all(one["collective"] == one["round"] for one in told)
    assert all(one["what"] in (FailureKind.ENTRY_BARRIER, FailureKind.EXIT_BARRIER) for one in told)
    assert max(one["epoch"] for one in told) - min(one["epoch"] for one in told) <= 1


@pytest.fixture
def alone(tmp_path: Path) -> Here:
    """Rank 0 of two, the other of which never comes."""
    return Here(make(tmp_path), 0, 2, max_polls=200)


def test_a_barrier_times_out_and_records_the_missing_rank(alone: Here) -> None:
    alone.pad[:2] = torch.tensor([2**32 - 2, 2**32 - 3], dtype=torch.uint32)
    alone.meet(collective=5)
    assert alone.failure() == Failure(FailureKind.ENTRY_BARRIER, 5, 1, 2**32 - 1)
    # It signals and does not wait any more, and the first failure stays.
    alone.peers = dataclasses.replace(alone.peers, max_polls=2**31 - 1)
    alone.meet(collective=6)
    assert alone.pad[0] == 0
    assert alone.failure() == Failure(FailureKind.ENTRY_BARRIER, 5, 1, 2**32 - 1)


def test_nothing_is_moved_where_a_rank_is_missing(alone: Here) -> None:
    whole, shard = Memory(random.Random(0), (32,), f32, alone.buffer), torch.ones(16)
    transport = PushGather(world=2, sizes=(16,), source=f32, wire=f32, **SMALL)
    alone.launch(transport, transport.rows([shard.data_ptr()], whole.offsets), collective=3)
    assert alone.failure() == Failure(FailureKind.ENTRY_BARRIER, 3, 1, 1)
    assert (whole.bytes == PATTERN).all()


def test_inputs_are_copied_before_the_entry_barrier(alone: Here) -> None:
    source, result = torch.randn(3000), torch.zeros(3000)
    common = {"world": 2, "sizes": (3000,), "wire": f32, "source": f32, **SMALL}
    one, two = OneShotAllReduce(**common, result=f32), TwoShotAllReduce(**common)
    alone.launch(one, one.rows([source.data_ptr()], [result.data_ptr()], [0]))
    alone.launch(two, two.rows([source.data_ptr()], [16000]))
    assert torch.equal(alone.buffer[:12000].view(f32), source)
    assert torch.equal(alone.buffer[16000:28000].view(f32), source)
    assert not result.any()


def test_a_rank_missing_at_the_exit_barrier_is_recorded_so(alone: Here) -> None:
    shard, transport = torch.ones(16), PushGather(world=2, sizes=(16,), source=f32, wire=f32, **SMALL)
    alone.pad[1] = 1
    alone.launch(transport, transport.rows([shard.data_ptr()], [0]), collective=4)
    assert alone.failure() == Failure(FailureKind.EXIT_BARRIER, 4, 1, 2)
    assert torch.equal(alone.buffers[1][:64].view(f32), shard)


def test_the_host_can_end_all_waiting_and_learns_what_was_waited_for(alone: Here) -> None:
    alone.peers = dataclasses.replace(alone.peers, max_polls=2**31 - 1)
    threading.Timer(0.3, failure.end_waiting, [alone.record]).start()
    alone.meet(collective=3)
    assert alone.failure() == Failure(FailureKind.ENTRY_BARRIER, 3, 1, 1)


def test_no_kernel_waits_once_the_host_has_ended_all_waiting(alone: Here) -> None:
    failure.end_waiting(alone.record)
    found = alone.failure()
    assert found is not None
    assert found.what is FailureKind.STOPPED
    alone.peers = dataclasses.replace(alone.peers, max_polls=2**31 - 1)
    alone.meet(collective=3)


def test_ending_all_waiting_does_not_hide_a_failure(alone: Here) -> None:
    alone.meet(collective=5)
    failure.end_waiting(alone.record)
    assert alone.failure() == Failure(FailureKind.ENTRY_BARRIER, 5, 1, 1)


# ---- descriptions


def test_one_kernel_serves_members_of_any_number_and_size_on_every_rank() -> None:
    one = PullReduceScatter(world=8, sizes=(1 << 24, 5), wire=bf16, result=f32)
    other = PullReduceScatter(world=8, sizes=(3 << 23, 1 << 22, 77), wire=bf16, result=f32)
    assert one.kernel == other.kernel
    assert one.grid == other.grid == (64, 1, 1)


@pytest.mark.parametrize(
    ("transport", "programs"),
    [
        (PushGather(world=8, sizes=(1 << 20,), source=f32, wire=bf16), 8),
        (PushGather(world=8, sizes=(8192, 1), source=f32, wire=bf16), 2),
        (PullReduceScatter(world=8, sizes=(1 << 26,), wire=bf16, result=f32), 64),
        (PullReduceScatter(world=8, sizes=(1 << 26,), wire=bf16, result=f32, programs=16), 16),
        (OneShotAllReduce(world=8, sizes=(21,), wire=f32, result=f32), 1),
        (TwoShotAllReduce(world=8, sizes=(4096 * 9,), wire=f32), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_more_programs_than_there_is_work(transport: PeerKernel, programs: int) -> None:
    assert transport.grid == (programs, 1, 1)
    assert transport.slots == programs * 8
    assert transport.chunks[:, 2].sum() == sum(transport.sizes)
    assert transport.chunks[:, 2].max() <= transport.chunk
    assert transport.chunk % transport.block == 0


def test_a_copied_input_is_waited_for() -> None:
    with pytest.raises(AssertionError, match="peers read what is copied"):
        OneShotAllReduce(world=2, sizes=(1,), wire=f32, source=f32, result=f32, entry_barrier=False)
