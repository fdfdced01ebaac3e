"""What the demo shows while it trains: a live bar on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.text import Text


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.jsonl. Losses are in nats per byte, means over all ranks; memory is one rank's peak.

    `validation_loss` is None where it was not measured at this step, `mfu` (percent) where the
    peak of the device is not known.
    """

    step: int
    loss: float
    grad_norm: float
    validation_loss: float | None
    tokens_per_second: float
    memory_gib: float
    seconds: float
    mfu: float | None = None


class Screen:
    """A context that shows metrics as they come and writes them to a file. Only the first rank shows."""

    def __init__(self, steps: int, file: Path, shown: bool, tensorboard: Path | None = None) -> None:
        self.steps = steps
        self.writer = summary_writer(tensorboard) if shown and tensorboard is not None else None
        self.shown = shown
        self.console = Console(quiet=not shown)
        self.file = file.open("w") if shown else None
        self.line = Text()
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task("training", total=steps)
        self.live = Live(Group(self.bar, self.line), console=self.console) if self._on_terminal() else None

    def _on_terminal(self) -> bool:
        return self.shown and sys.stdout.isatty()

    def __enter__(self) -> Screen:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
        if self.file is not None:
            self.file.close()
        if self.writer is not None:
            self.writer.close()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def track(self, what: str, count: int) -> Iterator[int]:
        """Count to `count` beside a bar on a terminal, or below a line that says what is going on."""
        if self._on_terminal():
            yield from track(range(count), description=what, console=self.console, transient=True)
            return
        self.say(f"{what} ...")
        yield from range(count)

    def show(self, metrics: Metrics) -> None:
        if self.writer is not None:
            for name, value in asdict(metrics).items():
                if value is not None and name != "step":
                    self.writer.add_scalar(name, value, metrics.step)
        if self.file is not None:
            self.file.write(json.dumps(asdict(metrics)) + "\n")
            self.file.flush()
        if self.live is not None:
            self.line.plain = self._text(metrics)
        elif self.shown:
            left = metrics.seconds / metrics.step * (self.steps - metrics.step)
            print(f"step {metrics.step:>4}/{self.steps}  {self._text(metrics)}  {left:.0f} s left", flush=True)

    def _text(self, metrics: Metrics) -> str:
        # Columns are blank where nothing was measured.
        validation = "" if metrics.validation_loss is None else f"validation {metrics.validation_loss:.3f}"
        mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1f}%"
        return (
            f"loss {metrics.loss:.3f}  grad_norm {metrics.grad_norm:.2f}  {validation:<16}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s  {metrics.memory_gib:.2f} GiB{mfu}"
        )

    def say(self, text: str) -> None:
        """A line of its own, on the first rank."""
        if self.shown:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            sys.stdout.flush()


def summary_writer(folder: Path) -> Any:
    """TensorBoard's writer; the package is needed for the flag alone."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SystemExit("--tensorboard needs a package: pip install tensorboard") from None
    return SummaryWriter(str(folder))


def draw_losses(rows: list[Metrics], bigram: float, file: Path) -> str:
    """The loss curve: training, validation, and the bigram's loss as a line to stay under. Returns what to say of it:
    a run of minutes does not fail at its end because there is nothing to draw with."""
    try:
        import matplotlib
    except ImportError:
        return "no curve: pip install matplotlib draws one"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(
        [row.step for row in rows],
        [row.loss for row in rows],
        label="training",
        color="tab:blue",
        linewidth=1,
    )
    measured = [(row.step, row.validation_loss) for row in rows if row.validation_loss is not None]
    steps, values = zip(*measured, strict=True)
    axes.plot(steps, values, "o-", label="validation", color="tab:red")
    axes.axhline(bigram, label="bigram, validation", color="gray", linestyle="--")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level transformer on the standard library")
    axes.set_ylim(0, max(bigram * 1.6, min(row.loss for row in rows) * 2))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return f"curve: {file}"
