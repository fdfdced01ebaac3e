"""Loop nests that tests of the inductor share: short ways to write one, and some that every model has."""

from __future__ import annotations

from typing import Any

import torch

from weft.inductor.loop_ir.ir import Call, Const, Index, Load, Nest, Position, Reduce, Store, Value

f32 = torch.float32


def load(buffer: str, *strides: int, offset: int = 0, dtype: torch.dtype = f32) -> Load:
    """An element of a buffer that has a stride for each axis."""
    return Load(buffer, Index(list(enumerate(strides)), offset), dtype)


def store(buffer: str, value: Value, *strides: int, offset: int = 0, **kwargs: Any) -> Store:
    return Store(buffer, Index(list(enumerate(strides)), offset), value, **kwargs)


def op(name: str, *args: Value, dtype: torch.dtype = f32) -> Call:
    return Call(name, args, dtype)


def rms_norm(rows: int, width: int) -> Nest:
    x, w = load("x", width, 1), load("w", 0, 1)
    mean = op("div", Reduce("sum", (op("mul", x, x),), [1], f32), Const(float(width), f32))
    scale = op("rsqrt", op("add", mean, Const(1e-6, f32)))
    return Nest((rows, width), (store("y", op("mul", op("mul", x, scale), w), width, 1), store("scale", scale, 1, 0)))


def softmax(rows: int, width: int) -> Nest:
    x = load("x", width, 1)
    top = Reduce("max", (x,), [1], f32)
    apart = op("exp", op("sub", x, top))
    total = Reduce("sum", (apart,), [1], f32)
    return Nest(
        (rows, width),
        (store("y", op("div", apart, total), width, 1), store("lse", op("add", op("log", total), top), 1, 0)),
    )


def layer_norm_backward(parts: int, rows: int, width: int) -> Nest:
    """dx and, for each part of the rows, the sums for the weight and the bias."""
    x, dy = load("x", rows * width, width, 1), load("dy", rows * width, width, 1)
    mean, rstd, w = load("mean", rows, 1), load("rstd", rows, 1), load("w", 0, 0, 1)
    normal = op("mul", op("sub", x, mean), rstd)
    scaled = op("mul", dy, w)
    share = Const(1.0 / width, f32)
    along = op("mul", Reduce("sum", (op("mul", normal, scaled),), [2], f32), share)
    level = op("mul", Reduce("sum", (scaled,), [2], f32), share)
    dx = op("mul", op("sub", scaled, op("add", op("mul", normal, along), level)), rstd)
    return Nest(
        (parts, rows, width),
        (
            store("dx", dx, rows * width, width, 1),
            store("dw", Reduce("sum", (op("mul", dy, normal),), [1], f32), width, 0, 1),
            store("db", Reduce("sum", (dy,), [1], f32), width, 0, 1),
        ),
    )


def layer_norm_backward_past_a_residual(parts: int, rows: int, width: int) -> Nest:
    """As :func:`layer_norm_backward`, but mean and deviation are computed of the row, and what comes past the norm is
    added."""
    where = [rows * width, width, 1]
    x, dy, past, w = load("x", *where), load("dy", *where), load("past", *where), load("w", 0, 0, 1)
    share = Const(1.0 / width, f32)
    apart = op("sub", x, op("mul", Reduce("sum", (x,), [2], f32), share))
    variance = op("mul", Reduce("sum", (op("mul", apart, apart),), [2], f32), share)
    rstd = op("rsqrt", op("add", variance, Const(1e-5, f32)))
    normal, scaled = op("mul", apart, rstd), op("mul", dy, w)
    along = op("mul", Reduce("sum", (op("mul", scaled, normal),), [2], f32), share)
    level = op("mul", Reduce("sum", (scaled,), [2], f32), share)
    dx = op("add", op("mul", rstd, op("sub", op("sub", scaled, level), op("mul", normal, along))), past)
    sums = [Reduce("sum", (value,), [1], f32) for value in (op("mul", dy, normal), dy)]
    return Nest(
        (parts, rows, width),
        (
            store("dx", dx, *where),
            store("dw", sums[0], width, 0, 1),
            store("db", sums[1], width, 0, 1),
            store("rstd", rstd, rows, 1),
        ),
    )


