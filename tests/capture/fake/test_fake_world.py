from __future__ import annotations

import contextlib
import copy
import os
import resource
import runpy
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from growth import assert_near_linear
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import init_device_mesh, init_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import weft
from weft import errors, torch_adapter
from weft.capture.fake.fake_world import current_fake_world, fake_world

pytestmark = pytest.mark.fake


def process_state() -> dict[str, Any]:
    """What a fake world touches, for comparison before and after."""
    return {
        "environment": dict(os.environ),
        "group": dist.is_initialized(),
        "functions": [
            (dist.init_process_group, init_process_group, dist.destroy_process_group, dist.new_group),
            (init_device_mesh, torch.cuda.is_available, torch.cuda.Stream, torch.accelerator.is_available),
            (torch.Generator, torch.autograd.backward),
        ],
        "modules": {k: v for k, v in vars(torch.cuda).items() if not k.startswith("__")},
        "mesh": dict(vars(DeviceMesh)),
        "methods": (nn.Module.to, nn.Module.cuda, torch.autocast.__init__, DataLoader.__iter__),
        "modes": (_get_current_dispatch_mode(), _get_current_function_mode_stack()),
        "defaults": (torch.get_default_device(), torch.get_default_dtype(), torch.get_rng_state().tolist()),
        "active": current_fake_world(),
    }


def _enter(ranks: int) -> None:
    with fake_world(ranks):
        init_device_mesh("cuda", (ranks // 128, 16, 8), mesh_dim_names=("dp", "cp", "tp"))


def test_a_world_of_4096_starts_at_once() -> None:
    def of(ranks: int) -> Callable[[], object]:
        return lambda: _enter(ranks)

    assert_near_linear(of, 1024)
    with fake_world(4096, rank=1234) as world:
        assert dist.get_rank() == 1234
        assert dist.get_world_size() == 4096
        mesh = init_device_mesh("cuda", (32, 16, 8), mesh_dim_names=("dp", "cp", "tp"))
        # 1234 = 9 * 128 + 10 * 8 + 2
        assert mesh.get_coordinate() == (9, 10, 2)
        assert [mesh[name].size() for name in ("dp", "cp", "tp")] == [32, 16, 8]
        assert [mesh.get_local_rank(name) for name in ("dp", "cp", "tp")] == [9, 10, 2]
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == list(range(1232, 1240))
        assert mesh["dp", "cp"].mesh.shape == (32, 16)
        assert mesh["dp"].mesh.tolist()[:2] == [82, 210]
        assert world.target_device.type == "cuda"


def test_the_environment_is_that_of_torchrun() -> None:
    with fake_world(24, 13, local_world_size=4) as world:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        assert [int(os.environ[name]) for name in names] == [13, 24, 1, 4, 3, 6]
        assert torch.cuda.device_count() == 4
        assert world.local_rank == torch.cuda.current_device() == 1
        assert dist.is_torchelastic_launched()


def test_the_scripts_own_start_and_end_are_accepted() -> None:
    with fake_world(8) as world:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        init_process_group(backend="gloo")  # a name that was imported before the world began
        dist.destroy_process_group()
        assert current_fake_world() is world
        assert dist.get_world_size() == 8
        assert dist.new_group([0, 1], backend="gloo").size() == 2
        gathered: list[Any] = [None] * 8
        dist.all_gather_object(gathered, {"rank": 0})
        assert gathered == [{"rank": 0}] * 8
        dist.barrier(device_ids=[0])
    assert current_fake_world() is None


def assert_fake_cpu(*tensors: torch.Tensor) -> None:
    world = current_fake_world()
    assert world is not None
    for tensor in tensors:
        assert isinstance(tensor, FakeTensor)
        assert tensor.device == torch.device("cpu")
        assert tensor.fake_mode is world.fake_mode


def test_every_request_for_cuda_gives_fakes_on_the_cpu() -> None:
    with fake_world(16, 9):
        torch.cuda.set_device(3)
        assert torch.cuda.current_device() == 3
        device = torch.device("cuda", torch.cuda.current_device())
        x = torch.randn(2, 3)
        assert x.to("cuda") is x.cuda() is x.to(device) is x.to(1) is x.to(device=device) is x
        assert x.to("cuda", torch.float64).dtype == torch.float64
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0, 2.0], device=device),
            torch.full((2,), 1, device=0),
            torch.empty(3, pin_memory=True),
            x.new_ones(3, device="cuda"),
            torch.randint(0, 5, (4,), device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
            x.pin_memory(),
        ]
        with device:
            made += [torch.ones(2), torch.tensor(1.0), nn.Linear(2, 2).weight]
        torch.set_default_device("cuda")
        made += [torch.ones(2), torch.tensor([1.0]), nn.Linear(2, 2, bias=False).weight]
        assert_fake_cpu(x, *made)
        x.record_stream(torch.cuda.current_stream())


