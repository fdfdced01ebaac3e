"""Arrays that numpy draws inside a step, and what numpy computes from them."""

from __future__ import annotations

import contextlib
import importlib.machinery
import pickle
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twenty_calls import comparable

import weft
from both_ways import assert_equal
from weft.errors import CaptureValueEscaped, TextOfValue, UncapturableDraw, WeftError
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

Step = Callable[..., Any]
WIDTH = 8


def _comparable(value: Any) -> Any:
    """A value with all that two arrays may differ in."""
    assert "HostArray" not in type(value).__name__
    if isinstance(value, (np.ndarray, np.generic)):
        layout = value.strides if isinstance(value, np.ndarray) and value.size else ()
        return type(value).__name__, str(value.dtype), value.shape, layout, value.tobytes()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_comparable, value)]
    return type(value).__name__, value


def _as_eager(make: Callable[[], tuple[Any, ...]], *, calls: int = 6, captures: int | None = 1, **options: Any) -> Any:
    """Run the step of ``make`` (a step, then its generators) both ways from the same seeds; compare results with their
    types and layouts, and the states of all generators."""
    found = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, **options)):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        step, *generators = make()
        step = wrap(step)
        with contextlib.suppress(RuntimeWarning):
            results = [_comparable(step(torch.arange(float(WIDTH)) + at)) for at in range(calls)]
        drawn = [each.random() for each in generators]
        found.append([results, drawn, str(np.random.get_state()), random.getstate(), torch.get_rng_state()])
    assert_equal(found[1], found[0])
    assert captures is None or len(step.captures) == captures, step.captures
    return step


# ---- masks, mixup, permutations


def _mask_indices(shape: tuple[int, int], prob: float, length: int, lengths: Any, min_masks: int) -> Any:
    """SpecAugment as transformers writes it."""
    batch, width = shape
    epsilon = np.random.rand(1).item()

    def spans(input_length: Any) -> Any:
        count = int(prob * input_length / length + epsilon)
        count = max(count, min_masks)
        if count * length > width:
            count = width // length
        if input_length - (length - 1) < count:
            count = max(input_length - (length - 1), 0)
        return count

    mask = np.zeros((batch, width), dtype=bool)
    most = spans(width)
    if most == 0:
        return mask
    rows = []
    for input_length in lengths:
        count = spans(input_length)
        starts = np.random.choice(np.arange(input_length - (length - 1)), count, replace=False)
        dummy = width - 1 if len(starts) == 0 else starts[0]
        rows.append(np.concatenate([starts, np.ones(most - count, dtype=np.int32) * dummy]))
    places = np.array(rows)
    places = np.broadcast_to(places[:, :, None], (batch, most, length)).reshape(batch, most * length)
    offsets = np.arange(length)[None, None, :]
    offsets = np.broadcast_to(offsets, (batch, most, length)).reshape(batch, most * length)
    places = places + offsets
    if places.max() > width - 1:
        places[places > width - 1] = width - 1
    np.put_along_axis(mask, places, 1, -1)
    return mask


def test_masks_of_spec_augment() -> None:
    def make() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            hidden = model(x.repeat(12).view(2, 12, 4))
            mask = _mask_indices((2, 12), 0.25, 2, [12, 12], 1)
            marked = torch.tensor(mask, device=hidden.device, dtype=torch.bool)
            hidden[marked] = torch.zeros(4)
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, marked

        return (step,)

    _as_eager(make, captures=None, mode="bitwise")


def test_masks_of_spec_augment_with_lengths_of_a_tensor() -> None:
    attention = torch.ones(2, 12, dtype=torch.long)
    attention[1, 10:] = 0

    def step(x: torch.Tensor) -> Any:
        mask = _mask_indices((2, 12), 0.25, 2, attention.sum(-1).tolist(), 1)
        return x.repeat(3).view(2, 12).masked_fill(torch.from_numpy(mask), 0), mask.copy()

    _as_eager(lambda: (step,), calls=4, captures=None)


def test_mixup_and_permutations() -> None:
    def make() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            share = np.random.beta(0.4, 0.4, size=(2, 1)).astype(np.float32)
            order = np.random.permutation(2)
            mixed = torch.from_numpy(share) * x.view(2, 4) + torch.from_numpy(1 - share) * x.view(2, 4)[order]
            loss = model(mixed).square().mean() * share.max().item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, mixed, share.copy(), order, x[torch.as_tensor(np.random.randint(0, 8, (3,)))]

        return (step,)

    _as_eager(make)


