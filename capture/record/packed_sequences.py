"""Packed sequences in a step: what packs them, and what pads them again.

Torch's kernels read lengths and batch sizes in C++, forward and backward, so a capture must come before them. Each of
the functions becomes an autograd function whose forward and backward are nodes
(:mod:`weft.capture.record.taped_ops`), and so do the recurrent networks between them
(:mod:`weft.capture.record.recurrent_networks`). How many rows are packed, and how many steps the longest sequence has,
is not known while the step is captured: one graph serves all lengths.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.fake.fake_rules import fake_result
from weft.capture.record import recorder as recorder_module
from weft.capture.record.recorder import OpRecorder, recording
from weft.capture.record.tracked_storages import NUMBER, is_tracked
from weft.capture.user_code import user_line
from weft.errors import CannotCapture

aten, ops = torch.ops.aten, torch.ops.weft
_PACK, _PAD = torch_adapter.pack_padded_sequence, torch_adapter.pad_packed_sequence
_SORTS = (aten.sort.default, aten.sort.stable)
_ADDS = (aten.add.Tensor, aten.add_.Tensor)
PACKED_FUNCTIONS = (_PACK, _PAD)

READS_LENGTHS = "a recurrent network over packed sequences asks for the value of their lengths"
ASKED_PADDED = "Give it padded sequences of one length, and mask what it returns for the padding"


def packed_function(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``func(*args)`` in a capture, for one of :data:`PACKED_FUNCTIONS`."""
    if func is _PAD:
        return _padded(*args)
    return (_Pack.apply if torch.is_grad_enabled() else _packed)(*args)


def batch_size(batch_sizes: torch.Tensor, index: Any) -> torch.Tensor | None:
    """``batch_sizes[0]`` as a tensor whose number is known, where modules of torch ask for the size of a packed batch;
    else None."""
    if type(index) is not int or index != 0 or sys._getframe(2).f_code.co_filename != torch.nn.modules.rnn.__file__:
        return None
    recorder = recording()
    if recorder is None or not is_tracked(batch_sizes):
        return None
    size = _known(recorder).batch(batch_sizes)
    found = torch.full((), size, dtype=torch.int64)
    setattr(found, NUMBER, size)
    return found


class PackedSequences:
    """What a capture knows of the packed sequences of its step.

    Args:
        recorder: of the capture.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder
        # By the nodes of their batch sizes how many sequences are packed, by those of their lengths how many rows and
        # steps they have.
        self._batches: dict[torch.fx.Node, Any] = {}
        self._sizes: dict[torch.fx.Node, tuple[Any, Any]] = {}

    def batch(self, batch_sizes: torch.Tensor) -> Any:
        """How many sequences are packed: as many as the step has packed, or what the tensor says."""
        node = self._recorder.value(batch_sizes)
        if node not in self._batches:
            packed: Any = node.args[0] if node.target is operator.getitem else None
            if getattr(packed, "target", None) is aten._pack_padded_sequence.default:
                x, _, batch_first = packed.args
                self._batches[node] = x.meta["val"].shape[0 if batch_first else 1]
            else:
                self._batches[node] = batch_sizes.select(0, 0).item()
        return self._batches[node]

    def check_sizes(self, data: torch.Tensor, lengths: torch.Tensor, batch_sizes: torch.Tensor) -> None:
        """Let the sizes of a packed sequence be those of the others that have these lengths."""
        sizes = data.shape[0], batch_sizes.shape[0]
        for size, known in zip(sizes, self._sizes.setdefault(self._unsorted(lengths), sizes), strict=True):
            torch._check(size == known)

    def _unsorted(self, lengths: torch.Tensor) -> Any:
        """The node of these lengths before they were sorted."""
        node = self._recorder.value(lengths)
        call: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
        return call.args[0] if getattr(call, "target", None) in _SORTS else node

    def sum_of(self, op: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The sum where the engine adds the gradient of a taped operation to another for the same tensor, else None.

        The gradient is a sum of many contributions. Eager adds each of them to what it has, so the operation begins
        with that: floats come to another sum in another order.

        Args:
            op, args: an operation that is about to be recorded.
        """
        recorder, running = self._recorder, torch_adapter.running_autograd_node()
        if op not in _ADDS or len(args) != 2 or running is None or running.name() not in _GRADIENT_NODES:
            return None
        total, gradient = args
        if not all(isinstance(each, torch.Tensor) and is_tracked(each) for each in args) or not _called_by_engine():
            return None
        part = recorder.value(gradient)
        call: Any = part.args[0] if part.args else None
        if getattr(call, "target", None) is not ops.tape_backward.default:
            return None
        at, sums, vals = part.args[1], list(call.args[2]), list(call.meta["val"])
        if part.users or sums[at] is not None:
            why = "a hook uses the gradient of a recurrent network whose lengths are not known before the step runs"
            raise CannotCapture(user_line(), why, ASKED_PADDED)
        sums[at] = recorder.value(total)
        call.update_arg(2, sums)
        vals[at] = part.meta["val"] = out = fake_result(aten.add.Tensor, (total, gradient), {})
        call.meta["val"] = type(call.meta["val"])(vals)
        recorder.storages.bind_fresh(out, part)
        if op is aten.add.Tensor:
            return out
        recorder.storages.write(recorder.storages.of(total), part)
        return total


