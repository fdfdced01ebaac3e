"""Compiled steps and other threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from thread_stress import Stress, fake_worlds, workers
from torch import nn

import weft
from both_ways import mlp, sgd
from weft.capture.record.opaque import silenced
from weft.capture.record.recorder import recording
from weft.errors import FakeWorldActive, OutsideEffect, UsedDuringCapture

SECONDS = 20


def outside() -> contextlib.AbstractContextManager[None]:
    """Inside, what the step does is as if another thread did it: a step may start and join none."""
    recorder = recording()
    return recorder.paused() if recorder is not None else contextlib.nullcontext()


def submit(pool: ThreadPoolExecutor, function: Callable[[], Any]) -> Future[Any]:
    """Start work in another thread, as that thread might do by itself."""
    with outside():
        return pool.submit(function)


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What the function returns, or the exception that it raises."""
    pool = ThreadPoolExecutor(1)
    try:
        future = submit(pool, function)
        return future.exception(SECONDS) or future.result(SECONDS)
    finally:
        with outside():
            pool.shutdown()


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_eager_training_first_calls_and_shared_steps_in_threads_match_one_thread(one_rank: None) -> None:
    stress = Stress()
    stress.run(workers(), seconds=5)
    assert not stress.wrong, "\n".join(stress.wrong)
    assert min(stress.rounds.values()) > 0, stress.rounds


def test_fake_worlds_in_two_threads_come_one_after_the_other() -> None:
    stress = Stress()
    worlds = fake_worlds()

    def real(draw: Any) -> None:
        assert not dist.is_initialized()
        assert type(torch.ones(2) + 1) is torch.Tensor
        assert torch.cuda.is_available() is available
        assert torch.nn.Linear(2, 2).to("cpu")(torch.ones(1, 2)).isfinite().all()
        assert isinstance(torch.Generator().manual_seed(2), torch.Generator)

    available = torch.cuda.is_available()
    stress.run({"first": worlds, "second": worlds, "real": real}, seconds=1)
    assert not stress.wrong, "\n".join(stress.wrong)
    assert min(stress.rounds.values()) > 0, stress.rounds


def test_a_world_inside_a_world_is_refused_in_one_thread_alone() -> None:
    with weft.fake_world(2), pytest.raises(FakeWorldActive), weft.fake_world(2):
        pass


def during_capture(inside: Callable[[], Any]) -> tuple[Any, Any]:
    """What another thread gets from ``inside`` while a step is captured, and the result of the step's first call."""
    found: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result(SECONDS)  # the thread is there before the capture
        ask = unwalked(lambda: submit(pool, inside).result(SECONDS))

        class Shows(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not found:
                    found.append(ask())
                return x * 2

        module = Shows()
        result = weft.compile(lambda x: module(x) + 1)(torch.ones(2))
    return found[0], result


def unwalked(function: Callable[[], Any]) -> Any:
    """A function that the walk over the step's Python state does not enter."""
    return Mock(side_effect=function)


def test_another_threads_hooks_generators_and_modes_are_untouched_during_a_capture() -> None:
    inputs = torch.ones(3, 8)
    model = mlp()
    expected = model(inputs)

    def inside() -> Any:
        torch.manual_seed(5)
        draws = torch.rand(3)
        torch.set_rng_state(torch.get_rng_state())
        hooks = torch.nn.modules.module
        return {
            "draws": draws,
            "output": model(inputs),
            "hooks": len(hooks._global_forward_hooks) + bool(hooks._global_forward_pre_hooks),
            "compiled": torch.compile(lambda x: x + 1, backend=counting)(inputs),
        }

    counting = Mock(side_effect=lambda graph, args: graph.forward)
    torch._dynamo.reset()
    seen, _ = during_capture(inside)
    torch.manual_seed(5)
    assert torch.equal(seen["draws"], torch.rand(3))
    assert torch.equal(seen["output"], expected)
    assert seen["hooks"] == 0
    assert torch.equal(seen["compiled"], inputs + 1)
    assert counting.call_count == 1  # torch.compile stays on in other threads


def test_opaque_functions_of_other_threads_run_while_a_step_is_verified() -> None:
    noted: list[int] = []
    note = weft.opaque(lambda: noted.append(1))
    with silenced():
        note()
        in_another_thread(note)
    assert noted == [1]


def test_training_a_model_while_another_thread_captures_its_step_is_an_error() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    errors: list[Any] = []

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        if not errors:
            errors.append(in_another_thread(lambda: model(torch.ones(1, 8)).sum().backward()))
        optimizer.step()
        optimizer.zero_grad()

    weft.compile(step)(torch.ones(2, 8))
    assert isinstance(errors[0], UsedDuringCapture), errors
    assert "test_step_threads.py" in str(errors[0])


def test_a_step_that_works_in_threads_of_its_own_is_refused() -> None:
    weight = torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: x * weight).result(SECONDS) + 1

    with pytest.raises(OutsideEffect, match="opaque"):
        weft.compile(step)(torch.ones(3))
    assert torch.equal(weft.compile(step, fallback="eager")(torch.ones(3)), torch.full((3,), 2.0))


