"""Seconds of a node that is not a collective, alone on a GPU.

A roofline model: the launch latency plus the larger of two times, the bytes at the bandwidth of a large copy and the
operations at the peak rate of their kind. Generated kernels know their bytes. GEMMs, convolutions and attention are
counted in operations. Other calls read their operands and write their results. Views and list elements are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from weft import torch_adapter
from weft.capture.node_kinds import is_collective
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost import attention_shapes, convolution_costs, gemm_shapes
from weft.inductor.cost.attention_shapes import AttentionShape
from weft.inductor.cost.cluster import Gpu
from weft.inductor.cost.collective_cost import UNBACKED
from weft.inductor.cost.gemm_shapes import GemmRates
from weft.inductor.graph.aliasing import copies, looks_into
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.multi_tensor.one_hot import INDEX, OneHotSum
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.shared_scatter import SharedScatter
from weft.inductor.runtime.multi_tensor import Launcher
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten

# Attention operations, each with whether it is the backward. Operands are [batch, heads, length, width]. Grouped-query
# attention has fewer heads of keys than of queries; queries determine the work.
_ATTENTION = {
    getattr(aten, f"_scaled_dot_product_{name}{suffix}"): bool(suffix)
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for suffix in ("", "_backward")
}
# Kernels of some library calls, in launches of the same time: a sort of thousands of elements takes 55 us on an H200
# with torch 2.11, the largest of each of thousands of rows 18. The gradients of a convolution take two kernels, the
# clearing of memory and the sum of parts.
_KERNELS: dict[Any, int] = {aten.sort: 27, aten.topk: 9, aten.convolution_backward: 3}
# The part of the rate of GEMMs that groups of them in one call reach: those of a small Mixtral with eight experts take
# 3.93 ms, and as many single ones would take 3.18 (as above).
_GROUPED_REACH = 0.81
# Bytes that a copy moves in the time of one atomic addition: 25 million take 266 us (as above).
_ATOMIC_BYTES = 45
# Float32 operations without tensor cores in whose time a one-hot product compares an index with a place: 28 million
# pairs take 38 us, 67 million 77 (as above).
_COMPARISON = 60

# Parts of the bandwidth of a copy that kernels reach which do more than read and write elements: those that sum rows,
# columns or both, by the shape of the kernel, and those that update many tensors. Fitted to the total time of such
# kernels in the steps of 25 models (an H200, torch 2.11). Fitted without any one of the models they are 0.67 to 0.83,
# 0.62 to 0.65 and 0.61 to 0.66; the wide range of rows is one kernel that gathers. Pointwise kernels reach 1.0.
_REACHED = {"row": 0.82, "column": 0.63, "mixed": 0.64}
# The same for pointwise kernels whose programs read parts of rows (16 of 144 elements), by the bytes of a part, where
# tensors exceed the L2 cache. Means of 13 and 16 kernels of EfficientNet and MobileNetV3 (one H200, torch 2.11).
_NARROW_REACH = {32: 0.68, 64: 0.82}
_L2_BYTES = 60 << 20
_MANY_TENSORS_REACH = 0.92
_SHARED_SCATTER_REACH = 0.21  # of indices that grow along their rows

# These read no more of their first tensor than they return.
_GATHERS = frozenset({aten.embedding, aten.gather, aten.index, aten.index_select, aten.take})


class ComputeCosts:
    """Estimates the seconds of nodes.

    Args:
        gpu: the GPU with its rates. float32 GEMMs count as "tf32" if torch is set so. A dtype without a rate gets the
            lowest one.

    Symbols have the value of the captured call, data-dependent sizes count as ``UNBACKED``.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def seconds(self, node: Node) -> float:
        """Seconds that ``node`` occupies the compute stream; 0 if :func:`is_free`."""
        if is_free(node):
            return 0.0
        # Loads, stores and arithmetic overlap in a kernel that fills the GPU, so the larger of the two times counts.
        moving = self.bytes(node) / (self.gpu.copy_bandwidth * _reached(node))
        return self._launches(node) * self.gpu.launch_latency + max(moving, self._computing(node))

    def is_free(self, node: Node) -> bool:
        """See :func:`is_free`."""
        return is_free(node)

    def _launches(self, node: Node) -> int:
        """Kernels that a node launches one after the other, as far as they are known."""
        packet = getattr(node.target, "overloadpacket", None)
        if _ATTENTION.get(packet, False):
            return 1 + attention_shapes.BACKWARD.extra_kernels
        return _KERNELS.get(packet, 1)

    def bytes(self, node: Node) -> int:
        """Bytes that a call reads and writes. Each element of an expanded tensor counts once."""
        known = isinstance(node.target, KernelCall) and not _has_symbols(node)
        if known:
            return node.target.bytes  # type: ignore[union-attr]
        written = sum(map(self._bytes, tensors_of(node)))
        read = [sum(map(self._bytes, tensors_of(used))) for used in node.all_input_nodes]
        if read and getattr(node.target, "overloadpacket", None) in _GATHERS:
            read[0] = min(read[0], written)
        return sum(read) + written

    def _computing(self, node: Node) -> float:
        """Seconds of the arithmetic of a library call; 0 for all other nodes, which are bound by memory."""
        packet = getattr(node.target, "overloadpacket", None)
        gemms = gemm_shapes.gemms_of(node, self._shape)
        if gemms is not None:
            if "convolution" in str(node.target) and (seconds := self._convolution(node)) is not None:
                return seconds + self._bias_seconds(node)
            rates = self._gemm_rates(node)
            seconds = sum(gemm_shapes.seconds(each, rates) for each in gemms)
            return seconds / (_GROUPED_REACH if packet is aten._grouped_mm else 1) + self._bias_seconds(node)
        if packet in _ATTENTION:
            arguments, backward = gemm_shapes.arguments_of(node), _ATTENTION[packet]
            if "efficient_attention" in str(packet):
                return self._efficient_attention_seconds(arguments, backward=backward)
            return self._attention_seconds(arguments, backward=backward)
        if packet in flop_registry:
            return self._registered(node) / self._rate(tensors_of(node)[0].dtype)
        if packet is aten.scatter_add:
            return (
                math.prod(self._shape(gemm_shapes.arguments_of(node)["src"])) * _ATOMIC_BYTES / self.gpu.copy_bandwidth
            )
        if isinstance(node.target, OneHotSum):
            count = math.prod(self._shape(node.args[INDEX].meta["val"]))  # type: ignore[union-attr]
            return count * node.target.size * _COMPARISON / self._rate(torch.float32)
        return 0.0

    def operations(self, node: Node) -> float:
        """Floating-point operations of the model that a library call does: those of GEMMs, convolutions and attention,
        and what torch's own table counts of others. 0 for all other nodes.

        Attention that is computed again in its own backward does not count, as by convention: the backward counts as
        twice the forward. Causal attention counts half of the pairs.
        """
        packet = getattr(node.target, "overloadpacket", None)
        gemms = gemm_shapes.gemms_of(node, self._shape)
        if gemms is not None:
            return float(sum(each.operations for each in gemms))
        if packet in _ATTENTION:
            gemm_count = 4 if _ATTENTION[packet] else 2
            return attention_shapes.operations(self._attention(gemm_shapes.arguments_of(node), gemm_count), gemm_count)
        return float(self._registered(node)) if packet in flop_registry else 0.0

    def least_seconds(self, node: Node) -> float:
        """Seconds of a node at the peak rates of the GPU's description: its operations as one large GEMM, or its bytes
        as one large copy. The difference to :meth:`seconds` is what shapes and launches cost."""
        if is_free(node):
            return 0.0
        moving = self.bytes(node) / self.gpu.copy_bandwidth
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _ATTENTION:
            arguments, gemm_count = gemm_shapes.arguments_of(node), 5 if _ATTENTION[packet] else 2
            operations = attention_shapes.operations(self._attention(arguments, gemm_count), gemm_count)
            return max(moving, operations / self._attention_rate(arguments, backward=_ATTENTION[packet]))
        convolves = "convolution" in str(node.target)
        read = [tensor for used in node.all_input_nodes for tensor in tensors_of(used)]
        rate = self._rate(read[0].dtype, convolves=convolves) if read else self._rate(torch.bfloat16)
        return max(moving, self.operations(node) / rate)

    def _registered(self, node: Node) -> int:
        """The operations of a call by torch's own table."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])  # type: ignore
        count = flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"])  # type: ignore
        return self._size(count)

    def _gemm_rates(self, node: Node) -> GemmRates:
        """The rates of the GEMMs that a node computes. Results have the dtype of its first operand."""
        dtype = tensors_of(node.all_input_nodes[0])[0].dtype
        return GemmRates(
            operations=self._rate(dtype, convolves="convolution" in str(node.target)),
            bandwidth=self.gpu.copy_bandwidth,
            itemsize=dtype.itemsize,
            launch=self.gpu.launch_latency,
            multiprocessors=self.gpu.multiprocessors,
        )

    def _bias_seconds(self, node: Node) -> float:
        """Seconds of the kernel that adds the bias to the result of a convolution, or that sums its gradient."""
        if "convolution" not in str(node.target):
            return 0.0
        arguments = gemm_shapes.arguments_of(node)
        if "output_mask" in arguments:
            moved = self._bytes(arguments["grad_output"]) if arguments["output_mask"][2] else 0
        else:
            moved = 2 * self._bytes(node.meta["val"]) if arguments["bias"] is not None else 0
        return self.gpu.launch_latency + moved / self.gpu.copy_bandwidth if moved else 0.0

    def _convolution(self, node: Node) -> float | None:
        """Seconds of a convolution or its backward that is no implicit GEMM, without its bias; None for others."""
        arguments = gemm_shapes.arguments_of(node)
        result = arguments["grad_output"] if "output_mask" in arguments else node.meta["val"]
        if convolution_costs.is_depthwise(arguments):
            rate = self._rate(torch.float32, convolves=False)
            return convolution_costs.depthwise_seconds(arguments, self._shape, result, rate)
        if convolution_costs.has_few_channels(arguments):
            return convolution_costs.few_channels_seconds(arguments, self._shape, result, self.gpu.copy_bandwidth)
        return None

    def _attention(self, arguments: Mapping[str, Any], gemms: int) -> AttentionShape:
        """The shape of attention. Of five GEMMs, three contract the width of keys and two that of values; of fewer, one
        half each."""
        batch, heads, queries, width = self._shape(arguments["query"])
        keys, of_values = self._shape(arguments["key"])[2], self._shape(arguments["value"])[3]
        widths = (gemms - gemms // 2) * width + gemms // 2 * of_values
        shared = self._shape(arguments["key"])[1] < heads
        return AttentionShape(batch * heads, queries, keys, widths / gemms, arguments["is_causal"], shared)

    def _attention_seconds(self, arguments: Mapping[str, Any], *, backward: bool) -> float:
        """Seconds of attention without launches."""
        kind = attention_shapes.BACKWARD if backward else attention_shapes.FORWARD
        shape, rate = self._attention(arguments, kind.gemms), self._attention_rate(arguments, backward=backward)
        return attention_shapes.seconds(shape, kind, rate, self.gpu.multiprocessors, self.gpu.copy_bandwidth)

    def _efficient_attention_seconds(self, arguments: Mapping[str, Any], *, backward: bool) -> float:
        """The same of the memory-efficient kernels."""
        dtype = arguments["query"].dtype
        kind = attention_shapes.BACKWARD if backward else attention_shapes.FORWARD
        return attention_shapes.efficient_seconds(
            self._attention(arguments, kind.gemms),
            self._rate(dtype),
            dtype.itemsize,
            self.gpu.multiprocessors,
            backward=backward,
            biased=arguments["attn_bias"] is not None,
            learnt=backward and arguments["grad_input_mask"][3],
        )

    def _attention_rate(self, arguments: Mapping[str, Any], *, backward: bool) -> float:
        """Operations per second of large attention. The rates of a GPU are those of bfloat16; other dtypes scale like
        GEMMs."""
        rate = self.gpu.attention_backward if backward else self.gpu.attention_forward
        return rate * self._rate(arguments["query"].dtype) / self._rate(torch.bfloat16)

    def _rate(self, dtype: torch.dtype, *, convolves: bool = False) -> float:
        """Operations per second of large GEMMs in ``dtype``."""
        name = str(dtype).removeprefix("torch.")
        if dtype is torch.float32 and _uses_tf32(convolves):
            name = "tf32"
        # The lowest rate is the cautious guess: too little time for computation would hide communication that is
        # exposed.
        return self.gpu.matmul.get(name) or min(self.gpu.matmul.values())

    def _bytes(self, tensor: torch.Tensor) -> int:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        return math.prod(self._size(n) for n, stride in dims if str(stride) != "0") * tensor.dtype.itemsize

    def _shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(map(self._size, tensor.shape))

    def _size(self, size: int | torch.SymInt) -> int:
        known = torch_adapter.hint(size)
        return UNBACKED if known is None else known


def is_free(node: Node) -> bool:
    """Whether a node takes no time on the compute stream: inputs and outputs, views, list elements, collectives and
    their waits, uninitialised memory, calls without tensor results, and targets with a true attribute ``free``."""
    if node.op != "call_function" or not tensors_of(node) or is_collective(node) or getattr(node.target, "free", False):
        return True
    if looks_into(node):
        return not copies(node)
    return isinstance(node.target, OpOverload) and str(node.target).startswith(("aten.empty", "aten.new_empty"))


def is_attention(node: Node) -> bool:
    """Whether a node is a library call of attention, forward or backward."""
    return getattr(node.target, "overloadpacket", None) in _ATTENTION


def _reached(node: Node) -> float:
    """The part of the bandwidth of a large copy that a node reaches."""
    target = node.target
    if isinstance(target, KernelCall):
        return _REACHED.get(target.generated.source.shape) or _reached_pointwise(node, target)
    if isinstance(target, SharedScatter):
        return _SHARED_SCATTER_REACH
    return _MANY_TENSORS_REACH if isinstance(target, (MultiTensor, Launcher)) else 1.0


def _reached_pointwise(node: Node, kernel: KernelCall) -> float:
    """As :func:`_reached`, of a pointwise kernel."""
    if len(kernel.generated.blocks) < 2 or kernel.bytes < _L2_BYTES:
        return 1.0
    size, block = kernel.generated.blocks[0]
    if size == block:
        return 1.0
    return _NARROW_REACH.get(block * tensors_of(node)[0].dtype.itemsize, 1.0)


def _has_symbols(node: Node) -> bool:
    tensors = [tensor for each in (node, *node.all_input_nodes) for tensor in tensors_of(each)]
    return any(not isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _uses_tf32(convolves: bool) -> bool:
    """Whether torch computes float32 GEMMs or convolutions in tensor cores. By default only convolutions."""
    if convolves:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return torch.get_float32_matmul_precision() != "highest"
