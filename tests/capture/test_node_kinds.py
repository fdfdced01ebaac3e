"""What starts a collective, and over which group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.collective_ops import gathered, operations
from tests.step_builder import StepBuilder
from weft.capture.node_kinds import calls_collective, group_of
from weft.errors import UnregisteredCollective

c10d = torch.ops._c10d_functional


def test_what_torch_uses_itself_starts_no_collective() -> None:
    """``_wrap_tensor_autograd`` of torch 2.13 is in the namespace of collectives, and moves nothing."""
    with operations(_wrapped=("(Tensor input) -> Tensor", torch.empty_like)) as ops:
        assert not calls_collective(ops._wrapped.default)
    assert not calls_collective(c10d.wait_tensor.default)
    assert calls_collective(c10d.all_reduce.default)


@pytest.mark.parametrize("arguments", ["int size, str pg", "int size, str inner_group, str outer_group"])
def test_a_collective_whose_group_has_another_name_is_an_error_at_its_line(arguments: str) -> None:
    names = ["pair"] * arguments.count("str")
    with operations(other=(f"(Tensor input, {arguments}) -> Tensor", gathered)) as ops:
        built = StepBuilder()
        start: Any = built.call(ops.other.default, built.input(torch.ones(4)), 2, *names)
        with pytest.raises(UnregisteredCollective, match=r"weft_c10d.other.default at .*test_node_kinds.*register"):
            group_of(start)
