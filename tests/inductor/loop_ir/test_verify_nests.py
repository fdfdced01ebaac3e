"""The verifier of loop nests: it passes what is lowered, and refuses faults planted in the nests of lowered steps.

What no grammar can see (another operand, another reduction) is left to nest evaluation against ATen, which here must
notice every planted fault that the verifier lets through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from example_graphs import example
from nest_eval import run_items

import weft
from weft import knobs
from weft.errors import MalformedNest
from weft.inductor.compiler import make_kernels
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.loop_ir.bounds import fault
from weft.inductor.loop_ir.ir import (
    Buffer,
    Call,
    Const,
    Index,
    Int,
    Load,
    Nest,
    Position,
    Reduce,
    ReductionResult,
    Scalar,
    Store,
    Value,
    map_values,
    rewrite,
)
from weft.inductor.loop_ir.numbering import numbered
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Loop, Lowered, Operation
from weft.inductor.lowering.verify import verify_lowered
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten

Tensor = torch.Tensor
Change = Callable[[Nest], Nest]

X = Index([(0, 128), (1, 1)])  # where the nests below read their first operand


def randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


PROGRAMS: dict[str, tuple[Callable[..., Sequence[Tensor]], tuple[Tensor, ...]]] = {
    "layer_norm": (lambda x, w: tuple(torch.native_layer_norm(x, (128,), w, None, 1e-5)), (randn(64, 128), randn(128))),
    "softmax": (lambda x: (F.softmax(x, 1),), (randn(64, 128),)),
    "add": (lambda x, y: (x + y,), (randn(64, 128), randn(64, 128))),
    "square": (lambda x: ((x * 2).t().contiguous(),), (randn(48, 48),)),
    "pad": (lambda x: (F.pad(x, (1, 2)),), (randn(64, 128),)),
    "cat": (lambda x, y: (torch.cat([x, y, x, y, x]),), (randn(16, 128), randn(16, 128) + 1)),
    "cast": (lambda x: (x.double().exp(),), (randn(64, 128),)),
    "parts": (lambda x: (x.sum(0),), (randn(1031, 20),)),
    "embedding": (lambda w, at: (F.embedding(at, w),), (randn(50, 8), torch.arange(12).reshape(3, 4))),
    "argmax": (lambda x: (x.max(1).values,), (randn(64, 128),)),
    "chain": (lambda x: (x.exp().sin(),), (randn(64, 128),)),
}


def lowered_program(name: str) -> tuple[Lowered, list[Tensor]]:
    function, inputs = PROGRAMS[name]
    step = weft.capture(function, *inputs)
    arguments = [inputs[int(entry.path.removeprefix("args[").removesuffix("]"))] for entry in step.inputs]
    return lower(step, list(step.graph.nodes)), arguments


# ---- how faults are planted


def values(change: Callable[[Value], Value]) -> Change:
    """Change every value of a nest for which ``change`` gives another one."""

    def changed(nest: Nest) -> Nest:
        new = rewrite([root for store in nest.stores for root in store.values()], change)
        return replace(nest, stores=tuple(map_values(store, new) for store in nest.stores))

    return changed


def loads(change: Callable[[Load], Value]) -> Change:
    return values(lambda value: change(value) if isinstance(value, Load) else value)


def moved(load: Load, index: Index) -> Load:
    return Load(load.buffer, index, load.dtype, load.mask, load.other)


def stores(change: Callable[[Store], Store]) -> Change:
    return lambda nest: replace(nest, stores=tuple(change(store) for store in nest.stores))


def shifted(index: Index, by: Int) -> Index:
    return Index(index.strides, index.offset + by, index.indirect)


def swapped(index: Index) -> Index:
    (a, s), (b, t) = index.strides
    return Index([(a, t), (b, s)], index.offset)


def calls(op: str, change: Callable[[Call], Value]) -> Change:
    return values(lambda value: change(value) if isinstance(value, Call) and value.op == op else value)


def reductions(change: Callable[[Reduce], Value]) -> Change:
    return values(lambda value: change(value) if isinstance(value, Reduce) else value)


def resized(by: int) -> Change:
    return lambda nest: replace(nest, sizes=(nest.sizes[0] + by, *nest.sizes[1:]))


def masks(change: Callable[[Value], Value | None]) -> Change:
    def masked(load: Load) -> Load:
        assert load.mask is not None
        return Load(load.buffer, load.index, load.dtype, change(load.mask), load.other)

    return loads(lambda load: load if load.mask is None else masked(load))


def one_more(mask: Value) -> Value:
    """Every ``<`` of a mask as ``<=``."""
    looser = lambda v: Call("le", v.args, v.dtype) if isinstance(v, Call) and v.op == "lt" else v
    return rewrite([mask], looser)[mask]


def in_place(nest: Nest) -> Nest:
    """The nest reads, one element further, what it stores."""
    (store,) = nest.stores
    inside = Call("gt", (Position(0), Const(0, I64)), BOOL)
    old = Load(store.buffer, shifted(store.index, -1), store.value.dtype, inside)
    return replace(nest, stores=(replace(store, value=Call("add", (store.value, old), store.value.dtype)),))


I64, BOOL, F32 = torch.int64, torch.bool, torch.float32


@dataclass(frozen=True)
class Mutant:
    """A fault planted in the first nest of a program, and what the verifier says of it; None: evaluation notices."""

    name: str
    program: str
    change: Change
    message: str | None


MUTANTS = [
    Mutant("a load one element too far", "add", loads(lambda v: moved(v, shifted(v.index, 1))), "leaves its buffer"),
    Mutant("a load one element too early", "add", loads(lambda v: moved(v, shifted(v.index, -1))), "element -1 of"),
    Mutant("a store one element too far", "add", stores(lambda s: replace(s, index=shifted(s.index, 1))), "leaves"),
    Mutant("an axis one too long", "add", resized(1), "reaches element 8192 of 8192 at d0 = 64"),
    Mutant("an axis one too short", "add", resized(-1), "never computed as a whole"),
    Mutant("swapped axes of an operand", "add", loads(lambda v: moved(v, swapped(v.index))), "leaves its buffer"),
    Mutant("a store along the wrong axis", "layer_norm", stores(lambda s: _across(s)), "leaves its buffer"),
    Mutant("an integer operand of a float sum", "add", calls("add", lambda c: _mixed(c)), "add takes numbers, not"),
    Mutant("a comparison that gives a number", "pad", calls("ge", lambda c: Call("ge", c.args, F32)), "ge takes"),
    Mutant("a dropped cast", "cast", calls("to", lambda c: c.args[0]), "holds torch.float64|exp takes"),
    Mutant("a load of another dtype", "add", loads(lambda v: Load(v.buffer, v.index, I64)), "holds torch.float32"),
    Mutant("an axis reduced twice", "softmax", reductions(lambda r: Reduce("sum", (r,), r.over, F32)), "reduced twice"),
    Mutant("an axis that does not exist", "softmax", reductions(lambda r: Reduce(r.kind, r.args, [2], F32)), "axes"),
    Mutant("a dropped reduction", "parts", reductions(lambda r: r.args[0]), "store different values in one element"),
    Mutant("a dropped store", "layer_norm", lambda nest: replace(nest, stores=nest.stores[:2]), "never computed"),
    Mutant("a store twice", "layer_norm", lambda nest: replace(nest, stores=(*nest.stores, nest.stores[1])), "two"),
    Mutant("a part at the place of another", "cat", stores(lambda s: replace(s, index=shifted(s.index, 2048))), "two"),
    Mutant("a dropped mask", "pad", masks(lambda mask: None), "element -1 of 8192"),
    Mutant("a mask one too wide", "pad", masks(one_more), "reaches element 8192 of 8192 at d0 = 63, d1 = 129"),
    Mutant("a mask one too wide over a split axis", "parts", masks(one_more), "reaches element 20"),
    Mutant("a mask negated", "pad", masks(lambda mask: Call("not", (mask,), BOOL)), "leaves its buffer"),
    Mutant("a mask of numbers", "pad", masks(lambda mask: Call("to", (mask,), F32)), "a mask is torch.float32"),
    Mutant("a store to a buffer that is read", "add", in_place, "is stored at .* and read at"),
    Mutant("an index that is no integer", "embedding", loads(lambda v: _float_index(v)), "an index is torch.float32"),
    Mutant("a buffer that does not exist", "add", loads(lambda v: Load("nobody", v.index, v.dtype)), "does not exist"),
    Mutant("a result that a reduction lacks", "argmax", values(lambda v: _result(v, 2)), "argmax has no result 2"),
    Mutant("one of several results, not chosen", "argmax", values(lambda v: _whole(v)), "several results"),
    Mutant("an integer constant of floats", "softmax", calls("sub", lambda c: _constant(c)), "constant 0 is no"),
    Mutant("a size that nobody knows", "add", loads(lambda v: _unknown_size(v)), "symbols nobody are no inputs"),
    Mutant("swapped axes of a square operand", "square", loads(lambda v: moved(v, swapped(v.index))), None),
    Mutant("swapped operands", "layer_norm", calls("sub", lambda c: Call("sub", c.args[::-1], c.dtype)), None),
    Mutant("another reduction", "softmax", reductions(lambda r: Reduce("min", r.args, r.over, F32)), None),
    Mutant("a row's scale in place of a column's", "layer_norm", loads(lambda v: _by_row(v)), None),
    Mutant("rows too far apart", "embedding", loads(lambda v: _far_rows(v)), None),
    Mutant("a missing element that counts", "parts", calls("where", lambda c: _counted(c)), None),
]


def _across(store: Store) -> Store:
    """A row's result stored at a column's place."""
    return store if len(store.index.strides) > 1 else replace(store, index=Index([(1, 1)]))


def _mixed(call: Call) -> Call:
    return Call("add", (call.args[0], Const(1, I64)), call.dtype)


def _float_index(load: Load) -> Load:
    terms = [(Call("to", (value,), F32), stride) for value, stride in load.index.indirect]
    return Load(load.buffer, Index(load.index.strides, load.index.offset, terms), load.dtype)


def _result(value: Value, at: int) -> Value:
    return ReductionResult(value.reduce, at, value.dtype) if isinstance(value, ReductionResult) else value


def _whole(value: Value) -> Value:
    return value.reduce if isinstance(value, ReductionResult) and value.at == 0 else value


def _constant(call: Call) -> Call:
    return Call("sub", (call.args[0], Const(0, F32)), call.dtype)


def _unknown_size(load: Load) -> Value:
    size = Scalar(sympy.Symbol("nobody", integer=True), I64)
    return Call("add", (load, Call("to", (size,), F32)), F32)


def _by_row(load: Load) -> Load:
    return moved(load, Index([(0, 1)])) if load.index == Index([(1, 1)]) else load


def _far_rows(load: Load) -> Load:
    terms = [(value, 2 * stride) for value, stride in load.index.indirect]
    return Load(load.buffer, Index(load.index.strides, load.index.offset, terms), load.dtype)


def _counted(call: Call) -> Call:
    return Call("where", (*call.args[:2], Const(1.0, F32)), F32)


def planted(lowered: Lowered, change: Change) -> list[Operation]:
    """The step's operations, the first nest changed."""
    at = next(at for at, operation in enumerate(lowered.operations) if isinstance(operation, Loop))
    loop = lowered.operations[at]
    assert isinstance(loop, Loop)
    nest = change(loop.nest)
    assert nest != loop.nest, "no fault was planted"
    form, buffers = numbered(nest)
    return [*lowered.operations[:at], replace(loop, form=form, buffers=buffers), *lowered.operations[at + 1 :]]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_planted_fault_is_noticed(mutant: Mutant) -> None:
    lowered, arguments = lowered_program(mutant.program)
    operations = planted(lowered, mutant.change)
    if mutant.message is not None:
        with pytest.raises(MalformedNest, match=mutant.message) as raised:
            verify_lowered(lowered, operations, "planting a fault")
        assert "after planting a fault" in str(raised.value)
        assert "test_verify_nests.py" in str(raised.value)
        return
    verify_lowered(lowered, operations, "planting a fault")
    expected = PROGRAMS[mutant.program][0](*PROGRAMS[mutant.program][1])
    found = run_items(lowered, operations, arguments)
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_without_a_fault_pass_and_give_what_eager_gives(program: str) -> None:
    lowered, arguments = lowered_program(program)
    verify_lowered(lowered, lowered.operations, "lowering")
    expected = PROGRAMS[program][0](*PROGRAMS[program][1])
    torch.testing.assert_close(run_items(lowered, lowered.operations, arguments), list(expected), rtol=1e-4, atol=1e-4)