def test_requests_for_cuda_in_backward_hooks_are_redirected() -> None:
    seen: list[torch.Tensor] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        seen.extend((grad.to("cuda"), torch.tensor([1.0], device="cuda"), torch.zeros(2, device="cuda")))
        return grad

    with fake_world(2):
        weight = nn.Parameter(torch.randn(3, device="cuda"))
        weight.register_hook(hook)
        (weight * 2).sum().backward()
        torch.autograd.grad((weight * 2).sum(), weight)
        assert len(seen) == 6
        assert_fake_cpu(*seen)
        assert weight.grad is not None
        assert_fake_cpu(weight.grad)


def test_requests_from_under_a_subclass_reach_the_fake_mode() -> None:
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *call: Any) -> Any:  # type: ignore[override]
            return torch.ops.aten.zeros.default([5], device=torch.device("cuda"), pin_memory=False)

    with fake_world(2):
        outer = torch.Tensor._make_wrapper_subclass(Doubled, (5,))  # type: ignore[attr-defined]
        assert_fake_cpu(outer + 1)


def test_modules_move_without_new_parameters() -> None:
    with fake_world(4, 1):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        before = [id(p) for p in model.parameters()]
        model(torch.randn(3, 4, device="cuda")).sum().backward()
        assert model.to("cuda") is model.cuda() is model.to(1) is model.to(torch.device("cuda", 1))
        assert [id(p) for p in model.parameters()] == before
        halves = nn.Linear(4, 4).to("cuda", torch.bfloat16)
        assert halves.weight.dtype == torch.bfloat16
        assert_fake_cpu(*model.parameters(), *model.buffers(), halves.weight)


def test_meta_models_materialize() -> None:
    with fake_world(4):
        with torch.device("meta"):
            model = nn.Linear(8, 8)
        assert model.weight.device.type == "meta"
        assert_fake_cpu(*model.to_empty(device="cuda").parameters())


def test_autocast_of_cuda_casts() -> None:
    with fake_world(2):
        layer = nn.Linear(4, 4, device="cuda")
        x = torch.randn(2, 4, device="cuda")
        with torch.autocast("cuda"):
            assert layer(x).dtype == torch.float16
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32


def test_streams_events_and_device_properties() -> None:
    with fake_world(2):
        side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.cuda.device(1), torch.cuda.nvtx.range("step"):
            event.record(side)
        assert event.query()
        assert torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.get_device_properties(0).total_memory > 0
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(1)


def test_random_operations_give_fakes_and_keep_generators() -> None:
    with fake_world(2):
        torch.manual_seed(3)
        x = torch.randn(4, 4, device="cuda")
        assert_fake_cpu(x, nn.functional.dropout(x), torch.randperm(5), torch.bernoulli(x))
        assert_fake_cpu(torch.rand_like(x), x.clone().normal_(), torch.multinomial(torch.ones(4), 2))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.arange(index, index + 5), "name": str(index)}


def test_a_data_loader_yields_fakes_of_this_ranks_batches() -> None:
    with fake_world(4, 2) as world:
        rows = Rows()
        sampler: Any = DistributedSampler(rows)
        loader = DataLoader(rows, 4, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
        batches = list(loader)
        assert len(batches) == 3  # 48 rows over 4 ranks in fours
        assert len(batches[0]["name"]) == 4
        assert_fake_cpu(*(batch["ids"] for batch in batches))
        assert batches[0]["ids"].shape == (4, 5)
        assert (loader.num_workers, loader.pin_memory) == (2, True)
        inside = DataLoader(TensorDataset(torch.randn(10, 2)), 5, shuffle=True, num_workers=1)
        assert_fake_cpu(*(x for (x,) in inside))
        assert world.rank == 2


def test_a_model_of_billions_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake_world(4096):
        for context in ("cuda", "meta"):
            with torch.device(context):
                model = nn.Sequential(*[nn.TransformerEncoderLayer(8192, 64, 28672) for _ in range(4)])
            model.to_empty(device="cuda") if context == "meta" else model.to("cuda")
            assert sum(p.numel() for p in model.parameters()) > 2.9e9
            assert_fake_cpu(*model.parameters())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 200e6


def test_collectives_give_results_of_the_right_shapes() -> None:
    with fake_world(64, 5):
        x = torch.ones(64, 3, device="cuda")
        out = torch.empty(1, 3)
        work = dist.reduce_scatter_tensor(out, x, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(x)
        gathered = torch.empty(64, 3)
        dist.all_gather_into_tensor(gathered, out)
        assert_fake_cpu(x, out, gathered)


SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
{imports}

def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    {model}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(2):
        x = torch.randn(4, 16, 64, device=device)
        y = torch.randint(0, 10, (4, 16), device=device)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return model, loss

def layers():
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))

