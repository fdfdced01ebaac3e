"""torch's own database of operations: every sample run eagerly and through weft.

A *case* is an operation of the database with a dtype, and whether gradients are taken. Samples that eager cannot run
are passed over; all others must leave what eager leaves, in results, gradients and arguments: bit for bit where every
operation runs as its ATen kernel. Where kernels were generated, within the database's own tolerances or as close to
what float64 gives as eager is; of operations that draw random numbers, which generated kernels draw otherwise, only
dtypes and sizes are compared.

A sample is captured as a training step (`weft.compile`). What no single graph can hold (an answer in Python that
depends on the data, a sparse tensor) goes through `torch.compile(backend="weft")`, which breaks the graph there.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal import common_utils
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import weft
import weft.backend
from weft.capture.record.float64_shadow import Float64ShadowMode
from weft.errors import CannotCapture, UncapturableLayout, UnstridedArgument
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

Tensor = torch.Tensor

# The database seeds random operations itself, past the dispatcher where a capture sees nothing; `run` does it here.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
# For each operation it looks for a test case of unittest's among all frames, and reads their source lines: two thirds
# of the time of a test. There is none.
for _module in (common_utils, core):
    _module.extract_test_fn = lambda: None

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)

# What these leave in memory is nobody's to compare: only dtype, sizes and strides are.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# ATen's own code asks whether it is given a tensor subclass, as fake tensors are, and then goes another way: it sums up
# gradients in a tensor of their own. Compared within tolerances, strides aside.
GOES_ANOTHER_WAY = {"ormqr"}

# Eager does not give the same bits twice for the same numbers: LAPACK's answer depends on where they lie in memory.
NOT_REPEATED_BY_EAGER = {"linalg.lstsq", "linalg.lstsq[grad_oriented]"}

# AOTAutograd traces with torch's Python dispatcher, in which resizing of images is made of simple operations.
DECOMPOSED_BY_DYNAMO = ("nn.functional.interpolate", "nn.functional.upsample")


@dataclass(frozen=True)
class Case:
    op: OpInfo
    dtype: torch.dtype
    gradients: bool = False

    @property
    def name(self) -> str:
        return self.op.name + (f"[{self.op.variant_test_name}]" if self.op.variant_test_name else "")

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{' with gradients' if self.gradients else ''}"


@dataclass
class Outcome:
    """What became of samples.

    Attributes:
        counts: samples that went through ``weft.compile`` or ``torch.compile`` and gave what eager gives, that ``eager
            refuses``, that ``failed``.
        operations: how many operations of the graphs ran as what.
        failures: which sample, and what was wrong.
    """

    counts: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.counts += other.counts
        self.operations += other.operations
        self.failures += other.failures


def cases(ops: list[OpInfo] | None = None, device: str = "cpu") -> Iterator[Case]:
    """Operations in the dtypes they take, and with gradients where float32 has them."""
    for op in database.op_db if ops is None else ops:
        supported = op.supported_dtypes(device)
        for dtype in DTYPES:
            if dtype in supported:
                yield Case(op, dtype)
        if op.supports_autograd and torch.float32 in supported:
            yield Case(op, torch.float32, gradients=True)


def run(
    case: Case, limit: int | None = None, device: str = "cpu", *, dynamo: bool = False, interpreted: bool = False
) -> Outcome:
    """Run up to ``limit`` samples of ``case`` both ways.

    Args:
        dynamo: all of them through ``torch.compile``.
        interpreted: by kernels generated for the CPU, in triton's interpreter, which takes a thousand times as long.
    """
    outcome = Outcome()
    torch.manual_seed(0)
    samples = case.op.sample_inputs(device, case.dtype, requires_grad=case.gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, sample in enumerate(itertools.islice(samples, limit)):
            step = _Step(case, ((sample.input, *sample.args), sample.kwargs))
            wanted = _tried(lambda step=step: step.run(step))
            if isinstance(wanted, Exception):
                outcome.counts["eager refuses"] += 1
                continue
            found = _tried(lambda step=step: _compiled(step, outcome, dynamo, interpreted))
            how, found = found if isinstance(found, tuple) else ("failed", found)
            wrong = found if isinstance(found, Exception) else _difference(step, found, wanted, outcome, dynamo)
            outcome.counts["failed" if wrong else how] += 1
            if wrong:
                outcome.failures.append(f"{case}, sample {at}: {type(wrong).__name__}: {wrong}")
    return outcome


def _compiled(step: _Step, outcome: Outcome, dynamo: bool, interpreted: bool) -> tuple[str, Any]:
    """How the step was compiled, and what it gave."""
    if not dynamo:
        try:
            fast = weft.compile(step)
            found = step.run(functools.partial(_by_kernels, fast) if interpreted else fast)
            outcome.operations += fast.entries[0].program.operations
            return "weft.compile", found
        except (CannotCapture, UncapturableLayout, UnstridedArgument):
            pass
    torch.compiler.reset()
    with counted_programs() as operations:
        found = step.run(torch.compile(step, backend="weft"))
    outcome.operations += operations
    return "torch.compile", found


def _by_kernels(fast: weft.CompiledStep, *tensors: Tensor) -> Any:
    """Call the step with a program of generated kernels, which are interpreted."""
    entry = fast.entry_for(tensors, {})
    entry.program = compile_aten(use_kernels(make_kernels(run_passes(entry.captured.graph, KERNEL_PASSES))))
    return fast(*tensors)


@contextmanager
def counted_programs() -> Iterator[Counter[str]]:
    """The operations of all programs that the backend makes."""
    operations: Counter[str] = Counter()
    make = weft.backend._program

    def counting(*args: Any) -> Any:
        program = make(*args)
        operations.update(program.operations)
        return program

    weft.backend._program = counting
    try:
        yield operations
    finally:
        weft.backend._program = make


class _Step:
    """One call of an operation, as a function of the tensors among its arguments.

    Attributes:
        draws: whether a run of it was seen to draw random numbers.
    """

    def __init__(self, case: Case, arguments: Any) -> None:
        self.case = case
        self.draws = False
        leaves, self.spec = tree_flatten(arguments)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(self, function: Callable[..., Any]) -> Any:
        """What ``function`` gives for the tensors of the sample, and what it leaves in them."""
        tensors = _copies(self.tensors)
        torch.manual_seed(1)
        before = _generators()
        result = function(*tensors)
        self.draws |= any(not torch.equal(a, b) for a, b in zip(before, _generators(), strict=True))
        return result, tensors

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        out = self.case.op(*args, **kwargs)
        if not self.case.gradients:
            return out
        ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        starts = [t for t in tensors if t.requires_grad]
        if not ends or not starts:
            return out
        weights = [end.detach().cos() for end in ends]
        grads = torch.autograd.grad(ends, starts, weights, allow_unused=True)
        return tree_map_only(Tensor, Tensor.detach, out), grads


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies with the same sizes, strides and sharing of memory."""
    storages: dict[int, Any] = {}
    copies = []
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            copies.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
            continue
        plain = tensor.detach()
        storage = plain.untyped_storage()
        mine = storages.setdefault(storage._cdata, storage.clone())
        copy = torch.empty(0, dtype=plain.dtype, device=plain.device)
        copy.set_(mine, plain.storage_offset(), plain.shape, plain.stride())
        copy = copy.conj() if plain.is_conj() else copy
        copy = copy._neg_view() if plain.is_neg() else copy
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return copies


