"""Numbered nests: equal loops are one object, whatever the names of their buffers."""

from __future__ import annotations

import torch

from weft.inductor.loop_ir.ir import Call, Index, Load, Nest, Store, Value
from weft.inductor.loop_ir.numbering import buffers_of, numbered, renamed

ROW = Index([(0, 1)])


def load(buffer: str, index: Index = ROW) -> Load:
    return Load(buffer, index, torch.float32)


def nest(result: str, op: str, *operands: Value) -> Nest:
    return Nest((8,), (Store(result, ROW, Call(op, operands, torch.float32)),))


def test_equal_loops_over_other_buffers_have_one_form() -> None:
    one, two = numbered(nest("y", "add", load("x"), load("w"))), numbered(nest("z", "add", load("y"), load("v")))
    assert one.form == two.form
    assert (one.buffers, two.buffers) == (("x", "w", "y"), ("y", "v", "z"))


def test_one_buffer_read_twice_is_another_loop_than_two_buffers() -> None:
    assert (
        numbered(nest("y", "mul", load("x"), load("x"))).form != numbered(nest("y", "mul", load("x"), load("w"))).form
    )


def test_operands_in_another_order_are_the_same_loop_over_buffers_in_another_order() -> None:
    one, two = numbered(nest("y", "sub", load("a"), load("b"))), numbered(nest("y", "sub", load("b"), load("a")))
    assert one.form == two.form
    assert one.buffers != two.buffers


def test_renaming_gives_the_nest_back() -> None:
    # An index and a mask that are loads, and a buffer that is called like a numbered one.
    picked = Load("table", Index([(0, 4)], 1, [(load("b0"), 1)]), torch.float32, load("mask"))
    whole = nest("b1", "add", picked, load("b7"))
    form, buffers = numbered(whole)
    assert buffers_of(form) == [f"b{at}" for at in range(len(buffers))]
    assert renamed(form, dict(zip(buffers_of(form), buffers, strict=True))) == whole