def test_a_nest_that_runs_before_what_it_reads_is_refused() -> None:
    lowered, _ = lowered_program("chain")
    with pytest.raises(MalformedNest, match="exp is read before all its elements are stored"):
        verify_lowered(lowered, lowered.operations[::-1], "sorting")


def test_a_part_that_is_never_stored_is_refused() -> None:
    lowered, _ = lowered_program("cat")
    with pytest.raises(MalformedNest, match="result cat is never computed as a whole"):
        verify_lowered(lowered, lowered.operations[1:], "dropping")


def test_the_message_marks_the_fault_and_names_the_users_line() -> None:
    lowered, _ = lowered_program("layer_norm")
    wrong = calls("rsqrt", lambda call: Call("rsqrt", (Const(1, I64),), call.dtype))
    with pytest.raises(MalformedNest) as raised:
        verify_lowered(lowered, planted(lowered, wrong), "lowering")
    lines = str(raised.value).splitlines()
    (marked,) = (line for line in lines if line.startswith(">"))
    assert "= rsqrt(1)" in marked
    assert "rsqrt takes floats, not (torch.int64) -> torch.float32, of native_layer_norm" in lines[0]
    assert "test_verify_nests.py:" in lines[0]


# ---- bounds


def buffer(*sizes: Int) -> Buffer:
    strides: list[Int] = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    return Buffer("x", F32, torch.device("cpu"), tuple(sizes), tuple(strides))


