"""The CUDA that a training script finds inside a fake world: `torch.cuda` answers, and all tensors are on the CPU.

Fake *cuda* tensors with autograd abort a process whose torch has no CUDA, so none is ever made. Requests for a cuda
device are redirected to the CPU at two levels. A function mode sees the requests of Python code: `x.to("cuda")`
returns `x`, as it does on a GPU for a tensor that is there already. The fake mode itself sees the remaining requests,
those from inside a tensor subclass. The functions of `torch.cuda` that scripts use are replaced by simple answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from weft import torch_adapter
from weft.capture.fake import fake_streams
from weft.capture.step_threads import in_capture
from weft.thread_patches import Patches, present

CPU = torch.device("cpu")

# Properties of the fake device. A plan takes its figures from the cluster description, never from these.
CAPABILITY = (9, 0)
MEMORY = 80 * 2**30


# Functions whose results follow from Python numbers, and the most elements whose values are known.
_SEQUENCES = frozenset({torch.linspace, torch.arange, torch.logspace})
_KNOWN = 4096
# What takes them apart.
_PARTS = frozenset({torch.Tensor.split, torch.split, torch.Tensor.chunk, torch.chunk})
# Dtypes of a GPU's memory-efficient attention, and the elements that its rows are multiples of.
_EFFICIENT, _ALIGNMENT = (torch.bfloat16, torch.float16, torch.float32), 8
# Methods whose positional arguments, or whose meaning, may be another device.
_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory})


def is_cuda(device: Any) -> bool:
    """Whether a device argument (torch.device, string, or an accelerator's index) means a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def redirect_to_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the CPU for a cuda `device`, and without `pin_memory`, which needs a driver."""
    if is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


class RedirectCudaToCpu(TorchFunctionMode):
    """Function mode that redirects requests for cuda devices to the CPU. Fakes are those of ``fake_mode``."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        known = func in _SEQUENCES or (func in _PARTS and torch_adapter.known_values(args[0]) is not None)
        if known and not in_capture():
            return self._with_known_values(func, args, redirect_to_cpu(kwargs or {}))
        if kwargs:
            kwargs = redirect_to_cpu(kwargs)
        elif func not in _MOVES:  # most calls read an attribute of a tensor
            return func(*args)
        else:
            kwargs = {}
        if func is torch.Tensor.to:
            args = (args[0], *(CPU if is_cuda(arg) else arg for arg in args[1:]))
        elif func is torch.Tensor.cuda:
            return args[0].to(CPU)
        elif func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)

    def _with_known_values(
        self, func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Fake tensors that know their values: scripts read them when they build a model, as in ``[x.item() for x in
        torch.linspace(0, rate, depth)]``. In the capture of a step none does: later calls read what they find."""
        # Read before the call: a fake tensor forgets its values when a view of it is made, which may be written to.
        whole = [torch_adapter.known_values(args[0])] if func in _PARTS else args[:1]
        made = func(*args, **kwargs)
        parts = made if func in _PARTS else [made]
        # Real where the fake mode is off, as in a process group of the world.
        if not all(isinstance(part, FakeTensor) and part.numel() <= _KNOWN for part in parts) or "out" in kwargs:
            return made
        with torch_adapter.only_mode():
            real = func(*whole, *args[1:], **kwargs)
            # Parts that are views of each other cannot become fakes that know their values.
            values = [part.clone() for part in real] if func in _PARTS else [real]
        if any(value.requires_grad for value in values):
            return made
        known = [torch_adapter.fake_with_values(self._fake_mode, value) for value in values]
        return tuple(known) if func in _PARTS else known[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as one operation, also with dropout and with a bias that is learnt.

    A GPU has such kernels. torch's function decides by the CPU, whose kernel draws no dropout and gives no gradient of
    a bias, and would fall back to ATen's math backend: two GEMMs with a softmax between them. A GPU uses that backend
    where the last dimension of an operand has a stride other than 1, as a permuted bias has it
    (`check_last_dim_stride_equals_1_dense` in ATen's sdp_utils_cpp.h). The CPU's kernel accepts such a mask.
    """
    shared = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    learnt = attn_mask is not None and attn_mask.requires_grad
    strided = any(each is not None and each.stride(-1) != 1 for each in (query, key, value, attn_mask))
    # Autocast casts for torch's function, and not for the operations that are called here.
    if (strided or (shared and (learnt or dropout_p))) and torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(low) for each in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(low)
    if strided:
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    efficient = shared and not enable_gqa and query.dtype in _EFFICIENT and query.shape[-1] % _ALIGNMENT == 0
    if efficient and attn_mask is not None and learnt:
        return _with_learnt_bias(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if not dropout_p or not shared or learnt:
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **how)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    attn_mask = _additive_mask(attn_mask, query.dtype)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention by ATen's math backend: GEMMs in float32 and a softmax."""
    attend = torch.ops.aten._scaled_dot_product_attention_math.default
    mask = _additive_mask(mask, query.dtype)
    # Under autocast its float32 GEMMs would be cast down. On a GPU autocast acts on torch's function alone.
    with torch.autocast("cpu", enabled=False):
        return attend(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as one that is added to attention scores; other masks as they are."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def _with_learnt_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention by the one kernel of a GPU that gives a gradient of the bias, called as torch's own function does
    (`preprocess_mask` in ATen/native/transformers/attention.cpp): rows of the bias start at multiples of
    ``_ALIGNMENT`` elements."""
    length = bias.shape[-1]
    if length % _ALIGNMENT:
        bias = F.pad(bias, [0, _ALIGNMENT - length % _ALIGNMENT])[..., :length]
    bias = bias.expand(*query.shape[:3], key.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
    grad = torch.is_grad_enabled()
    return attend(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)[0]


def patch_devices(
    patches: Patches,
    mode: RedirectCudaToCpu,
    fake_mode: FakeTensorMode,
    local_rank: int,
    device_count: int,
    available: bool,
) -> None:
    """Register all replacements of this file.

    Args:
        patches: takes the replacements.
        mode: the function mode of the fake world.
        fake_mode: the fake mode of the fake world.
        local_rank: the current device.
        device_count: number of GPUs of a host.
        available: the answer of `torch.cuda.is_available()`.
    """
    fake_streams.set_stream(fake_streams.default_stream())
    _patch_functions(patches, torch.cuda, _cuda(local_rank, device_count, available))
    _patch_functions(patches, torch.cuda.nvtx, _nvtx())
    _patch_functions(patches, torch.accelerator, _accelerator(available))
    patches.function(torch, "Generator", _Generator)
    patches.function(torch, "Stream", fake_streams.Stream)
    patches.function(torch, "Event", fake_streams.Event)
    patches.function(torch.utils, "swap_tensors", _swap_tensors(present(torch.utils, "swap_tensors"), fake_mode))
    patches.attribute(torch.nn.Module, "to", _module_to(present(torch.nn.Module, "to")))
    patches.attribute(torch.nn.Module, "cuda", lambda module, device=None: module.to(CPU))
    _patch_autocast(patches)
    patches.attribute(torch.Tensor, "record_stream", lambda tensor, stream: None)
    _patch_synchronized_batch_norm(patches)
    context = torch_adapter.device_context_type()
    patches.attribute(context, "__init__", _device_context_init(present(context, "__init__")))
    patches.function(*torch_adapter.gpu_context_entry(), nothing)
    owner, name = torch_adapter.autograd_engine_entry()
    patches.function(owner, name, _inside(mode, present(owner, name)))


def _patch_functions(patches: Patches, owner: ModuleType, replacements: dict[str, Any]) -> None:
    for name, new_operand in replacements.items():
        if hasattr(owner, name):
            patches.function(owner, name, new_operand)


def _cuda(local_rank: int, device_count: int, available: bool) -> dict[str, Any]:
    """Replacements of the functions of `torch.cuda` that training scripts use, by name."""
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
    """Replacements of the functions of `torch.accelerator`; they use the replaced `torch.cuda`."""
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
    """Replaces a function that has an effect on a device and returns nothing."""


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Generator(torch.Generator):
    """`torch.Generator` on the CPU, whatever device was requested."""

    def __new__(cls, device: Any = CPU) -> _Generator:
        return super().__new__(cls, CPU if is_cuda(device) else device)  # type: ignore[call-arg]


def _swap_tensors(original: Callable[..., None], fake_mode: FakeTensorMode) -> Callable[..., None]:
    """Moves and casts of a module swap the contents of fake parameters. Torch refuses that while there is a weak
    reference to them, and the fake mode holds one. The replacement lets the fake mode forget them first."""

    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        torch_adapter.forget_fakes(fake_mode, (t1, t2))
        original(t1, t2)

    return swap


def _module_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(CPU if is_cuda(arg) else arg for arg in args)
        kwargs = redirect_to_cpu(kwargs)
        if (args, kwargs) in (((CPU,), {}), ((), {"device": CPU})) and _is_on_cpu(module):
            # torch would swap fake parameters even where nothing changes, and it cannot once a backward used them.
            return module
        return original(module, *args, **kwargs)

    return to


def _patch_synchronized_batch_norm(patches: Patches) -> None:
    """Let batch norms over ranks run, whose kernels (:mod:`weft.capture.fake.gpu_rules`) only GPUs have. They refuse
    tensors that are neither on a GPU nor on the custom device that torch lets others register: to them it is the
    CPU."""
    owner, name = torch_adapter.custom_device_entry
    device_name, asks = present(owner, name), torch.nn.SyncBatchNorm.forward.__code__

    def name_of_device() -> str:
        caller = sys._getframe(1)
        callers = (caller, caller.f_back)  # the first is what finds the replacement of this thread
        return "cpu" if any(each is not None and each.f_code is asks for each in callers) else device_name()

    patches.function(owner, name, name_of_device)


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return all(tensor.device == CPU for tensor in (*module.parameters(), *module.buffers()))


def _device_context_init(original: Callable[..., None]) -> Callable[..., None]:
    """`with torch.device("cuda")` creates tensors on the CPU. The context adds its device below any function mode, so
    the mode above does not see it."""

    def init(self: Any, device: Any) -> None:
        original(self, CPU if is_cuda(device) else device)

    return init


def _patch_autocast(patches: Patches) -> None:
    """The CPU's autocast for cuda's, with cuda's default dtype. What the two cast differently is in
    :mod:`weft.capture.fake.cuda_autocast`, which goes by whether autocast is enabled for "cuda" too."""
    init, enter, leave = (present(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__"))

    def new_init(self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **named: Any) -> None:
        if device_type == "cuda":
            self._weft_around_cuda = []  # what was set around each begun region; a region may be entered again inside
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *rest, **named)

    def new_enter(self: Any) -> Any:
        if hasattr(self, "_weft_around_cuda"):
            self._weft_around_cuda.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return enter(self)

    def new_exit(self: Any, *error: Any) -> Any:
        if hasattr(self, "_weft_around_cuda"):
            enabled, dtype = self._weft_around_cuda.pop()
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
        return leave(self, *error)

    for name, new in (("__init__", new_init), ("__enter__", new_enter), ("__exit__", new_exit)):
        patches.attribute(torch.autocast, name, new)


def _inside(mode: RedirectCudaToCpu, run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.backward` is a call that the function mode handles, and a mode is off while it handles a call. The
    replacement turns it on again for the hooks and backward functions that the engine runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_engine(*args, **kwargs)

    return run
