"""500 damaged, hostile and senseless entries of the cache: each is made again, none ends a run, executes anything or
changes a result."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from step_builder import StepBuilder
from weft import cache_folder, knobs
from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.inductor.cache import graph_cache, kernel_cache
from weft.inductor.cache.kernel_cache import Binary, Resources
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph import serialize
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule import agree_on_cached
from weft.inductor.schedule.decisions import Decisions
from weft.inductor.schedule.schedule_result import Schedule

aten = torch.ops.aten
Damage = Callable[[Path], None]

_FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_seen: list[str] = []
_watching = False


def _audit(event: str, arguments: Any) -> None:
    if _watching and event in _FORBIDDEN:
        _seen.append(event)


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    global _watching
    _watching = True
    _seen.clear()
    with knobs.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"
    _watching = False
    assert _seen == []


# ---- kinds of damage that know nothing of what an entry means


def bytes_changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: _refill(path, change(path.read_bytes()))


def _refill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def raw_damages(size: int, seed: int, flips: int, cuts: int) -> list[Damage]:
    """Damage of a file of ``size`` bytes: flipped bits, cut ends, lost and repeated parts, foreign bytes."""
    draw = random.Random(seed)
    damages: list[Damage] = []
    for _ in range(flips):
        at, bit = draw.randrange(size), draw.randrange(8)
        damages.append(bytes_changed(lambda c, at=at, bit=bit: _flipped(c, at, bit)))
    for _ in range(cuts):
        at = draw.randrange(size)
        damages.append(bytes_changed(lambda c, at=at: c[:at]))
    for _ in range(10):
        start, length = draw.randrange(size - 1), draw.randrange(1, 400)
        foreign = draw.randbytes(length)
        damages += [
            bytes_changed(lambda c, a=start, n=length: c[:a] + c[a + n :]),
            bytes_changed(lambda c, a=start, n=length: c[:a] + c[a : a + n] * 2 + c[a + n :]),
            bytes_changed(lambda c, a=start, n=length, d=foreign: c[:a] + d + c[a + n :]),
        ]
    fills = (b"", b"\n", b"\0" * 4096, b"{}", b"null", b"[" * 50_000, b"0" * 64 + b"\n{}", draw.randbytes(4096))
    return damages + [bytes_changed(lambda c, fill=fill: fill) for fill in fills]


def _replaced(make: Callable[[Path], None]) -> Damage:
    def damage(path: Path) -> None:
        whole = path.with_name("whole")
        os.replace(path, whole)
        make(path)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


FILES: list[Damage] = [
    _replaced(lambda path: path.symlink_to(path.with_name("whole"))),
    _replaced(lambda path: path.symlink_to("/dev/zero")),
    _replaced(lambda path: path.symlink_to(path)),
    _replaced(os.mkfifo),
    _replaced(_sparse),
    _replaced(lambda path: path.mkdir()),
    _replaced(lambda path: None),
    lambda path: path.chmod(0o666),
    lambda path: path.chmod(0o602),
]
if os.geteuid() == 0:  # only root can give a file away
    FILES.append(lambda path: os.chown(path, 12345, 12345))


# ---- content without sense, under a checksum that holds


def checked(content: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> None:
        known = cache_folder.read_checked(path)
        assert known is not None
        cache_folder.write_checked(path, content(known))

    return damage


TEXTS = (
    *(
        b"",
        b" ",
        b"null",
        b"true",
        b"1",
        b"-1e999",
        b'"x"',
        b"[]",
        b"{}",
        b"[[]]",
        b"\xff\xfe",
        b"\0",
        b"NaN",
        b"{1: 2}",
    ),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"nodes": 1}', b"1 2", b"\xef\xbb\xbf{}", b"# -*-"),
)
RESOURCES = ("registers", "spills", "shared", "vector_loads")
VALUES: tuple[Any, ...] = (None, True, -1, 1 << 70, 1.5, "x", [], {}, ["%", 1 << 40], ["#", -(1 << 40)], ["?", 1])


def _graph_changes(tables: dict[str, Any]) -> list[Callable[[dict[str, Any]], Any]]:
    """Changes after which the tables of a graph mean nothing, whatever is in the place of what they change."""
    changes: list[Callable[[dict[str, Any]], Any]] = []

    def put(*path: Any, value: Any) -> None:
        def change(given: dict[str, Any]) -> None:
            for key in path[:-1]:
                given = given[key]
            given[path[-1]] = value

        changes.append(change)

    for name in tables:
        for value in (None, 1, "x", {}, [[]], [None] * 5):
            put(name, value=value)
        changes.append(lambda given, name=name: given.pop(name))
    for at, entry in enumerate(tables["table"]):
        put("table", at, value=["unheard of", *entry[1:]])
        if entry[0] != "frozenset":  # an empty one is as good as another
            put("table", at, value=[entry[0]])
    for at, node in enumerate(tables["nodes"]):
        for field, value in [(0, "call_module"), (0, None), (1, "not an identifier"), (1, node[1] + "\n"), (3, None)]:
            put("nodes", at, field, value=value)
        put("nodes", at, 5, value=1 << 40)
        put("nodes", at, value=node[:4])
        if node[0] == "call_function":
            put("nodes", at, 2, value="operator.add")
            put("nodes", at, 3, value=[["%", 1 << 20]])
        changes.append(lambda given, at=at: given["nodes"].insert(at, given["nodes"][at]))
    changes.append(lambda given: given["nodes"].reverse())
    # A table of entries that refer to earlier ones twice: what it describes has 2**40 values.
    changes.append(_laughing)
    changes.append(lambda given: given["table"].__setitem__(0, ["expression", _tower(40)]))
    changes.append(lambda given: given["table"].__setitem__(0, ["expression", ["Float", "1e999999999", 53]]))
    return changes


def _laughing(given: dict[str, Any]) -> None:
    first = len(given["table"])
    given["table"].append(["dict", ["{", ["a", 1]]])
    given["table"] += [["dict", ["{", ["a", ["#", at]], ["b", ["#", at]]]] for at in range(first, first + 40)]
    given["nodes"][1][5] = first + 40


def _tower(height: int) -> Any:
    return 10 if height == 0 else ["Pow", _tower(height - 1), 60]


def small_step() -> StepGraph:
    build = StepBuilder()
    x = build.input(torch.zeros(4, 8))
    doubled = build.call(aten.mul.Tensor, build.call(aten.exp.default, x), 2)
    build.returns(build.call(aten.sum.dim_IntList, doubled, [1]))
    return build.build()


def other_step() -> StepGraph:
    build = StepBuilder()
    x = build.input(torch.zeros(4, 8))
    build.returns(build.call(aten.sum.dim_IntList, build.call(aten.exp.default, x), [1]))
    return build.build()


def sharded_step() -> StepGraph:
    mesh = torch.distributed.init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
    model = nn.Linear(16, 16).to("cuda")
    weft.fully_shard(model, mesh=mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return capture_step(step, (torch.zeros(4, 16, device="cuda"),), {}).graph


def with_kernels(step: StepGraph) -> StepGraph:
    return kernel_graph(run_passes(step, KERNEL_PASSES))


def test_damaged_graphs_are_made_again(directory: Path) -> None:
    step, other = small_step(), other_step()
    kernels, wanted = with_kernels(step), serialize.dump(with_kernels(step), step)
    graph_cache.cached(step, lambda given: kernels)
    path, made = graph_cache.entry_of(step), []
    content = path.read_bytes()
    graph_cache.cached(other, lambda given: kernels)
    foreign = graph_cache.entry_of(other).read_bytes()

    tables = json.loads(cache_folder.read_checked(path) or b"")
    assert tables == json.loads(wanted)
    changes = []
    for change in _graph_changes(tables):
        changed = copy.deepcopy(tables)
        change(changed)
        changes.append(checked(lambda known, changed=changed: json.dumps(changed).encode()))
    damages = [
        *raw_damages(len(content), 1, 60, 30),
        *FILES,
        bytes_changed(lambda known: foreign),
        *(checked(lambda known, text=text: text) for text in TEXTS),
        *changes,
    ]
    for number, damage in enumerate(damages):
        made.clear()
        damage(path)
        found = graph_cache.cached(step, lambda given: made.append(1) or kernels)
        assert made, f"damage {number} was not noticed"
        assert serialize.dump(found, step) == wanted
        if path.is_dir():
            path.rmdir()
            graph_cache.cached(step, lambda given: kernels)
        assert path.read_bytes() == content
    assert len(damages) >= 240


def test_damaged_kernels_are_compiled_again() -> None:
    source = KernelSource("add", "", {}, {}, frozenset(), 4, 1)
    path = kernel_cache.path_of(source, 90)
    whole = Binary("add", b"\x7fELF machine code .text.add\0", 4, Resources(32, 0, 0, 1))
    kernel_cache.write(path, whole)
    content = path.read_bytes()
    fields = json.loads(content.split(b"\n")[1])
    cubin = whole.cubin
    headers = [{**fields, name: value} for name in fields for value in VALUES]
    headers += [
        {**fields, "resources": {**fields["resources"], name: v}} for name in fields["resources"] for v in VALUES
    ]
    headers += [{name: value for name, value in fields.items() if name != left_out} for left_out in fields]
    # These numbers are only reported, and may have any value.
    reported = [
        {**fields, "resources": {**fields["resources"], name: 1 << 70}} for name in RESOURCES if name != "shared"
    ]
    damages = [
        *raw_damages(len(content), 2, 40, 20),
        *FILES,
        *(checked(lambda known, text=text: text) for text in TEXTS),
        *(checked(lambda known, h=h: json.dumps(h).encode() + b"\n" + cubin) for h in headers if h not in reported),
    ]
    for number, damage in enumerate(damages):
        damage(path)
        assert kernel_cache.read(path) is None, f"damage {number} was not noticed"
        if path.is_dir():
            path.rmdir()
        kernel_cache.write(path, whole)
        assert kernel_cache.read(path) == whole
    assert len(damages) >= 200


def test_damaged_schedules_are_made_again() -> None:
    """The note beside a scheduled graph."""
    cluster, step = load_cluster("h200x8"), small_step()
    kernels = with_kernels(step)
    path = agree_on_cached.entry_of(step, cluster, None, "")
    decisions = Decisions(order=tuple(range(40)))
    schedule = Schedule(kernels, decisions, lambda: pytest.fail("predicted"), 0, 7, ["a warning"])
    agree_on_cached.keep(path, step, kernels, schedule, "a list")
    assert path is not None
    known = agree_on_cached.read_by_all(path, step, cluster, None)
    assert known is not None
    graph, found, issued = known
    assert found is not None
    assert (str(graph), found.decisions, found.candidates, issued) == (str(kernels), decisions, 7, "a list")
    content = path.read_bytes()
    text, note = (cache_folder.read_checked(path) or b"").split(b"\n")
    fields = json.loads(note)
    said = json.loads(fields[0])
    notes: list[Any] = [[*fields[:at], value, *fields[at + 1 :]] for at in range(5) for value in (1.5, {}, [[]], [1])]
    notes += [fields[:-1], [*fields, 1], {}, None, 1, "x"]
    changed = [{**said, "order": order} for order in _orders(said["order"])]
    changed += [{**said, name: value} for name in said for value in (None, 1, "x", [[1]])]
    changed += [{key: value for key, value in said.items() if key != name} for name in said]
    notes += [[json.dumps(each), *fields[1:]] for each in changed]
    damages = [
        *raw_damages(len(content), 3, 10, 5),
        *(checked(lambda known, each=each: text + b"\n" + json.dumps(each).encode()) for each in notes),
        *(checked(lambda known, each=each: text + b"\n" + each) for each in TEXTS),
        checked(lambda known: text),
    ]
    refused = 0
    for damage in damages:
        path.write_bytes(content)
        damage(path)
        refused += agree_on_cached.read_by_all(path, step, cluster, None) is None
    # Decisions only tell of the schedule: what they say of a graph is not compared with it.
    assert refused >= len(damages) - len(changed)
    assert len(damages) >= 60


def _orders(order: list[list[int]]) -> list[Any]:
    return [[], order[::-1], order[1:], [*order, order[0]], [[0, 1 << 60]], [[-1, 1], *order], [[0, 1]] * 3]