def test_a_step_that_calls_itself_from_an_opaque_function_gives_eagers_results() -> None:
    def make(wrap: Callable[..., Any]) -> list[float]:
        found: list[float] = []

        @weft.opaque
        def again(x: torch.Tensor) -> None:
            found.append(x.sum().item())
            if len(found) % 3:
                step(x * 2)

        def body(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            again(y)
            return y * 3

        step = wrap(body)
        found += [step(torch.full((2,), float(at))).sum().item() for at in range(4)]
        return found

    assert make(weft.compile) == make(lambda step: step)


def test_steps_that_call_each_other_from_two_threads_do_not_wait_for_ever() -> None:
    arrived = threading.Barrier(2)

    @weft.opaque
    def cross(x: torch.Tensor) -> None:
        if armed:
            arrived.wait(SECONDS)  # both threads are inside their own step now
            results.append(other[threading.current_thread().name](x.detach().clone()))

    armed: list[int] = []
    results: list[torch.Tensor] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        cross(x)
        return x + 1

    def second(x: torch.Tensor) -> torch.Tensor:
        cross(x)
        return x + 2

    steps = weft.compile(first), weft.compile(second)
    inner = weft.compile(lambda x: x * 10), weft.compile(lambda x: x * 100)  # first calls inside both
    other = {"a": inner[0], "b": inner[1]}
    x = torch.ones(2)
    for step in steps:
        step(x)
    armed.append(1)
    found: dict[str, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda n=n, s=s: found.update({n: s(x)}), name=n, daemon=True)
        for n, s in zip("ab", steps, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert {name: value[0].item() for name, value in found.items()} == {"a": 2.0, "b": 3.0}
    assert sorted(result[0].item() for result in results) == [10.0, 100.0]


def test_a_thread_that_dies_in_a_capture_lets_others_go_on() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise SystemExit

    compiled = weft.compile(step)
    thread = threading.Thread(target=lambda: compiled(torch.ones(2)))
    thread.start()
    thread.join(SECONDS)
    assert torch.equal(in_another_thread(lambda: weft.compile(lambda x: x + 1)(torch.ones(2))), torch.full((2,), 2.0))
    assert isinstance(in_another_thread(lambda: compiled(torch.ones(2))), SystemExit)


def test_a_capture_waits_for_running_steps_and_steps_for_the_capture() -> None:
    order: list[str] = []
    note = weft.opaque(order.append)
    entered, may_leave = threading.Event(), threading.Event()

    @weft.opaque
    def hold() -> None:
        if armed:
            entered.set()
            may_leave.wait(SECONDS)
            order.append("running step ends")

    def running(x: torch.Tensor) -> torch.Tensor:
        hold()
        return x + 1

    def captured(x: torch.Tensor) -> torch.Tensor:
        note("capture and run")
        return x + 2

    armed: list[int] = []
    compiled = weft.compile(running)
    compiled(torch.ones(2))
    armed.append(1)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(compiled, torch.ones(2))
        entered.wait(SECONDS)
        two = pool.submit(weft.compile(captured), torch.ones(2))
        time.sleep(0.2)
        assert order == []
        may_leave.set()
        one.result(SECONDS)
        two.result(SECONDS)
    assert order[:2] == ["running step ends", "capture and run"]
