"""Foreach operations on DTensors get the placements that torch gives them, computed once per kind of element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import weft
from weft import torch_adapter

aten = torch.ops.aten
SHAPES = ((16, 8), (8,), (16, 8), (24, 8), (8,), (16, 8))
WHOLE = tuple((8 * rows, *rest) for rows, *rest in SHAPES)


def tensors(mesh: DeviceMesh, *placements: Any, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[DTensor]:
    kinds = [placements[at % len(placements)] for at in range(len(shapes))]
    return [DTensor.from_local(torch.empty(shape), mesh, [kind]) for shape, kind in zip(shapes, kinds, strict=True)]


def fused(mesh: DeviceMesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lists = [tensors(mesh, Shard(0)) for _ in range(4)]
    steps = tensors(mesh, Replicate(), shapes=((),) * len(SHAPES))
    named = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    return (*lists, [], steps), {**named, "amsgrad": False, "maximize": False}


CASES: dict[str, tuple[Any, Callable[[DeviceMesh], tuple[tuple[Any, ...], dict[str, Any]]], int]] = {
    "norms": (aten._foreach_norm.Scalar, lambda mesh: ((tensors(mesh, Shard(0)), 2), {}), 3),
    "by a number": (aten._foreach_mul_.Scalar, lambda mesh: ((tensors(mesh, Shard(0)), 0.5), {}), 3),
    "by a tensor": (
        aten._foreach_mul_.Tensor,
        lambda mesh: ((tensors(mesh, Shard(0)), tensors(mesh, Replicate(), shapes=((),))[0]), {}),
        3,
    ),
    "new tensors": (aten._foreach_add.List, lambda mesh: ((tensors(mesh, Shard(0)), tensors(mesh, Shard(0))), {}), 3),
    "numbers for each": (
        aten._foreach_mul.ScalarList,
        lambda mesh: ((tensors(mesh, Shard(0)), [1, 1, 1.0, 1, 1, 2]), {}),
        5,
    ),
    "placements that differ": (
        aten._foreach_neg.default,
        lambda mesh: ((tensors(mesh, Shard(0), Replicate()),), {}),
        5,
    ),
    "a fused optimizer": (aten._fused_adamw_.default, fused, 3),
    "something to move": (
        aten._foreach_add.List,
        lambda mesh: ((tensors(mesh, Shard(0)), tensors(mesh, Partial(), shapes=WHOLE)), {}),
        len(SHAPES),
    ),
    "all different": (aten._foreach_neg.default, lambda mesh: ((tensors(mesh, Shard(0))[:2],), {}), 2),
    "a list of sizes": (
        aten._fused_rms_norm.default,
        lambda mesh: ((*tensors(mesh, Replicate(), shapes=((2, 8, 8),)), [8, 8], None, 1e-5), {}),
        2,
    ),
    "no list": (aten.cat.default, lambda mesh: ((tensors(mesh, Replicate(), shapes=((2, 8),) * 3),), {}), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_placed_as_torch_places_all(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, operands, columns = CASES[case]
    with weft.fake_world(8), torch.no_grad():
        propagator: Any = DTensor._op_dispatcher.sharding_propagator  # type: ignore[attr-defined]
        args, kwargs = operands(init_device_mesh("cpu", (8,)))
        schema = DTensor._op_dispatcher.unwrap_to_op_info(operation, args, kwargs).schema  # type: ignore[attr-defined]
        own, seen = propagator.propagate_op_sharding_non_cached, []

        def place(schema: Any) -> Any:
            seen.append(next(len(arg) for arg in schema.args_schema if isinstance(arg, (list, tuple))))
            return own(schema)

        monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", place)
        with torch_adapter.dtensors_in_captures():
            found = propagator.propagate_op_sharding_non_cached(schema)
        wanted = own(schema)
    assert seen[-1] == columns
    assert found.needs_redistribute == wanted.needs_redistribute
    assert found.redistribute_schema == wanted.redistribute_schema
    assert type(found.output_spec) is type(wanted.output_spec)
    assert found.output_spec == wanted.output_spec
    assert str(found.output_spec) == str(wanted.output_spec)


def test_numbers_without_values_in_operations_on_dtensors_ask_no_question() -> None:
    """Torch 2.11 compared some of the numbers, by chance, to find the placement of a result in a table."""
    with weft.fake_world(2):
        x, ones = tensors(init_device_mesh("cpu", (2,)), Replicate(), shapes=((4,), (4,)))

        def step(numbers: torch.Tensor) -> None:
            for number in numbers.tolist():
                x.addcdiv_(ones, ones, value=number)

        graph = weft.capture(step, torch.rand(100)).graph
    names = [getattr(node.target, "__name__", "") for node in graph.nodes]
    assert "branch" not in names
    assert sum("addcdiv" in name for name in names) == 100
