"""The functional form of in-place operations, and the inverses of views.

A StepGraph has no mutation. For each operation that writes to arguments, :func:`written_arguments` and
:func:`out_of_place` name the functional form, which returns the new values instead: ``aten.add`` for ``aten.add_``.
Where ATen has none, :class:`Functionalized` clones what the operation writes. For each view, :func:`write_back` emits
the operation that puts a changed view back into its base (``slice_scatter`` for ``slice``), so that a write through a
view becomes a new value of the base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.torch_adapter import OpOverload

aten = torch.ops.aten

# Kernels that write to arguments which their schemas do not mark.
_UNMARKED_WRITES = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
    aten.batch_norm_gather_stats.default: ("running_mean", "running_var"),
    aten.batch_norm_gather_stats_with_counts.default: ("running_mean", "running_var"),
}
_RENAMED = {
    aten.normal_.default: aten.normal_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
}


@dataclass(frozen=True)
class WrittenArguments:
    """What an operation writes.

    Attributes:
        writes: position and name of each argument that is written, in schema order.
        fresh: how many of its results are new values, and not written arguments that it returns.
        functional: takes the same arguments, mutates nothing, and returns the fresh results followed by the new value
            of each written argument.
    """

    writes: tuple[tuple[int, str], ...]
    fresh: int
    functional: Callable[..., Any]


class Functionalized:
    """The functional form of an operation that has none in ATen: it clones what the operation writes.

    Called with the arguments of ``op`` it returns the fresh results of ``op``, then the new values of the arguments
    called ``writes``: a tuple, or the bare value where there is only one, as ATen's functional forms do.
    """

    def __init__(self, op: OpOverload, writes: tuple[str, ...]) -> None:
        self.op = op
        self.writes = writes
        self.__name__ = self.__qualname__ = f"functional_{op._schema.name.split('::')[1]}"
        self.__module__ = __name__

    @property
    def tags(self) -> Any:
        """What torch says of the operation; that it draws random numbers is true of this form too."""
        return self.op.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(lambda op, bound: op(**bound), args, kwargs)

    def run(self, call: Callable[[OpOverload, dict[str, Any]], Any], args: Any, kwargs: Any) -> Any:
        """The results, where ``call`` computes those of ``op`` from its arguments by name."""
        names = [argument.name for argument in self.op._schema.arguments]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in self.writes:
            bound[name] = torch_adapter.map_leaves(torch.Tensor, torch.clone, bound.get(name))
        results = call(self.op, bound)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        fresh = [r for r, spec in zip(results, self.op._schema.returns, strict=True) if spec.alias_info is None]
        values = (*fresh, *(bound[name] for name in self.writes))
        return values[0] if len(values) == 1 else values

    def __repr__(self) -> str:
        return f"functional({self.op})"


def operation_of(target: Any) -> Any:
    """The operation that a node's target computes: that of a functional form, else the target itself."""
    # By type: `OpOverload` has an attribute `op` of its own, the C++ function.
    return target.op if isinstance(target, Functionalized) else target


class WithGradMode:
    """An operation that must run with grad mode on, because only then its kernel returns what its backward needs.

    Programs run with grad mode off. Called with the arguments of ``op``, it detaches them, turns grad mode on for the
    call, and returns the results of ``op``.
    """

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = f"{op._schema.name.split('::')[1]}_for_backward"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        args = torch_adapter.map_leaves(torch.Tensor, torch.Tensor.detach, args)
        with torch.enable_grad():
            return self.op(*args)

    def __repr__(self) -> str:
        return f"for_backward({self.op})"


_BY_GRAD_MODE = {op: WithGradMode(op) for op in (aten.mkldnn_rnn_layer.default,)}


def executable_form(op: OpOverload) -> Callable[..., Any]:
    """What a graph calls for ``op``: the operation itself, unless its kernel depends on grad mode."""
    return _BY_GRAD_MODE.get(op, op)


@functools.cache
def written_arguments(op: OpOverload) -> WrittenArguments | None:
    """What ``op`` writes, or None for an operation that writes nothing."""
    arguments = op._schema.arguments
    marked = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    names = marked or _UNMARKED_WRITES.get(op, ())
    if not names:
        return None
    writes = tuple((at, a.name) for at, a in enumerate(arguments) if a.name in names)
    fresh = sum(result.alias_info is None for result in op._schema.returns)
    variant = _functional_variant(op, fresh + len(writes)) if marked else None
    return WrittenArguments(writes, fresh, variant or Functionalized(op, names))


