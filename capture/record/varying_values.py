"""What differs between the calls of a step, and so is symbolic in its next capture: sizes of arguments, numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.dynamic_sizes import MARKS, changed_dims
from weft.capture.record.list_arguments import ListHistory
from weft.capture.record.python_numbers import ChangingState, differing_numbers

Dims = frozenset[tuple[int, int]]
"""Dimensions of arguments: (number of the leaf, dimension)."""


class VaryingValues:
    """The sizes and numbers of one step that are symbolic.

    Args:
        lists: what the calls had for lists of numbers.
        dynamic: whether all sizes are symbolic, or none; None for those that were found to vary.
    """

    def __init__(self, lists: ListHistory, dynamic: bool | None) -> None:
        self._lists = lists
        self._dynamic = dynamic
        self._dims: dict[Any, set[tuple[int, int]]] = {}
        self._specialised: set[Any] = set()  # structures of arguments whose sizes are constants
        self._numbers: set[str] = set()
        self._numbers_are_plain = False

    def dims(self, args: Any, kwargs: Any, forms: Iterable[CapturedStep]) -> Dims:
        """Dimensions to keep symbolic in a capture of this call, after those of ``forms``."""
        self._lists.note_lengths(args, kwargs)
        leaves, spec = self._lists.flatten((args, kwargs))
        if spec in self._specialised or self._dynamic is False:
            dims: set[tuple[int, int]] = set()
        elif self._dynamic is True:
            dims = {
                (at, d) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) for d in range(leaf.dim())
            }
        else:
            dims = self._dims.setdefault(spec, set())
            for captured in forms:
                if captured.arguments.spec == spec:
                    dims |= changed_dims(leaves, captured.arguments.shapes)
            dims |= self._lists.varying(args, kwargs)[0]
        return frozenset(dims - _marked(leaves, "static"))

    def numbers(self, args: Any, kwargs: Any, forms: Iterable[CapturedStep]) -> ChangingState:
        """The Python numbers that steps changed, or that differ from what ``forms`` found."""
        if self._numbers_are_plain:
            return replace(self._lists.changing(()), closed=True)
        leaves, spec = self._lists.flatten((args, kwargs))
        for captured in forms:
            self._numbers.update(captured.changing_paths)
            self._numbers.update(differing_numbers(captured.state.containers))
            if spec == captured.arguments.spec:
                self._numbers.update(captured.arguments.changed(leaves, captured.state.containers))
            self._lists.note(captured.changing)
        self._numbers |= self._lists.varying(args, kwargs)[1]
        return self._lists.changing(self._numbers)

    def specialise_sizes(self, args: Any, kwargs: Any) -> None:
        """Capture the sizes of arguments of this structure as constants from now on."""
        self._specialised.add(self._lists.flatten((args, kwargs))[1])

    def specialise(self, captured: CapturedStep, dims: Dims, args: Any, kwargs: Any) -> bool:
        """Capture sizes as constants from now on; where they are constants already, capture Python numbers as such.

        Sizes that the user marked as dynamic stay symbolic.

        Args:
            captured: the capture that has symbols where the step needs plain numbers.
            dims: the dimensions that are symbolic in it.

        Returns:
            Whether anything was symbolic, so that another capture differs.
        """
        leaves, _ = self._lists.flatten((args, kwargs))
        if dims and self._dynamic is None and not _marked(leaves, "dynamic"):
            self.specialise_sizes(args, kwargs)
            return True
        has_numbers = bool(captured.changing.numbers)
        self._numbers_are_plain |= has_numbers
        return has_numbers


def _marked(leaves: list[Any], mark: str) -> set[tuple[int, int]]:
    """The dimensions with a mark of :func:`weft.mark_dynamic` or :func:`weft.mark_static`."""
    marks = ((at, getattr(leaf, MARKS, {})) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    return {(at, dim) for at, found in marks for dim, each in found.items() if each == mark}
