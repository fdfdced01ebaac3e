"""Training runs under `weft launch` to which something happens, compared with the uninterrupted run.

    python bench/launch_faults.py restarts --count 20      # SIGKILL of a random rank at a random moment
    python bench/launch_faults.py faults --count 500 --lanes 8   # a seeded random schedule of faults of all kinds
    python bench/launch_faults.py preemptions --count 10   # jobs of a real Slurm, preempted and requeued (needs root)

Each prints a line a run and the count of those whose losses are those of the uninterrupted run, bit for bit. With
--lanes, so many runs go side by side; with --seconds, no fault is planted after that time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW_EXAMPLE = ROOT / "tests" / "launch" / "slow_example.py"
WEFT = [sys.executable, "-m", "weft.launch"]

STEPS, SAVE_EVERY, RANKS = 60, 10, 2
# Seconds without a word and without a step after which a launch counts as hanging. A rank that is stopped is given up
# after 16 s, and killed 10 s later by torchrun (30 s in torch 2.11).
HANGS_S = 150.0
FAULTS_AN_ATTEMPT = 3
KINDS = ("kill", "store", "term", "stop", "raise", "full", "slow")


def script(folder: Path) -> list[str]:
    """The script and its arguments."""
    arguments = ["--", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--folder", str(folder)]
    return [str(SLOW_EXAMPLE), "--processes", str(RANKS), *arguments]


def start(
    folder: Path, restarts: int, faults: str = "", until: float = math.inf, a_step: float = 0.02
) -> subprocess.Popen[bytes]:
    """Launch the run whose checkpoints are in ``folder``, with faults until that time of the monotonic clock."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SECONDS_A_STEP": str(a_step)}
    environment |= {"FAULTS": faults, "FAULTS_UNTIL": str(until)}
    script_, *options = script(folder)
    command = [
        *WEFT,
        "launch",
        script_,
        "--max-restarts",
        str(restarts),
        "--logs",
        str(folder.with_suffix(".runs")),
        *options,
    ]
    with open(folder.with_suffix(".out"), "ab") as out:
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=out)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each step that the run took, in order."""
    path = folder.with_suffix(".jsonl")
    text = path.read_text() if path.exists() else ""
    # A process that is killed, or whose disk is full, may leave half a line, on which the next one goes on.
    rows = re.findall(r'{"step": (\d+), "loss": ([-+.\de]+)}', text)
    return [(int(step), float(loss)) for step, loss in rows]


def reference(scratch: Path) -> dict[int, float]:
    """The losses of the uninterrupted run."""
    folder = scratch / "uninterrupted"
    assert start(folder, 0, a_step=0.0).wait(300) == 0, folder.with_suffix(".out").read_text()
    return dict(losses(folder))


def wrong_losses(found: list[tuple[int, float]], wanted: dict[int, float]) -> str:
    """What differs from the uninterrupted run; "" for nothing."""
    if missing := wanted.keys() - {step for step, _ in found}:
        return f"no loss of steps {sorted(missing)[:5]}"
    wrong = [step for step, loss in found if wanted[step] != loss]
    return f"other losses at steps {wrong[:5]}" if wrong else ""


def children(pid: int) -> list[int]:
    """The ranks that a launcher has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[3] == entry.name:
                    found.append(int(entry.name))
    return sorted(found)


def finish(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for a launch. Returns what is wrong; a launch that hangs is ended, and its ranks print where they are."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        files = [path for path in (folder.with_suffix(".out"), folder.with_suffix(".jsonl")) if path.exists()]
        if (now := sum(path.stat().st_size for path in files)) != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > HANGS_S:
            for number in (signal.SIGABRT, signal.SIGKILL):
                for pid in children(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, number)
                time.sleep(2.0)
            process.kill()
            process.wait()
            return "hangs"
    return ""


def restarts(options: argparse.Namespace, scratch: Path) -> int:
    """SIGKILL of a random rank at a random moment of the training, with one restart."""
    wanted = reference(scratch)

    def run(number: int) -> bool:
        draw = random.Random(f"{options.seed} {number}")
        folder = scratch / f"restart{number}"
        process = start(folder, 1)
        until = time.monotonic() + HANGS_S
        while not losses(folder) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 0.02 * STEPS))
        victim = draw.randrange(RANKS)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(children(process.pid)[victim], signal.SIGKILL)
        at = len(losses(folder))
        wrong = finish(process, folder) or wrong_losses(losses(folder), wanted)
        if not wrong and process.returncode:
            wrong = f"status {process.returncode}"
        print(f"{number}: rank {victim} killed after step {at}: {wrong or 'equal bit for bit'}", flush=True)
        return not wrong

    with ThreadPoolExecutor(options.lanes) as lanes:
        good = sum(lanes.map(run, range(options.count)))
    print(f"restarts after SIGKILL that end with the bits of the uninterrupted run: {good} of {options.count}")
    return options.count - good


@dataclass
class _Outcome:
    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    runs: int = 0

    def __str__(self) -> str:
        hangs = sum("hangs" in each for each in self.wrong)
        return (
            f"{sum(self.happened.values())} random faults in {self.runs} runs, {dict(self.happened)}: hangs {hangs}, "
            f"wrong numbers {len(self.wrong) - hangs}"
        )


