"""Models that ``weft.parallelize`` or torch's ``parallelize_module`` shards: compiled training equals eager training to
the bit, and training of the whole model within bounds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import weft
import weft.errors
from harness import run_ranks
from weft.distributed.dtensor.conversions import to_local
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule.decisions import structure

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 32, 8, 16
STEPS = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Decoder(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: Decoder, mesh: Any, styles: Any, sequence: bool, sharded_loss: bool) -> Decoder:
    """Shard a decoder as torch's tutorial does, with or without sequence and loss parallelism, by weft or torch."""
    logits = Shard(-1) if sharded_loss else Replicate()
    along = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "head": styles.ColwiseParallel(input_layouts=along, output_layouts=logits, use_local_output=not sharded_loss),
    }
    if sequence:
        plan["norm"] = styles.SequenceParallel()
    for at in range(len(model.layers)):
        of_layer: dict[str, Any] = {
            "attention.out": styles.RowwiseParallel(output_layouts=along),
            "mlp.up": styles.ColwiseParallel(input_layouts=along),
            "mlp.down": styles.RowwiseParallel(output_layouts=along),
        } | {f"attention.{name}": styles.ColwiseParallel() for name in ("query", "key", "value")}
        if sequence:
            of_layer |= {
                "before_attention": styles.SequenceParallel(),
                "before_mlp": styles.SequenceParallel(),
                "attention": styles.PrepareModuleInput(input_layouts=along, desired_input_layouts=Replicate()),
            }
        plan |= {f"layers.{at}.{name}": style for name, style in of_layer.items()}
    return styles.parallelize_module(model, mesh, plan)


