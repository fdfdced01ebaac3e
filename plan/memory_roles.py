"""Memory of a predicted step by role over time, and the largest tensors at its peak.

The sum over roles at each position is the memory that the simulation predicts there, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.step_interface import Role
from weft.capture.user_code import format_frame
from weft.inductor.cost.simulate import Simulation, users_of
from weft.inductor.cost.task_graph import Storage
from weft.inductor.graph.collectives import kind_of
from weft.inductor.graph.live_range import LiveInterval, bytes_over_time
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.sizes import tensors_of

Node = torch.fx.Node

PARAMETERS, OPTIMIZER_STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
GATHERED, ACTIVATIONS, COMMUNICATION = "gathered parameters", "activations", "communication buffers"
TEMPORARIES, INPUTS = "temporaries", "batch and buffers"
ROLES = (PARAMETERS, OPTIMIZER_STATE, INPUTS, COMMUNICATION, GATHERED, GRADIENTS, ACTIVATIONS, TEMPORARIES)
"""All roles, in the order in which they are stacked: what lives longest first."""

_OF_INPUTS = {Role.PARAMETER: PARAMETERS, Role.GRADIENT: GRADIENTS, Role.OPTIMIZER_STATE: OPTIMIZER_STATE}


@dataclass(frozen=True)
class TensorAtPeak:
    """A tensor that is live at the peak.

    Attributes:
        name: a place of the user's state (``model.weight``), also of what is gathered; else the node that makes it.
        bytes: of its storage.
        role: one of :data:`ROLES`.
        dtype, shape: of the first value in the storage; "" and () where the storage is no tensor of the graph.
        module: path of the module that makes it; "" outside any.
        line: of the user's that makes it, as ``train.py:12 in step``; "" where there is none.
        seconds: of the step, how long it is live; the whole step for inputs.
    """

    name: str
    bytes: int
    role: str
    dtype: str
    shape: tuple[int | str, ...]
    module: str
    line: str
    seconds: float


@dataclass(frozen=True)
class MemoryByRole:
    """Memory over the positions of a simulation's order.

    Attributes:
        over_time: for each role of :data:`ROLES` the live bytes at each position.
        tensors: live at the peak, the largest first.
    """

    over_time: dict[str, list[int]]
    tensors: list[TensorAtPeak]


@dataclass(frozen=True)
class _Held:
    """A storage with its role and the positions of the order at which it is live."""

    role: str
    interval: LiveInterval
    node: Node | None
    name: str


def memory_by_role(step: StepGraph, simulation: Simulation, nodes: Sequence[Node]) -> MemoryByRole:
    """The memory of a simulation by role.

    Args:
        step: the graph of ``nodes``; its inputs have roles.
        nodes: the node of each task of ``simulation``.
    """
    last = len(simulation.order) - 1
    paths = frozenset(entry.path for entry in step.inputs if entry.role is Role.PARAMETER)
    held = [*_inputs(step, nodes, last), *_storages(simulation, nodes, paths)]
    task_graph = simulation.task_graph
    rest = task_graph.base - sum(each.interval.size for each in held if _is_base(each))
    if rest:  # the symmetric arena and landing buffers
        held.append(_Held(COMMUNICATION, LiveInterval(rest, 0, last), None, "symmetric memory of transports"))
    over_time = {
        role: bytes_over_time([each.interval for each in held if each.role == role], len(simulation.order))
        for role in ROLES
    }
    at = simulation.peak_at if simulation.memory else 0
    alive = sorted((each for each in held if each.interval.start <= at <= each.interval.end), key=_size_first)
    return MemoryByRole(over_time, [_at_peak(each, simulation, at) for each in alive])


def _is_base(held: _Held) -> bool:
    return held.node is not None and held.node.op == "placeholder"


def _size_first(held: _Held) -> tuple[int, str]:
    return -held.interval.size, held.name


def _inputs(step: StepGraph, nodes: Sequence[Node], last: int) -> list[_Held]:
    entries = {entry.name: entry for entry in step.inputs}
    found = []
    for live_range in liveness(step, [node for node in nodes if node.op == "placeholder"]).ranges:
        if live_range.size:
            entry = entries[live_range.maker.name]
            role = _OF_INPUTS.get(entry.role, INPUTS)
            found.append(_Held(role, LiveInterval(live_range.size, 0, last), live_range.maker, entry.path))
    return found


def _storages(simulation: Simulation, nodes: Sequence[Node], paths: frozenset[str]) -> list[_Held]:
    task_graph, last = simulation.task_graph, len(simulation.order) - 1
    place = {task: at for at, task in enumerate(simulation.order)}
    waits = task_graph.waits_of()
    found = []
    for storage in task_graph.storages:
        users = users_of(storage, waits)
        end = max((place[user] for user in users), default=last)
        node = nodes[storage.maker]
        interval = LiveInterval(storage.size, place[storage.maker], end)
        found.append(_Held(_role(storage, nodes, paths), interval, node, node.name))
    return found


def _role(storage: Storage, nodes: Sequence[Node], paths: frozenset[str]) -> str:
    """The role of a storage, by what makes it and what reads it. ``paths`` are those of the parameters."""
    maker, readers = nodes[storage.maker], [nodes[at] for at in storage.readers]
    if is_collective(maker):
        if not _moves(maker, paths):
            return COMMUNICATION
        return GATHERED if kind_of(maker).gathers else GRADIENTS
    stage = maker.meta.get("stage", "")
    if any(is_collective(node) and kind_of(node).reduces and _moves(node, paths) for node in readers):
        return GRADIENTS  # those of a loss that is computed in chunks are summed up in forward
    if stage == "forward":
        return ACTIVATIONS if any(node.meta.get("stage") == "backward" for node in readers) else TEMPORARIES
    if stage == "backward" and (storage.kept or any(node.meta.get("stage") == "optimizer" for node in readers)):
        return GRADIENTS
    return TEMPORARIES


def _moves(collective: Node, paths: frozenset[str]) -> bool:
    """Whether a collective gathers parameters or reduces their gradients."""
    return not paths.isdisjoint(collective.meta.get("param_names", ()))


def _at_peak(held: _Held, simulation: Simulation, at: int) -> TensorAtPeak:
    node, interval = held.node, held.interval
    frames = node.meta.get("frames", ()) if node is not None else ()
    tensors = tensors_of(node) if node is not None else []
    first = max(tensors, key=lambda tensor: tensor.dim(), default=None)
    whole = node is None or node.op == "placeholder"
    issued = [*simulation.issued, simulation.seconds]
    name = held.name
    if node is not None and is_collective(node):
        members = node.meta.get("param_names", (name,))
        name = members[0] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
    return TensorAtPeak(
        name,
        interval.size,
        held.role,
        "" if first is None else str(first.dtype).removeprefix("torch."),
        () if first is None or len(tensors) > 1 else tuple(n if isinstance(n, int) else str(n) for n in first.shape),
        node.meta.get("module", "") if node is not None else "",
        format_frame(frames[0]) if frames else "",
        simulation.seconds if whole else issued[interval.end + 1] - issued[interval.start],
    )
