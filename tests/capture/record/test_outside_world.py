"""What a step reads from outside and does there: eager's answer and eager's effect at every call, or a named error.

Each row makes a step, and what the training script changes before each call. Rows whose step is refused say with which
error; nothing happened outside by then.
"""

from __future__ import annotations

import collections
import concurrent.futures
import csv
import functools
import io
import itertools
import json
import os
import pathlib
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import weft
from both_ways import assert_equal
from weft.errors import MemoryOfTensor, OutsideEffect, UncapturableDraw, WeftError

Step = Callable[[torch.Tensor], Any]
Change = Callable[[int], Any]
Seen = Callable[[], Any]
Row = Callable[[pathlib.Path], tuple[Step, Change, Seen]]


def _nothing(_: int = 0) -> None:
    pass


# ---- what gives eager's results at every call


def _answers(read: Callable[[pathlib.Path], float]) -> Row:
    """A step that asks about a folder, into which the script writes one more file before each call."""

    def make(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
        def write(at: int) -> None:
            (folder / f"{at}.txt").write_text("x" * at)
            (folder / "one.txt").write_text("x" * at)

        return lambda x: x * read(folder), write, _nothing

    return make


def _writes(write: Callable[[Any, torch.Tensor], Any]) -> Row:
    """A step that writes to an open file."""

    def make(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
        file = open(folder / "log.txt", "w", buffering=1)  # noqa: SIM115

        def step(x: torch.Tensor) -> torch.Tensor:
            write(file, x)
            return x * 2

        return step, _nothing, lambda: (folder / "log.txt").read_text()

    return make


def _held_write(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
    text = io.StringIO()
    write = text.write

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * write("a line\n")

    return step, _nothing, text.getvalue


def _held_csv(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
    text = io.StringIO()
    rows = csv.writer(text)

    def step(x: torch.Tensor) -> torch.Tensor:
        rows.writerow(["loss", x.sum().item()])
        return x

    return step, _nothing, text.getvalue


def _simple_queue(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def step(x: torch.Tensor) -> torch.Tensor:
        found.put(x.sum().item())
        return x

    return step, _nothing, lambda: [found.get() for _ in range(found.qsize())]


class _Logger:
    """As experiment trackers are made: a file, and a method that writes one line."""

    def __init__(self) -> None:
        self.file = io.StringIO()

    def log(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(sorted(values)) + "\n")


def _tracker(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
    tracker = _Logger()

    def step(x: torch.Tensor) -> torch.Tensor:
        tracker.log({"loss": x.sum()})
        return x

    return step, _nothing, tracker.file.getvalue


def _recursion(folder: pathlib.Path) -> tuple[Step, Change, Seen]:
    limit = 1234
    sys.setrecursionlimit(limit)
    return lambda x: x * sys.getrecursionlimit(), lambda at: sys.setrecursionlimit(limit + at), _nothing


EQUAL: dict[str, Row] = {
    "os.path.exists": _answers(lambda folder: 2.0 if os.path.exists(folder / "2.txt") else 1.0),
    "Path.exists": _answers(lambda folder: 2.0 if (folder / "2.txt").exists() else 1.0),
    "os.listdir": _answers(lambda folder: len(os.listdir(folder))),
    "Path.iterdir": _answers(lambda folder: len(list(folder.iterdir()))),
    "os.stat": _answers(lambda folder: os.stat(folder / "one.txt").st_size if folder.joinpath("1.txt").exists() else 0),
    "getsize": _answers(lambda folder: os.path.getsize(folder / "one.txt") if os.path.exists(folder / "1.txt") else 0),
    "sys.getrecursionlimit": _recursion,
    "file.write": _writes(lambda file, x: file.write("a line\n")),
    "file.writelines": _writes(lambda file, x: file.writelines(["a\n", "b\n"])),
    "print to a file": _writes(lambda file, x: print("loss", x.sum().item(), file=file)),
    "csv": _writes(lambda file, x: csv.writer(file).writerow(["a", 1])),
    "json": _writes(lambda file, x: json.dump({"a": [1, 2]}, file)),
    "held write": _held_write,
    "held csv writer": _held_csv,
    "SimpleQueue.put": _simple_queue,
    "tracker": _tracker,
}


def _run(row: Row, folder: pathlib.Path, wrap: Callable[[Step], Step]) -> tuple[list[Any], Any]:
    folder.mkdir()
    step, change, seen = row(folder)
    called, results = wrap(step), []
    for at in range(4):
        if at:
            change(at)
        results.append(called(torch.full((2,), at + 1.0)))
    return results, seen()


@pytest.mark.parametrize("name", EQUAL)
def test_each_call_reads_and_does_what_eager_does(name: str, tmp_path: pathlib.Path) -> None:
    limit = sys.getrecursionlimit()
    try:
        eager = _run(EQUAL[name], tmp_path / "eager", lambda step: step)
        compiled = _run(EQUAL[name], tmp_path / "compiled", weft.compile)
    finally:
        sys.setrecursionlimit(limit)
    assert_equal(compiled[0], eager[0])
    assert compiled[1] == eager[1]


def test_each_call_writes_to_the_streams_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write("out\n")
        sys.stderr.write("err\n")
        sys.stdout.flush()
        return x

    stdout, compiled = sys.stdout, weft.compile(step)
    for _ in range(3):
        compiled(torch.ones(2))
    assert capsys.readouterr() == ("out\n" * 3, "err\n" * 3)
    assert sys.stdout is stdout


# ---- clocks that the step holds


class _Holder:
    clock = staticmethod(time.perf_counter)
    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot = time.perf_counter


HOLDER = _Holder()
PARTIAL = functools.partial(time.perf_counter)
NESTED = {"clocks": (PARTIAL, [time.perf_counter])}
CLOCKS = {time.perf_counter}
READS: dict[str, Callable[[], float]] = {
    "partial": lambda: PARTIAL(),
    "class": lambda: _Holder.clock(),
    "slot": lambda: HOLDER.slot(),
    "set": lambda: next(iter(CLOCKS))(),
    "tuple in a dict": lambda: NESTED["clocks"][0](),
    "by number": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
    "in ns": lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC),
}


@pytest.mark.parametrize("name", READS)
def test_clocks_are_read_anew_however_they_are_held(name: str) -> None:
    read = READS[name]
    step = weft.compile(lambda x: (x, read()))
    times = [step(torch.ones(()))[1] for _ in range(4)]
    assert times == sorted(times)
    assert len(set(times)) == 4
    assert len(step.captures) == 1
    assert PARTIAL.func is HOLDER.slot is _Holder.clock is time.perf_counter
    assert {time.perf_counter} == CLOCKS


# ---- what is refused


def _generator() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


def _loader() -> Any:
    return iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1))


def _first(iterator: Any) -> Any:
    for value in iterator:
        return value
    return None


ITERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "iter": (lambda: iter([1.0, 2.0]), next),
    "generator": (_generator, next),
    "send": (_generator, lambda it: it.send(None)),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "map": (lambda: map(float, range(3)), next),
    "zip": (lambda: zip([1.0, 2.0], [1, 2], strict=True), lambda it: next(it)[0]),
    "for": (lambda: iter([1.0, 2.0]), _first),
    "islice": (itertools.count, lambda it: sum(itertools.islice(it, 2))),
    "max": (itertools.count, lambda it: max(itertools.islice(it, 2))),
    "loader": (_loader, lambda it: next(it)[0]),
    "in an attribute": (lambda: Numbered(itertools.count()), lambda holder: next(holder.it)),
    "of a class of the user's": (lambda: Numbered(iter([1.0, 2.0])), lambda holder: next(holder)),
}


class Numbered:
    """An iterator in an attribute of an object that is an iterator, too."""

    def __init__(self, it: Any) -> None:
        self.it = it

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.it)


@pytest.mark.parametrize("name", ITERATORS)
def test_iterators_from_outside_are_refused_before_they_move(name: str) -> None:
    make, take = ITERATORS[name]
    iterator, untouched = make(), make()
    with pytest.raises(UncapturableDraw, match=r"iterator from outside the step at .*test_outside_world\.py:\d+"):
        weft.compile(lambda x: x * take(iterator))(torch.ones(2))
    assert_equal(take(iterator), take(untouched))


@pytest.mark.parametrize("name", ["send", "in an attribute", "of a class of the user's"])
def test_iterators_that_arguments_hold_are_refused_before_they_move(name: str) -> None:
    """And arguments of which the step asks more than the next item, see test_iterator_arguments.py for others."""
    make, take = ITERATORS[name]
    iterator, untouched = make(), make()
    with pytest.raises(UncapturableDraw, match="iterator from outside the step"):
        weft.compile(lambda x, it: x * take(it))(torch.ones(2), iterator)
    assert_equal(take(iterator), take(untouched))


def test_iterators_that_a_step_makes_are_its_own() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        numbers = itertools.count(2)
        return x * next(numbers) * next(each for each in (5.0, 6.0)) * sum(map(float, range(3)))

    for _ in range(2):
        assert_equal(weft.compile(step)(torch.ones(2)), step(torch.ones(2)))


def _database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t(a)")
    return connection


DATABASE, QUEUE, SOCKETS = _database(), queue.Queue[Any](), socket.socketpair()
LOCK = threading.Lock()


class Key:
    """Something to refer to weakly."""


def _ordered() -> tuple[Step, Change]:
    table = {"a": 1.0, "b": 2.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        for value in table.values():
            x = x * 2 + value
        return x

    return step, lambda at: table.update(a=table.pop("a"))


def _weakly(kind: Callable[[list[Key]], Any], read: Callable[[Any], float]) -> Callable[[], tuple[Step, Change]]:
    def make() -> tuple[Step, Change]:
        keys = [Key(), Key(), Key()]
        held = kind(keys)
        return lambda x: x * read(held), lambda at: keys.pop() and None

    return make


def _named(at: int) -> None:
    threading.current_thread().name = "x" * at


def _future() -> tuple[Step, Change]:
    saving = concurrent.futures.Future[int]()
    return lambda x: x * (2 if saving.done() else 3), lambda at: saving.set_result(1) if at == 2 else None


def _thread() -> tuple[Step, Change]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()

    def change(at: int) -> None:
        if at == 2:
            ended.set()
            thread.join()

    return lambda x: x * (2 if thread.is_alive() else 3), change


# A step, and what the script changes before each call but the first.
COMPARED: dict[str, Callable[[], tuple[Step, Change]]] = {
    "order of a dictionary": _ordered,
    "weak set": _weakly(weakref.WeakSet, len),
    "weak keys": _weakly(lambda keys: weakref.WeakKeyDictionary(dict.fromkeys(keys, 2.0)), lambda d: sum(d.values())),
    "weak values": _weakly(lambda keys: weakref.WeakValueDictionary(dict(enumerate(keys))), len),
    "arguments of the script": lambda: (lambda x: x * len(sys.argv), lambda at: sys.argv.append("more")),
    "future": _future,
    "thread": _thread,
    "what numpy does about errors": lambda: (
        lambda x: x * len(np.geterr()["divide"]),
        lambda at: np.seterr(divide=["warn", "ignore"][at % 2]),  # type: ignore[arg-type]
    ),
    "name of the thread": lambda: (lambda x: x * len(threading.current_thread().name), _named),
    "flag of a backend": lambda: (
        lambda x: x * (2 if torch.backends.cudnn.benchmark else 3),
        lambda at: setattr(torch.backends.cudnn, "benchmark", at == 1),
    ),
    "function of a backend": lambda: (
        lambda x: x * (2 if torch.backends.cuda.flash_sdp_enabled() else 3),
        lambda at: torch.backends.cuda.enable_flash_sdp(at == 2),
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_the_script_changes_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(wrap: Callable[..., Any]) -> list[float]:
        monkeypatch.setattr(sys, "argv", ["train.py"])
        monkeypatch.setattr(threading.current_thread(), "name", "MainThread")
        # torch's own test tools, which another test may have imported, forbid to set flags.
        monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        torch.backends.cuda.enable_flash_sdp(True)
        np.seterr(divide="warn")
        step, change = COMPARED[name]()
        compiled, found = wrap(step), []
        for at in range(4):
            if at:
                change(at)
            found.append(compiled(torch.ones(2)).sum().item())
        return found

    try:
        expected = results(lambda step: step)
        assert len(set(expected)) > 1
        assert results(weft.compile) == expected
    finally:
        np.seterr(divide="warn")
        torch.backends.cuda.enable_flash_sdp(True)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], type[WeftError]]] = {
    "uuid1": (lambda x: x * (uuid.uuid1().int % 7), UncapturableDraw),
    "uuid4": (lambda x: x * (uuid.uuid4().int % 7), UncapturableDraw),
    "getrandom": (lambda x: x * os.getrandom(1)[0], UncapturableDraw),
    "scandir": (lambda x: x * len(list(os.scandir("."))), UncapturableDraw),
    "glob": (lambda x: x * len(list(pathlib.Path(".").glob("*"))), UncapturableDraw),
    "read of a file": (lambda x: x * len(FILE.read(1)), UncapturableDraw),
    "lines of a file": (lambda x: x * len(list(FILE)), UncapturableDraw),
    "queue.get": (lambda x: QUEUE.get(), UncapturableDraw),
    "queue.empty": (lambda x: x if QUEUE.empty() else x * 2, UncapturableDraw),
    "queue.put": (lambda x: QUEUE.put(1.0), OutsideEffect),
    "queue.put_nowait": (lambda x: QUEUE.put_nowait(x), OutsideEffect),
    "socket.send": (lambda x: SOCKETS[0].send(b"x"), OutsideEffect),
    "database": (lambda x: DATABASE.execute("insert into t values(1)"), UncapturableDraw),
    "subprocess": (lambda x: subprocess.run(["true"], check=True), OutsideEffect),
    "os.system": (lambda x: os.system("true"), OutsideEffect),
    "makedirs": (lambda x: os.makedirs("never/made"), OutsideEffect),
    "Path.mkdir": (lambda x: pathlib.Path("never").mkdir(), OutsideEffect),
    "remove": (lambda x: os.remove("never"), OutsideEffect),
    "chdir": (lambda x: os.chdir("/"), OutsideEffect),
    "thread": (lambda x: threading.Thread(target=_nothing).start(), OutsideEffect),
    "settings of torch": (lambda x: torch.set_num_threads(1), OutsideEffect),
    "a flag of a backend": (lambda x: setattr(torch.backends.cudnn, "benchmark", False), OutsideEffect),
    "sleep": (lambda x: time.sleep(0), OutsideEffect),
    "torch.save": (lambda x: torch.save(x, io.BytesIO()), MemoryOfTensor),
    "torch.save of what is outside": (lambda x: torch.save(OUTSIDE, io.BytesIO()), MemoryOfTensor),
    "torch.load": (lambda x: torch.load("never"), UncapturableDraw),
    "torch.jit.trace": (lambda x: torch.jit.trace(torch.nn.Linear(2, 2), x)(x), UncapturableDraw),
    "torch.jit.script": (lambda x: torch.jit.script(torch.nn.Linear(2, 2))(x), UncapturableDraw),
}
FILE, OUTSIDE = io.StringIO("one\ntwo\n"), torch.ones(2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_at_every_call_is_refused_with_its_line(name: str, tmp_path: pathlib.Path) -> None:
    step, error = REFUSED[name]
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(error, match=r"test_outside_world\.py:\d+"):
            weft.compile(step)(torch.ones(2))
        assert os.listdir(tmp_path) == []
        assert os.getcwd() == str(tmp_path)
    finally:
        os.chdir(here)
    assert (QUEUE.qsize(), FILE.tell()) == (0, 0)
    assert DATABASE.execute("select count(*) from t").fetchone() == (0,)


@functools.lru_cache
def _remembered() -> int:
    return 2 if os.path.exists("nowhere") else 3


def test_functions_that_remember_and_modules_on_import_may_look_around(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looks_around.py").write_text("import os\nos.makedirs(os.path.dirname(__file__) + '/made')\nTWO = 2\n")

    def step(x: torch.Tensor) -> torch.Tensor:
        import looks_around  # type: ignore[import-not-found]

        return x * _remembered() * looks_around.TWO

    compiled = weft.compile(step)
    for _ in range(2):
        assert_equal(compiled(torch.ones(2)), torch.full((2,), 6.0))
    assert not any("nowhere" in str(guard) for guard in compiled.entries[0].guards.listed())


def test_other_threads_use_files_queues_and_iterators_during_a_capture() -> None:
    counter, found, ready, done = itertools.count(), collections.deque(maxlen=5), threading.Event(), threading.Event()

    def other() -> None:
        while not done.is_set():
            QUEUE.put(next(counter))
            found.append((QUEUE.get(), os.path.exists("."), len(list(os.scandir("/")))))
            ready.set()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ready.wait()
        step = weft.compile(lambda x: x * (2 if os.path.exists("nowhere") else 3) * len([counter]))
        assert_equal(step(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        done.set()
        thread.join()
    assert found
