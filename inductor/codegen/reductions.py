"""The text of reductions: across a tile, and over the iterations of a loop.

In a loop every element of the tile has its own accumulator, and the tile is reduced once after the loop. So an
iteration needs no exchange between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.inductor.codegen.expressions import SUM, Text, exponential, literal
from weft.inductor.codegen.thread_layout import ThreadLayout
from weft.inductor.codegen.triton_text import dtype_name
from weft.inductor.loop_ir.ops import REDUCTIONS, extreme


@dataclass(frozen=True)
class Across:
    """Which dimensions of a tile are reduced, and how the result is shaped to broadcast against tiles again.

    Attributes:
        positions: which dimensions of the tile, last first.
        suffix: an index that puts them back with size 1, or nothing.
    """

    positions: tuple[int, ...]
    suffix: str

    def reduce(self, function: str, text: str) -> str:
        """``tl.sum(text, 1)[:, None]`` or so."""
        # Last first, so that the numbers of the remaining dimensions stay valid.
        for position in self.positions:
            text = function.format(text, position)
        return text + self.suffix


LAST = 2**63 - 1  # greater than every position

_ACROSS = {
    "sum": "tl.sum({}, {})",
    "prod": "tl.reduce({}, {}, times)",
    "any": "tl.max({}, {})",
    "all": "tl.min({}, {})",
}


def across(kind: str, text: str, dtype: torch.dtype, how: Across) -> str:
    """One result of a tile."""
    if dtype == torch.bool:
        kind = {"max": "any", "min": "all"}.get(kind, kind)
    # Triton reduces no int1. As int32, the maximum of 0 and 1 is "any".
    if kind in ("any", "all"):
        return f"{how.reduce(_ACROSS[kind], f'({text}).to(tl.int32)')} != 0"
    return how.reduce(_extremum(kind, dtype) if kind in ("max", "min") else _ACROSS[kind], text)


def _extremum(kind: str, dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return f"tl.{kind}({{}}, {{}})"
    return f"tl.reduce({{}}, {{}}, {'greatest' if kind == 'max' else 'least'})"


def identity(kind: str, dtype: torch.dtype) -> str:
    """The identity of a reduction, which masked elements count as."""
    return str(literal(extreme(REDUCTIONS[kind].identity[0], dtype), dtype))


def arg_across(
    kind: str, value: str, position: str, mask: str | None, dtype: torch.dtype, how: Across
) -> tuple[str, str]:
    """The extreme value of a tile and, given its name in place of ``{best}``, the first position that has it."""
    # In two steps, value then position: Triton's argmax does not order NaN as torch does.
    best = how.reduce(_extremum(kind.removeprefix("arg"), dtype), value)
    here = f"{value} == {{best}}"
    if dtype.is_floating_point:
        # The extreme value is NaN if there is one. NaN equals nothing, so it is found as what differs from itself.
        here = f"({here}) | ({value} != {value})"
    if mask is not None:
        here = f"({here}) & {mask}"
    return best, how.reduce("tl.min({}, {})", f"tl.where({here}, {position}, {LAST})")


class Accumulator:
    """A reduction over a loop: variables before it, statements in it, results after it."""

    def __init__(
        self,
        kind: str,
        name: str,
        dtypes: Sequence[torch.dtype],
        shape: str,
        how: Across,
        thread_layout: ThreadLayout | None = None,
    ) -> None:
        self.kind, self.name, self.dtypes, self.shape, self.how = kind, name, tuple(dtypes), shape, how
        self.thread_layout = thread_layout

    def _full(self, value: str, dtype: torch.dtype) -> str:
        # With its dtype: a loop variable must have one type from its first iteration on.
        return f"tl.full({self.shape}, {value}, {dtype_name(dtype)})"

    def before(self) -> list[str]:
        """The statements that define the accumulators."""
        return [f"{self.name} = {self._full(identity(self.kind, self.dtypes[0]), self.dtypes[0])}"]

    def step(self, args: Sequence[str], mask: str | None) -> list[str]:
        """The statements that accumulate one tile; ``mask`` says where it has elements (None: everywhere)."""
        name, dtype = self.name, self.dtypes[0]
        # The value is masked, not only its load: what is computed from a masked load need not be neutral (a constant
        # added).
        arg = args[0] if mask is None else f"tl.where({mask}, {args[0]}, {identity(self.kind, dtype)})"
        if dtype == torch.bool:
            sign = "|" if self.kind in ("any", "max") else "&"
            return [f"{name} = {name} {sign} ({arg})"]
        if self.kind in ("sum", "prod"):
            return [f"{name} {'+' if self.kind == 'sum' else '*'}= {arg}"]
        if dtype.is_floating_point:
            return [f"{name} = {'greatest' if self.kind == 'max' else 'least'}({name}, {arg})"]
        return [f"{name} = tl.{self.kind}imum({name}, {arg})"]

    def after(self) -> tuple[list[str], list[str]]:
        """Statements after the loop, and the expressions of the results."""
        return [], [across(self.kind, self.name, self.dtypes[0], self.how)]


class ArgAccumulator(Accumulator):
    """``argmax`` and ``argmin``: the extreme value, and the first position of it. NaN is the most extreme."""

    def before(self) -> list[str]:
        """The accumulators: the best value so far, and its position."""
        value = self._full(identity(self.kind, self.dtypes[0]), self.dtypes[0])
        return [f"{self.name} = {value}", f"{self.name}_at = {self._full(str(LAST), torch.int64)}"]

    def step(self, args: Sequence[str], mask: str | None) -> list[str]:
        """Keep the better of the accumulator and the tile; among equal values, the smaller position."""
        value, position = args
        name, sign = self.name, ">" if self.kind == "argmax" else "<"
        more, same = f"({value} {sign} {name})", f"({value} == {name})"
        if self.dtypes[0].is_floating_point:
            # NaN beats every number. Among NaNs, as among equal numbers, the first position counts.
            more = f"({more} | ({value} != {value}) & ({name} == {name}))"
            same = f"({same} | ({value} != {value}) & ({name} != {name}))"
        better = f"{more} | {same} & ({position} < {name}_at)"
        if mask is not None:
            # An element behind the end is never better, so its value needs no masking.
            better = f"({better}) & {mask}"
        return [
            f"{name}_better = {better}",
            f"{name} = tl.where({name}_better, {value}, {name})",
            f"{name}_at = tl.where({name}_better, {position}, {name}_at)",
        ]

    def after(self) -> tuple[list[str], list[str]]:
        """The best value of all accumulators, and the first position that has it."""
        best, position = arg_across(self.kind, self.name, f"{self.name}_at", None, self.dtypes[0], self.how)
        return [f"{self.name}_best = {best}"], [f"{self.name}_best", position.format(best=f"{self.name}_best")]


class OnlineSoftmax(Accumulator):
    """The maximum and the sum of exponentials relative to it, in one pass (Milakov and Gimelshein, 2018).

    Where the thread layout of the tile is known, the elements of a thread share one accumulator. The sum is then
    rescaled once for all of them: 16 elements cost 17 exponentials instead of 32.
    """

    def before(self) -> list[str]:
        """The accumulators: the maximum so far, and the sum of exponentials relative to it."""
        if self.thread_layout is not None:
            self.shape = f"[{self.thread_layout.threads}]"
        dtype = self.dtypes[0]
        lowest = self._full('float("-inf")', dtype)
        return [f"{self.name}_max = {lowest}", f"{self.name}_sum = {self._full('0.0', dtype)}"]

    def step(self, args: Sequence[str], mask: str | None) -> list[str]:
        """Raise the maximum to that of the tile, rescale the sum to it, and add the tile's exponentials."""
        x, top, total, base = (f"{self.name}_{part}" for part in ("x", "max", "sum", "base"))
        new = f"{self.name}_new"
        arg = args[0] if mask is None else f'tl.where({mask}, {args[0]}, float("-inf"))'
        here, terms = x, self._power(f"{x} - {base}")
        if self.thread_layout is not None:
            arg = f"tl.reshape({arg}, [{', '.join(map(str, self.thread_layout))}])"
            here = f"tl.reduce(tl.reduce({x}, 2, greatest), 0, greatest)"
            terms = f"tl.sum(tl.sum({self._power(f'{x} - {base}[None, :, None]')}, 2), 0)"
        return [
            f"{x} = {arg}",
            f"{new} = greatest({top}, {here})",
            # While the maximum is -inf, 0 is subtracted: -inf - -inf would be NaN.
            f'{base} = tl.where({new} == float("-inf"), 0.0, {new})',
            f"{total} = {total} * {self._power(f'{top} - {base}')} + {terms}",
            f"{top} = {new}",
        ]

    def after(self) -> tuple[list[str], list[str]]:
        """The maximum of all accumulators, and their sums rescaled to it and added."""
        best = self.how.reduce(_extremum("max", self.dtypes[0]), f"{self.name}_max")
        scaled = f"{self.name}_sum * {self._power(f'{self.name}_max - {self.name}_best')}"
        return [f"{self.name}_best = {best}"], [f"{self.name}_best", self.how.reduce("tl.sum({}, {})", scaled)]

    def _power(self, difference: str) -> str:
        return str(exponential(Text(difference, SUM), self.dtypes[0]))


