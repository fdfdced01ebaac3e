"""The numbers of a predicted step, as one object: printed as tables, written as JSON, as a page or as a trace."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from weft.inductor.cost.chrome_trace import trace
from weft.inductor.cost.simulate import Simulation
from weft.plan import page, tables
from weft.plan.breakdown import StepPart, UnpricedCalls
from weft.plan.memory_roles import TensorAtPeak
from weft.plan.timeline import Lane

_WIDTH = 120


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of the step, or several as one call.

    Attributes:
        kind: "all_gather", "reduce_scatter", ...
        dtype: of what is sent.
        axis: the mesh axis, or the name of the process group.
        ranks: number of ranks of the group.
        members: parameters, or nodes, that it carries.
        bytes: of the unsharded tensors.
        transport: what carries it.
        link: the slowest link that it uses.
        start, seconds, took, exposed: seconds: from the beginning of the step, alone, in the step, and while the
            compute stream waits for it.
        hidden_by: modules of the computation beside it, the longest first.
        why: numbers that decided about it.
    """

    kind: str
    dtype: str
    axis: str
    ranks: int
    members: tuple[str, ...]
    bytes: int
    transport: str
    link: str
    start: float
    seconds: float
    took: float
    exposed: float
    hidden_by: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over the step by role, at points in time in order. The peak is one of the points.

    Attributes:
        seconds: of each point, from the beginning of the step.
        total: live bytes at each point.
        roles: live bytes of each role at each point; they add up to ``total``.
    """

    seconds: list[float]
    total: list[int]
    roles: dict[str, list[int]]


@dataclass(frozen=True)
class Change:
    """The step planned again with one change.

    Attributes:
        name: what changes.
        how: "planned again" or "same schedule, priced again".
        step_seconds, tokens_per_second, peak_bytes, exposed_seconds: with the change; ``peak_bytes`` is None where the
            change was priced without planning memory again. All are None where nothing fits: ``problem`` says why.
    """

    name: str
    how: str
    step_seconds: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    exposed_seconds: float | None
    problem: str = ""


@dataclass(frozen=True)
class ScalingPoint:
    """The step at another number of ranks, with the same batch on each: the same schedule, its collectives and shards
    priced again."""

    world_size: int
    step_seconds: float
    tokens_per_second: float | None
    exposed_share: float


@dataclass(frozen=True)
class Prediction:
    """What a step will do on a cluster. ``print`` shows it as tables. All times are seconds, all sizes bytes.

    Attributes:
        name: of the step.
        cluster, gpu: the names of the description and of its GPU.
        world_size, rank, gpus_per_node: as planned.
        step_seconds: predicted time of a step.
        interval: the range of ``step_seconds`` by the steps that were measured on this cluster; None if none were.
        tokens: of a step on one rank, None where the arguments have no tensor of integers.
        samples: first size of the largest argument on one rank; None without tensors among the arguments.
        shared_by: ranks that share one batch (tensor parallelism).
        tokens_per_second: on one GPU, at ``step_seconds``.
        mfu: floating-point operations of the model per second, as a part of the data sheet's bfloat16 peak; None if the
            cluster description does not state that.
        model_operations: floating-point operations of the model in a step on one rank.
        peak_bytes, limit_bytes: of memory on one rank: predicted, and what it may hold.
        fits: whether the peak is within the limit.
        exposed_seconds: by mesh axis, the time that computation waits for its collectives.
        parts: where the time goes; adds up to ``step_seconds``.
        collectives: in order of their starts.
        memory_timeline: memory by role over the step.
        top_tensors: the ten largest tensors at the peak.
        peak_by_module: live bytes at the peak by role and by the repeated block that made them.
        input_bytes: of the step's inputs by role, on one rank.
        timeline: the step by lane.
        changes: what would change it; empty if not asked for.
        scaling: other numbers of ranks; empty if not asked for.
        unpriced: operations without a rule of the cost model.
        assumptions: what the numbers take for granted.
        warnings: of the scheduler.
        versions: of torch and weft, and a digest of the captured graph.
        price: per GPU-hour; None if not given.
        budget_tokens: of the whole run; None if not given.
    """

    name: str
    cluster: str
    gpu: str
    world_size: int
    rank: int
    gpus_per_node: int
    step_seconds: float
    interval: tuple[float, float] | None
    tokens: int | None
    samples: int | None
    shared_by: int
    tokens_per_second: float | None
    mfu: float | None
    model_operations: float
    peak_bytes: int
    limit_bytes: int
    fits: bool
    exposed_seconds: dict[str, float]
    parts: list[StepPart]
    collectives: list[PlannedCollective]
    memory_timeline: MemoryTimeline
    top_tensors: list[TensorAtPeak]
    peak_by_module: dict[str, dict[str, int]]
    input_bytes: dict[str, int]
    timeline: list[Lane]
    changes: list[Change]
    scaling: list[ScalingPoint]
    unpriced: list[UnpricedCalls]
    assumptions: list[str]
    warnings: list[str]
    versions: dict[str, str]
    simulation: Simulation = dataclasses.field(repr=False)
    price: float | None = None
    budget_tokens: float | None = None

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a part of the step."""
        return sum(self.exposed_seconds.values()) / self.step_seconds if self.step_seconds else 0.0

    @property
    def days(self) -> float | None:
        """Days of ``budget_tokens``, without restarts; None without them."""
        if not self.budget_tokens or not self.tokens_per_second:
            return None
        return self.budget_tokens / (self.tokens_per_second * self.world_size) / 86_400

    @property
    def cost(self) -> float | None:
        """The price of ``budget_tokens``; None without them or without a price."""
        return None if self.days is None or self.price is None else self.days * 24 * self.world_size * self.price

    def to_dict(self) -> dict[str, Any]:
        """The numbers under the names of the attributes, without the simulation: for JSON."""
        fields = [each.name for each in dataclasses.fields(self) if each.name != "simulation"]
        found = {name: _plain(getattr(self, name)) for name in fields}
        return {**found, "exposed_share": self.exposed_share, "days": self.days, "cost": self.cost}

    def to_json(self) -> str:
        """The text of a JSON file; its keys are the names of the attributes."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=1)

    def to_html(self) -> str:
        """The text of a page: one file that needs no network."""
        return page.render(self.to_dict())

    def to_trace(self) -> str:
        """The text of a Chrome trace, which Perfetto opens."""
        return json.dumps(trace(self.simulation), allow_nan=False)

    def __rich__(self) -> RenderableType:
        return tables.overview(self.to_dict())

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), no_color=True, width=_WIDTH)
        with console.capture() as text:
            console.print(self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def _plain(value: Any) -> Any:
    """A value as lists, dictionaries and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
