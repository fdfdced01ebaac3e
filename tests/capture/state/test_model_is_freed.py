"""A compiled step keeps nothing alive: the user's model goes when the user lets go of it and of the step."""

from __future__ import annotations

import copy
import gc
import json
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks


def left(rank: int, world: int, sharded: bool) -> list[str]:
    """What is left of a model and a step that were trained with, once nobody has them."""

    def trained() -> dict[str, weakref.ref]:
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        if sharded:
            policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            weft.fully_shard(net, mesh=mesh, mp_policy=policy)
        else:
            weft.replicate(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)

        @weft.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(2):
            step(torch.randn(4, 8))
        entry = step.entries[0]
        kept = {"model": net, "step": step, "graph": entry.captured.graph, "program": entry.program}
        kept |= {"optimizer": optimizer, **dict(net.named_parameters())}
        return {name: weakref.ref(thing) for name, thing in kept.items()}

    found = trained()
    for _ in range(3):  # what autograd's nodes held goes with them, and is found the next time
        gc.collect()
    return [name for name, thing in found.items() if thing() is not None]


@pytest.mark.gloo
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_model_whose_step_was_compiled_is_freed(sharded: bool) -> None:
    assert run_ranks(left, 2, sharded) == [[], []]


# A module as C code is, which keeps functions and numbers where nobody finds them.
KEEPS = """
import sys

class Holder:
    __slots__ = ("kept",)

HOLDER = Holder()
HOLDER.kept = {name: dict(vars(module)) for name, module in list(sys.modules.items()) if hasattr(module, "__dict__")}
NUMBERS = {id(HOLDER): 1, hash(HOLDER): 2}
IDENTIFY = id
"""


def test_what_a_module_keeps_that_a_step_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It binds functions of Python's while a capture has others in their places. They keep nothing, and work."""
    (tmp_path / "module_that_keeps.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(tmp_path)

    def trained() -> list[weakref.ref]:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

        @weft.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            import module_that_keeps  # type: ignore[missing-import]

            assert module_that_keeps.NUMBERS
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(2):
            step(torch.ones(2, 4))
        return [weakref.ref(net), weakref.ref(optimizer)]

    found = trained()
    for _ in range(3):
        gc.collect()
    assert [each() for each in found] == [None, None]
    import module_that_keeps  # type: ignore[missing-import]

    kept, value = module_that_keeps.HOLDER.kept, [object()]
    assert kept["copy"]["deepcopy"] is not copy.deepcopy, "nothing was replaced while the module was imported"
    assert kept["copy"]["deepcopy"]([1, [2]]) == [1, [2]]
    assert abs(kept["time"]["time"]() - time.time()) < 60
    assert 0 <= kept["random"]["random"]() < 1
    assert kept["os"]["getcwd"]() == os.getcwd()
    assert kept["importlib"]["import_module"]("json") is json
    assert kept["operator"]["attrgetter"]("real")(3) == 3
    assert module_that_keeps.IDENTIFY(value) == id(value)
    # Its own keys are looked up, and compared with others.
    assert sorted(module_that_keeps.NUMBERS.values()) == [1, 2]
    assert id(module_that_keeps.HOLDER) in module_that_keeps.NUMBERS
    assert all((each == 0) is False for each in module_that_keeps.NUMBERS)
