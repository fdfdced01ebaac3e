"""The first samples of every operation in torch's own database; bench/opinfo.py runs all of them."""

from __future__ import annotations

import copy

import opinfo_cases
import pytest
import torch
from opinfo_cases import Case, Outcome, cases, run
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from weft.capture.graph import StepGraph
from weft.capture.record.recorder import recording

SAMPLES = 1
# Dynamo takes a second where a capture takes a hundredth.
EVERY = 24


def name(op: OpInfo) -> str:
    return Case(op, torch.float32).name


def check(outcome: Outcome) -> None:
    assert not outcome.failures, "\n".join(outcome.failures)


@pytest.mark.parametrize("op", op_db, ids=name)
def test_opinfo_samples_match_eager(op: OpInfo) -> None:
    """In float32, with gradients and without, and in one of the other dtypes."""
    others = [case for case in cases([op]) if case.dtype != torch.float32]
    chosen = others[op_db.index(op) % len(others)] if others else None
    for case in cases([op]):
        if case.dtype == torch.float32 or case == chosen:
            check(run(case, SAMPLES))


@pytest.mark.parametrize("op", op_db[::EVERY], ids=name)
def test_opinfo_samples_through_torch_compile_match_eager(op: OpInfo) -> None:
    outcome = Outcome()
    for case in cases([op]):
        if case.dtype == torch.float32:
            outcome.add(run(case, 1, dynamo=True))
    check(outcome)


# Of each kind of graph that generated kernels must stand between: sizes and places that the data decides, no inputs,
# no dimensions, random numbers, sums in another order.
KINDS = [
    "combinations",
    "index_put",
    "logsumexp",
    "masked_select",
    "narrow",
    "randn",
    "nn.functional.layer_norm",
    "std",
]


@pytest.mark.parametrize("op", [op for op in op_db if op.name in KINDS], ids=name)
def test_opinfo_samples_by_generated_kernels_match_eager(op: OpInfo) -> None:
    for case in cases([op]):
        check(run(case, 2, interpreted=True))


def test_a_kernel_with_a_small_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is a few bits off, of which eager is not."""
    made = opinfo_cases.make_kernels

    def wrong(step: StepGraph) -> StepGraph:
        for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.kwargs = {"alpha": 1.0001}
        return made(step)

    monkeypatch.setattr(opinfo_cases, "make_kernels", wrong)
    op = next(op for op in op_db if op.name == "add" and not op.variant_test_name)
    outcome = run(Case(op, torch.float32), 1, interpreted=True)
    assert outcome.counts == {"failed": 1}


def test_a_wrong_result_fails() -> None:
    """An operation that is another one while it is captured."""
    op = copy.copy(next(op for op in op_db if op.name == "sin"))
    op.op = lambda x: torch.sin(x) if recording() is None else torch.cos(x)
    outcome = run(Case(op, torch.float32), 1)
    assert outcome.counts == {"failed": 1}
    assert "sin float32, sample 0" in outcome.failures[0]
