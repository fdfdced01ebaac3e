"""Plain data parallelism: every rank holds the whole module, one all-reduce a parameter."""

from weft.distributed.ddp.replicate import ReplicateModule, broadcast_state, replicate

__all__ = ["ReplicateModule", "broadcast_state", "replicate"]
