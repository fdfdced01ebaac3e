"""Functions that check values and raise. Not in a test's file: pytest writes the assertions there in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributions


def asserted(x: torch.Tensor) -> Any:
    assert x.isfinite().all() and not (x > 100).any(), f"bad {x[0].tolist()}"  # noqa: PT018
    return x * 2


def raised(x: torch.Tensor) -> Any:
    limit = 100
    if limit and ((x > limit).any() or not torch.isfinite(x.sum())):
        print("about to fail")
        raise ValueError(f"too large: {x.max().item()}")
    if bool((x < 100).all()):
        y = x + 1
    else:
        raise AssertionError
    return y


def raised_for_any(x: torch.Tensor) -> Any:
    if any(row.isnan().any() for row in x.unbind()) or not all(row.max() < 100 for row in x.unbind()):
        raise RuntimeError("a row is bad")
    return x.sin()


def checked_by_torch(x: torch.Tensor) -> Any:
    normal = distributions.Normal(x, x.exp())
    return normal.log_prob(x), distributions.Categorical(logits=x).entropy()


def caught_in_the_step(x: torch.Tensor) -> Any:
    try:
        assert not x.isnan().any()
    except AssertionError:
        return x.nan_to_num()
    return x * 3


def _is_bad(x: torch.Tensor) -> bool:
    return not bool(x.isfinite().all())


def asked_by_a_helper(x: torch.Tensor) -> Any:
    if _is_bad(x) or any(map(_is_bad, x.unbind())):
        raise ValueError("bad values")
    return x.cos()


CHECKING = [asserted, raised, raised_for_any, checked_by_torch, caught_in_the_step, asked_by_a_helper]