if __name__ == "__main__":
    model, loss = main()
"""

FSDP = """
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    {materialize}
"""


def script(tmp_path: Path, imports: str, model: str) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(imports=imports, model=textwrap.dedent(model).replace("\n", "\n    ")))
    return str(file)


@pytest.mark.filterwarnings("ignore")
def test_a_script_with_torchs_fully_shard(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        FSDP.format(materialize='model.to_empty(device="cuda")'),
    )
    with fake_world(16, 3):
        left = runpy.run_path(train, run_name="__main__")
        weight = left["model"][0].linear1.weight
        assert weight.shape == (128, 64)
        assert weight.to_local().shape == (8, 64)
        assert_fake_cpu(weight.to_local(), left["loss"])


def test_a_script_that_reduces_gradients_itself(tmp_path: Path) -> None:
    model = """
    model = layers().to(device)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    """
    with fake_world(4096, 4095):
        left = runpy.run_path(script(tmp_path, "", model), run_name="__main__")
        assert_fake_cpu(left["loss"], *left["model"].parameters())


WEFT = {
    "fully_shard": FSDP.format(materialize='weft.materialize(model, device="cuda")'),
    "hybrid": FSDP.format(materialize='weft.materialize(model, device="cuda")').replace(
        "(dist.get_world_size(),)", '(2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards")'
    ),
    "replicate": """
    model = layers().to(device)
    weft.replicate(model)
