"""One run of a script for ``weft plan``: a number of ranks and a batch, and all predictions that are asked for there.

Runs of a sweep are processes of their own, each with one fake world. They return the numbers of the predictions' JSON.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from weft.compile import CompiledStep
from weft.errors import WeftError
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.launch.captured_steps import CapturedSteps, NotKept
from weft.launch.script_inputs import ScriptInputs
from weft.launch.script_run import Script, prepare, run_to_step
from weft.plan.batch import with_batch
from weft.plan.changes import with_changes
from weft.plan.plan import StepPlanner
from weft.plan.prediction import Prediction

# Nodes up to which a step is planned again for each change without being asked. A choice: Llama 8B has 7,000.
_LARGE = 10_000

Report = Callable[[str], None]


@dataclass(frozen=True)
class PlanJob:
    """A run of the script.

    Attributes:
        script: and the step of it.
        world_size, rank: of the fake world.
        cluster: a name, or the path of a description.
        batch: first size of the step's arguments; None as the script has it.
        limits: GiB of memory; None for the default.
        changes: whether to say what would change it.
        plans_again: whether to plan it again for that; "auto" does for steps that are planned fast.
        price: per GPU-hour.
        tokens: of the whole run.
    """

    script: Script
    world_size: int
    rank: int
    cluster: str
    batch: int | None
    limits: tuple[float | None, ...]
    changes: bool
    plans_again: Literal["auto", "yes", "no"]
    price: float | None
    tokens: float | None


def run_job(job: PlanJob, report: Report) -> list[Prediction]:
    """The predictions of a job, one for each limit. ``report`` is called with what comes next.

    Raises:
        WeftError: of the script, or of the plan.
    """
    cluster = load_cluster(job.cluster)
    ranks_of_host = min(cluster.gpus_per_node // cluster.hosts_per_node, job.world_size)
    steps = CapturedSteps(job.script, job.world_size, job.rank, ranks_of_host)
    with contextlib.suppress(NotKept), steps.restored((job.batch,)) as planner:
        if planner is not None:
            return _predictions(job, planner, cluster, report)
    found: list[Prediction] = []
    inputs = ScriptInputs()
    recording = contextlib.ExitStack()

    def reached(step: CompiledStep[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        report("capturing the step")
        if job.batch is not None:
            args, kwargs = with_batch(args, kwargs, job.batch)
        planner = StepPlanner(step, args, kwargs)
        recording.close()
        steps.store(planner, (job.batch,), inputs)
        planner.rebatched = functools.partial(rebatched, planner.rebatched)
        found.extend(_predictions(job, planner, cluster, report))

    def rebatched(capture: Callable[[int], StepPlanner], batch: int) -> StepPlanner:
        with inputs.recorded():
            planner = capture(batch)
        steps.store(planner, (job.batch, batch), inputs)
        return planner

    report("running the script")
    prepare()
    with recording:
        recording.enter_context(inputs.recorded())
        run_to_step(job.script, job.world_size, job.rank, ranks_of_host, reached)
    return found


def _predictions(job: PlanJob, planner: StepPlanner, cluster: Cluster, report: Report) -> list[Prediction]:
    """The predictions of a captured step, in its fake world."""
    found = []
    for limit in job.limits:
        report("planning" if limit is None else f"planning within {limit:g} GiB")
        prediction = planner.predict(cluster, limit)
        if job.changes:
            in_bytes = None if limit is None else int(limit * 2**30)
            again = job.plans_again == "yes" or (job.plans_again == "auto" and planner.size <= _LARGE)
            say = lambda name: report(f"with {name}")
            prediction = with_changes(planner, prediction, cluster, in_bytes, say, plans_again=again)
        found.append(replace(prediction, price=job.price, budget_tokens=job.tokens))
    return found


Row = dict[str, Any]


def run_jobs(
    jobs: list[PlanJob], processes: int, report: Callable[[int, str], None]
) -> Iterator[tuple[int, list[Row] | str]]:
    """Run jobs in processes of their own; yields the number of each as it ends, with the numbers of its predictions or
    the text of the error. ``report`` is called with the number of a job and what it does.

    Processes that are running when the caller stops, or is interrupted, are ended.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, Any] = {}
    messages = context.Queue()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                number, job = waiting.pop()
                running[number] = context.Process(target=_in_process, args=(number, job, messages), daemon=True)
                running[number].start()
            try:
                number, kind, content = messages.get(timeout=1.0)
            except queue.Empty:
                for number in [number for number, process in running.items() if process.exitcode is not None]:
                    code = running.pop(number).exitcode
                    yield number, f"the process ended with code {code}, before it had a plan"
                continue
            if kind == "doing":
                report(number, content)
            elif number in running:
                running.pop(number).join()
                yield number, content
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()
        messages.close()
        messages.cancel_join_thread()


def _in_process(number: int, job: PlanJob, messages: Any) -> None:
    torch.set_num_threads(1)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            rows = [_small(found) for found in run_job(job, lambda what: messages.put((number, "doing", what)))]
            messages.put((number, "done", rows))
    except WeftError as error:
        messages.put((number, "failed", str(error)))
    except Exception as error:  # noqa: BLE001 - one row of a table says so, and the others go on
        messages.put((number, "failed", f"{type(error).__name__}: {error}"))


def _small(found: Prediction) -> Row:
    """The numbers of a prediction without what only a page shows."""
    return replace(found, timeline=[]).to_dict()
