"""Graph passes and the runner that applies a list of them.

A pass is a callable ``pass_(step) -> step`` with a name, configured when it is constructed: a function, or an object of
a class that sets ``__name__``. Every rewrite between capture and Program is one. A pass declares its tier where it is
defined: :func:`keeps_bits` or :func:`changes_bits`. :class:`PassRunner` gives all passes the same services: the switch
``knobs.disable_passes``, timing, node counts, dumps, verification, and the name of the pass that failed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.errors import UnknownOption
from weft.inductor.graph.fake_values import ViewRefresher
from weft.inductor.graph.faults import Faults, LeftOut, Part
from weft.inductor.graph.verify import GraphVerifier

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pass(Protocol):
    """A rewrite of a StepGraph. It may change the graph it is called with, and returns the graph to go on with.

    The decorators below add two attributes: ``numeric_effect``, "" for a pass that keeps every bit of every result and
    else how results may change; and ``required``, whether later passes need it, so that it cannot be disabled.

    Attributes:
        __name__: the name in logs and in ``knobs.disable_passes``.
    """

    __name__: str

    def __call__(self, step: StepGraph, /) -> StepGraph: ...


_declared: dict[str, Any] = {}


def keeps_bits(pass_: Any) -> Any:
    """Declare a pass that leaves every bit of every result as it was: decorates a function or a class."""
    return _declare(pass_, "")


def changes_bits(how: str) -> Callable[[Any], Any]:
    """Declare a pass that may change the order of sums or where values are rounded; ``how`` says which."""
    assert how, "a pass that changes bits says how"
    return lambda pass_: _declare(pass_, how)


def required(pass_: Any) -> Any:
    """Declare a pass that ``knobs.disable_passes`` cannot leave out: later passes or the program need what it does."""
    pass_.required = True
    return pass_


def _declare(pass_: Any, numeric_effect: str) -> Any:
    name = pass_.__name__ if not isinstance(pass_, type) else vars(pass_)["__name__"]
    known = _declared.setdefault(name, pass_)
    # A module that is run with ``python -m`` declares its passes twice.
    assert known.__qualname__ == pass_.__qualname__, f"two passes are called {name}"
    pass_.numeric_effect = numeric_effect
    pass_.required = False
    return pass_


def declared_passes() -> dict[str, Any]:
    """The functions and classes that were declared as passes by the modules imported so far, by the passes' names."""
    return dict(_declared)


def is_enabled(pass_: Pass) -> bool:
    """Whether ``knobs.disable_passes`` leaves the pass in.

    Raises:
        UnknownOption: the knob names no pass, or one that cannot be disabled.
    """
    names = [name.strip() for name in knobs.disable_passes.split(",") if name.strip()]
    known = sorted(name for name, declared in _declared.items() if not declared.required)
    for name in names:
        if name not in known:
            raise UnknownOption("knobs.disable_passes", name, known)
    return pass_.__name__ not in names


@contextlib.contextmanager
def without(left_out: LeftOut) -> Iterator[None]:
    """Knobs for a compilation that leaves parts out. The caches of graphs have the knobs in their keys."""
    disabled = {name.strip() for name in knobs.disable_passes.split(",") if name.strip()} | left_out.names("pass")
    if "passes" in left_out:
        disabled |= {name for name, declared in _declared.items() if not declared.required}
    values: dict[str, object] = {"disable_passes": ",".join(sorted(disabled))}
    values |= {"cuda_graphs": False} if "recording" in left_out else {}
    values |= {"transports": "nccl"} if "transports" in left_out else {}
    values |= {"verify_graphs": True} if left_out.verified else {}
    with knobs.override(**values):
        yield


@dataclass(frozen=True)
class PassRecord:
    """What one run of a pass did: its stage of the pipeline, nodes of the graph before and after, CPU seconds."""

    stage: str
    name: str
    numeric_effect: str
    nodes_before: int
    nodes_after: int
    seconds: float


