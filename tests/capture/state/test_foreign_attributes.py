"""Objects of the user whose attributes are computed are walked without asking them for names that they do not have."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch

import weft


class Encoding(UserDict):
    """A mapping whose keys are attributes too; any other name is a KeyError, not an AttributeError."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


def test_an_attribute_that_raises_another_error_does_not_end_the_capture() -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    def step(batch: Encoding) -> torch.Tensor:
        return (weight * batch.x + batch["y"]).sum()

    batch = Encoding({"x": torch.randn(4), "y": torch.randn(4)})
    assert torch.equal(weft.compile(step)(batch), step(batch))
