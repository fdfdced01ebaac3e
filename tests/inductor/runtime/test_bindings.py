"""torch's Python functions that stand for operations in programs: each calls its operation and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.inductor.runtime.bindings import BINDINGS, callable_of
from weft.torch_adapter import OpOverload

aten = torch.ops.aten

X = torch.randn(2, 3)
IMAGE, KERNEL = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)
CUBE = torch.randn(2, 3, 3)
OF_CHANNELS = [torch.rand(4) for _ in range(4)]

# Arguments as graphs give them; a single tensor for operations that are not here.
ARGUMENTS: dict[OpOverload, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.addmm.default: [((torch.randn(3), X, CUBE[0]), {}), ((X, X, CUBE[0]), {"beta": 0.5, "alpha": 2})],
    aten.baddbmm.default: [((CUBE, CUBE, CUBE), {}), ((CUBE, CUBE, CUBE), {"beta": 0, "alpha": 2.5})],
    aten.bmm.default: [((CUBE, CUBE), {})],
    aten.convolution.default: [
        ((IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        ((IMAGE, KERNEL[:, :2], torch.randn(6), [2, 2], [0, 0], [1, 1], False, [0, 0], 2), {}),
    ],
    aten.mm.default: [((X, CUBE[0]), {})],
    aten.cat.default: [(([X, X],), {}), (([X, X], -1), {})],
    aten.clone.default: [((X,), {}), ((X.t(),), {"memory_format": torch.contiguous_format})],
    aten.copy_.default: [((X.clone(), X), {}), ((X.clone(), torch.ones(3, dtype=torch.int64), True), {})],
    aten.expand.default: [((X[0], [4, 3]), {}), ((X[:, :1], [-1, 5]), {"implicit": True})],
    aten.permute.default: [((CUBE, [2, 0, 1]), {})],
    aten.select.int: [((X, 1, -1), {})],
    aten.squeeze.dim: [((X[:1], 0), {})],
    aten.transpose.int: [((X, 0, -1), {})],
    aten.unsqueeze.default: [((X, -1), {})],
    aten.view.default: [((X, [3, 2]), {}), ((X, [-1]), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.where.self: [((X > 0, X, X), {}), ((X > 0, X, torch.tensor(0.0)), {})],
    aten.mean.dim: [((X, [0]), {}), ((X, [-1], True), {"dtype": torch.float64}), ((X, None), {})],
    aten.sum.dim_IntList: [((X, [0], True), {}), ((X, [0, 1]), {"dtype": torch.float64}), ((X, []), {})],
    aten.native_batch_norm.default: [((IMAGE, *OF_CHANNELS, training, 0.1, 1e-5), {}) for training in (True, False)]
    + [((IMAGE, None, None, None, None, True, 0.1, 1e-5), {})],
    aten.native_group_norm.default: [((IMAGE, None, OF_CHANNELS[0], 2, 4, 25, 2, 1e-5), {})],
    aten.native_layer_norm.default: [((X, [3], X[0], None, 1e-5), {}), ((X, [2, 3], None, X, 1e-5), {})],
}
_BINARY = {f"aten.{name}.Tensor" for name in ("add", "add_", "div", "div_", "mul", "mul_", "sub")}
_SCALED = {f"aten.{name}.Tensor" for name in ("add", "add_", "sub")}


def arguments(op: OpOverload) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Those of the table, or a tensor; to operators tensors and numbers."""
    if str(op) not in _BINARY:
        return ARGUMENTS.get(op, [((X.clone(),), {})])
    scaled = [((X.clone(), X), {"alpha": 0.5})] if str(op) in _SCALED else []
    return [*(((X.clone(), other), {}) for other in (X, X[0], 2, 0.5, torch.tensor(2.0))), *scaled]


class Calls(TorchDispatchMode):
    """The operations that reach the dispatcher's end, in order, with the arguments that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((op, repr(args), repr(kwargs)))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_calls_the_operation_and_nothing_else(op: OpOverload) -> None:
    for args, kwargs in arguments(op):
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        with torch.no_grad(), Calls() as calls:
            found = callable_of(op)(*mine, **kwargs)
            wanted = op(*theirs, **kwargs)
        assert calls.found[0] == calls.found[1]
        assert len(calls.found) == 2
        assert calls.found[0][0] is op
        for a, b in ((found, wanted), (mine, theirs)):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)


def test_an_operation_without_a_function_is_called_itself() -> None:
    assert torch.equal(callable_of(aten.threshold_backward.default)(X, X, 0), X * (X > 0))
