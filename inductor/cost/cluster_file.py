"""Frozen dataclasses as TOML files: a key is a field, a table is a dataclass, an array of tables is a tuple.

A field of type ``Annotated[str, ("a", "b")]`` must have one of these values, one of type
``Annotated[float, LessThan(1)]`` a value below that. :func:`read` checks every key and value
against the dataclass. :func:`text` writes a file that ``read`` reads back as an equal object.
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


@dataclasses.dataclass(frozen=True)
class LessThan:
    """A bound of a number: less than 1 second catches latencies given in microseconds, and less than 1 fractions given
    in percent. At an interference of 1, computation beside a collective would never end."""

    value: int


# Fields that can be zero. All other numbers must be positive: most are divisors.
_MAY_BE_ZERO = frozenset(
    {
        *("all_parts", "arch", "blocking", "ctas", "interference", "latency", "launch_latency", "leaf_gpus"),
        *("own_part", "per_member", "stated_peak"),
    }
)


def read(path: Path, kind: type[T]) -> T:
    """Read the file at ``path`` as an object of the dataclass ``kind``.

    Raises:
        InvalidCluster: the file cannot be read, or a key is unknown, missing, or has an invalid value.
    """
    try:
        content = path.read_text()
    except (OSError, ValueError) as error:
        raise InvalidCluster(str(path), f"it cannot be read: {error}") from error
    return parse(content, kind, str(path))


def parse(content: str, kind: type[T], file: str) -> T:
    """Parse the text of a file as an object of the dataclass ``kind``; errors name it ``file``.

    Raises:
        InvalidCluster: as :func:`read`.
    """
    try:
        table = tomllib.loads(content)
    except ValueError as error:
        raise InvalidCluster(file, f"it cannot be read: {error}") from error
    return _ClusterReader(file).record(kind, table, "")


@dataclasses.dataclass(frozen=True)
class _ClusterReader:
    file: str

    def record(self, kind: type[T], table: Mapping[str, Any], prefix: str) -> T:
        """A table as an object of ``kind``; ``prefix`` is the path of the table in error messages."""
        hints = get_type_hints(kind, include_extras=True)
        for key in table:
            if key not in hints:
                self.fail(prefix + key, f"is not known; known are {', '.join(hints)}")
        for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
            if entry.name not in table and entry.default is dataclasses.MISSING:
                self.fail(prefix + entry.name, "is missing")
        return kind(**{key: self.value(hints[key], value, prefix + key) for key, value in table.items()})

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """``value`` as the type ``hint``, checked."""
        if get_origin(hint) is types.UnionType:
            hint = get_args(hint)[0]
        if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], LessThan):
            plain, limit = get_args(hint)
            number = self.number(plain, value, key)
            if number >= limit.value:
                self.fail(key, f"is {value!r}, and must be less than {limit.value}")
            return number
        if get_origin(hint) is Annotated:
            known = get_args(hint)[1]
            if value not in known:
                self.fail(key, f"is {value!r}, and must be one of {', '.join(map(repr, known))}")
            return value
        if get_origin(hint) is tuple:
            items = self.typed(list, value, key, "a list")
            if not items and key.endswith("kinds"):  # an entry that serves nothing
                self.fail(key, "is [], and must name at least one kind of collective")
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
        """A finite number that is positive, or not negative for fields of ``_MAY_BE_ZERO``. Not a bool."""
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
        """``value``, checked to have exactly the type ``kind``; ``words`` names the type in the error."""
        if type(value) is not kind:
            self.fail(key, f"is {value!r}, and must be {words}")
        return value

    def fail(self, key: str, what: str) -> None:
        """Raise InvalidCluster for ``key``."""
        raise InvalidCluster(self.file, f"{key} {what}")


def text(record: Any, comment: str = "") -> str:
    """``record`` as TOML text, with numbers in full precision; the lines of ``comment`` come first."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, *([""] if lines else []), *_lines(record, "")]) + "\n"


def _lines(record: Any, prefix: str) -> list[str]:
    """The lines of a table: plain values first, since TOML counts keys after a table header as keys of that table."""
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
