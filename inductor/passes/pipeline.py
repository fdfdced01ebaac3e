"""The passes from a captured graph to the one that kernels are made from, in order.

:mod:`weft.inductor.compiler` continues the list: kernel generation, scheduling, binding. Each pass declares in its file
whether it keeps the bits of every result or how results may change, see :mod:`weft.inductor.graph.pass_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.capture.graph import StepGraph
from weft.inductor.graph.pass_runner import Pass, PassRunner
from weft.inductor.passes.accumulate_matmuls import accumulate_matmuls
from weft.inductor.passes.channels_last import channels_last
from weft.inductor.passes.chunk_loss import ChunkLoss
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.decompose import decompose
from weft.inductor.passes.drop_noops import drop_noops
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers
from weft.inductor.passes.fold_casts import fold_casts
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.group_casts import group_casts
from weft.inductor.passes.join_all_reduces import join_all_reduces
from weft.inductor.passes.join_splits import join_splits
from weft.inductor.passes.number_collectives import number_collectives
from weft.inductor.passes.pack import pack
from weft.inductor.passes.pad_matmuls import pad_matmuls
from weft.inductor.passes.rematerialise import Rematerialise
from weft.inductor.passes.scalars_to_memory import scalars_to_memory
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.passes.sequence_parallel import sequence_parallel
from weft.inductor.passes.shard_embedding import shard_embedding
from weft.inductor.passes.shard_norms import shard_norms
from weft.inductor.passes.split_all_reduce import split_all_reduces
from weft.inductor.passes.sum_segments import sum_segments
from weft.inductor.passes.wire_dtype import wire_casts

chunk_loss = ChunkLoss()
rematerialise = Rematerialise()

_SIMPLIFY: list[Pass] = [drop_noops, drop_unused_gathers, pack, fold_casts, common_subexpressions]

# For programs of ATen kernels. The last pass puts the nodes into the order in which they are issued.
ATEN_PASSES: list[Pass] = [number_collectives, join_splits, *_SIMPLIFY, schedule_waits]

# For programs of generated kernels, up to generation. Loss chunking recognises operations that `decompose` takes apart,
# so it comes first; `drop_noops` runs a second time for what decompositions repeat or undo. Nothing may merge what
# `rematerialise` duplicates, so `common_subexpressions` comes before it. Numbers move to memory last: before, passes
# would have to look through the copies. The order of issue is that of kernels, so it is found after generation.
KERNEL_PASSES: list[Pass] = [
    number_collectives,
    join_splits,
    drop_noops,
    drop_unused_gathers,
    join_all_reduces,
    shard_embedding,
    pack,
    chunk_loss,
    channels_last,
    decompose,
    drop_noops,
    fold_casts,
    common_subexpressions,
    pad_matmuls,
    accumulate_matmuls,
    sum_segments,
    sequence_parallel,
    split_all_reduces,
    wire_casts,
    group_casts,
    fuse_optimizer,
    shard_norms,
    rematerialise,
    scalars_to_memory,
]

# What these make of the collectives follows from what a rank computes around them, which other ranks need not compute.
_REWRITE_COLLECTIVES = (
    drop_unused_gathers,
    join_all_reduces,
    shard_embedding,
    pack,
    sequence_parallel,
    split_all_reduces,
    wire_casts,
    shard_norms,
)


def without_rewrites(passes: Sequence[Pass]) -> list[Pass]:
    """Those of ``passes`` that leave every collective as it was captured."""
    return [pass_ for pass_ in passes if pass_ not in _REWRITE_COLLECTIVES]


def kernel_passes(budget_bytes: int | None = None) -> list[Pass]:
    """``KERNEL_PASSES``. With a budget, backward recomputes values until the predicted peak is at most that many bytes,
    or no longer falls."""
    within = rematerialise if budget_bytes is None else Rematerialise(budget_bytes)
    return [within if pass_ is rematerialise else pass_ for pass_ in KERNEL_PASSES]


def run_passes(step: StepGraph, passes: Sequence[Pass] | None = None) -> StepGraph:
    """Run ``passes`` (those for ATen kernels by default) over a copy of ``step``, see :class:`PassRunner`.

    Raises:
        MalformedGraph: a pass broke the graph.
        UnknownOption: ``knobs.disable_passes`` names no pass.
    """
    return PassRunner().run("graph", step.copy(), ATEN_PASSES if passes is None else passes)