class Welford(Accumulator):
    """Mean, squared deviations and count in one pass (Welford, 1962; joined as Chan and others, 1983)."""

    def before(self) -> list[str]:
        """The accumulators: mean, sum of squared deviations, and count, all zero."""
        zero = self._full("0.0", self.dtypes[0])
        # The count is the same along the dimensions that stay, and so is the division by it.
        sizes = self.shape.strip("[]").split(", ")
        counts = ", ".join(size if at in self.how.positions else "1" for at, size in enumerate(sizes))
        count = f"tl.full([{counts}], 0.0, {dtype_name(self.dtypes[0])})"
        return [f"{self.name}_mean = {zero}", f"{self.name}_square = {zero}", f"{self.name}_count = {count}"]

    def step(self, args: Sequence[str], mask: str | None) -> list[str]:
        """Update mean, squared deviations and count by one element per accumulator."""
        mean, square, count, apart = (f"{self.name}_{part}" for part in ("mean", "square", "count", "apart"))
        far = f"{args[0]} - {mean}"
        if mask is None:
            return [
                f"{count} += 1.0",
                f"{apart} = {far}",
                f"{mean} += {apart} * (1.0 / {count})",
                f"{square} += {apart} * ({far})",
            ]
        return [
            f"{count} += tl.where({mask}, 1.0, 0.0)",
            f"{apart} = tl.where({mask}, {far}, 0.0)",
            # A masked row may have no element yet.
            f"{mean} += {apart} * (1.0 / tl.maximum({count}, 1.0))",
            f"{square} += {apart} * tl.where({mask}, {far}, 0.0)",
        ]

    def after(self) -> tuple[list[str], list[str]]:
        """Combine the accumulators: mean, sum of squared deviations from it, and count."""
        mean, square, count = (f"{self.name}_{part}" for part in ("mean", "square", "count"))
        # Every accumulator has its own count: lanes of a masked tail have seen fewer elements.
        total, center = f"{self.name}_total", f"{self.name}_center"
        statements = [
            f"{total} = {self.how.reduce('tl.sum({}, {})', count)}",
            f"{center} = {self.how.reduce('tl.sum({}, {})', f'{mean} * {count}')} / {total}",
        ]
        # Chan and others: squared deviations from the joint mean grow by count * (mean - joint mean)**2.
        squares = f"{square} + {count} * ({mean} - {center}) * ({mean} - {center})"
        return statements, [center, self.how.reduce("tl.sum({}, {})", squares), total]


ACCUMULATORS = {
    "argmax": ArgAccumulator,
    "argmin": ArgAccumulator,
    "online_softmax": OnlineSoftmax,
    "welford": Welford,
}


def accumulator(
    kind: str, name: str, dtypes: Sequence[torch.dtype], shape: str, how: Across, thread_layout: ThreadLayout | None
) -> Accumulator:
    """The accumulator of a reduction of ``kind``."""
    return ACCUMULATORS.get(kind, Accumulator)(kind, name, dtypes, shape, how, thread_layout)
