"""The launches of a multi-tensor operation: kernels, their tables, and the memory of each of their arguments.

A plan is made from fake tensors, whose addresses are not known. So pointer tables are described by *places* (an
argument or a result of the call), and filled with addresses once the tensors exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.codegen.triton_text import float32_literal, indented, pointer_type, write_kernel
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS, multiprocessors
from weft.inductor.multi_tensor.chunked_kernel import Column, ScalarParameter, chunked_kernel_lines

BLOCK: int = 1024  # elements of a block: 8 for each thread, one 16-byte load of a half-precision type
WARPS: int = 4  # of a program
ALIGNMENT = 16  # bytes of the widest load of a thread

# Elements of the largest chunk: programs have to move enough bytes to pay for their start (bench/optimizer.py).
LARGEST_CHUNK: int = 16384
# Programs that each multiprocessor should have to choose from, before chunks grow.
_PROGRAMS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True)
class CallArgument:
    """Argument number ``argument`` of the call, or element ``at`` of it where that is a list."""

    argument: int
    at: int | None = None


@dataclass(frozen=True)
class CallResult:
    """Tensor ``at`` of list ``result`` of the call's results, in memory of its own."""

    result: int
    at: int


@dataclass(frozen=True)
class ConstantTable:
    """``LaunchPlan.tables[name]`` in device memory."""

    name: str


@dataclass(frozen=True)
class PointerTable:
    """The addresses of ``LaunchPlan.pointers[name]`` in device memory, as :func:`pointer_table` lays them out."""

    name: str


@dataclass(frozen=True)
class Scratch:
    """``LaunchPlan.scratch[name]``: memory that is used during the call only."""

    name: str


# Tensors that a pointer table can name: those that exist before the launch. Scratch and tables are arguments only.
Place = CallArgument | CallResult
Argument = CallArgument | CallResult | ConstantTable | PointerTable | Scratch


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``kernel`` over ``grid`` programs, its arguments in the order of its signature."""

    kernel: KernelSource
    grid: int
    arguments: tuple[Argument, ...]


@dataclass
class LaunchPlan:
    """Launches, in order, and what they need.

    Attributes:
        tables: int32 constants, copied to the device once.
        pointers: for each table of addresses its rows of places.
        scratch: sizes (elements) and dtypes of scratch memory.
        multiprocessors: of the GPU that the kernels are for.
    """

    launches: list[Launch] = field(default_factory=list)
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    pointers: dict[str, list[tuple[Place, ...]]] = field(default_factory=dict)
    # By name, so that launches of one plan hand results on: partial sums to the kernel that adds them.
    scratch: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    multiprocessors: int = HOPPER_MULTIPROCESSORS

    @classmethod
    def on_device_of(cls, arguments: Sequence[Any]) -> LaunchPlan:
        """An empty plan for the GPU of the first tensor among the arguments of a call, and in its lists."""
        lists = (argument if isinstance(argument, (list, tuple)) else [argument] for argument in arguments)
        # The kernels are for one GPU; passes have checked that all tensors are on it.
        device = next(value.device for list_ in lists for value in list_ if isinstance(value, torch.Tensor))
        return cls(multiprocessors=multiprocessors(device))


# Filled at the first run, and again when tensors move: addresses are not known when a plan is made.
def pointer_table(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of addresses as int64 words: each row, then 1 where all in it are aligned and 0 where not."""
    # The flag is per row, so one unaligned tensor costs vector access to its own row only.
    words = [word for row in rows for word in (*row, int(all(address % ALIGNMENT == 0 for address in row)))]
    return torch.tensor(words, dtype=torch.int64)


