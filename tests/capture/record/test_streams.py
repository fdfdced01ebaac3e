"""Side streams and events of a step: their nodes in the graph, and the results of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.capture.graph import StepGraph
from weft.capture.record.streams import stream_wait
from weft.errors import UncapturableStreamCall
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.runtime.aten import compile_aten

pytestmark = pytest.mark.fake
ORDER = {
    "stream_wait",
    "event_record",
    "event_wait",
    "event_synchronize",
    "stream_synchronize",
    "device_synchronize",
    "record_stream",
    "stream_begin",
    "stream_end",
}


def order(graph: StepGraph) -> list[str]:
    """Calls on streams with their numbers, and the operations between them with the stream that they are
    on."""
    lines = []
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in ORDER:
            lines.append(f"{name}({', '.join(str(arg) for arg in node.args)})")
        elif node.op == "call_function":
            lines.append(f"{node.name}@{node.meta.get('stream', 0)}")
    return lines


def captured(step: Callable[..., Any], *args: Tensor) -> StepGraph:
    return weft.capture(step, *args).check()


def test_nodes_on_a_side_stream_carry_its_number() -> None:
    with weft.fake_world(1):
        side = torch.cuda.Stream()

        def step(x: Tensor) -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x.sin()
            z = x.cos()
            torch.cuda.current_stream().wait_stream(side)
            return y + z

        graph = captured(step, torch.randn(3, device="cuda"))
    assert order(graph) == [
        "stream_begin(1)",
        "stream_wait(1, 0)",
        "sin@1",
        "cos@0",
        "stream_wait(0, 1)",
        "add@0",
        "stream_end(1)",
    ]
    assert "sin: f32[3] = aten.sin(args_0)  # on stream 1" in str(graph)
    assert "stream_wait(1, 0)" in str(graph)
    lines = {node.meta["frames"][0].name for node in graph.graph.nodes if node.target is stream_wait}
    assert lines == {"step"}


def test_the_graph_on_one_stream_equals_eager() -> None:
    def eager(x: Tensor) -> Tensor:
        return x.sin() * 2 + x.cos()

    with weft.fake_world(1):
        side, done = torch.cuda.Stream(), torch.cuda.Event()

        def step(x: Tensor) -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x.sin() * 2
                done.record()
            z = x.cos()
            done.wait()
            y.record_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().synchronize()
            return y + z

        graph = captured(step, torch.randn(3, device="cuda"))
    x = torch.randn(3)
    assert torch.equal(compile_aten(graph)(x)[0], eager(x))


def test_events_order_streams() -> None:
    with weft.fake_world(1):
        one, two = torch.cuda.Stream(), torch.cuda.Stream()

        def step(x: Tensor) -> Tensor:
            with torch.cuda.stream(one):
                a = x.sin()
                first = one.record_event()
            with torch.cuda.stream(two):
                two.wait_event(first)
                b = a.cos()
                second = torch.cuda.Event()
                second.record(two)
            second.wait()
            second.synchronize()
            b.record_stream(two)
            torch.cuda.synchronize()
            return b

        graph = captured(step, torch.randn(3))
    assert order(graph) == [
        "stream_begin(2)",
        "stream_begin(1)",
        "sin@1",
        "event_record(0, 1)",
        "event_wait(0, 2)",
        "cos@2",
        "event_record(1, 2)",
        "event_wait(1, 0)",
        "event_synchronize(1)",
        "record_stream(cos, 2)",
        "device_synchronize()",
        "stream_end(1)",
        "stream_end(2)",
    ]


def test_backward_is_on_the_stream_of_its_forward() -> None:
    with weft.fake_world(1):
        model, side = nn.Linear(4, 4), torch.cuda.Stream()

        def step(x: Tensor) -> None:
            with torch.cuda.stream(side):
                y = model(x)
            torch.cuda.current_stream().wait_stream(side)
            y.exp().sum().backward()

        graph = captured(step, torch.randn(2, 4))
    on = {
        (node.meta["stage"], node.target.__name__): node.meta.get("stream", 0)
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target.__name__ in ("mul.Tensor", "mm.default", "addmm.default")
    }
    assert on == {
        ("forward", "addmm.default"): 1,
        ("backward", "mm.default"): 1,
        ("backward", "mul.Tensor"): 0,
    }


def test_generic_streams_and_set_stream() -> None:
    with weft.fake_world(1):

        def step(x: Tensor) -> Tensor:
            side, event = torch.Stream("cuda"), torch.Event("cuda")
            with side:
                y = x.sin()
                event.record(side)
            torch.accelerator.current_stream().wait_event(event)
            before = torch.cuda.current_stream()
            torch.cuda.set_stream(side)
            z = y.cos()
            torch.cuda.set_stream(before)
            return z.exp()

        graph = captured(step, torch.randn(3))
    assert [line for line in order(graph) if "@" in line] == ["sin@1", "cos@1", "exp@0"]
    assert "event_wait(0, 0)" in order(graph)


def test_a_step_without_side_streams_records_no_stream_calls() -> None:
    with weft.fake_world(1):

        def step(x: Tensor) -> Tensor:
            with torch.cuda.stream(torch.cuda.current_stream()):
                return x.sin()

        assert order(captured(step, torch.randn(3))) == ["sin@0"]


def test_fences_come_before_collectives_that_start_early() -> None:
    """A gather may be moved to the front of the program, not before work that the user put on a side
    stream."""
    with weft.fake_world(2):
        mesh = dist.init_device_mesh("cuda", (2,))
        model, side = weft.fully_shard(nn.Linear(4, 4), mesh=mesh), torch.cuda.Stream()

        def step(x: Tensor) -> Tensor:
            torch.cuda.current_stream().wait_stream(side)
            return model(x)

        source = compile_aten(captured(step, torch.randn(2, 4))).source
    assert 0 < source.index("stream_begin") < source.index("all_gather_into_tensor")


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_events_of_outside_come_before_collectives_that_start_early(wait: str) -> None:
    """Until such an event, another stream may write the parameters that a gather would read."""
    with weft.fake_world(2):
        mesh = dist.init_device_mesh("cuda", (2,))
        model, outside, own = weft.fully_shard(nn.Linear(4, 4), mesh=mesh), torch.cuda.Event(), torch.cuda.Event()

        def step(x: Tensor) -> Tensor:
            y = x.sin()
            getattr(outside, wait)()
            y = model(y)
            own.record()
            getattr(own, wait)()
            return y.cos()

        source = compile_aten(schedule_waits(captured(step, torch.randn(2, 4)))).source
    places = [source.index(call) for call in (f"event_{wait}", "all_gather_into_tensor", "aten_sin", "event_record")]
    assert places == sorted(places)
    assert source.index(f"event_{wait}", places[-1]) < source.index("aten_cos")


@pytest.mark.parametrize("ask", ["Event.query", "Stream.query", "Event.elapsed_time"])
def test_queries_of_streams_and_events_are_refused(ask: str) -> None:
    with weft.fake_world(1):
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        calls = {
            "Event.query": event.query,
            "Stream.query": stream.query,
            "Event.elapsed_time": event.elapsed_time,
        }

        def step(x: Tensor) -> Tensor:
            method = getattr(stream if ask.startswith("Stream") else event, ask.partition(".")[2])
            return x * 2 if method(*([event] if ask.endswith("time") else [])) else x

        with pytest.raises(UncapturableStreamCall, match=rf"{ask} at .*test_streams\.py:\d+ in step"):
            weft.capture(step, torch.randn(3))
        assert calls["Event.query"]() is True


def test_stream_classes_are_restored_after_a_capture() -> None:
    with weft.fake_world(1):
        side = torch.cuda.Stream()
        before = {name: getattr(torch.cuda.Stream, name) for name in ("wait_stream", "record_event", "synchronize")}

        def step(x: Tensor) -> Tensor:
            side.synchronize()
            return x.sin()

        weft.capture(step, torch.randn(3))
        assert {name: getattr(torch.cuda.Stream, name) for name in before} == before
        assert torch.cuda.current_stream() is torch.cuda.default_stream()


@pytest.mark.gpu
def test_on_a_gpu_the_compiled_step_equals_the_eager_one() -> None:
    """Work before the step on a side stream, work after it on the same stream, events that live outside the
    step."""
    size = 1 << 11

    def run(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

        def step(x: Tensor, y: Tensor) -> Tensor:
            torch.cuda.current_stream().wait_event(ready)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target = (y @ y).tanh()
                produced = side.record_event()
            out = model(x)
            torch.cuda.current_stream().wait_event(produced)
            target.record_stream(torch.cuda.current_stream())
            loss = nn.functional.mse_loss(out, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            host = loss.detach().to("cpu", non_blocking=True)
            torch.cuda.current_stream().synchronize()
            done.record()
            return host

        step = wrap(step)
        losses, sums = [], []
        for at in range(4):
            x = torch.empty(size, size, device="cuda")
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                for _ in range(20):  # long enough that a step which did not wait would read what is not there yet
                    x.copy_(torch.full((size, size), at / 100.0, device="cuda").sin())
                ready.record()
            losses.append(step(x, x).clone())
            with torch.cuda.stream(side):
                side.wait_event(done)
                sums.append(sum(p.detach().double().sum() for p in model.parameters()))
            torch.cuda.default_stream().wait_stream(side)
        torch.cuda.synchronize()
        return [*losses, *(value.cpu() for value in sums)]

    def compiled(step: Any) -> Any:
        return weft.compile(step, mode="bitwise")  # the loss is a sum, which kernels add up in another order

    for ours, theirs in zip(run(compiled), run(lambda step: step), strict=True):
        assert torch.equal(ours, theirs)
