"""A real Slurm of one node, started for a test in about a second: slurmctld, slurmd and munged of Debian's packages.

It needs root, no systemd and no control groups. Everything it writes is in one folder; the clients find it by
SLURM_CONF. `apt-get install slurm-wlm slurm-client munge` installs the packages (`make slurm-test` does).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CONF = """
ClusterName=one
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
ReturnToService=2
KillWait=30
JobRequeue=1
NodeName={host} CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
CGROUP = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\nConstrainSwapSpace=no\n"
DAEMONS = {"slurmctld": "slurmctld.pid", "slurmd": "slurmd.pid", "munged": "munged.pid"}


def missing() -> str:
    """What is missing to start a cluster here; "" for nothing."""
    absent = [name for name in (*DAEMONS, "sbatch") if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (make slurm-test installs Slurm)"
    return "" if os.geteuid() == 0 else "starting Slurm needs root"


@contextlib.contextmanager
def slurm_cluster(folder: Path, *, user_signal: bool = True) -> Iterator[dict[str, str]]:
    """Start the cluster. Yields the environment variables by which Slurm's clients find it.

    Args:
        folder: with a short path, since it holds a socket.
        user_signal: whether a preempted job first gets the signal that it asked for. Many clusters send SIGTERM only.
    """
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    conf = folder / "slurm.conf"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 - 512
    extra = "SlurmctldParameters=preempt_send_user_signal" if user_signal else ""
    host = socket.gethostname().partition(".")[0]
    cpus = os.cpu_count()
    conf.write_text(
        CONF.format(host=host, folder=folder, cpus=cpus, memory=memory, ports=_free_ports(), user_signal=extra)
    )
    (folder / "cgroup.conf").write_text(CGROUP)
    environment = {"SLURM_CONF": str(conf)}
    munge = [f"--key-file={folder}/key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed", "--force"]
    try:
        _start("munged", *munge, cwd=folder)
        _start("slurmctld", "-f", str(conf), cwd=folder, environment=environment)
        _start("slurmd", "-f", str(conf), cwd=folder, environment=environment)
        _wait_until_idle(environment)
        yield environment
    finally:
        _stop(folder)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _start(name: str, *arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> None:
    with open(cwd / f"{name}.out", "w") as out:
        subprocess.run(
            [_program(name) or name, *arguments],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            check=True,
            timeout=30,
        )


def _wait_until_idle(environment: dict[str, str]) -> None:
    until = time.monotonic() + 30
    state = ""
    while time.monotonic() < until:
        shown = subprocess.run(
            ["sinfo", "-h", "-o", "%t"], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        state = shown.stdout + shown.stderr
        if shown.stdout.split()[:1] == ["idle"]:
            return
        time.sleep(0.1)
    raise RuntimeError(f"Slurm did not start: {state}")


def _stop(folder: Path) -> None:
    """End the daemons, the steps that slurmd has started, and the processes of jobs that they leave behind."""
    conf = f"SLURM_CONF={folder}/slurm.conf".encode()
    daemons = [pid for file in DAEMONS.values() if (pid := _pid_in(folder / file))]
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Daemons and steps name the folder on their command line or in their environment; slurmstepd has neither before
        # its first job, but is a child of slurmd.
        started = {*daemons, *_of_this_cluster(conf, str(folder).encode())}
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + 10
        while any(map(_runs, started)) and time.monotonic() < until:
            time.sleep(0.02)


def _of_this_cluster(conf: bytes, folder: bytes) -> set[int]:
    found: dict[int, tuple[int, bool]] = {}  # by process: its parent, and whether it names the cluster
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                slurm = Path(os.fsdecode(arguments[0])).name.partition(":")[0].startswith(("slurm", "munged"))
                named = conf in (entry / "environ").read_bytes().split(b"\0")
                named |= slurm and any(folder in each for each in arguments)
                found[int(entry.name)] = parent, named
    mine = {pid for pid, (_, named) in found.items() if named}
    while more := {pid for pid, (parent, _) in found.items() if parent in mine} - mine:
        mine |= more
    return mine


def _pid_in(file: Path) -> int:
    """0 where the file has none."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0


def _runs(pid: int) -> bool:
    """Whether a process has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    # python tests/slurm_cluster.py FOLDER: a cluster until Enter or SIGTERM, to try things on.
    with slurm_cluster(Path(sys.argv[1])) as found:
        print(*(f"export {name}={value}" for name, value in found.items()), flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            time.sleep(1)
