"""A communicator for each lane: gathers and reductions over one group run beside each other.

A communicator runs its collectives one after the other, on a stream of its own. So each lane of a group (see
:func:`weft.inductor.comm.collective_cost.transfer`) gets one, over the same ranks and with a stream of high priority;
the communicator that the user made stays free for the user's own calls. In the graph the lanes are groups of their own,
``world/gather`` beside ``world``.

Making a communicator is collective: ranks do it once for a group, in the order in which their one schedule names the
lanes first. Communicators of a fake world, and of backends without streams, need no lanes: there, lanes are other names
of the group itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from weft import torch_adapter
from weft.capture.fake_world import current_fake_world
from weft.capture.graph import StepGraph, group_of
from weft.inductor.comm.collective_cost import lane_of
from weft.inductor.comm.transports import PeerCall

Node = torch.fx.Node

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def give_lanes(step: StepGraph) -> StepGraph:
    """Let every collective of ``step`` run on the communicator of its lane. Changes ``step``.

    Collective over the ranks of each group whose lanes are new.
    """
    for node in step.collectives():
        if isinstance(node.target, PeerCall):  # runs on streams of its own
            continue
        group, lane = group_of(node), lane_of(node)
        name = f"{group}/{lane}"
        if name not in step.groups:
            step.groups[name] = communicator(step.groups[group], lane)
        node.args = tuple(name if argument == group else argument for argument in node.args)
    return step


def communicator(group_name: str, lane: str) -> str:
    """The name, as torch knows it, of the communicator of a lane of a group."""
    if current_fake_world() is not None:
        return group_name
    if torch_adapter.backend_of_group(group_name, "cuda") != "nccl":
        return group_name
    group = torch_adapter.process_group(group_name)
    lanes = _made.setdefault(group, {})
    if lane not in lanes:
        # Where communicators are split from that of all ranks, each rank splits off its own group in the same call.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        made: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc=f"weft:{group_name}/{lane}",
        )
        lanes[lane] = made
    return lanes[lane].group_name
