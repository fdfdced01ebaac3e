"""A transport that weft does not have: a row and one file are all that makes it one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from step_builder import StepBuilder
from weft import errors, knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.cost.build_task_graph import set_aside
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.collective_cost import collective_of, transfer
from weft.inductor.cost.trace_timings import communicates
from weft.inductor.graph.collectives import ALL_REDUCE
from weft.inductor.schedule.select_transport import carriers, choose_transports
from weft.inductor.transports.apply_transports import use_transports
from weft.inductor.transports.arena_layout import shared_bytes
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.peer_calls import PeerCall, TensorSpec, results_in_arena, unsupported_reason
from weft.inductor.transports.peer_launch import BoundPeerCall, bind_call
from weft.transport_rows import TRANSPORTS, TransportRow

# ---- the file of the new transport


@dataclass(frozen=True)
class RingReduce(PeerCall):
    """An all-reduce around a ring of peers."""

    op: str = "sum"

    transports: ClassVar[Mapping[str, Mapping[str, Any]]] = {"ring": {}}
    kind: ClassVar[str] = "all_reduce"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def staging_bytes(self, specs: Sequence[TensorSpec]) -> int:
        """One block."""
        return 4096


class RingKernel(PeerKernel):  # type: ignore[misc]
    """Its kernel."""

    name: ClassVar[str] = "ring_reduce"


class BoundRing(BoundPeerCall, transport="ring"):  # type: ignore[misc]
    """How it runs."""


# ---- what follows from it


@pytest.fixture(autouse=True)
def ring() -> Iterator[None]:
    """Its row."""
    with mock.patch.dict(TRANSPORTS, ring=TransportRow("ring", ("all_reduce",), ("sum",), sums_in_float32=True)):
        yield


def reducing(dtype: torch.dtype, reduction: str) -> StepGraph:
    built = StepBuilder()
    start = built.call(ALL_REDUCE.op, built.input(torch.empty(1 << 20, dtype=dtype)), reduction, "dp")
    built.returns(built.call(WAIT, start, val=start.meta["val"]))
    return built.build({"dp": dist.group.WORLD.group_name})


def test_a_row_and_a_file_make_a_transport() -> None:
    with pytest.raises(errors.InvalidKnob), knobs.override(transports="rung"):
        pass
    h200 = load_cluster("h200x8")
    model = next(each for each in h200.transports if each.name == "two_shot")
    cluster = replace(h200, transports=(*h200.transports, replace(model, name="ring_4", latency=1e-7)))
    with weft.fake_world(8), knobs.override(transports="ring_4"):
        step = reducing(torch.float32, "sum")
        (start,) = step.collectives()
        assert carriers(step, cluster, start) == ["nccl", "ring_4"]
        assert transfer(cluster, collective_of(step, start), "ring_4").stream == "peers:reduce"
        assert not results_in_arena("ring_4")
        for other, reason in ((reducing(torch.bfloat16, "sum"), "bfloat16"), (reducing(torch.float32, "max"), "max")):
            assert reason in str(unsupported_reason(other, other.collectives()[0], "ring"))

        choose_transports(step, cluster)
        assert start.meta["transport"] == "ring_4"
        use_transports(step, unreachable=lambda step, node: None)
        (start,) = step.collectives()
        assert replace(start.target, offsets=(), opening_barrier=False) == RingReduce("dp", 8, 4)  # type: ignore[type-var]
        assert set_aside(step) == shared_bytes(step) + 4096

        made = mock.Mock()
        with mock.patch.dict(BoundPeerCall.classes, ring=made):
            bind_call(start.target, (), (), mock.Mock(), "a sum")  # type: ignore[arg-type]
        made.assert_called_once()
    assert communicates("ring_reduce_0d1d")


def test_calls_that_nothing_runs_are_an_error_that_names_what_is_missing() -> None:
    message = r'transport ring, which are RingReduces.*transport="ring"'
    with mock.patch.dict(BoundPeerCall.classes, clear=True), pytest.raises(errors.TransportNotBound, match=message):
        bind_call(RingReduce("dp", 8), (), (), mock.Mock(), "a sum")
