"""``weft calibrate``: measure this machine, and write its description."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from weft.errors import CannotWrite, InvalidEnvironment
from weft.inductor.cost.calibrate import FULL, TINY, Calibration
from weft.inductor.cost.calibrate import calibrate as measure
from weft.inductor.cost.cluster import Cluster, calibrated_folder, save_cluster


def calibrate(out: Path | None = None, scale: Literal["full", "tiny"] | None = None) -> None:
    """Measure this machine, and write its description as a TOML file, which plans then go by.

    Alone it measures one GPU. To measure what joins the GPUs, start it on all of them:
    torchrun --nproc-per-node gpu -m weft.launch calibrate

    Args:
        out: The file to write; one below WEFT_CACHE_DIR, where weft finds it by itself, if none is named.
        scale: How much to measure; full on GPUs and tiny on CPUs if nothing is said.
    """
    if out is not None and out.is_dir():  # said before minutes of measurements
        raise CannotWrite("--out", out, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    rank, local_rank = _number("RANK"), _number("LOCAL_RANK")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    chosen = {"full": FULL, "tiny": TINY, None: FULL if on_gpu else TINY}[scale]
    with _process_group(device):
        result = measure(device, chosen)
        path = out or calibrated_folder() / f"{result.cluster.name}.toml"
        if local_rank == 0:  # on every host, so that all find the same
            try:
                save_cluster(result.cluster, path, _comment(result))
            except OSError as error:
                raise CannotWrite("--out", path, error) from error
        if rank == 0:
            show(result, Console())
            print(f"written to {path}")


def _number(variable: str) -> int:
    """A number of the launcher's environment, 0 where it is not set. Raises InvalidEnvironment."""
    value = os.environ.get(variable, "0")
    if not value.isdecimal():
        raise InvalidEnvironment(variable, value, "a whole number")
    return int(value)


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """The default group of what torchrun started, for the length of a block; none where this process is alone."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise InvalidEnvironment(name, os.environ.get(name), "that of the job")
    _number("WORLD_SIZE")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _comment(result: Calibration) -> str:
    """What stands on top of the file: what is measured in it, and what is not."""
    names = list(dict.fromkeys(transport.name for transport, _ in result.transports))
    what = ["[gpu]", *(["[node]"] if names else []), *(["[network]"] if result.network else []), *names]
    rest = f"the rest is that of {result.base.name}" if result.base else "there is nothing else in it"
    return f"Written by `weft calibrate`, torch {torch.__version__}.\nMeasured: {', '.join(what)}; {rest}."


def show(result: Calibration, console: Console) -> None:
    """Print what was measured, beside what the shipped description of the same GPU says."""
    console.print(_gpu_table(result.cluster, result.base))
    if result.transports:
        console.print(_transport_table(result))
    else:
        console.print("What joins GPUs is measured where torchrun starts this on all of them: weft calibrate --help")
    if result.network and result.cluster.network is not None:
        network = result.cluster.network
        console.print(f"between nodes: {network.bandwidth / 1e9:.3g} GB/s a GPU, {network.latency * 1e6:.3g} us a hop")


def _gpu_table(cluster: Cluster, base: Cluster | None) -> Table:
    table = Table("", title=f"{cluster.gpu.name}, {cluster.gpus_per_node} a node")
    for name in ("measured", *([base.name] if base else [])):
        table.add_column(name, justify="right")
    known = [cluster.gpu, *([base.gpu] if base else [])]
    table.add_row("copy, GB/s", *(f"{gpu.copy_bandwidth / 1e9:.4g}" for gpu in known))
    for dtype in cluster.gpu.matmul:
        rates = (gpu.matmul.get(dtype) for gpu in known)
        table.add_row(f"matmul {dtype}, TFLOP/s", *("-" if rate is None else f"{rate / 1e12:.3g}" for rate in rates))
    table.add_row("attention forward, TFLOP/s", *(f"{gpu.attention_forward / 1e12:.3g}" for gpu in known))
    table.add_row("attention backward, TFLOP/s", *(f"{gpu.attention_backward / 1e12:.3g}" for gpu in known))
    table.add_row("least kernel, us", *(f"{gpu.launch_latency * 1e6:.3g}" for gpu in known))
    return table


def _transport_table(result: Calibration) -> Table:
    """``slows``: the interference; ``off``: the largest relative error of the fitted times."""
    table = Table("", title="collectives")
    for name in ("GB/s", "latency us", "us a member", "slows", "off"):
        table.add_column(name, justify="right")
    for transport, worst in result.transports:
        table.add_row(
            " ".join((transport.name, *transport.kinds, *transport.dtypes)),
            f"{transport.bandwidth / 1e9:.4g}",
            f"{transport.latency * 1e6:.3g}",
            f"{transport.per_member * 1e6:.3g}",
            f"{transport.interference:.0%}",
            f"{worst:.0%}",
        )
    return table
