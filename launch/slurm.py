"""Runs as Slurm jobs: one sbatch script through submitit, one launcher a node, requeued after a preemption."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import CannotLaunch
from weft.launch.node import NodeRanks, check_port, run_node
from weft.launch.run_folder import CANCELLED, NodeState, RunFolder

_FINAL = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
"""States of Slurm jobs that have ended."""


@dataclass(frozen=True)
class SlurmOptions:
    """What is asked of Slurm.

    Attributes:
        partition: "" for the cluster's default.
        gpus: on each node; 0 for ranks on CPUs.
        cpus: on each node.
        minutes: the longest that the job may run.
        stop_seconds: how long before its end the job is told to stop: a step, a save, and a reserve.
        requeue: put the job back into the queue when it was told to stop.
        port: of the rendezvous; 0: one that follows from the number of the job, or any free one of a single node.
        extra: more parameters by submitit's names for them, as ``account``.
    """

    partition: str
    gpus: int
    cpus: int
    minutes: int
    stop_seconds: int
    requeue: bool
    port: int
    extra: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SlurmNode:
    """What runs once on each node of a job: torchrun's agent, and afterwards the requeueing. submitit pickles it."""

    ranks: NodeRanks
    folder: str
    requeue: bool
    port: int

    def __call__(self) -> str:
        """Run the node's ranks.

        Returns:
            What became of them.

        Raises:
            SystemExit: a rank has failed, for good.
        """
        from submitit import JobEnvironment

        job, node = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_NODEID"])
        # submitit's handlers save and requeue from within a signal handler of one task, and ignore SIGTERM.
        folder, first = RunFolder(self.folder), JobEnvironment().hostnames[0]
        # Nodes agree on a port without a message. One node alone lets torchrun bind a free one: jobs cannot collide.
        port = self.port or (20_000 + int(job) % 10_000 if self.ranks.nodes > 1 else 0)
        endpoint = f"{first}:{port}" if port else ""
        if port and node == 0:
            try:
                check_port("", port)
            except CannotLaunch as error:
                folder.write_state(0, NodeState("failed", 1, str(error)))
                sys.exit(f"weft launch: {error}")
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        state = run_node(self.ranks, folder, node, endpoint, f"{job}.{restart}")
        if state.state == "stopped" and self.requeue and node == 0 and _may_requeue(folder, job):
            state = NodeState("requeued", state.exit_code)
            folder.write_state(0, state)
            _requeue(job)
        if state.exit_code and state.state == "failed":
            sys.exit(state.exit_code)
        return state.state


def _may_requeue(folder: RunFolder, job: str) -> bool:
    """Whether a job that was told to stop still counts as running, and was not cancelled."""
    return not (folder.path / CANCELLED).exists() and job_state(job) in {"RUNNING", "PREEMPTED"}


def _requeue(job: str) -> None:
    """Put this job back into the queue. Slurm then ends what is left of it."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # The two minutes begin when the job has ended, so only a process outside of it can shorten them.
    print(
        f"weft launch: requeueing job {job}. Slurm starts it in two minutes or later; sooner with\n"
        f"    scontrol update jobid={job} starttime=now",
        flush=True,
    )
    subprocess.run(["scontrol", "requeue", job], check=True)


# ---- submission


def script_of(ranks: NodeRanks, options: SlurmOptions, name: str) -> str:
    """The sbatch script of a run, which nobody submits. Raises CannotLaunch."""
    with tempfile.TemporaryDirectory() as folder:
        executor = _executor(Path(folder), ranks, options, name)
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
        return text.replace(folder, "RUN_FOLDER")


def submit(ranks: NodeRanks, options: SlurmOptions, name: str, folder: RunFolder) -> str:
    """Submit a run.

    Returns:
        The number of its job.

    Raises:
        CannotLaunch: Slurm refuses it.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _executor(folder.path, ranks, options, name)
    try:
        job = executor.submit(SlurmNode(ranks, str(folder.path), options.requeue, options.port))
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise CannotLaunch(
            f"sbatch refuses the job: {said}", "`--dry-run` prints the script that it was given"
        ) from error
    return str(job.job_id)


def check_cluster(partition: str) -> None:
    """Raise CannotLaunch where Slurm is missing, does not answer or has no such partition."""
    for program in ("sbatch", "srun", "scontrol", "sinfo"):
        if shutil.which(program) is None:
            raise CannotLaunch(
                f"{program} is not in PATH: this machine is no login node of a Slurm cluster",
                "Start it on one, or leave --nodes and --partition out to run here",
            )
    listed = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise CannotLaunch(f"Slurm does not answer: {listed.stderr.strip()}", "Ask whoever runs the cluster")
    known = sorted(set(listed.stdout.split()))
    if partition and partition not in known:
        raise CannotLaunch(f"there is no partition {partition}", f"Partitions: {', '.join(known)}")


def _executor(folder: Path, ranks: NodeRanks, options: SlurmOptions, name: str) -> Any:
    """submitit's executor, which knows how sbatch scripts are written."""
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise CannotLaunch("submitit is not installed", "pip install 'weft[slurm]'") from error

    class Executor(SlurmExecutor):
        """A script can be written where there is no Slurm."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    parameters: dict[str, Any] = {
        "job_name": name,
        "nodes": ranks.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": options.cpus,
        "time": options.minutes,
        "signal_delay_s": options.stop_seconds,
        "stderr_to_stdout": True,
        **({"partition": options.partition} if options.partition else {}),
        **({"gpus_per_node": options.gpus} if options.gpus else {}),
    }
    if options.requeue:
        parameters["additional_parameters"] = {"requeue": True}
    executor = Executor(folder)
    try:
        executor.update_parameters(**parameters)
        executor.update_parameters(**{key: _value(text) for key, text in options.extra})
    except (ValueError, TypeError) as error:
        raise CannotLaunch(f"submitit does not take this: {error}", "Correct the options named by --slurm") from error
    return executor


def _value(text: str) -> Any:
    """A value of the command line as submitit wants it."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


# ---- jobs


def job_state(job: str) -> str:
    """The state of a job in Slurm's words, without what stands behind it; "" where Slurm no longer knows it."""
    shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True, check=False)
    for word in shown.stdout.split():
        if word.startswith("JobState="):
            return word.removeprefix("JobState=")
    if shutil.which("sacct") is None:
        return ""
    accounted = subprocess.run(
        ["sacct", "-n", "-X", "-P", "-o", "State", "-j", job], capture_output=True, text=True, check=False
    )
    return (accounted.stdout.split() or [""])[0]


def has_ended(state: str) -> bool:
    """Whether a state of :func:`job_state` is that of a job that will not run again."""
    return state in _FINAL or not state


def cancel(job: str) -> None:
    """Cancel a job. Raises CannotLaunch where Slurm refuses."""
    done = subprocess.run(["scancel", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotLaunch(f"scancel refuses job {job}: {done.stderr.strip()}", "It may have ended long ago")
