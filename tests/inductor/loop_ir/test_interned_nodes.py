"""Equal nodes are one object for as long as it lives, and the table of nodes does not keep those that are gone."""

from __future__ import annotations

import gc

import pytest
import torch

from weft.inductor.loop_ir import ir
from weft.inductor.loop_ir.ir import Call, Const, Index, Load, Value


def chain(length: int, offset: int) -> Value:
    """Calls over a load, a different tree for each offset."""
    value: Value = Load("x", Index([(0, 1)], offset), torch.float32)
    for at in range(length):
        value = Call("add", (value, Const(at, torch.float32)), torch.float32)
    return value


def test_equal_trees_are_one_object_across_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir._Interned, "_sweeps_at", 1)
    monkeypatch.setattr(ir, "_FEWEST_SWEPT", 1)
    kept = [chain(20, -1 - at) for at in range(5)]
    for at in range(50):
        chain(20, at)
    assert all(chain(20, -1 - at) is value for at, value in enumerate(kept))


def test_nodes_that_are_gone_leave_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir, "_FEWEST_SWEPT", 64)
    monkeypatch.setattr(ir._Interned, "_sweeps_at", 64)
    gc.collect()
    ir._sweep()
    alive = len(ir._Interned._all)
    most = 0
    for at in range(200):
        chain(20, 1000 + at)
        most = max(most, len(ir._Interned._all))
    # A table is swept when it has doubled, with the chain that is being made: 200 chains have 4,000 nodes of their own.
    assert most <= max(64, 2 * (alive + 21)) + 64
    gc.collect()
    ir._sweep()
    assert len(ir._Interned._all) <= alive