def chunk_elements(sizes: Sequence[int], multiprocessors: int = HOPPER_MULTIPROCESSORS) -> int:
    """The elements of a chunk: ``BLOCK`` times a power of two, as large as leaves each multiprocessor enough chunks."""
    wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    chunk = LARGEST_CHUNK
    # Halved until there are enough: few tensors get small chunks, so that all multiprocessors have work.
    while chunk > BLOCK and sum(-(-size // chunk) for size in sizes) < wanted:
        chunk //= 2
    return chunk


def chunk_table(sizes: Sequence[int], labels: Sequence[int], chunk: int) -> torch.Tensor:
    """The int32 table (chunks of all tensors, 4): tensor, chunk in the tensor, elements in it, label."""
    size = torch.tensor(sizes, dtype=torch.int64)
    # An empty tensor has no chunk, and no row.
    counts = (size + chunk - 1) // chunk
    # The number of its tensor for every chunk.
    tensor = torch.repeat_interleave(counts)
    # The position in the whole list, less the first position of its tensor.
    number_in_tensor = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
    # Whole, but for the last chunk of a tensor.
    elements = (size[tensor] - number_in_tensor * chunk).clamp(max=chunk)
    return torch.stack([tensor, number_in_tensor, elements, torch.tensor(labels)[tensor]], 1).int()


def chunk_ranges(sizes: Sequence[int], labels: Sequence[int], chunk: int) -> torch.Tensor:
    """The int32 table (tensors, 4): a tensor's first row in the chunk table, how many it has, its label, 0."""
    counts = (torch.tensor(sizes, dtype=torch.int64) + chunk - 1) // chunk
    # A column of zeros makes a row 16 bytes long.
    return torch.stack([counts.cumsum(0) - counts, counts, torch.tensor(labels), torch.zeros_like(counts)], 1).int()


def group_by_dtypes(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Positions of tensors that have the same dtypes across ``lists``: one list of positions for each launch."""
    # In the order in which they appear, so that all ranks launch alike.
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for at, row in enumerate(zip(*lists, strict=True)):
        groups.setdefault(tuple(tensor.dtype for tensor in row), []).append(at)
    return list(groups.values())


@dataclass(frozen=True)
class CallScalar:
    """A scalar argument of a call as a kernel sees it.

    Attributes:
        name: its register.
        argument: which argument of the call it is.
        value: the argument's fake tensor or number. Tensors are read where they lie, symbolic numbers are passed by
            value as float32.
    """

    name: str
    argument: int
    value: Any

    @property
    def parameter(self) -> ScalarParameter | None:
        """How the kernel gets the number; None where it is a constant of the text."""
        if isinstance(self.value, torch.Tensor):
            return ScalarParameter(self.name, pointer_type(self.value.dtype))
        # Of these types exactly: a symbolic number is known at the call only.
        return None if type(self.value) in (int, float) else ScalarParameter(self.name, "fp32")

    @property
    def setup(self) -> list[str]:
        """The line that defines a constant, none for a parameter."""
        if self.parameter is not None:
            return []
        return [f"{self.name} = tl.full((), {float32_literal(self.value)}, tl.float32)"]


@dataclass(frozen=True)
class PointerParameter:
    """A pointer argument of a kernel besides tables and numbers: its name, its Triton type, and its memory."""

    name: str
    type: str
    place: Argument


def add_chunked_launch(
    plan: LaunchPlan,
    name: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[Place, ...]],
    sizes: Sequence[int],
    labels: Sequence[int],
    numbers: Iterable[CallScalar] = (),
    further: Sequence[PointerParameter] = (),
    setup: Sequence[str] = (),
    **lines: Any,
) -> int:
    """Add the launch of one kernel over chunks of tensors (:func:`chunked_kernel_lines`), unless all are empty.

    Args:
        rows: for each tensor its place in each column.
        sizes: elements of each tensor.
        labels: for each tensor, the value of the kernel's register ``label``.
        lines: ``body``, ``skip`` and ``finish`` of the kernel.

    Returns the elements of a chunk.
    """
    chunk = chunk_elements(sizes, plan.multiprocessors)
    table = chunk_table(sizes, labels, chunk)
    # All tensors are empty. CUDA refuses an empty grid.
    if not len(table):
        return chunk
    # Names of tables are unique within the plan by the number of their launch.
    mark = str(len(plan.launches))
    chunks, pointers = f"chunks{mark}", f"pointers{mark}"
    plan.tables[chunks] = table
    plan.pointers[pointers] = list(rows)
    numbers = list(numbers)
    # Constants are in the text, so only the rest are arguments.
    passed = [(n.parameter, CallArgument(n.argument)) for n in numbers if n.parameter is not None]
    body = chunked_kernel_lines(
        columns,
        [parameter for parameter, _ in passed],
        setup=[*(line for n in numbers for line in n.setup), *setup],
        **lines,
    )
    signature = {"chunks": "*i32", "pointers": "*i64"}
    signature |= {parameter.argument: parameter.type for parameter, _ in passed}
    signature |= {f.name: f.type for f in further}
    places = (
        ConstantTable(chunks),
        PointerTable(pointers),
        *(place for _, place in passed),
        *(f.place for f in further),
    )
    # One program a chunk; a row of the table says which.
    add_launch(plan, name, body, signature, places, len(table), {"CHUNK": chunk, "BLOCK": BLOCK})
    return chunk


def add_launch(
    plan: LaunchPlan,
    name: str,
    lines: Sequence[str],
    signature: dict[str, str],
    places: tuple[Argument, ...],
    grid: int,
    constants: dict[str, Any],
    registers: int | None = None,
    warps: int = WARPS,
) -> None:
    """Add the launch of the kernel of ``lines`` to ``plan``; memory of its tables, scratch and results is aligned."""
    # Arguments of the call may start at any element, so no alignment is promised for them.
    # Only these may be marked: a false promise makes the GPU stop at a 16-byte load.
    aligned = frozenset(
        argument
        for argument, place in zip(signature, places, strict=True)
        if isinstance(place, (ConstantTable, PointerTable, Scratch, CallResult))
    )
    source = write_kernel(name, lines, signature, constants, divisible=aligned, num_warps=warps, registers=registers)
    plan.launches.append(Launch(source, grid, places))


@dataclass(frozen=True)
class Job:
    """The work of some programs of a launch that has other programs too.

    Attributes:
        lines: of each program; the register ``job`` is its number among these programs.
        arguments: of the lines, by name: Triton's type of each, and its memory.
        constants: of the lines, by name.
        programs: how many there are.
    """

    lines: Sequence[str]
    arguments: Mapping[str, tuple[str, Argument]]
    constants: Mapping[str, Any]
    programs: int


def add_jobs(plan: LaunchPlan, name: str, jobs: Sequence[Job], registers: int | None = None) -> None:
    """Add one launch of all ``jobs``, whose programs start in that order.

    So programs that wait for memory latency run beside programs that use its bandwidth. An argument or constant that
    several jobs name has to be the same in all. Registers of one name need one type and shape, because the jobs are
    branches of one kernel.
    """
    jobs = [job for job in jobs if job.programs]
    arguments: dict[str, tuple[str, Argument]] = {}
    constants: dict[str, Any] = {}
    for job in jobs:
        for merged, names in ((arguments, job.arguments), (constants, job.constants)):
            # Jobs share arguments by name (the keys, the table): a difference would give one of them the other's
            # memory.
            differing = [key for key, value in names.items() if merged.setdefault(key, value) != value]
            assert not differing, f"jobs of {name} differ in {differing}"
    signature = {key: type_ for key, (type_, _) in arguments.items()}
    places = tuple(place for _, place in arguments.values())
    lines = ["job = tl.program_id(0)", *_either(jobs)]
    add_launch(plan, name, lines, signature, places, sum(job.programs for job in jobs), constants, registers)


def _either(jobs: Sequence[Job]) -> list[str]:
    """Lines that run the job that program number ``job`` belongs to."""
    # Nested branches: a program compares its number with one bound after another.
    first, *others = jobs
    if not others:
        return list(first.lines)
    rest = [f"job -= {first.programs}", *_either(others)]
    # Programs take jobs by their number, and GPUs start programs in order: the first job is under way when others
    # begin.
    return [f"if job < {first.programs}:", *indented(first.lines), "else:", *indented(rest)]
