"""The ATen executor: the eager step's bits, in the eager step's memory."""

from __future__ import annotations

import operator
import re
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from step_builder import StepBuilder
from weft import knobs
from weft.capture.record.functional_ops import Functionalized
from weft.capture.step_interface import Role
from weft.errors import MalformedGraph, StepFailed, UnknownOption
from weft.inductor.runtime import aten as aten_executor
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten


def clones(source: str) -> int:
    return source.count("aten_clone(")


def copies(source: str) -> int:
    return source.count("aten_copy_(")


def tensors(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


# ---- writing in place


def test_a_temporary_is_written_in_place() -> None:
    x, y = tensors(2, 4)
    b = StepBuilder()
    in_x, in_y = b.input(x), b.input(y)
    t = b.call(aten.mul.Tensor, in_x, in_y)
    b.returns(b.write(aten.add_.Tensor, t, in_y))
    program = compile_aten(b.build())
    assert clones(program.source) == 0
    assert "aten_add__Tensor(mul_tensor" in program.source
    assert torch.equal(program(x, y)[0], x * y + y)


def test_a_temporary_that_is_read_later_is_not_overwritten() -> None:
    x, y = tensors(2, 4)
    b = StepBuilder()
    in_x, in_y = b.input(x), b.input(y)
    t = b.call(aten.mul.Tensor, in_x, in_y)
    new = b.write(aten.add_.Tensor, t, in_y)
    b.returns(new, b.call(aten.neg.default, t))
    program = compile_aten(b.build())
    assert clones(program.source) == 1
    new_value, old = program(x, y)
    assert torch.equal(new_value, x * y + y)
    assert torch.equal(old, -(x * y))


def test_a_temporary_whose_old_value_is_returned_is_not_overwritten() -> None:
    (x,) = tensors(1, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    b.returns(b.write(aten.add_.Tensor, t, t), t)
    new, old = compile_aten(b.build())(x)
    assert torch.equal(old, x.exp())
    assert torch.equal(new, x.exp() * 2)


def test_a_view_read_later_protects_its_base() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    row = b.call(aten.select.int, t, 0, 1)
    new = b.write(aten.zero_.default, t)
    b.returns(b.call(aten.neg.default, row), new)
    row_value, new_value = compile_aten(b.build())(x)
    assert torch.equal(row_value, -x.exp()[1])
    assert torch.equal(new_value, torch.zeros(4, 4))


def test_an_operand_that_overlaps_the_written_tensor_as_in_eager_is_written_in_place() -> None:
    """`t[1].copy_(t[0])`: eager read and wrote one memory, so it may be done again."""
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    row = b.write(aten.copy_.default, b.call(aten.select.int, t, 0, 1), b.call(aten.select.int, t, 0, 0))
    new = b.call(aten.select_scatter.default, t, row, 0, 1, val=t.meta["val"])
    b.returns(b.call(aten.sum.dim_IntList, new, [1]))
    program = compile_aten(b.build())
    assert clones(program.source) == 0
    eager = x.exp()
    eager[1].copy_(eager[0])
    assert torch.equal(program(x)[0], eager.sum(1))


def test_an_operand_that_a_pass_made_overlap_the_written_tensor_forces_a_clone() -> None:
    """Two values of their own in eager: here one may be a view of the other, and must be read as it was."""
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    with b.mode:
        turned = b.call(aten.t.default, t, val=torch.empty(4, 4))
    b.returns(b.write(aten.add_.Tensor, t, turned))
    assert torch.equal(compile_aten(b.build())(x)[0], x.exp() + x.exp().t())


def test_an_input_that_is_not_updated_is_never_written() -> None:
    (x,) = tensors(1, 4)
    before = x.clone()
    b = StepBuilder()
    b.returns(b.write(aten.add_.Tensor, b.input(x), 1))
    assert torch.equal(compile_aten(b.build())(x)[0], before + 1)
    assert torch.equal(x, before)


def test_a_chain_on_an_input_is_written_in_place() -> None:
    """What an optimizer does: weight decay, then the step, then the parameter is the update of itself."""
    p, g = tensors(2, 4)
    expected = p * 0.9 - 0.1 * g
    pointer = p.data_ptr()
    b = StepBuilder()
    in_p, in_g = b.input(p), b.input(g, Role.GRADIENT)
    decayed = b.write(aten.mul_.Tensor, in_p, 0.9)
    stepped = b.write(aten.add_.Tensor, decayed, in_g, alpha=-0.1)
    b.update(in_p, stepped)
    program = compile_aten(b.build())
    assert clones(program.source) == copies(program.source) == 0
    assert program(p, g) == []
    torch.testing.assert_close(p, expected)
    assert p.data_ptr() == pointer


def test_the_old_value_of_an_updated_input_read_later() -> None:
    p, g = tensors(2, 4)
    old = p.clone()
    b = StepBuilder()
    in_p, in_g = b.input(p), b.input(g)
    new = b.write(aten.add_.Tensor, in_p, in_g)
    b.update(in_p, new)
    b.returns(b.call(aten.neg.default, in_p))
    assert torch.equal(compile_aten(b.build())(p, g)[0], -old)
    assert torch.equal(p, old + g)


def test_mutating_operations_without_a_functional_form() -> None:
    x, weight = tensors(2, 3)
    x = torch.stack([x, weight])
    mean, var = torch.zeros(3), torch.ones(3)
    eager_mean, eager_var = mean.clone(), var.clone()
    expected = torch.nn.functional.batch_norm(x, eager_mean, eager_var, weight, None, True)
    b = StepBuilder()
    in_x, in_w, in_mean, in_var = b.input(x), b.input(weight), b.input(mean), b.input(var)
    args = (in_x, in_w, None, in_mean, in_var, True, 0.1, 1e-5)
    out, _, _, new_mean, new_var = b.write(aten.native_batch_norm.default, *args)
    assert isinstance(next(n for n in b.graph.nodes if n.op == "call_function").target, Functionalized)
    b.update(in_mean, new_mean)
    b.update(in_var, new_var)
    b.returns(out)
    program = compile_aten(b.build())
    assert clones(program.source) == copies(program.source) == 0
    assert torch.equal(program(x, weight, mean, var)[0], expected)
    assert torch.equal(mean, eager_mean)
    assert torch.equal(var, eager_var)


# ---- lists


def test_multi_tensor_operations_decide_for_each_tensor() -> None:
    a, c = tensors(2, 4)
    old_a, old_c = a.clone(), c.clone()
    b = StepBuilder()
    in_a, in_c = b.input(a), b.input(c)
    new_a, new_c = b.write(aten._foreach_add_.Scalar, [in_a, in_c], 1)
    b.update(in_a, new_a)
    b.update(in_c, new_c)
    b.returns(b.call(aten.neg.default, in_c))
    program = compile_aten(b.build())
    assert clones(program.source) == 1
    assert torch.equal(program(a, c)[0], -old_c)
    assert torch.equal(a, old_a + 1)
    assert torch.equal(c, old_c + 1)


def adamw_step(b: StepBuilder, params: list[Any], grads: list[Any], states: list[list[Any]], lr: Any) -> list[Any]:
    steps = b.write(aten._foreach_add_.Scalar, states[2], 1)
    updated = b.write(
        aten._fused_adamw_.default,
        params,
        grads,
        states[0],
        states[1],
        [],
        steps,
        lr=lr,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return [*updated[0], *updated[2], *updated[3], *steps]


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_fused_adamw(keep_gradients: bool) -> None:
    """Equal to torch.optim.AdamW over several steps with a new lr each, nothing cloned, nothing copied."""
    params = tensors(3, 4)
    eager = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(eager, lr=0.0, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    states = [
        [torch.zeros(4) for _ in params],
        [torch.zeros(4) for _ in params],
        [torch.zeros(()) for _ in params],
    ]
    data = tensors(1, 4)[0]

    b = StepBuilder()
    in_lr = b.input(0.1, Role.SCALAR)
    in_data = b.input(data, Role.BATCH)
    in_params = [b.input(p) for p in params]
    in_states = [[b.input(s, Role.OPTIMIZER_STATE) for s in state] for state in states]
    grads = [b.call(aten.mul.Tensor, p, in_data) for p in in_params]
    new = adamw_step(b, in_params, grads, in_states, in_lr)
    for old, value in zip([*in_params, *in_states[0], *in_states[1], *in_states[2]], new, strict=True):
        b.update(old, value)
    if keep_gradients:
        for grad in grads:
            b.create(grad)
    program = compile_aten(b.build())
    assert clones(program.source) == copies(program.source) == 0

    for lr in (0.1, 0.05, 0.2):
        for p in eager:
            p.grad = (p * data).detach()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        created = program(lr, data, *params, *states[0], *states[1], *states[2])
        assert all(torch.equal(p, e) for p, e in zip(params, eager, strict=True))
        expected = [e.grad for e in eager if e.grad is not None] if keep_gradients else []
        assert all(torch.equal(g, e) for g, e in zip(created, expected, strict=True))


def test_a_tensor_twice_in_a_list_is_written_in_clones() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    rows = [b.call(aten.select.int, t, 0, at) for at in (0, 1)]
    new = b.write(aten._foreach_add_.Scalar, rows, 1)
    b.returns(*new, b.call(aten.sum.default, t))
    first, second, total = compile_aten(b.build())(x)
    assert torch.equal(first, x.exp()[0] + 1)
    assert torch.equal(second, x.exp()[1] + 1)
    assert torch.equal(total, x.exp().sum())


# ---- writes through views


def test_a_write_through_a_view_of_an_input() -> None:
    """`p[0:2].add_(1)`: the graph scatters the rows back into p, in memory they are there already."""
    (p,) = tensors(1, 4, 4)
    expected = p.clone()
    expected[0:2].add_(1)
    pointer = p.data_ptr()
    b = StepBuilder()
    in_p = b.input(p)
    rows = b.write(aten.add_.Tensor, b.call(aten.slice.Tensor, in_p, 0, 0, 2), 1)
    new = b.call(aten.slice_scatter.default, in_p, rows, 0, 0, 2, 1, val=in_p.meta["val"])
    b.update(in_p, new)
    b.returns(b.call(aten.sum.default, new))
    program = compile_aten(b.build())
    assert clones(program.source) == copies(program.source) == 0
    assert "scatter" not in program.source
    assert torch.equal(program(p)[0], expected.sum())
    assert torch.equal(p, expected)
    assert p.data_ptr() == pointer


def test_a_write_through_a_view_of_a_view() -> None:
    (p,) = tensors(1, 4, 4)
    expected = p.clone()
    expected.t()[1, 0:2].mul_(3)
    b = StepBuilder()
    in_p = b.input(p)
    turned = b.call(aten.t.default, in_p)
    row = b.call(aten.select.int, turned, 0, 1)
    part = b.call(aten.slice.Tensor, row, 0, 0, 2)
    new_part = b.write(aten.mul_.Tensor, part, 3)
    new_row = b.call(aten.slice_scatter.default, row, new_part, 0, 0, 2, 1, val=row.meta["val"])
    new_turned = b.call(aten.select_scatter.default, turned, new_row, 0, 1, val=turned.meta["val"])
    b.update(in_p, b.call(aten.t.default, new_turned, val=in_p.meta["val"]))
    program = compile_aten(b.build())
    assert program.source.count("scatter") == copies(program.source) == clones(program.source) == 0
    program(p)
    assert torch.equal(p, expected)


def test_a_write_through_a_view_whose_base_is_read_later_leaves_the_base() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    rows = b.write(aten.add_.Tensor, b.call(aten.slice.Tensor, t, 0, 0, 2), 1)
    new = b.call(aten.slice_scatter.default, t, rows, 0, 0, 2, 1, val=t.meta["val"])
    b.returns(new, b.call(aten.neg.default, t))
    new_value, old = compile_aten(b.build())(x)
    expected = x.exp()
    assert torch.equal(old, -expected)
    expected[0:2].add_(1)
    assert torch.equal(new_value, expected)


def test_a_scatter_of_a_written_view_somewhere_else_needs_the_old_base() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    rows = b.write(aten.add_.Tensor, b.call(aten.slice.Tensor, t, 0, 0, 2), 1)
    b.returns(b.call(aten.slice_scatter.default, t, rows, 0, 2, 4))
    (moved,) = compile_aten(b.build())(x)
    assert torch.equal(moved, torch.cat([x.exp()[:2], x.exp()[:2] + 1]))


def test_two_writes_that_are_each_written_back_into_the_old_base() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    first = b.write(aten.add_.Tensor, b.call(aten.select.int, t, 0, 0), 1)
    once = b.call(aten.select_scatter.default, t, first, 0, 0, val=t.meta["val"])
    second = b.write(aten.add_.Tensor, b.call(aten.select.int, once, 0, 1), 1)
    other = b.call(aten.select_scatter.default, t, second, 0, 1, val=t.meta["val"])
    b.returns(once, other)
    expected = x.exp(), x.exp()
    expected[0][0].add_(1)
    expected[1][1].add_(1)
    assert all(torch.equal(a, e) for a, e in zip(compile_aten(b.build())(x), expected, strict=True))


def test_two_views_in_one_multi_tensor_write_are_written_back_one_after_the_other() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    rows = [b.call(aten.select.int, t, 0, at) for at in (0, 1)]
    first, second = b.write(aten._foreach_add_.Scalar, rows, 1)
    once = b.call(aten.select_scatter.default, t, first, 0, 0, val=t.meta["val"])
    total = b.call(aten.sum.dim_IntList, once, [1])
    b.returns(total, b.call(aten.select_scatter.default, once, second, 0, 1, val=t.meta["val"]))
    got_total, twice = compile_aten(b.build())(x)
    expected = x.exp()
    expected[0].add_(1)
    assert torch.equal(got_total, expected.sum(1))
    expected[1].add_(1)
    assert torch.equal(twice, expected)


def test_the_users_own_scatter_of_a_written_view_is_a_new_tensor() -> None:
    """`z = torch.slice_scatter(t, rows, 0, 2, 4)` after `rows.add_(1)` leaves t as the write made it."""
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    t = b.call(aten.exp.default, b.input(x))
    rows = b.write(aten.add_.Tensor, b.call(aten.slice.Tensor, t, 0, 0, 2), 1)
    t_new = b.call(aten.slice_scatter.default, t, rows, 0, 0, 2, 1, val=t.meta["val"])
    b.returns(b.call(aten.slice_scatter.default, t_new, rows, 0, 2, 4), t_new)
    moved, new = compile_aten(b.build())(x)
    expected = x.exp()
    expected[0:2].add_(1)
    assert torch.equal(new, expected)
    assert torch.equal(moved, torch.cat([expected[:2], expected[:2]]))


# ---- updates


def test_two_inputs_that_exchange_values_are_updated() -> None:
    a, c = tensors(2, 4)
    old_a, old_c = a.clone(), c.clone()
    b = StepBuilder()
    in_a, in_c = b.input(a), b.input(c)
    b.update(in_a, in_c)
    b.update(in_c, in_a)
    compile_aten(b.build())(a, c)
    assert torch.equal(a, old_c)
    assert torch.equal(c, old_a)


def test_an_update_with_a_view_of_the_input_itself() -> None:
    (a,) = tensors(1, 4, 4)
    old = a.clone()
    b = StepBuilder()
    in_a = b.input(a)
    b.update(in_a, b.call(aten.t.default, in_a))
    compile_aten(b.build())(a)
    assert torch.equal(a, old.t())


def test_an_update_with_another_input_that_is_updated_in_place() -> None:
    """`a.copy_(c)` and then `c.add_(1)`."""
    a, c = tensors(2, 4)
    old = c.clone()
    b = StepBuilder()
    in_a, in_c = b.input(a), b.input(c)
    b.update(in_a, in_c)
    b.update(in_c, b.write(aten.add_.Tensor, in_c, 1))
    compile_aten(b.build())(a, c)
    assert torch.equal(a, old)
    assert torch.equal(c, old + 1)


def test_a_computed_update_is_copied_as_soon_as_the_old_value_is_dead() -> None:
    """Parameters replaced by computed ones, one after the other: never two new ones at a time."""
    a, c = tensors(2, 4)
    expected = a - 0.1, c - 0.1
    b = StepBuilder()
    in_a, in_c = b.input(a), b.input(c)
    b.update(in_a, b.call(aten.sub.Tensor, in_a, 0.1))
    b.update(in_c, b.call(aten.sub.Tensor, in_c, 0.1))
    source = (program := compile_aten(b.build())).source
    assert re.findall(r"aten_(sub|copy_)", source) == ["sub", "copy_", "sub", "copy_"]
    program(a, c)
    assert torch.equal(a, expected[0])
    assert torch.equal(c, expected[1])


def test_a_returned_parameter_is_the_parameter() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    b = StepBuilder()
    in_p = b.input(p.detach())
    new = b.write(aten.add_.Tensor, in_p, 1)
    b.update(in_p, new)
    b.returns(new, b.call(aten.neg.default, in_p))
    returned, old = compile_aten(b.build())(p)
    assert returned is p
    assert torch.equal(old, torch.full((4,), -1.0))
    assert torch.equal(p.detach(), torch.full((4,), 2.0))


def test_a_returned_value_that_also_updates_an_input_is_not_the_input() -> None:
    """`self.last_loss.copy_(loss); return loss`: the caller may keep the loss while the buffer goes on."""
    x, last = torch.ones(()), torch.zeros(())
    b = StepBuilder()
    in_x, in_last = b.input(x), b.input(last)
    loss = b.call(aten.mul.Tensor, in_x, 3)
    b.update(in_last, loss)
    b.returns(loss)
    program = compile_aten(b.build())
    (first,) = program(x, last)
    program(x * 2, last)
    assert first.item() == 3
    assert last.item() == 6


def test_the_old_value_of_a_copied_input_can_be_returned() -> None:
    a, c = tensors(2, 4)
    old = a.clone()
    b = StepBuilder()
    in_a, in_c = b.input(a), b.input(c)
    b.update(in_a, b.call(aten.add.Tensor, in_a, in_c))
    b.returns(in_a, b.call(aten.slice.Tensor, in_a, 0, 0, 2))
    whole, part = compile_aten(b.build())(a, c)
    assert torch.equal(whole, old)
    assert torch.equal(part, old[:2])
    assert torch.equal(a, old + c)


def test_inputs_that_share_memory_are_not_written_in_place() -> None:
    whole = torch.arange(4.0)
    b = StepBuilder()
    in_whole = b.input(whole)
    with b.mode:
        fake_part = in_whole.meta["val"][:2]
    in_part = b.input(whole[:2])
    in_part.meta["val"] = fake_part
    new = b.write(aten.add_.Tensor, in_part, 1)
    b.returns(b.call(aten.neg.default, in_whole))
    b.update(in_part, new)
    (returned,) = compile_aten(b.build())(whole, whole[:2])
    assert torch.equal(returned, -torch.arange(4.0))
    assert torch.equal(whole, torch.tensor([1.0, 2.0, 2.0, 3.0]))


def test_an_update_of_another_dtype_is_refused() -> None:
    b = StepBuilder()
    in_p = b.input(torch.ones(4))
    b.update(in_p, b.call(aten._to_copy.default, in_p, dtype=torch.float64))
    with pytest.raises(MalformedGraph, match="in_0"):
        compile_aten(b.build())


# ---- the rest of a program


def test_random_numbers_come_in_the_order_of_the_graph() -> None:
    (x,) = tensors(1, 100)
    b = StepBuilder()
    in_x = b.input(x)
    first, mask = b.pick(b.call(aten.native_dropout.default, in_x, 0.5, True))
    noise = b.write(aten.normal_.default, b.call(aten.empty_like.default, in_x))
    b.returns(b.call(aten.mul.Tensor, first, noise), mask, b.call(aten.rand_like.default, in_x))
    program = compile_aten(b.build())
    torch.manual_seed(3)
    got = program(x)
    torch.manual_seed(3)
    dropped, keep = torch.native_dropout(x, 0.5, True)
    expected = [dropped * torch.empty_like(x).normal_(), keep, torch.rand_like(x)]
    assert all(torch.equal(a, e) for a, e in zip(got, expected, strict=True))


def test_values_are_freed_at_their_last_use() -> None:
    (x,) = tensors(1, 4)
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[list[bool]] = []

    def watch(*given: torch.Tensor) -> None:
        seen.append([ref() is not None for ref in alive])
        alive.extend(weakref.ref(t) for t in given)

    b = StepBuilder()
    first = b.call(aten.exp.default, b.input(x))
    b.effect(watch, first)
    parts = b.pick(b.call(aten.split.Tensor, first, 2))
    b.effect(watch, *parts)
    second = b.call(aten.neg.default, parts[1])
    b.effect(watch, second)
    b.returns(b.call(aten.sum.default, second))
    compile_aten(b.build())(x)
    # A view keeps its base; once the parts are gone, so is what they were parts of.
    assert seen == [[], [True], [False, False, False]]


def test_unused_values_are_freed_at_once() -> None:
    (x,) = tensors(1, 8)
    b = StepBuilder()
    values, _ = b.pick(b.call(aten.topk.default, b.input(x), 3))
    b.returns(b.call(aten.sum.default, values))
    program = compile_aten(b.build())
    assert "del getitem_1" in program.source
    assert torch.equal(program(x)[0], x.topk(3).values.sum())


def test_views_that_nothing_reads_are_left_out() -> None:
    (x,) = tensors(1, 8)
    b = StepBuilder()
    in_x = b.input(x)
    b.call(aten.slice.Tensor, in_x, 0, 0, 2)
    b.returns(b.call(aten.neg.default, in_x))
    assert "slice" not in compile_aten(b.build()).source


def test_programs_compute_with_numbers_and_symbolic_sizes() -> None:
    (x,) = tensors(1, 4, 6)
    b = StepBuilder()
    in_x, in_scale = b.input(x), b.input(2.0, Role.SCALAR)
    rows = b.call(aten.sym_size.int, in_x, 0)
    half = b.call(operator.floordiv, rows, 2)
    top = b.call(aten.slice.Tensor, in_x, 0, 0, half, val=b.mode.from_tensor(x[:2]))
    masked = b.call(aten.masked_fill.Scalar, top, b.call(aten.lt.Scalar, top, 0), float("-inf"))
    b.returns(b.call(aten.mul.Tensor, masked, in_scale), half, "text", None, 1.5)
    program = compile_aten(b.build())
    out, number, text, nothing, constant = program(x, 3.0)
    assert torch.equal(out, x[:2].masked_fill(x[:2] < 0, float("-inf")) * 3.0)
    assert (number, text, nothing, constant) == (2, "text", None, 1.5)


def test_the_device_can_be_chosen_later() -> None:
    b = StepBuilder()
    b.returns(b.call(aten.zeros.default, [2], device=torch.device("cpu")))
    step = b.build()
    assert compile_aten(step)()[0].device.type == "cpu"
    assert compile_aten(step, device=torch.device("meta"))()[0].device.type == "meta"


def test_the_callers_autocast_changes_nothing() -> None:
    (x,) = tensors(1, 4, 4)
    b = StepBuilder()
    in_x = b.input(x)
    b.returns(b.call(aten.mm.default, in_x, in_x))
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = compile_aten(b.build())(x)
    assert out.dtype == torch.float32


# ---- errors


def failing_program() -> Any:
    b = StepBuilder()
    in_x = b.input(torch.ones(4), Role.BATCH)
    doubled = b.call(aten.mul.Tensor, in_x, 2)
    b.returns(b.call(aten.view.default, doubled, [2, 2]))  # the failing line
    return compile_aten(b.build())


def test_an_error_names_the_users_line() -> None:
    program = failing_program()
    with pytest.raises(StepFailed, match=r"aten\.view\.default failed") as caught:
        program(torch.ones(5))
    lines = Path(__file__).read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if "the failing line" in text)
    assert f"test_aten.py:{line} in failing_program" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    shown = "".join(traceback.format_exception(caught.value))
    assert "aten_view(mul_tensor" in shown


def test_the_data_are_blamed_where_the_operation_fails_by_itself_too() -> None:
    with pytest.raises(StepFailed, match="by itself fails on these operands too") as caught:
        failing_program()(torch.ones(5))
    assert caught.value.fails_eagerly


def test_weft_is_blamed_where_the_operation_by_itself_accepts_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The written program asks for another view than the graph: a fault of weft's."""
    write = aten_executor.write_program

    def wrongly(*args: Any) -> Any:
        source, names, lines = write(*args)
        assert "[2, 2]" in source
        return source.replace("[2, 2]", "[3, 3]"), names, lines

    monkeypatch.setattr(aten_executor, "write_program", wrongly)
    with knobs.override(verify_graphs=False):
        program = failing_program()
    with pytest.raises(StepFailed, match="this is a fault in weft") as caught:
        program(torch.ones(4))
    assert caught.value.fails_eagerly is False
    assert "the mistake is" not in str(caught.value)


def test_errors_of_hooks_and_of_weft_are_raised_unchanged() -> None:
    def stop(x: torch.Tensor) -> None:
        raise StopIteration("enough") if x.sum() > 0 else UnknownOption("a", "b", ["c"])

    b = StepBuilder()
    b.effect(stop, b.input(torch.ones(4)))
    program = compile_aten(b.build())
    with pytest.raises(StopIteration, match="enough") as caught:
        program(torch.ones(4))
    assert "test_aten.py" in caught.value.__notes__[0]
    with pytest.raises(UnknownOption):
        program(-torch.ones(4))


def test_a_wrong_number_of_inputs_raises_value_error() -> None:
    with pytest.raises(ValueError, match="expected 1, got 0"):
        failing_program()()
