"""One node of a run: torchrun's agent in this process, its workers, and the signals that reach them.

torchrun answers SIGTERM by ending its workers within seconds, and ends with an error: no time to save, and the agents
of other nodes take it for a failure. So its agent does not see the signals that ask a run to stop. This process passes
them to the workers, where :func:`weft.stopping` has all ranks save and leave at the same step; the agent then finds
that they have finished.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from weft.distributed.stop_signal import SIGNALS
from weft.errors import CannotLaunch
from weft.inductor.transports.symmetric_memory import NO_MULTICAST
from weft.launch.run_folder import NodeState, RunFolder

# Signals within so many seconds of the first one are copies of it: a cluster may send one to every process.
_COPIES_S = 1.0

# Seconds that torchrun gives the ranks that are left once one has failed, before it kills them.
_SHUTDOWN_S = 10


@dataclass(frozen=True)
class NodeRanks:
    """The ranks to start on each node.

    Attributes:
        script: the path of a Python file.
        arguments: of the script.
        nodes: how many nodes take part.
        processes: ranks on each of them.
        on_cpu: hide GPUs from them, so that they use gloo.
        max_restarts: how often torchrun starts all ranks again after one has failed.
    """

    script: str
    arguments: tuple[str, ...]
    nodes: int
    processes: int
    on_cpu: bool
    max_restarts: int


def run_node(ranks: NodeRanks, folder: RunFolder, node: int, endpoint: str, run_id: str) -> NodeState:
    """Start the ranks of one node and wait for them.

    Args:
        node: the number of this node, which names its log folder.
        endpoint: host and port at which nodes meet; "" where there is only this one.
        run_id: the same on all nodes of a run.

    Returns:
        What became of them: finished, failed or stopped.
    """
    _set_environment(ranks, folder, node)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder.write_state(node, NodeState("running"))
    with _PassedSignals() as signals:
        try:
            torchrun.run(torchrun.parse_args(_torchrun_arguments(ranks, folder, node, endpoint, run_id)))
            state = NodeState("stopped" if signals.received else "finished", 0)
        except ChildFailedError as error:
            if signals.received:
                state = NodeState("stopped", 128 + signals.received)
            else:
                state = NodeState("failed", 1, _why(error, folder, node))
        except Exception as error:  # noqa: BLE001 - the rendezvous and the store raise errors of many kinds
            state = NodeState("failed", 1, f"{type(error).__name__}: {error}")
    folder.write_state(node, state)
    if state.state == "failed":
        print(f"weft launch: {state.why}", file=sys.stderr, flush=True)
    return state


def check_port(host: str, port: int) -> None:
    """Raise CannotLaunch where another program listens at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"port {port} of {host or 'this machine'} cannot be used: {error.strerror}"
            raise CannotLaunch(what, "Choose another with --port") from error


def _set_environment(ranks: NodeRanks, folder: RunFolder, node: int) -> None:
    """What the ranks inherit. What the user has set stays, except where a run would go wrong with it."""
    defaults = {
        **NO_MULTICAST,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks.processes)),
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes prints where
        # The flight recorder of NCCL: its last collectives, written where one times out.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "WEFT_RING_DIR": str(folder.logs_of(node)),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.logs_of(node) / "nccl_trace_rank_"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # NodeRanks that share the launcher's store are refused by it after a restart: it remembers those before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if ranks.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder.logs_of(node).mkdir(parents=True, exist_ok=True)


def _torchrun_arguments(ranks: NodeRanks, folder: RunFolder, node: int, endpoint: str, run_id: str) -> list[str]:
    from torch.distributed.run import get_args_parser

    known = get_args_parser().format_help()  # options differ between versions of torch
    arguments = ["--nnodes", str(ranks.nodes), "--nproc-per-node", str(ranks.processes)]
    arguments += ["--max-restarts", str(ranks.max_restarts), "--monitor-interval", "0.1"]
    arguments += ["--log-dir", str(folder.logs_of(node)), "--tee", "3", "--local-ranks-filter", "0"]
    if endpoint:
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id]
        arguments += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", _address(endpoint, node)]
    else:
        arguments += ["--standalone"]
    if "--signals-to-handle" in known:  # those that this process leaves to the agent
        arguments += ["--signals-to-handle", "SIGHUP,SIGQUIT"]
    if "--shutdown-timeout" in known:
        arguments += ["--shutdown-timeout", str(_SHUTDOWN_S)]
    if not ranks.on_cpu and "--numa-binding" in known and Path("/sys/devices/system/node/node1").exists():
        arguments += ["--numa-binding", "node"]
    return [*arguments, "--module", "weft.launch.rank", ranks.script, *ranks.arguments]


def _address(endpoint: str, node: int) -> str:
    """The address at which the other nodes reach this one: rank 0 is told to them by it. A host name may be unknown to
    them, or mean their own machine."""
    host, _, port = endpoint.rpartition(":")
    if node == 0:
        return host
    family, _, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent, the route is chosen
        return str(probe.getsockname()[0])


class _PassedSignals:
    """While active, signals that ask this process to stop go to its workers.

    Attributes:
        received: the first signal; 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()
        self._wake = threading.Event()

    def __enter__(self) -> _PassedSignals:
        # Versions of torchrun without the option read the variable.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        threading.Thread(target=self._pass_on, name="weft signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._wake.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            os.write(2, f"weft launch: {signal.Signals(number).name} received, passed to the ranks\n".encode())
            self._wake.set()
        elif now - self._since > _COPIES_S:
            os.write(2, b"weft launch: a second signal, the ranks are killed\n")
            for pid in workers():
                _signal_group(pid, signal.SIGKILL)
            os._exit(128 + number)

    def _pass_on(self) -> None:
        """Tell every worker once, those too that the agent starts later: one that died of the signal."""
        self._wake.wait()
        told: set[int] = set()
        while not self._ended.is_set():
            for pid in workers():
                if pid not in told:
                    told.add(pid)
                    try:
                        os.kill(pid, signal.SIGTERM)
                    except ProcessLookupError:
                        continue
            self._ended.wait(0.05)


def workers() -> list[int]:
    """The ranks that this process has started: its children that lead a session of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == os.getpid() and fields[3] == entry.name and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _why(error: Any, folder: RunFolder, node: int) -> str:
    """The first failure of a node in words, with the end of what that rank wrote to its standard error."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    outputs = folder.outputs(node, failure.local_rank)
    text = f"rank {rank} (process {failure.pid} on {socket.gethostname()}) {ended}"
    if not outputs:
        return text
    lines = outputs[-1].read_text(errors="replace").strip().splitlines()[-15:]
    return f"{text}; its log: {outputs[-1]}" + "".join(f"\n    {line}" for line in lines)
