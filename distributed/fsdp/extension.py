"""Parameters that say themselves what is gathered of them: FSDP2's all-gather extension.

A tensor subclass may define two methods, as torchao's float8 training does. Before a gather, `fsdp_pre_all_gather`
makes of the shard the tensors that travel (quantized values, scales) and metadata that does not. After it,
`fsdp_post_all_gather` makes the parameter that forward sees of the gathered tensors. Between the two, each tensor has
an ordinary all-gather of its own, which the compiler schedules and puts into buckets like any other.

PyTorch keeps the parameter that the first gather made, frees and allocates its memory, and passes it as `out=` to later
gathers. Here every gather makes a new parameter, as it does without an extension: `out` is never passed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from weft.distributed.fsdp.layout import ShardLayout
from weft.errors import InvalidGatherExtension, UnshardableParameter

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SIGNATURES = "(self, mesh) or (self, mesh, outer_size, outer_stride, module, mp_policy)"
GATHERED_OVER_FEWER = (
    "defines fsdp_pre_all_gather, and reshard_after_forward is a number: nothing says how a part of what "
    "fsdp_post_all_gather made is gathered again. Pass True or False there"
)


def extends_gather(shard: torch.Tensor, path: str) -> bool:
    """Whether a shard has both methods of the extension.

    Raises UnshardableParameter where it has one of them.
    """
    # By names that stand here, so that a compiled step notices methods that come and go.
    before, after = hasattr(shard, "fsdp_pre_all_gather"), hasattr(shard, "fsdp_post_all_gather")
    if before != after:
        found, missing = (_PRE, _POST) if before else (_POST, _PRE)
        raise UnshardableParameter(path, f"is a {type(shard).__name__} that has {found} and no {missing}")
    return before


@dataclass(frozen=True, eq=False)
class StartedGather:
    """All-gathers of one parameter that are under way.

    Args:
        outputs: to be waited for. One tensor, or with an extension one 1-dimensional tensor for each that travels.
        shapes: of the tensors that an extension gave.
        metadata: what it passes on to `fsdp_post_all_gather`.
    """

    outputs: list[torch.Tensor]
    shapes: tuple[torch.Size, ...] = ()
    metadata: Any = None

    def wait(self) -> StartedGather:
        """The same with the results there."""
        return replace(self, outputs=[torch.ops._c10d_functional.wait_tensor(output) for output in self.outputs])


@dataclass(frozen=True, eq=False)
class GatherExtension:
    """Gathers one parameter by its own methods.

    Args:
        path: of the parameter in the wrapped module.
        layout: how it is cut.
        mesh: the ranks that it is split over, of one dimension; each call of `fsdp_pre_all_gather` gets it.
        module: that holds the parameter.
        policy: dtypes.
    """

    path: str
    layout: ShardLayout
    mesh: DeviceMesh
    module: nn.Module
    policy: MixedPrecisionPolicy

    @classmethod
    def of(cls, path: str, layout: ShardLayout, module: nn.Module, policy: MixedPrecisionPolicy) -> GatherExtension:
        """The extension of a parameter with this layout.

        Raises UnshardableParameter where nothing of it is gathered.
        """
        axes = layout.data_parallel
        if layout.dim is None or axes.shard is None:
            raise UnshardableParameter(path, f"defines {_PRE}, and no dimension of it is sharded: it is never gathered")
        mesh = axes.mesh if axes.mesh.ndim == 1 else axes.mesh[(axes.mesh.mesh_dim_names or ())[-1]]
        return cls(path, layout, mesh, module, policy)

    def start(self, shard: Any) -> StartedGather:
        """Ask the shard what travels, and start the all-gathers.

        Raises InvalidGatherExtension.
        """
        tensors, metadata = self._inputs(shard)
        axis = self.layout.data_parallel.shard
        assert axis is not None
        shapes = tuple(tensor.shape for tensor in tensors)
        flat = [tensor.contiguous().view(-1) for tensor in tensors]
        if axis.size == 1:
            return StartedGather([tensor.clone() for tensor in flat], shapes, metadata)
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        outputs = [gather(tensor, axis.size, axis.group_name) for tensor in flat]
        return StartedGather(outputs, shapes, metadata)

    def finish(self, shard: Any, gathered: StartedGather, dtype: torch.dtype) -> torch.Tensor:
        """The parameter of `layout.shape` that the shard makes of the gathered tensors, for the compute dtype `dtype`.

        Raises InvalidGatherExtension.
        """
        pairs = zip(gathered.outputs, gathered.shapes, strict=True)
        outputs = tuple(self._joined(output, shape) for output, shape in pairs)
        made = shard.fsdp_post_all_gather(outputs, gathered.metadata, dtype)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.Tensor)):
            what = f"returned {type(made).__name__}; without out= it must return (parameter, tensors that it lies in)"
            raise InvalidGatherExtension(_POST, self.path, what)
        whole, shape = made[0], self.layout.shape
        if whole.shape == shape and whole.is_contiguous():
            return whole
        if whole.numel() < shape.numel():
            what = f"returned a tensor of shape {tuple(whole.shape)}, the parameter's is {tuple(shape)}"
            raise InvalidGatherExtension(_POST, self.path, what)
        # Rows of padding are cut off here. Of the ways to do so, subclasses written for FSDP2 know this one.
        return torch.as_strided(whole, shape, _contiguous(shape), 0)

    def _inputs(self, shard: Any) -> tuple[list[torch.Tensor], Any]:
        before = shard.fsdp_pre_all_gather
        accepted = len(inspect.signature(before).parameters)
        if accepted == 1:
            made = before(self.mesh)
        elif accepted == 5:
            shape = self.layout.shape
            made = before(self.mesh, shape, _contiguous(shape), self.module, self.policy)
        else:
            raise InvalidGatherExtension(_PRE, self.path, f"has another signature than {_SIGNATURES}")
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and made[0]):
            raise InvalidGatherExtension(_PRE, self.path, "must return (tensors to gather, metadata)")
        tensors, metadata = list(made[0]), made[1]
        self._check_shapes(shard, tensors)
        return tensors, metadata

    def _check_shapes(self, shard: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Ranks must give tensors of equal sizes. One with a shorter shard than others pads what it gives."""
        dim = self.layout.dim or 0
        padded = list(self.layout.shape)
        padded[dim] = self.layout.rows
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if list(shard.shape) == padded and not dim:
            return
        if wrong := [shape for shape in shapes if list(shape) != padded]:
            why = "it is split in another dimension than 0" if dim else "the ranks do not divide its rows"
            what = f"must return tensors of the padded shard's shape {tuple(padded)}, as {why}; one has {wrong[0]}"
            raise InvalidGatherExtension(_PRE, self.path, what)

    def _joined(self, output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the ranks gave, one after the other in the dimension that the parameter is split in."""
        dim = self.layout.dim
        if not dim:
            return output.view(-1, *shape[1:])
        return output.view(-1, *shape).movedim(0, dim).flatten(dim, dim + 1)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
