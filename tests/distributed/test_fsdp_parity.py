"""weft's fully_shard against torch's: the same training, on real processes, must give the same bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_of_torch_2_15 import PolicyOfTorch215
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from harness import run_ranks
from weft.distributed import fsdp as weft_fsdp
from weft.errors import UnsupportedPolicy

pytestmark = pytest.mark.gloo

STEPS = 5
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Shard_ = Callable[..., Any]


class Block(nn.Module):
    """A residual block with sizes that no world divides."""

    def __init__(self, width: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head; `recompute` checkpoints each block from inside the model's forward."""

    def __init__(self, tied: bool = False, recompute: str | None = None, repeats: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 3)
        self.recompute = recompute
        self.repeats = repeats
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            for _ in range(self.repeats):
                if self.recompute is None:
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x * self.scale.to(x.dtype))


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def wrap(shard: Shard_, model: Model, mesh: DeviceMesh, policy: Any = None, **options: Any) -> Model:
    policy = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=policy, **options)
    shard(model, mesh=mesh, mp_policy=policy)
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().to(logits.device))


def train(
    model: Any,
    rank: int,
    backward: Callable[[Any, int, torch.Tensor], torch.Tensor] | None = None,
    clip: float | None = None,
) -> dict[str, Any]:
    """Losses, gradient norms and final whole parameters and gradients of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    torch.manual_seed(100 + rank)
    seen: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(STEPS):
        ids = torch.randint(0, 11, (4, 6))
        if backward is None:
            loss = loss_of(model, ids)
            loss.backward()
        else:
            loss = backward(model, step, ids)
        seen["loss"].append(loss.detach())
        if clip is not None:
            seen["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor())
        seen["grads"] = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    seen["params"] = [p.full_tensor().detach() for p in model.parameters()]
    return seen


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float | None = None) -> None:
    for key in theirs:
        assert len(ours[key]) == len(theirs[key]), (key, len(ours[key]), len(theirs[key]))
        for at, (a, b) in enumerate(zip(ours[key], theirs[key], strict=True)):
            if tolerance is None:
                assert torch.equal(a, b), (key, at, (a - b).abs().max())
            else:
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- what is trained: each case takes `shard`, weft's or torch's, and the mesh


def plain(shard: Shard_, mesh: DeviceMesh, rank: int, policy: Any = None, **options: Any) -> Any:
    return train(wrap(shard, build(), mesh, policy, **options), rank, clip=0.1)


def tied(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    return train(wrap(shard, build(tied=True), mesh), rank)


def called_twice(shard: Shard_, mesh: DeviceMesh, rank: int, policy: Any = None, **options: Any) -> Any:
    return train(wrap(shard, build(repeats=2), mesh, policy, **options), rank)


def recomputed_inside(shard: Shard_, mesh: DeviceMesh, rank: int, how: str) -> Any:
    """The checkpointed blocks are wrapped: checkpoint(fully_shard(block))."""
    return train(wrap(shard, build(recompute=how), mesh), rank)


def recomputed_in_root(shard: Shard_, mesh: DeviceMesh, rank: int, how: str, reshard: bool) -> Any:
    """Only the root is wrapped, checkpoints are inside of it: fully_shard(model with checkpoint)."""
    return train(shard(build(recompute=how), mesh=mesh, mp_policy=BF16, reshard_after_forward=reshard), rank)


def recomputed_in_wrapped(shard: Shard_, mesh: DeviceMesh, rank: int, how: str) -> Any:
    """Checkpoints inside of wrapped blocks, which read the block's own weights again in backward."""
    model = build()

    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        inner = partial(checkpoint, use_reentrant=how == "reentrant")
        return x + self.down(F.gelu(inner(lambda y: self.up(self.norm(y)), x)))

    for block in model.blocks:
        block.forward = forward.__get__(block)
    return train(wrap(shard, model, mesh, reshard_after_forward=True), rank)


