"""How one module is parallelized: the styles of ``torch.distributed.tensor.parallel``, computed on local tensors.

Each class is its torch namesake by name, arguments and meaning, and an instance of it, so plans may mix both. Weights
become DTensors of the same placements. What differs: forward and backward compute with this rank's plain tensors and
issue functional collectives (:mod:`weft.distributed.dtensor.collectives`) where torch dispatches every operation
through DTensor. Tensors that are DTensors when they enter a module, or that must leave it as one, are converted there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle

from weft.argument_checks import ArgumentChecks
from weft.distributed.dtensor.collectives import (
    all_gather,
    all_gather_to_dtensor,
    all_reduce,
    reduce_scatter,
    sum_gradient,
)
from weft.distributed.dtensor.conversions import redistribute, to_dtensor, to_local
from weft.distributed.dtensor.local_parameters import LocalForward, compute_locally
from weft.distributed.dtensor.projections import features_of, is_transposed
from weft.distributed.ops import shard_length, shard_rows
from weft.mesh_facts import facts_of
from weft.shared_inputs import shared

_LINEAR_OR_EMBEDDING = "a torch.nn.Linear or torch.nn.Embedding, or transformers' Conv1D"


def _replace(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Register the parameter ``name`` of ``module`` again, as a DTensor."""
    parameter = module._parameters[name]
    if parameter is None:
        return
    _check_embedding(module)
    distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
    module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def _laid_out(x: Tensor, mesh: DeviceMesh, have: Placement, want: Placement) -> Tensor:
    """This rank's part of the tensor laid out as ``want`` whose parts, laid out as ``have``, are ``x``."""
    return to_local(redistribute(to_dtensor(x, mesh, have), (want,)))


