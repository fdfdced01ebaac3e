"""Two-dimensional convolutions run on images whose channels are innermost in memory.

cuDNN's half-precision kernels are written for that layout. For any other layout they transpose the image before and
after every convolution. This pass converts images and weights once. Operations between convolutions follow: elementwise
operations, pooling and normalisation return the layout they are given. Where another operation reads a value whose
layout changed, it gets a contiguous copy, which is free where a cast copies the value anyway.

Changes results: cuDNN may choose other algorithms, which sum in another order.
"""

from __future__ import annotations

import operator

import torch

from weft.capture.graph import StepGraph
from weft.capture.record.functional_ops import operation_of
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.relayout import Relayout

aten = torch.ops.aten
Node = torch.fx.Node

_CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
_FEWEST_CHANNELS = 16  # of input and output: the tile of a tensor core in half precision
# Operations that work on any layout and whose results follow their inputs'.
_FOLLOWING = frozenset(
    {
        operator.getitem,
        aten._to_copy.default,
        aten.clone.default,
        aten.cudnn_batch_norm.default,
        aten.cudnn_batch_norm_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit.default,
        aten._batch_norm_with_update.default,
        aten.batch_norm_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.cat.default,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.constant_pad_nd.default,
        aten.native_dropout.default,
        aten.native_dropout_backward.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        # Elementwise, without the tag that says so.
        aten.hardswish.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu.default,
        aten.leaky_relu_backward.default,
        aten.elu_backward.default,
        aten.mish_backward.default,
        aten.softplus_backward.default,
        aten.masked_fill.Tensor,
    }
    | set(_CONVOLUTIONS)
)


@changes_bits("cuDNN may choose other algorithms, which sum in another order")
def channels_last(step: StepGraph) -> StepGraph:
    """Lay images and weights of two-dimensional convolutions out with channels innermost. Changes ``step``."""
    nodes = [node for node in step.graph.nodes if node.target in _CONVOLUTIONS]
    # All or none: a convolution in the other layout between two of these would cost two transposes.
    if not nodes or not any(_is_faster(node) for node in nodes) or not all(_is_supported(node) for node in nodes):
        return step
    _LayoutPropagation(step.graph, _follows).run()
    return step


def _is_supported(node: Node) -> bool:
    """Whether this is a convolution of images of known size without groups of several channels: for those cuDNN has a
    layout of its own, and transposes."""
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    weight = node.args[_CONVOLUTIONS[node.target][-1]].meta["val"]  # type: ignore[union-attr, index]
    groups = node.args[8] if node.target is aten.convolution.default else node.args[9]
    alone = groups == 1 or bool(weight.shape[1] == 1)
    return bool(alone and image.dim() == 4) and all(type(n) is int for n in image.shape)


def _is_faster(node: Node) -> bool:
    """Whether cuDNN has a kernel for the layout: half precision, and not only a few channels."""
    weight = node.args[_CONVOLUTIONS[node.target][-1]].meta["val"]  # type: ignore[union-attr, index]
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and weight.dim() == 4 and weight.shape[0] >= _FEWEST_CHANNELS and weight.shape[1] >= _FEWEST_CHANNELS


class _LayoutPropagation(Relayout):
    """Converts the operands of convolutions and propagates the layout through the operations between."""

    def run(self) -> None:
        """Visit every node in order."""
        for node in list(self.graph.nodes):
            if node.target in _CONVOLUTIONS:
                self._lay_out(node)
                self.recompute(node)
            if node.op in ("call_function", "output"):
                self.visit(node)

    def _lay_out(self, node: Node) -> None:
        """Give a convolution its image, its weight and its gradient with channels innermost."""
        args = list(node.args)
        for at in _CONVOLUTIONS[node.target]:  # type: ignore[index]
            source = args[at]
            assert isinstance(source, Node)
            if not source.meta["val"].is_contiguous(memory_format=torch.channels_last):
                args[at] = self.copy(source, torch.channels_last)
        node.args = tuple(args)


def _follows(node: Node) -> bool:
    """Whether the operation works on any layout, and its result has the layout of its operands."""
    op = operation_of(node.target)
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op in _FOLLOWING
