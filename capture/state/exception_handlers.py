"""Where a piece of code catches exceptions, and which: its ``except`` clauses, and ``with suppress(...)``."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.capture.state.bytecode import ByCode

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_DEREF", "LOAD_FAST")
_MATCHES = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")


@dataclass(frozen=True)
class Handler:
    """What catches the exceptions of some instructions.

    Attributes:
        around: these instructions, by their offsets in bytes.
        names: what the clauses name, attributes of modules among them; empty where they catch everything.
    """

    around: range
    names: frozenset[str]

    def catches(self, kinds: Iterable[type[BaseException]]) -> bool:
        """Whether it may catch exceptions of these types; a name that is not Python's may be any type."""
        named = [getattr(builtins, name, None) for name in self.names]
        bases = [each for each in named if isinstance(each, type)]
        return len(bases) < len(named) or not named or any(issubclass(kind, base) for kind in kinds for base in bases)


_known: ByCode[list[Handler]] = ByCode()


def handlers_in(code: types.CodeType) -> list[Handler]:
    """Those of the code itself, without the functions that it defines."""
    found = _known.get(code)
    return _known.keep(code, [*_handlers(code)]) if found is None else found


def _handlers(code: types.CodeType) -> Iterator[Handler]:
    """An entry of the exception table names the innermost handler. The next one is around that handler."""
    entries = dis.Bytecode(code).exception_entries if code.co_exceptiontable else ()  # type: ignore[missing-attribute]
    steps = [*dis.get_instructions(code)] if entries else []
    position = {step.offset: at for at, step in enumerate(steps)}
    caught = {each.target: _caught(steps[position[each.target] :], code) for each in entries}
    for entry in entries:
        seen, target = set[int](), entry.target
        while target not in seen:
            seen.add(target)
            if (names := caught[target]) is not None:
                yield Handler(range(entry.start, entry.end), names)
            target = next((each.target for each in entries if each.start <= target < each.end), target)


def _caught(steps: list[dis.Instruction], code: types.CodeType) -> frozenset[str] | None:
    """What a handler that begins with the first of these instructions catches; None for a ``finally``, and for a
    ``with`` in code that does not name ``suppress``."""
    if len(steps) < 2 or steps[0].opname != "PUSH_EXC_INFO":
        return None
    if steps[1].opname == "WITH_EXCEPT_START":
        return frozenset() if "suppress" in code.co_names else None
    if steps[1].opname == "POP_TOP":  # ``except:``
        return frozenset()
    loaded, found = set[str](), set[str]()
    for step in steps:
        if step.opname in _MATCHES:
            found |= loaded
        elif step.opname in _LOADS:
            loaded.add(step.argval)
        elif step.opname == "RERAISE" and step.arg == 0:  # others end the scope of ``as error``
            break
        if step.opname == "POP_EXCEPT":  # the end of one clause
            loaded = set()
    return frozenset(found) or None
