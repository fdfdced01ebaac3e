"""Guards on the arguments of a call, and on single tensors.

The arguments of a later call must have the same structure, equal plain values, the same hooks and the same aliasing
among tensors. Sizes that are symbols are left to :mod:`weft.capture.guards.size_guard`.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.arguments import CallArguments
from weft.capture.state.absent_graphs import AutogradRole
from weft.capture.state.containers import ANY, SIMPLE, StatePlace, TensorLike, same_simple
from weft.capture.state.object_parts import factory_of, followed_items
from weft.capture.state.patterns import Growing, OfType, Pattern
from weft.capture.state.tensor_memory import inner_tensor, own_attributes
from weft.capture.strided_overlap import apart


class ArgumentGuard:
    """Guards the structure, plain values, gradients, hooks and aliasing of the arguments.

    Args:
        arguments: of the captured call.
        inputs: numbers of the leaves that are Python numbers and inputs of the graph.
    """

    def __init__(self, arguments: CallArguments, inputs: set[int]) -> None:
        self._arguments = arguments
        self._spec = arguments.spec
        values = set(range(len(arguments.leaves))) - arguments.tensors.keys() - inputs - arguments.unread.keys()
        self._plain = [(at, arguments.leaves[at]) for at in sorted(values)]
        self._gradients = [(container, container.obj.grad is None) for _, container in arguments.gradients]
        self._flags = [(at, _flags(arguments.leaves[at])) for at in arguments.tensors]
        self._constants = frozenset(at for at, flags in self._flags if flags == _CONSTANT)
        self._attributes = {at: own_attributes(arguments.leaves[at]) for at in arguments.tensors}
        self._aliases = _aliases([arguments.leaves[at] for at in arguments.tensors])

    def listed(self) -> list[str]:
        """The conditions as text."""
        paths = self._arguments.paths
        return [
            "the arguments have the structure of the captured call",
            "the same arguments share memory",
            *map(str, self._arguments.asked),
            *(f"{paths[at]} is {leaf!r}" for at, leaf in self._plain),
            *(f"{container.label('grad')} {'is None' if empty else 'exists'}" for container, empty in self._gradients),
            *(
                f"{paths[at]}: {kind.__name__}, {role.value}, {len(hooks)} hooks"
                for at, (kind, role, hooks, _) in self._flags
            ),
        ]

    def failure(self, leaves: list[Any], spec: Any) -> str | None:
        """Why the graph cannot serve a call with these leaves, None where it can; binds them as the arguments."""
        arguments, passed = self._arguments, leaves
        if spec is not self._spec:  # those of most calls are one object
            if spec != arguments.spec:
                return "the arguments have another structure"
            self._spec = spec
        inputs = arguments.inputs_of(leaves)
        if isinstance(inputs, str):
            return inputs
        leaves = inputs
        for at, expected in self._plain:
            if not matches(leaves[at], expected):
                return f"{arguments.paths[at]} is {leaves[at]!r}, was {expected!r}"
        for at, flags in self._flags:
            if not (at in self._constants and _is_constant(leaves[at])) and _flags(leaves[at]) != flags:
                return f"type, requires_grad, hooks or placements of {arguments.paths[at]} changed"
            before = self._attributes[at]
            if (vars(leaves[at]) or before) and not _alike(own_attributes(leaves[at]), before):
                return f"attributes that the program put on {arguments.paths[at]} changed"
        if len(self._flags) > 1 and _aliases([leaves[at] for at, _ in self._flags]) != self._aliases:
            return "other arguments than before share memory"
        arguments.bind(passed)
        for container, empty in self._gradients:
            if (container.obj.grad is None) is not empty:
                return f"{container.label('grad')} {'exists now' if empty else 'is gone'}"
        return None


def _alike(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(
        value is before[k] or matches(value, before[k]) for k, value in now.items()
    )


class TensorGuard:
    """Guards shape, strides, dtype and device of one input, except for symbolic sizes and strides."""

    def __init__(self, place: StatePlace, val: torch.Tensor) -> None:
        self.place = place
        self.dtype, self.device = val.dtype, val.device
        # Of values that are the conjugates or negatives of what memory holds, and of inference tensors.
        self.marks = val.is_conj(), val.is_neg(), val.is_inference()
        self.static = all(isinstance(n, int) for n in (*val.shape, *val.stride()))
        self.shape = tuple(val.shape) if self.static else val.dim()
        self.sizes = [(dim, n) for dim, n in enumerate(val.shape) if isinstance(n, int)]
        self.strides: Any = (
            val.stride() if self.static else [(d, s) for d, s in enumerate(val.stride()) if isinstance(s, int)]
        )
        self.described = _described(val)

    def __str__(self) -> str:
        return f"{self.place.path} is {self.described}"

    def failure(self) -> str | None:
        """How the tensor at the place now differs, None where it does not."""
        value = self.place.get()
        if not isinstance(value, torch.Tensor):
            return f"{self.place.path} is no tensor any more"
        if self.static:
            same = value.shape == self.shape and value.stride() == self.strides
        else:
            same = value.dim() == self.shape and all(value.shape[d] == n for d, n in self.sizes)
            same = same and all(value.stride(d) == s or value.shape[d] < 2 for d, s in self.strides)
        marks = value.is_conj(), value.is_neg(), value.is_inference()
        if same and value.dtype == self.dtype and value.device == self.device and marks == self.marks:
            return None
        return f"{self.place.path} is {_described(value)}, was {self.described}"


def hooks_of(tensor: torch.Tensor) -> tuple[HookKey, ...]:
    """Keys of the hooks registered on a tensor, in order."""
    return tuple(HookKey(hook) for hooks in torch_adapter.registered_hooks(tensor) for hook in hooks.values())


def _node_hooks_of(leaf: torch.Tensor) -> tuple[HookKey, ...]:
    node = torch_adapter.accumulator(leaf) if leaf.is_leaf else None
    found = [] if node is None else torch_adapter.node_hooks(node)
    return tuple(HookKey(hook) for _, hooks in found for hook in hooks.values())


class HookKey:
    """Equal for hooks that do the same: one function object, or functions with the same code, closure and owner.

    The second case is a lambda that the training loop registers anew on every batch.
    """

    __slots__ = ("_parts", "hook")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        function = getattr(hook, "__func__", hook)
        cells = getattr(function, "__closure__", None) or ()
        code = getattr(function, "__code__", None)
        owner = getattr(hook, "__self__", None)
        defaults = getattr(function, "__defaults__", None) or ()
        self._parts = None if code is None else (code, owner, *defaults, *(_content(cell) for cell in cells))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HookKey):
            return NotImplemented
        if self.hook is other.hook:
            return True
        if self._parts is None or other._parts is None or len(self._parts) != len(other._parts):
            return False
        return all(
            a is b or (isinstance(b, SIMPLE) and matches(a, b)) for a, b in zip(self._parts, other._parts, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def matches(value: Any, expected: Any) -> bool:
    """Whether a value in Python state can replace the one at capture.

    It must be the same object, the same method of the same object, an equal simple value, a tensor of the same shape
    and dtype, a tuple of values that match, or be as a :class:`Pattern`, :class:`Growing`, :class:`OfType` or
    :class:`TensorLike` says.
    A leaf that requires grad must be the same object, because its gradient, hooks and optimizer state belong to it.
    """
    if value is expected or expected is ANY:
        return True
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and (role := AutogradRole.of(expected)).replaceable
            and AutogradRole.of(value) is role
            and (value.shape == expected.shape and value.dtype == expected.dtype)
        )
    if isinstance(expected, TensorLike):
        is_alike = isinstance(value, torch.Tensor) and AutogradRole.of(value) is expected.role
        return is_alike and value.shape == expected.shape and value.dtype == expected.dtype
    if isinstance(expected, (Growing, OfType)):
        return expected.matches(value)
    if isinstance(expected, Pattern):
        if type(value) is not expected.kind or factory_of(value) is not expected.factory:
            return False
        items, known = followed_items(value), expected.items
        # The order counts: a step may go through the entries.
        same_keys = len(items) == len(known) and all(map(_same_key, items, known))
        return same_keys and all(matches(item, each) for (_, item), each in zip(items, known.values(), strict=True))
    if isinstance(expected, tuple):  # nobody can change one, so that its items are guarded with it
        return (
            type(value) is type(expected)
            and len(value) == len(expected)
            and all(matches(item, known) for item, known in zip(value, expected, strict=True))
        )
    if type(expected) is types.MethodType:  # each time that it is taken from its object it is another one
        is_method = type(value) is types.MethodType
        return is_method and value.__self__ is expected.__self__ and value.__func__ is expected.__func__
    return same_simple(value, expected)


def _same_key(item: tuple[Any, Any], known: Any) -> bool:
    key = item[0]
    return key is known or (not isinstance(key, torch.Tensor) and type(key) is type(known) and key == known)


def _flags(leaf: Any) -> tuple[Any, ...]:
    layout = (leaf.device_mesh, leaf.placements) if torch_adapter.is_dtensor(leaf) else None
    hooks = (*hooks_of(leaf), *_node_hooks_of(leaf)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else ()
    role = AutogradRole.of(leaf) if isinstance(leaf, torch.Tensor) else None
    return type(leaf), role, hooks, layout


_CONSTANT = (torch.Tensor, AutogradRole.CONSTANT, (), None)


def _is_constant(leaf: Any) -> bool:
    """Whether :func:`_flags` gives `_CONSTANT`, in a tenth of its time."""
    return type(leaf) is torch.Tensor and not leaf.requires_grad


def _aliases(tensors: list[torch.Tensor]) -> tuple[list[int], list[Any]]:
    """For each tensor the number of the first tensor with the same storage; for each two that may overlap, their
    numbers and the distance in elements."""
    first: dict[int, int] = {}
    plain = [inner_tensor(tensor)[0] for tensor in tensors]
    numbers = [first.setdefault(torch_adapter.storage_key(tensor), at) for at, tensor in enumerate(plain)]
    if len(first) == len(numbers):
        return numbers, []
    pairs = [(a, b) for a, b in itertools.combinations(range(len(plain)), 2) if numbers[a] == numbers[b]]
    close = [(a, b) for a, b in pairs if not apart(plain[a], plain[b])]
    return numbers, [(a, b, plain[b].storage_offset() - plain[a].storage_offset()) for a, b in close]


def _described(tensor: torch.Tensor) -> str:
    lazy = "conjugate " * tensor.is_conj() + "negative " * tensor.is_neg() + "inference " * tensor.is_inference()
    return f"{lazy}{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"
