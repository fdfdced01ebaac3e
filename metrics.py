"""``weft.log``: values of a step, fetched late. ``weft.metrics``: how fast a step runs, in torchtitan's names."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from weft.argument_checks import ArgumentChecks
from weft.capture.graph import StepGraph
from weft.capture.record.opaque import opaque
from weft.compile import CompiledStep
from weft.errors import NotCapturedYet
from weft.inductor.compiler import schedule_of
from weft.inductor.cost.cluster import shipped_gpu
from weft.short_tracebacks import shortens_tracebacks

_LAG = 2  # rows that are kept back: their copies from the GPU end while later steps run
_FEWEST_CALLS = 2  # of a step between which a time can be told

Writer = Callable[[int, dict[str, float]], object]


class ScalarWriter(Protocol):
    """What TensorBoard's ``SummaryWriter`` has."""

    def add_scalar(self, name: str, value: float, step: int, /) -> object:
        """Add one value of one step."""


class LoggedRun(Protocol):
    """What a run of W&B has."""

    def log(self, values: dict[str, float], /, *, step: int) -> object:
        """Add the values of one step."""


@dataclass
class _Row:
    """The values of one step: numbers, or tensors on the host whose copies may be under way."""

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    copied: Any = None  # the event after the last copy

    def fetch(self) -> dict[str, float]:
        """The values as numbers. Waits for the copies, which later steps have given the time to end."""
        if self.copied is not None:
            self.copied.synchronize()
        return {name: float(value) for name, value in self.values.items()}


class _StepLog:
    """The rows of this process, and who gets them."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self._rows: list[_Row] = []
        self.count = 0
        self._lock = threading.Lock()

    def keep(self, name: str, value: Any) -> None:
        """Add a value. One that the last row has begins the next row."""
        if not self.writers:
            return
        with self._lock:
            if not self._rows or name in self._rows[-1].values:
                self._rows.append(_Row(self.count))
                self.count += 1
            row = self._rows[-1]
            if isinstance(value, torch.Tensor) and value.is_cuda:
                on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                on_host.copy_(value, non_blocking=True)
                row.values[name] = on_host
                row.copied = row.copied or torch.cuda.Event()
                row.copied.record()
            else:
                row.values[name] = value.clone() if isinstance(value, torch.Tensor) else value
            ready = self._rows[:-_LAG] if len(self._rows) > _LAG else []
            del self._rows[: len(ready)]
        self._write(ready)

    def flush(self) -> None:
        """Hand over all rows."""
        with self._lock:
            ready, self._rows = self._rows, []
        self._write(ready)

    def _write(self, rows: list[_Row]) -> None:
        for row in rows:
            values = row.fetch()
            for write in self.writers:
                write(row.number, values)

    def __deepcopy__(self, memo: Any) -> _StepLog:
        return self


_step_log = _StepLog()
_checks = ArgumentChecks("weft.log")


def weft_log(name: str, value: Any) -> None:
    """What a captured step calls for :func:`log`, and the name that its text shows."""
    _step_log.keep(name, value)


_opaque_log = opaque(weft_log)


@shortens_tracebacks
def log(name: str, value: torch.Tensor | float) -> None:
    """Log a number from inside a step, compiled or not: a tensor of one element, or a Python number.

    The value is copied to the host without waiting for the GPU. Writers (:func:`log_to`) get it two steps later; a row
    ends where a name comes again. Without writers nothing is kept. What a step returns costs less still: on a GPU a
    step that logs is recorded as two CUDA graphs, before and after the call.

    Raises:
        InvalidArgumentType: ``name`` is no text, or ``value`` no number.
        InvalidArgument: a tensor of more than one element.
    """
    _checks.kind("name", name, str, "a text", 'Write weft.log("loss", loss)')
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        remedy = "Log value.mean(), or another number of it"
        raise _checks.invalid("value", f"a tensor of shape {list(value.shape)}", "one number", remedy)
    _checks.kind("value", value, (torch.Tensor, float, int, torch.SymFloat, torch.SymInt), "one number", "Log a number")
    _opaque_log(name, value.detach() if isinstance(value, torch.Tensor) else value)


@shortens_tracebacks
def log_to(
    *writers: Writer | str | os.PathLike[str] | ScalarWriter | LoggedRun,
    ranks: Literal["first", "all"] = "first",
    first: int = 0,
) -> None:
    """Say who gets what :func:`log` keeps, from now on; without writers nobody.

    Args:
        writers: functions of the number of the row and its values by name; the path of a file, which gets a line of
            JSON per row; an object with ``add_scalar`` (TensorBoard's ``SummaryWriter``); one with ``log`` (a run of
            W&B).
        ranks: whether rank 0 alone writes, or every rank its own values. Files of all ranks get the rank in their name.
        first: the number of the first row: of a run that is resumed, what :meth:`TrainState.load` returned.

    Raises:
        InvalidArgumentType: a writer is none of these, or ``first`` is no whole number.
        UnknownOption: ``ranks`` is neither.
    """
    checks = ArgumentChecks("weft.log_to")
    checks.one_of("ranks", ranks, ["first", "all"])
    checks.kind("first", first, int, "a whole number", "Pass what TrainState.load returned, or 0")
    rank = int(os.environ.get("RANK", 0))
    made = [_writer(checks, one, rank if ranks == "all" else None) for one in writers]
    _step_log.flush()
    _step_log.count = first
    _step_log.writers = made if ranks == "all" or rank == 0 else []


@shortens_tracebacks
def flush_log() -> None:
    """Hand all logged values to the writers, the last ones too. Happens by itself when the process ends."""
    _step_log.flush()


atexit.register(flush_log)


def _writer(checks: ArgumentChecks, given: Any, rank: int | None) -> Writer:
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        return _JsonLines(path if rank is None else path.with_stem(f"{path.stem}-{rank}"))
    if hasattr(given, "add_scalar"):
        return lambda step, values: [given.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(given, "log"):
        return lambda step, values: given.log(values, step=step)
    if callable(given):
        return given
    what = "a function, a path, or an object with add_scalar or log"
    raise checks.wrong_type("writer", given, what, "Pass a function of the step's number and the values by name")


class _JsonLines:
    """A writer of one line of JSON per row."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


