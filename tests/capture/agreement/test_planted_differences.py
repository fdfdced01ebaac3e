"""Steps that differ between ranks: what concerns one rank alone equals eager, what partners must know is named.

Every case is a step that all ranks run in one process group, so that a hundred of them cost seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from both_ways import detached
from harness import run_ranks
from weft import knobs
from weft.errors import GraphMismatch, GroupMismatch, WeftError

pytestmark = pytest.mark.gloo

Tensor = torch.Tensor

# ---- collectives


def all_reduce(x: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, op, group=group)
    return x


def all_gather(x: Tensor, group: Any = None) -> Tensor:
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), op, group=group)
    return out


def broadcast(x: Tensor, group: Any = None, src: int = 0) -> Tensor:
    x = x.clone()
    dist.broadcast(x, src, group=group)
    return x


def all_to_all(x: Tensor, group: Any = None) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


COLLECTIVES = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, broadcast, all_to_all)}
REDUCTIONS = ("all_reduce", "reduce_scatter")

# A case makes, for a rank, a step and the arguments of its calls.
Case = Callable[[int, int], tuple[Callable[..., Any], list[tuple[Any, ...]]]]


def rows(rank: int, count: int = 12, width: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(rank))


def of_one(step: Callable[[int, Tensor], Any]) -> Case:
    """Two calls of a step that is given the rank."""
    return lambda rank, world: (lambda x: step(rank, x), [(rows(rank),), (rows(rank + 10),)])


# ---- what concerns one rank alone


def local_arithmetic(name: str) -> Iterator[tuple[str, Case]]:
    call = COLLECTIVES[name]
    yield "another operation before it", of_one(lambda rank, x: call(x.sin() if rank else x.cos()))
    yield "another operation after it", of_one(lambda rank, x: call(x).sin() if rank else call(x) * 3)
    yield "a number of the rank", of_one(lambda rank, x: call(x * (0.5 + rank)) + rank)
    yield "a result that one rank reads", of_one(lambda rank, x: (x, call(x))[0 if rank else 1] * 2)
    yield "work between two on one rank", of_one(lambda rank, x: between(call, rank, x))
    yield "another order of two", of_one(lambda rank, x: swapped(call, rank, x))
    yield (
        "as many rows as the rank says",
        lambda rank, world: (
            lambda x: call(x.mean(0).repeat(12, 1) * (1.0 / x.shape[0])),
            [(rows(rank, 3 + rank),), (rows(rank, 5 - rank),), (rows(rank, 4 + 2 * rank),)],
        ),
    )


def between(call: Any, rank: int, x: Tensor) -> Tensor:
    first = call(x)
    if rank:
        x = x + first.sum() * 0.25
    return call(x + 1).sum() + first.sum()


def swapped(call: Any, rank: int, x: Tensor) -> Tensor:
    first, second = x + 1, x * 2
    results = [call(y) for y in ((first, second) if rank else (second, first))]
    return results[0] - 2 * results[1]


def slot_of_the_rank(rank: int, x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = x
    return all_reduce(torch.cat(parts))


def keyed_by_parameter(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(3, 3))
    means = {weight: torch.full((3, 3), float(rank))}

    def step(x: Tensor) -> Tensor:
        (x @ weight).sum().backward()
        means[weight] += all_reduce(weight.grad)
        weight.grad = None
        return means[weight].clone()

    return step, [(rows(rank),), (rows(rank + 2),)]


def generator_of_the_rank(rank: int, world: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    padding = [torch.Generator() for _ in range(rank)]  # an address of its own

    def step(x: Tensor) -> Tensor:
        return all_reduce(x + torch.rand(x.shape, generator=generator)) + len(padding) * 0

    return step, [(rows(rank),), (rows(rank + 2),)]


def wrapped(kind: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if kind == "replicate":
        return weft.replicate(model, mesh=mesh)
    return weft.fully_shard(model, mesh=mesh)


def training(kind: str, sizes: Callable[[int], list[int]], read: Callable[[nn.Module], Any] = lambda model: 0) -> Case:
    """Training with a loss that is scaled by the number of rows."""

    def make(rank: int, world: int) -> Any:
        model = wrapped(kind, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

        def step(x: Tensor) -> Any:
            loss = model(x).square().sum() * (1.0 / x.shape[0])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm, read(model)

        return step, [(rows(rank + 10 * at, count),) for at, count in enumerate(sizes(rank))]

    return make


def whole(model: nn.Module) -> Any:
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def muon(rank: int, world: int) -> Any:
    model = wrapped("fully_shard", world)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, [(rows(rank, 4 + rank),), (rows(rank + 2, 4 + rank),)]


def owners(kind: str) -> Case:
    """Each parameter has a rank that updates it; the others get it from there."""

    def make(rank: int, world: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(world + 1)])
        parameters = list(model.parameters())
        momenta = {p: torch.zeros_like(p) for p in parameters[rank::world]}

        @torch.no_grad()
        def update(p: Tensor, gradient: Tensor) -> None:
            momenta[p].mul_(0.9).add_(gradient)
            p.sub_(momenta[p], alpha=0.1)

        @torch.no_grad()
        def gather_in_rows() -> None:
            padded = [*parameters, *[torch.empty(3, 3)] * (world - 1)]
            for at in range(0, len(parameters), world):
                if at + rank < len(parameters):
                    update(padded[at + rank], padded[at + rank].grad)
                dist.all_gather(padded[at : at + world], padded[at + rank])

        @torch.no_grad()
        def broadcast_each() -> None:
            for p in momenta:
                update(p, p.grad)
            for at, p in enumerate(parameters):
                dist.broadcast(p.data, at % world)

        def step(x: Tensor) -> Any:
            model(x).square().mean().backward()
            for at, p in enumerate(parameters):
                dist.reduce(p.grad, at % world) if kind == "reduced" else dist.all_reduce(p.grad)
            gather_in_rows() if kind == "gathered" else broadcast_each()
            model.zero_grad()
            return [p.detach().clone() for p in parameters]

        return step, [(rows(rank),), (rows(rank + 2),), (rows(rank + 4),)]

    return make


def experts(rank: int, world: int) -> Any:
    """Tokens go to the rank of their expert and back; how many is counted with `bincount` and read as lists."""
    torch.manual_seed(0)
    gate, expert = nn.Linear(3, world), nn.Linear(3, 3)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
            ctx.sizes = received, sent
            out = x.new_empty(sum(received), x.shape[1])
            dist.all_to_all_single(out, x.contiguous(), received, sent)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            received, sent = ctx.sizes
            out = gradient.new_empty(sum(sent), gradient.shape[1])
            dist.all_to_all_single(out, gradient.contiguous(), sent, received)
            return out, None, None

    def step(x: Tensor) -> Any:
        chosen = gate(x).argmax(1)
        counts = torch.bincount(chosen, minlength=world)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        order = chosen.argsort(stable=True)
        sent, received = counts.tolist(), theirs.tolist()
        there = expert(Exchange.apply(x[order], received, sent))
        back = torch.zeros_like(x).index_copy(0, order, Exchange.apply(there, sent, received))
        loss = (back * gate(x).softmax(1).amax(1, keepdim=True)).square().mean()
        loss.backward()
        found = [p.grad.clone() for p in (*gate.parameters(), *expert.parameters())]
        for module in (gate, expert):
            module.zero_grad()
        return loss.detach(), found

    return step, [(rows(rank),), (rows(rank + 2),), (rows(rank + 4),)]


def logged_on_one(rank: int, world: int) -> Any:
    seen: list[float] = []
    log = weft.opaque(lambda value: seen.append(value.item()))

    def step(x: Tensor) -> Tensor:
        total = all_reduce(x)
        if rank == 0:
            log(total.sum())
        return total

    return step, [(rows(rank),), (rows(rank + 2),)]


LOCAL: dict[str, Case] = {
    **{f"{name}: {what}": case for name in COLLECTIVES for what, case in local_arithmetic(name)},
    "exchanged in unequal parts": of_one(lambda rank, x: unequal_parts(x + rank, 5)),
    "a slot of the rank": of_one(slot_of_the_rank),
    "a dictionary keyed by a parameter": keyed_by_parameter,
    "a generator": generator_of_the_rank,
    "Muon": muon,
    "an owner's parameters are gathered": owners("gathered"),
    "an owner broadcasts its parameter": owners("broadcast"),
    "gradients are reduced to the owner": owners("reduced"),
    "a rank logs": logged_on_one,
    "tokens to experts": experts,
    **{
        f"{kind}, {what}": training(kind, sizes)
        for kind in ("replicate", "fully_shard")
        for what, sizes in {
            "uneven batches": lambda rank: [4 + rank] * 3,
            "a short batch on rank 0 at call 3": lambda rank: [4, 4, 4 - (rank == 0), 4],
            "a short last batch on the last rank": lambda rank: [
                4,
                4,
                4,
                1 if rank == dist.get_world_size() - 1 else 4,
            ],
            "a size after the other": lambda rank: [4, 4 + rank, 5 + rank, 3, 6 - rank],
        }.items()
    },
    "full_tensor of uneven shards": training("fully_shard", lambda rank: [4 + rank] * 2, whole),
}


# ---- what partners must know


def foreign(name: str) -> Iterator[tuple[str, Case]]:
    call = COLLECTIVES[name]
    yield "another dtype", of_one(lambda rank, x: call(x.to(torch.bfloat16 if rank else torch.float16)))
    yield "another number of elements", of_one(lambda rank, x: call(x[: 12 if rank else 6]))
    yield "one more", of_one(lambda rank, x: [call(x) for _ in range(1 + rank)])
    yield "none", of_one(lambda rank, x: call(x) if rank else x.clone())
    yield "another kind first", of_one(lambda rank, x: two_kinds(call, rank, x))
    yield (
        "another kind",
        of_one(lambda rank, x: (call if rank else all_reduce if name != "all_reduce" else broadcast)(x)),
    )
    yield "another group", lambda rank, world: other_group(call, rank)
    yield "equal groups in another order", lambda rank, world: equal_groups(call, rank)
    yield "one collective in an equal group", lambda rank, world: one_equal_group(call, rank)
    yield "a pass switched off on one rank", Under(lambda rank: {"disable_passes": "pack"} if rank else {}, call)
    yield "other buckets", Under(lambda rank: {"bucket_mib": 1 + rank}, call)
    yield "other prefetch", Under(lambda rank: {"prefetch_mib": 1 + rank}, call)
    yield "other transports", Under(lambda rank: {"transports": "nccl" if rank else "all"}, call)
    yield "other form limits", Under(lambda rank: {"form_limit": 8 + rank}, call)
    if name in REDUCTIONS:
        max_or_sum = lambda rank: dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
        yield "another reduction", of_one(lambda rank, x: call(x, op=max_or_sum(rank)))
    if name == "broadcast":
        yield "another source", of_one(lambda rank, x: broadcast(x, src=rank))


def two_kinds(call: Any, rank: int, x: Tensor) -> Any:
    other = all_gather if call is not all_gather else reduce_scatter
    return [each(x) for each in ((call, other) if rank else (other, call))]


def other_group(call: Any, rank: int) -> Any:
    group = dist.new_group()
    return lambda x: call(x, group if rank else None), [(rows(rank),)]


def equal_groups(call: Any, rank: int) -> Any:
    groups = [dist.new_group(), dist.new_group()]
    return lambda x: [call(x, group) for group in (groups if rank else groups[::-1])], [(rows(rank),)]


def one_equal_group(call: Any, rank: int) -> Any:
    groups = [dist.new_group(), dist.new_group()]
    return lambda x: call(x, groups[min(rank, 1)]), [(rows(rank),)]


class Under:
    """A case under knobs that depend on the rank."""

    def __init__(self, values: Callable[[int], dict[str, Any]], call: Any) -> None:
        self.values, self.call = values, call

    def __call__(self, rank: int, world: int) -> Any:
        return self.call, [(rows(rank),)]


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "verify on one rank": lambda rank: {"verify": bool(rank)},
    "fallback on one rank": lambda rank: {"fallback": "eager" if rank else None},
    "another mode": lambda rank: {"mode": "bitwise" if rank else "default"},
    "another memory limit": lambda rank: {"memory_limit": 1.0 + rank},
}


def unequal_parts(x: Tensor, first: int) -> Tensor:
    """Rank 0 keeps ``first`` rows and every rank sends it as many; the last rank gets what is left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [first, *[0] * (world - 2), 12 - first]
    out = x.new_empty(sizes[rank] * world, x.shape[1])
    dist.all_to_all_single(out, x, [sizes[rank]] * world, sizes)
    return out


