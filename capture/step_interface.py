"""The meaning of the inputs and outputs of a captured step.

A StepGraph has one :class:`Input` per placeholder. Each of its outputs is an :class:`Update`, a :class:`Create` or a
:class:`Return`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """The role of an input in training."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"
    BATCH = "batch"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Input:
    """One placeholder of the graph.

    Attributes:
        name: the placeholder's name in the graph.
        role: of the tensor or number.
        path: its place, as the user would write it (``model.blocks.0.weight``, ``args[0]``).
        sharding: global shape, mesh and placements as text where the tensor is the local shard of a DTensor, else "".
        axes: for each dimension of that DTensor's mesh along which the graph communicates, the name of its process
            group there, and whether the tensor is replicated over it.
    """

    name: str
    role: Role
    path: str
    sharding: str = ""
    axes: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Update:
    """An output that is written into the memory of the input called ``input``; the user's tensor object stays."""

    input: str


@dataclass(frozen=True)
class Create:
    """A tensor that is assigned to ``path`` in the user's Python state (``model.weight.grad``).

    Attributes:
        path: as the user would write it.
        memory: the name of the updated input in whose memory the tensor lies in eager; "" for memory of its own.
    """

    path: str
    memory: str = ""


@dataclass(frozen=True)
class Return:
    """An output that the step returns.

    Attributes:
        index: its position among the outputs.
        memory: see :class:`Create`.
    """

    index: int
    memory: str = ""


Output = Update | Create | Return
