"""Random small programs of views, writes and random numbers, captured and run: equal to eager bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from exploration import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from pass_runs import BIT_KEEPING
from weft.capture.record.tracer import capture_step
from weft.inductor.graph.pass_runner import Pass
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten

VIEWS = {
    "t": lambda x: x.t() if x.dim() <= 2 else x,
    "head": lambda x: x[: max(1, x.shape[0] // 2)] if x.dim() else x,
    "odd": lambda x: x[1::2] if x.dim() and x.shape[0] > 1 else x,
    "row": lambda x: x[0] if x.dim() else x,
    "column": lambda x: x.select(-1, x.shape[-1] - 1) if x.dim() else x,
    "flat": lambda x: x.view(-1) if x.is_contiguous() else x,
    "unbind": lambda x: x.unbind(0)[-1] if x.dim() else x,
    "split": lambda x: x.split(1)[-1] if x.dim() else x,
    "diagonal": lambda x: x.diagonal() if x.dim() == 2 else x,
    "unsqueeze": lambda x: x.unsqueeze(0) if x.dim() < 2 else x,
    "reshape": lambda x: x.reshape(-1),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
}
VALUES = {
    "scaled": lambda x, y: x * 0.5 + y.sum(),
    "exp": lambda x, y: torch.exp(x.clamp(-1, 1)),
    "clone": lambda x, y: x.clone(),
    "random": lambda x, y: torch.rand_like(x),
    "mean": lambda x, y: x.mean() + y.mean(),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)])[:8],
}
WRITES = {
    "add_": lambda x, y: x.add_(y.sum()),
    "mul_": lambda x, y: x.mul_(0.5),
    "add_self_": lambda x, y: x.add_(x),
    "copy_": lambda x, y: x.copy_(y.reshape(-1)[0]),
    "copy_rolled_": lambda x, y: x.copy_(x.roll(1)),
    "exp_out": lambda x, y: torch.exp(y.reshape(-1)[0], out=x) if x.dim() == 0 else x,
    "zero_": lambda x, y: x.zero_(),
    "normal_": lambda x, y: x.normal_(),
    "foreach_": lambda x, y: torch._foreach_add_([x, y] if disjoint(x, y) else [x], 1.0),
    "index_": lambda x, y: x.masked_fill_(x > 0.5, 0.25),
}


def disjoint(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether they are tensors of their own memory. Asked past the function mode that refuses it to users' steps."""
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata != y.untyped_storage()._cdata


KINDS = {**VIEWS, **VALUES, **WRITES}

Program = list[tuple[str, int, int]]


def run(program: Program, returned: list[int], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each instruction takes two earlier values, by number; views and values add one, writes change one."""
    values = list(values)
    for kind, a, b in program:
        x, y = values[a % len(values)], values[b % len(values)]
        if kind in VIEWS:
            values.append(VIEWS[kind](x))
        elif kind in VALUES:
            values.append(VALUES[kind](x, y))
        else:
            WRITES[kind](x, y)
    return [values[at % len(values)] for at in returned]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((4, 4), (2, 4), (4,))]


instruction = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 11), st.integers(0, 11))


@settings(max_examples=examples(ci=60, exploring=3_000))
@given(st.lists(instruction, max_size=14), st.lists(st.integers(0, 11), max_size=3))
def test_a_random_program_equals_eager(program: Program, returned: list[int]) -> None:
    equals_eager(program, returned, [])


@settings(max_examples=examples(ci=20, exploring=800))
@given(st.lists(instruction, max_size=10), st.lists(st.integers(0, 11), max_size=3))
def test_passes_keep_the_bits_of_a_random_program(program: Program, returned: list[int]) -> None:
    """Every program runs twice over, so that much of it is there to be merged. What is returned shares no memory that
    it did not share before."""
    assert equals_eager(program + program, returned, BIT_KEEPING) <= equals_eager(program + program, returned, [])


def test_writes_of_a_fused_chain_through_a_view_reach_the_viewed_tensor() -> None:
    """The fused call computes out of place: a view back to the base must not be taken for the base."""

    def step(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([x.view(-1)], 1.0)
        torch._foreach_add_([x.view(-1)], 1.0)
        return x.sum()

    run = compile_aten(run_passes(weft.capture(step, torch.zeros(2, 3)), BIT_KEEPING))
    x = torch.zeros(2, 3)
    (total,) = run(x)
    assert total == 12
    assert torch.equal(x, torch.full((2, 3), 2.0))


def equals_eager(program: Program, returned: list[int], passes: list[Pass]) -> set[tuple[int, int]]:
    """Assert that it does after these passes; which of the returned tensors and the inputs share memory where those of
    the eager program do not."""
    eager, real = inputs(), inputs()
    try:
        run(program, returned, inputs())
    except RuntimeError:
        return set()  # eager refuses it: a write into overlapping memory
    captured = capture_step(lambda *args: run(program, returned, list(args)), tuple(real))
    compiled = compile_aten(run_passes(captured.graph, passes))

    def call() -> Any:
        return captured.result.fill(compiled(*[place.get() for place in captured.places]))

    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = run(program, returned, eager)
        torch.manual_seed(seed)
        got = call()
        for e, g in zip(expected, got, strict=True):
            assert torch.equal(e, g), compiled.source
            assert e.stride() == g.stride() or e.numel() <= 1, compiled.source
        for e, g in zip(eager, real, strict=True):
            assert torch.equal(e, g), compiled.source
    return sharing([*got, *real]) - sharing([*expected, *eager])


def sharing(tensors: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Pairs of tensors, by number, that lie in one storage: a write to one would show in the other."""
    keys = [tensor.untyped_storage()._cdata for tensor in tensors]
    return {(a, b) for a, one in enumerate(keys) for b, other in enumerate(keys) if one == other}
