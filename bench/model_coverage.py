"""How much of other people's training code weft captures, and whether the numbers are eager's, bit for bit.

    python bench/model_coverage.py --family hf --out out/coverage.jsonl  # architectures of Hugging Face, tiny
    python bench/model_coverage.py --family timm  # one model of each family of timm
    python bench/model_coverage.py --family code  # pieces of training code (training_code.py)
    python bench/model_coverage.py --report --out out/coverage.jsonl  # the table of what a file holds
    python bench/model_coverage.py --gradients --family hf timm --out out/gradients.jsonl  # on a GPU, against float64

Every case trains for three calls on a CPU, eagerly and compiled, from the same seeds. What the step returned and the
state that it trained are compared. Each case ends in one of these outcomes:

    equal       captured, the same bits
    different   captured, other bits: a fault
    refused     weft raised an error of its own
    crashed     another exception, or no result within the limits of time and memory: a fault
    not run     the eager step failed, or the library is not installed

One JSON line a case is written as soon as it is known; cases that the file holds already are not run again. Cases run
in worker processes, which are replaced when they die or exceed the limit of time or memory. With ``--gradients`` a case
compares its gradients with float64's instead (``coverage_gradients.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import resource
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage_gradients
import numpy as np
import torch
from coverage_case import Case, shown
from torch.utils._pytree import tree_leaves, tree_map_only

import weft
from weft.errors import WeftError

OUTCOMES = ("equal", "different", "refused", "crashed", "not run")
Row = dict[str, Any]


def cases(family: str) -> dict[str, Case]:
    """All cases of a family by name; each makes a fresh step from fixed seeds."""
    if family == "hf":
        from coverage_hf import hf_cases

        return hf_cases()
    if family == "timm":
        from coverage_timm import timm_cases

        return timm_cases()
    from training_code import code_cases

    return code_cases()


# ---- one case


def run_case(case: Case, begin: Callable[[str], None] = lambda phase: None) -> Row:
    """Train eagerly, then compiled, and compare; see the module's text for the outcomes.

    ``begin`` is told which of the two begins, so that a process that dies can be blamed on the right one.
    """
    begin("eager")
    start = time.perf_counter()
    try:
        expected, _, _ = _train(case, compiled=False)
    except Exception as error:  # noqa: BLE001, whatever a library raises
        return {"outcome": "not run", "error": shown(error)}
    eager = time.perf_counter() - start
    begin("compiled")
    try:
        found, captures, first = _train(case, compiled=True)
    except WeftError as error:
        return {"outcome": "refused", "error": shown(error)}
    except Exception as error:  # noqa: BLE001
        return {"outcome": "crashed", "error": shown(error), "trace": traceback.format_exc()[-3000:]}
    seconds = {
        "eager_s": round(eager, 2),
        "weft_s": round(time.perf_counter() - start - eager, 2),
        "first_s": round(first, 2),
    }
    difference = _difference(expected, found)
    if difference:
        return {"outcome": "different", "error": difference, "captures": captures, **seconds}
    return {"outcome": "equal", "captures": captures, **seconds}


def _train(case: Case, compiled: bool) -> tuple[Any, int, float]:
    """What the step returned and trained, the number of captures, and the seconds of the first call."""
    _seed(0)
    trained = case()
    step = weft.compile(trained.step) if compiled else trained.step
    _seed(1)
    returned, ends = [], [time.perf_counter()]
    for batch in trained.batches:
        returned.append(tree_map_only(torch.Tensor, _copied, step(batch)))
        ends.append(time.perf_counter())
    state = tree_map_only(torch.Tensor, _copied, trained.state())
    captures = len(step.captures) if isinstance(step, weft.CompiledStep) else 0
    return (returned, state), captures, ends[1] - ends[0]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _difference(expected: Any, found: Any) -> str:
    """What differs; empty where all bits are the same."""
    pairs = list(zip(tree_leaves(expected), tree_leaves(found), strict=False))
    if len(tree_leaves(expected)) != len(tree_leaves(found)):
        return f"{len(tree_leaves(found))} values, eager has {len(tree_leaves(expected))}"
    unequal = [at for at, (one, other) in enumerate(pairs) if not _same(one, other)]
    if not unequal:
        return ""
    one, other = pairs[unequal[0]]
    distance = ""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        distance = f", by {(one.double() - other.double()).abs().max().item():.3g}"
    return f"{len(unequal)} of {len(pairs)} values, the first is number {unequal[0]}{distance}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
            )
        )
    return type(one) is type(other) and repr(one) == repr(other)


# ---- all cases


def _worker(connection: Connection, family: str, threads: int, gradients: bool) -> None:
    torch.set_num_threads(threads)
    known, run = cases(family), coverage_gradients.run_case if gradients else run_case
    while (name := connection.recv()) is not None:
        connection.send(run(known[name], connection.send))


class Worker:
    """A process that runs cases one after the other."""

    def __init__(self, family: str, threads: int, gradients: bool) -> None:
        self._connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_worker, args=(other, family, threads, gradients), daemon=True)
        self._process.start()
        other.close()

    def run(self, name: str, limit: float, memory: float) -> tuple[Row, bool]:
        """The row of a case, and whether the process lives.

        A process that is gone, takes over ``limit`` seconds or holds over ``memory`` GiB is ended; the row says which,
        and whether eager training or the compiled step was running.
        """
        phase, end = "start", time.monotonic() + limit
        try:
            self._connection.send(name)
            while time.monotonic() < end and self._resident() < memory:
                if self._connection.poll(0.2):
                    found = self._connection.recv()
                    if not isinstance(found, str):
                        return found, True
                    phase = found
            why = f"no result within {limit:.0f} s" if time.monotonic() >= end else f"more than {memory:g} GiB"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            why = "the process died"
        self._process.kill()
        self._process.join()
        return {"outcome": "crashed" if phase == "compiled" else "not run", "error": f"{why} ({phase})"}, False

    def _resident(self) -> float:
        """Memory of the process, in GiB; 0 where it is gone, which the pipe reports."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * resource.getpagesize() / 2**30

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def measure(family: str, names: list[str], out: Path, options: argparse.Namespace) -> None:
    """Run the named cases of a family, ``options.workers`` at a time, and append their rows to a file."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    writing = threading.Lock()

    def work() -> None:
        worker = None
        while (name := _next(waiting)) is not None:
            worker = worker or Worker(family, options.threads, options.gradients)
            row, alive = worker.run(name, options.limit, options.memory)
            worker = worker if alive else None
            with writing:
                _write({"family": family, "name": name, **row}, out)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _next(waiting: queue.SimpleQueue[str]) -> str | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _write(row: Row, out: Path) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    error = row.get("error", "").partition("\n")[0][:150]
    print(f"{row['outcome']:10} {row['name']}  {error}", flush=True)


def report(rows: list[Row]) -> None:
    """Print the outcomes of each family, the share that was captured, and why others were not."""
    for family in dict.fromkeys(row["family"] for row in rows):
        here = [row for row in rows if row["family"] == family]
        count = Counter(row["outcome"] for row in here)
        ran = len(here) - count["not run"]
        captured = count["equal"] + count["different"]
        print(
            f"\n{family}: {ran} ran, {captured / max(ran, 1):.1%} captured; "
            + ", ".join(f"{count[each]} {each}" for each in OUTCOMES)
        )
        why = Counter(
            (row["outcome"], row["error"].splitlines()[0][:110])
            for row in here
            if row["outcome"] in ("refused", "crashed", "different")
        )
        for (outcome, error), times in why.most_common():
            print(f"  {times:3} {outcome:9} {error}")
        slow = sorted(row["weft_s"] for row in here if "weft_s" in row)
        if slow:
            print(f"  three calls compiled: median {slow[len(slow) // 2]:.1f} s, slowest {slow[-1]:.1f} s")
        first = sorted(row["first_s"] for row in here if "first_s" in row)
        if first:
            print(f"  first call compiled: median {first[len(first) // 2]:.1f} s, slowest {first[-1]:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["hf", "timm", "code"], nargs="*", default=["hf", "timm", "code"])
    parser.add_argument("--names", nargs="*", help="cases to run; a part of the name is enough")
    parser.add_argument("--out", type=Path, default=Path("out/coverage.jsonl"))
    parser.add_argument("--limit", type=float, default=180, help="seconds a case may take")
    parser.add_argument("--memory", type=float, default=6, help="GiB that a worker process may hold")
    parser.add_argument("--threads", type=int, default=1, help="of each worker process")
    parser.add_argument("--workers", type=int, default=1, help="processes that run cases at the same time")
    parser.add_argument("--gradients", action="store_true", help="compare gradients with float64's")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.report:
        for family in options.family:
            wanted = [
                name for name in cases(family) if not options.names or any(part in name for part in options.names)
            ]
            known = {(row["family"], row["name"]) for row in _rows(options.out)} if not options.names else set()
            measure(family, [name for name in wanted if (family, name) not in known], options.out, options)
    report(_rows(options.out))


def _rows(out: Path) -> list[Row]:
    """The newest row of each case."""
    lines = out.read_text().splitlines() if out.exists() else []
    return list({(row["family"], row["name"]): row for row in map(json.loads, lines)}.values())


if __name__ == "__main__":
    main()
