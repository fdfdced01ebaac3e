"""``weft logs``, ``weft status``, ``weft cancel``: look at what ``weft launch`` has started, and end it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from weft.errors import CannotLaunch
from weft.launch import slurm
from weft.launch.run_folder import CANCELLED, DEFAULT_FOLDER, LaunchRecord, RunFolder, find_run, newest_runs

Flag = tyro.conf.FlagCreatePairsOff
Run = Annotated[str | None, tyro.conf.Positional]

_POLL_S = 0.3


def logs(
    run: Run = None,
    /,
    node: int = 0,
    rank: int | None = None,
    follow: Annotated[bool, Flag] = False,
    logs: Path = DEFAULT_FOLDER,
) -> None:
    """Print what a run has printed.

    Args:
        run: its folder, the folder's name or its Slurm job; the newest one by default.
        node: of the run.
        rank: local rank on that node; 0 by default, and on Slurm all that the node's launcher says.
        follow: go on until the run has ended.
        logs: folder of the runs.
    """
    folder = find_run(run, logs)
    launch = folder.launch()
    shown: dict[Path, int] = {}
    while True:
        ended = not _alive(folder, launch)
        files = [folder.job_log(launch.job, node)] if launch.job and rank is None else folder.outputs(node, rank or 0)
        for file in filter(Path.exists, files):
            with open(file, errors="replace") as content:
                content.seek(shown.get(file, 0))
                sys.stdout.write(content.read())
                shown[file] = content.tell()
        sys.stdout.flush()
        if ended or not follow:
            break
        time.sleep(_POLL_S)
    if not shown:
        print(f"node {node} of {folder.path.name} has printed nothing yet: {_state(folder, launch)}", file=sys.stderr)


def status(run: Run = None, /, logs: Path = DEFAULT_FOLDER) -> None:
    """Print the states of runs.

    Args:
        run: its folder, the folder's name or its Slurm job; all by default.
        logs: folder of the runs.
    """
    folders = [find_run(run, logs)] if run is not None else newest_runs(logs)
    if not folders:
        print(f"there are no runs in {logs}")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("run", "job", "ranks", "state", "for", "command"):
        table.add_column(title, no_wrap=title != "command")
    reasons = []
    for folder in folders:
        launch = folder.launch()
        script, *arguments = launch.command
        table.add_row(
            *(folder.path.name, launch.job or "-", f"{launch.nodes} x {launch.processes}", _state(folder, launch)),
            *(_duration(time.time() - launch.started), " ".join((Path(script).name, *arguments))),
        )
        reasons += [f"{folder.path.name}, node {node}: {s.why}" for node, s in folder.states().items() if s.why]
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a program that reads this wants the names whole
    console.print(table)
    if run is not None:
        print("".join(f"{reason}\n" for reason in reasons), end="")


def cancel(run: Annotated[str, tyro.conf.Positional], /, logs: Path = DEFAULT_FOLDER) -> None:
    """End a run. Its ranks are told to stop, as by a signal; it is not requeued.

    Args:
        run: its folder, the folder's name or its Slurm job.
        logs: folder of the runs.
    """
    folder = find_run(run, logs)
    launch = folder.launch()
    if not _alive(folder, launch):
        raise CannotLaunch(f"{folder.path.name} does not run: {_state(folder, launch)}", "There is nothing to end")
    (folder.path / CANCELLED).touch()
    if launch.job:
        slurm.cancel(launch.job)
    elif launch.host != socket.gethostname():
        raise CannotLaunch(f"{folder.path.name} runs on {launch.host}", "Call weft cancel there")
    else:
        os.kill(launch.pid, signal.SIGTERM)
    print(f"{folder.path.name} is told to stop")


def _alive(folder: RunFolder, launch: LaunchRecord) -> bool:
    """Whether a run may still print something."""
    if launch.job:
        return not slurm.has_ended(slurm.job_state(launch.job))
    states = folder.states().values()
    if states and all(state.state != "running" for state in states):
        return False
    return launch.host != socket.gethostname() or _runs(launch)


def _runs(launch: LaunchRecord) -> bool:
    """Whether the process of a run on this machine is there; another one may have its number by now."""
    try:
        arguments = Path(f"/proc/{launch.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"launch" in arguments


def _state(folder: RunFolder, launch: LaunchRecord) -> str:
    """The state of a run: Slurm's word for a job, and what its nodes say."""
    said = ", ".join(dict.fromkeys(state.state for state in folder.states().values()))
    if launch.job:
        state = slurm.job_state(launch.job).lower() or "no longer known to Slurm"
        return f"{state} ({said})" if said and said != state else state
    if _alive(folder, launch):
        return said or "starting"
    return "killed" if said in ("", "running") else said


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"