def _output(
    x: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, use_local: bool, size: int | None = None
) -> Tensor:
    """The output of a module, laid out as ``have``, as its style wants it."""
    if use_local:
        if have == want:
            return x
        partial = type(have) is Partial and have.reduce_op == "sum"
        if isinstance(want, Shard):
            if x.shape[want.dim] % facts_of(mesh).size == 0:
                if partial:
                    return reduce_scatter(x, want.dim, mesh)
            elif want.dim != x.dim() - 1:
                raise _uneven(x, want.dim, mesh)
        elif partial and type(want) is Replicate:
            return all_reduce(x, mesh)
    found = redistribute(to_dtensor(x, mesh, have, size), (want,))
    return to_local(found) if use_local else found


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """Shards the output features of a Linear or of transformers' Conv1D, or the columns of an Embedding.

    Weight and bias of a Linear are ``Shard(0)`` DTensors, the weight of an Embedding or Conv1D is ``Shard(1)``. Mirrors
    ``torch.distributed.tensor.parallel.ColwiseParallel``.

    Attributes:
        input_layouts: of a plain tensor that enters; ``Replicate()`` by default.
        output_layouts: ``Shard(-1)`` by default.
        use_local_output: whether the output is a plain tensor, True by default, or a DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (nn.Linear, nn.Embedding)) and not is_transposed(module):
            raise _wrong_module("ColwiseParallel", module)
        transposed, features = is_transposed(module), features_of(module)[1]
        for name, parameter in list(module._parameters.items()):
            along = 0 if isinstance(module, nn.Linear) or (parameter is not None and parameter.dim() == 1) else 1
            _replace(module, name, device_mesh, Shard(along), self.src_data_rank)
        (given,), (wanted,) = self.input_layouts, self.output_layouts
        mesh, use_local = device_mesh, self.use_local_output

        def prepare(call: LocalForward, x: Any) -> Any:
            if transposed:
                call.set("nf", call.module.__dict__["weight"].shape[1])  # forward gives its output this size
            return _replicated_input(x, mesh, given)

        def finish(call: LocalForward, y: Tensor) -> Tensor:
            return _output(y, mesh, Shard(y.dim() - 1), _positive(wanted, y.dim()), use_local, features)

        compute_locally(module, device_mesh, prepare, finish)
        return module


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """Shards the input features of a Linear or of transformers' Conv1D, or the rows of an Embedding.

    The weight of a Linear is ``Shard(1)``, that of a Conv1D or an Embedding ``Shard(0)``. A bias is ``Replicate()``. It
    is added after the sum over the ranks. Mirrors ``torch.distributed.tensor.parallel.RowwiseParallel``.

    Attributes:
        input_layouts: of a plain tensor that enters; ``Shard(-1)`` by default. Indices of an Embedding are
            ``Replicate()``, which the plan must say, as in torch.
        output_layouts: ``Replicate()`` by default, by an all-reduce; ``Shard(1)`` by a reduce-scatter.
        use_local_output: whether the output is a plain tensor, True by default, or a DTensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear) or is_transposed(module):
            self._apply_to_linear(module, device_mesh)
        elif isinstance(module, nn.Embedding):
            self._apply_to_embedding(module, device_mesh)
        else:
            raise _wrong_module("RowwiseParallel", module)
        return module

    def _apply_to_linear(self, module: nn.Module, mesh: DeviceMesh) -> None:
        transposed = is_transposed(module)
        _replace(module, "weight", mesh, Shard(0 if transposed else 1), self.src_data_rank)
        _replace(module, "bias", mesh, Replicate(), self.src_data_rank)
        (given,), (wanted,), use_local = self.input_layouts, self.output_layouts, self.use_local_output
        features = features_of(module)[0]

        def prepare(call: LocalForward, x: Any) -> Any:
            call.kept["bias"] = call.module.bias
            # Forward computes the product alone. A Conv1D cannot do without a bias.
            call.set("bias", torch.zeros_like(call.module.__dict__["bias"]) if transposed else None)
            return _last_sharded_input(x, mesh, given, features)

        def finish(call: LocalForward, y: Tensor) -> Tensor:
            bias, layout = call.kept["bias"], _positive(wanted, y.dim())
            if bias is None:
                return _output(y, mesh, Partial(), layout, use_local)
            # The bias is added once to each element: to the whole output, or to this rank's part of the rows, where
            # its gradient on this rank is partial.
            if not isinstance(layout, Shard) or layout.dim == y.dim() - 1:
                whole = _output(y, mesh, Partial(), Replicate(), True) + bias
                return _output(whole, mesh, Replicate(), layout, use_local)
            size = y.shape[layout.dim]
            if use_local or size % facts_of(mesh).size == 0:
                part = _output(y, mesh, Partial(), layout, True)
            else:
                part = _laid_out(y, mesh, Partial(), layout)
            part = part + sum_gradient(bias, mesh)
            return part if use_local else to_dtensor(part, mesh, layout, size)

        compute_locally(module, mesh, prepare, finish)

    def _apply_to_embedding(self, module: nn.Embedding, mesh: DeviceMesh) -> None:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        rows, columns = module.num_embeddings, module.embedding_dim
        _replace(module, "weight", mesh, Shard(0), self.src_data_rank)
        (given,), (wanted,), use_local = self.input_layouts, self.output_layouts, self.use_local_output
        first, count = rank * shard_rows(rows, ranks), shard_length(rows, ranks, rank)
        padding = module.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + count else None
        # Indices of other ranks' rows read a row of zeros: where the rank has none, and where they would count as uses
        # of a row that it has.
        reads_zeros = not count or module.scale_grad_by_freq

        def prepare(call: LocalForward, ids: Any) -> Any:
            ids = to_local(redistribute(ids, (Replicate(),))) if isinstance(ids, DTensor) else ids
            if given != Replicate():
                ids = _laid_out(ids, mesh, given, Replicate())
            call.set("padding_idx", padding)
            if reads_zeros:
                zeros = torch.zeros(1, columns, dtype=module.weight.dtype, device=ids.device)
                call.set("weight", torch.cat([call.module.__dict__["weight"], zeros]))
            call.kept["elsewhere"] = (ids < first) | (ids >= first + count)
            return (ids - first).masked_fill(call.kept["elsewhere"], count if reads_zeros else 0)

        def finish(call: LocalForward, y: Tensor) -> Tensor:
            y = y.masked_fill(call.kept["elsewhere"].unsqueeze(-1), 0.0)
            return _output(y, mesh, Partial(), _positive(wanted, y.dim()), use_local)

        compute_locally(module, mesh, prepare, finish)


