"""The list of passes: its tiers, and leaving passes out by name."""

from __future__ import annotations

import pytest
import torch

from pass_runs import targets
from weft import knobs
from weft.capture.tracer import capture_step
from weft.errors import UnknownOption
from weft.inductor.passes.common_subexpressions import common_subexpressions
from weft.inductor.passes.pipeline import BIT_KEEPING, EVERY_PASS, NUMERICS, PLAIN, run_passes


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) + torch.exp(x)


def test_every_pass_is_of_one_tier() -> None:
    names = {pass_.__name__ for pass_ in (*PLAIN, *EVERY_PASS)}
    assert names == {pass_.__name__ for pass_ in (*BIT_KEEPING, *NUMERICS)}
    assert len(names) == len(BIT_KEEPING) + len(NUMERICS)


def test_a_pass_is_left_out_by_name() -> None:
    graph = capture_step(twice, (torch.randn(3),)).graph
    assert targets(run_passes(graph, [common_subexpressions]))["aten.exp.default"] == 1
    with knobs.override(disable_passes="pack, common_subexpressions"):
        assert targets(run_passes(graph, [common_subexpressions]))["aten.exp.default"] == 2


def test_a_name_of_no_pass_is_refused() -> None:
    graph = capture_step(twice, (torch.randn(3),)).graph
    with knobs.override(disable_passes="cse"), pytest.raises(UnknownOption, match="'common_subexpressions'"):
        run_passes(graph)
