"""Generated kernels, in Triton's interpreter, against what their nests mean."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_check import SEARCH, check, planned_with, tensors
from nests import layer_norm_backward, load, op, rms_norm, softmax, store, swiglu

from weft.errors import UnsupportedNest
from weft.inductor.codegen import kernel_plan
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.loop_ir.ir import (
    Call,
    Const,
    Index,
    Load,
    Nest,
    Position,
    Reduce,
    ReductionResult,
    Scalar,
    Store,
    Value,
    ordered,
)
from weft.inductor.loop_ir.ops import OPS
from weft.inductor.lowering.registry import literal
from weft.inductor.runtime.kernels import compile_kernels

f32, f64, i64, bool_ = torch.float32, torch.float64, torch.int64, torch.bool


@pytest.fixture
def short_rows() -> Iterator[None]:
    """Rows of more than 32 elements are walked in loops of 16."""
    with planned_with(MAX_REGISTER_ROW=32, LOOP_TILE=16, tile_of_rows=lambda c: (16, 4, True)):
        yield


# ---- one kernel of each shape


@pytest.mark.parametrize(("rows", "width"), [(5, 40), (70, 64), (2, 20000)])
def test_a_norm_is_one_row_kernel_that_loops_over_long_rows_only(rows: int, width: int) -> None:
    made = check(rms_norm(rows, width), tensors(x=rows * width, w=width, y=rows * width, scale=rows))
    loops = made.source.text.count("for r_start")
    assert loops == (2 if width > kernel_plan.MAX_REGISTER_ROW else 0)


def test_softmax_of_a_long_row_takes_two_passes() -> None:
    made = check(softmax(2, 40001), tensors(x=80002, y=80002, lse=2))
    assert made.source.text.count("for r_start") == 2


@pytest.mark.parametrize("width", [50, 20001])
def test_labels_outside_their_row_match_no_position(width: int) -> None:
    """-100 is in no row, nor are labels of which only the lower 32 bits are a position; a row may not count at all."""
    x, label = load("x", width, 1), load("label", 1, 0, dtype=i64)
    top = Reduce("max", (x,), [1], f32)
    counts = op("ne", label, Const(3, i64), dtype=bool_)
    hit = op("eq", Position(1), label, dtype=bool_)
    found = op("where", op("and", counts, hit, dtype=bool_), Const(1.0, f32), op("sub", x, top))
    plain = op("where", op("eq", label, Position(1), dtype=bool_), Const(2.0, f32), op("sub", x, top))
    labels = [0, 3, 7, width - 1, width, -1, -100, 2**32 + 5, -(2**32) + 5, 2**63 - 1]
    buffers = tensors(x=len(labels) * width, y=len(labels) * width, z=len(labels) * width)
    made = check(
        Nest((len(labels), width), (store("y", found, width, 1), store("z", plain, width, 1))),
        buffers | {"label": torch.tensor(labels)},
    )
    assert ".to(tl.int32)" in made.source.text


def test_softmax_of_rows_of_nothing_but_minus_infinity_is_nan_as_eager_has_it() -> None:
    for width in (100, 20001):
        buffers = tensors(x=2 * width, y=2 * width, lse=2)
        buffers["x"][:width] = -math.inf
        buffers["x"][width : width + 70] = -math.inf
        check(softmax(2, width), buffers)


@pytest.mark.parametrize(("parts", "rows", "width"), [(3, 5, 40), (2, 7, 3000), (1, 1, 5)])
def test_layer_norm_backward_is_one_kernel(parts: int, rows: int, width: int) -> None:
    whole, few = parts * rows * width, parts * rows
    check(
        layer_norm_backward(parts, rows, width),
        tensors(x=whole, dy=whole, mean=few, rstd=few, w=width, dx=whole, dw=parts * width, db=parts * width),
        tolerance=2e-4,
    )


def test_a_weight_that_registers_cannot_hold_is_loaded_for_every_row() -> None:
    nest, sizes = layer_norm_backward(2, 5, 40), {"x": 400, "dy": 400, "mean": 10, "rstd": 10, "w": 40}
    sizes |= {"dx": 400, "dw": 80, "db": 80}
    rows = check(nest, tensors(**sizes)).source.text
    with planned_with(_REGISTERS=4 * 64):  # two tensors of a row and the sums of two
        again = check(nest, tensors(**sizes)).source.text
    weight = next(line for line in rows.splitlines() if "evict_last" in line and "tl.load" in line)
    assert weight.index("v") == 4
    weight = next(line for line in again.splitlines() if "evict_last" in line and "tl.load" in line)
    assert weight.index("v") == 8


@pytest.mark.parametrize(("rows", "width"), [(300, 40), (5000, 3), (6, 1000)])
def test_column_sums_are_read_along_rows(rows: int, width: int) -> None:
    nest = Nest((rows, width), (store("y", Reduce("sum", (load("x", width, 1),), [0], f32), 0, 1),))
    made = check(nest, tensors(x=rows * width, y=width), tolerance=2e-4)
    assert made.source.name.startswith("column")


def test_a_transposed_copy_has_tiles_of_two_dimensions() -> None:
    nest = Nest((2, 100, 30), (store("y", load("x", 3000, 1, 100), 3000, 30, 1),))
    assert "YBLOCK" in check(nest, tensors(x=6000, y=6000)).source.text


# Numbers are compared at sizes that the interpreter takes in a second; of the others the plan is looked at.
@pytest.mark.parametrize(("rows", "width", "taken"), [(2000, 768, 8), (2000, 24, 8), (40, 768, 1), (600, 2100, 4)])
def test_a_row_reduction_of_a_transposed_tensor_has_several_rows_a_program(rows: int, width: int, taken: int) -> None:
    """A program with one row would use one element of each sector that it loads."""
    across = load("x", 1, rows)
    largest = Reduce("max", (across,), [1], f32)
    nest = Nest((rows, width), (store("y", op("sub", across, largest), width, 1),))
    small = rows * width < 100_000
    made = check(nest, tensors(x=rows * width, y=rows * width)) if small else generate(nest, {"x": f32, "y": f32})
    assert made.source.name.startswith("row")
    assert made.blocks[0][1] == taken


def test_a_sum_of_a_one_hot_term_is_no_reduction() -> None:
    """The gradient of a loss of classes, summed over the classes; the last label is none of them."""
    label, grad = load("label", 1, 0, dtype=torch.int64), load("grad", 1, 0)
    hit = op("eq", Position(1), label, dtype=torch.bool)
    counts = op("ne", label, Const(3, torch.int64), dtype=torch.bool)
    here = op("and", counts, hit, dtype=torch.bool)
    total = Reduce("sum", (op("where", here, grad, Const(0.0, torch.float32)),), [1], torch.float32)
    buffers = {"label": torch.tensor([0, 3, 9, 10]), "grad": torch.randn(4), "y": torch.zeros(4)}
    made = check(Nest((4, 10), (store("y", total, 1, 0),)), buffers)
    assert "tl.sum" not in made.source.text
    assert buffers["grad"][[0, 2]].all()


def test_block_sizes_follow_the_number_of_multiprocessors() -> None:
    nest, dtypes = swiglu(512, 512), dict.fromkeys(["gate", "up", "y"], f32)
    blocks = {count: generate(nest, dtypes, count).blocks[0][1] for count in (64, 132, 264)}
    assert blocks == {64: 1024, 132: 1024, 264: 512}
    assert generate(nest, dtypes) == generate(nest, dtypes, 132)


def test_equal_nests_over_other_names_have_the_same_text() -> None:
    one = generate(rms_norm(5, 40), dict.fromkeys(["x", "w", "y", "scale"], f32))
    renamed = Nest((5, 40), tuple(_renamed(s) for s in rms_norm(5, 40).stores))
    two = generate(renamed, dict.fromkeys(["q_x", "q_w", "q_y", "q_scale"], f32))
    assert one.source is two.source
    assert two.buffers == tuple(f"q_{name}" for name in one.buffers)


def _renamed(old: Store) -> Store:
    from weft.inductor.loop_ir.ir import map_values, rewrite

    def change(value: Value) -> Value:
        return Load(f"q_{value.buffer}", value.index, value.dtype) if isinstance(value, Load) else value

    new = map_values(old, rewrite(old.values(), change))
    return Store(f"q_{new.buffer}", new.index, new.value)


# ---- reductions


KINDS: dict[str, Callable[[Load], list[Value]]] = {
    "sum": lambda x: [Reduce("sum", (x,), [1], f32)],
    "prod": lambda x: [Reduce("prod", (op("add", op("mul", x, Const(0.01, f32)), Const(1.0, f32)),), [1], f32)],
    "max": lambda x: [Reduce("max", (x,), [1], f32)],
    "min": lambda x: [Reduce("min", (x,), [1], f32)],
    "any": lambda x: [Reduce("any", (op("gt", x, Const(2.5, f32), dtype=bool_),), [1], bool_)],
    "all": lambda x: [Reduce("all", (op("gt", x, Const(-2.5, f32), dtype=bool_),), [1], bool_)],
    "count": lambda x: [Reduce("sum", (op("gt", x, Const(0.0, f32), dtype=bool_),), [1], i64)],
    "constant": lambda x: [Reduce("sum", (Const(2.0, f32),), [1], f32)],
    "row": lambda x: [Reduce("sum", (load("z", 1, 0),), [1], f32)],
    "argmax": lambda x: _parts("argmax", (x, Position(1)), (f32, i64)),
    "argmin": lambda x: _parts("argmin", (x, Position(1)), (f32, i64)),
    "welford": lambda x: _parts("welford", (x,), (f32, f32, f32)),
    "online_softmax": lambda x: _parts("online_softmax", (x,), (f32, f32)),
}


def _parts(kind: str, args: tuple[Value, ...], dtypes: tuple[torch.dtype, ...]) -> list[Value]:
    reduce = Reduce(kind, args, [1], dtypes[0])
    return [ReductionResult(reduce, at, dtype) for at, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("nan", [False, True], ids=["numbers", "nan"])
@pytest.mark.parametrize("width", [1, 20, 150])
@pytest.mark.parametrize("columns", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short_rows")
def test_each_reduction_in_registers_and_in_loops(kind: str, columns: bool, width: int, nan: bool) -> None:
    rows = 6
    results = KINDS[kind](load("x", *((1, rows) if columns else (width, 1))))
    buffers = tensors(x=rows * width, z=rows)
    buffers["x"] = buffers["x"].round(decimals=1)
    if nan:
        buffers["x"][buffers["x"].numel() // 2] = math.nan
        buffers["x"][-1] = math.nan
    for at, result in enumerate(results):
        buffers[f"y{at}"] = torch.zeros(rows, dtype=result.dtype)
    check(Nest((rows, width), tuple(store(f"y{k}", r, 1, 0) for k, r in enumerate(results))), buffers)


@pytest.mark.parametrize("columns", [False, True], ids=["row", "column"])
def test_a_reduction_of_nothing_gives_the_identity(columns: bool) -> None:
    x = load("x", 1, 3) if columns else load("x", 7, 1)
    kinds = {"sum": (x, f32, 0.0), "prod": (x, f32, 1.0), "all": (op("gt", x, x, dtype=bool_), bool_, 1.0)}
    stores = [store(kind, Reduce(kind, (arg,), [1], dtype), 1, 0) for kind, (arg, dtype, _) in kinds.items()]
    buffers = {"x": torch.ones(1)} | {kind: torch.full((3,), 5).to(dtype) for kind, (_, dtype, _) in kinds.items()}
    made = generate(Nest((3, 0), tuple(stores)), {name: buffer.dtype for name, buffer in buffers.items()})
    compile_kernels([made.source], torch.device("cpu"))[0].launch(made.grid(), 0, *(buffers[b] for b in made.buffers))
    assert {kind: buffers[kind].float().tolist() for kind in kinds} == {k: [v] * 3 for k, (_, _, v) in kinds.items()}


# ---- operations


NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-4, -1e-4, 1e-8, 0.3, -0.7, 0.69, 0.71]
NUMBERS += [7.25, -7.25, 12.0, 50.0, -50.0, 89.0, -110.0, 1e10, -1e10, 8388607.5, math.inf, -math.inf, math.nan]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 10, 31, 100, -100]
TO_BOOL = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "isnan", "isinf"}
OF_INTEGERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"}
OF_INTEGERS |= {"floordiv", "truncdiv"}
OF_BOTH = {"add", "sub", "mul", "neg", "abs", "sign", "minimum", "maximum", "pow", "where"} | TO_BOOL - {
    "and",
    "or",
    "not",
    "isnan",
    "isinf",
}
REMAINDERS = {"mod", "fmod"}
NEITHER = {"checked_index", "to", "round_bfloat16", "round_float16", "rand", "randn", "and", "or", "not"}


@pytest.mark.parametrize("dtype", [f32, f64, i64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_each_operation_gives_what_eager_gives(dtype: torch.dtype) -> None:
    names = [name for name in OPS if name not in NEITHER]
    if dtype.is_floating_point:
        names = [name for name in names if name not in OF_INTEGERS]
    else:
        names = [name for name in names if name in OF_INTEGERS | OF_BOTH | REMAINDERS]
    if dtype == f64:
        # The interpreter does not fuse the multiplication and addition that make the remainder exact.
        names = [name for name in names if name not in REMAINDERS]
    wrong = [message for name in names if (message := _compare(name, dtype))]
    assert not wrong, "\n".join(wrong)


def _compare(name: str, dtype: torch.dtype) -> str | None:
    arity = OPS[name].arity
    numbers: list[Any] = [dtype.is_floating_point, NUMBERS, INTEGERS][2 - dtype.is_floating_point]
    if dtype == torch.uint8:
        numbers = [abs(n) for n in numbers]
    if name == "neg" and dtype == torch.uint8:
        return None
    cases = list(
        itertools.product(numbers, repeat=arity)
        if arity < 3
        else zip(numbers, numbers[::-1], numbers[1:], strict=False)
    )
    if not dtype.is_floating_point:
        cases = [c for c in cases if not (name in REMAINDERS | {"floordiv", "truncdiv"} and c[1] == 0)]
        cases = [c for c in cases if not (name.startswith("shift") and not 0 <= c[1] < 8)]
        cases = [c for c in cases if not (name == "pow" and c[1] < 0)]
    buffers = {f"x{k}": torch.tensor(column, dtype=dtype) for k, column in enumerate(zip(*cases, strict=True))}
    args: list[Value] = [load(f"x{k}", 1, dtype=dtype) for k in range(arity)]
    if name == "where":
        args[0] = op("gt", args[0], literal(0, dtype), dtype=bool_)
    result = bool_ if name in TO_BOOL else dtype
    buffers["y"] = torch.zeros(len(cases), dtype=result)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nest = Nest((len(cases),), (store("y", Call(name, tuple(args), result), 1),))
            # The exponent of e**50 as a power of two is rounded to float32: 2.6e-6 at most.
            by_power = name in ("exp", "expm1")
            check(nest, buffers, tolerance={f32: 3e-6 if by_power else 1e-6, f64: 1e-13}.get(dtype, 0))
    except AssertionError as error:
        return f"{name}: {str(error)[:2000]}"
    return None


def test_casts_and_roundings() -> None:
    buffers = tensors(x=100)
    x = load("x", 1)
    stores = []
    for at, dtype in enumerate([f64, i64, torch.int32, torch.int8, bool_]):
        buffers[f"y{at}"] = torch.zeros(100, dtype=dtype)
        stores.append(store(f"y{at}", op("to", x, dtype=dtype), 1))
        back = op("to", op("to", x, dtype=dtype), dtype=f32)
        buffers[f"z{at}"] = torch.zeros(100)
        stores.append(store(f"z{at}", op("add", back, Const(0.5, f32)), 1))
    for name in ("round_bfloat16", "round_float16"):
        buffers[name] = torch.zeros(100)
        stores.append(store(name, op(name, x), 1))
    for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16)):
        buffers[name] = torch.zeros(100, dtype=dtype)
        stores.append(store(name, x, 1))
    check(Nest((100,), tuple(stores)), buffers, tolerance=0)


def test_bools_in_memory_and_logic() -> None:
    generator = torch.Generator().manual_seed(0)
    buffers = {name: torch.rand(50, generator=generator) > 0.5 for name in ("p", "q", "y0", "y1", "y2", "y3")}
    p, q = load("p", 1, dtype=bool_), load("q", 1, dtype=bool_)
    stores = (
        store("y0", op("and", p, op("not", q, dtype=bool_), dtype=bool_), 1),
        store("y1", op("or", p, q, dtype=bool_), 1),
        store("y2", op("bitwise_xor", p, q, dtype=bool_), 1),
        store("y3", op("where", p, q, Const(True, bool_), dtype=bool_), 1),
    )
    check(Nest((50,), stores), buffers)


# ---- gathers, scatters, masks, positions, symbols


def test_gathers_of_rows() -> None:
    rows, width, table = 9, 20, 7
    buffers = tensors(x=rows * width, w=table * width, y=rows * width)
    buffers["at"] = torch.randint(0, table, (rows,))
    buffers["few"] = torch.randint(0, table, (rows,), dtype=torch.int32)
    at, few = load("at", 1, 0, dtype=i64), load("few", 1, 0, dtype=torch.int32)
    keep = op("ne", at, Const(3, i64), dtype=bool_)
    row = Load("w", Index([(1, 1)], 0, [(at, width)]), f32, keep, -2.0)
    other = Load("w", Index([(1, 1)], 0, [(few, width)]), f32)
    value = op("add", op("mul", row, load("x", width, 1)), other)
    check(Nest((rows, width), (store("y", value, width, 1),)), buffers)


def test_positions_are_integers_of_any_size() -> None:
    rows, width = 40, 70
    buffers: dict[str, torch.Tensor] = {name: torch.zeros(rows * width, dtype=i64) for name in ("a", "b", "c")}
    flat = op("add", op("mul", Position(0), Const(width, i64), dtype=i64), Position(1), dtype=i64)
    large = op("mul", flat, Const(2**30, i64), dtype=i64)
    down = op("sub", Position(1), Const(20, i64), dtype=i64)
    stores = (
        store("a", op("floordiv", flat, Const(7, i64), dtype=i64), width, 1),
        store("b", op("add", large, Const(1, i64), dtype=i64), width, 1),
        store("c", op("mod", down, Const(9, i64), dtype=i64), width, 1),
    )
    check(Nest((rows, width), stores), buffers)


def test_masked_elements_are_not_read() -> None:
    inside = op("lt", Position(0), Const(30, i64), dtype=bool_)
    x = Load("x", Index([(0, 1)]), f32, inside, 7.0)
    check(Nest((100,), (store("y", x, 1), Store("z", Index([(0, 1)]), x, inside))), tensors(x=30, y=100, z=30))


@pytest.mark.parametrize("seed", [0, 2**40 + 17])
def test_random_numbers_depend_on_seed_and_position_only(seed: int) -> None:
    n = 4000
    buffers = {"seed": torch.tensor([seed]), "u": torch.zeros(n), "again": torch.zeros(n), "n": torch.zeros(n)}
    key = Load("seed", Index(), i64)
    back = op("sub", Const(n - 1, i64), Position(0), dtype=i64)
    nest = Nest(
        (n,),
        (
            store("u", op("rand", key, Position(0)), 1),
            store("again", op("rand", key, back), 1),
            store("n", op("randn", key, Position(0)), 1),
        ),
    )
    made = generate(nest, {name: buffer.dtype for name, buffer in buffers.items()})
    compile_kernels([made.source], torch.device("cpu"))[0].launch(made.grid(), 0, *(buffers[b] for b in made.buffers))
    u, normal = buffers["u"], buffers["n"]
    assert torch.equal(u, buffers["again"].flip(0))
    assert u.min() >= 0
    assert u.max() < 1
    assert len(u.unique()) > 0.99 * n
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(u.var() - 1 / 12) < 0.005
    assert abs(normal.mean()) < 0.05
    assert abs(normal.var() - 1) < 0.08


@pytest.mark.parametrize(("rows", "width"), [(5, 40), (3, 5000), (1, 1)])
def test_symbolic_sizes_are_arguments(rows: int, width: int) -> None:
    n, c = sympy.symbols("n c")
    x = Load("x", Index([(0, c), (1, 1)]), f32)
    top = Reduce("max", (x,), [1], f32)
    total = Reduce("sum", (op("exp", op("sub", x, top)),), [1], f32)
    half = op("mul", op("to", Scalar(sympy.Symbol("lr"), f64)), Const(0.5, f32))
    nest = Nest(
        (n, c),
        (
            Store("y", Index([(0, c), (1, 1)]), op("mul", op("sub", x, total), half)),
            Store("z", Index([(0, 1)]), op("to", Scalar(n * c, i64))),
        ),
    )
    numbers = {"n": rows, "c": width, "lr": 3}
    made = check(nest, tensors(x=rows * width, y=rows * width, z=rows), numbers, tolerance=2e-4)
    assert generate(nest, dict.fromkeys("xyz", f32)).source is made.source
    flat = Nest((n, c), (Store("y", Index([(0, 1), (1, n)]), op("exp", x)),))
    check(flat, tensors(x=rows * width, y=rows * width), numbers)
    columns = Nest((n, c), (Store("y", Index([(1, 1)]), Reduce("sum", (x,), [0], f32)),))
    check(columns, tensors(x=rows * width, y=width), numbers, tolerance=2e-4)


def test_large_tensors_are_indexed_with_64_bits() -> None:
    small = generate(Nest((2**16, 2**14), (store("y", load("x", 2**14, 1), 2**14, 1),)), dict.fromkeys("xy", f32))
    large = generate(Nest((2**16, 2**15), (store("y", load("x", 2**15, 1), 2**15, 1),)), dict.fromkeys("xy", f32))
    assert "int64" not in small.source.text
    assert "tl.program_id(0).to(tl.int64)" in large.source.text


def test_a_tensor_that_later_passes_read_is_overwritten_in_the_last_pass() -> None:
    nest = softmax(2, 20001)
    stores = [Store("x", s.index, s.value) if s.buffer == "y" else s for s in nest.stores]
    check(Nest(nest.sizes, tuple(stores)), tensors(x=40002, lse=2))


# ---- what is refused


def test_unsupported_combinations_of_reductions_are_refused() -> None:
    x = load("x", 12, 4, 1)
    over = [Reduce("sum", (x,), axes, f32) for axes in ([0], [1], [2], [1, 2])]
    sizes = (5, 3, 4)

    def nest(*values: Value) -> Nest:
        axes = [sorted(value.axes) for value in values]
        return Nest(
            sizes,
            tuple(
                Store(f"y{k}", Index(zip(a, (4, 1), strict=False)), v)
                for k, (a, v) in enumerate(zip(axes, values, strict=True))
            ),
        )

    assert supports(nest(over[0])) is None
    assert supports(nest(over[0], over[2])) is None
    assert "3 different sets" in (supports(nest(*over[:3])) or "")
    assert "overlap" in (supports(nest(over[1], over[3])) or "")
    needs = Store("y", Index([(0, 12), (1, 4), (2, 1)]), op("mul", x, op("add", over[0], over[2])))
    assert "column's sum" in (supports(Nest(sizes, (needs,))) or "")
    with pytest.raises(UnsupportedNest, match="overlap"):
        generate(nest(over[1], over[3]), dict.fromkeys(["x", "y0", "y1"], f32))


# ---- any nest


@st.composite
def any_nest(draw: st.DrawFn) -> tuple[Nest, dict[str, int]]:
    """A nest of one of the shapes over random sizes, layouts and expressions, and the lengths of its buffers."""
    rank = draw(st.integers(1, 4))
    sizes = [draw(st.sampled_from([1, 2, 3, 5, 8, 17, 33])) for _ in range(rank)]
    while math.prod(sizes) > 3000:
        sizes[sizes.index(max(sizes))] = 2
    axes = list(range(rank))
    buffers: dict[str, int] = {}

    def layout(over: list[int]) -> tuple[Index, int]:
        """Memory for the axes ``over`` in some order, perhaps with gaps; and how long it is."""
        strides, step = {}, draw(st.sampled_from([1, 1, 1, 2]))
        for axis in draw(st.permutations(over)):
            strides[axis] = step
            step *= sizes[axis] + draw(st.sampled_from([0, 0, 0, 1]))
        offset = draw(st.sampled_from([0, 0, 3]))
        return Index(strides.items(), offset), step + offset

    def read(over: list[int]) -> Value:
        index, length = layout(over)
        name = f"x{len(buffers)}"
        buffers[name] = length
        if over and draw(st.integers(0, 5)) == 0:
            mask = op("lt", Position(over[0]), Const(draw(st.integers(0, 5)), i64), dtype=bool_)
            return Load(name, index, f32, mask, draw(st.sampled_from([0.0, 1.5])))
        return Load(name, index, f32)

    def mix(known: list[Value]) -> Value:
        a, b = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        kind = draw(st.sampled_from(["add", "sub", "mul", "maximum", "sigmoid", "tanh", "where", "position"]))
        if kind in ("sigmoid", "tanh"):
            return op(kind, a)
        if kind == "where":
            return op("where", op("lt", a, b, dtype=bool_), a, Const(0.25, f32))
        if kind == "position":
            return op("mul", a, op("to", op("add", Position(draw(st.sampled_from(axes))), Const(1, i64), dtype=i64)))
        return op(kind, a, b)

    def grown(known: list[Value], count: int) -> list[Value]:
        for _ in range(count):
            known = [*known, mix(known)]
        return known

    def some(most: int) -> list[int]:
        return sorted(draw(st.sets(st.sampled_from(axes), max_size=most)))

    known = grown([read(axes), *(read(some(rank)) for _ in range(draw(st.integers(0, 2))))], draw(st.integers(0, 4)))
    shape = draw(st.sampled_from(["pointwise", "reduce", "reduce", "twice", "mixed"]))
    kinds = st.sampled_from(["sum", "max", "min", "argmax", "welford", "online_softmax", "softmax"])

    def reduced(value: Value, over: list[int], kind: str) -> Value:
        if kind == "softmax":
            top = Reduce("max", (value,), over, f32)
            return Reduce("sum", (op("exp", op("sub", value, top)),), over, f32)
        if kind == "argmax":
            at = Position(over[-1])
            return op("to", ReductionResult(Reduce(kind, (value, at), over, f32), 1, i64)) if len(over) == 1 else value
        if kind in ("welford", "online_softmax"):
            return ReductionResult(Reduce(kind, (value,), over, f32), draw(st.integers(0, 1)), f32)
        return Reduce(kind, (value,), over, f32)

    columns: list[Value] = []
    if shape != "pointwise":
        over = some(rank) or [axes[-1]]
        for _ in range(2 if shape == "twice" else 1):
            # No axis is reduced twice: what was reduced along some of them varies along all of them again, or not used.
            once = [value for value in known if set(over) <= value.axes or not _reduces(value)]
            rows = [reduced(draw(st.sampled_from(once)), over, draw(kinds)) for _ in range(draw(st.integers(1, 2)))]
            known = grown([*known, *rows], draw(st.integers(0, 3)))
        rest = [axis for axis in axes if axis not in over]
        if shape == "mixed" and rest:
            across = sorted(draw(st.sets(st.sampled_from(rest), min_size=1)))
            columns = [Reduce(draw(st.sampled_from(["sum", "max"])), (known[-1],), across, f32)]
    stores = []
    for value in [known[-1], draw(st.sampled_from(known)), *columns]:
        index, length = layout(sorted(value.axes))
        name = f"y{len(stores)}"
        buffers[name] = length
        stores.append(Store(name, index, value))
    return Nest(tuple(sizes), tuple(stores)), buffers


def _reduces(value: Value) -> bool:
    return any(isinstance(part, Reduce) for part in ordered([value]))


SETTINGS = settings(SEARCH, max_examples=60)


def run(nest: Nest, lengths: dict[str, int]) -> None:
    if supports(nest) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(nest, tensors(**lengths), tolerance=1e-3)


@given(any_nest())
@settings(SETTINGS)
def test_random_nests_equal_the_reference(case: tuple[Nest, dict[str, int]]) -> None:
    run(*case)


@given(any_nest())
@settings(SETTINGS)
@pytest.mark.usefixtures("short_rows")
def test_random_nests_equal_the_reference_in_loops(case: tuple[Nest, dict[str, int]]) -> None:
    run(*case)
