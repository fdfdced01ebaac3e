"""Python's own things that a step reads or changes: every call does as eager does, or an error names the line.

Each row makes a step, what the training script changes before each call, and what is seen after it.
"""

from __future__ import annotations

import io
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import weft
from both_ways import assert_equal
from weft.capture.record.builtin_types import sum_as_python
from weft.errors import PythonStateChanged, UncapturableDraw, UncapturableMutation

Row = tuple[Callable[[torch.Tensor], Any], Callable[[int], Any], Callable[[], Any]]
CALLS = 4


def nothing(_: int = 0) -> None:
    pass


# ---- locks


def acquired() -> Row:
    lock = threading.Lock()

    def step(x: torch.Tensor) -> torch.Tensor:
        lock.acquire()
        return x * 2

    return step, lambda at: lock.release() if lock.locked() else None, lock.locked


def released() -> Row:
    lock = threading.Lock()

    def step(x: torch.Tensor) -> torch.Tensor:
        lock.release()
        return x * 2

    return step, lambda at: lock.acquire(), lock.locked


def asked() -> Row:
    lock = threading.Lock()
    return lambda x: x * (2 if lock.locked() else 3), lambda at: lock.acquire() if at == 2 else None, nothing


def counted() -> Row:
    semaphore = threading.Semaphore(10)

    def step(x: torch.Tensor) -> torch.Tensor:
        semaphore.acquire()
        return x * 2

    return step, nothing, lambda: semaphore._value


def held_twice() -> Row:
    lock = threading.RLock()

    def step(x: torch.Tensor) -> torch.Tensor:
        lock.acquire()
        return x * 2

    def holds() -> int:
        count = 0
        while lock._is_owned():  # type: ignore[attr-defined]
            lock.release()
            count += 1
        return count

    return step, nothing, holds


