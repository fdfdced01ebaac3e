"""Arrays of numpy's in the Python state that are too large to compare: each call reads and writes their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.capture.state.contents import LARGEST_BYTES
from weft.errors import WeftError

np = pytest.importorskip("numpy")

COUNT = LARGEST_BYTES // 8 + 100


def large(dtype: Any = float) -> Any:
    array = np.zeros(COUNT, dtype)
    array[:100] = np.arange(100)
    return array


def of_an_element(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x + float(s.array[0])


def as_a_tensor(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x + torch.from_numpy(s.array[:3])


def copied_into_a_tensor(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x + torch.tensor(s.array[[0, 5, 7]])


def in_a_condition(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x * 2 if s.array[0] > 15 else x


def reduced(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x * s.array.sum() + np.mean(s.array)


def written(s: Any) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        s.array[1] += 1
        s.array[2:5] *= 2
        return x + float(s.array[1])

    return step


def written_through_a_tensor(s: Any) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        torch.from_numpy(s.array)[1:3] += x[:2]
        return x + float(s.array[1])

    return step


def in_two_places(s: Any) -> Callable[[Tensor], Any]:
    s.other = {"array": s.array, "list": [s.array]}

    def step(x: Tensor) -> Tensor:
        s.other["array"][0] += 1
        s.other["list"][0][1] += 2
        return x + float(s.array[0] + s.array[1])

    return step


def in_a_tuple(s: Any) -> Callable[[Tensor], Any]:
    s.pair = (s.array, 1)

    def step(x: Tensor) -> Tensor:
        s.pair[0][3] += 1
        return x + float(s.pair[0][0])

    return step


def in_a_tuple_and_in_an_attribute(s: Any) -> Callable[[Tensor], Any]:
    s.pair = (1, (s.array, 2))

    def step(x: Tensor) -> Tensor:
        s.array[3] += 1
        return x + float(s.pair[1][0][0]) + float(s.array[5]) + float(s.pair[1][0][3])

    return step


def only_its_length(s: Any) -> Callable[[Tensor], Any]:
    return lambda x: x * len(s.array) + s.array.shape[0] + s.array.ndim


STEPS = [
    of_an_element,
    as_a_tensor,
    copied_into_a_tensor,
    in_a_condition,
    reduced,
    written,
    written_through_a_tensor,
    in_two_places,
    in_a_tuple,
    in_a_tuple_and_in_an_attribute,
    only_its_length,
]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_each_call_reads_and_writes_the_array(make: Callable[..., Any]) -> None:
    ours, theirs = SimpleNamespace(array=large()), SimpleNamespace(array=large())
    compiled, eager = weft.compile(make(ours), mode="bitwise"), make(theirs)
    for call in range(4):
        for s in (ours, theirs):
            s.array[0] += 10
            s.array[5] += call
        assert torch.equal(compiled(torch.ones(3, dtype=torch.float64)), eager(torch.ones(3, dtype=torch.float64)))
        assert np.array_equal(ours.array, theirs.array)
    assert type(ours.array) is np.ndarray
    assert len(compiled.captures) == {in_a_tuple: 4, in_a_tuple_and_in_an_attribute: 4, in_a_condition: 2}.get(make, 1)


def test_another_array_in_the_place_of_one() -> None:
    s = SimpleNamespace(array=large())
    step = weft.compile(of_an_element(s))
    assert step(torch.zeros(1)).item() == 0
    s.array = large() + 3
    assert step(torch.zeros(1)).item() == 3
    s.array = large()[:10] + 4  # a small one
    assert step(torch.zeros(1)).item() == 4


def test_batches_from_a_file_mapped_into_memory(tmp_path: Path) -> None:
    np.zeros(COUNT * 4, np.uint16).tofile(tmp_path / "tokens")
    np.memmap(tmp_path / "tokens", np.uint16, "r+")[:1000] = np.arange(1000)
    tokens = np.memmap(tmp_path / "tokens", np.uint16, "r")
    torch.manual_seed(0)
    embedding = nn.Embedding(1001, 4)

    def step(at: int) -> Tensor:
        rows = [torch.from_numpy(tokens[at + i : at + i + 8].astype(np.int64)) for i in range(3)]
        loss = embedding(torch.stack(rows)).square().sum()
        loss.backward()
        return loss.detach()

    compiled = weft.compile(step, mode="bitwise")
    for at in (0, 100, 200, 500, 900):
        embedding.zero_grad()
        got, grad = compiled(at), embedding.weight.grad
        embedding.zero_grad()
        assert torch.equal(got, step(at))
        assert torch.equal(grad, embedding.weight.grad)


def test_a_write_to_an_array_that_cannot_be_written_to_raises_as_in_eager() -> None:
    s = SimpleNamespace(array=large())
    s.array.flags.writeable = False
    step = written(s)
    for each in (step, weft.compile(step)):
        with pytest.raises(ValueError, match="read-only"):
            each(torch.ones(1))


def test_a_write_beside_a_tensor_in_the_same_memory_is_refused() -> None:
    s = SimpleNamespace(array=large())
    s.tensor = torch.from_numpy(s.array)

    def step(x: Tensor) -> Tensor:
        s.array[0] += 1
        return x + s.tensor[0]

    with pytest.raises(WeftError, match="same memory"):
        weft.compile(step)(torch.ones(1))
    assert s.array[0] == 0


def test_structured_arrays_are_compared_in_spite_of_their_size() -> None:
    s = SimpleNamespace(array=np.zeros(COUNT, [("a", "f4"), ("b", "i4")]))
    step = weft.compile(lambda x: x + float(s.array["a"][0]))
    for value in (1.0, 2.0):
        s.array["a"][0] = value
        assert step(torch.zeros(1)).item() == value
