"""One communicator per stream of a process group, so that all-gathers and reductions over one group overlap.

A communicator runs its collectives one after the other. So each stream of a group (``gather``, ``reduce``,
``exchange``; see :class:`weft.inductor.graph.collectives.CollectiveKind`) gets a communicator over the same ranks,
whose CUDA stream has high priority. The user's own communicator stays free for the user's calls. In the graph a stream
is a group of its own: ``world/gather`` beside ``world``.

Creating a communicator is collective. Ranks create it once per group and stream, in the order in which their common
schedule names the streams first. In a fake world, and on backends without CUDA streams, a stream is another name of the
group.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from weft import torch_adapter
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, set_group
from weft.inductor.cost.collective_cost import stream_of
from weft.inductor.graph.pass_runner import keeps_bits, required
from weft.inductor.transports.peer_calls import PeerCall

Node = torch.fx.Node

# By process group, and not by step: a communicator takes GPU memory and time to connect, and the programs of a process
# run one after the other.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


@required
@keeps_bits
def assign_communicators(step: StepGraph) -> StepGraph:
    """Let every collective of ``step`` run on the communicator of its stream. Changes ``step``.

    Collective over the ranks of each group whose streams are new.
    """
    for node in step.collectives():
        if isinstance(node.target, PeerCall):  # runs on streams of its own
            continue
        group, stream = group_of(node), stream_of(node)
        # The graph keeps names that mean the same on all ranks; torch's names are in `step.groups` only.
        name = f"{group}/{stream}"
        if name not in step.groups:
            step.groups[name] = communicator(step.groups[group], stream)
        set_group(node, name)
    return step


def communicator(group_name: str, stream: str) -> str:
    """The name, as torch knows it, of the communicator of a stream of a group."""
    if current_fake_world() is not None:
        return group_name
    # gloo has threads, not streams: a second group would not overlap more.
    if torch_adapter.backend_of_group(group_name, "cuda") != "nccl":
        return group_name
    group = torch_adapter.process_group(group_name)
    streams = _communicators.setdefault(group, {})
    if stream not in streams:
        # Where communicators are split from that of all ranks, each rank splits off its own group in the same call.
        # High priority: a collective that waits for multiprocessors behind a GEMM delays all ranks, not only this one.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        created: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc=f"weft:{group_name}/{stream}",
        )
        streams[stream] = created
    return streams[stream].group_name
