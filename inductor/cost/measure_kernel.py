"""Measures the time of one generated kernel of a graph on the GPU."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import NotOnGpu
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost.measure_gpu import elapsed
from weft.inductor.graph.repro import known
from weft.inductor.runtime.kernels import CompiledKernel

# Launches in one CUDA graph, and replays of it between two events, whose resolution is 0.5 us. Choices.
_LAUNCHES = 20
_REPLAYS = 3


def microseconds(node: torch.fx.Node) -> float:
    """Mean time in microseconds of the kernel that ``node`` calls, launched back to back on tensors of zeros.

    Operands that fit into the L2 cache stay there, so the time is a lower bound of that inside a step. Symbolic sizes
    have the values of the captured call; numbers are 1.

    Raises:
        NotOnGpu: the kernel is not loaded on a GPU.
    """
    call = node.target
    assert isinstance(call, KernelCall)
    if not isinstance(call.kernel, CompiledKernel):
        raise NotOnGpu(call.__name__)
    with torch.cuda.device(call.device):
        arguments = [_scratch(argument) for argument in node.args]
        call(*arguments)
        torch.cuda.synchronize()
        launches = torch.cuda.CUDAGraph()
        with torch.cuda.graph(launches):  # a replay leaves the host's launch time out
            for _ in range(_LAUNCHES):
                call(*arguments)
        launches.replay()
    return elapsed(launches.replay, call.device, _REPLAYS) * 1e6 / (_REPLAYS * _LAUNCHES)


def _scratch(argument: Any) -> Any:
    val = argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
    if isinstance(val, torch.Tensor):
        sizes, strides = ([known(n) for n in numbers] for numbers in (val.shape, val.stride()))
        return torch.empty_strided(sizes, strides, dtype=val.dtype, device=val.device).zero_()
    return known(val)