def test_arrays_reach_generated_kernels() -> None:
    """The kernels run in triton's interpreter."""

    def step(x: torch.Tensor) -> Any:
        share = torch.from_numpy(np.random.beta(0.4, 0.4, size=(2, 1)).astype(np.float32))
        mask = np.zeros((2, 4), dtype=bool)
        np.put_along_axis(mask, np.random.permutation(4)[None, :2].repeat(2, axis=0), 1, -1)
        return (share * x.view(2, 4) + 1) * 2, torch.relu(torch.tensor(mask) * x.view(2, 4) - 3)

    x = torch.arange(8.0)
    entry = weft.compile(step).entry_for((x,), {})
    program = compile_aten(use_kernels(make_kernels(run_passes(entry.captured.graph, KERNEL_PASSES))))
    assert program.operations["generated"] > 3
    entry.program = program
    found = []
    for run in (lambda: step(x), lambda: entry.run([x], ((x,), {}))):
        np.random.seed(4)
        found.append([_comparable([run() for _ in range(6)]), str(np.random.get_state())])
    assert_equal(found[1], found[0])


# ---- generators, functions, writes, numbers


def test_generators_of_all_kinds() -> None:
    def make() -> tuple[Any, ...]:
        rng, old = np.random.default_rng(1), np.random.RandomState(2)

        def step(x: torch.Tensor) -> Any:
            order = np.arange(6.0)
            rng.shuffle(order)
            own = np.random.default_rng(7)  # makes the same numbers at every call
            new = rng.integers(0, 8, 5), rng.permuted(np.arange(8)), rng.choice([1.5, 2.5]), rng.random(3, dtype="f4")
            legacy = old.choice(8, 3), old.dirichlet([1, 2, 3]), old.multinomial(5, [0.2, 0.8]), old.normal([0, 9], 1)
            return (
                x * own.random(),
                order,
                *new,
                *legacy,
                np.random.choice(5),
                np.random.choice(8, 2, p=old.dirichlet([1] * 8)),
            )

        return step, rng, old.rand and rng

    _as_eager(make)


def test_functions_operators_and_layouts_are_numpys() -> None:
    def step(x: torch.Tensor) -> Any:
        a = np.random.randn(3, 4)
        whole = np.random.randint(0, 3, 4)
        b = a.T + 1
        single = np.float32(2) * a.astype(np.float32)
        single += 1
        single[0] -= 2
        row = a[1]
        row *= 3
        a.reshape(2, 6)[0, 0] = 9.0
        powers = (a.T**2).sum(), b.sum(axis=0), 1 - a[0, 0], a.mean(), np.add.reduce(a, axis=1), a[::-1].copy(), a @ a.T
        choices = np.clip(a, -1, 1), np.where(a > 0, a, -a), np.argsort(a, axis=1), np.linalg.norm(a)
        parts = divmod(whole, 2), np.split(whole, 2)[1].copy(), np.tile(whole, 2), np.cumsum(whole), [*whole][1]
        chosen = np.zeros((3, 4))
        np.copyto(chosen, a, where=a > 0)
        np.add(a, 1, out=chosen[:], where=a > 1)
        with np.errstate(divide="ignore"):
            return a.copy(), b, single, *powers, *choices, *parts, chosen, x, np.log(np.abs(whole)), a[x.shape[0] - 6]

    _as_eager(lambda: (step,))


def test_writes_are_seen_through_views_and_tensors() -> None:
    def step(x: torch.Tensor) -> Any:
        known = np.zeros(4)
        part = known[1:3]
        part[0] = 5
        whole = int(known[1])  # known in the capture: no branch
        known.view()[3] = np.random.rand(1)[0]
        ones = np.ones_like(known)
        ones[np.random.permutation(4)[:2]] = 0
        shared = np.random.rand(4)
        tensor = torch.from_numpy(shared)
        shared[0] = 7
        tensor.mul_(2)
        first = tensor.clone()
        shared *= 3
        torch.as_tensor(shared[1:3]).add_(1)
        return known.copy(), part.copy(), whole, ones, first, tensor + 0, shared.sum()

    _as_eager(lambda: (step,))


def test_arrays_that_the_step_stores() -> None:
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> Any:
        kept["order"] = np.random.permutation(3)
        return x, kept["order"].copy(), np.arange(3)

    _as_eager(lambda: (step,), calls=2, captures=None)
    kept["order"][0] = 5  # in memory of its own
    assert type(kept["order"]) is np.ndarray


