"""The passes from a captured graph to the one that is compiled, in order, each known by the name of its function.

There are two tiers. Passes that keep the bits leave every bit of every result as it was. Passes of numerics may change
in which order sums are made and where values are rounded; each says in its file what it does to a result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.errors import UnknownOption
from weft.inductor.passes.accumulate_matmuls import accumulate_matmuls
from weft.inductor.passes.channels_last import channels_last
from weft.inductor.passes.chunk_loss import ChunkLoss
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.decompose import decompose
from weft.inductor.passes.fold_casts import fold_casts
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.group_casts import group_casts
from weft.inductor.passes.noops import drop_noops
from weft.inductor.passes.norms_of_shards import norms_of_shards
from weft.inductor.passes.numbers_to_memory import numbers_to_memory
from weft.inductor.passes.pack import pack
from weft.inductor.passes.pad_matmuls import pad_matmuls
from weft.inductor.passes.rematerialise import Rematerialise
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.passes.shard_embedding import shard_embedding
from weft.inductor.passes.split_all_reduce import split_all_reduces
from weft.inductor.passes.sum_segments import sum_segments
from weft.inductor.passes.unused_gathers import drop_unused_gathers
from weft.inductor.passes.wire_dtype import wire_casts

log = logging.getLogger(__name__)

Pass = Callable[[StepGraph], StepGraph]

chunk_loss = ChunkLoss()
rematerialise = Rematerialise()

_SIMPLER: list[Pass] = [drop_noops, drop_unused_gathers, pack, fold_casts, common_subexpressions]

# What the program of ATen kernels is made from. The last pass puts the nodes into the order in which they are issued.
PLAIN: list[Pass] = [*_SIMPLER, schedule_waits]

BIT_KEEPING: list[Pass] = [*_SIMPLER, wire_casts, group_casts, fuse_optimizer, rematerialise, schedule_waits]
NUMERICS: list[Pass] = [
    shard_embedding,
    chunk_loss,
    channels_last,
    decompose,
    pad_matmuls,
    accumulate_matmuls,
    sum_segments,
    split_all_reduces,
    norms_of_shards,
    numbers_to_memory,
]

# What the program of generated kernels is made from: both tiers, in the order they run in. Loss chunking knows
# operations that are decomposed after it; what parts of operations repeat or undo is dropped after that. What is
# computed again on purpose comes after all that; numbers are put into memory where kernels will read them, not before.
# The order of issue is that of kernels, so it comes after they are made.
EVERY_PASS: list[Pass] = [
    drop_noops,
    drop_unused_gathers,
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
    split_all_reduces,
    wire_casts,
    group_casts,
    fuse_optimizer,
    norms_of_shards,
    rematerialise,
    numbers_to_memory,
]


def every_pass(budget_bytes: int | None = None) -> list[Pass]:
    """``EVERY_PASS``; with a budget, values are computed again until a step holds no more than that, if it can be."""
    within = rematerialise if budget_bytes is None else Rematerialise(budget_bytes)
    return [within if pass_ is rematerialise else pass_ for pass_ in EVERY_PASS]


@torch_adapter.only_mode()  # that of a fake world would make fakes of GPU tensors fakes of CPU tensors
def run_passes(step: StepGraph, passes: Sequence[Pass] | None = None) -> StepGraph:
    """Run ``passes`` (those for ATen kernels by default) over a copy of ``step``, checking the graph after each.

    Those named by ``knobs.disable_passes`` are left out.

    Raises:
        MalformedGraph: a pass broke the graph.
        UnknownOption: ``knobs.disable_passes`` names no pass.
    """
    step = step.copy()
    disabled = _disabled()
    for pass_ in PLAIN if passes is None else passes:
        if pass_.__name__ in disabled:
            continue
        before, started = len(step), time.perf_counter()
        step = pass_(step).check()
        log.debug("%s: %d -> %d nodes in %.3f s", pass_.__name__, before, len(step), time.perf_counter() - started)
    return step


def _disabled() -> set[str]:
    known: list[object] = [pass_.__name__ for pass_ in (*EVERY_PASS, *PLAIN)]
    named = {name.strip() for name in knobs.disable_passes.split(",") if name.strip()}
    for name in sorted(named.difference(known)):
        raise UnknownOption("knobs.disable_passes", name, known)
    return named
