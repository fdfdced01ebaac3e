"""A step captured on a CPU, or in a fake world, as the graph that a run on GPUs would have.

Torch without CUDA cannot capture on fake GPU tensors, so a step is captured on CPU tensors and moved afterwards: fakes
and device arguments get the other device, what shared memory goes on sharing it, and operations that torch has for CPUs
alone become those that it calls on a GPU. Groups, roles and the user's lines stay as they are.

What Python decided from a tensor's device cannot be seen in a graph and stays as decided: that an optimizer takes its
``foreach`` implementation on GPUs alone, that batch norms are cuDNN's on a GPU. Dropout of attention is no library's on
a CPU; a fake world captures it as one operation all the same (:mod:`weft.capture.fake.fake_cuda`). Numbers that an
optimizer counts on the CPU stay there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_meta import meta_of, same_meta
from weft.capture.record.functional_ops import operation_of
from weft.capture.step_interface import Role
from weft.inductor.graph.sizes import tensors_of

Node = torch.fx.Node

aten = torch.ops.aten
_CPU = torch.device("cpu")
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
_BATCH_NORM = aten.native_batch_norm.default
# Positions among the results of _CUDNN: what its backward needs beside output and logsumexp.
_MAX_Q, _MAX_K, _SEED, _OFFSET = 4, 5, 6, 7
# Positions among the results of a batch norm: mean and reciprocal deviation of the batch.
_STATISTICS = 1, 2


@torch_adapter.only_mode()  # that of a fake world would keep tensors on the CPU
def retarget(
    step: StepGraph, device: str | torch.device = "cuda:0", keep: Callable[[Node], bool] | None = None
) -> StepGraph:
    """Move every tensor of ``step`` to ``device``. Changes ``step``.

    On a GPU, attention is cuDNN's, as torch has it on Hopper and Blackwell, where that is the same in all that others
    read: 16-bit types, no mask, heads of at most 128 in steps of 8, and results that lie in memory as the CPU's do.
    Other attention stays the CPU's operation.

    Args:
        keep: says of a node that its result is on the CPU all the same; by default what :func:`counters` finds.
    """
    device = torch.device(device)
    if keep is None:
        keep = counters(step).__contains__ if device.type != "cpu" else lambda node: False
    mode = FakeTensorMode(shape_env=torch_adapter.fake_mode_of(step.graph).shape_env)
    move = _Mover(mode)
    for node in step.graph.nodes:
        to = _CPU if keep(node) else device
        if "val" in node.meta:
            node.meta["val"] = move(node.meta["val"], to)
        if any(isinstance(word, torch.device) for word in (*node.args, *node.kwargs.values())):
            node.args = tuple(to if isinstance(word, torch.device) else word for word in node.args)
            node.kwargs = {k: to if isinstance(word, torch.device) else word for k, word in node.kwargs.items()}
    if device.type == "cuda":
        for node in step.graph.find_nodes(op="call_function", target=_FORWARD):
            _use_cudnn(step.graph, node, mode)
        for node in step.graph.nodes:
            if operation_of(node.target) is _BATCH_NORM:
                _widen_statistics(node, mode)
    return step


def counters(step: StepGraph) -> set[Node]:
    """Numbers that a step keeps on the CPU though it runs on a GPU: the counters of an optimizer that is neither fused
    nor capturable, and what is computed from them.

    These are 0-dim tensors of an optimizer's state that the host reads, by ``.item()``, with nothing else in between.
    """
    roles = {entry.name: entry.role is Role.OPTIMIZER_STATE or entry.path == "constant" for entry in step.inputs}
    numbers: dict[Node, None] = {}
    with_tensors: set[Node] = set()  # each is asked once: the list of an optimizer has as many readers as entries
    for node in step.graph.nodes:
        operands = with_tensors.intersection(node.all_input_nodes)
        counts = roles[node.name] if node.op == "placeholder" else numbers.keys() >= operands
        # A number of Python's as a tensor (`torch.tensor(1.0)`) has no operands.
        counts = counts and (bool(operands) or node.op == "placeholder" or node.target is aten.full.default)
        results = tensors_of(node)
        if results:
            with_tensors.add(node)
        if node.op != "output" and counts and results and not any(tensor.dim() for tensor in results):
            numbers[node] = None
    read: set[Node] = set()
    for node in step.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        read.update(node.all_input_nodes)
    # What the host reads is computed from its operands, so they stay on the CPU with it.
    for node in reversed(numbers):
        if node in read:
            read.update(node.all_input_nodes)
    found = read & numbers.keys()
    for node in numbers:
        operands = with_tensors.intersection(node.all_input_nodes)
        if operands and found.issuperset(operands):
            found.add(node)
    return found


class _Mover:
    """Fakes of another device and mode; those of one storage are of one storage there too."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def __call__(self, val: Any, to: torch.device) -> Any:
        if isinstance(val, (list, tuple)):
            return [self(item, to) for item in val]
        if not isinstance(val, torch.Tensor):
            return val
        key = torch_adapter.storage_key(val), to
        if key not in self._storages:
            meta = torch.empty(val.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            self._storages[key] = meta.untyped_storage()
        layout = val.size(), val.stride(), val.storage_offset()
        return torch_adapter.new_fake(self._mode, to, val.dtype, *layout, self._storages[key])


# ---- attention


def _use_cudnn(graph: torch.fx.Graph, node: Node, mode: FakeTensorMode) -> None:
    """Let a call of the CPU's attention, and of its backward, be cuDNN's, unless that would not be the same."""
    # Defaults of the operation's schema, where the call leaves them out.
    query, key, value, dropout, causal = (*node.args, *(0.0, False)[len(node.args) - 3 :])
    backwards = _backwards(node)
    if backwards is None or node.kwargs.get("attn_mask") is not None or not _supported(query, key, value):
        return
    scale = {"scale": node.kwargs["scale"]} if "scale" in node.kwargs else {}
    arguments = (query, key, value, None, bool(backwards), dropout, causal, False)
    vals = list(_fakes(mode, _CUDNN, arguments, scale))
    seeds = vals[_SEED], vals[_OFFSET]
    results = [_fakes(mode, _CUDNN_BACKWARD, _backward(each, seeds, vals), scale) for each in backwards]
    pairs = [(node.meta["val"][0], vals[0])]
    for each, grads in zip(backwards, results, strict=True):
        pairs += zip(each.meta["val"], grads, strict=True)
    # A result of other strides would make the recorded strides of everything behind it wrong.
    if not all(_lies_alike(old, new) for old, new in pairs):
        return

    vals[0] = node.meta["val"][0]  # whose views are in its storage
    new = _replace(graph, node, _CUDNN, arguments, scale, vals)
    for user in new.users:
        user.meta["val"] = vals[user.args[1]]  # type: ignore[index]
    if backwards:
        with graph.inserting_after(new):
            seeds = [graph.call_function(operator.getitem, (new, at)) for at in (_SEED, _OFFSET)]
        for seed in seeds:
            seed.meta = meta_of(new, val=vals[seed.args[1]])  # type: ignore[index]
    for each in backwards:
        _replace(graph, each, _CUDNN_BACKWARD, _backward(each, seeds, vals), scale, each.meta["val"])


# ---- batch norm


def _widen_statistics(node: Node, mode: FakeTensorMode) -> None:
    """Let the mean and deviation that a batch norm keeps for its backward be float32, as on a GPU. The CPU's are of the
    input's type."""
    vals = node.meta["val"]
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] not in _STATISTICS:
            continue
        at: Any = user.args[1]
        old = vals[at]
        if old.numel() and old.dtype in (torch.bfloat16, torch.float16):
            layout = old.size(), old.stride(), 0
            vals[at] = torch_adapter.new_fake(mode, old.device, torch.float32, *layout, None)
            user.meta["val"] = vals[at]


