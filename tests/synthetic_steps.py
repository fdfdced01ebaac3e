"""Training steps as scheduling task graphs: the shapes of parallelism, with times and sizes in small round numbers.

Seconds are thousandths of what they say, sizes bytes; a collective interferes only if told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph


class Value(NamedTuple):
    """What a task makes: ``task`` has to be issued before it can be read."""

    task: int
    storage: Storage


class Steps:
    """Writes a task graph, task by task, in the order that eager execution has."""

    def __init__(self, interference: float = 0.0) -> None:
        self.tasks: list[Task] = []
        self.storages: list[Storage] = []
        self.interference = interference

    def task_graph(self) -> TaskGraph:
        return TaskGraph(self.tasks, self.storages)

    def compute(self, name: str, seconds: float, reads: Sequence[Value] = (), makes: int = 0) -> Value:
        return self._task(Task(name, Kind.COMPUTE, seconds=seconds), reads, makes)

    def view(self, name: str, of: Value) -> Value:
        self.tasks.append(Task(name, Kind.NO_TIME, needs=(of.task,)))
        return Value(len(self.tasks) - 1, of.storage)

    def collective(
        self, name: str, seconds: float, reads: Sequence[Value], makes: int, stream: str, link: str = "wire"
    ) -> Value:
        """A START and its WAIT, one after the other."""
        task = Task(name, Kind.START, seconds=seconds, stream=stream, link=link, interference=self.interference)
        started = self._task(task, reads, makes)
        self.tasks.append(Task(f"{name} waited", Kind.WAIT, needs=(started.task,)))
        started.storage.readers += (len(self.tasks) - 1,)
        return Value(len(self.tasks) - 1, started.storage)

    def _task(self, task: Task, reads: Sequence[Value], makes: int) -> Value:
        at = len(self.tasks)
        task.needs = tuple(value.task for value in reads)
        self.tasks.append(task)
        for value in reads:
            value.storage.readers += (at,)
        storage = Storage(makes, at)
        self.storages.append(storage)
        return Value(at, storage)


def fsdp(
    layers: int = 8,
    *,
    gather: float = 2.0,
    reduce: float = 3.0,
    product: float = 1.0,
    products: int = 4,
    views: int = 0,
    streams: tuple[str, str] = ("gather", "reduce"),
    links: tuple[str, str] = ("out", "in"),
    interference: float = 0.0,
) -> TaskGraph:
    """Fully sharded: a layer is gathered before its products, forward and backward, and its gradients are reduced.

    A gathered layer has 400 bytes, its gradient 800, an activation 50.
    """
    steps = Steps(interference)

    def gathered(layer: int, when: str) -> Value:
        cast = steps.compute(f"cast {when} {layer}", 0.01, (), 50)
        full = steps.collective(f"gather {when} {layer}", gather, (cast,), 400, streams[0], links[0])
        for at in range(views):
            full = steps.view(f"view {when} {layer}.{at}", full)
        return full

    x = steps.compute("embed", 0.5, (), 50)
    inputs: list[list[Value]] = []
    for layer in range(layers):
        full = gathered(layer, "forward")
        inputs.append([])
        for at in range(products):
            inputs[layer].append(x)
            x = steps.compute(f"forward {layer}.{at}", product, (x, full), 50)
    gradient = steps.compute("loss", 0.5, (x,), 50)
    reduced = []
    for layer in reversed(range(layers)):
        full = gathered(layer, "backward")
        weights = []
        for at in reversed(range(products)):
            weights.append(
                steps.compute(f"weight {layer}.{at}", product, (gradient, inputs[layer][at]), 800 // products)
            )
            gradient = steps.compute(f"input {layer}.{at}", product, (gradient, full, inputs[layer][at]), 50)
        reduced.append(steps.collective(f"reduce {layer}", reduce, weights, 100, streams[1], links[1]))
    norm = steps.compute("norm", 0.1, reduced, 1)
    norm = steps.collective("reduce norm", 0.2, (norm,), 1, streams[1], links[1])
    for layer, shard in zip(reversed(range(layers)), reduced, strict=True):
        steps.compute(f"update {layer}", 0.1, (norm, shard))
    return steps.task_graph()


def tensor_parallel(
    layers: int = 8, *, gather: float = 0.8, reduce: float = 0.8, product: float = 1.0, interference: float = 0.0
) -> TaskGraph:
    """Tensor parallel with sequence-sharded activations: gather, two products, reduce, one after the other; backward
    the gradients of weights are off that path."""
    steps = Steps(interference)

    def collective(name: str, seconds: float, of: Value, makes: int) -> Value:
        return steps.collective(name, seconds, (of,), makes, "tp")

    x = steps.compute("embed", 0.1, (), 10)
    kept = []
    for layer in range(layers):
        full = collective(f"gather {layer}", gather, x, 80)
        inner = steps.compute(f"up {layer}", product, (full,), 80)
        out = steps.compute(f"down {layer}", product, (inner,), 80)
        kept.append((x, inner))
        x = steps.compute(f"add {layer}", 0.05, (x, collective(f"reduce {layer}", reduce, out, 10)), 10)
    gradient = steps.compute("loss", 0.1, (x,), 10)
    weights = []
    for layer in reversed(range(layers)):
        before, inner = kept[layer]
        full = collective(f"gather gradient {layer}", gather, gradient, 80)
        weights.append(steps.compute(f"weight down {layer}", product, (full, inner), 20))
        inner = steps.compute(f"gradient down {layer}", product, (full, inner), 80)
        weights.append(steps.compute(f"weight up {layer}", product, (inner, before), 20))
        out = steps.compute(f"gradient up {layer}", product, (inner,), 80)
        out = collective(f"reduce gradient {layer}", reduce, out, 10)
        gradient = steps.compute(f"add gradient {layer}", 0.05, (gradient, out), 10)
    steps.compute("update", 1.0, weights)
    return steps.task_graph()


def data_parallel(layers: int = 8, *, reduce: float = 3.0, product: float = 1.0, products: int = 2) -> TaskGraph:
    """Replicated parameters: the gradients of each layer are summed over all ranks."""
    steps = Steps()
    x = steps.compute("embed", 0.5, (), 50)
    inputs = []
    for layer in range(layers):
        for at in range(products):
            inputs.append((layer, at, x))
            x = steps.compute(f"forward {layer}.{at}", product, (x,), 50)
    gradient = steps.compute("loss", 0.5, (x,), 50)
    reduced, weights = [], []
    for layer, at, x in reversed(inputs):
        weights.append(steps.compute(f"weight {layer}.{at}", product, (gradient, x), 100))
        gradient = steps.compute(f"input {layer}.{at}", product, (gradient, x), 50)
        if not at:
            reduced.append(steps.collective(f"reduce {layer}", reduce, weights, 200, "dp"))
            weights = []
    for each in reduced:
        steps.compute("update", 0.1, (each,))
    return steps.task_graph()


def mixture_of_experts(
    layers: int = 8, *, exchange: float = 1.2, attention: float = 1.0, expert: float = 2.0, shared: float = 1.0
) -> TaskGraph:
    """Forward of layers whose tokens go to experts on other ranks and come back, while a shared expert of two products
    computes."""
    steps = Steps()
    x = steps.compute("embed", 0.5, (), 50)
    for layer in range(layers):
        inner = steps.compute(f"attention {layer}", attention, (x,), 50)
        sent = steps.collective(f"dispatch {layer}", exchange, (inner,), 60, "ep")
        done = steps.compute(f"experts {layer}", expert, (sent,), 60)
        back = steps.collective(f"combine {layer}", exchange, (done,), 50, "ep")
        aside = steps.compute(f"shared up {layer}", shared, (inner,), 80)
        aside = steps.compute(f"shared down {layer}", shared, (aside,), 50)
        x = steps.compute(f"add {layer}", 0.1, (back, aside), 50)
    return steps.task_graph()


def hybrid(layers: int = 8, *, reduce: float = 1.0, sum_: float = 1.0, product: float = 1.0) -> TaskGraph:
    """Backward of a step sharded within a node and replicated between nodes: gradients are reduced over wires inside,
    and what is left is summed over wires outside."""
    steps = Steps()
    gradient = steps.compute("loss", 0.5, (), 50)
    summed = []
    for layer in range(layers):
        weight = steps.compute(f"weight {layer}", product, (gradient,), 100)
        gradient = steps.compute(f"input {layer}", product, (gradient,), 50)
        part = steps.collective(f"reduce {layer}", reduce, (weight,), 20, "inside", "nvlink")
        summed.append(steps.collective(f"sum {layer}", sum_, (part,), 20, "outside", "infiniband"))
    steps.compute("update", 0.5, summed)
    return steps.task_graph()
