"""Stands in for CUDA graphs where there is no GPU: what is recorded is run again, into the same results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


class FakeRecording:
    """Like a CUDA graph: nothing but :meth:`replay` computes, and it writes where it was recorded."""

    def __init__(self, run: Callable[[], list[Any]], results: list[Any], alone: bool) -> None:
        self.alone = alone
        self._run = run
        self._written = list(results)
        self.results = results

    def replay(self) -> None:
        for old, new in zip(self._written, self._run(), strict=True):
            if isinstance(old, torch.Tensor) and old is not new:
                old.copy_(new)


class FakeRecorder:
    """Records by running, and takes back what that wrote into the tensors it was given."""

    def __init__(self, failing: Exception | None = None, alone: bool = True) -> None:
        self.era = 0
        self.alone = alone
        self.failing = failing
        self.records = 0
        self.asked_for_room = 0

    def make_room(self) -> None:
        self.asked_for_room += 1

    def record(self, run: Callable[[], list[Any]]) -> FakeRecording:
        if self.failing is not None:
            raise self.failing
        self.records += 1
        assert self.asked_for_room >= self.records
        inputs = [t for t in inspect.getclosurevars(run).nonlocals["recorded_inputs"] if isinstance(t, torch.Tensor)]
        before = [tensor.detach().clone() for tensor in inputs]
        results = run()
        with torch.no_grad():
            for tensor, old in zip(inputs, before, strict=True):
                if not torch.equal(tensor, old):
                    tensor.copy_(old)
        return FakeRecording(run, results, self.alone)
