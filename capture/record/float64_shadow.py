"""Runs a step with a float64 shadow of every floating point value.

The error of a result is only known from a run in higher precision. A step cannot be converted to float64 in general:
its model, its optimizer and its own casts would all have to change. But its values can be shadowed. Under the mode of
this module each operation runs twice: as it is, and on *shadows*, float64 values of the same tensors that were never
rounded to a lower precision. The method is that of Benz, Hildebrandt and Hack, "A dynamic program analysis to find
floating-point accuracy problems", PLDI 2012.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.node_kinds import COLLECTIVE_NAMESPACES, WAIT
from weft.capture.record.operands import argument_of, map_operands, tensors_in
from weft.torch_adapter import OpOverload, TorchDispatchMode

aten = torch.ops.aten

# Namespaces of operations that may run a second time, on shadows. Operations of others may do more than compute.
_SHADOWED = {"aten", "prims", "weft", *COLLECTIVE_NAMESPACES, "_c10d_functional_autograd", "c10d"}
# These change the memory of a tensor, and no value.
_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}


class Float64ShadowMode(TorchDispatchMode):
    """While active, keeps a float64 shadow of every floating point value (complex128 for complex values).

    Values that are computed from shadowed ones are shadowed too, also integers and masks: maxima, sorts and comparisons
    of the shadow run use its own values. Random draws, and numbers that the step's Python reads, are those of the
    original run. An operation without a float64 kernel runs on shadows rounded to float32, or to the dtypes of the call
    where it takes neither. The choice depends on the operation alone, so all ranks make the same one, and collectives
    of shadows match. Operations of other libraries run once, and their results become new shadows. Writes that bypass
    torch's dispatcher are not seen. Memory: twice that of all live float32 tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shadows: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[torch.dtype, torch.Tensor]]
        self._shadows = weakref.WeakKeyDictionary()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """False: torch would wrap every dispatch to keep its own compiler out, and none runs here."""
        return False

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the float64 value of a plain tensor of the run; integers that have no shadow as they are."""
        return (self._shadow(tensor) if self._is_followed(tensor) else tensor.detach()).clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        op: OpOverload = func
        kwargs = kwargs or {}
        if any(not torch_adapter.is_plain_tensor_type(kind) for kind in types):
            return NotImplemented
        given = tensors_in((args, kwargs))
        written = list(_written(op, args, kwargs))
        if op.namespace not in _SHADOWED or op._schema.name in _MEMORY or draws(op, args, kwargs):
            out = op(*args, **kwargs)
            self._forget(written)
            if op is aten.native_dropout.default:
                self._follow(out[0], self._dropped(args[0], out[1], args[1]))
            return out
        exact = {id(tensor): self._shadow(tensor) for tensor in given if self._is_followed(tensor)}
        if exact:
            exact |= {id(tensor): self._shadow(tensor) for tensor in written if _has_memory(tensor)}
        memory = {tensor.untyped_storage() for tensor in given if _has_memory(tensor)}
        out = op(*args, **kwargs)
        fresh = [
            t if t is not None and _has_memory(t) and t.untyped_storage() not in memory else None for t in _results(out)
        ]
        if not exact or not (written or op.namespace == "c10d" or any(result is not None for result in fresh)):
            return out
        values = _run(op, args, kwargs, exact)
        if values is None:
            self._forget(written)
            return out
        for result, value in zip(fresh, values, strict=True):
            if result is not None and value is not None and value.shape == result.shape:
                self._follow(result, value)
        return out

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        if not _has_memory(tensor):
            return False
        return tensor.is_floating_point() or tensor.is_complex() or tensor.untyped_storage() in self._shadows

    def _shadow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The float64 tensor with the tensor's sizes, strides and offset in the shadow of its storage."""
        storage = tensor.untyped_storage()
        dtype, whole = self._shadows.get(storage, (None, None))
        if whole is None or dtype != tensor.dtype or whole.numel() != storage.nbytes() // tensor.element_size():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            whole = flat.to(_wide(tensor.dtype), copy=True)
            self._shadows[storage] = tensor.dtype, whole
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view = view.conj() if tensor.is_conj() else view
        return view._neg_view() if tensor.is_neg() else view

    def _follow(self, result: torch.Tensor, value: torch.Tensor) -> None:
        """Make ``value`` the shadow of a tensor in new memory."""
        storage = result.untyped_storage()
        whole = torch.zeros(storage.nbytes() // result.element_size(), dtype=_wide(result.dtype), device=result.device)
        whole.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(value)
        self._shadows[storage] = result.dtype, whole

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """Drop the shadows of tensors, so that the next use starts from the values in memory."""
        for tensor in tensors:
            if _has_memory(tensor):
                self._shadows.pop(tensor.untyped_storage(), None)

    def _dropped(self, value: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
        return aten.native_dropout_backward.default(self._shadow(value), mask, 1 / (1 - p) if p < 1 else 0.0)


def _run(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], exact: dict[int, torch.Tensor]
) -> list[torch.Tensor | None] | None:
    """The results of ``op`` on shadows, None where no kernel takes them. Shadows of written arguments are written."""
    for narrow in (_wide, _single, _own):
        passed: dict[int, torch.Tensor] = {}

        def given(value: Any, narrow: Callable[..., torch.dtype] = narrow, passed: Any = passed) -> Any:
            if isinstance(value, torch.Tensor) and id(value) in exact:
                return passed.setdefault(id(value), exact[id(value)].to(narrow(value.dtype)))
            return narrow(value) if isinstance(value, torch.dtype) else value

        narrowed = map_operands((args, kwargs), given)
        try:
            out = op(*_without_half(op, narrowed[0]), **narrowed[1])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue
        results = _waited(op, out)
        for key, tensor in passed.items():
            if tensor is not exact[key]:
                exact[key].copy_(tensor)
        return results
    return None


def _without_half(op: OpOverload, args: Any) -> list[Any]:
    """The arguments with ``half_to_float=False``: softmax refuses True for float64 operands."""
    named = zip(op._schema.arguments, args, strict=False)
    return [False if argument.name == "half_to_float" else value for argument, value in named]


def _waited(op: OpOverload, out: Any) -> list[torch.Tensor | None]:
    """The tensors among the results; for a collective, after waiting for it."""
    if op.namespace == "c10d":
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(result, torch.ScriptObject):
                result.wait()  # type: ignore[attr-defined]
    results = list(_results(out))
    if op.namespace in (*COLLECTIVE_NAMESPACES, "_c10d_functional_autograd"):
        return [result if result is None else WAIT(result) for result in results]
    return results


def _results(out: Any) -> Iterator[torch.Tensor | None]:
    """All results in order, with lists opened; None for a result that is no tensor."""
    for result in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(result, (list, tuple)):
            yield from _results(result)
        else:
            yield result if isinstance(result, torch.Tensor) else None


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(argument_of(args, kwargs, at, argument.name))


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operation draws random numbers. Attention draws only if it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    named = {argument.name: at for at, argument in enumerate(op._schema.arguments)}
    return "dropout_p" not in named or bool(argument_of(args, kwargs, named["dropout_p"], "dropout_p"))


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the shadows of tensors of ``dtype``."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _single(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else dtype


def _own(dtype: torch.dtype) -> torch.dtype:
    return dtype
