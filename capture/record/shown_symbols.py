"""Symbolic numbers in the messages of errors that torch raises: each call shows its own numbers there.

Torch says which sizes do not fit together: ``batch_size (s4)``, where ``s4`` is a symbol of the capture. It asks the
symbolic number for its text. So each such text is noted with its number. Where it occurs in a message, the value in the
captured call takes its place, and becomes a guard: the step may catch the error and read the message. A number that
only the data decides gets a mark of :mod:`weft.capture.record.late_text` where the error leaves the step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.sym_node import SymNode, wrap_node

from weft.capture.record.ended_runs import raised_by_statement
from weft.capture.record.late_text import LateText, mark_of
from weft.capture.record.plain_numbers import plain_number
from weft.capture.record.recorder import OpRecorder
from weft.capture.user_code import user_line
from weft.errors import TextOfValue
from weft.source_files import is_user_file
from weft.thread_patches import present, replaced

# Around a part of a larger expression, which torch did not ask a number for.
_BEFORE, _AFTER = r"(?<![\w*/])(?<![-+] )", r"(?![\w*/]| [-+] )"


class ShownSymbols:
    """The texts of symbolic numbers that torch makes in a capture.

    Args:
        recorder: of the capture.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder
        self._numbers: dict[str, Any] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, texts of symbolic numbers are noted."""
        original = present(SymNode, "str")

        def text_of(node: SymNode) -> str:
            text: str = original(node)
            symbols = self._recorder.symbols
            if node.shape_env is symbols.shape_env and node.expr.free_symbols:
                self._numbers[text] = node
            return text

        with replaced(SymNode, "str", text_of):
            yield

    def show_numbers(self, error: BaseException) -> None:
        """Put numbers in the place of symbols in the message of ``error``, which the step may catch."""
        self._replace(error, lambda node: node.has_hint(), self._plain)

    def mark_messages(self, error: BaseException) -> None:
        """Put numbers, or marks for them, in the place of symbols in the messages of ``error``, which leaves the step,
        and of the errors that it came from.

        Raises:
            TextOfValue: a message of torch's shows a symbol that no call knows, or a tensor.
        """
        seen: BaseException | None = error
        knows: Callable[[Any], bool] = self._recorder.symbols.knows
        while seen is not None:
            self.show_numbers(seen)
            self._replace(seen, lambda node: all(map(knows, node.expr.free_symbols)), self._mark)
            if not _is_users(seen) and any(type(each) is str and self._shows_symbol(each) for each in seen.args):
                raise TextOfValue(user_line(), in_raise=True)
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)

    def _replace(
        self, error: BaseException, is_replaced: Callable[[SymNode], bool], text_of: Callable[[SymNode], str]
    ) -> None:
        """Replace the texts of some symbolic numbers in the message of an error."""
        known = {text: node for text, node in self._numbers.items() if is_replaced(node)}
        if known and any(type(each) is str for each in error.args):
            texts = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
            pattern = re.compile(f"{_BEFORE}(?:{texts}){_AFTER}")
            text = lambda found: text_of(known[found[0]])
            args = tuple(pattern.sub(text, each) if type(each) is str else each for each in error.args)
            if args != error.args:
                error.args = args

    def _plain(self, node: SymNode) -> str:
        return str(plain_number(wrap_node(node)))

    def _mark(self, node: SymNode) -> str:
        return mark_of(self._recorder, LateText(wrap_node(node), "__str__", ()))

    def _shows_symbol(self, message: str) -> bool:
        names = set(map(str, self._recorder.symbols.shape_env.var_to_range))
        return not names.isdisjoint(re.findall(r"\w+", message))


def _is_users(error: BaseException) -> bool:
    """Whether a statement of the user's code made and raised an error: its text is that of the user."""
    file = raised_by_statement(error)
    return file is not None and is_user_file(file)
