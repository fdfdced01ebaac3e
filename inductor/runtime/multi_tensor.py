"""Runs the multi-tensor calls of a graph (optimizers, norms, casts) with their generated kernels."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.record.functional_ops import WrittenArguments
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.multi_tensor.launch_plan import LaunchPlan
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.bound_plan import BoundLaunches, kernels_of
from weft.inductor.runtime.kernels import compile_kernels

Node = torch.fx.Node


class Launcher:
    """The in-place form of one multi-tensor call of a graph, on the device of its tensors.

    A call takes the arguments of the node, overwrites the lists that the operation updates, and returns the new lists.
    New tensors are written to those of ``out`` where it has any. The launcher keeps the tensors' addresses on the
    device, so each node needs its own.

    Attributes:
        effects: the arguments that it writes.
        plan: the kernels that it launches, with grids and pointer tables.
        device: where the kernels run.
    """

    # The program verifier relies on it: a result shares memory with an argument only if their fake tensors do.
    shares_as_fakes = True

    def __init__(self, node: Node) -> None:
        call = node.target
        assert isinstance(call, MultiTensor)
        fresh = len(node.meta["val"]) - len(call.updated)
        self.__name__ = self.__qualname__ = f"{call.__name__}_kernels"
        self.effects = WrittenArguments(tuple((at, str(at)) for at in call.updated), fresh, call)
        self.plan = _plan_of(node)
        self._fresh = [
            [(tuple(val.shape), tuple(val.stride()), val.dtype) for val in list_] for list_ in node.meta["val"][:fresh]
        ]
        self.device = _device_of(node)
        self._bound: BoundLaunches | None = None

    def __call__(
        self, *arguments: Any, out: Sequence[Sequence[torch.Tensor | None]] | None = None
    ) -> list[list[torch.Tensor]]:
        if self._bound is None:
            self._bound = BoundLaunches(self.plan, self.device)
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


@changes_bits("norms and segment sums add in the order of their kernels")
def use_kernels(step: StepGraph) -> StepGraph:
    """Run multi-tensor calls with their generated kernels instead of ATen's, and compile these. Changes ``step``.

    In a step on GPUs, lists on the CPU (step counters of an optimizer) stay with ATen.

    Raises:
        KernelCompilationFailed, TritonMissing, CudaError: see ``compile_kernels``.
    """
    launchers: dict[torch.device, list[Launcher]] = {}
    for node in _calls_with_kernels(step):
        launcher = Launcher(node)
        launchers.setdefault(launcher.device, []).append(launcher)
        if launcher.effects.writes:
            node.meta["inplace"] = launcher
        else:
            node.target = launcher
    for device, here in launchers.items():
        # All of them now: at the first launch, a kernel that does not compile would end the run.
        compile_kernels([kernel for launcher in here for kernel in kernels_of(launcher.plan, device)], device)
    return step


def multi_tensor_kernels(step: StepGraph, device: torch.device) -> list[KernelSource]:
    """The kernels that :func:`use_kernels` is going to compile for ``device``."""
    here = [node for node in _calls_with_kernels(step) if _device_of(node) == device]
    return [kernel for node in here for kernel in kernels_of(_plan_of(node), device)]


_plans: weakref.WeakKeyDictionary[Node, LaunchPlan] = weakref.WeakKeyDictionary()


def _calls_with_kernels(step: StepGraph) -> list[Node]:
    calls = [node for node in step.graph.nodes if isinstance(node.target, MultiTensor)]
    return [node for node in calls if node.meta["val"][0][0].is_cuda] or calls


def _plan_of(node: Node) -> LaunchPlan:
    """The plan of a call, made once: it takes 40 ms for the optimizer of a small model."""
    if node not in _plans:
        call = node.target
        assert isinstance(call, MultiTensor)
        _plans[node] = call.plan(_fakes(node))
    return _plans[node]


def _device_of(node: Node) -> torch.device:
    return _fakes(node)[0][0].device


def _fakes(node: Node) -> Any:
    return torch.fx.node.map_arg(node.args, lambda used: used.meta["val"])
