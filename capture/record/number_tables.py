"""Tables of numbers in the Python state that a step indexes with a symbolic number: ``rates[step]``.

A list asks the index for its plain value, so each value would be a form of its own. Which tables a step indexes so is
seen when that happens, from the source of the running expression. The next attempt at the capture has a
:class:`NumberTable` in the place of each of them. Indexed with a symbol, it gives a
symbol, and a node reads the element from the table itself at every call. To all other code it is a list or tuple of the
same numbers. The content of the table stays a guard. An array of numpy's gets the stand-in that large arrays have
(:mod:`weft.capture.record.large_arrays`), whose elements are numbers of numpy's.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.ended_runs import RunEnded
from weft.capture.record.float_arithmetic import computed
from weft.capture.record.held_references import StandIn
from weft.capture.record.numpy_arguments import may_be_input
from weft.capture.record.recorder import recording
from weft.capture.record.unread_arguments import ValuesOfArguments
from weft.capture.source_tree import SourceTree, value_in
from weft.capture.state.containers import Container, Content
from weft.capture.user_code import is_user_file
from weft.thread_patches import present, replaced

_DTYPES = {float: torch.float64, int: torch.int64}
_WRITES = ("setitem", "delitem", "iadd", "imul")
_WRITING_METHODS = ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse")


class TableWritten(RunEnded):
    """Ends an attempt in which the step writes to a list that has a stand-in."""


class TableElement:
    """The target of a node that reads an element of a table.

    Args:
        table: the list or tuple itself.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self.__name__ = self.__qualname__ = "table_element"
        self.__module__ = __name__

    def __call__(self, index: int) -> Any:
        return self.table[index]


class NumberTable(StandIn):
    """Stands in for a list or tuple.

    Args:
        table: the list or tuple.
        written: called where the step writes to the list.
    """

    def __init__(self, table: Any, written: Callable[[], object]) -> None:
        super().__init__(table)
        self.weft_element = TableElement(table)
        self.weft_written = written

    def __getitem__(self, index: Any) -> Any:
        table = self.weft_original
        if type(index) is torch.SymInt and recording() is not None and _is_inside(index, len(table)):
            found = computed(self.weft_element, [index], _DTYPES[type(table[0])])
            if found is not None:
                return found
        return table[index]


class TableOfTuple(NumberTable, tuple):
    """Stands in for a tuple."""

    def __new__(cls, table: Any, written: Callable[[], object]) -> TableOfTuple:
        return tuple.__new__(cls, table)


class TableOfList(NumberTable, list):
    """Stands in for a list."""

    def __new__(cls, table: Any, written: Callable[[], object]) -> TableOfList:
        made = list.__new__(cls)
        list.extend(made, table)
        return made


def _refuse_write(table: NumberTable, *_: Any, **__: Any) -> Any:
    table.weft_written()
    raise TableWritten


for _name in (*map("__{}__".format, _WRITES), *_WRITING_METHODS):
    setattr(TableOfList, _name, _refuse_write)


def _is_inside(index: torch.SymInt, count: int) -> bool:
    """Whether an index is in range: for one that the arguments and the state decide, a guard. Eager's IndexError then
    comes from a capture. One that only the step decides is looked at by each call, where the node reads the element."""
    return torch_adapter.hint(index) is None or (bool(-count <= index) and bool(index < count))


class NumberTables:
    """The tables of one attempt at a capture.

    Args:
        paths: of those that have a stand-in.
        kept: of those that must have none.
        found: gets the paths of those that a symbolic number indexed without a stand-in, of the lists to which the step
            writes, and of all arrays, where the attempt fails.
    """

    def __init__(self, paths: Collection[str], kept: Collection[str], found: ValuesOfArguments) -> None:
        self._paths = paths
        self._kept = kept
        self._found = found
        self._stand_ins: dict[int, Any] = {}

    def put_into(self, containers: Iterable[Container]) -> None:
        """Put stand-ins into the entries of containers; those that have theirs keep them."""
        for container, key, value in entries_at(containers, self._paths):
            if key not in container.stand_ins and _is_table(value):
                path = container.label(key)
                if id(value) not in self._stand_ins:
                    self._stand_ins[id(value)] = self._stand_in(value, path)
                container.stand_in(key, self._stand_ins[id(value)])

    def _stand_in(self, table: Any, path: str) -> Any:
        kind = TableOfList if type(table) is list else TableOfTuple
        return kind(table, lambda: self._found.written.add(path))

    @contextlib.contextmanager
    def noted(self, containers: Iterable[Container]) -> Iterator[None]:
        """Inside, a table that a symbolic number indexes is noted, if one of the containers holds it. Where the step
        cannot be captured, all arrays that could have been inputs are."""
        original = present(torch.SymInt, "__index__")

        def index(number: torch.SymInt) -> int:
            if recording() is not None and (table := _indexed_table(sys._getframe(1))) is not None:
                held = {each.label(key) for each in containers for key, at in each.before.items() if at is table}
                if held.isdisjoint(self._kept):
                    self._found.tables.update(held)
            return original(number)

        try:
            with replaced(torch.SymInt, "__index__", index):
                yield
        except Exception:
            numpy = sys.modules.get("numpy")
            entries = ((each, key, value) for each in containers for key, value in each.before.items())
            arrays = () if numpy is None else (each for each in entries if isinstance(each[2], numpy.ndarray))
            paths = {container.label(key) for container, key, value in arrays if may_be_input(value)}
            self._found.arrays |= paths.difference(self._kept, self._paths)
            raise


def entries_at(containers: Iterable[Container], paths: Collection[str]) -> Iterator[tuple[Container, Any, Any]]:
    """The entries at these paths, in whose places stand-ins can be: container, key, value."""
    for container in containers if paths else ():
        if not isinstance(container, Content) and not isinstance(container.obj, (tuple, set, frozenset)):
            yield from (
                (container, key, each) for key, each in container.before.items() if container.label(key) in paths
            )


def _is_table(value: Any) -> bool:
    """Whether a value is a list or tuple of at least two numbers, all of them floats, or integers of 64 bits."""
    if type(value) not in (list, tuple) or len(value) < 2:
        return False
    kinds = set(map(type, value))
    return kinds == {float} or (kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63)


def _indexed_table(frame: Any) -> Any:
    """The table that the running expression of the user's code indexes; None where it does something else."""
    while str(frame.f_globals.get("__name__")).startswith("weft.") and frame.f_back is not None:
        frame = frame.f_back  # what stands in for the method in this thread
    source = SourceTree.of(frame.f_code.co_filename) if is_user_file(frame.f_code.co_filename) else None
    running = None if source is None else source.running(frame)
    if not isinstance(running, ast.Subscript):
        return None
    value = value_in(frame, running.value)
    return value if _is_table(value) or may_be_input(value) else None