def train(model: nn.Module, compiled: bool, steps: int, sharded_loss: bool = False) -> list[Tensor]:
    """Train on the same batches each time. Returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(ids)
        if sharded_loss:
            with loss_parallel():
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss.backward()
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    run = weft.compile(step, mode="bitwise") if compiled else step
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator) for _ in range(steps)]
    return [run(*batch) for batch in batches]


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


class Case(NamedTuple):
    styles: Any  # the module whose styles are used
    sequence: bool
    sharded_loss: bool


CASES = {
    1: [
        Case(weft, False, False),
        Case(weft, True, False),
        Case(weft, True, True),
        Case(torch_parallel, True, True),
    ],
    2: [Case(weft, True, False), Case(torch_parallel, True, True)],
}


def trained(mesh: Any, compiled: bool, case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    model = parallelize(Decoder(), mesh["tp"], *case)
    if mesh["dp"].size() > 1:
        for layer in model.layers:
            weft.fully_shard(layer, mesh=mesh["dp"])
        weft.fully_shard(model, mesh=mesh["dp"])
    losses = train(model, compiled, STEPS, case.sharded_loss)
    return [*losses, *(whole(parameter) for parameter in model.parameters())]


def differences(rank: int, world: int, dp: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    unsharded = Decoder()
    expected = [*train(unsharded, False, STEPS), *unsharded.parameters()]
    wrong = []
    for case in CASES[dp]:
        eager, compiled = (trained(mesh, way, case) for way in (False, True))
        if not all(map(torch.equal, eager, compiled)):
            wrong.append(f"{case}: not eager's bits")
        for at, (one, other) in enumerate(zip(compiled, expected, strict=True)):
            if not torch.allclose(one, other, rtol=1e-4, atol=2e-5):
                wrong.append(f"{case}: value {at} is not the whole model's, {(one - other).abs().max()}")
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "dp"), [(2, 1), (4, 2)])
def test_compiled_training_equals_eager_and_the_whole_model(world: int, dp: int) -> None:
    assert run_ranks(differences, world, dp, timeout=170) == [[]] * world


# ---- styles on single modules, against the module that is not sharded

Build = Callable[[], nn.Module]
IDS = torch.tensor([[0, 3, 8, 1], [6, 2, 2, 10]])
X = torch.linspace(-1, 1, 2 * 4 * 6).view(2, 4, 6)

SINGLE: dict[str, tuple[Build, Callable[[], Any], Tensor]] = {
    "columns, odd": (lambda: nn.Linear(6, 7), lambda: weft.ColwiseParallel(output_layouts=Replicate()), X),
    "rows, odd": (lambda: nn.Linear(6, 5), lambda: weft.RowwiseParallel(input_layouts=Replicate()), X),
    "rows of the sequence": (
        lambda: nn.Sequential(nn.Linear(6, 8)),
        lambda: {"0": weft.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)},
        X,
    ),
    "rows to columns": (
        lambda: nn.Linear(6, 8),
        lambda: weft.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(2), use_local_output=False),
        X,
    ),
    "rows of a table": (
        lambda: nn.Embedding(11, 6, padding_idx=2),
        lambda: weft.RowwiseParallel(input_layouts=Replicate()),
        IDS,
    ),
    "rows of a table, gradients by how often each is used": (
        lambda: nn.Embedding(11, 6, scale_grad_by_freq=True),
        lambda: weft.RowwiseParallel(input_layouts=Replicate()),
        IDS.repeat(1, 3),
    ),
    "more ranks than rows": (
        lambda: nn.Embedding(3, 6),
        lambda: weft.RowwiseParallel(input_layouts=Replicate()),
        IDS % 3,
    ),
    "columns of a table": (
        lambda: nn.Embedding(11, 6, padding_idx=2),
        lambda: weft.ColwiseParallel(output_layouts=Replicate()),
        IDS,
    ),
    "a norm of the sequence": (
        lambda: nn.LayerNorm(6),
        lambda: weft.SequenceParallel(sequence_dim=1),
        DTensor,  # type: ignore[dict-item] # the input is sharded by the test
    ),
    "whole": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), lambda: weft.NoParallel(), X),
    "nothing named but one": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
        lambda: {"2": weft.ColwiseParallel(output_layouts=Replicate())},
        X,
    ),
}


def outcome(module: nn.Module, x: Any) -> list[Tensor]:
    """The output, and the gradients of the parameters and of the input."""
    x = x.detach().requires_grad_() if x.is_floating_point() else x
    y = module(x)
    weights = torch.arange(y.shape[-1], dtype=torch.float32).add(1)
    if isinstance(y, DTensor):
        weights = distribute_tensor(weights, y.device_mesh, [Replicate()])
    (y * weights).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [whole(value) for value in (y, *gradients, *([x.grad] if x.is_floating_point() else []))]


def single_differences(rank: int, world: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    wrong = []
    for name, (build, style, x) in SINGLE.items():
        torch.manual_seed(0)
        module = build()
        sharded = weft.parallelize(copy.deepcopy(module), mesh, style())
        given = distribute_tensor(X, mesh, [Shard(1)]) if x is DTensor else x
        expected = outcome(module, X if x is DTensor else x)
        for kind, each in (("", sharded), ("a deep copy of ", copy.deepcopy(sharded))):
            if not all(isinstance(parameter, DTensor) for parameter in each.parameters()):
                wrong.append(f"{kind}{name}: plain parameters are left")
            for at, (one, other) in enumerate(zip(outcome(each, given), expected, strict=True)):
                if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    wrong.append(f"{kind}{name}: value {at} is {one}, not {other}")
        if set(vars(sharded)) != set(vars(module)):
            wrong.append(f"{name}: {set(vars(sharded)) ^ set(vars(module))} stay after forward")
    return wrong


@pytest.mark.gloo
def test_each_style_equals_the_whole_module_on_four_ranks() -> None:
    assert run_ranks(single_differences, 4, timeout=120) == [[]] * 4


# ---- plans that are refused


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def test_a_weight_that_two_modules_share_stays_shared() -> None:
    with weft.fake_world(2):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rows, columns = weft.RowwiseParallel(input_layouts=Replicate()), weft.ColwiseParallel()
        model = weft.parallelize(Tied(), mesh, {"embedding": rows, "head": columns})
        assert model.head.weight is model.embedding.weight
        with pytest.raises(weft.errors.InvalidArgument, match=r"that embedding.weight and head.weight share"):
            weft.parallelize(Tied(), mesh, {"embedding": weft.ColwiseParallel(), "head": weft.ColwiseParallel()})


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no such module": (
        lambda: {"layers.0.attn.query": weft.ColwiseParallel()},
        "Did you mean layers.0.attention.query",
    ),
    "a class": (lambda: {"head": weft.ColwiseParallel}, "an instance"),
    "a norm by columns": (lambda: {"norm": weft.ColwiseParallel()}, "Linear or torch.nn.Embedding"),
    "two styles": (
        lambda: {"layers.*.mlp.up": weft.ColwiseParallel(), "layers.0.mlp.up": weft.RowwiseParallel()},
        r"both name 'layers.0.mlp.up'",
    ),
    "a table whose rows are kept short": (
        lambda: {"embedding": weft.ColwiseParallel()},
        "Leave max_norm out",
    ),
    "a table with sparse gradients": (lambda: {"head": weft.ColwiseParallel()}, "Set sparse=False"),
    "norms of a sharded sequence are not named": (
        lambda: {"embedding": weft.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))},
        r"layers.0.before_attention.weight.* SequenceParallel\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_is_refused(name: str) -> None:
    plan, message = REFUSED[name]
    model = Decoder()
    model.embedding.max_norm = 1.0 if "short" in name else None
    model.embedding.sparse = "sparse" in name
    with weft.fake_world(2), pytest.raises(weft.errors.InvalidArgument, match=message):
        weft.parallelize(model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan())


def test_a_sequence_of_unequal_parts_is_refused() -> None:
    """Plain tensors do not tell their readers that other ranks' parts have other sizes."""
    with weft.fake_world(2):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize(Decoder(), mesh, weft, True, False)
        model(torch.zeros(1, LENGTH, dtype=torch.long))
        with pytest.raises(weft.errors.InvalidArgument, match=r"Pad dimension 1 .* or set use_local_output=False"):
            model(torch.zeros(1, LENGTH - 1, dtype=torch.long))