def rms_norm_backward_past_a_residual(parts: int, rows: int, width: int) -> Nest:
    """As :func:`layer_norm_backward_past_a_residual`."""
    where = [rows * width, width, 1]
    x, dy, past, w = load("x", *where), load("dy", *where), load("past", *where), load("w", 0, 0, 1)
    share = Const(1.0 / width, f32)
    mean = op("mul", Reduce("sum", (op("mul", x, x),), [2], f32), share)
    rstd = op("rsqrt", op("add", mean, Const(1e-5, f32)))
    scaled, normal = op("mul", dy, w), op("mul", x, rstd)
    along = op("mul", Reduce("sum", (op("mul", scaled, normal),), [2], f32), share)
    dx = op("add", op("mul", rstd, op("sub", scaled, op("mul", normal, along))), past)
    weight = Reduce("sum", (op("mul", dy, normal),), [1], f32)
    return Nest((parts, rows, width), (store("dx", dx, *where), store("dw", weight, width, 0, 1)))


def cross_entropy(rows: int, width: int) -> Nest:
    """Each row's loss for its label, and the gradient of the sum of losses."""
    x, label = load("x", width, 1), load("label", 1, 0, dtype=torch.int64)
    top = Reduce("max", (x,), [1], f32)
    apart = op("exp", op("sub", x, top))
    total = Reduce("sum", (apart,), [1], f32)
    chosen = Load("x", Index([(0, width)], 0, [(label, 1)]), f32)
    loss = op("sub", op("add", op("log", total), top), chosen)
    hit = op("eq", Position(1), label, dtype=torch.bool)
    gradient = op("sub", op("div", apart, total), op("where", hit, Const(1.0, f32), Const(0.0, f32)))
    return Nest((rows, width), (store("loss", loss, 1, 0), store("dx", gradient, width, 1)))


def swiglu(rows: int, width: int) -> Nest:
    gate, up = load("gate", width, 1), load("up", width, 1)
    silu = op("mul", gate, op("sigmoid", gate))
    return Nest((rows, width), (store("y", op("mul", silu, up), width, 1),))


def rope(positions: int, heads: int, size: int) -> Nest:
    """Both halves of each head, rotated by tables that have a row for each position."""
    half, where, table = size // 2, [heads * size, size, 1], [size, 0, 1]
    stores = []
    for at, sign in ((0, "sub"), (half, "add")):
        cos, sin = load("cos", *table, offset=at), load("sin", *table, offset=at)
        rotated = op("mul", load("x", *where, offset=half - at), sin)
        stores.append(store("y", op(sign, op("mul", load("x", *where, offset=at), cos), rotated), *where, offset=at))
    return Nest((positions, heads, half), tuple(stores))


def gelu_backward_and_sum(parts: int, rows: int, width: int) -> Nest:
    """The gradient of a sum with a bias, one exponential an element, and its columns' sums over parts of the rows."""
    where = [rows * width, width, 1]
    x = op("add", load("x", *where), load("bias", 0, 0, 1))
    square = op("mul", x, x)
    share = op("sigmoid", op("mul", x, op("add", op("mul", square, Const(0.0714, f32)), Const(1.596, f32))))
    inner = op("add", op("mul", square, Const(0.2141, f32)), Const(1.596, f32))
    slope = op("mul", op("mul", x, op("sub", share, op("mul", share, share))), inner)
    dx = op("mul", load("dy", *where), op("add", share, slope))
    total = Reduce("sum", (dx,), [1], f32)
    return Nest((parts, rows, width), (store("dx", dx, *where), store("db", total, width, 0, 1)))


def transpose(batch: int, rows: int, width: int) -> Nest:
    whole = rows * width
    return Nest((batch, rows, width), (store("y", load("x", whole, 1, rows), whole, width, 1),))


def column_sum(parts: int, rows: int, width: int) -> Nest:
    total = Reduce("sum", (load("x", rows * width, width, 1),), [1], f32)
    return Nest((parts, rows, width), (store("y", total, width, 0, 1),))


def dropout_add(rows: int, width: int) -> Nest:
    """``residual + dropout(x)`` with a tenth of the elements dropped."""
    at = op("add", op("mul", Position(0), Const(width, torch.int64), dtype=torch.int64), Position(1), dtype=torch.int64)
    drop = op("lt", op("rand", Load("seed", Index(), torch.int64), at), Const(0.1, f32), dtype=torch.bool)
    kept = op("where", drop, Const(0.0, f32), op("mul", load("x", width, 1), Const(1 / 0.9, f32)))
    return Nest((rows, width), (store("y", op("add", load("residual", width, 1), kept), width, 1),))