def test_numbers_of_arrays() -> None:
    def step(x: torch.Tensor) -> Any:
        a, mix = np.random.rand(2), np.random.beta(1, 1)
        s = a[0]
        both = np.array([mix, 1 - mix]) * a
        numbers = s + 1, 2**s, -s, round(s, 2), abs(s - 1), np.sqrt(s), isinstance(s, float), type(a) is np.ndarray
        tensors = (
            x * s,
            s * x,
            x * s.item(),
            torch.tensor(s),
            torch.tensor(a, dtype=torch.float32),
            torch.ones(2) * a[1],
        )
        return *numbers, *tensors, both, np.full(3, mix), a.tolist(), len(a), a.shape, np.random.rand(1).item()

    _as_eager(lambda: (step,))


def test_branches_and_sizes_that_values_decide() -> None:
    def step(x: torch.Tensor) -> Any:
        a = np.random.rand(3)
        chosen = a[a > 0.5]
        if (a > 0.3).all():
            return x * 2, chosen, int(a[0] * 2 + 0.5)
        return x * len(chosen), np.nonzero(a > 0.5)[0], a[: len(chosen)].copy()

    _as_eager(lambda: (step,), captures=None)


def _read(table: Any) -> Step:
    return lambda x: x[torch.from_numpy(table[np.random.permutation(8)])]


def _written(table: Any) -> Step:
    return lambda x: (table.__setitem__(np.random.permutation(8)[:3], np.random.randint(9)), x * 2, table.sum())


def _put(table: Any) -> Step:
    return lambda x: (np.put(table, np.random.permutation(8), np.arange(8)), x * 2, table[2])


@pytest.mark.parametrize("make", [_read, _written, _put])
def test_drawn_arrays_are_places_in_arrays_of_the_state(make: Callable[[Any], Step]) -> None:
    found = []
    for wrap in (lambda step: step, weft.compile):
        np.random.seed(2)
        table = np.arange(8)
        step = wrap(make(table))
        found.append([(comparable(step(torch.arange(8.0))), table.tolist(), np.random.rand()) for _ in range(6)])
    assert_equal(found[1], found[0])
    assert len(step.captures) <= 2


# ---- what is refused


def test_what_has_no_place_in_a_graph_is_refused_with_its_line() -> None:
    order = list(range(8))
    drawn = lambda: np.random.permutation(8)
    refused: list[tuple[Step, type[WeftError], str]] = [
        (lambda x: (np.random.shuffle(order), x), UncapturableDraw, "shuffles a list"),
        (lambda x: x * np.random.rand(8), UncapturableDraw, "torch.from_numpy"),
        (lambda x: np.random.rand(8) * x, UncapturableDraw, "torch.from_numpy"),
        (lambda x: (pickle.dumps(drawn()), x), UncapturableDraw, "pickled"),
        (lambda x: {drawn()[0]: x}, UncapturableDraw, "key of a dictionary"),
        (lambda x: (str(drawn()), x)[1] * len(str(drawn())), TextOfValue, "text"),
        (lambda x: (a := drawn(), a[1:]), UncapturableDraw, "two arrays of one memory"),
        (lambda x: np.apply_along_axis(sum, 0, drawn()), UncapturableDraw, "apply_along_axis"),
        (lambda x: np.random.choice(["a", "b"], 2), UncapturableDraw, "dtype"),
        (lambda x: np.random.bytes(3), UncapturableDraw, "numpy.random.bytes"),
    ]
    for step, error, match in refused:
        np.random.seed(2)
        before = str(np.random.get_state())
        with pytest.raises(error, match=match) as caught:
            weft.compile(step)(torch.arange(8.0))
        assert "test_array_draws.py" in str(caught.value)
        assert str(np.random.get_state()) == before
    assert order == list(range(8))


def test_code_that_wants_a_buffer_gets_none() -> None:
    for look in (memoryview, bytearray, torch.FloatTensor, lambda a: a.ctypes, lambda a: a.tobytes()):
        with pytest.raises((TypeError, RuntimeError, WeftError)):
            weft.compile(lambda x, look=look: (look(np.random.rand(8)), x))(torch.arange(8.0))


def test_no_array_of_a_capture_is_left_with_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = types.ModuleType("lost")
    lost.__spec__ = importlib.machinery.ModuleSpec("lost", None)  # a module of a library, which is not walked
    lost.items = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lost", lost)
    for make in (lambda: np.random.rand(2), lambda: (np.random.rand(2), np.zeros(2))[1]):
        with pytest.raises(CaptureValueEscaped, match="HostArray"):
            weft.compile(lambda x, make=make: (importlib.import_module("lost").items.append(make()), x))(torch.ones(2))
        assert lost.items == []
    assert np.zeros(2).tolist() == [0, 0]
    assert type(np.zeros(2)) is np.ndarray
