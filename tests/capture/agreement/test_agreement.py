"""Ranks compare their graphs over the store: threads over stores of every kind, and real processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import RanksFailed, run_ranks
from weft import errors, knobs
from weft.capture.agreement.agreement import _TextComparison, agree
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.fake.fake_world import fake_world
from weft.rank_watch import listed

GRAPH = "\n".join(f"%mul_{i} = aten.mul(%x_{i}, {i})" for i in range(200))
OTHER = GRAPH.replace("%mul_100 = aten.mul(%x_100, 100)", "%add_100 = aten.add(%x_100, 100)")


def outcomes(
    texts: Sequence[str | None],
    store: Callable[[], dist.Store],
    name: str = "train_step",
    timeout_s: float = 20.0,
    delays: dict[int, float] | None = None,
) -> tuple[list[Any], float]:
    """What each rank got (None for agreement, else its error), one thread a rank, and the seconds taken. A
    text of None is a rank that never comes."""
    got: list[Any] = [None] * len(texts)

    def body(rank: int, text: str) -> None:
        time.sleep((delays or {}).get(rank, 0.0))
        try:
            agree(name, text, store=store(), rank=rank, world=len(texts), timeout_s=timeout_s)
        except errors.WeftError as error:
            got[rank] = error

    present = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    threads = [threading.Thread(target=body, args=arguments) for arguments in present]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got, time.monotonic() - start


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], dist.Store]:
    """Gives each rank its view of one store."""
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"), -1)
    if request.param == "hash":
        shared: dist.Store = dist.HashStore()
        return lambda: shared
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False)


def hash_store() -> Callable[[], dist.Store]:
    shared = dist.HashStore()
    return lambda: shared


def test_no_rank_raises_before_all_have_read_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may hold the store, which ends with it: a slow rank would be told that the store is lost."""
    read, raised = StoreRendezvous.read, {}

    def slow(self: StoreRendezvous, key: str, timeout_s: float | None = None) -> str | None:
        if self.rank == 2 and key.startswith("difference/"):
            time.sleep(1.0)
        return read(self, key, timeout_s)

    def noting(self: errors.GraphMismatch, name: str, rank: int, *rest: Any) -> None:
        raised[rank] = time.monotonic()
        made(self, name, rank, *rest)

    made = errors.GraphMismatch.__init__
    monkeypatch.setattr(StoreRendezvous, "read", slow)
    monkeypatch.setattr(errors.GraphMismatch, "__init__", noting)
    got, _ = outcomes([GRAPH, OTHER, GRAPH], hash_store())
    assert [type(error) for error in got] == [errors.GraphMismatch] * 3
    assert max(raised.values()) - min(raised.values()) < 0.5


def test_equal_texts_agree_again_and_again(store: Callable[[], dist.Store]) -> None:
    for capture in range(3):
        got, seconds = outcomes([f"{GRAPH} {capture}"] * 5, store)
        assert got == [None] * 5
        assert seconds < 5.0


def test_a_different_text_is_shown_to_every_rank(store: Callable[[], dist.Store]) -> None:
    got, seconds = outcomes([GRAPH, GRAPH, OTHER, GRAPH], store)
    assert seconds < 5.0
    for rank, error in enumerate(got):
        assert isinstance(error, errors.GraphMismatch)
        assert (error.rank, error.ranks) == (rank, [2])
        text = str(error)
        assert "train_step: ranks do not hold the same step" in text
        assert "What rank 2 captured differs from what ranks 0-1, 3 captured." in text
        assert "--- rank 0\n+++ rank 2\n@@ line 98 | line 98 @@" in text
        assert "- %mul_100 = aten.mul(%x_100, 100)\n+ %add_100 = aten.add(%x_100, 100)" in text
        assert f"This is rank {rank}." in text
        assert len(text) < 2000


def test_a_missing_rank_is_named(store: Callable[[], dist.Store]) -> None:
    got, seconds = outcomes([GRAPH, None, GRAPH, GRAPH], store, timeout_s=0.5)
    assert 0.5 <= seconds < 4.0
    assert got[1] is None
    for rank in (0, 2, 3):
        assert isinstance(got[rank], errors.AgreementTimeout)
        assert (got[rank].rank, got[rank].missing) == (rank, [1])
        assert "did not hear from rank 1. " in str(got[rank])
        assert "WEFT_AGREEMENT_TIMEOUT_S" in str(got[rank])


