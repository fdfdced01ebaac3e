"""``weft plan``: what a training script will do on a cluster that is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from weft.argument_checks import ArgumentChecks
from weft.errors import CannotWrite
from weft.inductor.cost.cluster import load_cluster
from weft.launch.plan_jobs import PlanJob, Row, run_job, run_jobs
from weft.launch.script_run import Script
from weft.plan.figures import gibibytes, milliseconds

Flag = tyro.conf.FlagCreatePairsOff

_CHECKS = ArgumentChecks("weft plan")
_STEPS = 4  # of the progress bar before changes: script, capture, plan, output


def plan(
    script: Annotated[str, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    world_size: str = "8",
    cluster: str = "h200x8",
    memory_limit: str = "none",
    batch: str = "",
    rank: int = 0,
    step: str = "",
    nth: int = 1,
    steps: int = 1,
    compile_function: str = "",
    module: Annotated[bool, Flag] = False,
    json: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    what_if: Literal["auto", "yes", "no"] = "auto",
    price: float | None = None,
    tokens: float | None = None,
    processes: int = 0,
) -> None:
    """Say what a training script will do on a cluster: time, memory, communication. No GPU is needed.

    The script runs as one rank, in this process, up to the first call of a compiled step. Lists of numbers plan every
    combination and print a sorted table: --world-size 8,64,512 --batch 1,2,4 --memory-limit none,60

    Args:
        script: the file that torchrun runs; with --module the name of a module.
        arguments: of the script, after --.
        world_size: number of GPUs; several with commas between.
        cluster: a name of docs/clusters.md, or the path of a description.
        memory_limit: GiB that a GPU may hold; several with commas between; none for nine tenths of its memory.
        batch: first size of the step's arguments, in place of the script's own; several with commas between.
        rank: the rank to be.
        step: name of the compiled step to plan.
        nth: which of the compiled steps to plan, in the order of their first calls.
        steps: which form of the step to plan, where it is called with several sizes.
        compile_function: a function that is not compiled yet, to be planned as the step: train_step,
            Trainer.train_step, or package.module:Trainer.train_step.
        module: the script is the name of a module, as for python -m.
        json: file for all numbers.
        html: file for a page with everything, one file that needs no network.
        trace: file for a Chrome trace, which Perfetto opens.
        what_if: whether to plan the step again with changes (batch, gathering, network, memory), each about as long as
            the first plan. By default a page has it, and of large steps only what can be priced with the same schedule.
        price: of a GPU for an hour.
        tokens: of the whole training run, such as 15e12.
        processes: how many plans of a list are made at once; by default one a CPU.
    """
    what = Script(script, arguments, module, compile_function, step, nth, steps)
    worlds = _numbers("--world-size", world_size)
    batches: list[int | None] = list(_numbers("--batch", batch)) if batch else [None]
    limits = _limits(memory_limit)
    load_cluster(cluster)  # said before the script runs
    for name, value, least in (("--nth", nth, 1), ("--steps", steps, 1), ("--rank", rank, 0)):
        _CHECKS.number(name, value, least=least, whole=True)
    for path, name in ((json, "--json"), (html, "--html"), (trace, "--trace")):
        _check_writable(name, path)
    sweeps = len(worlds) * len(batches) * len(limits) > 1
    if sweeps and (html or trace):
        raise _CHECKS.invalid(
            "--html" if html else "--trace", html or trace, "for one plan, not for several", "Name one"
        )
    changes = what_if == "yes" or html is not None
    jobs = [
        PlanJob(what, world, rank, cluster, size, tuple(limits), changes, what_if, price, tokens)
        for world in worlds
        for size in batches
    ]
    try:
        if sweeps:
            _sweep(jobs, processes or os.cpu_count() or 1, json)
        else:
            _single(jobs[0], json, html, trace)
    except KeyboardInterrupt:  # processes of a sweep have ended, and files are written last
        sys.exit(130)


def _single(job: PlanJob, json: Path | None, html: Path | None, trace: Path | None) -> None:
    with _progress() as progress:
        task = progress.add_task("", total=_STEPS + (8 if job.changes else 0))

        def report(what: str) -> None:
            progress.update(task, advance=1, description=what)

        found = run_job(job, report)[0]
        report("writing")
        makers = found.to_json, found.to_html, found.to_trace
        for path, name, text in zip((json, html, trace), ("--json", "--html", "--trace"), makers, strict=True):
            if path is not None:
                _write(name, path, text())
    console = Console(width=None if Console().is_terminal else 120)
    console.print(found)
    for path in filter(None, (json, html, trace)):
        console.print(f"written to {path}", highlight=False)


def _sweep(jobs: list[PlanJob], processes: int, json: Path | None) -> None:
    rows: list[tuple[PlanJob, float | None, Row | str]] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(jobs))
        doing: dict[int, str] = {}

        def report(number: int, what: str) -> None:
            doing[number] = f"{jobs[number].world_size} GPUs: {what}"
            progress.update(task, description="; ".join(doing.values()))

        for number, result in run_jobs(jobs, processes, report):
            doing.pop(number, None)
            progress.update(task, advance=1)
            job = jobs[number]
            if isinstance(result, str):
                rows += [(job, limit, result) for limit in job.limits]
            else:
                rows += zip([job] * len(result), job.limits, result, strict=True)
    Console(width=None if Console().is_terminal else 120).print(sweep_table(rows))
    if json is not None:
        import json as text

        _write("--json", json, text.dumps([row for _, _, row in rows if not isinstance(row, str)], indent=1))


def sweep_table(rows: list[tuple[PlanJob, float | None, Row | str]]) -> Table:
    """The predictions of a sweep, those that fit first, the most tokens (else steps) per second and GPU first."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    names = ("GPUs", "batch", "limit", "fits", "ms", "tokens/s/GPU", "MFU", "exposed", "peak", "of")
    for name in (*names, "days", "cost"):
        table.add_column(name, justify="left" if name in ("limit", "fits", "of") else "right")
    for job, limit, row in sorted(rows, key=_best_first):
        shown = "none" if limit is None else f"{limit:g} GiB"
        batch = str(job.batch or (row["samples"] if not isinstance(row, str) and row["samples"] else ""))
        if isinstance(row, str):
            table.add_row(f"{job.world_size:,}", batch, shown, "failed", "", "", "", "", "", row)
            continue
        tokens, mfu = row["tokens_per_second"], row["mfu"]
        table.add_row(
            f"{job.world_size:,}",
            batch,
            shown,
            "yes" if row["fits"] else "NO",
            milliseconds(row["step_seconds"]),
            "" if tokens is None else f"{tokens:,.0f}",
            "" if mfu is None else f"{mfu:.1%}",
            f"{row['exposed_share']:.1%}",
            gibibytes(row["peak_bytes"]),
            gibibytes(row["limit_bytes"]),
            "" if row["days"] is None else f"{row['days']:,.1f}",
            "" if row["cost"] is None else f"{row['cost']:,.0f}",
        )
    return table


def _best_first(entry: tuple[PlanJob, float | None, Row | str]) -> tuple[int, float, int]:
    job, _, row = entry
    if isinstance(row, str):
        return 2, 0.0, job.world_size
    return 0 if row["fits"] else 1, -(row["tokens_per_second"] or 1 / row["step_seconds"]), job.world_size


def _progress() -> Progress:
    columns = SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True), transient=True)


# ---- options


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise _CHECKS.invalid(option, text, "positive whole numbers with commas between", "Write 8,64,512")
    return list(dict.fromkeys(map(int, words)))


def _limits(text: str) -> list[float | None]:
    found: list[float | None] = []
    for word in text.split(","):
        try:
            found.append(None if word.strip() == "none" else float(word))
        except ValueError:
            raise _CHECKS.invalid("--memory-limit", text, "GiB, or none", "Write none,60") from None
        _CHECKS.gibibytes("--memory-limit", found[-1])
    return list(dict.fromkeys(found))


def _check_writable(option: str, path: Path | None) -> None:
    """Whether a file can be written, before minutes of planning. Raises CannotWrite."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(2, "its folder does not exist")
    except OSError as error:
        raise CannotWrite(option, path, error) from error


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CannotWrite(option, path, error) from error
