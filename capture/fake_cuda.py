"""What a script that trains on GPUs finds inside a fake world: `cuda` is there, and all its tensors live on
the CPU.

Fake *cuda* tensors with autograd abort a process whose torch has no CUDA, so none is ever made. Requests for
a cuda device are turned into requests for the CPU at two levels: a function mode sees what Python asks
(`x.to("cuda")` is then `x` itself, as it is on a GPU for a tensor that is already there), and the fake mode
itself sees what is left (requests from under a tensor subclass).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from weft import torch_adapter
from weft.capture import fake_streams
from weft.capture.swapping import Swaps

CPU = torch.device("cpu")

# What the stand-in device says of itself. Real figures come from the cluster description when a plan is made.
CAPABILITY = (9, 0)
MEMORY = 80 * 2**30


def is_cuda(device: Any) -> bool:
    """Whether a device argument (torch.device, string, or an accelerator's index) means a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with a cuda `device` turned into the CPU, and without pinning, which needs a
    driver."""
    if is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


class OnCpu(TorchFunctionMode):
    """Turns requests for cuda devices made from Python into requests for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = on_cpu(kwargs or {})
        if func is torch.Tensor.to:
            args = (args[0], *(CPU if is_cuda(arg) else arg for arg in args[1:]))
        elif func is torch.Tensor.cuda:
            return args[0].to(CPU)
        elif func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


def swap_devices(
    swaps: Swaps, mode: OnCpu, fake_mode: FakeTensorMode, local_rank: int, device_count: int, available: bool
) -> None:
    """Register all stand-ins of this file. `available` is what `torch.cuda.is_available()` says;
    `device_count` is the number of GPUs of a host."""
    fake_streams.set_stream(fake_streams.default_stream())
    _swap_functions(swaps, torch.cuda, _cuda(local_rank, device_count, available))
    _swap_functions(swaps, torch.cuda.nvtx, _nvtx())
    _swap_functions(swaps, torch.accelerator, _accelerator(available))
    swaps.function(torch, "Generator", _Generator)
    swaps.function(torch, "Stream", fake_streams.Stream)
    swaps.function(torch, "Event", fake_streams.Event)
    swaps.function(torch.utils, "swap_tensors", _swap_tensors(torch.utils.swap_tensors, fake_mode))
    swaps.attribute(torch.nn.Module, "to", _module_to(torch.nn.Module.to))
    swaps.attribute(torch.nn.Module, "cuda", lambda module, device=None: module.to(CPU))
    swaps.attribute(torch.autocast, "__init__", _autocast_init(torch.autocast.__init__))
    swaps.attribute(torch.Tensor, "record_stream", lambda tensor, stream: None)
    context = torch_adapter.device_context_type()
    swaps.attribute(context, "__init__", _device_context_init(context.__init__))
    swaps.function(*torch_adapter.gpu_context_entry(), nothing)
    owner, name = torch_adapter.autograd_engine_entry()
    swaps.function(owner, name, _inside(mode, getattr(owner, name)))


def _swap_functions(swaps: Swaps, owner: ModuleType, stand_ins: dict[str, Any]) -> None:
    for name, stand_in in stand_ins.items():
        if hasattr(owner, name):
            swaps.function(owner, name, stand_in)


def _cuda(local_rank: int, device_count: int, available: bool) -> dict[str, Any]:
    """The part of `torch.cuda` that training scripts use, by name."""
    current = [local_rank]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        current[0] = current[0] if index is None else index

    properties = SimpleNamespace(
        name="fake", total_memory=MEMORY, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132
    )
    return {
        "is_available": lambda: available,
        "is_initialized": lambda: available,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: device_count if available else 0,
        "current_device": lambda: current[0],
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: {},
        "set_device": set_device,
        "device": _null_context,
        "Stream": fake_streams.Stream,
        "Event": fake_streams.Event,
        "stream": fake_streams.stream,
        "set_stream": fake_streams.set_stream,
        "current_stream": fake_streams.current_stream,
        "default_stream": fake_streams.default_stream,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [],
        "initial_seed": torch.initial_seed,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda device=None: 0),
        **dict.fromkeys(("init", "synchronize", "empty_cache", "ipc_collect"), nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "set_per_process_memory_fraction"), nothing),
        # torch.manual_seed seeds these too; a seed queued for the real ones would outlive the world.
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), nothing),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), nothing),
    }


def _accelerator(available: bool) -> dict[str, Any]:
    """`torch.accelerator`, by way of whatever `torch.cuda` is by then."""
    return {
        "is_available": lambda: available,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if available else None,
        "device_count": lambda: torch.cuda.device_count(),
        "current_device_index": lambda: torch.cuda.current_device(),
        "set_device_index": lambda device: torch.cuda.set_device(device),
        "current_stream": fake_streams.current_stream,
        "set_stream": fake_streams.set_stream,
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda device=None: 0),
    }


def _nvtx() -> dict[str, Any]:
    return {
        "range": _null_context,
        **dict.fromkeys(("range_push", "range_pop", "mark"), nothing),
    }


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what has an effect on a device and no result."""


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Generator(torch.Generator):
    """`torch.Generator` that lives on the CPU whatever device it was asked for."""

    def __new__(cls, device: Any = CPU) -> _Generator:
        return super().__new__(cls, CPU if is_cuda(device) else device)  # type: ignore[call-arg]


def _swap_tensors(original: Callable[..., None], fake_mode: FakeTensorMode) -> Callable[..., None]:
    """Moves and casts of a module exchange the contents of fake parameters in this way, which torch refuses
    while anything holds a weak reference to them; and the fake mode itself does."""

    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        torch_adapter.forget_fakes(fake_mode, (t1, t2))
        original(t1, t2)

    return swap


def _module_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(CPU if is_cuda(arg) else arg for arg in args)
        kwargs = on_cpu(kwargs)
        if (args, kwargs) in (((CPU,), {}), ((), {"device": CPU})) and _lives_on_cpu(module):
            # torch exchanges fake parameters for others even where nothing changes, and cannot once they have
            # been used in a backward.
            return module
        return original(module, *args, **kwargs)

    return to


def _lives_on_cpu(module: torch.nn.Module) -> bool:
    return all(tensor.device == CPU for tensor in (*module.parameters(), *module.buffers()))


def _device_context_init(original: Callable[..., None]) -> Callable[..., None]:
    """`with torch.device("cuda")` makes tensors on the CPU. (The context adds its device below any function
    mode.)"""

    def init(self: Any, device: Any) -> None:
        original(self, CPU if is_cuda(device) else device)

    return init


def _autocast_init(original: Callable[..., None]) -> Callable[..., None]:
    """The CPU's autocast in the place of cuda's, with cuda's default dtype. (The two cast the same matrix
    products and convolutions down; the lists of what they cast up to float32 differ in a few reductions.)"""

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *rest, **named)

    return init


def _inside(mode: OnCpu, run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.backward` is itself a call that a function mode takes, and a mode is off while it handles a
    call: turn it on again for the hooks and backward functions that the engine runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_engine(*args, **kwargs)

    return run