def test_64_ranks_agree_quickly() -> None:
    got, seconds = outcomes([GRAPH] * 64, hash_store())
    assert got == [None] * 64
    assert seconds < 5.0


def test_64_ranks_see_one_that_differs() -> None:
    got, seconds = outcomes([GRAPH] * 63 + [OTHER], hash_store())
    assert seconds < 10.0
    assert {str(error).replace(f"This is rank {rank}.", "") for rank, error in enumerate(got)} == {
        str(got[0]).replace("This is rank 0.", "")
    }
    assert got[0].ranks == [63]


def test_of_two_groups_of_one_size_that_of_rank_0_is_the_reference() -> None:
    got, _ = outcomes([GRAPH, OTHER, OTHER, GRAPH], hash_store())
    for error in got:
        assert error.ranks == [1, 2]
        assert "What ranks 1-2 captured differs from what ranks 0, 3 captured. As many hold" in str(error)
        assert "--- rank 0\n+++ rank 1\n" in str(error)


def test_the_majority_is_the_reference_even_without_rank_0() -> None:
    got, _ = outcomes([OTHER, GRAPH, GRAPH], hash_store())
    for error in got:
        assert error.ranks == [0]
        assert "--- rank 1\n+++ rank 0\n" in str(error)


def test_each_of_several_groups_sees_its_own_difference() -> None:
    got, _ = outcomes(["a", "b", "c", "a", "c"], hash_store())
    for rank, seen in enumerate(["+ b", "+ b", "+ c", "+ b", "+ c"]):
        assert got[rank].ranks == [1, 2, 4]
        assert f"- a\n{seen}\n" in str(got[rank])
        assert "held by ranks 0, 3; others are held by rank 1; ranks 2, 4." in str(got[rank])


def test_ranks_with_all_different_texts_get_a_mismatch() -> None:
    got, seconds = outcomes([f"text {rank}" for rank in range(24)], hash_store())
    assert seconds < 10.0
    assert all(error.ranks == list(range(1, 24)) for error in got)
    assert "rank 8; ranks 9-23 (several)." in str(got[20])


def test_a_rank_that_arrives_after_the_deadline_gets_the_same_error() -> None:
    got, seconds = outcomes([GRAPH, GRAPH, GRAPH], hash_store(), timeout_s=0.4, delays={1: 1.0})
    assert seconds < 3.0
    assert [type(error) for error in got] == [errors.AgreementTimeout] * 3
    assert all(error.missing == [1] for error in got)
    assert "rank 1 came too late: rank" in str(got[1])
    assert "did not hear from rank 1" in str(got[0])


def test_a_slow_rank_is_waited_for() -> None:
    got, seconds = outcomes([GRAPH, GRAPH], hash_store(), delays={0: 0.6})
    assert got == [None, None]
    assert seconds < 3.0


def test_an_extra_capture_on_one_rank_times_out() -> None:
    shared = hash_store()
    assert outcomes([GRAPH] * 3, shared)[0] == [None] * 3
    got, _ = outcomes([None, OTHER, None], shared, timeout_s=0.3)
    assert got[1].missing == [0, 2]
    assert "what they do next (number 2)" in str(got[1])
    assert "did not hear from ranks 0, 2" in str(got[1])


def test_comparisons_of_different_names_are_independent() -> None:
    shared = hash_store()
    got, _ = outcomes([GRAPH, GRAPH], shared, name="generator")
    assert got == [None, None]
    got, _ = outcomes([OTHER, OTHER], shared, name="discriminator")
    assert got == [None, None]


