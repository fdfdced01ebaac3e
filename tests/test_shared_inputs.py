"""What is made of an activation for several modules is handed out again while it holds, and kept no longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from weft.shared_inputs import shared


class Gather:
    """Stands for a gather: counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.shared: Any = shared(self.convert)

    def convert(self, x: Tensor, mesh: Any, layout: Any) -> Tensor:
        self.calls += 1
        return torch.cat([x, x])


def activation() -> Tensor:
    return torch.randn(3, requires_grad=True) * 1


def test_it_is_made_once_for_one_mesh_layout_and_content() -> None:
    gather, x, mesh = Gather(), activation(), object()
    first = gather.shared(x, mesh, "rows")
    assert gather.shared(x, mesh, "rows") is first
    for others in ((object(), "rows"), (mesh, "columns")):
        assert gather.shared(x, *others) is not first
    assert gather.shared(activation(), mesh, "rows") is not first
    before = gather.shared(x, mesh, "rows")
    with torch.no_grad():
        x.add_(1)
    assert gather.shared(x, mesh, "rows") is not before
    assert torch.equal(gather.shared(x, mesh, "rows")[:3], x)


def test_nothing_is_shared_of_leaves_and_without_gradients() -> None:
    gather, mesh = Gather(), object()
    with torch.no_grad():
        plain = [activation(), activation()]
    for x in (torch.randn(3, requires_grad=True), torch.randn(3), *plain):
        assert gather.shared(x, mesh, "rows") is not gather.shared(x, mesh, "rows")
    with torch.no_grad():
        x = activation()
        assert gather.shared(x, mesh, "rows") is not gather.shared(x, mesh, "rows")
    with torch.inference_mode():
        x = torch.randn(3)
        assert gather.shared(x, mesh, "rows") is not gather.shared(x, mesh, "rows")


def test_only_what_was_made_last_is_kept_and_only_with_its_input() -> None:
    """Under checkpointing inputs live until backward: what was gathered of each would be all that it saves."""
    gather, mesh = Gather(), object()
    inputs = [activation() for _ in range(3)]
    made = [weakref.ref(gather.shared(x, mesh, "rows")) for x in inputs]
    gc.collect()
    assert [each() is not None for each in made] == [False, False, True]
    inputs.clear()
    gc.collect()
    assert made[-1]() is None
