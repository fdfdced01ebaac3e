"""Lists among the arguments whose length changes from call to call.

A step that goes through a list does other operations for another length: each length has a form of its own. What is
known to vary in such a list holds for every length, though. So all entries that a list had in any capture are compared:
sizes and values that differ are symbols from the first capture of a new length on. The parts of a packed sequence vary
together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from weft import torch_adapter
from weft.capture.record.data_arguments import flat_arguments
from weft.capture.record.dynamic_sizes import sizes_of
from weft.capture.record.number_lists import NumberList, Steps, folded, may_be_folded
from weft.capture.record.python_numbers import ChangingState
from weft.capture.record.readable_names import argument_path
from weft.capture.record.shared_arguments import CallLeaves
from weft.capture.record.sparse_arguments import apart
from weft.capture.state.containers import MISSING, item_of, same_simple

_ENTRY = "[*]"


class ListHistory:
    """What varied among the entries of the lists in the arguments of one step, over its captures, and what these found.

    Attributes:
        folded: by path, the lists of numbers that are one leaf each, because their length changes.
        values: paths of arguments that must be guarded by their values, and lists that must not be folded.
        names: those of attributes that the step computes.
    """

    def __init__(self) -> None:
        self.folded: dict[str, Steps] = {}
        self.values: set[str] = set()
        self.names: set[str] = set()
        self._counts: dict[str, int] = {}  # by the name of a list: how many entries it had first
        self._open: set[str] = set()  # lists that had another number of entries
        self._sizes: dict[tuple[str, int], tuple[Any, ...]] = {}  # by list and number of dimensions: the first sizes
        self._values: dict[str, Any] = {}
        self._varying_sizes: set[tuple[str, int, int]] = set()
        self._varying_values: set[str] = set()
        self._packed: dict[str, Any] = {}  # by path: the first sizes of a packed sequence's parts
        self._open_packed: set[str] = set()  # packed sequences that had others

    def flatten(self, call: tuple[Any, Any]) -> tuple[list[Any], Any]:
        """The leaves of the positional and keyword arguments of a call, and their structure."""
        tree = folded(call, self.folded, self.values) if self.folded else call
        leaves, spec = flat_arguments(tree)
        if (found := apart(leaves, spec)) is not None:
            leaves, spec = torch_adapter.flatten(found)
        return CallLeaves(leaves, call), spec

    def changing(self, numbers: Collection[str]) -> ChangingState:
        """What a capture takes for changing, with these numbers and what is known of lists."""
        values, names = frozenset(self.values), frozenset(self.names)
        return ChangingState(frozenset(numbers), values=values, lists=dict(self.folded), names=names)

    def note(self, found: ChangingState) -> None:
        """Note what a capture found."""
        self.values |= found.values
        self.names |= found.names

    def note_lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which lists have another length in this call, and fold those of numbers."""
        keyed, _ = torch_adapter.flatten_with_paths((args, kwargs))
        named = [(name, path) for path, _ in keyed if (name := _name((args, kwargs), path))]
        for name, count in Counter(name for name, _ in named).items():
            if self._counts.setdefault(name, count) != count:
                self._open.add(name)
        for name, path in named:
            depth = name.count(_ENTRY)
            if name in self._open and name.endswith(_ENTRY * depth):
                path = path[: len(path) - depth]
                steps = tuple(getattr(key, "idx", getattr(key, "key", None)) for key in path)
                if may_be_folded(_at((args, kwargs), steps)):
                    self.folded[argument_path(path)] = steps

    def varying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[tuple[int, int]], set[str]]:
        """What varies in the lists of this call, which is noted, whose length has changed: (leaf, dimension) of tensors
        and arrays, and the paths of leaves whose values vary."""
        call = folded((args, kwargs), self.folded, self.values)
        keyed, _ = torch_adapter.flatten_with_paths(call)
        named = [(at, name, leaf) for at, (path, leaf) in enumerate(keyed) if (name := _name(call, path))]
        for _, name, leaf in named:
            self._note(name, leaf)
        of_open = [(at, name, leaf) for at, name, leaf in named if name in self._open]
        sizes = {(at, dim) for at, name, leaf in of_open for dim in self._varying_dims(name, leaf)}
        sizes |= {(at, 0) for at, (_, leaf) in enumerate(keyed) if type(leaf) is NumberList}
        sizes |= self._varying_packed(call, keyed)
        values = {argument_path(keyed[at][0]) for at, name, _ in of_open if name in self._varying_values}
        return sizes, values

    def _varying_packed(self, call: tuple[Any, Any], keyed: list[Any]) -> set[tuple[int, int]]:
        """(leaf, dimension) of the parts of packed sequences that had other sizes once: rows, steps and sequences vary
        together, and each of them alone would be a capture."""
        parts: dict[str, list[tuple[int, Any]]] = {}
        for at, (path, leaf) in enumerate(keyed):
            if type(functools.reduce(_inside, path[:-1], call)) is PackedSequence and isinstance(leaf, torch.Tensor):
                parts.setdefault(argument_path(path[:-1]), []).append((at, leaf))
        for name, leaves in parts.items():
            sizes = [leaf.shape[0] for _, leaf in leaves]
            if self._packed.setdefault(name, sizes) != sizes:
                self._open_packed.add(name)
        return {(at, 0) for name, leaves in parts.items() if name in self._open_packed for at, _ in leaves}

    def _note(self, name: str, leaf: Any) -> None:
        sizes = sizes_of(leaf)
        if sizes is not None:
            known = self._sizes.setdefault((name, len(sizes)), tuple(sizes))
            different = (dim for dim, (a, b) in enumerate(zip(sizes, known, strict=True)) if a != b)
            self._varying_sizes |= {(name, len(sizes), dim) for dim in different}
        known = self._values.setdefault(name, leaf if sizes is None else None)
        if sizes is not None or not same_simple(leaf, known):
            self._varying_values.add(name)

    def _varying_dims(self, name: str, leaf: Any) -> list[int]:
        sizes = sizes_of(leaf) or ()
        return [dim for dim in range(len(sizes)) if (name, len(sizes), dim) in self._varying_sizes]


def _name(call: tuple[Any, Any], path: tuple[Any, ...]) -> str | None:
    """The name of the list that a leaf of the arguments is in, and of its place in an entry; None where it is in
    none."""
    obj: Any = call
    parts: list[str] = []
    for key in path:
        parts.append(_ENTRY if type(obj) is list else str(key))
        obj = _inside(obj, key)
    return "".join(parts) if _ENTRY in parts else None


def _at(tree: Any, steps: Steps) -> Any:
    """What is at the end of positions and keys; MISSING where one of them leads nowhere."""
    for step in steps:
        tree = item_of(tree, step) if isinstance(tree, dict) or type(step) is int else MISSING
    return tree


def _inside(obj: Any, key: Any) -> Any:
    """What a key of a path leads to; None where the path is of a type that only its pytree knows."""
    if isinstance(obj, (list, tuple)) and hasattr(key, "idx"):
        return obj[key.idx]
    if isinstance(obj, dict) and hasattr(key, "key"):
        return obj.get(key.key)
    return getattr(obj, key.name, None) if hasattr(key, "name") else None