def other_parameters(rank: int, world: int) -> Any:
    """Gradients of equal sizes, reduced in an order of the rank's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        for p in [*model.parameters()][:: -1 if rank else 1]:
            dist.all_reduce(p.grad)

    return step, [(rows(rank),)]


def parameters_in_another_order(rank: int, world: int) -> Any:
    """Parameters of equal sizes, gathered in an order of the rank's."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.full((3, 3), float(at))) for at in range(2)]
    return lambda x: [all_gather(p.data) for p in parameters[:: -1 if rank else 1]], [(rows(rank),)]


def other_layers_sharded(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    weft.fully_shard(model[min(rank, 1)], mesh=mesh)
    return lambda x: model(x).sum().backward(), [(rows(rank, width=4),)]


FOREIGN: dict[str, Case] = {
    **{f"{name}: {what}": case for name in COLLECTIVES for what, case in foreign(name)},
    "parts that the partner does not expect": of_one(lambda rank, x: unequal_parts(x, 3 + rank)),
    "parts on one rank": of_one(lambda rank, x: unequal_parts(x, 5) if rank else all_to_all(x)),
    "gradients in another order": other_parameters,
    "parameters in another order": parameters_in_another_order,
    "another layer is sharded": other_layers_sharded,
}


# ---- what becomes of them


def run(rank: int, world: int, names: list[str]) -> dict[str, tuple[str, float]]:
    """By case: "equal" to eager, "named", or what else became of it; and the seconds that it took."""
    found: dict[str, tuple[str, float]] = {}
    for name in names:
        started = time.monotonic()
        case = LOCAL.get(name) or FOREIGN.get(name)
        values = case.values(rank) if isinstance(case, Under) else {}
        with knobs.override(**values):
            found[name] = outcome(name, case, rank, world), time.monotonic() - started
    assert weft.compile(all_reduce)(torch.ones(4)).tolist() == [world] * 4  # nobody is left in a collective
    return found


def outcome(name: str, case: Case | None, rank: int, world: int) -> str:
    options = {} if case is not None else OPTIONS[name](rank)
    case = case or of_one(lambda rank, x: all_reduce(x))
    eager = results(lambda step: step, case, rank, world) if name in LOCAL else None
    try:
        got = results(lambda step: weft.compile(step, **options), case, rank, world)
    except (GraphMismatch, GroupMismatch) as error:
        text = str(error)
        assert f"This is rank {rank}" in text
        return "named"
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    same = eager is not None and all(map(torch.equal, leaves(got), leaves(eager)))
    return "equal" if same else "wrong"


def results(wrap: Callable[[Any], Any], case: Case, rank: int, world: int) -> list[Any]:
    step, calls = case(rank, world)
    step = wrap(step)
    return [detached(step(*args)) for args in calls]


def leaves(tree: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(tree)]


WORLDS = [int(world) for world in os.environ.get("PLANTED_WORLDS", "2").split(",")]
# With three ranks the padding of uneven shards, and what gloo adds up in which order, are others.
OF_THREE = [
    "fully_shard, uneven batches",
    "fully_shard, a size after the other",
    "full_tensor of uneven shards",
    "reduce_scatter: work between two on one rank",
]


def expected(names: Iterable[str]) -> dict[str, str]:
    return {name: "equal" if name in LOCAL else "named" for name in names}


@pytest.mark.parametrize("world", WORLDS)
def test_a_difference_equals_eager_or_is_named_on_all_ranks(world: int) -> None:
    cases = [*LOCAL, *FOREIGN, *OPTIONS]
    assert len(cases) > 120
    for found in run_ranks(run, world, cases, timeout=300):
        assert {name: said for name, (said, _) in found.items()} == expected(cases)
        assert max(seconds for _, seconds in found.values()) < 30


def test_uneven_shards_and_batches_of_three_ranks_equal_eager() -> None:
    for found in run_ranks(run, 3, OF_THREE, timeout=120):
        assert {name: said for name, (said, _) in found.items()} == expected(OF_THREE)