def uneven_sequence(rank: int, world: int) -> float:
    """How far a sequence of unequal parts, in DTensors, is from the whole one: output and gradients."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole_one = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)).double()
    plan: dict[str, Any] = {
        "0": weft.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "1": weft.SequenceParallel(),
        "2": weft.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    sharded = weft.parallelize(copy.deepcopy(whole_one), mesh, plan)
    x = torch.linspace(-1, 1, 2 * 5 * 6, dtype=torch.float64).view(2, 5, 6)
    pairs = zip(outcome(sharded, x), outcome(whole_one, x), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.gloo
def test_dtensors_of_unequal_parts_of_a_sequence() -> None:
    assert max(run_ranks(uneven_sequence, 2)) < 1e-10


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    with weft.fake_world(4):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(weft.errors.InvalidArgument, match=r'such as mesh\["tp"\]'):
            weft.parallelize(Decoder(), mesh, {"head": weft.ColwiseParallel()})


# ---- the graph


@pytest.mark.fake
def test_the_number_of_collectives_and_copies_does_not_depend_on_the_world() -> None:
    counts = []
    for world in (2, 4, 8):
        with weft.fake_world(world):
            mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
            model = parallelize(Decoder(), mesh, weft, sequence=True, sharded_loss=False)

            def step(ids: Tensor, model: nn.Module = model) -> Tensor:
                loss = model(ids).logsumexp(-1).mean()
                loss.backward()
                return loss.detach()

            graph = run_passes(weft.capture(step, torch.zeros(2, LENGTH, dtype=torch.long)), KERNEL_PASSES)
            names = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            moved = ("aten.clone.default", "aten.cat.default", "aten.split.Tensor")
            counts.append({name: n for name, n in names.items() if name.startswith("_c10d") or name in moved})
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].get("aten.split.Tensor", 0) == 0


@pytest.mark.fake
@pytest.mark.parametrize("case", [*CASES[1], Case(torch_parallel, False, False)], ids=str)
def test_the_graphs_of_all_ranks_have_one_structure(case: Case) -> None:
    """Else no schedule fits all ranks, and collectives run in the order of the step, over NCCL."""
    found = set()
    for rank in (0, 1, 3):
        with weft.fake_world(4, rank):
            mesh = dist.init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
            model = parallelize(Decoder().bfloat16(), mesh, *case)
            optimizer = torch.optim.AdamW([{"params": [each]} for each in model.parameters()], fused=True)

            def step(ids: Tensor, labels: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                logits = model(ids)
                with loss_parallel():
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                    loss.backward()
                optimizer.step()
                return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

            ids = torch.zeros(2, LENGTH, dtype=torch.long)
            graph = retarget(weft.capture(step, ids, ids).copy(), "cuda:0")
            found.add(structure(kernel_graph(run_passes(graph, KERNEL_PASSES))))
    assert len(found) == 1


class Scaled(nn.Module):
    """Reads its input as a DTensor. The gradient of that is replicated; GEMMs of parts give a partial one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        return (x * 2).to_local().sum()


def prepared_gradients(rank: int, world: int) -> list[Tensor]:
    """The gradient of a gathered input by torch's style and by weft's."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    found = []
    for styles in (torch_parallel, weft):
        style: Any = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        module = torch_parallel.parallelize_module(Scaled(), mesh, style)
        x = torch.arange(12.0).reshape(1, 3, 4).add(rank).requires_grad_()
        module(x).backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def test_a_replicated_gradient_of_a_gathered_input_is_not_summed_over_the_ranks() -> None:
    for by_torch, by_weft in run_ranks(prepared_gradients, 2):
        assert torch.equal(by_torch, by_weft)
        assert torch.equal(by_weft, torch.full((1, 3, 4), 2.0))


class Readers(nn.Module):
    """Two projections of one activation, which may be changed between them."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(4, 6).double()

    def forward(self, x: Any) -> Tensor:
        first = self.first(x)
        if self.change == "in place":
            with torch.no_grad():
                x.mul_(3)
        elif self.change == "part":
            with torch.no_grad():
                (x.to_local() if isinstance(x, DTensor) else x).mul_(3)
        elif self.change == "another":
            x = x * 3
        return first + self.second(x)