# The autograd nodes whose gradients the engine may add to a sum.
_GRADIENT_NODES = ("_TapedBackward", "_WeightBackward")


def _known(recorder: OpRecorder) -> PackedSequences:
    if recorder.packed is None:
        recorder.packed = PackedSequences(recorder)
    found: PackedSequences = recorder.packed
    return found


def _called_by_engine() -> bool:
    """Whether the engine called the operation that is being recorded, and no code in Python."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, recorder_module.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code is torch_adapter.ENGINE_CODE


def _packed(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data, batch_sizes = _PACK(x, lengths, batch_first)
    if (recorder := recording()) is not None:
        _known(recorder).check_sizes(data, lengths, batch_sizes)
    return data, batch_sizes


class _Pack(torch.autograd.Function):
    """``_pack_padded_sequence``: its backward is one operation, which torch would take apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        data, batch_sizes = _packed(x, lengths, batch_first)
        ctx.mark_non_differentiable(batch_sizes)
        ctx.save_for_backward(batch_sizes)
        ctx.sizes, ctx.batch_first = x.shape, batch_first
        return data, batch_sizes

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_double_backward()
        (batch_sizes,) = ctx.saved_tensors
        packed = ops.packed_backward(gradients[0], list(ctx.sizes), batch_sizes, ctx.batch_first)
        return packed, None, None


class _Taped(torch.autograd.Function):
    """An operation of :mod:`weft.capture.record.taped_ops`.

    ``run(tensors, differentiable)`` gives its results, the tape last. How many of them have gradients: ``floating``.
    ``before`` is called before the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], floating: int, before: Callable[[], None], *tensors: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.differentiable = [at for at, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        *results, tape = run(tensors, ctx.differentiable)
        ctx.mark_non_differentiable(*results[floating:])
        ctx.floating, ctx.before = floating, before
        ctx.save_for_backward(tape, *tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _refuse_double_backward()
        ctx.before()
        tape, *tensors = ctx.saved_tensors
        operands = [tensors[at] for at in ctx.differentiable]
        given = list(gradients[: ctx.floating])
        found: list[Any] = [None] * len(tensors)
        if any(each is not None for each in given):
            taken = ops.tape_backward(tape, given, [None] * len(operands), operands)
            for at, gradient in zip(ctx.differentiable, taken, strict=True):
                found[at] = gradient
        return None, None, None, *found


def _padded(data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: Any) -> Any:
    check_operands([data])
    recorder = recording()
    batch = batch_sizes[0] if recorder is None else _known(recorder).batch(batch_sizes)
    options = batch_first, padding_value, total_length, batch, torch.is_grad_enabled()
    run = lambda tensors, differentiable: ops.pad_packed(tensors[0], batch_sizes, *options, differentiable)
    return taped_results(run, 1, [data])


def taped_results(
    run: Callable[..., Any], floating: int, tensors: list[torch.Tensor], before: Callable[[], None] = lambda: None
) -> Any:
    """What ``run`` gives, without the tape, with an autograd graph where grad mode is on.

    Args:
        run, floating: see :class:`_Taped`.
        tensors: those that may get gradients.
        before: called before the backward.
    """
    if (recorder := recording()) is not None:
        _known(recorder)  # from here on it is asked about sums
    return _Taped.apply(run, floating, before, *tensors) if torch.is_grad_enabled() else tuple(run(tensors, [])[:-1])


def check_operands(tensors: list[torch.Tensor]) -> None:
    """Raise CannotCapture where eager would compute by other kernels than the node does."""
    if any(each.device.type != "cpu" for each in tensors):
        raise CannotCapture(user_line(), f"{READS_LENGTHS}, which a GPU's graph cannot have", ASKED_PADDED)
    if torch.is_autocast_enabled("cpu"):
        why = "a recurrent network over packed sequences under autocast casts its weights while it reads lengths"
        raise CannotCapture(user_line(), why, 'Call it in a region of torch.autocast("cpu", enabled=False)')
    if not all(torch_adapter.is_plain_tensor_type(type(each)) for each in tensors):
        raise CannotCapture(user_line(), f"{READS_LENGTHS}, and its weights are shards", ASKED_PADDED)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        why = (
            "a recurrent network has lengths that are not known before the step runs, and its gradients are to have "
            "gradients themselves (create_graph=True)"
        )
        raise CannotCapture(user_line(), why, ASKED_PADDED)
