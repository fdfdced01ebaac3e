"""Cached results on fake tensors equal those of torch's own rules, views and aliasing included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from weft import torch_adapter
from weft.capture.fake import fake_results
from weft.capture.fake.fake_results import FakeResultCache
from weft.capture.record.tracer import capture_step
from weft.distributed import ops  # noqa: F401, which registers them
from weft.inductor.graph import serialize

aten = torch.ops.aten

CASES: dict[str, tuple[Any, Callable[[torch.Tensor], tuple[Any, ...]]]] = {
    "pointwise": (aten.add.Tensor, lambda x: (x, x.t().contiguous().t())),
    "promoted": (aten.mul.Tensor, lambda x: (x.int(), 1.5)),
    "reduced": (aten.sum.dim_IntList, lambda x: (x, [0], True)),
    "transposed": (aten.transpose.int, lambda x: (x, 0, 1)),
    "a view of a part": (aten.slice.Tensor, lambda x: (x[1:], 1, 2, 6, 2)),
    "parts": (aten.split.Tensor, lambda x: (x, 2)),
    "a view without a mark": (aten._unsafe_view.default, lambda x: (x, [8, 4])),
    "another type in the same memory": (aten.view.dtype, lambda x: (x, torch.int32)),
    "several results": (aten.native_layer_norm.default, lambda x: (x, [8], None, None, 1e-5)),
    "joined": (aten.cat.default, lambda x: ([x, x, x[:1]], 0)),
    "gathered": (aten.embedding.default, lambda x: (x, torch.zeros(2, 3, dtype=torch.int64))),
    "gathered from ranks": (torch.ops._c10d_functional.all_gather_into_tensor.default, lambda x: (x, 4, "group")),
    "scattered to ranks": (
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        lambda x: (x.t(), "sum", 4, "group"),
    ),
    "waited for": (torch.ops._c10d_functional.wait_tensor.default, lambda x: (x.t(),)),
    "a shard": (torch.ops.weft.pad_shard.default, lambda x: (x[:3], 10, 3, torch.bfloat16)),
    "no operands": (aten.full.default, lambda x: ([2, 3], 7)),
    "no elements": (aten.slice.Tensor, lambda x: (x, 0, 2, 2)),
}


def _described(out: Any, given: Any) -> list[Any]:
    """Layouts, and which operand each result lies in."""
    storages = [torch_adapter.storage_key(t) for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
    return [
        (
            type(t),
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.untyped_storage().nbytes(),
            storages.index(key) if (key := torch_adapter.storage_key(t)) in storages else -1,
        )
        for t in (out if isinstance(out, (list, tuple)) else [out])
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_cached_result_equals_that_of_torchs_rule(case: str) -> None:
    op, operands = CASES[case]
    mode = FakeTensorMode()
    results = FakeResultCache(mode)
    seen = []
    for _ in range(3):
        with mode:
            args = operands(torch.empty(4, 8))
            wanted, found = op(*args), results(op, args, {})
        assert type(found) is type(wanted)
        assert _described(found, args) == _described(wanted, args)
        seen += tree_leaves(found)
    assert len(results._known) == 1
    assert len(set(map(id, seen))) == len(seen)


def test_the_type_of_numbers_and_the_default_dtype_are_part_of_the_key() -> None:
    mode = FakeTensorMode()
    results = FakeResultCache(mode)
    with mode:
        x = torch.empty(2, dtype=torch.int64)
        dtypes = [results(aten.mul.Tensor, (x, number), {}).dtype for number in (1, 1.0, True)]
        torch.set_default_dtype(torch.float64)
        try:
            dtypes.append(results(aten.mul.Tensor, (x, 1.0), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.float64]


def test_symbols_constants_and_in_place_operations_are_not_cached() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    results = FakeResultCache(mode)
    symbolic = mode.from_tensor(torch.empty(3, 4), static_shapes=False)
    with mode:
        known = torch.tensor(3.0)
        results(aten.neg.default, (symbolic,), {})
        results(aten.neg.default, (known,), {})
        results(aten.add_.Tensor, (torch.empty(2), 1), {})
        results(aten.nonzero.default, (torch.empty(2),), {})
    assert not results._known


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 24)
        self.end = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).relu().flatten(2).transpose(1, 2)
        for _ in range(3):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
            x = x + F.dropout(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.end(x).logsumexp(-1).mean()


def test_a_capture_is_the_same_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    texts = []
    for remembers in (True, False):
        if not remembers:
            monkeypatch.setattr(fake_results, "_depends_on_layouts", lambda op: False)
        texts.append(serialize.dump(capture_step(step, (torch.zeros(2, 3, 9, 9),), {}).graph))
    assert texts[0] == texts[1]


FAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a whole": lambda x: x,
    "a view of a part": lambda x: x[1:, ::2].t(),
    "another type in the same memory": lambda x: x.view(torch.int32),
    "conjugated": lambda x: torch.view_as_complex(x.unflatten(1, (4, 2))).conj(),
    "no elements": lambda x: x[2:2],
}


@pytest.mark.parametrize("case", FAKES)
def test_detached_fake_equals_detach(case: str) -> None:
    with FakeTensorMode():
        fake = FAKES[case](torch.empty(4, 8, requires_grad=case != "another type in the same memory"))
        wanted, found = fake.detach(), torch_adapter.detached_fake(fake)
    assert not found.requires_grad
    assert found.is_conj() == wanted.is_conj()
    assert _described(found, [fake]) == _described(wanted, [fake])


def test_a_detached_fake_keeps_symbolic_sizes() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(3, 4), static_shapes=False)
    with mode:
        found = torch_adapter.detached_fake(fake)
    assert [str(size) for size in found.shape] == [str(size) for size in fake.shape]
    assert torch_adapter.storage_key(found) == torch_adapter.storage_key(fake)


@pytest.mark.parametrize("shared", [False, True], ids=["memory of its own", "memory of another"])
def test_a_fake_made_by_its_layout_is_what_torch_makes(shared: bool) -> None:
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    mode._allow_unsafe_data_ptr_access = False
    with mode:
        base = torch.empty(6, 4)
        wanted = base[2:, 1:3] if shared else torch.empty(4, 2)
    layout = wanted.dtype, wanted.shape, wanted.stride(), wanted.storage_offset()
    made = [
        torch_adapter.new_fake(mode, cpu, *layout, base.untyped_storage() if shared else None) for _ in range(3)
    ]  # the first one by torch's constructor
    for fake in made:
        assert type(fake) is type(wanted)
        assert _described(fake, [base]) == _described(wanted, [base])
        assert vars(fake) == vars(wanted)
        assert torch._C._dispatch_keys(fake) == torch._C._dispatch_keys(made[0])
        with mode:
            assert (fake @ fake.t()).shape == (4, 4)
        with pytest.raises(RuntimeError):
            fake.data_ptr()
    assert torch_adapter.storage_key(made[1]) != torch_adapter.storage_key(made[2]) or shared


def test_the_symbol_of_a_number_is_forgotten() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fake = torch.empty(())
        first, same = fake.item(), fake.item()
        torch_adapter.forget_data_memos(fake)  # type: ignore[arg-type]
        later = fake.item()
    assert str(first) == str(same) != str(later)