def _tried(function: Callable[[], Any]) -> Any:
    """What ``function`` returns or raises."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - it is the answer
        return error


def _generators() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _difference(step: _Step, found: Any, wanted: Any, outcome: Outcome, dynamo: bool) -> Exception | None:
    case, generated = step.case, outcome.operations["generated"] > 0
    if case.op.name in UNINITIALIZED or (generated and step.draws):
        found, wanted = (tree_map_only(Tensor, torch.zeros_like, tree) for tree in (found, wanted))
    same_kernels = not generated and not (dynamo and case.name.startswith(DECOMPOSED_BY_DYNAMO))
    exact = same_kernels and case.name not in GOES_ANOTHER_WAY | NOT_REPEATED_BY_EAGER
    tolerances = {"rtol": 0, "atol": 0} if exact else _tolerances(case)
    check = lambda: torch.testing.assert_close(found, wanted, equal_nan=True, check_stride=exact, **tolerances)
    wrong = _tried(check)
    return None if wrong is None or (generated and _is_as_close_as_eager(step, found)) else wrong


def _is_as_close_as_eager(step: _Step, found: Any) -> bool:
    """Whether results are at most 16 times as far from those in float64 as eager's are, which are few numbers."""
    with Float64ShadowMode() as run:
        wanted = step.run(step)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if not isinstance(theirs, Tensor) or not (theirs.is_floating_point() or theirs.is_complex()):
            if isinstance(theirs, Tensor) and not torch.equal(ours, theirs):
                return False
            continue
        exact = run.value(theirs)
        finite = exact.isfinite() & theirs.isfinite() & ours.isfinite()
        if not torch.equal(theirs.isfinite(), ours.isfinite()):
            return False
        far, eager = ((t.to(exact.dtype) - exact)[finite].abs() for t in (ours.detach(), theirs.detach()))
        if far.numel() and far.max() > 16 * eager.max() + torch.finfo(theirs.dtype).eps * exact[finite].abs().max():
            return False
    return True


def _tolerances(case: Case) -> dict[str, float]:
    """The widest that the database asks for, in the tests that it lists for the operation."""
    lists = (d.decorators for d in case.op.decorators if isinstance(d, DecorateInfo))
    overrides = (d.d for decorators in lists for d in decorators if isinstance(d, toleranceOverride))
    asked = [override[case.dtype] for override in overrides if case.dtype in override]
    if case.name in NOT_REPEATED_BY_EAGER:
        return {"rtol": 1e-4, "atol": 1e-4}
    if not asked:
        return {}
    return {"rtol": max(one.rtol for one in asked), "atol": max(one.atol for one in asked)}
