"""Which few calls of a step do generated kernels get wrong? ``python -m weft.launch.minify saved_graph.py``

A fault is that generation, compilation or launching raises, or that results differ from those of ATen's kernels by more
than rounding. The calls of the graph are taken away in ever smaller groups, whatever still has the same fault is kept
(delta debugging: Zeller and Hildebrandt, 2002): what a taken call made becomes an input where it is read, and what it
read a result.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro

from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.errors import CannotWrite, NothingToReduce, WeftError
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.repro import known, load, part, save, units
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

T = TypeVar("T")

# Largest difference that rounding explains, of the largest number of a result.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a graph. Two faults of one ``kind`` count as the same.

    Attributes:
        kind: the class of what is raised, or "differs".
        text: all there is to say.
    """

    kind: str
    text: str


def find_fault(step: StepGraph, *, run: bool = True, arch: int | None = None) -> Fault | None:
    """What goes wrong where ``step`` runs by generated kernels; None where nothing does, or ATen's kernels fail too.

    Args:
        run: whether to compare results: on a GPU, or for tensors on a CPU in triton's interpreter, which is slow.
        arch: compile for this architecture (90 for sm_90) before that, which needs no GPU.
    """
    values = random_inputs(step) if run else []
    try:
        expected = _outcome(compile_aten(run_passes(step)), values) if run else []
    except Exception:  # noqa: BLE001 - whatever the step does to ATen, generated kernels are not to blame
        return None
    try:
        if arch is not None:
            made = kernel_graph(run_passes(step, KERNEL_PASSES))
            calls = [node.target for node in made.graph.nodes if isinstance(node.target, KernelCall)]
            compile_pool.build([call.generated.source for call in calls], arch)
        if not run:
            return None
        found = _outcome(compile_aten(use_kernels(make_kernels(run_passes(step, KERNEL_PASSES)))), values)
    except Exception as error:  # noqa: BLE001 - any is a fault
        return Fault(type(error).__name__, str(error))
    wrong = [text for at, pair in enumerate(zip(expected, found, strict=True)) if (text := _difference(at, *pair))]
    return Fault("differs", "\n".join(wrong)) if wrong else None


def reduce(step: StepGraph, fails: Callable[[StepGraph], bool]) -> StepGraph:
    """A part of ``step``, as small as delta debugging finds, for which ``fails`` still holds.

    Collectives, hooks and random numbers, which cannot be made again elsewhere, are inputs of it.

    Raises:
        NothingToReduce: ``fails`` does not hold for what remains without those.
    """

    def fails_with(kept: Sequence[torch.fx.Node]) -> bool:
        try:
            smaller = part(step, kept)
        except Exception:  # noqa: BLE001 - calls that make no step without the others
            return False
        return fails(smaller)

    everything = units(step)
    if not fails_with(everything):
        raise NothingToReduce
    return part(step, _smallest(everything, fails_with))