def accumulated(
    shard: Shard_,
    mesh: DeviceMesh,
    rank: int,
    policy: Any,
    keep: bool = False,
    repeats: int = 1,
    compiled: bool = False,
) -> Any:
    """Three micro-batches, reduced with the last; the first uses a block once more. `compiled` is about weft's.

    The last one uses each block once: torch reduces what it has each time that backward leaves a block, weft once.
    """
    model = wrap(shard, build(), mesh, policy)

    def micro_batches(ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(()).to(mesh.device_type)
        for at, micro in enumerate((ids[:2], ids[2:3], ids[3:])):
            last = at == 2
            model.repeats = 1 if last else repeats
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            if keep:
                model.set_reshard_after_backward(last)
            loss = loss_of(model, micro) / 3
            if at == 0:
                loss = loss + model.blocks[0](torch.ones(2, 7)).float().sum() * 1e-3
            loss.backward()
            total += loss.detach()
        return total

    run = weft.compile(micro_batches) if compiled and shard is weft_fsdp.fully_shard else micro_batches
    return train(model, rank, lambda model, step, ids: run(ids))


def frozen(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    """Base weights frozen, then from the third step on trained too."""
    model = build()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    wrap(shard, model, mesh, reshard_after_forward=True)

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        if step == 2:
            for name, param in model.named_parameters():
                if "embed" not in name:
                    param.requires_grad_(True)
        loss = loss_of(model, ids)
        loss.backward()
        return loss

    return train(model, rank, backward)


def with_autocast(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        return loss

    return train(wrap(shard, build(), mesh), rank, backward)


def hybrid(shard: Shard_, mesh: DeviceMesh, rank: int, policy: Any) -> Any:
    """Replicate x shard; every other micro-batch is reduce-scattered only."""
    model = wrap(shard, build(), mesh, policy)

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        for at, micro in enumerate((ids[:2], ids[2:])):
            model.set_requires_all_reduce(at == 1)
            loss = loss_of(model, micro)
            loss.backward()
        return loss

    return train(model, rank, backward)


def sequence_parallel(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    """The gradient of the norm's weight is summed over the ranks of tensor parallelism, then reduced."""
    names = mesh.mesh_dim_names
    assert names is not None
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    plan = {
        "0": torch_parallel.SequenceParallel(sequence_dim=0),
        "1": torch_parallel.ColwiseParallel(input_layouts=Shard(0)),
        "3": torch_parallel.RowwiseParallel(output_layouts=Shard(0), use_local_output=True),
    }
    torch_parallel.parallelize_module(model, mesh[names[0]], plan)
    shard(model, mesh=mesh[names[1]], mp_policy=BF16)

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss

    return train(model, rank, backward)


def second_dimension(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11, bias=False))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 8 == 0 else None,
    )
    return train(model, rank)


def grouped(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    """Norm and head as one group; the head is called on chunks, outside of the model's forward."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.norm = nn.Embedding(11, 7), Block(), nn.LayerNorm(7)
            self.head = nn.Linear(7, 11)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.block(self.embed(ids))))

    torch.manual_seed(0)
    model = Chunked()
    shard([model.norm, model.head], mesh=mesh, mp_policy=BF16)
    shard(model, mesh=mesh, mp_policy=BF16)
    return train(model, rank)


def setters(shard: Shard_, mesh: DeviceMesh, rank: int, policy: Any, **values: Any) -> Any:
    model = wrap(shard, build(), mesh, policy)
    for part in (model, *model.blocks):
        for name, value in values.items():
            getattr(part, name)(value)
    return train(model, rank)


def cast_output(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    """Float32 out of the root; blocks take and give bfloat16."""
    model = build()
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16))
    shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    with torch.no_grad():
        assert model(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.float32
    model.reshard()
    return train(model, rank)


def prefetching(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    model = wrap(shard, build(), mesh, reshard_after_forward=True)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.set_modules_to_backward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return train(model, rank)


def by_hand(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    """unshard and reshard called by the user, asynchronously too; an evaluation between steps."""
    model = wrap(shard, build(), mesh)

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model(ids)
            model.reshard()
        model.blocks[0].unshard()
        handle = model.blocks[1].unshard(async_op=True)
        handle.wait()
        loss = loss_of(model, ids)
        loss.backward()
        return loss

    return train(model, rank, backward)


def two_forwards(shard: Shard_, mesh: DeviceMesh, rank: int, together: bool) -> Any:
    """Two forwards before the backwards: of the sum, or of each, last first."""

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        first, second = loss_of(model, ids[:2]), loss_of(model, ids[2:])
        if together:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        return first + second

    return train(wrap(shard, build(), mesh, reshard_after_forward=True), rank, backward)


def other_forward(shard: Shard_, mesh: DeviceMesh, rank: int) -> Any:
    model = build()
    Block.encode = Block.forward  # type: ignore[attr-defined]
    wrap(shard, model, mesh)
    register = register_fsdp_forward_method if shard is torch_fully_shard else weft_fsdp.register_fsdp_forward_method
    for block in model.blocks:
        register(block, "encode")

    def backward(model: Any, step: int, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids) + model.blocks[0].encode(torch.ones(2, 7)).sum() * 1e-2
        loss.backward()
        return loss

    return train(model, rank, backward)


# ---- the comparison


def compare(
    rank: int,
    world: int,
    shape: tuple[int, ...],
    cases: dict[str, Callable[..., Any]],
    tolerance: float | None = None,
) -> list[str]:
    """Names of the cases, all of which agree; in every bit where there is no tolerance."""
    names = ("replicate", "shard")[-len(shape) :]
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    for name, case in cases.items():
        with quiet():
            theirs = case(torch_fully_shard, mesh, rank)
            ours = case(weft_fsdp.fully_shard, mesh, rank)
        try:
            assert_equal(ours, theirs, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name} on {world} ranks: {error}") from error
    return list(cases)


NEW = not torch.__version__.startswith("2.11")

MATRIX: dict[str, Callable[..., Any]] = {
    "float32": plain,
    "bfloat16": partial(plain, policy=BF16),
    "float32, kept": partial(plain, reshard_after_forward=False),
    "bfloat16 reduced in bfloat16": partial(plain, policy=MixedPrecisionPolicy(torch.bfloat16)),
    "tied": tied,
    "accumulated": partial(accumulated, policy=None),
    "accumulated, bfloat16": partial(accumulated, policy=BF16),
    "frozen": frozen,
}

WRAPPING: dict[str, Callable[..., Any]] = {
    "called twice": called_twice,
    "called twice, kept": partial(called_twice, policy=BF16, reshard_after_forward=False),
    "Shard(1)": second_dimension,
    "prefetch": prefetching,
    "by hand": by_hand,
    "sum of two forwards": partial(two_forwards, together=True),
    "two forwards, two backwards": partial(two_forwards, together=False),
    "another forward method": other_forward,
    "called twice, reduced in less": partial(called_twice, policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
}

ACCUMULATING: dict[str, Callable[..., Any]] = {
    f"{name}, {how}": partial(accumulated, policy=policy, repeats=2, **options)
    for name, policy in (("bfloat16", BF16), ("no reduce dtype", MixedPrecisionPolicy(torch.bfloat16)))
    for how, options in (("resharded", {}), ("kept between", {"keep": True}), ("compiled", {"compiled": True}))
}

RECOMPUTING: dict[str, Callable[..., Any]] = {
    f"{case.__name__} {how}": partial(case, how=how, **more)
    for how in ("reentrant", "non-reentrant")
    for case, more in (
        (recomputed_inside, {}),
        (recomputed_in_root, {"reshard": True}),
        (recomputed_in_root, {"reshard": False}),
        (recomputed_in_wrapped, {}),
    )
}

POLICIES: dict[str, Callable[..., Any]] = {
    "autocast": with_autocast,
    "float16": partial(plain, policy=MixedPrecisionPolicy(torch.float16)),
    "output_dtype": cast_output,
    "inputs not cast": partial(
        setters, policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    ),
    "sums": partial(setters, policy=BF16, set_force_sum_reduction_for_comms=True),
    "sums with a factor": partial(
        setters, policy=None, set_force_sum_reduction_for_comms=True, set_gradient_divide_factor=3.0
    ),
    "no gathering in backward": partial(setters, policy=None, set_unshard_in_backward=True),
    **({"grouped": grouped} if NEW else {}),
}


@pytest.mark.parametrize(
    "cases",
    [MATRIX, WRAPPING, ACCUMULATING, RECOMPUTING, POLICIES],
    ids=["matrix", "wrapping", "accumulating", "recomputing", "policies"],
)
def test_equals_torch_on_two_ranks(cases: dict[str, Callable[..., Any]]) -> None:
    assert run_ranks(compare, 2, (2,), cases, timeout=100) == [list(cases)] * 2


# From three ranks on, gloo adds up in an order that depends on where an element lies in the buffer, and torch
# puts many gradients into one. The sums of a few bfloat16 numbers in float32 are exact in any order.
EXACT: dict[str, Callable[..., Any]] = {
    "bfloat16": partial(plain, policy=BF16),
    "accumulated, bfloat16": partial(accumulated, policy=BF16),
}
ROUNDED = {name: MATRIX[name] for name in ("float32", "tied", "accumulated")}


@pytest.mark.parametrize(("cases", "tolerance"), [(EXACT, None), (ROUNDED, 1e-6)], ids=["exact", "rounded"])
def test_equals_torch_on_four_ranks(cases: dict[str, Callable[..., Any]], tolerance: float | None) -> None:
    if tolerance is None:
        cases = {**cases, "reshard to 2": partial(plain, policy=BF16, reshard_after_forward=2)}
    run_ranks(compare, 4, (4,), cases, tolerance, timeout=100)


def reduced_as_in_torch_2_15(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    ours = plain(weft_fsdp.fully_shard, mesh, rank, PolicyOfTorch215(torch.bfloat16))
    assert_equal(ours, plain(torch_fully_shard, mesh, rank, BF16))
    with pytest.raises(AssertionError):
        assert_equal(ours, plain(torch_fully_shard, mesh, rank, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)))
    with pytest.raises(UnsupportedPolicy, match="param_dtype_override_fn"):
        plain(weft_fsdp.fully_shard, mesh, rank, PolicyOfTorch215(param_dtype_override_fn=lambda parameter: None))


def test_a_policy_of_torch_2_15_reduces_in_the_dtype_of_gradients() -> None:
    run_ranks(reduced_as_in_torch_2_15, 2)


def test_hybrid_sharding_equals_torch() -> None:
    cases = {
        "float32": plain,
        "kept": partial(plain, reshard_after_forward=False),
        "partly reduced": partial(hybrid, policy=None),
        "partly reduced, bfloat16": partial(hybrid, policy=BF16),
        "tied": tied,
    }
    run_ranks(compare, 4, (2, 2), cases, timeout=100)


def test_tensor_parallelism_equals_torch() -> None:
    run_ranks(compare, 4, (2, 2), {"sequence parallel": sequence_parallel}, timeout=100)


def test_one_rank_equals_torch() -> None:
    run_ranks(compare, 1, (1,), {k: MATRIX[k] for k in ("float32", "bfloat16", "tied", "accumulated, bfloat16")})


@pytest.mark.gpu(2)
@pytest.mark.parametrize("cases", [MATRIX, WRAPPING, RECOMPUTING], ids=["matrix", "wrapping", "recomputing"])
def test_equals_torch_on_gpus(cases: dict[str, Callable[..., Any]]) -> None:
    run_ranks(compare, 2, (2,), cases, 1e-5, timeout=170, backend="nccl")
