"""The registry of collectives: it knows all of torch's operations, and a new row is all that a new collective needs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.step_builder import StepBuilder
from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.capture.step_interface import Role
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.collective_cost import collective_of, stream_of, transfer
from weft.inductor.graph import collectives
from weft.inductor.graph.collectives import (
    ALL_GATHER,
    COLLECTIVES,
    KINDS,
    TRANSPORTS,
    WIDENING_REDUCE_SCATTER,
    CollectiveOp,
    collective_op,
    parse_transport,
    transports_of,
)
from weft.inductor.passes.gather_inputs import is_gather
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.schedule.bucketing import bucketable_sequences, merge_buckets
from weft.inductor.transports.peer_calls import _CONSTRUCTORS, unsupported_reason, use_transport

ROOT = Path(__file__).parents[3]
aten = torch.ops.aten


def test_every_operation_that_torch_has_is_a_form_of_a_row() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_c10d_functional::")}
    known = {form._schema.name for row in COLLECTIVES for form in row.forms}
    hidden = {name for name in names if name.partition("::")[2].startswith("_")}
    assert names - hidden - {WAIT._schema.name} <= known


def test_every_form_belongs_to_one_row() -> None:
    forms = [form for row in COLLECTIVES for form in row.forms]
    assert len(forms) == len(set(forms))
    assert all(collective_op(form) is row for row in COLLECTIVES for form in row.forms)
    assert collective_op(aten.add.Tensor) is None


def test_transports_carry_known_kinds_and_each_has_a_maker() -> None:
    assert all(set(row.kinds) <= set(KINDS) for row in TRANSPORTS.values())
    assert set(_CONSTRUCTORS) == {name for name, row in TRANSPORTS.items() if row.kinds}
    assert parse_transport("copy_sum_16") == ("copy_sum", 16)


def test_transports_of_reduce_scatters_sum_in_float32() -> None:
    """A cast to float32 before a reduce-scatter is left to each transport that can do without."""
    kind = WIDENING_REDUCE_SCATTER.kind
    assert transports_of(kind) == transports_of(kind, sums_in_float32=True) == ["pull", "copy_sum"]


def test_no_other_file_names_a_collective_operation() -> None:
    """Outside the registry only benchmarks issue operations by name."""
    pattern = r"_c10d_functional\.\w|_c10d\.\w+\.default|_c10d_functional::|\"all_gather_into|\"reduce_scatter_tensor"
    command = ["grep", "-rlE", pattern, "--include=*.py", "inductor"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert set(found) == {"inductor/graph/collectives.py", "inductor/graph/widening_ops.py"}


# ---- a collective that nobody has heard of


@pytest.fixture
def striped() -> Iterator[CollectiveOp]:
    """An all-gather of weft's own, registered with one row."""
    library = torch.library.Library("weft_c10d", "FRAGMENT")
    library.define("striped_gather(Tensor input, int group_size, str group_name) -> Tensor")
    library.define("striped_gathers(Tensor[] inputs, int group_size, str group_name) -> Tensor[]")
    one = lambda x, size, group: x.new_empty((x.shape[0] * size, *x.shape[1:]))
    several = lambda xs, size, group: [one(x, size, group) for x in xs]
    torch.library.register_fake("weft_c10d::striped_gather", one, lib=library)
    torch.library.register_fake("weft_c10d::striped_gathers", several, lib=library)
    ops: Any = torch.ops.weft_c10d
    row = CollectiveOp(ops.striped_gather.default, KINDS["all_gather"], coalesced=ops.striped_gathers.default)
    rows, forms = list(collectives.COLLECTIVES), dict(collectives._BY_FORM)
    collectives.register(row)
    yield row
    collectives.COLLECTIVES[:] = rows
    collectives._BY_FORM.clear()
    collectives._BY_FORM.update(forms)
    library._destroy()


def gathering_step(row: CollectiveOp, group: str) -> StepGraph:
    """Gathers two shards of 4 x 6 over 8 ranks and adds up what it gets."""
    built = StepBuilder()
    shards = [built.input(torch.empty(4, 6), Role.PARAMETER) for _ in range(2)]
    starts = [built.call(row.op, shard, 8, "shard") for shard in shards]
    wholes = [built.call(WAIT, start, val=start.meta["val"]) for start in starts]
    built.returns(built.call(aten.add.Tensor, *wholes))
    return built.build({"shard": group})


def test_a_new_row_is_known_to_passes_cost_model_transports_and_printer(striped: CollectiveOp) -> None:
    with fake_world(world_size=8):
        mesh = dist.init_device_mesh("cpu", (8,))
        group = mesh.get_group().group_name
        step, usual = gathering_step(striped, group), gathering_step(ALL_GATHER, group)
        cluster = load_cluster("h200x8")

        (first, _), (like, _) = step.collectives(), usual.collectives()
        assert is_gather(first)
        assert stream_of(first) == "gather"
        assert collective_of(step, first) == collective_of(usual, like)
        assert transfer(cluster, collective_of(step, first)) == transfer(cluster, collective_of(usual, like))
        assert unsupported_reason(step, first, "push") is None
        assert "pull does not do" in str(unsupported_reason(step, first, "pull"))
        assert "weft_c10d.striped_gather" in str(step)
        assert "over shard, 768 B" in str(step)
        assert len(schedule_waits(step.copy())) == len(step)

        pushed = step.copy()
        use_transport(pushed, pushed.collectives()[0], "push")
        targets = [node.target for node in pushed.check().collectives()]
        assert [getattr(target, "__name__", "") for target in targets] == ["peer_gather", "striped_gather.default"]

        merge_buckets(step, bucketable_sequences(step))
        (bucket,) = step.check().collectives()
        assert bucket.target is striped.coalesced
        assert collective_of(step, bucket).members == 2
