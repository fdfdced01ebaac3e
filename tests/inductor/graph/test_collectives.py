"""The registry of collectives: it knows all of torch's operations, and a new row is all that a new collective needs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collective_ops import gathered, operations
from tests.step_builder import StepBuilder
from weft.capture.fake.fake_world import fake_world
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.capture.step_interface import Role
from weft.errors import InvalidCollectiveRow, UnregisteredCollective
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.collective_cost import collective_of, stream_of, transfer
from weft.inductor.graph import collectives
from weft.inductor.graph.collectives import (
    ALL_GATHER,
    COLLECTIVES,
    KINDS,
    WIDENING_REDUCE_SCATTER,
    CollectiveKind,
    CollectiveOp,
    collective_op,
    payload_of,
    register,
    transports_of,
)
from weft.inductor.passes.gather_inputs import is_gather
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.schedule.bucketing import bucketable_sequences, merge_buckets
from weft.inductor.schedule.select_transport import carriers
from weft.inductor.transports.peer_calls import call_classes, unsupported_reason, use_transport
from weft.inductor.transports.peer_launch import BoundPeerCall
from weft.transport_rows import TRANSPORTS, TransportRow, parse_transport

ROOT = Path(__file__).parents[3]
aten = torch.ops.aten


def test_every_operation_that_torch_has_is_a_form_of_a_row() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_c10d_functional::")}
    known = {form._schema.name for row in COLLECTIVES for form in row.forms}
    hidden = {name for name in names if name.partition("::")[2].startswith("_")}
    # A capture records the wait for several, of torch 2.15, as one wait for each.
    assert names - hidden - {WAIT._schema.name, "_c10d_functional::wait_tensors"} <= known


def test_every_form_belongs_to_one_row() -> None:
    forms = [form for row in COLLECTIVES for form in row.forms]
    assert len(forms) == len(set(forms))
    assert all(collective_op(form) is row for row in COLLECTIVES for form in row.forms)
    assert collective_op(aten.add.Tensor) is None


def test_transports_carry_known_kinds_and_each_has_a_maker() -> None:
    assert all(set(row.kinds) <= set(KINDS) for row in TRANSPORTS.values())
    assert set(call_classes()) == {name for name, row in TRANSPORTS.items() if row.kinds} <= set(BoundPeerCall.classes)
    assert all(call.kind in TRANSPORTS[name].kinds for name, call in call_classes().items())
    assert parse_transport("copy_sum_16") == ("copy_sum", 16)


def test_transports_of_reduce_scatters_sum_in_float32() -> None:
    """A cast to float32 before a reduce-scatter is left to each transport that can do without."""
    kind = WIDENING_REDUCE_SCATTER.kind
    assert transports_of(kind) == transports_of(kind, sums_in_float32=True) == ["copy_sum", "pull"]


def test_a_row_of_the_list_that_does_not_describe_its_operation_is_refused_at_import() -> None:
    text = Path(collectives.__file__).read_text()
    wrong = text.replace('KINDS["all_to_all"],', 'KINDS["all_to_all"], reduction=7,')
    assert wrong != text
    with pytest.raises(InvalidCollectiveRow, match=r"all_to_all_single.*no argument 7, its reduction"):
        exec(compile(wrong, "collectives.py", "exec"), {"__name__": collectives.__name__})


def test_a_name_that_ends_in_a_number_may_be_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_transport("ring_2") == ("ring", 2)
    monkeypatch.setitem(TRANSPORTS, "ring_2", TransportRow("ring_2", ("all_reduce",)))
    assert [parse_transport(name) for name in ("ring_2", "ring_2_8")] == [("ring_2", 0), ("ring_2", 8)]


# ---- rows that do not describe an operation

MISTAKES = {
    "kind": ("(Tensor input, int group_size, str group_name) -> Tensor", r"kind 'ring' is not in KINDS. Add the kind"),
    "group": (
        "(Tensor input, int group_size, str pg) -> Tensor",
        r"none of the arguments .* Call one arg",
    ),
    "groups": ("(Tensor input, str group, str group_name) -> Tensor", r"2 of the arguments .* several collectives"),
    "sum_dtype": ("(Tensor input, ScalarType dtype, str group_name) -> Tensor", r"cannot sum .* as library"),
    "reduction": ("(Tensor input, str group_name) -> Tensor", r"has no argument 7, its reduction. Give a position"),
    "coalesced": ("(int owner, Tensor input, str group_name) -> Tensor", r"payload of its coalesced form .* Move it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_that_does_not_describe_its_operation_is_refused(name: str) -> None:
    schema, message = MISTAKES[name]
    several = ("(Tensor[] inputs, int owner, str group_name) -> Tensor[]", gathered)
    with operations(wrong=(schema, gathered), wrongs=several) as ops:
        fields: dict[str, Any] = {
            "sum_dtype": {"sum_dtype": 1},
            "reduction": {"reduction": 7},
            "coalesced": {"payload": 1, "coalesced": ops.wrongs.default},
        }.get(name, {})
        kind = CollectiveKind("ring", "gather") if name == "kind" else KINDS["all_gather"]
        with pytest.raises(InvalidCollectiveRow, match=r"^cannot register weft_c10d.wrong.default as a .*" + message):
            register(CollectiveOp(ops.wrong.default, kind, **fields))
        assert collective_op(ops.wrong.default) is None


def test_an_operation_twice_in_the_registry_is_refused() -> None:
    register(ALL_GATHER)  # the same row again is no mistake
    assert COLLECTIVES.count(ALL_GATHER) == 1
    with pytest.raises(InvalidCollectiveRow, match="has a row already"):
        register(CollectiveOp(ALL_GATHER.op, KINDS["broadcast"]))


def test_an_operation_without_a_row_is_an_error_at_its_line() -> None:
    with (
        operations(unknown=("(Tensor input, int group_size, str group_name) -> Tensor", gathered)) as ops,
        fake_world(8),
    ):
        group = dist.init_device_mesh("cpu", (8,)).get_group().group_name
        step = gathering_step(CollectiveOp(ops.unknown.default, KINDS["all_gather"]), group)
        with pytest.raises(UnregisteredCollective, match=r"unknown.default at .*test_collectives.*register"):
            collective_of(step, step.collectives()[0])


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
    several = lambda xs, size, group: [gathered(x, size) for x in xs]
    with operations(
        striped_gather=("(Tensor input, int group_size, str group_name) -> Tensor", gathered),
        striped_gathers=("(Tensor[] inputs, int group_size, str group_name) -> Tensor[]", several),
    ) as ops:
        row = CollectiveOp(ops.striped_gather.default, KINDS["all_gather"], coalesced=ops.striped_gathers.default)
        register(row)
        yield row


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


# ---- operands that only one operation has


def test_peers_are_not_offered_an_operation_whose_operands_they_would_drop() -> None:
    """A gather with a scale beside the shard, and a gather that says who owns the result."""
    with (
        operations(
            scaled_gather=(
                "(Tensor input, Tensor scale, int group_size, str group_name) -> Tensor",
                lambda tensor, scale, size, group: gathered(tensor, size),
            ),
            owned_gather=("(Tensor input, int group_size, int owner, str group_name) -> Tensor", gathered),
        ) as ops,
        fake_world(world_size=8),
    ):
        group = dist.init_device_mesh("cpu", (8,)).get_group().group_name
        cluster = load_cluster("h200x8")
        for op, operand in ((ops.scaled_gather.default, "scale"), (ops.owned_gather.default, "owner")):
            register(CollectiveOp(op, KINDS["all_gather"]))
            built = StepBuilder()
            shard, scale = built.input(torch.empty(4, 6)), built.input(torch.empty(1))
            further = (scale, 8) if operand == "scale" else (8, 3)
            start = built.call(op, shard, *further, "shard")
            built.returns(built.call(WAIT, start, val=start.meta["val"]))
            step = built.build({"shard": group})
            assert payload_of(start) == [shard]
            assert f"no place for the operands ['{operand}']" in str(unsupported_reason(step, start, "push_32"))
            assert carriers(step, cluster, start) == ["nccl"]
            assert collective_of(step, start).bytes == 768
