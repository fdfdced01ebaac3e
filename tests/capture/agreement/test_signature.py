"""The text of the collectives of a graph."""

from __future__ import annotations

from typing import Any

import torch

from tests.collective_ops import operations
from tests.step_builder import StepBuilder
from weft.capture.agreement.signature import signature
from weft.capture.step_interface import Role


def test_an_operation_with_split_sizes_and_two_tensors_has_a_line() -> None:
    schema = "(Tensor tokens, Tensor scales, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name)"
    exchanged = lambda tokens, scales, receives, sends, group: tokens.new_empty((sum(receives), *tokens.shape[1:]))
    with operations(dispatch=(f"{schema} -> Tensor", exchanged)) as ops:
        for sizes, text in (([2, 2], "4 each"), ([1, 3], "in parts that differ")):
            built = StepBuilder()
            tensors = [built.input(torch.ones(4, 2), Role.BATCH), built.input(torch.ones(4), Role.BATCH)]
            start: Any = built.call(ops.dispatch.default, *tensors, sizes, sizes, "pair")
            built.returns(built.call(torch.ops._c10d_functional.wait_tensor.default, start, val=start.meta["val"]))
            line = signature(built.build({"pair": "0"}))
            assert f": torch.float32 [{text}], torch.float32 [{text}]" in line
