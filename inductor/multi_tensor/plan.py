"""What a multi-tensor operation launches: kernels, their tables, and which memory each of their arguments is.

A plan is made from fake tensors. Where tensors lie is not known then, so tables of addresses are described by *places*,
and filled once the tensors exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.inductor.multi_tensor.text import POINTERS, Column, ScalarParameter, function, indented, number, walk
from weft.inductor.runtime.kernel_source import KernelSource

BLOCK: int = 1024
WARPS: int = 4
ALIGNMENT = 16

# A program should move enough bytes to pay for its start, and each multiprocessor have several to choose from.
LARGEST_CHUNK: int = 16384
_WANTED_PROGRAMS = 132 * 8


@dataclass(frozen=True)
class Given:
    """Argument number ``argument`` of the call, or element ``at`` of it where that is a list."""

    argument: int
    at: int | None = None


@dataclass(frozen=True)
class Made:
    """Tensor ``at`` of list ``result`` of the call's results, which has memory of its own."""

    result: int
    at: int


@dataclass(frozen=True)
class Table:
    """``Plan.tables[name]`` in device memory."""

    name: str


@dataclass(frozen=True)
class Pointers:
    """The addresses of ``Plan.pointers[name]`` in device memory, as :func:`addresses` lays them out."""

    name: str


@dataclass(frozen=True)
class Scratch:
    """``Plan.scratch[name]``: memory that need hold nothing before or after the call."""

    name: str


Place = Given | Made
Argument = Given | Made | Table | Pointers | Scratch


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``kernel`` over ``grid`` programs, its arguments in the order of its signature."""

    kernel: KernelSource
    grid: int
    arguments: tuple[Argument, ...]


@dataclass
class Plan:
    """Launches, in order, and what they need.

    Attributes:
        tables: int32 constants, to be put on the device once.
        pointers: for each table of addresses its rows of places.
        scratch: sizes (elements) and dtypes of scratch memory.
    """

    launches: list[Launch] = field(default_factory=list)
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    pointers: dict[str, list[tuple[Place, ...]]] = field(default_factory=dict)
    scratch: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)


def addresses(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of addresses as int64 words: each row, then 1 where all in it are aligned and 0 where not."""
    words = [word for row in rows for word in (*row, int(all(address % ALIGNMENT == 0 for address in row)))]
    return torch.tensor(words, dtype=torch.int64)


