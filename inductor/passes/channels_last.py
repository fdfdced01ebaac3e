"""Convolutions work on images with their channels innermost.

cuDNN's half-precision kernels are written for that layout and transpose whatever comes otherwise, on both sides of
every convolution. Here the images and the weights are laid out so once, and everything between convolutions follows: an
operation that goes element by element, a pooling or a normalisation gives back the layout it gets. Where something else
reads a value whose layout changed, it gets a contiguous copy, which costs nothing where a cast stands there anyway.

cuDNN may choose other algorithms, so sums may be taken in another order.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.functional import Functionalized
from weft.capture.graph import StepGraph

aten = torch.ops.aten
Node = torch.fx.Node

_CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
_FEWEST_CHANNELS = 16
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
    }
    | set(_CONVOLUTIONS)
)


def channels_last(step: StepGraph) -> StepGraph:
    """Lay images and weights of two-dimensional convolutions out with channels innermost. Changes ``step``."""
    nodes = [node for node in step.graph.nodes if node.target in _CONVOLUTIONS]
    if not nodes or not any(_gains(node) for node in nodes) or not all(_suits(node) for node in nodes):
        return step
    return _Layouts(step).run()


def _suits(node: Node) -> bool:
    """Whether it is a convolution of images of known size, and not of groups of several channels: cuDNN lays those out
    its own way, and transposes."""
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    weight = node.args[_CONVOLUTIONS[node.target][-1]].meta["val"]  # type: ignore[union-attr, index]
    groups = node.args[8] if node.target is aten.convolution.default else node.args[9]
    alone = groups == 1 or bool(weight.shape[1] == 1)
    return bool(alone and image.dim() == 4) and all(type(n) is int for n in image.shape)


def _gains(node: Node) -> bool:
    """Whether the kernel is one of those written for the layout: halves, and not a few channels only."""
    weight = node.args[_CONVOLUTIONS[node.target][-1]].meta["val"]  # type: ignore[union-attr, index]
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return half and weight.dim() == 4 and weight.shape[0] >= _FEWEST_CHANNELS and weight.shape[1] >= _FEWEST_CHANNELS


class _Layouts:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.graph = step.graph
        self.mode = torch_adapter.fake_mode_of(step.graph)
        self.old: dict[Node, Any] = {}  # values as they were, of the nodes whose layout changed
        self.copies: dict[tuple[Node, bool], Node] = {}

    def run(self) -> StepGraph:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _CONVOLUTIONS:
                self._lay_out(node)
            if any(source in self.old for source in node.all_input_nodes):
                self._follow(node)
            elif node.target in _CONVOLUTIONS:
                self._infer(node)
        self._restore(self.graph.output_node())
        return self.step

    def _lay_out(self, node: Node) -> None:
        """Give a convolution its image, its weight and its gradient with channels innermost."""
        args = list(node.args)
        for at in _CONVOLUTIONS[node.target]:  # type: ignore[index]
            source = args[at]
            assert isinstance(source, Node)
            if not source.meta["val"].is_contiguous(memory_format=torch.channels_last):
                args[at] = self._copy(source, torch.channels_last)
        node.args = tuple(args)

    def _follow(self, node: Node) -> None:
        """Work with the new layouts where the operation can, with the old ones elsewhere."""
        op = node.target.op if isinstance(node.target, Functionalized) else node.target
        follows = torch.Tag.pointwise in getattr(op, "tags", ()) or op in _FOLLOWING
        if not follows or not self._infer(node):
            self._restore(node)
            self._infer(node)

    def _infer(self, node: Node) -> bool:
        """Find the node's layout anew; False where it cannot have these inputs."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        before = node.meta["val"]
        try:
            with self.mode:
                after = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):
            return False
        if _same_form(before, after):
            if _layouts(before) != _layouts(after):
                self.old[node] = before
                node.meta = {**node.meta, "val": after}
            return True
        return False

    def _restore(self, node: Node) -> None:
        """Give ``node`` its inputs in the layouts they had."""
        changed = {source for source in node.all_input_nodes if source in self.old}
        for source in changed:
            if isinstance(self.old[source], torch.Tensor):
                node.replace_input_with(source, self._copy(source, torch.contiguous_format))

    def _copy(self, source: Node, layout: torch.memory_format) -> Node:
        """``source`` in another layout, right after it."""
        key = source, layout is torch.channels_last
        if key not in self.copies:
            with self.graph.inserting_after(_after(source)):
                copy = self.graph.call_function(aten.clone.default, (source,), {"memory_format": layout})
            with self.mode:
                val = source.meta["val"].clone(memory_format=layout)
            copy.meta = {k: v for k, v in source.meta.items() if k != "inplace"} | {"val": val}
            self.copies[key] = copy
        return self.copies[key]


def _after(node: Node) -> Node:
    """Where a copy of ``node`` may stand: behind it, and behind all inputs of the step."""
    if node.op != "placeholder":
        return node
    while node.next.op == "placeholder":
        node = node.next
    return node


def _same_form(before: Any, after: Any) -> bool:
    pairs = zip(_tensors(before), _tensors(after), strict=True) if len(_tensors(before)) == len(_tensors(after)) else []
    return bool(pairs) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _layouts(val: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.stride()) for tensor in _tensors(val)]


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, torch.Tensor)]
