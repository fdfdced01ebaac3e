"""Python numbers that change from call to call reach kernels through GPU memory.

The learning rate, and the step size that an optimizer computes from it, are Python numbers in a step. A kernel launch
that is recorded in a CUDA graph would replay the number it was recorded with. This pass puts all such numbers that the
host can compute before the step into one tensor on the GPU:

- Multi-tensor operations and fused optimizers read an element of it as a 0-dim tensor, or a part of it as a list.
- Generated kernels load a number from the place that ``meta["scalar_in_memory"]`` of its node names.
- A 0-dim CPU tensor that a GPU operation reads, which is a number too, is copied there. If no input of the step decides
  the number (``x / torch.sqrt(torch.tensor(64.0))``), kernels get it as a constant: a copy in each call would take the
  host longer than starting the kernel.

Numbers are float64, as in Python. Lists are float32, as the kernels that read them expect. Changes results only of
ATen's fused optimizers, which read a learning rate in memory as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_meta import meta_of
from weft.capture.record.constant_scalars import constant_scalar
from weft.inductor.graph.host_scalars import host_nodes, to_memory
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.multi_tensor.operation import MultiTensor

Node = torch.fx.Node

aten = torch.ops.aten
_WITH_RATE_IN_MEMORY = {
    getattr(aten, name).default: getattr(aten, name).tensor_lr
    for base in ("_fused_adam", "_fused_adamw", "_fused_sgd")
    for name in (base, f"{base}_")
}
# Beside the elementwise ones: ``x[..., 0] = 1`` is one of these.
_TAKE_NUMBERS = frozenset({aten.fill.Tensor, aten.masked_fill.Tensor, aten.index_put.default})


@changes_bits("ATen's fused optimizers read a learning rate in memory as float32")
def scalars_to_memory(step: StepGraph) -> StepGraph:
    """Let kernels read the host's numbers from memory. Does nothing for a step on several GPUs or on none. Changes
    ``step``."""
    # A tensor of numbers is on one GPU. A step on several is not recorded anyway.
    devices = {t.device for node in step.graph.nodes for t in tensors_of(node) if t.device.type != "cpu"}
    if len(devices) == 1 and step.placeholders:
        _ScalarPlacer(step, devices.pop()).run()
    return step


class _ScalarPlacer:
    def __init__(self, step: StepGraph, device: torch.device) -> None:
        self.step = step
        self.device = device
        self.mode = torch_adapter.fake_mode_of(step.graph)
        self.host = host_nodes(step)
        self.order: dict[Node, int] = {}
        self.known = step.placeholders[-1]  # after this node all numbers of the host are computed
        self.numbers: dict[Node, Node] = {}

    def run(self) -> None:
        self._hoist()
        self._move_tensors()
        self._place([node for node in self.order if self._is_read(node)])
        for node in list(self.order):
            if isinstance(node.target, MultiTensor):
                self._numbers_of_lists(node)
            elif node.target in _WITH_RATE_IN_MEMORY:
                self._rate(node)

    def _hoist(self) -> None:
        """Move what the host computes before everything else, so that all its numbers are known first."""
        for node in list(self.step.graph.nodes):
            if node in self.host and node.op == "call_function":
                self.known.append(node)
                self.known = node
        self.order = {node: at for at, node in enumerate(self.step.graph.nodes)}

    def _move_tensors(self) -> None:
        """Give GPU operations that read 0-dim CPU tensors the same numbers on the GPU; their results stay the same."""
        moved: dict[Node, Node] = {}
        for node in list(self.order):
            takes_numbers = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _TAKE_NUMBERS
            if not takes_numbers or not any(t.device.type == "cuda" for t in tensors_of(node)):
                continue
            for used in node.all_input_nodes:
                val = used.meta.get("val")
                if used in self.host and isinstance(val, torch.Tensor) and not val.dim():
                    if used not in moved:
                        moved[used] = self._on_gpu(used, val.dtype)
                    node.replace_input_with(used, moved[used])

    def _on_gpu(self, scalar: Node, dtype: torch.dtype) -> Node:
        """A 0-dim tensor on the GPU with the number of one on the CPU."""
        number = constant_scalar(scalar, {})
        if number is None:
            return self._emit(aten._to_copy.default, scalar, after=self.known, device=self.device)
        return self._emit(aten.full.default, [], number, after=self.known, dtype=dtype, device=self.device)

    def _is_read(self, node: Node) -> bool:
        """Whether the node is a float on the host that an operation on tensors reads."""
        floats = node in self.host and isinstance(node.meta.get("val"), torch.SymFloat)
        return floats and any(tensors_of(user) for user in node.users)

    def _place(self, numbers: Sequence[Node]) -> None:
        if not numbers:
            return
        memory = self._memory(numbers, torch.float64)
        for at, number in enumerate(numbers):
            number.meta["scalar_in_memory"] = (memory.name, at)
            self.numbers[number] = self._emit(aten.select.int, memory, 0, at, after=memory)

    def _memory(self, numbers: Sequence[Any], dtype: torch.dtype) -> Node:
        """A tensor of these numbers, some of which may be constants."""
        with self.mode:
            val = torch.empty(len(numbers), dtype=dtype, device=self.device)
        return self._emit(to_memory, *numbers, after=self.known, val=val, dtype=dtype, device=self.device)

    def _numbers_of_lists(self, node: Node) -> None:
        args: list[Any] = list(node.args)
        for at, arg in enumerate(args):
            if isinstance(arg, Node) and arg in self.numbers:
                args[at] = self.numbers[arg]
            elif isinstance(arg, (list, tuple)) and self._are_numbers(arg):
                args[at] = self._memory(arg, torch.float32)
        node.args = tuple(args)

    def _are_numbers(self, items: Sequence[Any]) -> bool:
        """Whether a list holds only numbers, and at least one that changes from call to call."""
        changing = [item for item in items if isinstance(item, Node)]
        return bool(changing) and all(item in self.numbers for item in changing)

    def _rate(self, node: Node) -> None:
        rate = node.kwargs.get("lr")
        if not isinstance(rate, Node) or rate not in self.numbers:
            return
        memory = self.numbers[rate]
        lr = self._emit(aten._to_copy.default, memory, after=memory, dtype=torch.float32)
        node.target = _WITH_RATE_IN_MEMORY[node.target]
        node.kwargs = {**node.kwargs, "lr": lr}
        if "inplace" in node.meta:
            node.meta["inplace"] = _WITH_RATE_IN_MEMORY[node.meta["inplace"]]

    def _emit(self, target: Any, *args: Any, after: Node, val: Any = None, **kwargs: Any) -> Node:
        with self.step.graph.inserting_after(after):
            node = self.step.graph.call_function(target, args, kwargs)
        if val is None:
            with self.mode:
                val = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args), **kwargs)
        node.meta = meta_of(after, val=val)
        return node
