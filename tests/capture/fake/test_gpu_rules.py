"""Operations that only GPUs have: captured in a fake world, and with the results of the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

import weft
from weft.capture.fake.fake_rules import fake_result
from weft.capture.fake.gpu_rules import GPU_RULES

aten = torch.ops.aten

Tensor = torch.Tensor


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    return nn.SyncBatchNorm.convert_sync_batchnorm(layers)


def training(model: nn.Module, compiled: bool) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean() + model(x + 1).sum() * 1e-3
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return weft.compile(step) if compiled else step


def test_batch_norms_over_ranks_are_captured_and_planned_without_a_gpu() -> None:
    with weft.fake_world(8):
        model = network().cuda()
        step = training(model, compiled=True)
        x = torch.randn(4, 3, 8, 8, device="cuda")
        found = str(weft.capture(step, x))  # type: ignore[bad-argument-type]
        assert found.count("batch_norm_gather_stats_with_counts(") == found.count("aten.batch_norm_elemt(") == 4
        assert found.count("= _c10d_functional.all_reduce(") == 4
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert f"new value of model.1.{name}" in found
        assert weft.plan(step, x, cluster="h200x8").exposed_seconds


def test_a_batch_norm_over_ranks_still_refuses_a_cpu_outside_of_a_fake_world() -> None:
    with weft.fake_world(2):
        weft.capture(network().cuda(), torch.randn(4, 3, 8, 8, device="cuda"))
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            network()(torch.randn(4, 3, 8, 8))
    finally:
        dist.destroy_process_group()


# ---- on a GPU


def cases() -> dict[Any, tuple[Any, ...]]:
    """Arguments of each operation that has a rule, on a GPU."""
    of = lambda *sizes, dtype=torch.float32: torch.randn(sizes, device="cuda", dtype=dtype)
    half = torch.bfloat16
    image, channels = of(2, 6, 5, 4, dtype=half), [of(6) for _ in range(6)]
    last = image.to(memory_format=torch.channels_last)
    counts = torch.full((2,), 20.0, device="cuda")
    gates = (of(3, 12), of(3, 12), of(3, 4), of(12), of(12))
    lengths = torch.tensor([7, 6], device="cuda")
    return {
        aten._use_cudnn_ctc_loss.Tensor: (of(7, 2, 5), torch.ones(2, 3, device="cuda"), lengths, lengths, 0),
        aten._use_cudnn_ctc_loss.default: (of(7, 2, 5), torch.ones(2, 3, device="cuda"), [7, 6], [3, 2], 0),
        aten._thnn_fused_gru_cell.default: gates,
        aten._thnn_fused_gru_cell_backward.default: (of(3, 4), of(3, 20), True),
        aten.batch_norm_stats.default: (last, 1e-5),
        aten.batch_norm_elemt.default: (last, *channels[:4], 1e-5),
        aten.batch_norm_gather_stats.default: (image, of(2, 6), of(2, 6), *channels[:2], 0.1, 1e-5, 20),
        aten.batch_norm_gather_stats_with_counts.default: (
            *(image, of(2, 6), of(2, 6), *channels[:2], 0.1, 1e-5, counts),
        ),
        aten.batch_norm_backward_reduce.default: (last, last, *channels[:3], True, True, True),
        aten.batch_norm_backward_elemt.default: (last, last, *channels[:5], counts.int()),
        aten.cudnn_grid_sampler.default: (of(2, 3, 5, 4), of(2, 6, 7, 2)),
        aten.cudnn_grid_sampler_backward.default: (of(2, 3, 5, 4), of(2, 6, 7, 2), of(2, 3, 6, 7)),
    }


@pytest.mark.gpu
def test_results_have_the_layouts_of_the_kernels() -> None:
    made = cases()
    assert made.keys() == {op for op in GPU_RULES if "miopen" not in str(op)}
    for op, args in made.items():
        found = op(*args)
        with FakeTensorMode() as mode:
            stated = fake_result(op, tree_map_only(Tensor, mode.from_tensor, args), {})
        layouts = [
            [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in tree_leaves(each)]
            for each in (stated, found)
        ]
        assert layouts[0] == layouts[1], op


def ctc(x: Tensor) -> Tensor:
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]], device=x.device)
    lengths, of_targets = (torch.tensor(each, device=x.device) for each in ([6, 5], [3, 2]))
    # 2 sequences of 6 tokens of 5 classes
    tokens = x.view(2, 6, 5).transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(tokens, targets, lengths, of_targets)


def sampled(x: Tensor) -> Tensor:
    grid = torch.stack([x[0].view(1, 6, 5).tanh(), x[1].view(1, 6, 5).sin()], dim=-1)
    return F.grid_sample(x.view(1, 2, 6, 5), grid, align_corners=True).square().sum()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell", "ctc", "ctc of lists", "grid_sample"])
def test_gpus_own_kernels_train_as_in_eager(name: str) -> None:
    def run(compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model: Any = getattr(nn, name, lambda *_: nn.Linear(30, 30))(30, 30).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def loss_of(x: Tensor) -> Tensor:
            out = model(x)
            if name == "grid_sample":
                return sampled(out)
            if name == "ctc":
                return ctc(out)
            if name == "ctc of lists":
                tokens = out.view(2, 6, 5).transpose(0, 1).log_softmax(-1)
                return F.ctc_loss(tokens, torch.tensor([[1, 2, 2], [3, 1, 0]], device=x.device), [6, 5], [3, 2])
            return (out[0] if isinstance(out, tuple) else out).square().sum()

        def step(x: Tensor) -> Tensor:
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = weft.compile(step) if compiled else step
        draw = torch.Generator("cuda").manual_seed(1)
        losses = [call(torch.randn(2, 30, device="cuda", generator=draw)).clone() for _ in range(4)]
        return losses, [each.detach() for each in model.parameters()]

    torch.testing.assert_close(run(compiled=True), run(compiled=False), rtol=1e-4, atol=1e-5)


class OfOneRank(nn.SyncBatchNorm):
    """With what torch does for several ranks, for a group of one: a GPU has one rank of NCCL."""

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.weight, self.bias, self.running_mean, self.running_var
        return SyncBatchNorm.apply(x, *parameters, self.eps, self.momentum, dist.group.WORLD, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norms_over_ranks_train_as_in_eager(dtype: torch.dtype, channels_last: bool) -> None:
    def run(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        norm = OfOneRank(8)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3)).cuda()
        step = training(model, compiled)
        draw = torch.Generator("cuda").manual_seed(1)
        losses = []
        for _ in range(4):
            x = torch.randn(4, 3, 8, 8, device="cuda", generator=draw)
            with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype):
                losses.append(step(x.to(memory_format=torch.channels_last) if channels_last else x).clone())
        return {**model.state_dict(), "losses": torch.stack(losses)}

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, expected = run(compiled=True), run(compiled=False)
    finally:
        dist.destroy_process_group()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)