def faults(options: argparse.Namespace, scratch: Path) -> int:
    """Runs with faults in each attempt, of which the first may be the last, until enough have happened."""
    wanted, outcome, lock = reference(scratch), _Outcome(), threading.Lock()
    numbers, until = itertools.count(), time.monotonic() + options.seconds

    def lane(_: int) -> None:
        while sum(outcome.happened.values()) < options.count and time.monotonic() < until:
            with lock:
                number = next(numbers)
            folder = scratch / f"faults{number}"
            wrong, happened = _faulty_run(folder, random.Random(f"{options.seed} {number}"), wanted, until)
            with lock:
                outcome.runs += 1
                outcome.happened.update(happened)
                if wrong:
                    outcome.wrong.append(f"run {number}: {wrong}")
                    print(_last_words(folder))
                print(f"run {number}: {wrong or 'equal'}; {outcome}", flush=True)
            shutil.rmtree(folder.with_suffix(".runs"), ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(options.lanes) as lanes:
        list(lanes.map(lane, range(options.lanes)))
    print(outcome)
    return len(outcome.wrong)


def _faulty_run(folder: Path, draw: random.Random, wanted: dict[int, float], until: float) -> tuple[str, Counter[str]]:
    """One run, launched again while it was told to stop or has no restarts left. Returns what is wrong, and the faults
    that happened."""
    for launches in range(12):
        # The last launch has no faults, so that every run can end.
        more = launches < 11 and time.monotonic() < until
        plan = [_fault(draw, attempt) for attempt in range(4) for _ in range(FAULTS_AN_ATTEMPT)] if more else []
        wrong = finish(start(folder, 3, ",".join(plan), until), folder)
        if wrong or any(step == STEPS for step, _ in losses(folder)):
            break
    happened: Counter[str] = Counter()
    for log in folder.with_suffix(".runs").rglob("stdout.log"):
        happened.update(re.findall(r"^planted: (\w+)", log.read_text(errors="replace"), re.MULTILINE))
    return wrong or wrong_losses(losses(folder), wanted), happened


def _fault(draw: random.Random, attempt: int) -> str:
    kind = draw.choice(KINDS)
    rank = 0 if kind == "store" else draw.randrange(RANKS)  # rank 0 holds the store
    return f"{rank}:{draw.randrange(STEPS // 2)}:{attempt}:{kind}"


def _last_words(folder: Path) -> str:
    """The end of what a launch and its ranks have printed."""
    newest = sorted(folder.with_suffix(".runs").rglob("stderr.log"), key=lambda path: path.stat().st_mtime)[-RANKS:]
    texts = [path.read_text(errors="replace")[-4000:] for path in (folder.with_suffix(".out"), *newest)]
    return "\n-----\n".join(texts)


def preemptions(options: argparse.Namespace, scratch: Path) -> int:
    """Jobs of a real Slurm: preempted by a job of a better partition at a random step, requeued, run to the end."""
    sys.path.insert(0, str(ROOT / "tests"))
    from slurm_cluster import missing, slurm_cluster

    if reason := missing():
        sys.exit(reason)
    wanted, draw, good, count = reference(scratch), random.Random(options.seed), 0, options.count
    os.environ.update({"OMP_NUM_THREADS": "1", "SECONDS_A_STEP": "0.05", "CUDA_VISIBLE_DEVICES": ""})
    for user_signal in (True, False):  # many clusters send SIGTERM only
        cluster = scratch / f"slurm{int(user_signal)}"
        cluster.mkdir()
        with slurm_cluster(cluster, user_signal=user_signal) as environment:
            os.environ.update(environment)
            for number in range(count // 2 if user_signal else count - count // 2):
                folder = scratch / f"job{int(user_signal)}_{number}"
                wrong, seconds = _preempted(folder, draw, wanted)
                good += not wrong
                kind = "SIGUSR2" if user_signal else "SIGTERM"
                print(f"{kind} {number}: {wrong or 'equal'}; ranks gone {seconds:.1f} s after the save", flush=True)
    print(f"preempted and requeued Slurm jobs without a lost step, equal bit for bit: {good} of {count}")
    return count - good


def _preempted(folder: Path, draw: random.Random, wanted: dict[int, float]) -> tuple[str, float]:
    script_, *options = script(folder)
    logs = str(folder.with_suffix(".runs"))
    command = [*WEFT, "launch", script_, "--partition", "low", "--requeue", "--logs", logs, *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = said.split()[1]
    at, until = draw.randrange(2, STEPS - 20), time.monotonic() + HANGS_S
    while len(losses(folder)) < at and time.monotonic() < until:
        time.sleep(0.02)
    high = subprocess.run(
        ["sbatch", "--parsable", "-p", "high", "-n2", "-o", "/dev/null", "--wrap", "true"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout.strip()
    saved = 0.0
    while time.monotonic() < until:
        ranks = subprocess.run(
            ["pgrep", "-f", f"slow_example.py.*{folder}"], capture_output=True, text=True, check=False
        )
        newest = max(
            (
                (p / "weft.manifest.json").stat().st_mtime
                for p in folder.glob("step_*")
                if (p / "weft.manifest.json").exists() and not p.name.endswith("partial")
            ),
            default=0.0,
        )
        saved = max(saved, newest)
        if not ranks.stdout.strip():
            break
        time.sleep(0.05)
    gone = time.time() - saved
    states = ["squeue", "-h", "-j", f"{job},{high}", "-o", "%i %T"]
    while time.monotonic() < until:
        shown = subprocess.run(states, capture_output=True, text=True, check=False).stdout
        if f"{job} PENDING" in shown and high not in shown.replace(f"{job} ", ""):
            break
        time.sleep(0.1)
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=False, capture_output=True)
    while time.monotonic() < until and not any(step == STEPS for step, _ in losses(folder)):
        time.sleep(0.1)
    found = losses(folder)
    wrong = wrong_losses(found, wanted)
    if not wrong and len(found) != STEPS:
        wrong = f"{len(found) - STEPS} steps were taken twice"
    subprocess.run(["scancel", job], check=False)
    return wrong, gone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["restarts", "faults", "preemptions"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of planting faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft") as scratch:
        sys.exit(bool(globals()[options.what](options, Path(scratch))))


if __name__ == "__main__":
    main()
