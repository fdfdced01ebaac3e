"""Runs a training script of any world size in one process, without a GPU, other ranks or memory for tensors.

    with weft.fake_world(4096, rank=7) as world:
        runpy.run_path("train.py", run_name="__main__")     # the script that torchrun runs

Inside, the environment variables of torchrun are set. A process group of that size exists, which communicates with
nobody. The GPUs that the script asks for seem to exist. Every tensor that the script creates is a FakeTensor of
`world.fake_mode`: a shape without data, so reading a value (`loss.item()`) raises. All fakes are on the CPU;
`world.target_device` is the device of the real tensors, for the compiler.

At the end everything is restored: process groups, environment, replaced functions, modes, and torch's default device,
default dtype and CPU random state. A fake world belongs to the thread that entered it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import errors, torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.fake.cuda_autocast import cuda_autocast_rules
from weft.capture.fake.fake_cuda import RedirectCudaToCpu, patch_devices, redirect_to_cpu
from weft.capture.fake.fake_groups import patch_data_loader, patch_groups
from weft.short_tracebacks import short_context
from weft.thread_patches import Patches


class _WorldOfThread(threading.local):
    """The fake world that the running thread is in."""

    world: FakeWorld | None = None


_mine = _WorldOfThread()
# A process group has a name of its own in C++, and so there is one fake world at a time.
_one = threading.Lock()


@dataclass(frozen=True)
class FakeWorld:
    """One rank of a simulated world.

    Attributes:
        world_size: as in torch.distributed.
        rank: as in torch.distributed.
        local_world_size: number of ranks, and of GPUs, of one host.
        device: of the fake tensors.
        target_device: the device that the script asks for.
        fake_mode: of all tensors that are created inside.
    """

    world_size: int
    rank: int
    local_world_size: int
    device: torch.device
    target_device: torch.device
    fake_mode: FakeTensorMode

    @property
    def local_rank(self) -> int:
        """Rank within the host."""
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """The environment variables that torchrun would set."""
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
    """The fake world that is active in this thread, or None."""
    return _mine.world


@short_context
@contextlib.contextmanager
def fake_world(
    world_size: int,
    rank: int = 0,
    *,
    device: str = "cpu",
    target_device: str = "cuda",
    local_world_size: int | None = None,
) -> Iterator[FakeWorld]:
    """While active, this thread is rank `rank` of a simulated world of `world_size` ranks.

    Other threads work on real tensors and see neither the process group nor the GPUs of the world. What belongs to the
    process does change for them: the environment variables, and what the script itself sets (seeds, default dtype). A
    second thread waits to enter a world until the first has left its own.

    Args:
        world_size: as in torch.distributed.
        rank: as in torch.distributed.
        device: of the fake tensors. Only "cpu" works, because fake cuda tensors abort a process without CUDA.
        target_device: the kind of device that the script finds: "cuda" (`torch.cuda.is_available()` is true) or "cpu".
        local_world_size: number of ranks and GPUs of a host; 8, or `world_size` where that is less, if not given.

    Raises:
        InvalidArgument, InvalidArgumentType, UnknownOption: an argument is out of range, or of another type.
        errors.ProcessGroupExists: a real process group is initialised.
        errors.FakeWorldActive: this thread is in a fake world already.
    """
    world = _new_world(world_size, rank, device, target_device, local_world_size)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_one)
        undo.enter_context(_restored_globals())
        undo.enter_context(cuda_autocast_rules())
        torch_adapter.forget_fake_results()
        mode = RedirectCudaToCpu(world.fake_mode)
        torch_adapter.dispatch_through(world.fake_mode, redirect_to_cpu)
        undo.enter_context(torch_adapter.process_groups_of_thread())
        torch_adapter.fake_process_group(world_size, rank)
        undo.callback(dist.destroy_process_group)
        os.environ.update(world.environment())
        patches = _patches(world, mode)
        undo.callback(patches.undo)
        patches.apply()
        undo.callback(_deactivate)
        _mine.world = world
        undo.enter_context(world.fake_mode)
        undo.enter_context(mode)
        yield world


def _new_world(world_size: int, rank: int, device: str, target_device: str, local_world_size: int | None) -> FakeWorld:
    """Check the arguments, and that no other world or process group is active."""
    checks = ArgumentChecks("weft.fake_world")
    checks.number("world_size", world_size, least=1, whole=True, remedy="Pass the number of ranks")
    checks.number("rank", rank, whole=True, remedy="Pass the rank to be, counted from 0")
    if rank >= world_size:
        raise checks.invalid("rank", rank, f"less than world_size, which is {world_size}", "Pass the rank to be")
    local = min(8, world_size) if local_world_size is None else local_world_size
    checks.number("local_world_size", local, least=1, whole=True, remedy="Pass the number of ranks of one host")
    checks.one_of("device", device, ["cpu"])
    checks.one_of("target_device", target_device, ["cuda", "cpu"])
    if _mine.world is not None:
        raise errors.FakeWorldActive(_mine.world.rank, _mine.world.world_size)
    if dist.is_initialized():
        raise errors.ProcessGroupExists(dist.get_rank(), dist.get_world_size(), dist.get_backend())
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    # A fake tensor refers to its mode, so its deep copy would have a mode of its own, which no step knows.
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[missing-attribute]
    return FakeWorld(world_size, rank, local, torch.device(device), torch.device(target_device), mode)


def _patches(world: FakeWorld, mode: RedirectCudaToCpu) -> Patches:
    patches = Patches()
    available = world.target_device.type == "cuda"
    patch_devices(patches, mode, world.fake_mode, world.local_rank, world.local_world_size, available)
    patch_groups(patches, world.world_size)
    patch_data_loader(patches, world.fake_mode)
    return patches


def _deactivate() -> None:
    _mine.world = None


@contextlib.contextmanager
def _restored_globals() -> Iterator[None]:
    """Restore the environment, and the global settings of torch that scripts commonly change."""
    environment = dict(os.environ)
    device = torch_adapter.default_device()
    dtype = torch.get_default_dtype()
    random_state = torch.get_rng_state()
    # A region of autocast may be entered inside the world and not left.
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        if device is not None and device.type == "cuda":
            torch.set_default_device("cpu")
        yield
    finally:
        torch.set_rng_state(random_state)
        torch.set_default_dtype(dtype)
        for kind, enabled, lower in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, lower)
        if torch_adapter.default_device() != device:
            torch.set_default_device(device)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
