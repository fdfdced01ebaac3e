"""Frozen dataclasses as TOML files, exactly: a key is a field, a table is a dataclass, an array of tables a tuple.

``Annotated[str, ("a", "b")]`` is the type of a text that is one of these.

``read`` checks everything that a file says against the dataclass; ``text`` writes what ``read`` reads back the same.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from weft.errors import InvalidCluster

T = TypeVar("T")

# Numbers that may be zero; all others are positive.
_MAY_BE_ZERO = frozenset({"arch", "ctas", "interference", "latency", "launch_latency", "per_member"})


def read(path: Path, kind: type[T]) -> T:
    """The file at ``path`` as a ``kind``.

    Raises:
        InvalidCluster: the file cannot be read, or a key is unknown, missing, or has a value that it cannot have.
    """
    try:
        content = path.read_text()
    except (OSError, ValueError) as error:
        raise InvalidCluster(str(path), f"it cannot be read: {error}") from error
    return parse(content, kind, str(path))


def parse(content: str, kind: type[T], file: str) -> T:
    """The text of a file as a ``kind``; ``file`` is what errors call it. Raises InvalidCluster, as :func:`read`."""
    try:
        table = tomllib.loads(content)
    except ValueError as error:
        raise InvalidCluster(file, f"it cannot be read: {error}") from error
    return _Reader(file).record(kind, table, "")


@dataclasses.dataclass(frozen=True)
class _Reader:
    file: str

    def record(self, kind: type[T], table: Mapping[str, Any], prefix: str) -> T:
        hints = get_type_hints(kind, include_extras=True)
        for key in table:
            if key not in hints:
                self.fail(prefix + key, f"is not known; known are {', '.join(hints)}")
        for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
            if entry.name not in table and entry.default is dataclasses.MISSING:
                self.fail(prefix + entry.name, "is missing")
        return kind(**{key: self.value(hints[key], value, prefix + key) for key, value in table.items()})

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """``value``, checked to be what ``hint`` says."""
        if get_origin(hint) is types.UnionType:
            hint = get_args(hint)[0]
        if get_origin(hint) is Annotated:
            known = get_args(hint)[1]
            if value not in known:
                self.fail(key, f"is {value!r}, and must be one of {', '.join(map(repr, known))}")
            return value
        if get_origin(hint) is tuple:
            items = self.typed(list, value, key, "a list")
            return tuple(self.value(get_args(hint)[0], item, f"{key}[{at}]") for at, item in enumerate(items))
        if get_origin(hint) is Mapping:
            table = self.typed(dict, value, key, "a table")
            of_key, of_value = get_args(hint)
            return {
                self.value(of_key, name, f"a key of {key}"): self.value(of_value, item, f"{key}.{name}")
                for name, item in table.items()
            }
        if dataclasses.is_dataclass(hint):
            return self.record(hint, self.typed(dict, value, key, "a table"), f"{key}.")
        if hint in (int, float):
            return self.number(hint, value, key)
        return self.typed(hint, value, key, {str: "a text", bool: "true or false"}[hint])

    def number(self, hint: type, value: Any, key: str) -> int | float:
        allowed = (int,) if hint is int else (int, float)
        if type(value) not in allowed:
            self.fail(key, f"is {value!r}, and must be {'a whole number' if hint is int else 'a number'}")
        if key.rpartition(".")[2] in _MAY_BE_ZERO:
            if not 0 <= value < float("inf"):
                self.fail(key, f"is {value!r}, and must not be negative")
        elif not 0 < value < float("inf"):
            self.fail(key, f"is {value!r}, and must be positive")
        return hint(value)

    def typed(self, kind: type, value: Any, key: str, words: str) -> Any:
        if type(value) is not kind:
            self.fail(key, f"is {value!r}, and must be {words}")
        return value

    def fail(self, key: str, what: str) -> None:
        raise InvalidCluster(self.file, f"{key} {what}")


def text(record: Any, comment: str = "") -> str:
    """``record`` as TOML, every number to its last bit; ``comment`` (lines) on top."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, *([""] if lines else []), *_lines(record, "")]) + "\n"


def _lines(record: Any, prefix: str) -> list[str]:
    """Plain values first, as TOML wants them, then tables."""
    plain: list[str] = []
    tables: list[str] = []
    for entry in dataclasses.fields(record):
        value = getattr(record, entry.name)
        if value == entry.default:
            continue
        path = f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{path}]", *_lines(value, f"{path}.")]
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for item in value:
                tables += ["", f"[[{path}]]", *_lines(item, f"{path}.")]
        else:
            plain.append(f"{entry.name} = {_plain(value)}")
    return [*plain, *tables]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which only TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_plain(item)}' for key, item in value.items())} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return repr(value)
