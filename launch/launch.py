"""``weft launch``: start a training script on this machine or as a Slurm job."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from weft.errors import CannotLaunch
from weft.launch.node import NodeRanks, check_port, run_node
from weft.launch.run_folder import DEFAULT_FOLDER, LaunchRecord, RunFolder
from weft.launch.slurm import SlurmOptions, check_cluster, script_of, submit

Flag = tyro.conf.FlagCreatePairsOff

# CPUs that a GPU gets on Slurm unless something else is said: its rank, its data loader, and threads of NCCL.
_CPUS_PER_GPU = 8


def launch(
    script: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    gpus: int | None = None,
    processes: int | None = None,
    max_restarts: int = 0,
    nodes: int | None = None,
    partition: str | None = None,
    requeue: Annotated[bool, Flag] = False,
    minutes: int = 60,
    stop_seconds: int = 120,
    cpus: int | None = None,
    slurm: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    address: str | None = None,
    node: int = 0,
    port: int = 0,
    logs: Path = DEFAULT_FOLDER,
    dry_run: Annotated[bool, Flag] = False,
) -> None:
    """Start a training script: on this machine, or with --nodes or --partition as a Slurm job.

    One torchrun a node starts the ranks, with the environment that weft needs. A signal to stop (SIGTERM, SIGUSR2,
    Ctrl-C) is passed to them: weft.stopping() then ends the training loop. A second one kills them.

    Args:
        script: a Python file.
        arguments: of the script, after --.
        gpus: ranks on each node, one a GPU. On this machine, all its GPUs by default.
        processes: ranks on each node that use CPUs and gloo, in place of --gpus.
        max_restarts: how often all ranks are started again after one has failed.
        nodes: run as a Slurm job on so many nodes.
        partition: of Slurm; the cluster's default where only --nodes is given.
        requeue: put the job back into the queue when Slurm takes it back or its time is over.
        minutes: of the Slurm job.
        stop_seconds: how long before its end a Slurm job is told to stop; a step and three saves fit in there.
        cpus: of each node of a Slurm job; 8 a GPU, or one a process.
        slurm: another parameter of submitit, as account=physics; can be given again.
        address: host:port of the first of --nodes nodes, to start them by hand and without Slurm.
        node: the number of this node, with --address.
        port: at which the ranks meet; chosen by itself where it is 0.
        logs: folder for what runs print.
        dry_run: print the script for sbatch, or the command for torchrun, and start nothing.
    """
    if not script.is_file():
        raise CannotLaunch(f"{script} is no file", "Name the Python file to run")
    for name, value, least in (
        *(("--gpus", gpus, 1), ("--processes", processes, 1), ("--nodes", nodes, 1), ("--cpus", cpus, 1)),
        *(("--max-restarts", max_restarts, 0), ("--minutes", minutes, 1), ("--stop-seconds", stop_seconds, 0)),
        *(("--node", node, 0), ("--port", port, 0)),
    ):
        if value is not None and value < least:
            raise CannotLaunch(f"{name} is {value}", f"It must be at least {least}")
    if gpus is not None and processes is not None:
        raise CannotLaunch("--gpus and --processes are both given", "Give one: ranks use GPUs, or CPUs")
    on_slurm = address is None and (nodes is not None or partition is not None)
    ranks = NodeRanks(
        str(script.absolute()), arguments, nodes or 1, processes or gpus or 0, bool(processes), max_restarts
    )
    if on_slurm:
        count = cpus or (gpus * _CPUS_PER_GPU if gpus else processes or 1)
        extra = tuple(map(_key_and_value, slurm))
        options = SlurmOptions(partition or "", gpus or 0, count, minutes, stop_seconds, requeue, port, extra)
        _launch_job(ranks, options, logs, dry_run)
        return
    if requeue or slurm or cpus:
        raise CannotLaunch("--requeue, --slurm and --cpus are for Slurm jobs", "Add --partition or --nodes")
    _launch_here(ranks, address or "", node, port, logs, dry_run)


def _launch_job(ranks: NodeRanks, options: SlurmOptions, logs: Path, dry_run: bool) -> None:
    if not ranks.processes:
        raise CannotLaunch("neither --gpus nor --processes is given", "Say how many ranks a node of the job has")
    name = Path(ranks.script).stem
    if dry_run:
        print(script_of(ranks, options, name))
        return
    check_cluster(options.partition)
    folder = RunFolder.new(logs, Path(ranks.script))
    try:
        job = submit(ranks, options, name, folder)
    except CannotLaunch:
        _remove_if_unused(folder)
        raise
    folder.write_launch(LaunchRecord((ranks.script, *ranks.arguments), ranks.nodes, ranks.processes, job=job))
    shown = _relative(folder.path)
    print(f"job {job} is submitted: {ranks.nodes} x {ranks.processes} ranks of {Path(ranks.script).name}")
    print(f"output:    {_relative(folder.job_log(job))}")
    print(f"follow it: weft logs --follow {shown}")
    print(f"state:     weft status {shown}")
    print(f"end it:    weft cancel {shown}")


def _launch_here(ranks: NodeRanks, address: str, node: int, port: int, logs: Path, dry_run: bool) -> None:
    host, _, port_text = address.rpartition(":")
    if address and not (host and port_text.isdecimal()):
        raise CannotLaunch(f"--address is {address}", "It is host:port of the first node")
    if not ranks.processes or not ranks.on_cpu:
        ranks = replace(ranks, processes=_gpus_here(ranks.processes))
    if node >= ranks.nodes:
        raise CannotLaunch(f"--node is {node}, of --nodes {ranks.nodes}", "Nodes are counted from 0")
    endpoint = address or (f"localhost:{port}" if port else "")
    if dry_run:
        where = f"--rdzv-backend c10d --rdzv-endpoint {endpoint}" if endpoint else "--standalone"
        options = f"--nnodes {ranks.nodes} --nproc-per-node {ranks.processes} --max-restarts {ranks.max_restarts}"
        print(f"torchrun {options} {where} {' '.join((ranks.script, *ranks.arguments))}")
        return
    if endpoint and node == 0:
        check_port("", int(endpoint.rpartition(":")[2]))
    folder = RunFolder.new(logs, Path(ranks.script))
    folder.write_launch(
        LaunchRecord(
            (ranks.script, *ranks.arguments), ranks.nodes, ranks.processes, pid=os.getpid(), host=socket.gethostname()
        )
    )
    print(f"weft launch: {ranks.processes} ranks, output of all of them in {_relative(folder.path)}", flush=True)
    state = run_node(ranks, folder, node, endpoint, "weft")
    sys.exit(state.exit_code)


def _gpus_here(wanted: int) -> int:
    """How many ranks run on GPUs of this machine. Raises CannotLaunch."""
    import torch

    there = torch.cuda.device_count()
    if not there:
        raise CannotLaunch(
            "this machine has no GPU that torch can use", "--processes 2 starts two ranks on CPUs (gloo)"
        )
    if wanted > there:
        raise CannotLaunch(f"--gpus is {wanted}, and this machine has {there}", f"Give at most {there}")
    return wanted or there


def _key_and_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CannotLaunch(f"--slurm is {text}", "It is a name and a value, as in --slurm account=physics")
    return key.replace("-", "_"), value


def _relative(path: Path) -> Path:
    """A path as short as it can be typed from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _remove_if_unused(folder: RunFolder) -> None:
    """Remove the folder of a job that was refused; submitit has left its pickle there."""
    for file in folder.path.iterdir():
        if file.suffix in {".pkl", ".sh"}:
            file.unlink()
    if not any(folder.path.iterdir()):
        folder.path.rmdir()
