"""Rendezvous over the store between the ranks of a group that share memory.

Every rank of the group must make the same rendezvous in the same order.
"""

from __future__ import annotations

import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement.store_rendezvous import StoreRendezvous


def peer_rendezvous(axis: str, group: str, about: str) -> StoreRendezvous:
    """A rendezvous of the ranks of a group. Its methods raise errors.PeersUnreachable if a rank does not join within
    ``knobs.peer_timeout_s`` seconds.

    Args:
        axis: the group's name in graphs, for messages.
        group: the name under which torch registered it.
        about: its purpose; a part of the store's keys that keeps the rendezvous of a group apart.
    """
    # One timeout for everything that ranks do together once they have agreed on a step.
    ranks, seconds = torch_adapter.group_ranks(group), knobs.peer_timeout_s

    def late(keys: list[str]) -> Exception:
        return errors.PeersUnreachable(axis, f"not all of {len(ranks)} ranks came within {seconds:g} s ({about})")

    return StoreRendezvous(f"peers/{about}", ranks, dist.get_rank(), seconds, late)