def read_twice(rank: int, world: int, kind: str, change: str) -> tuple[int, list[Tensor]]:
    """All-gathers and all-reduces of a step, and its loss and gradients, by the kind of input."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = Readers(change).requires_grad_(change in ("", "another"))  # weights save what autograd lets nobody change
    if kind != "whole model":
        layouts: Any = {"sharded": Shard(1), "DTensor": Shard(1)}.get(kind, Replicate())
        style = weft.ColwiseParallel(input_layouts=layouts)
        weft.parallelize(model, mesh, {"first": style, "second": style})
    leaf = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(1, 4, 4).requires_grad_()
    x: Any = leaf * 1 if kind != "leaf" else leaf
    if kind == "sharded":
        x = x.chunk(world, 1)[rank] * 1
    elif kind == "DTensor":
        x = DTensor.from_local(x.chunk(world, 1)[rank] * 1, mesh, [Shard(1)], run_check=False)
    with torch.profiler.profile() as profile:
        loss = model(x).square().sum()
        loss.backward()
    names = ("c10d_functional::all_reduce", "c10d_functional::all_gather_into_tensor")
    issued = sum(event.count for event in profile.key_averages() if event.key.strip("_") in names)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    gradients = [gradient for gradient in gradients if gradient is not None]
    loss, gradient = loss.detach(), leaf.grad
    if kind != "whole model":
        dist.all_reduce(loss)
    if kind in ("sharded", "DTensor"):
        dist.all_reduce(gradient)
    return issued, [loss, gradient, *gradients]


@pytest.mark.parametrize(
    ("kind", "change", "issued"),
    [
        ("replicated", "", 1),
        ("leaf", "", 2),
        ("sharded", "", 1),
        ("DTensor", "", 1),
        ("replicated", "in place", 2),
        ("sharded", "in place", 2),
        ("DTensor", "part", 2),
        ("replicated", "another", 2),
        ("DTensor", "another", 2),
    ],
)
def test_readers_of_one_activation_share_a_collective(kind: str, change: str, issued: int) -> None:
    (_, expected), _ = run_ranks(read_twice, 2, "whole model", change)
    for found, values in run_ranks(read_twice, 2, kind, change):
        assert found == issued
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3], ids=["expanded", "dense"])
def test_gradients_of_local_parts_have_the_strides_of_forward(rows: int) -> None:
    """A gradient that is transposed in memory, also where forward repeats one row and has no strides to take."""
    with weft.fake_world(2):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = nn.Parameter(distribute_tensor(torch.ones(rows, 4), mesh, [Shard(1)], src_data_rank=None))
        seen: list[Any] = []
        whole_one: Any = weight.expand(3, 4)
        whole_one.register_hook(seen.append)
        (to_local(whole_one).t() * torch.ones(2, 3)).sum().backward()
        assert (seen[0].stride(), seen[0].to_local().stride()) == ((4, 1), (2, 1))


@torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # it has a second derivative
def penalized(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The gradients of a loss to which the square of its gradients is added."""
    loss = model(ids).square().mean()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    penalty = sum(
        (each.square().sum().full_tensor() if isinstance(each, DTensor) else each.square().sum()) for each in gradients
    )
    (loss + penalty).backward()  # type: ignore[no-untyped-call]
    return [whole(parameter.grad) for parameter in parameters if parameter.grad is not None]


def penalty_differences(rank: int, world: int) -> list[float]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    ids = torch.arange(LENGTH)[None] % VOCABULARY
    torch.manual_seed(0)
    model = Decoder().double()
    expected = penalized(copy.deepcopy(model), ids)
    found = []
    for sequence in (False, True):
        mine = penalized(parallelize(copy.deepcopy(model), mesh, weft, sequence, False), ids)
        assert len(mine) == len(expected)
        found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, expected, strict=True)))
    return found


@pytest.mark.gloo
def test_gradients_of_gradients_are_those_of_the_whole_model() -> None:
    for found in run_ranks(penalty_differences, 2, timeout=170):
        assert max(found) < 1e-9