""",
}


@pytest.mark.parametrize("wrapper", list(WEFT))
@pytest.mark.parametrize("world_size", [8, 4096])
def test_a_script_with_wefts_wrappers(tmp_path: Path, wrapper: str, world_size: int) -> None:
    imports = "import weft\nfrom weft import MixedPrecisionPolicy, fully_shard"
    with fake_world(world_size, 5):
        left = runpy.run_path(script(tmp_path, imports, WEFT[wrapper]), run_name="__main__")
        weight = left["model"][0].linear1.weight
        assert weight.shape == (128, 64)
        shards = {"fully_shard": world_size, "hybrid": world_size // 2, "replicate": 1}[wrapper]
        local = weight if wrapper == "replicate" else weight.to_local()
        assert local.shape == (max(1, 128 // shards), 64)
        assert_fake_cpu(local, left["loss"])


def nodes_captured(world_size: int) -> int:
    with fake_world(world_size, 3):
        mesh = init_device_mesh("cuda", (world_size,))
        model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7)).cuda()
        weft.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return len(weft.capture(step, torch.randn(4, 20, device="cuda")))


def test_the_node_count_does_not_depend_on_the_world_size() -> None:
    assert nodes_captured(8) == nodes_captured(4096) > 20


def test_everything_is_restored() -> None:
    before = process_state()
    with fake_world(16):
        os.environ["LEFT_BY_THE_SCRIPT"] = "1"
        del os.environ["PATH"]
        torch.manual_seed(11)
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16)
        init_device_mesh("cuda", (4, 4))
        inside = process_state()
        assert [key for key in before if inside[key] == before[key]] == []
    assert process_state() == before
    assert not isinstance(torch.zeros(2), FakeTensor)


def test_everything_is_restored_after_an_exception() -> None:
    def run() -> None:
        with pytest.raises(SystemExit), fake_world(16), torch.device("cuda"):
            sys.exit(init_device_mesh("cpu", (16,)).size())

    run()  # what torch imports at first use is not counted
    before = process_state()
    run()
    assert process_state() == before


def test_a_module_imported_inside_gets_the_originals_back() -> None:
    module = types.ModuleType("imported_inside")
    sys.modules[module.__name__] = module
    try:
        with fake_world(2):
            exec("from torch.distributed import init_process_group as start", vars(module))
            exec("from torch.cuda import Stream", vars(module))
            assert module.start("nccl") is None
        assert module.start is dist.init_process_group is init_process_group
        assert module.Stream is torch.cuda.Stream
    finally:
        del sys.modules[module.__name__]


def test_worlds_do_not_nest() -> None:
    with fake_world(8, 3), pytest.raises(errors.FakeWorldActive, match="rank 3 of a fake world of 8"):
        fake_world(2).__enter__()


def test_a_real_process_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(errors.ProcessGroupExists, match="rank 0 of 1 over gloo"):
            fake_world(8).__enter__()
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_a_fake_tensor_is_refused() -> None:
    with fake_world(8):
        assert DeviceMesh("cuda", [[0, 1, 2, 3], [4, 5, 6, 7]]).size() == 8
        with pytest.raises(errors.MeshOfFakeTensor, match=r"\(8,\)"):
            DeviceMesh("cuda", torch.arange(8))


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_number_of_ranks_to_reshard_to_means_torchs_groups(shape: tuple[int, ...], rank: int) -> None:
    names = ("replicate", "shard")[-len(shape) :]

    def wrapped(fully_shard: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
        return fully_shard(model, mesh=mesh)

    init_process_group("fake", rank=rank, world_size=8, store=dist.HashStore())
    try:
        theirs = wrapped(torch.distributed.fsdp.fully_shard)
        group = theirs[0]._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info.shard_process_group
        expected = dist.get_process_group_ranks(group)
    finally:
        dist.destroy_process_group()
    with fake_world(8, rank):
        model = wrapped(weft.fully_shard)
        graph = weft.capture(lambda x: model(x.requires_grad_()).sum().backward(), torch.ones(2, 8))
        gathers = [node for node in graph.collectives() if "all_gather" in str(node.target)]
        groups = [list(torch_adapter.group_ranks(graph.groups[n.args[2]])) for n in gathers]
    again = [ranks for ranks in groups if len(ranks) == 2]
    assert again == [expected, expected]  # weight and bias
    assert len(groups) == 6


def test_a_cpu_script_sees_no_cuda() -> None:
    with fake_world(8, target_device="cpu") as world:
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert torch.accelerator.current_accelerator() is None
        assert world.target_device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"world_size": 4, "rank": 4}, "rank is 4, and must be less than world_size"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 4, "device": "cuda"}, "device='cuda' is not known"),
        ({"world_size": 4, "target_device": "tpu"}, "tpu"),
        ({"world_size": 4, "local_world_size": 0}, "local_world_size"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what), fake_world(**arguments):
        pass
    assert not dist.is_initialized()


def test_sequences_of_numbers_can_be_read_while_a_model_is_built() -> None:
    """timm and others set rates of stochastic depth in this way."""
    rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
    with weft.fake_world(4):
        assert [x.item() for x in torch.linspace(0, 0.1, 5)] == rates
        assert torch.linspace(0, 0.1, 5, device="cuda").tolist() == rates
        assert [float(x) > 2 for x in torch.arange(5)] == [False, False, False, True, True]
        assert [part.tolist() for part in torch.linspace(0, 0.1, 5).split([2, 3])] == [rates[:2], rates[2:]]
        assert [part.tolist() for part in torch.arange(4).chunk(2)] == [[0, 1], [2, 3]]
        changed = torch.arange(3)
        changed.add_(1)
        with pytest.raises(Exception, match=r"data-dependent|Could not guard"):
            bool(changed[0] > 0)


def test_a_step_that_makes_sequences_is_captured_as_outside_of_a_fake_world() -> None:
    def operations() -> list[str]:
        captured = weft.capture(lambda x: x * (torch.arange(4) * x.shape[0]).sum().item(), torch.ones(2))
        return [str(node.target) for node in captured.graph.nodes]

    with weft.fake_world(1):
        inside = operations()
    assert inside == operations()


def test_copies_of_modules_are_captured_like_the_modules() -> None:
    """``nn.TransformerEncoder`` copies its layer, as a target network or an average of weights is a copy."""

    def gradients(make: Callable[[], nn.Module], fake: bool) -> tuple[list[str], int]:
        with fake_world(1) if fake else contextlib.nullcontext():
            model = make()

            def step(x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).float().square().mean()
                loss.backward()
                return loss.detach()

            graph = weft.capture(step, torch.randn(2, 5, 16))
        return [entry.name for entry in graph.inputs], len(graph.outputs)

    layer = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    for make in (lambda: nn.TransformerEncoder(layer(), 2), lambda: copy.deepcopy(nn.Linear(16, 16))):
        assert gradients(make, fake=True) == gradients(make, fake=False)