def test_another_rank_publishes_the_verdict_if_the_last_rank_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have posted their hashes, and the last to arrive dies before it gives its verdict."""
    shared = dist.HashStore()
    got: list[Any] = []
    wait = lambda: got.append(outcomes([GRAPH, None], lambda: shared, timeout_s=1.0))
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    with monkeypatch.context() as patch:
        patch.setattr(_TextComparison, "_judge", lambda self: sys.exit())
        with pytest.raises(SystemExit):
            agree("train_step", GRAPH, store=shared, rank=1, world=2)
    waiting.join()
    ((outcome, seconds),) = got
    assert outcome == [None, None]
    assert 1.0 <= seconds < 4.0


def test_only_call_counters_remain_in_the_store() -> None:
    shared = dist.HashStore()
    for _ in range(2):
        outcomes([GRAPH] * 6, lambda: shared)
    assert shared.num_keys() == 6


def test_no_text_is_in_the_store_while_ranks_wait() -> None:
    shared = dist.HashStore()
    wait = lambda: outcomes([GRAPH, GRAPH, None], lambda: shared, timeout_s=1.0)
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.4)
    assert shared.num_keys() == 5  # for each of two ranks a hash and a count of calls; and who arrived
    waiting.join()


def test_default_timeout_is_the_knob() -> None:
    with knobs.override(agreement_timeout_s=0.3), pytest.raises(errors.AgreementTimeout, match="waited 0"):
        agree("step", GRAPH, store=dist.HashStore(), rank=0, world=2)


def test_agree_returns_at_once_without_a_process_group(caplog: pytest.LogCaptureFixture) -> None:
    agree("step", GRAPH, store=dist.HashStore(), rank=0, world=1)
    with caplog.at_level(logging.DEBUG, "weft.capture.agreement.agreement"):
        agree("step", GRAPH)
        with fake_world(4096, 5):
            agree("step", GRAPH)
    said = "step: nobody to compare this graph with"
    assert [record.getMessage() for record in caplog.records] == [said, said]


def test_a_lost_store_raises_store_lost() -> None:
    code = "import sys, time, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, "
    code += "wait_for_workers=False); print(s.port, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        client = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        threading.Timer(0.5, server.send_signal, [signal.SIGKILL]).start()
        with pytest.raises(errors.StoreLost, match="rank 1 lost the store"):
            agree("step", GRAPH, store=client, rank=1, world=2, timeout_s=20.0)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (list(range(0, 100, 2)), "ranks 0, 2, 4 and more (50 in all)"),
    ],
)
def test_ranks_are_listed_as_ranges(ranks: list[int], words: str) -> None:
    assert listed(ranks, at_most=3) == words


# ---- real processes


def compare(rank: int, world: int, different: int) -> tuple[str, float]:
    start = time.monotonic()
    for capture in range(3):
        agree("step", f"{GRAPH}\n{capture}")
    try:
        agree("step", OTHER if rank == different else GRAPH)
    except errors.GraphMismatch as error:
        return str(error), time.monotonic() - start
    return "agreed", time.monotonic() - start


@pytest.mark.gloo
def test_processes_agree() -> None:
    assert [text for text, _ in run_ranks(compare, 4, -1)] == ["agreed"] * 4


@pytest.mark.gloo
def test_processes_disagree() -> None:
    results = run_ranks(compare, 4, 3)
    for rank, (text, seconds) in enumerate(results):
        assert f"This is rank {rank}." in text
        assert "+++ rank 3" in text
        assert "+ %add_100" in text
        assert seconds < 10.0


def in_halves(rank: int, world: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    agree("step", f"graph of half {rank // 2}", group=groups[rank // 2])
    try:
        agree("step", f"graph of rank {rank // 3}", group=groups[rank // 2])
    except errors.GraphMismatch as error:
        return str(error)
    return "agreed"


@pytest.mark.gloo
def test_process_groups_agree_independently() -> None:
    results = run_ranks(in_halves, 4)
    assert results[:2] == ["agreed", "agreed"]
    for text in results[2:]:
        assert "What rank 3 captured differs from what rank 2 captured" in text


def one_dies(rank: int, world: int) -> None:
    agree("step", GRAPH)
    if rank == 1:
        os._exit(7)
    with pytest.raises(errors.AgreementTimeout, match=r"did not hear from rank 1\. "):
        agree("step", GRAPH, timeout_s=1.0)


@pytest.mark.gloo
def test_a_process_that_dies_is_named_by_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_dies, 3)
    assert list(caught.value.errors) == [1]
    assert "exit code 7" in str(caught.value)