class SequenceParallel(torch_parallel.SequenceParallel):
    """Runs a norm on this rank's part of the sequence. Its parameters are ``Replicate()`` DTensors.

    Gradients of the parameters are summed over the ranks. Modules that draw random numbers (Dropout) or have children
    run as in torch, on DTensors, whose random numbers differ between the parts of one tensor. Mirrors
    ``torch.distributed.tensor.parallel.SequenceParallel``, but initial weights are broadcast unless ``src_data_rank``
    is None: torch assumes that they are ones.

    Attributes:
        sequence_dim: the dimension of the input that is sharded, 1 by default.
        use_local_output: whether the output is a plain tensor, or a DTensor, the default.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        if not names or next(module.children(), None) is not None:
            return super()._apply(module, device_mesh)
        for name in names:
            _replace(module, name, device_mesh, Replicate(), self.src_data_rank)
        (sharded,) = self.sequence_sharding
        mesh, use_local = device_mesh, self.use_local_output

        def prepare(call: LocalForward, x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            call.kept["size"] = x.shape[sharded.dim]
            return to_local(redistribute(x, (sharded,)))

        def finish(call: LocalForward, y: Tensor) -> Tensor:
            return y if use_local else to_dtensor(y, mesh, sharded, call.kept.get("size"))

        compute_locally(module, mesh, prepare, finish, tuple(names))
        return module


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """Converts what enters a module, as ``torch.distributed.tensor.parallel.PrepareModuleInput`` does.

    Inputs that are gathered along a dimension of equal parts take one all-gather of local tensors, and one
    reduce-scatter in backward. All other conversions are torch's.
    """

    def _prepare_input_arg(self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any) -> Any:
        gathers = isinstance(input_layout, Shard) and desired_layout == Replicate() and not self.use_local_output
        if not gathers or not isinstance(input, Tensor):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        dim = input_layout.dim % input.dim()
        if isinstance(input, DTensor) and (
            input.placements != (Shard(dim),) or input.shape[dim] % facts_of(mesh).size
        ):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        return all_gather_to_dtensor(input, dim, mesh)


class NoParallel(ParallelStyle):
    """Runs a module whole on every rank. Its parameters, those of its children too, are ``Replicate()`` DTensors.

    Optimizers and ``clip_grad_norm_`` then see DTensors of one mesh only. Mirrors torchtitan's ``NoParallel``.

    Args:
        input_layout: of a plain tensor that enters; ``Replicate()`` by default.
        output_layout: ``Replicate()`` by default.
        use_local_output: whether the output is a plain tensor, True by default, or a DTensor.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            if child is not module:
                replicate_parameters(child, device_mesh, self.src_data_rank)
        for name in list(module._parameters):
            _replace(module, name, device_mesh, Replicate(), self.src_data_rank)
        mesh, given, wanted, use_local = device_mesh, self.input_layout, self.output_layout, self.use_local_output

        def prepare(call: LocalForward, x: Any) -> Any:
            if isinstance(x, DTensor):
                return to_local(redistribute(x, (Replicate(),)))
            if not isinstance(x, Tensor) or given == Replicate():
                return x
            return _laid_out(x, mesh, given, Replicate())

        def finish(call: LocalForward, y: Any) -> Any:
            if not isinstance(y, Tensor) or (use_local and wanted == Replicate()):
                return y
            return _output(y, mesh, Replicate(), _positive(wanted, y.dim()), use_local)

        compute_locally(module, mesh, prepare, finish)
        return module


def replicate_parameters(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Make ``Replicate()`` DTensors of the module's own parameters; its forward computes with plain ones."""
    for name in list(module._parameters):
        _replace(module, name, mesh, Replicate(), src_data_rank)
    if any(parameter is not None for parameter in module._parameters.values()):
        compute_locally(module, mesh, lambda call, x: x, lambda call, y: y)


_CHECKS = ArgumentChecks("parallelize")


def _check_embedding(module: nn.Module) -> None:
    """Raises InvalidArgument for an Embedding whose weight cannot be a DTensor, sharded or not."""
    if not isinstance(module, nn.Embedding):
        return
    if module.max_norm is not None:
        allowed = "a model whose Embeddings have no max_norm, which writes to the weight in forward"
        raise _CHECKS.invalid("plan", module, allowed, "Leave max_norm out")
    if module.sparse:
        allowed = "a model whose Embeddings have dense gradients: those of a DTensor cannot be sparse"
        raise _CHECKS.invalid("plan", module, allowed, "Set sparse=False")


def _uneven(x: Tensor, dim: int, mesh: DeviceMesh) -> Exception:
    """Parts of unequal sizes that are plain tensors: whoever gathers them takes them to be equal, and ranks would
    exchange other numbers of elements than their peers expect."""
    allowed = f"a tensor whose size along dimension {dim}, the sharded one, is a multiple of the {mesh.size()} ranks"
    remedy = f"Pad dimension {dim} of the batch, or set use_local_output=False: a DTensor knows the sizes of all parts"
    return _CHECKS.invalid(f"the output that a style shards along dimension {dim}", list(x.shape), allowed, remedy)


def _wrong_module(style: str, module: nn.Module) -> Exception:
    remedy = f"Name the Linear or Embedding inside the {type(module).__name__}, by its path, in the plan"
    return _CHECKS.wrong_type(f"plan ({style})", module, _LINEAR_OR_EMBEDDING, remedy)


def _positive(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if isinstance(placement, Shard) else placement


@shared
def _replicated_input(x: Any, mesh: DeviceMesh, given: Placement) -> Any:
    """The whole input of a module that computes a part of the output: its gradient on a rank is partial."""
    if isinstance(x, DTensor):
        (layout,) = x.placements
        if isinstance(layout, Shard) and x.shape[layout.dim] % facts_of(mesh).size == 0:
            return all_gather(to_local(x), layout.dim, mesh)
        return to_local(redistribute(x, (Replicate(),)), Partial())
    if given == Replicate():
        return sum_gradient(x, mesh)
    if isinstance(given, Shard):
        return all_gather(x, given.dim, mesh)
    return to_local(redistribute(to_dtensor(x, mesh, given), (Replicate(),)), Partial())


def _last_sharded_input(x: Any, mesh: DeviceMesh, given: Placement, features: int) -> Any:
    """This rank's columns of the input of a Linear whose input features are sharded."""
    last = Shard(x.dim() - 1)
    if isinstance(x, DTensor):
        return to_local(redistribute(x, (last,)))
    layout = _positive(given, x.dim())
    return x if layout == last else _laid_out(x, mesh, layout, last)
