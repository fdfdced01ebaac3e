"""Tensor and sequence parallelism: modules whose weights are sharded over the ranks of one mesh dimension."""

from torch.distributed.tensor.parallel import PrepareModuleInputOutput, PrepareModuleOutput, loss_parallel

from weft.distributed.dtensor.auto_plan import AutoPlan, tensor_parallel_plan
from weft.distributed.dtensor.parallelize import parallelize, parallelize_module
from weft.distributed.dtensor.styles import (
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "AutoPlan",
    "ColwiseParallel",
    "NoParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize",
    "parallelize_module",
    "tensor_parallel_plan",
]
