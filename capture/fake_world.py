"""A training script of any world size in one process: no GPU, no other rank, nothing allocated.

    with weft.fake_world(4096, rank=7) as world:
        runpy.run_path("train.py", run_name="__main__")     # the script that torchrun runs

Inside, torchrun's environment is set, a process group of that size exists (it communicates with nobody), the
GPUs that the script asks for seem to be there, and every tensor it makes is a FakeTensor of
`world.fake_mode`: a shape without storage. What the script learns from values (`loss.item()`) is therefore
unknown and raises. All fakes are on the CPU; `world.target_device` says where the real ones would be, for
whoever turns the captured graph into a program.

On the way out everything is as it was: process groups, environment, replaced functions, modes, torch's
default device, default dtype and CPU random state. It holds for the thread that entered it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import errors, torch_adapter
from weft.capture.fake_cuda import OnCpu, on_cpu, swap_devices
from weft.capture.fake_groups import swap_data, swap_groups
from weft.capture.swapping import Swaps

_active: FakeWorld | None = None


@dataclass(frozen=True)
class FakeWorld:
    """One rank of a world that is not there.

    `device`: where the fakes are. `target_device`: where the script asked its tensors to be.
    `local_world_size`: ranks (and GPUs) of one host. `fake_mode`: the one FakeTensorMode of all tensors made
    inside.
    """

    world_size: int
    rank: int
    local_world_size: int
    device: torch.device
    target_device: torch.device
    fake_mode: FakeTensorMode

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """What torchrun would set."""
        hosts = -(-self.world_size // self.local_world_size)
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.rank // self.local_world_size,
            "GROUP_WORLD_SIZE": hosts,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
        }
        return {name: str(value) for name, value in values.items()}


def current_fake_world() -> FakeWorld | None:
    """The fake world that is active in this process, or None."""
    return _active


@contextlib.contextmanager
def fake_world(
    world_size: int,
    rank: int = 0,
    *,
    device: str = "cpu",
    target_device: str = "cuda",
    local_world_size: int | None = None,
) -> Iterator[FakeWorld]:
    """Be rank `rank` of a world of `world_size` ranks, alone.

    `target_device` is the kind of device that the script finds: "cuda" (`torch.cuda.is_available()` is true,
    with `local_world_size` GPUs, 8 where nothing else is said) or "cpu". `device` is where the fakes are;
    only the CPU serves, since fake cuda tensors abort a process without CUDA.

    Raises ValueError for arguments out of range, errors.ProcessGroupExists where a real process group is
    initialised, errors.FakeWorldActive inside another fake world.
    """
    global _active
    with contextlib.ExitStack() as undo:
        undo.enter_context(_restored_globals())
        torch_adapter.forget_fake_results()
        world = _new_world(world_size, rank, device, target_device, local_world_size)
        mode = OnCpu()
        torch_adapter.dispatch_through(world.fake_mode, on_cpu)
        torch_adapter.fake_process_group(world_size, rank)
        undo.callback(dist.destroy_process_group)
        os.environ.update(world.environment())
        swaps = _swaps(world, mode)
        undo.callback(swaps.undo)
        swaps.apply()
        undo.callback(_deactivate)
        _active = world
        undo.enter_context(world.fake_mode)
        undo.enter_context(mode)
        yield world


def _new_world(world_size: int, rank: int, device: str, target_device: str, local_world_size: int | None) -> FakeWorld:
    """Check the arguments and that a world may start here."""
    local = min(8, world_size) if local_world_size is None else local_world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"weft.fake_world: no rank {rank} in a world of {world_size}")
    if local < 1:
        raise ValueError(f"weft.fake_world: local_world_size must be at least 1, not {local}")
    if device != "cpu":
        raise ValueError(f"weft.fake_world: fakes are on the CPU (device='cpu'), not on {device!r}")
    if target_device not in ("cuda", "cpu"):
        raise ValueError(f"weft.fake_world: target_device is 'cuda' or 'cpu', not {target_device!r}")
    if _active is not None:
        raise errors.FakeWorldActive(_active.rank, _active.world_size)
    if dist.is_initialized():
        raise errors.ProcessGroupExists(dist.get_rank(), dist.get_world_size(), dist.get_backend())
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    return FakeWorld(world_size, rank, local, torch.device(device), torch.device(target_device), mode)


def _swaps(world: FakeWorld, mode: OnCpu) -> Swaps:
    swaps = Swaps()
    available = world.target_device.type == "cuda"
    swap_devices(swaps, mode, world.fake_mode, world.local_rank, world.local_world_size, available)
    swap_groups(swaps, world.world_size)
    swap_data(swaps, world.fake_mode)
    return swaps


def _deactivate() -> None:
    global _active
    _active = None


@contextlib.contextmanager
def _restored_globals() -> Iterator[None]:
    """Give back the environment and what a script commonly sets in torch for the whole process."""
    environment = dict(os.environ)
    device = torch_adapter.default_device()
    dtype = torch.get_default_dtype()
    random_state = torch.get_rng_state()
    try:
        if device is not None and device.type == "cuda":
            torch.set_default_device("cpu")
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.set_default_dtype(dtype)
        if torch_adapter.default_device() != device:
            torch.set_default_device(device)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
