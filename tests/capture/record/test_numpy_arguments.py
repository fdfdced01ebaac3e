"""Arrays and numbers of numpy among the arguments: inputs of the graph once they change, and eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from counted_captures import Cases
from torch import nn
from twenty_calls import Call, twenty_calls

import weft
from weft import knobs
from weft.errors import UncapturableMutation

Step = Callable[..., Any]
CASES = Cases()


def case(step: Step, call: Call, captures: int = 2, name: str = "") -> None:
    """A case named after its line, or ``name``."""
    CASES[name] = (lambda: (lambda: step, call)), captures


def floats(at: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng(at).standard_normal(sizes).astype(np.float32)


def whole(at: int, end: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng(at).integers(0, end, sizes)


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


shared = torch.from_numpy
case(lambda a: shared(a) * 2, lambda at: (floats(at, 4, 3),), name="from_numpy")
case(lambda a: torch.tensor(a) * 2, lambda at: (floats(at, 4, 3),), name="tensor")
case(lambda a: torch.as_tensor(a, dtype=torch.float64) * 2, lambda at: (floats(at, 4, 3),), name="as_tensor")
case(lambda b: {k: shared(v).float().mean() for k, v in b.items()}, lambda at: ({"a": floats(at, 3)},), name="in_dict")
case(lambda a: torch.stack([shared(each) for each in a]), lambda at: ([*floats(at, 3, 4)],), name="in_list")
case(lambda a: shared((a - a.mean(0)) / a.std(0)), lambda at: (floats(at, 4, 3),), name="arithmetic")
case(lambda a: shared(a) if type(a) is np.ndarray else 0, lambda at: (floats(at, 3),), name="type")
case(lambda x, a: x + 1, lambda at: (torch.ones(2), floats(at, 3)), name="unused")
case(lambda x, s: x * s, lambda at: (torch.ones(3), np.float64(at / 3)), name="number")
case(lambda x, s: s * x, lambda at: (torch.ones(3), np.float32(at / 3)), name="number_on_the_left")
case(lambda x, s: x * float(s), lambda at: (torch.ones(3), np.cos(at / 20)), name="float_of_number")
case(lambda x, n: x[:n] * 2, lambda at: (torch.arange(9.0), np.int64(2 + at % 6)), name="slice_to_number")
# sizes
case(lambda a: shared(a).sum() / len(a), lambda at: (floats(at, 3 + at % 5, 2),), name="lengths")
case(lambda a: torch.zeros(a.shape[0], 3) + shared(a).sum(), lambda at: (floats(at, 3 + at % 5),), name="shape")
case(lambda a: shared(a * 2), lambda at: (floats(at, 3 + at % 3),), name="computed_lengths")
case(lambda a: shared(a).sum(), lambda at: (floats(at, at % 3, 4),), 4, name="empty")
case(lambda a: shared(a) * 2, lambda at: (np.array(at / 3, dtype=np.float32),), name="of_no_dimension")
case(lambda a: shared(a).sum(), lambda at: (floats(at, 4) if at % 2 else floats(at, 2, 3),), 3, name="dimensions")
rows = lambda at: 3 + at % 7
case(lambda a: shared(a.astype(np.float32) / 255), lambda at: (whole(at, 255, rows(at), 4),), name="scaled_lengths")
case(lambda a: shared((a - a.mean(0)) / a.std(0)), lambda at: (floats(at, rows(at), 6),), name="normalised_columns")
case(lambda a: shared((a - a.mean()) / a.std()), lambda at: (floats(at, rows(at), 6),), name="normalised")
case(
    lambda a: shared(np.where(a > 0, a, a.max(axis=-1, keepdims=True))),
    lambda at: (floats(at, rows(at), 2 + at % 5),),
    name="chosen_of_two_sizes",
)
case(
    lambda a: (shared(np.clip(a * 2, -1, 1)).sum() / len(a * 2), a.sum()),
    lambda at: (floats(at, rows(at)),),
    name="clipped",
)
case(lambda a: shared(a * 2), lambda at: (floats(at, 2 * rows(at), 3)[::2],), name="rows_with_gaps")
# Shapes that depend on more than the sizes of one operand are captured for each size.
case(lambda a: shared(a[:, None] * a[None]), lambda at: (floats(at, rows(at)),), 9, name="outer_product")
case(lambda a: shared(np.concatenate([a, a])), lambda at: (floats(at, rows(at)),), 9, name="joined")
case(lambda a: shared(a * 2), lambda at: (floats(at, 3, rows(at)).T,), 9, name="columns_first")
case(
    lambda a: (c := a.copy(), c.fill(1), shared(a), shared(c))[2:], lambda at: (floats(at, rows(at)),), 9, name="copied"
)
# dtypes, strides, flags
KINDS = [np.float32, np.float64, np.int64]
case(lambda a: shared(a).double().sum(), lambda at: (floats(at, 4).astype(KINDS[at % 3]),), 4, name="dtypes")
case(lambda a: shared(a).sum(), lambda at: (floats(at, 9) > 0,), name="booleans")
LAYOUTS: list[Callable[[int], np.ndarray]] = [
    lambda at: floats(at, 4, 6),
    lambda at: floats(at, 6, 4).T,
    lambda at: floats(at, 8, 6)[::2],
    lambda at: floats(at, 4, 12)[:, ::2],
]
case(lambda a: shared(a) * 2, lambda at: (LAYOUTS[at % 4](at),), 5, name="strides")
case(lambda a: shared(np.asarray(a.sum(0) + a.std(1).sum())), lambda at: (LAYOUTS[at % 4](at),), 5, name="sums")
case(lambda a: a * 2, lambda at: (LAYOUTS[3](at),), name="gaps")
case(
    lambda a: torch.tensor(a).sum(),
    lambda at: (read_only(floats(at, 4)) if at % 2 else floats(at, 4),),
    3,
    name="flags",
)
case(lambda a: torch.tensor(a.copy()), lambda at: (floats(at, 6)[::-1],), 20, name="negative_strides")
case(lambda a: torch.tensor(a), lambda at: (np.broadcast_to(floats(at, 1), (4,)),), 20, name="broadcast")
case(lambda a: torch.tensor(a.astype("f4")), lambda at: (floats(at, 4).astype(">f4"),), 20, name="byte_order")
case(lambda a: torch.tensor(float(a[0])), lambda at: (np.array([at, "x"], dtype=object),), 20, name="objects")
case(
    lambda a: torch.tensor(a["v"].copy()),
    lambda at: (np.array([(at, 1.0)], "i4,f4").view([("i", "i4"), ("v", "f4")]),),
    20,
    name="records",
)
case(lambda a: torch.ones(2) * len(a), lambda at: (np.array(["a", f"b{at}"]),), 20, name="texts")
# memory
case(lambda a, b: shared(a) + shared(b), lambda at: [floats(at, 4)] * 2, name="twice")
case(lambda a, b: a is b, lambda at: [floats(at, 4)] * 2, name="twice_is_one")
case(
    lambda a, b: shared(a) + shared(b),
    lambda at: [floats(at, 4)] * 2 if at % 3 else (floats(at, 4), floats(9, 4)),
    3,
    name="twice_at_times",
)
case(
    lambda x, y: (shared(x) * shared(y)).sum(),
    lambda at: (lambda b: (b[:, :-1], b[:, 1:]))(floats(at, 3, 9)),
    name="overlap",
)
case(lambda t, a: shared(a) + t, lambda at: (lambda t: (t, t.numpy()))(torch.arange(4.0) + at), name="of_a_tensor")
case(lambda a: (a, shared(a) + 1), lambda at: (floats(at, 4),), name="returned")
case(lambda a: shared(a), lambda at: (floats(at, 4),), name="returned_as_tensor")
case(lambda a: (a[1:], torch.tensor(a)), lambda at: (floats(at, 4),), 20, name="returned_in_part")
# writes
case(lambda a: (a.__setitem__(0, 7), a.__imul__(2), a.sum())[2], lambda at: (floats(at, 4),), name="written")
case(lambda a: (shared(a).mul_(3), float(a[0]))[1], lambda at: (floats(at, 4),), name="written_as_tensor")
case(lambda a: torch.tensor(a.__imul__(2)), lambda at: (floats(at, 4, 6)[:, 1:4],), name="written_with_gaps")
case(lambda a, b: (a.__iadd__(1), shared(b) * 2)[1], lambda at: [floats(at, 4)] * 2, name="written_twice")
case(
    lambda a, b: (a.__iadd__(1), shared(b) * 2)[1],
    lambda at: [floats(at, 4)] * 2 if at % 3 == 2 else (floats(at, 4), floats(at + 50, 4)),
    3,
    name="written_twice_at_times",
)
# values that Python needs
case(lambda a: shared(a) * (2 if a[0] > 0 else 3), lambda at: (floats(at, 4),), 3, name="branch")
case(lambda a, x: sum(x * float(i) for i in a), lambda at: (floats(at, 4), torch.ones(3)), name="loop")
case(lambda x, m: x[m].sum(), lambda at: (torch.arange(6.0), floats(at, 6) > 0), name="mask")
case(lambda x, i: x[i] * 2, lambda at: (torch.arange(6.0), whole(at, 6, 4)), name="index")
case(lambda x, i: x[int(i[0])] * 2, lambda at: (torch.arange(3.0), whole(at, 3, 4)), 5, name="int_of_element")
case(lambda x, n: sum(x * k for k in range(n)), lambda at: (torch.ones(2), np.int64(1 + at % 3)), 4, name="range")
case(lambda a: torch.tensor(a.tolist()), lambda at: (floats(at, 3),), name="tolist")
# output
case(lambda a: (print(a, a.mean()), torch.tensor(a))[1], lambda at: (floats(at, 3),), name="printed")
case(lambda a: print(f"{a.mean():.3f} {a} {a[0]}"), lambda at: (floats(at, 3),), name="printed_as_text")


@pytest.mark.parametrize("name", CASES)
def test_arrays_that_change_give_eagers_results_in_few_captures(name: str) -> None:
    make, captures = CASES[name]
    twenty_calls(*make(), captures)


def _read_only_written(array: np.ndarray) -> Any:
    try:
        array[0] = 1
    except ValueError:
        return torch.tensor(array) * 0
    return torch.tensor(array)


def test_arrays_that_cannot_be_written_to_raise_as_in_eager() -> None:
    twenty_calls(lambda: _read_only_written, lambda at: (read_only(floats(at, 4)),), 2)


def test_a_buffer_that_the_caller_fills_again_is_read_at_each_call() -> None:
    for size in (3, 5 << 20):  # the content of the second is too large to be compared
        buffer = np.zeros(size, np.float32)

        def call(at: int, buffer: np.ndarray = buffer) -> tuple[Any, ...]:
            buffer[:3] = at
            return (buffer,)

        twenty_calls(lambda: lambda a: shared(a)[:3] * 2, lambda at, call=call: (call(at)[0],), 2)


def test_a_model_trains_on_arrays() -> None:
    def make() -> Step:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: np.ndarray, y: np.ndarray, rate: np.floating[Any]) -> Any:
            optimizer.param_groups[0]["lr"] = rate
            loss = nn.functional.cross_entropy(model(shared(x)), torch.as_tensor(y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), model.weight.detach().clone()

        return step

    size = lambda at: 3 + 5 * at % 7
    twenty_calls(make, lambda at: (floats(at, size(at), 6), whole(at, 4, size(at)), np.cos(at / 20) / 10), 3)


def test_values_that_decide_too_many_ways_are_guards_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "path_limit", 3)
    twenty_calls(lambda: lambda x, i: x[int(i[0])] * 2, lambda at: (torch.arange(60.0), np.array([at * 3])), 22)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tensor_is_written", [False, True])
def test_writes_to_memory_that_is_an_input_twice_are_refused(tensor_is_written: bool, late: bool) -> None:
    def step(tensor: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        if tensor_is_written:
            tensor.mul_(2)
            return shared(array) + 1
        array *= 2
        return tensor + 1

    compiled = weft.compile(step)
    for at in range(5 if late else 0):
        eager, found = [run(torch.arange(4.0) + at, floats(at, 4)) for run in (step, compiled)]
        assert torch.equal(eager, found)
    tensor = torch.arange(4.0)
    with pytest.raises(UncapturableMutation, match="in the same memory"):
        compiled(tensor, tensor.numpy())
    assert tensor.tolist() == [0, 1, 2, 3]


def test_writes_to_arrays_that_overlap_are_refused() -> None:
    compiled = weft.compile(lambda a, b: (a.__iadd__(1), shared(b) * 2)[1])
    for late in (False, True):
        for at in range(5 * late):
            compiled(floats(at, 4), floats(at + 9, 4))
        whole_array = np.zeros(6, np.float32)
        with pytest.raises(UncapturableMutation, match="in the same memory"):
            compiled(whole_array[:4], whole_array[2:])
        assert not whole_array.any()
