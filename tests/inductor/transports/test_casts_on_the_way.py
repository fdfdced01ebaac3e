"""Transports cast what they send, unless the source of the cast changes before they have read it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from step_builder import StepBuilder
from weft.inductor.runtime.placement import place
from weft.inductor.schedule.verify import ScheduleVerifier
from weft.inductor.transports.apply_transports import use_transports

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.mark.parametrize("transport", ["push", "copy_engine"])
@pytest.mark.parametrize("updated", ["before the start", "before the wait", "after the wait"])
def test_a_shard_that_is_updated_before_it_is_gathered_is_sent_from_its_cast(transport: str, updated: str) -> None:
    with weft.fake_world(8):
        b = StepBuilder()
        shard = b.input(torch.ones(4, 8))
        cast = b.call(aten._to_copy.default, shard, dtype=torch.bfloat16)
        update = b.write(aten.add_.Scalar, shard, 1.0) if updated == "before the start" else None
        start = b.call(c10d.all_gather_into_tensor.default, cast, 8, "dp")
        update = b.write(aten.add_.Scalar, shard, 1.0) if updated == "before the wait" else update
        whole = b.call(c10d.wait_tensor.default, start, val=start.meta["val"])
        update = update or b.write(aten.add_.Scalar, shard, 1.0)
        b.update(shard, update)
        b.returns(b.call(aten.mul.Tensor, whole, 2))
        step = b.build({"dp": dist.group.WORLD.group_name})
        verifier = ScheduleVerifier(step)
        start.meta["transport"] = transport
        use_transports(step, unreachable=lambda step, node: None)
        verifier.check(step, "applying transports")
        (call,) = step.collectives()
        assert call.all_input_nodes == [shard if updated == "after the wait" else cast]
        # So the update is in place, and the program holds no copy of the shard.
        assert not place(step).writes[update].clones
