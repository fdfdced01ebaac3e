"""Multi-tensor calls of a graph, run by their own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.functional import Effects
from weft.capture.graph import StepGraph
from weft.inductor.multi_tensor.bound import Bound
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.kernels import compile_kernels

Node = torch.fx.Node


class Launcher:
    """The in-place form of one multi-tensor call of a graph, for the device its tensors are on.

    Called with the arguments of the call it writes the new values over the lists that the call updates, and returns the
    lists that are new, in ``out`` where that has tensors for them. It remembers the addresses of the tensors, so it
    belongs to one node.

    Attributes:
        effects: which arguments it writes.
        plan: what it launches.
    """

    shares_as_fakes = True  # results lie in the memory of an argument only where the fake tensors say so

    def __init__(self, node: Node, number_type: str = "fp32") -> None:
        call = node.target
        assert isinstance(call, MultiTensor)
        fakes: Any = torch.fx.node.map_arg(node.args, lambda used: used.meta["val"])
        fresh = len(node.meta["val"]) - len(call.updated)
        self.__name__ = self.__qualname__ = f"{call.__name__}_kernels"
        self.effects = Effects(tuple((at, str(at)) for at in call.updated), fresh, call)
        self.plan = call.plan(fakes, number_type)
        self._fresh = [
            [(tuple(val.shape), tuple(val.stride()), val.dtype) for val in list_] for list_ in node.meta["val"][:fresh]
        ]
        self.device = fakes[0][0].device
        self._bound: Bound | None = None

    def __call__(
        self, *arguments: Any, out: Sequence[Sequence[torch.Tensor | None]] | None = None
    ) -> list[list[torch.Tensor]]:
        if self._bound is None:
            self._bound = Bound(self.plan, self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        places = out or [[None] * len(list_) for list_ in self._fresh]
        results = [
            [
                torch.empty_strided(size, stride, dtype=dtype, device=self.device) if place is None else place
                for place, (size, stride, dtype) in zip(places_, list_, strict=True)
            ]
            for places_, list_ in zip(places, self._fresh, strict=True)
        ]
        self._bound.bind(arguments, results, stream)
        self._bound.launch(stream)
        self._bound.release()
        return results


def use_kernels(step: StepGraph, number_type: str = "fp32") -> StepGraph:
    """Let multi-tensor calls run by their kernels, which are compiled here, and not by ATen's. Changes ``step``.

    In a step on GPUs, lists on the CPU (an optimizer's counters) stay with ATen.

    Args:
        number_type: how Python numbers reach kernels, see :meth:`MultiTensor.plan`.

    Raises:
        KernelCompilationFailed, TritonMissing, CudaError: see ``compile_kernels``.
    """
    launchers: dict[torch.device, list[Launcher]] = {}
    calls = [node for node in step.graph.nodes if isinstance(node.target, MultiTensor)]
    on_gpu = [node for node in calls if node.meta["val"][0][0].is_cuda]
    for node in on_gpu or calls:
        launcher = Launcher(node, number_type)
        launchers.setdefault(launcher.device, []).append(launcher)
        if launcher.effects.writes:
            node.meta["inplace"] = launcher
        else:
            node.target = launcher
    for device, here in launchers.items():
        compile_kernels([launch.kernel for launcher in here for launch in launcher.plan.launches], device)
    return step
