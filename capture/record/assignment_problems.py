"""Assignment problems in a step: ``scipy.optimize.linear_sum_assignment`` of a matrix of costs, as one operation.

Models that detect objects match their predictions with the objects in the middle of their loss. The function reads the
costs on the host, so a graph holds the call. The sizes of its results do not depend on the costs, and one graph serves
all numbers of objects.

    weft::linear_sum_assignment(cost, maximize) -> (rows, columns): int64 on the CPU, each of min(cost.shape) elements
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.record.array_sources import ArraySources
from weft.capture.record.host_arrays import HostArray
from weft.short_tracebacks import users_mistake

_library = torch.library.Library("weft", "FRAGMENT")
_library.define("linear_sum_assignment(Tensor cost, bool maximize) -> (Tensor, Tensor)")

ASSIGNMENT_OPERATIONS = ("linear_sum_assignment",)
"""Their names in the namespace ``weft``."""


@torch.library.impl(_library, "linear_sum_assignment", "CompositeExplicitAutograd")
def _assignment(cost: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from scipy.optimize import linear_sum_assignment  # type: ignore[missing-import] - only a step that calls it has one

    rows, columns = linear_sum_assignment(cost.numpy(), maximize)
    return torch.from_numpy(rows), torch.from_numpy(columns)


@torch.library.register_fake("weft::linear_sum_assignment", lib=_library)
def _assignment_like(cost: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    count: Any = torch.sym_min(*cost.shape)
    rows, columns = (torch.empty((count,), dtype=torch.int64, device="cpu") for _ in range(2))
    return rows, columns


def assignment_replacements(sources: ArraySources) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of scipy's function, where scipy is loaded.

    Args:
        sources: of the arrays of the capture.
    """
    module = sys.modules.get("scipy.optimize")
    original = getattr(module, "linear_sum_assignment", None)
    if original is not None:
        yield module, "linear_sum_assignment", _recorded(original, sources)


def _recorded(original: Callable[..., Any], sources: ArraySources) -> Callable[..., Any]:
    @functools.wraps(original)
    def linear_sum_assignment(cost_matrix: Any, maximize: Any = False) -> Any:
        array = sources.numpy(cost_matrix) if isinstance(cost_matrix, FakeTensor) else cost_matrix
        if type(array) is not HostArray:
            return original(cost_matrix, maximize)
        cost = sources.arrays.tensor(array)
        if cost.dim() != 2:
            raise users_mistake(ValueError(f"expected a matrix (2-D array), got a {cost.dim()} array"))
        results = torch.ops.weft.linear_sum_assignment(cost, bool(maximize))
        return tuple(sources.numpy(each) for each in results)

    return linear_sum_assignment
