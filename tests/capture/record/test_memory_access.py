"""A step that looks at the memory of tensors is refused with its line, and no memory is touched."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft import torch_adapter
from weft.errors import MemoryOfTensor

KEPT = torch.ones(3)
STORAGE = KEPT.untyped_storage()

LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "addresses": lambda x: (x * 2).data_ptr() == (x * 3).data_ptr(),
    "addresses of storages": lambda x: x.untyped_storage().data_ptr() == KEPT.untyped_storage().data_ptr(),
    "is_set_to": lambda x: KEPT.is_set_to(KEPT[:]),
    "resized": lambda x: KEPT.untyped_storage().resize_(0),
    "resized, held from before": lambda x: STORAGE.resize_(0),
    "version": lambda x: KEPT._version,
    "dlpack": lambda x: torch.from_dlpack(x * 2),
    "shared": lambda x: (x * 2).share_memory_(),
    "pinned": lambda x: (x * 2).pin_memory(),
    "deepcopy": lambda x: copy.deepcopy((x * 2)[:1]),
    "a Python function of each element": lambda x: (x * 2).apply_(lambda each: each + 1),
    "of each element of two tensors": lambda x: (x * 2).map_(x, lambda each, other: each + other),
    "of each element of three tensors": lambda x: (x * 2).map2_(x, x, lambda each, *others: each + sum(others)),
    "of a tensor of the user's": lambda x: KEPT.apply_(lambda each: each + 1),
    "the type of a storage": lambda x: (x * 2).storage_type(),
    "pickle": lambda x: pickle.dumps(x * 2),
}


@pytest.mark.parametrize("name", LOOKS)
def test_the_error_names_the_line_and_memory_stays(name: str) -> None:
    with pytest.raises(MemoryOfTensor, match=r"test_memory_access\.py:\d+"):
        weft.compile(LOOKS[name])(torch.ones(3))
    assert torch.equal(KEPT, torch.ones(3))


def test_torch_may_resize_the_memory_of_its_own_fakes() -> None:
    """It gives the fake of a tensor without elements a storage of no bytes; geqrf has no fake implementation."""
    x = torch.ones(0, 5, 3)
    for found, wanted in zip(weft.compile(torch.geqrf)(x), torch.geqrf(x), strict=True):
        assert found.shape == wanted.shape
        assert found.stride() == wanted.stride()


def test_kernels_of_cuda_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = torch_adapter.JITERATOR_LAUNCH
    launched: list[Any] = []
    monkeypatch.setattr(module, name, lambda *args: launched.append(args), raising=False)
    with pytest.raises(MemoryOfTensor, match=r"jiterator at .*test_memory_access\.py:\d+"):
        weft.compile(lambda x: getattr(module, name)("code", "name", [x]))(torch.ones(3))
    assert not launched
    getattr(module, name)("outside of a capture")
    assert launched


@pytest.mark.gpu
def test_kernels_of_cuda_code_are_refused_on_a_gpu() -> None:
    twice = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    x = torch.ones(3, device="cuda")
    with pytest.raises(MemoryOfTensor, match=r"jiterator at .*test_memory_access\.py:\d+"):
        weft.compile(lambda x: twice(x) + 1)(x)
    assert torch.equal(twice(x), 2 * x)