def in_a_block() -> Row:
    lock = threading.Lock()

    def step(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return x * 2

    return step, nothing, lock.locked


# ---- what Python has loaded


def is_loaded() -> Row:
    def change(at: int) -> None:
        if at == 2:
            sys.modules["a.module"] = sys
        else:
            sys.modules.pop("a.module", None)

    return lambda x: x * (2 if "a.module" in sys.modules else 3), change, nothing


def loaded_module() -> Row:
    def change(at: int) -> None:
        sys.modules["a_module"] = SimpleNamespace(scale=at)  # type: ignore[assignment]

    return lambda x: x * sys.modules["a_module"].scale, change, lambda: sys.modules.pop("a_module", None) and None


def search_path() -> Row:
    before = len(sys.path)

    def seen() -> None:
        del sys.path[before:]

    return lambda x: x * (len(sys.path) - before), lambda at: sys.path.extend(["/nowhere"] * at), seen


# ---- classes that override what a dictionary or a list does


class Guarded(dict[Any, Any]):
    def _fail(self, *args: Any) -> Any:
        raise RuntimeError("the capture ran the user's code")

    items = keys = values = get = __iter__ = __len__ = pop = _fail  # type: ignore[assignment]


class GuardedList(list[Any]):
    def _fail(self, *args: Any) -> Any:
        raise RuntimeError("the capture ran the user's code")

    __iter__ = __len__ = append = _fail  # type: ignore[assignment]


class Counting(dict[Any, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.writes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(key, value)


def guarded() -> Row:
    s = SimpleNamespace(entries=Guarded(a=2.0), items=GuardedList([1.0]))
    change = lambda at: (dict.__setitem__(s.entries, "a", at + 0.5), list.__setitem__(s.items, 0, at))
    return lambda x: x * s.entries["a"] + s.items[0], change, nothing


def counting() -> Row:
    s = SimpleNamespace(entries=Counting(a=2.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        s.entries["b"] = x.sum()
        return x

    return step, nothing, lambda: (dict(s.entries), s.entries.writes)


# ---- one object at several places


def one_list_twice() -> Row:
    s = SimpleNamespace(a=None, b=None)

    def step(x: torch.Tensor) -> Any:
        found = [x.sum().item(), {"x": x * 2}]
        s.a, s.b = found, (found, found[1])
        return found

    return step, nothing, lambda: (s.a, s.a is s.b[0], s.a[1] is s.b[1])


def state_at_a_second_place() -> Row:
    s = SimpleNamespace(metrics={}, last=None)

    def step(x: torch.Tensor) -> Any:
        s.metrics["loss"] = x.sum()
        s.last = [s.metrics]
        return s.metrics

    return step, nothing, lambda: (s.metrics, s.last[0] is s.metrics)


def returned_object() -> Row:
    s = SimpleNamespace(metrics={}, results=[])

    def step(x: torch.Tensor) -> Any:
        s.metrics["loss"] = x.sum()
        return s.metrics

    def keep(found: Any) -> Any:
        s.results.append(found)
        return found

    return lambda x: keep(step(x)), nothing, lambda: [each is s.metrics for each in s.results]


# ---- functions marked opaque


def appending_to_an_argument() -> Row:
    s = SimpleNamespace(log=[])

    @weft.opaque
    def note(log: list[float], value: torch.Tensor) -> None:
        log.append(value.item())

    def step(x: torch.Tensor) -> torch.Tensor:
        note(s.log, x.sum())
        return x * 2

    return step, nothing, lambda: s.log


def counting_what_the_step_read_before() -> Row:
    s = SimpleNamespace(count=1)

    @weft.opaque
    def note() -> None:
        s.count += 1

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * s.count
        note()
        return y

    return step, nothing, lambda: s.count


# ---- tensors as text, with the names of autograd's nodes


def printed(write: Callable[[torch.Tensor, io.StringIO], Any]) -> Callable[[], Row]:
    def make() -> Row:
        parameter, text = torch.nn.Parameter(torch.ones(2)), io.StringIO()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (parameter * x).sum()
            write(loss, text)
            return loss.detach()

        return step, nothing, text.getvalue

    return make


# ---- attributes of tensors, and their memory


def gradients_kept_on_parameters() -> Row:
    layer = torch.nn.Linear(2, 2)

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        for name, parameter in layer.named_parameters():
            parameter.grad_sample = parameter.grad.clone()
            vars(parameter)[f"of {name}"] = x * 2
        layer.weight.grad.seen = 1

    def seen() -> Any:
        own = [{k: v for k, v in vars(p).items() if k[0] != "_"} for p in layer.parameters()]
        return own, layer.weight.grad.seen

    torch.manual_seed(0)
    layer.reset_parameters()
    return step, nothing, seen


def attribute_that_comes_later() -> Row:
    parameter = torch.nn.Parameter(torch.ones(2))

    def change(at: int) -> None:
        if at == 2:
            parameter.main_grad = torch.ones(2)

    return lambda x: x * parameter.detach() * (2 if hasattr(parameter, "main_grad") else 3), change, nothing


def memory_with_a_second_name() -> Row:
    parameter = torch.nn.Parameter(torch.ones(2))
    old = parameter.data

    def step(x: torch.Tensor) -> torch.Tensor:
        parameter.data = parameter.data * 2 + x
        return parameter.detach() * 2

    return step, lambda at: old.add_(5), lambda: (parameter.detach(), old)


def memory_of_what_is_kept() -> Row:
    s = SimpleNamespace(new=None, parameter=torch.nn.Parameter(torch.ones(2)))

    def step(x: torch.Tensor) -> None:
        s.new = s.parameter.data * x
        s.parameter.data = s.new

    return step, lambda at: s.new.add_(1) if at else None, lambda: (s.parameter.detach(), s.new)


def large_array() -> Row:
    values = np.zeros((600, 600))

    def step(x: torch.Tensor) -> torch.Tensor:
        values[0, 1] += 1
        return x * float(values[0, 0])

    return step, lambda at: values.__setitem__((0, 0), at), lambda: values[0, 1].item()


PRINTED = {
    "print": printed(lambda loss, file: print(loss, loss.exp().expand(40) * 2, file=file)),
    "print a dictionary": printed(lambda loss, file: print({"loss": [loss]}, loss.detach(), file=file)),
    "print a text": printed(lambda loss, file: print(f"loss {loss} {loss!r} {loss * 2!s}", file=file)),
    "print a leaf": printed(lambda loss, file: print(loss.detach().requires_grad_(), file=file)),
}

ROWS: dict[str, Callable[[], Row]] = {
    row.__name__: row
    for row in (acquired, released, asked, counted, held_twice, in_a_block, is_loaded, loaded_module, search_path)
} | {row.__name__: row for row in (guarded, counting, one_list_twice, state_at_a_second_place, returned_object)}
ROWS |= {row.__name__: row for row in (appending_to_an_argument, counting_what_the_step_read_before)} | PRINTED
ROWS |= {row.__name__: row for row in (gradients_kept_on_parameters, attribute_that_comes_later, large_array)}
ROWS |= {row.__name__: row for row in (memory_with_a_second_name, memory_of_what_is_kept)}


def run(row: Row, wrap: Callable[..., Any] = lambda step: step) -> list[Any]:
    step, change, seen = row
    called, found = wrap(step), []
    for at in range(CALLS):
        change(at)
        result = called(torch.arange(2.0) + at)
        found.append((result, seen()))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_each_call_does_as_eager_does(name: str) -> None:
    assert_equal(run(ROWS[name](), weft.compile), run(ROWS[name]()))


class Mirrored(OrderedDict[str, Any]):
    """Keeps each entry as an attribute too, as outputs of models do."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


torch.utils._pytree.register_pytree_node(
    Mirrored,
    lambda obj: (list(obj.values()), list(obj)),
    lambda values, keys: _mirrored(dict(zip(keys, values, strict=True))),
)


def _mirrored(entries: dict[str, Any]) -> Mirrored:
    made = Mirrored()
    for key, value in entries.items():
        made[key] = value
    return made


def test_an_argument_that_keeps_its_entries_as_attributes_too() -> None:
    def step(x: torch.Tensor, given: Mirrored) -> torch.Tensor:
        given["loss"] = x.sum()
        return x * 2

    compiled = weft.compile(step)
    for at in range(3):
        found = []
        for called in (compiled, step):
            given = _mirrored({"x": torch.ones(2)})
            called(torch.ones(2) * at, given)
            found.append((dict(given), given.loss, given.loss is given["loss"]))
        assert_equal(*found)


def test_a_lock_that_another_thread_holds_is_no_reason_to_capture_again() -> None:
    step, _, _ = in_a_block()
    lock = step.__closure__[0].cell_contents  # type: ignore[attr-defined]
    compiled = weft.compile(step)
    compiled(torch.ones(2))
    with lock:
        compiled(torch.ones(2))
    assert len(compiled.captures) == 1


def test_what_the_step_imports_stays_imported() -> None:
    sys.modules.pop("colorsys", None)

    def step(x: torch.Tensor) -> torch.Tensor:
        if "colorsys" not in sys.modules:
            import colorsys  # noqa: F401
        return x * 2

    compiled = weft.compile(step)
    for _ in range(3):
        assert_equal(compiled(torch.ones(2)), torch.ones(2) * 2)
    assert "colorsys" in sys.modules


# ---- attributes of arguments and results


def test_attributes_that_a_step_puts_on_results_are_there() -> None:
    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 2
        y.tag, y.half = "y", y / 2
        return {"y": y}

    compiled = weft.compile(step)
    for at in range(3):
        found, wanted = compiled(torch.ones(2) * at)["y"], step(torch.ones(2) * at)["y"]
        assert_equal((found.tag, found.half), (wanted.tag, wanted.half))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_attributes_of_arguments_are_read_and_written_at_each_call(requires_grad: bool) -> None:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        x.seen = x.detach() * 2
        return x.detach() * getattr(x, "scale", 1.0) * (x.mask if hasattr(x, "mask") else 3)

    def argument(at: int) -> torch.Tensor:
        x = torch.full((2,), 2.0, requires_grad=requires_grad)
        if at:
            x.scale, x.mask = at * 0.5, torch.ones(2) * at
        return x

    compiled = weft.compile(step)
    for at in (0, 1, 2, 2, 0, 3):
        mine, theirs = argument(at), argument(at)
        assert_equal((compiled({"x": mine}), mine.seen), (step({"x": theirs}), theirs.seen))


@pytest.mark.parametrize("source", ["state", "argument", "view"])
def test_memory_of_another_tensor_as_data_is_refused(source: str) -> None:
    parameter, other = torch.nn.Parameter(torch.ones(2)), torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        parameter.data = {"state": other[:2], "argument": x, "view": other.view(2, 2)[0]}[source]
        return parameter.detach() * 2

    with pytest.raises(UncapturableMutation, match=r"another tensor of yours, at .*test_world_of_python\.py:\d+"):
        weft.compile(step)(torch.ones(2))
    assert_equal(parameter.detach(), torch.ones(2))


# ---- what an opaque function changes before the step reads it


def reads_a_length() -> Callable[[torch.Tensor], Any]:
    s = SimpleNamespace(log=[])

    @weft.opaque
    def note(value: torch.Tensor) -> None:
        s.log.append(value.item())

    def step(x: torch.Tensor) -> torch.Tensor:
        note(x.sum())
        return x * len(s.log)

    return step


def reads_in_a_helper() -> Callable[[torch.Tensor], Any]:
    s = SimpleNamespace(count=1)

    @weft.opaque
    def note() -> None:
        s.count += 1

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * s.count

    def step(x: torch.Tensor) -> torch.Tensor:
        note()
        return scaled(x)

    return step


def reads_in_a_loop() -> Callable[[torch.Tensor], Any]:
    s = SimpleNamespace(count=1)

    @weft.opaque
    def note() -> None:
        s.count += 1

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x * s.count
            note()
        return x

    return step


def keeps_an_argument() -> Callable[[torch.Tensor], Any]:
    s = SimpleNamespace(log=None)

    @weft.opaque
    def note(log: list[float], value: torch.Tensor) -> None:
        log.append(value.item())

    def step(x: torch.Tensor) -> torch.Tensor:
        log: list[float] = []
        note(log, x.sum())
        s.log = log
        return x * 2

    return step


@pytest.mark.parametrize("make", [reads_a_length, reads_in_a_helper, reads_in_a_loop, keeps_an_argument])
def test_a_change_that_the_capture_did_not_see_is_named(make: Callable[[], Any]) -> None:
    with pytest.raises(
        PythonStateChanged, match=r"in .*note, which .* called at .*test_world_of_python\.py:\d+ in step"
    ):
        weft.compile(make())(torch.ones(2))


# ---- sums of floats


def test_floats_are_added_as_python_adds_them() -> None:
    def step(x: torch.Tensor, add: Callable[..., Any]) -> Any:
        values = [*(x / 3).tolist(), 1e16, 1.0, *(x / 7).tolist(), -1e16]
        return add(values), x * add(values), add(values, 0.1), add((v * v for v in values), 1), add([1, 2]), add([x, x])

    captured = weft.compile(lambda x: step(x, sum_as_python))
    plain = weft.compile(lambda x: step(x, lambda *values: sum(*values)))
    for at in range(3):
        x = torch.arange(3.0, dtype=torch.float64) + at
        assert_equal(captured(x), step(x, sum))
        assert_equal(plain(x), step(x, sum))


# ---- warnings


@pytest.mark.parametrize("action", ["always", "default", "once", "ignore"])
def test_warnings_are_given_as_often_as_in_eager(action: Any) -> None:
    def counts(called: Any) -> list[int]:
        found = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for _ in range(3):
                called(torch.ones(2))
                found.append(len([each for each in caught if "careful" in str(each.message)]))
            warnings.simplefilter("always")
            called(torch.ones(2))
            return [*found, len(caught)]

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        names: dict[str, Any] = {"__name__": "a_script"}  # with a registry of its own
        exec("import warnings\ndef step(x):\n    warnings.warn('careful')\n    return x * 2\n", names)
        return names["step"]

    assert counts(weft.compile(make())) == counts(make())


def test_a_warning_that_is_an_error_is_raised() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("careful", RuntimeWarning, stacklevel=2)
        return x

    compiled = weft.compile(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="careful"):
            compiled(torch.ones(2))


# ---- the present


@pytest.mark.parametrize("text", ["now", "today"])
def test_the_present_as_numpy_tells_it_is_refused(text: str) -> None:
    step = weft.compile(lambda x: x * float(np.datetime64(text) > np.datetime64("2020-01-01")))
    with pytest.raises(UncapturableDraw, match=rf"numpy\.datetime64\('{text}'\) at .*test_world_of_python\.py:\d+"):
        step(torch.ones(2))


def test_dates_that_are_no_present_are_numbers() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        days = np.array(["2020-01-03"], dtype="datetime64[D]")
        assert isinstance(days[0], np.datetime64)
        assert np.dtype(np.datetime64).kind == "M"
        return x * float((days[0] - np.datetime64("2020-01-01")) / np.timedelta64(1, "D"))

    compiled = weft.compile(step)
    for _ in range(2):
        assert_equal(compiled(torch.ones(2)), step(torch.ones(2)))
