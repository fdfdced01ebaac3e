"""Texts and numbers that a step leaves and that have the address of an object in them, which the step makes.

``repr(obj)`` and ``hash(obj)`` of most objects tell where the object lies in memory, and many functions in C use both.
Each call makes another object, so what the capture left would be the address of none. :mod:`object_ids` follows
``id()``, which code also compares and computes with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from weft.errors import UncapturableDraw

# Smaller numbers are no addresses: programs are loaded there, or nothing.
LOWEST_ADDRESS = 1 << 32
_IN_TEXT = re.compile(r"0x([0-9a-fA-F]{9,})")


class LeftAddresses:
    """What may be an address, of one capture."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    def note(self, value: Any, where: str) -> None:
        """Note a plain value that the step leaves at a place."""
        if type(value) is int and not -LOWEST_ADDRESS < value < LOWEST_ADDRESS:
            self._found[value] = where
        elif type(value) is str and "0x" in value:
            self._found.update((int(digits, 16), where) for digits in _IN_TEXT.findall(value))
        elif type(value) is tuple:
            for each in value:
                self.note(each, where)

    def check(self, made: Iterable[Any]) -> None:
        """Refuse addresses of objects that each call makes anew.

        Raises:
            UncapturableDraw: names the place, and the type of the object.
        """
        for each in made if self._found else ():
            for address in {id(each), object.__hash__(each)} & self._found.keys():
                kind = torch.Tensor if isinstance(each, torch.Tensor) else type(each)
                what = f"the address of a {kind.__qualname__} (by hash, repr or str)"
                why = "the step leaves it for later, and each call makes another object"
                remedy = "keep the object, and compare with `is`; or give it a number or a `__repr__` of its own"
                raise UncapturableDraw(what, self._found[address], why, remedy)
