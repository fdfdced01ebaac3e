"""How a step was called: the leaves of its arguments, which of them are tensors, what stands for them in a capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.dynamic import MARKS, DynamicSizes
from weft.capture.graph import Role
from weft.capture.recorder import Recorder
from weft.capture.state import SIMPLE, Container, Place, identity, plain
from weft.errors import GraphOutsideStep, UnregisteredType, UnstridedArgument


class Arguments:
    """The flattened arguments of one call.

    Attributes:
        leaves: the flattened arguments; paths: where each stands, as the user would write it.
        tensors: the place of each leaf that is a tensor, by its number.
        vals: what each of them was captured as, symbolic sizes and all.

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
        self.tensors: dict[int, Place] = {}
        self.vals: dict[int, torch.Tensor] = {}
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
        return (
            (leaf, path)
            for leaf, path in zip(self.leaves, self.paths, strict=True)
            if not isinstance(leaf, (torch.Tensor, *SIMPLE))
        )

    @property
    def differentiable(self) -> list[tuple[torch.Tensor, str]]:
        """Arguments that require grad, with their names."""
        return [(self.leaves[at], self.paths[at]) for at, _ in self.gradients]

    def _admit(self, at: int, leaf: Any) -> None:
        path = self.paths[at]
        if not isinstance(leaf, torch.Tensor):
            if _is_batch_object(leaf):
                raise UnregisteredType(type(leaf), path)
            return
        if leaf.requires_grad and not leaf.is_leaf:
            raise GraphOutsideStep(path)
        inner, names = plain(leaf)
        if inner.layout is not torch.strided:
            raise UnstridedArgument(path, inner.layout)
        self.tensors[at] = Place(self.container, at, path, Role.BATCH, names)
        self.places.setdefault(identity(inner), self.tensors[at])
        if leaf.requires_grad:
            gradient = Container(leaf, path, label=lambda _: f"{path}.grad")
            self.gradients.append((at, gradient))
            if leaf.grad is not None:
                grad, names = plain(leaf.grad)
                self.places.setdefault(identity(grad), Place(gradient, "grad", f"{path}.grad", Role.GRADIENT, names))

    def marked_dynamic(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (at, dim)
            for at, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
            for dim, mark in getattr(leaf, MARKS, {}).items()
            if mark != "static"
        )

    def as_fakes(
        self, recorder: Recorder, dynamic: frozenset[tuple[int, int]], sizes: DynamicSizes
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to capture with: fake tensors in place of real ones, symbols in place of dynamic sizes.

        A tensor that requires grad is passed as itself: hooks on it and its ``.grad`` belong to that object.
        """
        leaves = [
            self._fake(leaf, at, recorder, {d for a, d in dynamic if a == at}, sizes)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for at, leaf in enumerate(self.leaves)
        ]
        return torch_adapter.unflatten(leaves, self.spec)

    def _fake(
        self, leaf: torch.Tensor, at: int, recorder: Recorder, dims: set[int], sizes: DynamicSizes
    ) -> torch.Tensor:
        path = self.paths[at]
        inner, names = plain(leaf)
        if leaf.requires_grad:
            self.vals[at] = inner
            for dim in sorted(dims):
                sizes.refuse(
                    path, dim, leaf.shape[dim], "requires_grad: such an argument keeps the sizes it was captured with"
                )
            return leaf
        required = {dim for dim, mark in getattr(leaf, MARKS, {}).items() if mark == "dynamic"}
        with torch_adapter.only_mode(recorder.fake_mode):
            shape = [
                sizes.symbol(at, dim, path, size, required=dim in required) if dim in dims else size
                for dim, size in enumerate(inner.shape)
            ]
            val = torch.empty_strided(
                shape, sizes.strides(at, path, inner, shape), dtype=inner.dtype, device=inner.device
            )
        self.vals[at] = val
        known = recorder.known_input(inner)
        fake = recorder.new_input(inner, val).val if known is None else known
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
