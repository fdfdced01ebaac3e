"""Lists of plain numbers among the arguments whose length changes, and of which a step makes tensors.

``torch.tensor(ids)`` of a list of another length is the same operation on a tensor of another size. So such a list is
one leaf of the arguments (:class:`NumberList`), and a tensor of its numbers is an input, which each call makes. The
step gets a stand-in. Of the list it can make a tensor, and ask for the length. All else needs the numbers one by one:
then the list is a structure again, with a form for each length.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.sparse_arguments import apart

Steps = tuple[Any, ...]


class NumberList:
    """A list of integers, or of floats, or of lists of equal lengths of them, as one leaf.

    Args:
        items: the list of the caller's.
    """

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.sizes: tuple[int, ...] = (len(items),)
        first = items[0]
        while type(first) is list:
            self.sizes, first = (*self.sizes, len(first)), first[0]
        self.kind = type(first)

    def tensor(self) -> torch.Tensor:
        """The numbers: int64 or float64 [length] or [length, length of the lists inside]."""
        return torch.tensor(self.items, dtype=torch.int64 if self.kind is int else torch.float64, device="cpu")


def may_be_folded(value: Any) -> bool:
    """Whether an object is a list of plain integers of 64 bits, or of plain floats, with at least one in it; or a list
    of such lists, of one length and with one type of numbers."""
    if type(value) is not list:
        return False
    kinds = set(map(type, value))
    if kinds != {list}:
        return kinds == {float} or (kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63)
    one_length = len(set(map(len, value))) == 1
    numbers = list(itertools.chain.from_iterable(value))
    return one_length and list not in set(map(type, numbers)) and may_be_folded(numbers)


def folded(call: tuple[Any, Any], lists: Mapping[str, Steps], values: Collection[str]) -> tuple[Any, Any]:
    """The positional and keyword arguments of a call with a leaf in the place of each of these lists, and the parts of
    sparse matrices in the place of these.

    Args:
        lists: by path, the positions and keys that lead to the list.
        values: paths of those that stay lists.
    """
    for path, steps in lists.items():
        if path not in values:
            call = _replaced(call, steps)
    found = apart(*torch_adapter.flatten(call))
    return call if found is None else found


def _replaced(tree: Any, steps: Steps) -> Any:
    if not steps:
        return NumberList(tree) if may_be_folded(tree) else tree
    step, *rest = steps
    if type(tree) is dict and step in tree:
        new = _replaced(tree[step], tuple(rest))
        return tree if new is tree[step] else {**tree, step: new}
    if type(tree) in (list, tuple) and type(step) is int and step < len(tree):
        new = _replaced(tree[step], tuple(rest))
        return tree if new is tree[step] else type(tree)([*tree[:step], new, *tree[step + 1 :]])
    return tree
