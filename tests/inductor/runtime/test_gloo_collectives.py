"""Collectives of programs on CPUs as the ring of collectives remembers them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from weft.capture.agreement import collective_ring
from weft.inductor.graph.collectives import COLLECTIVES, WIDENING_REDUCE_SCATTER, CollectiveOp, collective_op
from weft.inductor.runtime import gloo_collectives


def issued(op: Any, *operands: Any, **named: Any) -> collective_ring.RingEntry:
    """The entry of a collective that runs as before: what issues it is a stand-in."""
    counted = mock.Mock(**{"issue.return_value": (3, 1)})
    with (
        mock.patch.object(gloo_collectives.torch_adapter, "kernel"),
        mock.patch.object(gloo_collectives, "lockstep", return_value=counted),
    ):
        gloo_collectives._issuing(op, None)(*operands, **named)
    return collective_ring._ring[-1]


def test_the_group_of_an_operation_is_where_its_schema_says() -> None:
    """That of a reduce-scatter with a dtype to sum in does not come last."""
    entry = issued(WIDENING_REDUCE_SCATTER.op, torch.ones(4, 2), "sum", 2, "dp", torch.float64)
    assert (entry.what, entry.group, entry.bytes) == ("reduce_scatter_tensor", "dp", 32)
    entry = issued(WIDENING_REDUCE_SCATTER.op, torch.ones(4, 2), "sum", 2, group_name="tp", dtype=torch.float64)
    assert (entry.group, entry.call, entry.index) == ("tp", 3, 1)


BATCHED = [row for row in COLLECTIVES if row.payload]


@pytest.mark.parametrize("row", BATCHED, ids=[str(row.op) for row in BATCHED])
def test_the_bytes_are_those_of_the_payload_wherever_it_stands(row: CollectiveOp) -> None:
    """A batch of sends takes its tensors after the names of its operations."""
    assert collective_op(row.op) is row
    entry = issued(row.op, ["isend", "irecv"], [0, 1], [0, 0], [torch.ones(3), torch.ones(5)], "pp")
    assert (entry.group, entry.bytes) == ("pp", 32)