def test_bounds_of_symbolic_sizes_are_compared_as_expressions() -> None:
    rows = sympy.Symbol("rows", integer=True, positive=True)
    index, sizes = Index([(0, 48), (1, 1)]), (rows - 1, 48)
    assert fault(Index(index.strides, 48), None, sizes, buffer(rows, 48)) is None
    assert "element 48*rows" in (fault(Index(index.strides, 49), None, sizes, buffer(rows, 48)) or "")
    other = sympy.Symbol("other", integer=True, positive=True)
    assert fault(index, None, (other, 48), buffer(rows, 48)) is None, "not provable"


def test_correlated_limits_give_no_false_alarm() -> None:
    """``d0 + d1 < 8`` and ``d0 < 4`` and ``d1 < 8``: intervals alone would let ``3 * d0 + 2 * d1`` reach 23."""
    total = Call("add", (Position(0), Position(1)), I64)
    mask = Call("lt", (total, Const(8, I64)), BOOL)
    index = Index([(0, 3), (1, 2)])
    assert fault(index, mask, (4, 8), buffer(18)) is None
    assert "element 17 of 17 at d0 = 3, d1 = 4" in (fault(index, mask, (4, 8), buffer(17)) or "")


@pytest.mark.parametrize("name", ["variance", "layer_norm", "softmax"])
def test_a_constant_may_be_reduced_again_and_again(name: str) -> None:
    """A sum of ones is a constant, as is the variance of ones."""
    program = {
        "variance": lambda x: torch.full((2, 7), 3.0).var(1) + x,
        "layer_norm": lambda x: F.layer_norm(torch.ones(2, 7), (7,)).sum(1) + x,
        "softmax": lambda x: torch.zeros(2, 7).softmax(1).sum(1) + x,
    }[name]
    with knobs.override(verify_graphs=True):
        graph = make_kernels(run_passes(weft.capture(program, torch.zeros(2)), KERNEL_PASSES))
    (found,) = compile_aten(graph)(torch.ones(2))
    torch.testing.assert_close(found, program(torch.ones(2)))


def test_windows_that_overhang_are_safe_behind_their_mask() -> None:
    at = Call("sub", (Call("floordiv", (Position(0), Const(3, I64)), I64), Const(1, I64)), I64)
    inside = Call("and", (Call("ge", (at, Const(0, I64)), BOOL), Call("lt", (at, Const(5, I64)), BOOL)), BOOL)
    index = Index((), 0, [(at, 7)])
    assert fault(index, inside, (30,), buffer(5, 7)) is None
    assert "element -7" in (fault(index, None, (30,), buffer(5, 7)) or "")


# ---- whole models


@pytest.mark.parametrize("model", ["llama", "vit", "convnet", "moe"])
def test_kernels_of_a_model_are_well_formed(model: str) -> None:
    """Of whole training steps on fake GPUs: after lowering, inlining, fusion and canonicalisation."""
    step = run_passes(retarget(example(model)), KERNEL_PASSES)
    with knobs.override(verify_graphs=True):
        kernel_graph(step)
