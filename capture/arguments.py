"""How a step was called: the leaves of its arguments, which of them are tensors, what stands for them in a capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import Role
from weft.capture.recorder import Recorder
from weft.capture.state import SIMPLE, Container, Place, identity, plain
from weft.errors import GraphOutsideStep, UnregisteredType

MARKS = "_weft_dynamic_dims"


class Arguments:
    """The flattened arguments of one call.

    Raises:
        UnregisteredType: an argument is an object with tensors inside that pytrees do not know.
        GraphOutsideStep: a tensor argument was computed with gradients outside the step.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch_adapter.register_dataclasses((args, kwargs))
        keyed, self.spec = torch_adapter.flatten_with_paths((args, kwargs))
        self.paths = [_readable(path) for path, _ in keyed]
        self.container = Container([leaf for _, leaf in keyed], "args", label=lambda at: self.paths[at])
        self.shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]
        self.places: dict[tuple[Any, ...], Place] = {}
        self.gradients: list[tuple[int, Container]] = []
        for at, leaf in enumerate(self.leaves):
            self._admit(at, leaf)

    @property
    def leaves(self) -> list[Any]:
        return self.container.obj

    @property
    def objects(self) -> Iterator[tuple[Any, str]]:
        """Arguments that are neither tensors nor plain values: modules, optimizers, functions."""
        return ((leaf, path) for leaf, path in zip(self.leaves, self.paths, strict=True)
                if not isinstance(leaf, (torch.Tensor, *SIMPLE)))

    def _admit(self, at: int, leaf: Any) -> None:
        path = self.paths[at]
        if not isinstance(leaf, torch.Tensor):
            if _is_batch_object(leaf):
                raise UnregisteredType(type(leaf), path)
            return
        if leaf.requires_grad and not leaf.is_leaf:
            raise GraphOutsideStep(path)
        inner, names = plain(leaf)
        self.places.setdefault(identity(inner), Place(self.container, at, path, Role.BATCH, names))
        if leaf.requires_grad:
            gradient = Container(leaf, path, label=lambda _: f"{path}.grad")
            self.gradients.append((at, gradient))
            if leaf.grad is not None:
                grad, names = plain(leaf.grad)
                self.places.setdefault(identity(grad), Place(gradient, "grad", f"{path}.grad", Role.GRADIENT, names))

    def marked_dynamic(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (at, dim) for at, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)
            for dim, mark in getattr(leaf, MARKS, {}).items() if mark != "static"
        )

    def as_fakes(self, recorder: Recorder, dynamic: frozenset[tuple[int, int]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to capture with: fake tensors in place of real ones, symbols in place of dynamic sizes.

        A tensor that requires grad is passed as itself: hooks on it and its ``.grad`` belong to that object.
        """
        leaves = [
            self._fake(leaf, at, recorder, {d for a, d in dynamic if a == at}) if isinstance(leaf, torch.Tensor) else leaf
            for at, leaf in enumerate(self.leaves)
        ]
        return torch_adapter.unflatten(leaves, self.spec)

    def _fake(self, leaf: torch.Tensor, at: int, recorder: Recorder, dims: set[int]) -> torch.Tensor:
        if leaf.requires_grad:
            return leaf
        inner, names = plain(leaf)
        with torch_adapter.only_mode(recorder.fake_mode):
            sizes = [
                torch_adapter.size_symbol(recorder.symbols.shape_env, size, f"{self.paths[at]}.size({dim})")
                if dim in dims and size > 1 else size
                for dim, size in enumerate(inner.shape)
            ]
            val = torch.empty_strided(sizes, _strides(inner, sizes), dtype=inner.dtype, device=inner.device)
        fake = recorder.known_input(inner) or recorder.new_input(inner, val).val
        return torch_adapter.rewrap(leaf, fake) if names else fake

    def bind(self, leaves: list[Any]) -> None:
        """Take the leaves of another call: places and gradients refer to them from now on."""
        self.container.obj = leaves
        for at, container in self.gradients:
            container.obj = leaves[at]

    def changes(self) -> Iterator[tuple[Container, Any, Any, Any]]:
        for _, container in self.gradients:
            for key, old, new in container.changes():
                yield container, key, old, new

    def restore(self) -> None:
        for _, container in self.gradients:
            container.restore()


def _strides(tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
    """Strides of ``tensor`` said with ``sizes``: where a stride is the product of inner sizes it stays so."""
    strides: list[Any] = list(tensor.stride())
    product, symbolic = 1, 1
    for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
        if tensor.stride(dim) == product:
            strides[dim] = symbolic
        product = tensor.stride(dim) * tensor.shape[dim]
        symbolic = strides[dim] * sizes[dim]
    return strides


def _is_batch_object(obj: Any) -> bool:
    """An object whose attributes are tensors and that holds no module or optimizer: data, which must be taken apart."""
    if isinstance(obj, (type, torch.nn.Module, torch.optim.Optimizer)) or callable(obj):
        return False
    values = list(getattr(obj, "__dict__", {}).values())
    holds_model = any(isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) for value in values)
    return not holds_model and any(isinstance(value, torch.Tensor) for value in values)


def _readable(path: tuple[Any, ...]) -> str:
    """``args[0]['ids']`` or ``labels`` for the path of a leaf in ``(args, kwargs)``."""
    outer, *rest = path
    tail = "".join(str(part) for part in rest)
    return f"args{tail}" if str(outer) == "[0]" else tail.replace("['", "", 1).replace("']", "", 1)


