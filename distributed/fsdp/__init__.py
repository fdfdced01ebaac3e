"""Per-parameter fully sharded data parallelism: torch's `fully_shard` in plain Python."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from weft.distributed.fsdp.api import fully_shard, register_fsdp_forward_method
from weft.distributed.fsdp.mesh import DataParallelMeshDims
from weft.distributed.fsdp.module import FSDPModule, UnshardHandle, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
