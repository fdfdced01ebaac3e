"""Ranks that make different calls of compiled steps, or are gone: named on all ranks in seconds, or equal to eager."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
import weft
from harness import RanksFailed, run_ranks
from weft import rank_watch, torch_adapter
from weft.capture.agreement import lockstep
from weft.errors import CollectiveFailed, WeftError

pytestmark = pytest.mark.gloo

Tensor = torch.Tensor


def reduce(x: Tensor, group: Any) -> Tensor:
    x = x * 1
    dist.all_reduce(x, group=group)
    return x


def gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


# ---- cases: each makes the calls of one rank, in a process group of its own

Calls = list[Callable[[], Any]]
Case = Callable[[int, Any, Callable[[Any], Any]], Calls]


def by_flag(rank: int, group: Any, wrap: Any) -> tuple[Callable[[bool], Any], Tensor]:
    """A step of two forms, of which one reduces and the other gathers."""
    x = torch.full((4,), 1.0 + rank)
    step = wrap(lambda gathers: gather(x, group) if gathers else reduce(x, group))
    return step, x


def flags(of: Callable[[int], list[bool]]) -> Case:
    def case(rank: int, group: Any, wrap: Any) -> Calls:
        step, _ = by_flag(rank, group, wrap)
        return [functools.partial(step, flag) for flag in of(rank)]

    return case


def two_steps(of: Callable[[int], str]) -> Case:
    def case(rank: int, group: Any, wrap: Any) -> Calls:
        x = torch.full((4,), 1.0 + rank)
        steps = {"r": wrap(lambda: reduce(x, group)), "g": wrap(lambda: gather(x, group))}
        return [steps[each] for each in of(rank)]

    return case


def sizes(of: Callable[[int], list[int]], carried: bool) -> Case:
    """Rows of each call; the collective carries them or their mean."""

    def case(rank: int, group: Any, wrap: Any) -> Calls:
        step = wrap(lambda x: reduce(x if carried else x.mean(0), group) * (1.0 / x.shape[0]))
        return [functools.partial(step, torch.full((rows, 3), 1.0 + rank)) for rows in of(rank)]

    return case


def raises(rank: int, group: Any, wrap: Any) -> Calls:
    """Rank 1 raises at its third call, in the middle of it."""
    x, count = torch.ones(4), [0]

    @weft.opaque
    def check() -> None:
        count[0] += 1
        if rank == 1 and count[0] == 3:
            raise ValueError("bad data")

    def body() -> Tensor:
        y = reduce(x, group)
        check()
        return reduce(y, group)

    step = wrap(body)
    return [step] * 3


def uncapturable(fallback: str | None) -> Case:
    """Rank 1 comes to a form that cannot be captured."""

    def case(rank: int, group: Any, wrap: Any) -> Calls:
        x = torch.full((4,), 1.0 + rank)
        step = wrap(lambda looks: reduce(x, group) if not looks else x.data_ptr(), fallback=fallback)
        return [functools.partial(step, False), functools.partial(step, False), functools.partial(step, rank == 1)]

    return case


def calls_again(rank: int, group: Any, wrap: Any) -> Calls:
    """Rank 1 is given bad data, which it finds before its first collective, and takes other data in its place."""
    x, data = torch.full((4,), 1.0 + rank), [4, 4, 4, 0 if rank == 1 else 4, 4, 4]

    @weft.opaque
    def check() -> None:
        if data.pop(0) == 0:
            raise ValueError("bad data")

    @wrap
    def step() -> Tensor:
        check()
        return reduce(x, group)

    def call() -> Tensor:
        try:
            return step()
        except ValueError:
            return step()

    return [call] * 5


def busy(rank: int, group: Any, wrap: Any) -> Calls:
    """Rank 1 comes late, by more than a process takes to answer."""
    x = torch.full((4,), 1.0 + rank)
    step = wrap(lambda: reduce(x, group))

    def late() -> Tensor:
        time.sleep(1.5 * rank_watch.SILENT_S * rank)
        return step()

    return [step, step, late]


def own_pace(rank: int, group: Any, wrap: Any) -> Calls:
    """Each rank communicates with nobody but itself, and makes as many calls as it likes."""
    mine = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    x = torch.full((4,), 1.0 + rank)
    steps = [wrap(lambda: reduce(x, mine)), wrap(lambda: gather(x, mine))]
    return [*steps, *[steps[rank % 2]] * (3 + 4 * rank)]


def as_source(rank: int, group: Any, wrap: Any) -> Calls:
    """Rank 0 sends and does not wait for the others, which call another step."""
    x = torch.full((4,), 1.0 + rank)

    def send() -> Tensor:
        y = x * 1
        dist.broadcast(y, 0, group=group)
        return y

    steps = [wrap(send), wrap(lambda: gather(x, group))]
    return [*steps, *[steps[0]] * 8, *[steps[min(rank, 1)]] * 3]


EQUAL: dict[str, Case] = {
    "the same form again and again": flags(lambda rank: [False] * 4),
    "all switch at one call": flags(lambda rank: [False, False, True, True, False, True]),
    "two steps in turn": two_steps(lambda rank: "rgrgrgrg"),
    "a step every third call": two_steps(lambda rank: "rrgrrgrrgrrg"),
    "no pattern": two_steps(lambda rank: "rgrrgggrgrrrgg"),
    "a short batch on one rank": sizes(lambda rank: [4, 4, 4 - (rank == 1), 4], carried=False),
    "a size after the other": sizes(lambda rank: [4 + rank, 4, 5 + rank, 3, 4], carried=False),
    "a size that is carried, on all": sizes(lambda rank: [4, 4, 6, 6, 8, 4], carried=True),
    "a call again after an error": calls_again,
    "a rank that is busy": busy,
    "a pace of its own": own_pace,
}
CALM = [False] * 8  # after so many, the next call is predicted
NAMED: dict[str, Case] = {
    "one rank switches to a form agreed before": flags(lambda rank: [True, *CALM, rank == 1]),
    "rank 0 switches": flags(lambda rank: [True, *CALM, rank == 0]),
    "one rank switches early": flags(lambda rank: [False, True, rank == 1]),
    "one rank does not switch back": flags(lambda rank: [*CALM, True, True, rank == 1]),
    "one rank captures a form": flags(lambda rank: [*CALM, rank == 1]),
    "rank 0 captures a form": flags(lambda rank: [*CALM, rank == 0]),
    "steps in another order at first": two_steps(lambda rank: "rg" if rank else "gr"),
    "steps in another order later": two_steps(lambda rank: "rg" * 6 + ("gr" if rank else "rg")),
    "a step left out": two_steps(lambda rank: "rg" * 6 + ("g" if rank else "rg")),
    "a size that is carried, on one": sizes(lambda rank: [*[4] * 8, 4 + (rank == 1)], carried=True),
    "an error inside a call": raises,
    "a form that one rank cannot capture": uncapturable(None),
    "a form that one rank cannot capture, falling back": uncapturable("eager"),
    "a source that runs ahead": as_source,
}


def quick() -> None:
    """Have ranks look more often, and wait for less."""
    rank_watch.BEAT_S, rank_watch.SLICE_S = 0.2, 0.05
    rank_watch.SILENT_S, rank_watch.EXPLAIN_S = 2.0, 1.0


def play(rank: int, world: int, names: list[str]) -> dict[str, tuple[str, float, str]]:
    """By case: what became of it, the seconds of its last call, and the text of the error."""
    quick()
    found = {}
    for name in names:
        case = EQUAL.get(name) or NAMED[name]
        group, groups = dist.new_group(), dist.new_group()
        expected = [call() for call in case(rank, groups, eager)] if name in EQUAL else []
        said, text = "equal", ""
        started = time.monotonic()
        try:
            for at, call in enumerate(case(rank, group, weft.compile)):
                started = time.monotonic()
                got = call()
                if expected and not torch.equal(got, expected[at]):
                    said = "wrong"
        except WeftError as error:
            said, text = type(error).__name__, str(error)
        except ValueError as error:
            said, text = "ValueError", str(error)
        found[name] = said, time.monotonic() - started, text
        met(name, world)
        if name in NAMED:
            dist.destroy_process_group(group)  # does not wait for collectives that never end
            restart()
    return found


def eager(step: Any, **options: Any) -> Any:
    return step


def met(name: str, world: int) -> None:
    """All ranks are here."""
    store = torch_adapter.default_store()
    store.add(name, 1)
    while store.add(name, 0) < world:
        time.sleep(0.01)


def restart() -> None:
    """Begin anew, as processes do after such an error. All ranks at once."""
    assert lockstep._current is not None
    lockstep._current.stop()
    lockstep._current = None


def check(found: list[dict[str, tuple[str, float, str]]]) -> None:
    for rank, cases in enumerate(found):
        for name, (said, seconds, text) in cases.items():
            if name in EQUAL:
                assert said == "equal", (name, rank, text)
            else:
                assert said not in ("equal", "wrong"), (name, rank)
                assert seconds < 30, (name, rank, seconds)
    said = {name: [cases[name][0] for cases in found] for name in found[0]}
    texts = {name: [cases[name][2] for cases in found] for name in found[0]}
    # The ranks that did not deviate waited in a collective, and learned there.
    assert said["one rank switches to a form agreed before"][:2] == ["RanksDiverged", "GraphMismatch"]
    assert said["rank 0 captures a form"][:2] == ["GraphMismatch", "RanksDiverged"]
    assert "all_reduce" in texts["one rank captures a form"][0]
    assert "all_gather" in texts["one rank captures a form"][0]
    assert said["an error inside a call"][:2] == ["CollectiveFailed", "ValueError"]
    assert "rank 1 has raised: ValueError: bad data" in texts["an error inside a call"][0]
    assert "test_lockstep.py:" in texts["an error inside a call"][0]
    for name in ("a form that one rank cannot capture", "a form that one rank cannot capture, falling back"):
        assert said[name][0] == "GraphMismatch"
        assert "cannot be captured" in texts[name][0]


WORLDS = [int(world) for world in os.environ.get("PLANTED_WORLDS", "2").split(",")]


@pytest.mark.parametrize("world", WORLDS)
def test_calls_that_differ_are_named_on_all_ranks(world: int) -> None:
    check(run_ranks(play, world, [*EQUAL, *NAMED], timeout=120))


def after_an_error(rank: int, world: int) -> list[str]:
    """What a rank that was in a call hears at later calls: no collective is paired with the one that it abandoned."""
    quick()
    calls = NAMED["one rank switches to a form agreed before"](rank, dist.new_group(), weft.compile)
    heard = []
    for call in [*calls, calls[0], calls[0]]:
        try:
            call()
        except WeftError as error:
            heard.append(type(error).__name__)
    return heard


def test_nobody_goes_on_after_ranks_diverged() -> None:
    waited, deviated = run_ranks(after_an_error, 2)
    assert waited == ["RanksDiverged"] * 3
    assert deviated == ["GraphMismatch", "RanksDiverged", "RanksDiverged"]


# ---- what a steady call costs


def steady(rank: int, world: int) -> tuple[int, int]:
    """Comparisons in steady calls, and in calls of two steps in turn."""
    x = torch.ones(4)
    steps = [weft.compile(lambda: reduce(x, None)), weft.compile(lambda: gather(x, None))]
    for _ in range(8):
        steps[0]()
    started = []

    class Counted(lockstep._EventComparison):
        def __init__(self, *given: Any, **options: Any) -> None:
            started.append(given)
            super().__init__(*given, **options)

    lockstep._EventComparison = Counted
    for _ in range(20):
        steps[0]()
    calm = len(started)
    for _ in range(8):
        steps[0](), steps[1]()
    assert started  # the second step was new
    started.clear()
    for _ in range(8):
        steps[0](), steps[1]()
    return calm, len(started)


def test_predicted_calls_are_not_compared() -> None:
    assert run_ranks(steady, 2) == [(0, 0)] * 2


# ---- ranks that are gone


def gone(rank: int, world: int, how: int, folder: str) -> None:
    """Rank 1 dies or stops in its third call. The others write what they hear to files."""
    assert rank_watch.SILENT_S + rank_watch.EXPLAIN_S < 25
    rank_watch.SILENT_S, rank_watch.EXPLAIN_S = 6.0, 4.0  # a test need not wait for as long
    x, count = torch.ones(world), [0]
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())

    @weft.opaque
    def perhaps() -> None:
        count[0] += 1
        if rank == 1 and count[0] == 3:
            os.kill(os.getpid(), how)

    @weft.compile
    def step() -> Tensor:
        y = reduce(x, None)
        perhaps()
        part = y.new_empty(1)
        dist.reduce_scatter_tensor(part, y)
        return part

    step(), step()
    try:
        step()
    except CollectiveFailed as error:
        Path(folder, str(rank)).write_text(str(error))
    if how == signal.SIGSTOP and rank == 0:
        while not Path(folder, "2").exists():
            time.sleep(0.1)
        os.kill(pids[1], signal.SIGKILL)  # type: ignore[arg-type]


SAID = {
    signal.SIGKILL: "the process of rank 1 has ended",
    signal.SIGSTOP: "s: the process is stopped by a signal",
}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_is_named_with_the_collective(
    how: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 25.0)  # until the others have to be done
    with pytest.raises(RanksFailed) as caught:
        run_ranks(gone, 3, how, str(tmp_path), timeout=60)
    assert [*caught.value.errors] == [1], str(caught.value)
    assert "0 still running" in str(caught.value)
    for rank in (0, 2):
        heard = (tmp_path / str(rank)).read_text()
        assert "rank 1" in heard
        assert SAID[how] in heard
        assert "_c10d_functional.all_reduce" in heard or "_c10d_functional.reduce_scatter_tensor" in heard
        assert "test_lockstep.py:" in heard
