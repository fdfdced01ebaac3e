"""The folders in which ``weft launch`` keeps what it started: one a run, with its description, states and logs.

weft_runs/20261123-211530_train/
    launch.json                       what was started, and where
    node0.json                        the state of the first node
    node0/<torchrun's folder>/attempt_0/1/stdout.log    what local rank 1 printed before the first restart
    1234_0_log.out                    what the first node of Slurm job 1234 printed
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import CannotLaunch

DEFAULT_FOLDER = Path("weft_runs")

CANCELLED = "cancelled"
"""Name of the file that says that a run is not to be requeued."""


@dataclass(frozen=True)
class LaunchRecord:
    """What was started.

    Attributes:
        command: the script and its arguments.
        processes: ranks a node.
        job: the number of the Slurm job; "" for a run on this machine.
        pid: the process of ``weft launch``, for a run on this machine.
        host: where that process runs.
        started: seconds since 1970.
    """

    command: tuple[str, ...]
    nodes: int
    processes: int
    job: str = ""
    pid: int = 0
    host: str = ""
    started: float = field(default_factory=time.time)


@dataclass(frozen=True)
class NodeState:
    """What became of one node.

    Attributes:
        state: running, finished, failed, stopped (after a signal) or requeued.
        exit_code: of the node's processes; None while they run.
        why: the first failure, in words.
        changed: seconds since 1970.
    """

    state: str
    exit_code: int | None = None
    why: str = ""
    changed: float = field(default_factory=time.time)


class RunFolder:
    """The folder of one run, at ``path``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def new(cls, parent: Path, script: Path) -> RunFolder:
        """Make the folder of a new run. Raises CannotLaunch where it cannot be written."""
        if parent.exists() and not parent.is_dir():
            raise CannotLaunch(f"{parent} is a file", "Name another folder with --logs")
        name = f"{time.strftime('%Y%m%d-%H%M%S')}_{script.stem}"
        for number in range(1, 1000):
            path = parent / (name if number == 1 else f"{name}_{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise CannotLaunch(
                    f"{path} cannot be made: {error.strerror}", "Name another folder with --logs"
                ) from error
            return cls(path)
        raise CannotLaunch(f"{parent} has a thousand runs of this second", "Try again")

    def logs_of(self, node: int) -> Path:
        """Where torchrun writes what the ranks of a node print."""
        return self.path / f"node{node}"

    def write_launch(self, launch: LaunchRecord) -> None:
        """Write down what was started."""
        _write(self.path / "launch.json", asdict(launch))

    def launch(self) -> LaunchRecord:
        """What was started. Raises CannotLaunch where the folder is not one of a run."""
        try:
            content: dict[str, Any] = json.loads((self.path / "launch.json").read_text())
            content["command"] = tuple(content["command"])
            return LaunchRecord(**content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CannotLaunch(f"{self.path} holds no run of weft launch", "Name the folder of a run") from error

    def write_state(self, node: int, state: NodeState) -> None:
        """Write down what becomes of a node."""
        _write(self.path / f"node{node}.json", asdict(state))

    def states(self) -> dict[int, NodeState]:
        """The states of the nodes that have begun, by their number."""
        found = {}
        for path in self.path.glob("node*.json"):
            number = path.stem.removeprefix("node")
            if number.isdecimal():
                found[int(number)] = NodeState(**json.loads(path.read_text()))
        return dict(sorted(found.items()))

    def outputs(self, node: int, local_rank: int) -> list[Path]:
        """The files of what a rank has printed in its last attempt: standard output, then errors."""
        attempts = [path for path in self.logs_of(node).glob(f"*/attempt_*/{local_rank}") if path.is_dir()]
        if not attempts:
            return []
        newest = max(attempts, key=lambda path: (path.stat().st_mtime_ns, path))
        return [path for name in ("stdout.log", "stderr.log") if (path := newest / name).exists()]

    def job_log(self, job: str, node: int = 0) -> Path:
        """Where submitit has Slurm write what the launcher on a node prints, rank 0's output included."""
        return self.path / f"{job}_{node}_log.out"


def newest_runs(parent: Path) -> list[RunFolder]:
    """The runs below ``parent``, the newest first."""
    paths = [path.parent for path in parent.glob("*/launch.json")] if parent.is_dir() else []
    return [RunFolder(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def find_run(run: str | None, parent: Path) -> RunFolder:
    """A run by its folder, the folder's name or its Slurm job; the newest one where ``run`` is None.

    Raises:
        CannotLaunch: there is no such run.
    """
    if run is not None and (Path(run) / "launch.json").exists():
        return RunFolder(run)
    known = newest_runs(parent)
    if run is None and known:
        return known[0]
    for folder in known:
        if run in (folder.path.name, folder.launch().job):
            return folder
    what = f"there is no run {run} in {parent}" if run is not None else f"there are no runs in {parent}"
    raise CannotLaunch(what, f"Runs there: {', '.join(folder.path.name for folder in known[:10]) or 'none'}")


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that others may read at any moment."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)