class PassRunner:
    """Runs passes in order and keeps account of the compilation.

    Attributes:
        records: one entry a pass that ran, in order.
        seconds: CPU seconds of this process by stage of the compilation. Time is counted once: a stage that runs
            inside another one is left out of the outer one, so that the values add up to the whole.
        left_out: what kernel generation leaves out. Passes are disabled by the knob, see :func:`without`.
        faults: which pass or stage failed.
    """

    def __init__(self, dump: Path | None = None, left_out: LeftOut | None = None) -> None:
        """``dump`` is a folder that gets the text of the graph after each pass that changed it."""
        self.records: list[PassRecord] = []
        self.seconds: dict[str, float] = {}
        self.left_out = left_out or LeftOut()
        self.faults = Faults()
        self._verifier = GraphVerifier()
        self._views = ViewRefresher()
        self._inner = 0.0  # seconds of the stages that ran inside the one that is being timed
        self._dump = dump
        self._dumped = ""

    @torch_adapter.only_mode()  # a fake world's own mode would turn fakes of GPU tensors into fakes of CPU tensors
    def run(
        self,
        stage: str,
        step: StepGraph,
        passes: Sequence[Pass],
        verify: Callable[[StepGraph, str], object] | None = None,
    ) -> StepGraph:
        """Run ``passes`` over ``step`` and check the graph after the last one, with the knob ``verify_graphs`` after
        each. Changes ``step``.

        Before the first pass and after each, views are recorded in the memory of their operands: a pass may put another
        value of the same layout in the place of one.

        Args:
            stage: the part of the pipeline, under which time is accounted for.
            verify: called with the graph and the name of the pass after each.

        Raises:
            MalformedGraph: a pass broke the graph.
            UnknownOption: ``knobs.disable_passes`` names no pass.
        """
        return self.timed(stage, lambda: self._run(stage, step, passes, verify))

    def _run(
        self, stage: str, step: StepGraph, passes: Sequence[Pass], verify: Callable[[StepGraph, str], object] | None
    ) -> StepGraph:
        # Before the first pass too: the graph may come from a cache, or from another runner.
        self._views.refresh(step.graph)
        after_each = knobs.verify_graphs
        if after_each:
            self._verifier.start(step)
        for pass_ in filter(is_enabled, passes):
            before, started = len(step), time.process_time()
            # No part is to blame for a pass that cannot be left out.
            with self.faults.blame([] if getattr(pass_, "required", False) else [Part("pass", pass_.__name__)]):
                step = pass_(step)
                self._views.refresh(step.graph)
                seconds = time.process_time() - started
                if after_each:
                    in_kernels = getattr(pass_, "draws_in_kernels", False)
                    self._verifier.after_pass(step, pass_.__name__, draws_in_kernels=in_kernels)
                if verify is not None:
                    verify(step, pass_.__name__)
            effect = getattr(pass_, "numeric_effect", "not declared")  # tests run passes of their own
            self.records.append(PassRecord(stage, pass_.__name__, effect, before, len(step), seconds))
            log.debug("%s: %d -> %d nodes in %.3f s", pass_.__name__, before, len(step), seconds)
            if self._dump is not None:
                self._write(step, pass_.__name__)
        # Checks cost about a fifth of the passes. Which pass is at fault is found in another run, with the knob.
        return step if after_each else step.check()

    def timed(self, stage: str, run: Callable[[], T]) -> T:
        """``run()``, its CPU time added to ``seconds[stage]``."""
        # Stages nest. What the inner ones take is added up in `_inner` and taken off the outer one.
        outer, self._inner = self._inner, 0.0
        started = time.process_time()
        try:
            return run()
        except Exception as error:
            self.faults.ended(stage, error)
            raise
        finally:
            total = time.process_time() - started
            self.seconds[stage] = self.seconds.get(stage, 0.0) + total - self._inner
            self._inner = outer + total

    def table(self) -> str:
        """The passes that ran, as aligned text: stage, name, nodes before and after, CPU milliseconds, tier."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("stage", "pass"):
            table.add_column(title, no_wrap=True)
        for title in ("nodes", "after", "ms"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("results", no_wrap=True)
        for record in self.records:
            counts = str(record.nodes_before), str(record.nodes_after), f"{record.seconds * 1e3:.1f}"
            tier = f"may change: {record.numeric_effect}" if record.numeric_effect else "same bits"
            table.add_row(record.stage, record.name, *counts, tier)
        console = Console(width=200, no_color=True)
        with console.capture() as text:
            console.print(table)
        return "\n".join(line.rstrip() for line in text.get().splitlines())

    def _write(self, step: StepGraph, name: str) -> None:
        assert self._dump is not None
        text = str(step)
        if text != self._dumped:
            self._dump.mkdir(parents=True, exist_ok=True)
            (self._dump / f"{len(self.records):02d}_{name}.txt").write_text(text)
        self._dumped = text