def _functional_variant(op: OpOverload, results: int) -> OpOverload | None:
    """ATen's own functional form, with the same overload and arguments and no final underscore in its name."""
    if op in _RENAMED:
        return _RENAMED[op]
    namespace, name = op._schema.name.split("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    variant = getattr(packet, op._overloadname, None)
    if variant is None or len(variant._schema.returns) != results:
        return None
    # Names alone do not do: `pow_.Scalar` has a number as exponent, `pow.Scalar` one as base.
    same = _signature(variant) == _signature(op)
    return variant if same else None


def _signature(op: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def out_of_place(op: OpOverload) -> OpOverload | None:
    """The view operation of ``transpose_`` and its like: ``transpose``, with the same arguments."""
    packet = getattr(aten, op._schema.name.split("::")[1].removesuffix("_"), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return next((o for o in overloads if _signature(o) == _signature(op)), None)


# The unsafe ones are views, too: "unsafe" says that autograd lets each part be written by itself.
_EQUAL_SPLITS = (aten.split.Tensor, aten.unsafe_split.Tensor)


def single_view(
    op: OpOverload, args: tuple[Any, ...], index: int, val: torch.Tensor
) -> tuple[OpOverload, tuple[Any, ...]]:
    """The view that makes element ``index`` of a list of views (``split``, ``unbind``) without the others.

    Args:
        op, args: the operation that returns the list, and its arguments after the base tensor.
        val: the fake tensor of the element.
    """
    dim = args[-1] if len(args) == (1 if op is aten.unbind.int else 2) else 0
    if op is aten.unbind.int:
        return aten.select.int, (dim, index)
    if op in (*_EQUAL_SPLITS, aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default):
        start = args[0] * index if op in _EQUAL_SPLITS else sum(args[0][:index])
        return aten.slice.Tensor, (dim, start, start + val.shape[dim])
    return as_strided_like(val)


def as_strided_like(val: torch.Tensor) -> tuple[OpOverload, tuple[Any, ...]]:
    """The ``as_strided`` view with the sizes, strides and offset of ``val``; correct for any view of its storage."""
    return aten.as_strided.default, (list(val.shape), list(val.stride()), val.storage_offset())


Node = torch.fx.Node
Emit = Callable[..., Node]


def write_back(
    emit: Emit,
    view: OpOverload,
    args: tuple[Any, ...],
    base: Node,
    base_val: torch.Tensor,
    new: Node,
    view_val: torch.Tensor,
) -> Node:
    """Emit the new value of ``base`` after its view ``view(base, *args)`` became ``new``.

    The inverses are those of torch's functionalization (``FunctionalInverses.cpp``), written as scatters. A view
    without an entry in the table is written back by ``as_strided_scatter``, which is right for every layout.

    Args:
        emit: appends ``op(*args)`` to the graph; the keyword ``val`` is its fake result.
        args: arguments of the view after its base.
        base, new: current value of the base and new value of the view.
        base_val, view_val: the fake tensors of base and view, for their shapes and strides.
    """
    inverse = _INVERSES.get(view)
    if inverse is not None:
        op, inverse_args = inverse(base_val, view_val, *args)
        inputs = (base, new) if op in _SCATTERS else (new,)
        return emit(op, *inputs, *inverse_args, val=base_val)
    geometry: list[Any] = [list(view_val.shape), list(view_val.stride())]
    # A number counts from the start of the storage, and where the base begins there may differ between calls: it may be
    # a part of the user's tensor. None is where the base begins.
    if offset := view_val.storage_offset() - base_val.storage_offset():
        geometry.append(offset)
    return emit(aten.as_strided_scatter.default, base, new, *geometry, val=base_val)


_SCATTERS = {
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
}


def _reshape(base: torch.Tensor, view: torch.Tensor, *args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.reshape.default, (list(base.shape),)


def _transpose(base: torch.Tensor, view: torch.Tensor, a: int, b: int) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.transpose.int, (a, b)


def _t(base: torch.Tensor, view: torch.Tensor) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.t.default, ()


def _permute(base: torch.Tensor, view: torch.Tensor, dims: list[int]) -> tuple[OpOverload, tuple[Any, ...]]:
    rank = base.dim()
    inverse = [0] * rank
    for at, dim in enumerate(dims):
        inverse[dim % rank] = at
    return aten.permute.default, (inverse,)


def _select(base: torch.Tensor, view: torch.Tensor, dim: int, at: int) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.select_scatter.default, (dim, at)


def _slice(
    base: torch.Tensor, view: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.slice_scatter.default, (dim, start, end, step)


def _diagonal(base: torch.Tensor, view: torch.Tensor, *args: int) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.diagonal_scatter.default, args


def _view_dtype(base: torch.Tensor, view: torch.Tensor, dtype: torch.dtype) -> tuple[OpOverload, tuple[Any, ...]]:
    return aten.view.dtype, (base.dtype,)


_INVERSES: dict[OpOverload, Callable[..., tuple[OpOverload, tuple[Any, ...]]]] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.diagonal.default: _diagonal,
    aten.view.dtype: _view_dtype,
}