# ---- metrics of a step

# Operations and tokens of captured graphs: a loop may ask in every step, and graphs have tens of thousands of nodes.
_counted: WeakKeyDictionary[torch.fx.Graph, tuple[float, int]] = WeakKeyDictionary()


@shortens_tracebacks
def metrics(step: Callable[..., object], tokens: int | None = None) -> dict[str, float]:
    """How fast a compiled step ran in its last calls, per device, in the names of torchtitan's metrics.

    Keys that cannot be told are left out: times before two calls since the last capture, the rates of a GPU on a CPU.
    Calls that captured are not counted.

    Args:
        step: a compiled step.
        tokens: tokens of this rank per call; by default the elements of its first argument of integers.

    Returns:
        ``time_metrics/end_to_end(s)`` (mean of the last calls, as the host sees them), ``throughput(tps)``, ``tflops``,
        ``mfu(%)``, ``memory/max_active(GiB)``, ``memory/max_reserved(GiB)``, and weft's own
        ``exposed_communication(ms)``, which the schedule predicts.

    Raises:
        InvalidArgumentType: ``step`` is not compiled.
        NotCapturedYet: it was not called.
    """
    checks = ArgumentChecks("weft.metrics")
    checks.kind("step", step, CompiledStep, "a compiled step", "Pass what weft.compile returned")
    assert isinstance(step, CompiledStep)
    if not step.entries:
        raise NotCapturedYet(step.__name__)
    graph = step.entries[0].captured.graph
    found: dict[str, float] = {}
    calls, on_gpu = list(step.began), torch.cuda.is_available()
    if len(calls) >= _FEWEST_CALLS:
        seconds = (calls[-1] - calls[0]) / (len(calls) - 1)
        if graph.graph not in _counted:
            _counted[graph.graph] = model_operations(graph), _tokens(graph)
        operations, given = _counted[graph.graph]
        found["time_metrics/end_to_end(s)"] = seconds
        if given := given if tokens is None else tokens:
            found["throughput(tps)"] = given / seconds
        found["tflops"] = operations / seconds / 1e12
        gpu = shipped_gpu(torch.cuda.get_device_name()) if on_gpu else None
        if gpu is not None and gpu.stated_peak:
            found["mfu(%)"] = 100 * operations / seconds / gpu.stated_peak
    if on_gpu:
        found["memory/max_active(GiB)"] = torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30
        found["memory/max_reserved(GiB)"] = torch.cuda.max_memory_reserved() / 2**30
    schedule = schedule_of(step.entries[0].program)
    if schedule is not None:
        found["exposed_communication(ms)"] = schedule.simulation.exposed_seconds * 1e3
    return found


def model_operations(graph: StepGraph) -> float:
    """Floating-point operations of the GEMMs, convolutions and attention of a step, as torch's FlopCounterMode counts
    them. Recomputation that the compiler adds is not in the captured graph, so it is left out, as MFU wants it.
    """
    total = 0.0
    for node in graph.graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            total += float(count(*args, **kwargs, out_val=node.meta["val"]))
    return total


def _tokens(graph: StepGraph) -> int:
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        val = node.meta["val"]
        if entry.role.value == "batch" and isinstance(val, torch.Tensor) and not val.is_floating_point():
            return int(val.numel())
    return 0
