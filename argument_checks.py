"""Checks of the arguments of public functions. Each raises an error that names the argument, its value, and what the
function takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidArgument, InvalidArgumentType, UnknownOption


@dataclass(frozen=True)
class ArgumentChecks:
    """Checks of the arguments of one public function, which messages call ``function``."""

    function: str

    def invalid(self, argument: str, value: object, allowed: str, remedy: str) -> InvalidArgument:
        """The error for a value of the right type that the function does not take."""
        return InvalidArgument(self.function, argument, value, allowed, remedy)

    def wrong_type(self, argument: str, value: object, allowed: str, remedy: str) -> InvalidArgument:
        """The error for a value of a type that the function does not take."""
        return InvalidArgumentType(self.function, argument, value, allowed, remedy)

    def kind(self, argument: str, value: object, kinds: type | tuple[type, ...], allowed: str, remedy: str) -> None:
        """``value`` is an instance of one of ``kinds``.

        Raises:
            InvalidArgumentType: it is not.
        """
        if not isinstance(value, kinds):
            raise self.wrong_type(argument, value, allowed, remedy)

    def boolean(self, argument: str, value: object, *, optional: bool = False) -> None:
        """``value`` is True or False, or None where that is ``optional``. A text is a mistake: "no" is true.

        Raises:
            InvalidArgumentType: it is something else.
        """
        if not (isinstance(value, bool) or (optional and value is None)):
            allowed = "True, False or None" if optional else "True or False"
            raise self.wrong_type(argument, value, allowed, f"Pass {argument}=True or {argument}=False")

    def number(
        self,
        argument: str,
        value: object,
        *,
        least: float = 0.0,
        whole: bool = False,
        above: bool = False,
        what: str = "",
        remedy: str = "",
    ) -> None:
        """``value`` is a finite number of at least ``least``.

        Args:
            whole: whether it must be an int.
            above: whether it must be more than ``least``.
            what: what the number is, for the message ("GiB").
            remedy: an instruction; "Pass such a number" if empty.

        Raises:
            InvalidArgumentType: it is no number; a bool is none.
            InvalidArgument: it is not finite, or too small.
        """
        bound = f"more than {least:g}" if above else f"of at least {least:g}"
        allowed = f"{'a whole' if whole else 'a finite'} number {f'of {what}, ' if what else ''}{bound}"
        remedy = remedy or "Pass such a number"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise self.wrong_type(argument, value, allowed, remedy)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise self.invalid(argument, value, allowed, remedy)

    def gibibytes(self, argument: str, value: Any) -> int | None:
        """A limit of memory in GiB as bytes; None stays None.

        Raises:
            InvalidArgumentType: it is no number; a text such as "45GB" is none.
            InvalidArgument: it is not finite or not more than 0, or so large that it must be meant in bytes.
        """
        if value is None:
            return None
        remedy = "Pass a number of GiB, such as 45.0, or None"
        self.number(argument, value, above=True, what="GiB", remedy=remedy)
        if value >= 2**20:
            raise self.invalid(argument, value, "a number of GiB, not of bytes", remedy)
        return int(value * 2**30)

    def one_of(self, argument: str, value: object, known: list[object]) -> None:
        """``value`` is one of ``known``, of the same type.

        Raises:
            UnknownOption: it is not.
        """
        if not any(type(value) is type(one) and value == one for one in known):
            raise UnknownOption(f"{self.function}: {argument}", value, known)

    def function_or_callable(self, argument: str, value: Any, remedy: str) -> None:
        """``value`` can be called, and is no class: calling that would make an object each time.

        Raises:
            InvalidArgumentType: it is something else.
        """
        if not callable(value) or isinstance(value, type):
            raise self.wrong_type(argument, value, "a function or another callable object", remedy)
