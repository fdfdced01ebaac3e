"""The simulator against cases done by hand, and against a slow one in fractions that looks anew at each event."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from growth import assert_near_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inductor.cost.simulate import COMPUTE, LiveMemory, Machine, Simulation, TaskSpan, simulate
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph

# ---- task graphs


def compute(seconds: float, *needs: int) -> Task:
    return Task("compute", Kind.COMPUTE, needs, seconds)


def start(seconds: float, stream: str = "a", link: str = "wire", interference: float = 0.0) -> Task:
    return Task("start", Kind.START, (), seconds, stream, link, interference)


def wait(*needs: int) -> Task:
    return Task("wait", Kind.WAIT, needs)


def free(*needs: int) -> Task:
    return Task("free", Kind.NO_TIME, needs)


def ran(tasks: list[Task]) -> Simulation:
    return simulate(TaskGraph(tasks))


def ends(simulation: Simulation) -> dict[int, float]:
    return {span.task: span.end for span in simulation.spans}


def random_task_graph(rng: random.Random) -> tuple[TaskGraph, list[int]]:
    """A step, and an order of it that runs. Times are often equal, often nothing."""
    tasks: list[Task] = []
    ends_in: list[int] = []  # STARTs, and NO_TIME tasks that pass one on
    for at in range(rng.randrange(25)):
        kind = rng.choice([Kind.COMPUTE, Kind.COMPUTE, Kind.START, Kind.WAIT, Kind.NO_TIME])
        needs = tuple(rng.sample(range(at), rng.randint(0, min(at, 2))))
        seconds = rng.randint(0, 10) / 4 * rng.choice([1, 1, 0.3])
        if kind is Kind.WAIT and ends_in:
            tasks.append(wait(rng.choice(ends_in), *needs))
        elif kind is Kind.START:
            stream, link, interference = rng.choice("abc"), rng.choice("xy"), rng.choice([0, 0.25, 0.25, 0.5, 0.75])
            tasks.append(replace(start(seconds, stream, link, interference), needs=needs))
            ends_in.append(at)
        elif kind is Kind.NO_TIME and ends_in and rng.random() < 0.5:
            tasks.append(free(rng.choice(ends_in), *needs))
            ends_in.append(at)
        else:
            tasks.append(compute(seconds, *needs) if kind is Kind.COMPUTE else free(*needs))
    storages = []
    for _ in range(rng.randint(0, 12) if tasks else 0):
        maker = rng.randrange(len(tasks))
        readers = tuple(rng.choice(later) for _ in range(rng.randint(0, 3)) if (later := depending(tasks, maker)))
        storages.append(Storage(rng.randint(0, 100), maker, readers, kept=rng.random() < 0.2))
    return TaskGraph(tasks, storages, rng.randint(0, 50)), shuffled(tasks, rng)


problems = st.integers(0, 2**32).map(lambda seed: random_task_graph(random.Random(seed)))


def depending(tasks: list[Task], maker: int) -> list[int]:
    """Tasks that come after ``maker`` in every order."""
    found = {maker}
    for at, task in enumerate(tasks):
        if found & set(task.needs):
            found.add(at)
    return sorted(found - {maker})


def shuffled(tasks: list[Task], rng: random.Random) -> list[int]:
    order: list[int] = []
    while len(order) < len(tasks):
        ready = [at for at, task in enumerate(tasks) if at not in order and {*task.needs} <= {*order}]
        order.append(rng.choice(ready))
    return order


# ---- the slow simulator


@dataclass
class Slow:
    """Time in fractions. The state is what is left of every task; who runs, and how fast, is found anew each time."""

    task_graph: TaskGraph
    now: Fraction = Fraction(0)
    left: dict[int, Fraction] = field(default_factory=dict)
    begun: dict[int, Fraction] = field(default_factory=dict)
    done: dict[int, Fraction] = field(default_factory=dict)
    slowed: Fraction = Fraction(0)
    exposed: dict[int, Fraction] = field(default_factory=dict)

    def running(self) -> list[int]:
        """The first of each stream. ``left`` has collectives in order of issue."""
        first: dict[str, int] = {}
        for at in self.left:
            first.setdefault(self.task_graph.tasks[at].stream, at)
        return list(first.values())

    def pass_time(self, work: Fraction | None, until: int | None) -> Fraction:
        """To the next event: ``work`` of the compute stream done, or a collective ended. The work left."""
        tasks, running = self.task_graph.tasks, self.running()
        for at in running:
            self.begun.setdefault(at, self.now)
        sharing = {at: sum(tasks[at].link == tasks[other].link for other in running) for at in running}
        speed = 1 - max((Fraction(tasks[at].interference) for at in running), default=Fraction(0))
        times = [self.left[at] * sharing[at] for at in running]
        if work is not None and speed:
            times.append(work / speed)
        step = min(times)
        self.now += step
        for at in running:
            self.left[at] -= step / sharing[at]
            if not self.left[at]:
                del self.left[at]
                self.done[at] = self.now
        if work is None:
            self.exposed[until] = self.exposed.get(until, Fraction(0)) + step
            return Fraction(0)
        self.slowed += step * (1 - speed)
        return work - step * speed

    def wait(self, until: int) -> None:
        while until in self.left:
            self.pass_time(None, until)

    def run(self, order: list[int]) -> Slow:
        for at in order:
            task = self.task_graph.tasks[at]
            if task.kind is Kind.COMPUTE:
                self.begun[at] = self.now
                work = Fraction(task.seconds)
                while work:
                    work = self.pass_time(work, None)
                self.done[at] = self.now
            elif task.kind is Kind.START:
                self.left[at] = Fraction(task.seconds)
            elif task.kind is Kind.WAIT:
                self.wait(self.task_graph.start_of(at))
        for at in order:
            self.wait(at)
        return self


# ---- by hand


def test_a_collective_behind_computation_costs_nothing() -> None:
    found = ran([start(2), compute(3), wait(0), compute(1)])
    assert (found.seconds, found.compute_seconds, found.exposed_seconds) == (4, 4, 0)
    assert found.spans == [TaskSpan(0, "a", 0, 2), TaskSpan(1, COMPUTE, 0, 3), TaskSpan(3, COMPUTE, 3, 4)]


def test_communication_without_computation_beside_it_is_exposed() -> None:
    found = ran([start(5), compute(3), wait(0), compute(1)])
    assert found.seconds == 6
    assert found.exposed == {0: 2}
    assert found.waits == [TaskSpan(0, COMPUTE, 3, 5)]


def test_two_streams_of_one_link_take_half_each() -> None:
    """Both move at 1/2 until the short one ends at 4, with 6 - 2 left of the other: it ends at 8."""
    assert ends(ran([start(2, "a"), start(6, "b")])) == {0: 4, 1: 8}
    assert ends(ran([start(2, "a", "x"), start(6, "b", "y")])) == {0: 2, 1: 6}


def test_a_collective_that_joins_a_link_later() -> None:
    """2 of 4 are done when the second joins; its 1 takes 2 at half speed; the first has 1 left then."""
    found = ran([start(4, "a"), compute(2), start(1, "b"), wait(0), wait(2)])
    assert ends(found) == {0: 5, 1: 2, 2: 4}
    assert found.exposed == {0: 3}


def test_a_stream_carries_one_collective_after_the_other() -> None:
    found = ran([start(2), start(3), start(1), wait(2)])
    assert [(span.start, span.end) for span in found.spans] == [(0, 2), (2, 5), (5, 6)]
    assert found.exposed == {2: 6}


def test_the_next_collective_of_a_stream_can_run_on_another_link() -> None:
    found = ran([start(1, "a", "x"), start(2, "a", "y"), start(4, "b", "x")])
    assert ends(found) == {0: 2, 1: 4, 2: 5}


def test_computation_beside_a_collective_is_slower() -> None:
    """1.2 of the 3 are done in the 2 seconds of the collective."""
    found = ran([start(2, interference=0.4), compute(3), wait(0)])
    assert found.seconds == pytest.approx(3.8)
    assert found.slowed_seconds == {"a": pytest.approx(0.8)}
    assert (found.compute_seconds, found.exposed_seconds) == (3, 0)


def test_the_worst_of_the_active_collectives_counts() -> None:
    """At 0.5 for 1 second, at 0.75 for another, then alone: 2 = 0.5 + 0.75 + 0.75."""
    found = ran([start(1, "a", "x", 0.5), start(2, "b", "y", 0.25), compute(2)])
    assert found.seconds == 2.75
    assert found.slowed_seconds == {"a": 0.5, "b": 0.25}


def test_computation_may_stand_still_beside_a_collective() -> None:
    found = ran([start(2, interference=1), compute(3)])
    assert (found.seconds, found.slowed_seconds) == (5, {"a": 2})


def test_two_waits_of_one_start_through_its_elements() -> None:
    found = ran([start(3), free(0), free(0), wait(1), compute(1), wait(2)])
    assert found.seconds == 4
    assert found.exposed == {0: 3}


def test_a_collective_that_is_not_waited_for_is_waited_for_at_the_end() -> None:
    found = ran([start(1, "a", "x"), start(4, "b", "y"), compute(2)])
    assert found.seconds == 4
    assert found.exposed == {1: 2}


def test_the_order_decides() -> None:
    """Started behind the computation that could hide it, or before it."""
    task_graph = TaskGraph([compute(2), start(2), wait(1)])
    assert simulate(task_graph).seconds == 4
    assert simulate(task_graph, [1, 0, 2]).seconds == 2
    with pytest.raises(AssertionError):
        simulate(task_graph, [0, 2, 1])


def test_computation_beside_a_collective_is_listed() -> None:
    found = ran([compute(1), start(4), compute(1), compute(2), compute(5), wait(1)])
    assert found.beside(1) == [(3, 2), (2, 1), (4, 1)]


def test_memory_is_held_from_its_maker_through_its_last_reader() -> None:
    task_graph = TaskGraph(
        [compute(1), compute(1), compute(1, 0), compute(1)],
        [Storage(10, 0, (2,)), Storage(5, 1), Storage(1, 2, kept=True)],
        base=100,
    )
    found = simulate(task_graph)
    assert found.memory == [110, 115, 111, 101]
    assert (found.peak, found.peak_at) == (115, 1)


def test_operands_and_results_of_a_collective_are_held_until_its_last_wait() -> None:
    tasks = [compute(1), start(1), free(1), wait(2), wait(1), compute(1)]
    tasks[1].needs = (0,)
    read = TaskGraph(tasks, [Storage(10, 0, (1,))])
    assert simulate(read).memory == [10, 10, 10, 10, 10, 0]
    assert simulate(read, [0, 1, 4, 5, 2, 3]).memory == [10] * 6
    made = TaskGraph(tasks, [Storage(10, 1)])
    assert simulate(made).memory == [0, 10, 10, 10, 10, 0]
    never = TaskGraph([start(1), compute(1)], [Storage(10, 0)])
    assert simulate(never).memory == [10, 10]


def test_nothing_to_do() -> None:
    found = simulate(TaskGraph([], base=3))
    assert (found.seconds, found.spans, found.memory, found.peak) == (0, [], [], 3)


# ---- random task graphs


@settings(max_examples=400, deadline=None)
@given(problems)
def test_times_equal_those_of_the_slow_simulator(case: tuple[TaskGraph, list[int]]) -> None:
    task_graph, order = case
    found, slow = simulate(task_graph, order), Slow(task_graph).run(order)
    assert found.seconds == pytest.approx(float(slow.now))
    spans = {span.task: (span.start, span.end) for span in found.spans}
    assert spans.keys() == slow.done.keys()
    for at, span in spans.items():
        assert span == pytest.approx((float(slow.begun[at]), float(slow.done[at]))), at
    for at, task in enumerate(task_graph.tasks):
        if task.kind is Kind.START:
            assert found.exposed.get(at, 0) == pytest.approx(float(slow.exposed.get(at, 0))), at
    assert sum(found.slowed_seconds.values()) == pytest.approx(float(slow.slowed))


@settings(max_examples=200, deadline=None)
@given(problems)
def test_nothing_is_lost(case: tuple[TaskGraph, list[int]]) -> None:
    task_graph, order = case
    found = simulate(task_graph, order)
    busy = sum(span.end - span.start for span in found.computation)
    assert busy == pytest.approx(found.compute_seconds + sum(found.slowed_seconds.values()))
    assert busy + found.exposed_seconds == pytest.approx(found.seconds)
    # A link that carries anything moves a second of work a second, shared or not.
    for link in {task.link for task in task_graph.tasks if task.kind is Kind.START}:
        on_link = [at for at, task in enumerate(task_graph.tasks) if task.link == link]
        covered, until = 0.0, 0.0
        for span in found.spans:
            if span.task in on_link:
                covered += max(span.end - max(span.start, until), 0)
                until = max(until, span.end)
        assert covered == pytest.approx(sum(task_graph.tasks[at].seconds for at in on_link))


@settings(max_examples=200, deadline=None)
@given(problems)
def test_memory_equals_a_recount(case: tuple[TaskGraph, list[int]]) -> None:
    task_graph, order = case
    waits = task_graph.waits_of()
    recount = []
    for position in range(len(order)):
        held = task_graph.base
        for storage in task_graph.storages:
            users = [storage.maker, *storage.readers]
            users += [late for at in users for late in waits.get(at, [])]
            forever = storage.kept or any(not waits.get(at, [at]) for at in users)
            first, last = order.index(storage.maker), max(order.index(at) for at in users)
            held += storage.size * (first <= position <= (len(order) if forever else last))
        recount.append(held)
    assert simulate(task_graph, order).memory == recount


@settings(max_examples=200, deadline=None)
@given(problems, st.randoms(use_true_random=False))
def test_looking_ahead_changes_nothing_and_is_right(case: tuple[TaskGraph, list[int]], rng: random.Random) -> None:
    task_graph, order = case
    fork = rng.randrange(len(order) + 1)
    machine, live_memory = Machine(task_graph), LiveMemory(task_graph)
    for position, at in enumerate(order):
        if position == fork:
            ahead, holding_ahead = machine.copy(), live_memory.copy()
            for other in reversed(order[position:]):  # any tasks at all
                ahead.issue(other)
                holding_ahead.issue(other)
        expected = live_memory.during(at), live_memory.after(at)
        assert (live_memory.issue(at), live_memory.now) == expected
        machine.issue(at)
        for begun in order[: position + 1]:
            if task_graph.tasks[begun].kind is Kind.START:
                waiting = machine.copy()
                waiting.wait(begun)
                assert machine.ready_at(begun) == waiting.now
                done = float(Slow(task_graph).run(order[: position + 1]).done[begun])
                assert waiting.now == pytest.approx(max(machine.now, done))
    for at in order:
        machine.wait(at)
    found = simulate(task_graph, order)
    assert (machine.now, live_memory.peak) == (found.seconds, found.peak)


def large(count: int) -> TaskGraph:
    rng = random.Random(0)
    tasks: list[Task] = []
    begun: list[int] = []
    while len(tasks) < count:
        draw = rng.random()
        if draw < 0.1:
            begun.append(len(tasks))
            tasks.append(start(rng.random(), rng.choice("abcdef"), rng.choice("xyz"), rng.random() / 2))
        elif draw < 0.2 and begun:
            tasks.append(wait(begun.pop(0)))
        else:
            tasks.append(compute(rng.random()))
    last = len(tasks) - 1
    return TaskGraph(tasks, [Storage(1, at, (min(at + rng.randrange(200), last),)) for at in range(len(tasks))])


def test_simulation_takes_near_linear_time() -> None:
    def of(count: int) -> Callable[[], object]:
        task_graph = large(count)
        return lambda: simulate(task_graph)

    assert_near_linear(of, 10_000)