def _smallest(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """The items without any group of them that is not needed for ``fails``, from halves down to single ones."""
    groups = 2
    while len(items) > 1:
        ends = [len(items) * at // groups for at in range(groups + 1)]
        chunks = [items[start:end] for start, end in itertools.pairwise(ends)]
        others = [[item for item in items if item not in set(chunk)] for chunk in chunks] if groups > 2 else []
        smaller = next((some for some in (*chunks, *others) if fails(some)), None)
        if smaller is not None:
            groups = 2 if smaller in chunks else max(groups - 1, 2)
            items = smaller
        elif groups == len(items):
            break
        else:
            groups = min(2 * groups, len(items))
    return items


def random_inputs(step: StepGraph) -> list[Any]:
    """Values for the inputs of ``step``: normal numbers, positive ones for states (2 for one of no dimensions, which
    may count steps), 0 and 1 where numbers are whole and may be positions."""
    generator = torch.Generator().manual_seed(0)
    return [
        _random(node.meta["val"], entry.role, generator)
        for entry, node in zip(step.inputs, step.placeholders, strict=True)
    ]


def _random(val: Any, role: Role, generator: torch.Generator) -> Any:
    if not isinstance(val, torch.Tensor):
        return known(val)
    reach = sum((size - 1) * stride for size, stride in zip(val.shape, val.stride(), strict=True)) + 1
    reach = reach if val.numel() else 0
    if not val.dtype.is_floating_point:
        flat = torch.randint(0, 2, (reach,), generator=generator)
    elif role is Role.OPTIMIZER_STATE and val.dim() == 0:
        flat = torch.full((reach,), 2.0)
    elif role in (Role.OPTIMIZER_STATE, Role.BUFFER):
        flat = torch.rand(reach, generator=generator)
    else:
        flat = torch.randn(reach, generator=generator)
    return flat.to(val.device, val.dtype).as_strided(val.shape, val.stride())


def _outcome(program: Callable[..., list[Any]], values: Sequence[Any]) -> list[torch.Tensor]:
    """What a program returns and leaves in its inputs."""
    copies = [
        value.as_strided((value.untyped_storage().size() // value.itemsize,), (1,)).clone().as_strided(
            value.shape, value.stride()
        )
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]  # fmt: skip
    results = program(*copies)
    return [value for value in (*results, *copies) if isinstance(value, torch.Tensor)]


def _difference(at: int, expected: torch.Tensor, found: torch.Tensor) -> str | None:
    """How a result differs, None where it is the same but for rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"result {at}: {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    a, b = expected.double(), found.double()
    finite = a.isfinite()
    if not torch.equal(a[~finite].nan_to_num(0.5), b[~finite].nan_to_num(0.5)) or not b[finite].isfinite().all():
        return f"result {at}: other numbers are infinite or none"
    if not finite.any():
        return None
    error = (a - b)[finite].abs().max().item()
    largest = a[finite].abs().max().item()
    allowed = TOLERANCES.get(expected.dtype, 0.0) * max(largest, 1e-3)
    return f"result {at}: differs by {error:.3g} where the largest number is {largest:.3g}" if error > allowed else None


def main(
    saved: Annotated[Path, tyro.conf.Positional],
    output: Path | None = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    run: bool = True,
    arch: int | None = None,
) -> None:
    """Reduce a saved graph to the calls that generated kernels get wrong.

    Args:
        saved: a file that weft wrote: WEFT_DUMP_DIR=<directory> has one written there for each step that is compiled.
        output: the file of the reduced graph; beside the saved one by default.
        device: where to run it: a GPU, or the CPU, where kernels are interpreted (slow: at sizes of thousands).
        run: compare results; without, faults are what generation and compilation raise.
        arch: compile for this architecture (90 for sm_90), which needs no GPU.
    """
    try:
        _reduce_file(saved, output, device, run, arch)
    except WeftError as error:
        sys.exit(f"weft: {error}")


def _reduce_file(saved: Path, output: Path | None, device: str, run: bool, arch: int | None) -> None:
    step = load(saved, device)
    fault = find_fault(step, run=run, arch=arch)
    if fault is None:
        sys.exit(f"{saved}: {len(units(step))} calls, in which generated kernels and ATen's agree")

    def fails(smaller: StepGraph) -> bool:
        again = find_fault(smaller, run=run, arch=arch)
        return again is not None and again.kind == fault.kind

    reduced = reduce(step, fails)
    path = output or saved.with_name(f"{saved.name.removesuffix('.py')}_reduced.py")
    try:
        save(reduced, path)
    except OSError as error:
        raise CannotWrite("--output", path, error) from error
    remaining = find_fault(reduced, run=run, arch=arch) or fault
    counts = f"{len(units(reduced))} of {len(units(step))} calls"
    sys.stdout.write(f"{counts}, in {path}:\n{reduced}\n{remaining.kind}: {remaining.text}\n")


if __name__ == "__main__":
    tyro.cli(main)