def _backwards(node: Node) -> list[Node] | None:
    """The backwards of an attention of the CPU's; None where others use more of it than its output."""
    found = []
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        if user.args[1] == 1:
            found += user.users
    return found if all(user.target is _BACKWARD for user in found) else None


def _backward(node: Node, seeds: Sequence[Any], vals: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of cuDNN's backward for a call of the CPU's. ``vals`` are the results of cuDNN's forward."""
    tensors, (dropout, causal) = node.args[:6], node.args[6:8]
    return *tensors, *seeds, None, None, None, vals[_MAX_Q], vals[_MAX_K], dropout, causal


def _supported(*nodes: Any) -> bool:
    vals = [node.meta["val"] for node in nodes]
    types = all(val.dtype in (torch.bfloat16, torch.float16) for val in vals)
    return types and all(isinstance(n, int) and n <= 128 and n % 8 == 0 for n in (val.shape[-1] for val in vals))


def _fakes(mode: FakeTensorMode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch_adapter.only_mode(mode):
        return target(*torch.fx.node.map_arg(args, lambda used: used.meta["val"]), **kwargs)


def _lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements have the same places; asks nothing of symbols, which would be a condition on them."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    same = all(str(here) == str(there) for size, here, there in strides if str(size) != "1")
    return same and str(tuple(one.shape)) == str(tuple(other.shape)) and one.dtype == other.dtype


def _replace(
    graph: torch.fx.Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any
) -> Node:
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = same_meta(node, val=val)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new
