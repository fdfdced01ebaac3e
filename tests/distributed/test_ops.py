"""weft's own operations against torch.chunk, and the casts at module boundaries on nested inputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.distributed.mixed_precision import cast_floating, map_tensors, tensors_in
from weft.distributed.ops import pad_shard, shard_length, take_shard, unpad_shard

pytestmark = pytest.mark.fake

SIZES = [(12, 4), (13, 4), (3, 4), (1, 4), (5, 4), (16, 8), (7, 1)]


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[str]:
    rank, parts = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parts)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def chunks(whole: torch.Tensor, parts: int) -> list[torch.Tensor]:
    found = list(whole.chunk(parts))
    return found + [whole[:0]] * (parts - len(found))


@pytest.mark.parametrize(("size", "parts"), SIZES)
def test_padded_shards_make_the_whole(size: int, parts: int) -> None:
    whole = torch.randn(size, 3)
    shards = chunks(whole, parts)
    assert [shard_length(size, parts, rank) for rank in range(parts)] == [len(shard) for shard in shards]
    padded = [pad_shard(shard, size, parts, torch.float32) for shard in shards]
    assert len({p.shape for p in padded}) == 1
    assert torch.equal(torch.cat(padded)[:size], whole)
    assert not torch.cat(padded)[size:].any()
    assert torch.equal(torch.cat(padded), pad_shard(whole, len(torch.cat(padded)), 1, torch.float32))


@pytest.mark.parametrize("group", [(rank, 4) for rank in range(4)], indirect=True)
@pytest.mark.parametrize("size", [12, 13, 3, 1, 5])
def test_a_rank_takes_and_cuts_its_own(group: str, size: int) -> None:
    whole = torch.randn(size, 3)
    own = chunks(whole, 4)[dist.get_rank()]
    padded = take_shard(whole, 4, group)
    assert torch.equal(padded, pad_shard(own, size, 4, torch.float32))
    assert torch.equal(unpad_shard(padded, size, group, torch.bfloat16), own.bfloat16())


@pytest.mark.parametrize("group", [(3, 4)], indirect=True)
def test_operations_keep_the_rules_of_the_dispatcher(group: str) -> None:
    """Schema, no alias of inputs, and the same shapes on fake tensors."""
    ops = torch.ops.weft
    for strided in (torch.randn(4, 3), torch.randn(3, 4).t()):
        torch.library.opcheck(ops.pad_shard.default, (strided, 13, 4, torch.bfloat16))
        torch.library.opcheck(ops.pad_shard.default, (strided, 16, 4, torch.float32))
        torch.library.opcheck(ops.unpad_shard.default, (strided, 13, group, torch.float32))
        torch.library.opcheck(ops.take_shard.default, (strided, 4, group))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    weights: torch.Tensor
    name: str = "batch"


def test_casts_reach_into_containers() -> None:
    batch = Batch(torch.ones(2, dtype=torch.long), torch.ones(2))
    tree = {
        "pair": Pair(torch.ones(1), "text"),
        "list": [batch, None, 3],
        "ordered": OrderedDict(a=torch.ones(1)),
    }
    cast = cast_floating(tree, torch.bfloat16)
    assert [t.dtype for t in tensors_in(cast)] == [torch.bfloat16, torch.long, torch.bfloat16, torch.bfloat16]
    assert isinstance(cast["pair"], Pair)
    assert isinstance(cast["ordered"], OrderedDict)
    assert cast["list"][0].ids is batch.ids
    assert cast["list"][1:] == [None, 3]
    assert tree["pair"].first.dtype == torch.float32, "the user's own containers stay as they are"


def test_what_does_not_change_is_not_copied() -> None:
    tree = [torch.ones(1, dtype=torch.bfloat16), {"a": (1, torch.ones(1, dtype=torch.long))}]
    assert cast_floating(tree, torch.bfloat16) is tree
    assert map_tensors(lambda t: t, tree) is tree