def chunk_elements(sizes: Sequence[int]) -> int:
    """How many elements of a tensor one program does, a power of two times ``BLOCK``."""
    chunk = LARGEST_CHUNK
    while chunk > BLOCK and sum(-(-size // chunk) for size in sizes) < _WANTED_PROGRAMS:
        chunk //= 2
    return chunk


def chunk_table(sizes: Sequence[int], labels: Sequence[int], chunk: int) -> torch.Tensor:
    """The int32 table (chunks of all tensors, 4): tensor, chunk in the tensor, elements in it, label."""
    size = torch.tensor(sizes, dtype=torch.int64)
    counts = (size + chunk - 1) // chunk
    tensor = torch.repeat_interleave(counts)
    number_in_tensor = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
    elements = (size[tensor] - number_in_tensor * chunk).clamp(max=chunk)
    return torch.stack([tensor, number_in_tensor, elements, torch.tensor(labels)[tensor]], 1).int()


def chunk_ranges(sizes: Sequence[int], labels: Sequence[int], chunk: int) -> torch.Tensor:
    """The int32 table (tensors, 4): a tensor's first row in the chunk table, how many it has, its label, 0."""
    counts = (torch.tensor(sizes, dtype=torch.int64) + chunk - 1) // chunk
    return torch.stack([counts.cumsum(0) - counts, counts, torch.tensor(labels), torch.zeros_like(counts)], 1).int()


def by_dtypes(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Positions of tensors that are alike in dtypes across ``lists``, one list of positions a launch."""
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for at, row in enumerate(zip(*lists, strict=True)):
        groups.setdefault(tuple(tensor.dtype for tensor in row), []).append(at)
    return list(groups.values())


@dataclass(frozen=True)
class Number:
    """A scalar argument of a call as a kernel sees it.

    Attributes:
        name: its register.
        argument: which argument of the call it is.
        value: the argument's fake tensor or number.
        type: how numbers are passed, see :class:`ScalarParameter`; tensors are read where they lie.
    """

    name: str
    argument: int
    value: Any
    type: str

    @property
    def parameter(self) -> ScalarParameter | None:
        if isinstance(self.value, torch.Tensor):
            return ScalarParameter(self.name, POINTERS[self.value.dtype])
        return None if type(self.value) in (int, float) else ScalarParameter(self.name, self.type)

    @property
    def setup(self) -> list[str]:
        constant = f"{self.name} = tl.full((), {number(self.value)}, tl.float32)" if self.parameter is None else ""
        return [constant] if constant else []


@dataclass(frozen=True)
class Further:
    """A pointer argument of a kernel beside tables and numbers: its name, its Triton type, and what it is."""

    name: str
    type: str
    place: Argument


def add_walk(
    plan: Plan,
    name: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[Place, ...]],
    sizes: Sequence[int],
    labels: Sequence[int],
    numbers: Iterable[Number] = (),
    further: Sequence[Further] = (),
    setup: Sequence[str] = (),
    **lines: Any,
) -> int:
    """Add the launch of one kernel over chunks of tensors (:func:`walk`) to ``plan``, unless all are empty.

    Args:
        rows: for each tensor its place in each column.
        sizes: elements of each tensor.
        labels: what the kernel finds in its register ``label``, for each tensor.
        lines: ``body``, ``skip`` and ``finish`` of the kernel.

    Returns the elements of a chunk.
    """
    chunk = chunk_elements(sizes)
    table = chunk_table(sizes, labels, chunk)
    if not len(table):
        return chunk
    mark = str(len(plan.launches))
    chunks, pointers = f"chunks{mark}", f"pointers{mark}"
    plan.tables[chunks] = table
    plan.pointers[pointers] = list(rows)
    numbers = list(numbers)
    passed = [(n.parameter, Given(n.argument)) for n in numbers if n.parameter is not None]
    text = walk(
        name,
        columns,
        [parameter for parameter, _ in passed],
        arguments=[f.name for f in further],
        setup=[*(line for n in numbers for line in n.setup), *setup],
        **lines,
    )
    signature = {"chunks": "*i32", "pointers": "*i64"}
    signature |= {parameter.argument: parameter.type for parameter, _ in passed}
    signature |= {f.name: f.type for f in further}
    places = (Table(chunks), Pointers(pointers), *(place for _, place in passed), *(f.place for f in further))
    add_launch(plan, name, text, signature, places, len(table), {"CHUNK": chunk, "BLOCK": BLOCK})
    return chunk


def add_launch(
    plan: Plan,
    name: str,
    text: str,
    signature: dict[str, str],
    places: tuple[Argument, ...],
    grid: int,
    constants: dict[str, Any],
    registers: int | None = None,
) -> None:
    """Add the launch of the kernel ``text`` to ``plan``; memory of its tables, scratch and results is aligned."""
    aligned = frozenset(
        argument
        for argument, place in zip(signature, places, strict=True)
        if isinstance(place, (Table, Pointers, Scratch, Made))
    )
    source = KernelSource(name, text, signature, constants, aligned, WARPS, 1, registers)
    plan.launches.append(Launch(source, grid, places))


@dataclass(frozen=True)
class Job:
    """What some programs of a launch do.

    Attributes:
        lines: what each does; they know ``job``, its number among those programs.
        arguments: of the lines, by name: Triton's type of each and what it is.
        constants: of the lines, by name.
        programs: how many there are.
    """

    lines: Sequence[str]
    arguments: Mapping[str, tuple[str, Argument]]
    constants: Mapping[str, Any]
    programs: int


def add_jobs(plan: Plan, name: str, jobs: Sequence[Job], registers: int | None = None) -> None:
    """Add one launch of all ``jobs``, whose programs start in that order: what waits for memory beside what fills it.

    What has one name in several jobs has to be one argument or one constant; names of registers have to differ, but
    for those of one type and shape.
    """
    jobs = [job for job in jobs if job.programs]
    arguments: dict[str, tuple[str, Argument]] = {}
    constants: dict[str, Any] = {}
    for job in jobs:
        for held, names in ((arguments, job.arguments), (constants, job.constants)):
            assert all(held.setdefault(key, value) == value for key, value in names.items()), (name, held, names)
    signature = {key: type_ for key, (type_, _) in arguments.items()}
    places = tuple(place for _, place in arguments.values())
    lines = ["job = tl.program_id(0)", *_either(jobs)]
    text = function(name, [*signature, *(f"{constant}: tl.constexpr" for constant in constants)], lines)
    add_launch(plan, name, text, signature, places, sum(job.programs for job in jobs), constants, registers)


def _either(jobs: Sequence[Job]) -> list[str]:
    """Lines of the one among ``jobs`` that register ``job`` is a number of."""
    first, *others = jobs
    if not others:
        return list(first.lines)
    rest = [f"job -= {first.programs}", *_either(others)]
    return [f"if job < {first.programs}:", *indented(first.lines), "else:", *indented(rest)]
