"""Captured steps on disk, for ``weft plan``: a plan after another one with the same script, arguments, ranks and batch,
for another cluster or limit of memory, runs no script, no capture and no pass.

An entry is found by everything that is known before a script runs: its text and arguments, the environment, the
ranks, the versions, weft's own files and the knobs. It holds for as long as all files that the script read or looked
for are as they were (:mod:`weft.launch.script_inputs`). Nothing is kept of a script that asked another process or the
network, of a step with symbolic sizes, or of one that holds something that only its process knows; and nothing where a
warning was logged, which the next plan would not print. Graphs are data that executes nothing
(:mod:`weft.inductor.graph.serialize`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import cache_folder, torch_adapter
from weft.capture.fake.fake_world import fake_world
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Create, Input, Output, Return, Role, Update
from weft.errors import MalformedGraph
from weft.inductor.cache.graph_cache import environment
from weft.inductor.graph import serialize
from weft.inductor.graph.serialize import NotPortable
from weft.inductor.graph.sizes import symbols_of
from weft.launch.script_inputs import ScriptInputs, unchanged
from weft.launch.script_run import Script
from weft.plan.plan import StepPlanner

log = logging.getLogger(__name__)

# Of the terminal and the shell: no script trains another model for them.
_OF_THE_SHELL = frozenset({"_", "OLDPWD", "SHLVL", "COLUMNS", "LINES"})
_OUTPUTS: dict[str, type] = {kind.__name__: kind for kind in (Update, Create, Return)}
_ROOMS = ("launch", "plan")  # whose files decide about a plan, beside those of the compiler
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, MalformedGraph)


Batch = tuple[int | None, ...]
"""The batch that the arguments of the step were given first, and those that they were given afterwards."""


class NotKept(Exception):
    """A plan needs another captured step than those that are kept: the script has to run."""


class CapturedSteps:
    """The entries of one script in one environment and world. Without a cache on disk there are none.

    Args:
        script: and the step of it.
        world_size, rank, ranks_of_host: of the fake world.
    """

    def __init__(self, script: Script, world_size: int, rank: int, ranks_of_host: int) -> None:
        self._world_size, self._rank, self._ranks_of_host = world_size, rank, ranks_of_host
        self._usable = cache_folder.usable() and not script.module
        # Before the script runs, which may change the environment.
        variables = {name: value for name, value in os.environ.items() if name not in _OF_THE_SHELL}
        self._environment = environment(_ROOMS)
        about = [
            self._environment,
            [*platform.uname()],
            variables,
            [os.getcwd(), sys.path, sys.flags],
            [repr(script), _content(script.path)],
            [world_size, rank, ranks_of_host],
        ]
        self._about = json.dumps(about)

    @contextlib.contextmanager
    def restored(self, batch: Batch) -> Iterator[StepPlanner | None]:
        """The captured step of a batch, in the fake world that it needs; None where there is none that holds.

        ``rebatched`` of the planner raises :class:`NotKept` where there is no entry of that batch.
        """
        content = self._holding(batch)
        if content is None:
            yield None
            return
        with fake_world(self._world_size, self._rank, local_world_size=self._ranks_of_host):
            before = _settings()
            try:
                yield self._planner(batch, content)
            finally:
                _set(before)

    def _holding(self, batch: Batch) -> dict[str, Any] | None:
        """The entry of a batch, if nothing has changed that it depends on."""
        content = cache_folder.read_checked(self._path(batch)) if self._usable else None
        try:
            entry = None if content is None else json.loads(content)
            holds = entry and unchanged({name: (how, known) for name, how, known in entry["files"]})
        except _DAMAGED as error:
            self._tell_of_damage(batch, error)
            return None
        return entry if holds else None

    def _planner(self, batch: Batch, entry: dict[str, Any]) -> StepPlanner | None:
        try:
            _set(entry["settings"])
            with garbage_collection_paused():
                groups = _groups_again(entry["groups"])
                with torch_adapter.only_mode():
                    step = StepGraph(torch.fx.Graph(), _inputs(entry["inputs"]), _outputs(entry["outputs"]), groups)
                    mode = FakeTensorMode(shape_env=ShapeEnv())
                    graph = serialize.load(entry["graph"], step, mode).check()
            branches = [(line, outcome) for line, outcome in entry["branches"]]
            again = functools.partial(self._rebatched, batch)
            digest = _digest(entry)
            planner = StepPlanner.restored(entry["name"], graph, branches, KernelGraphs(digest, graph), again)
            planner.schedules = SchedulesOnDisk(digest)
            return planner
        except _DAMAGED as error:  # its checksum holds, but nobody knows who wrote it
            self._tell_of_damage(batch, error)
            return None

    def _rebatched(self, before: Batch, batch: int) -> StepPlanner:
        entry = self._holding((*before, batch))
        planner = None if entry is None else self._planner((*before, batch), entry)
        if planner is None:
            raise NotKept
        return planner

    def _tell_of_damage(self, batch: Batch, error: Exception) -> None:
        log.warning("%s cannot be read (%s: %s); the script runs", self._path(batch), type(error).__name__, error)

    def store(self, planner: StepPlanner, batch: Batch, inputs: ScriptInputs) -> None:
        """Keep a captured step, and the graphs of kernels that are made of it from here on. Called in the fake world of
        the script."""
        refusal = inputs.refusal or self._changed_by_script()
        if not self._usable or refusal:
            log.info("not kept for the next plan: %s", refusal or "there is no cache, or the script is a module")
            return
        graph = planner.graph
        try:
            with garbage_collection_paused():
                vals = (node.meta.get("val") for node in graph.graph.nodes)
                # Nothing is decided by the value of a learning rate; of a size there is more to know than its name.
                if symbols_of(val for val in vals if not isinstance(val, torch.SymFloat)):
                    raise NotPortable("symbolic sizes")
                entry = {
                    "name": planner.name,
                    "key": self._path(batch).name,
                    "settings": _settings(),
                    "branches": planner.branches,
                    "files": [[name, *rest] for name, rest in inputs.files.items()],
                    "groups": _groups_now(graph),
                    "inputs": [
                        [each.name, each.role.value, each.path, each.sharding, each.axes] for each in graph.inputs
                    ],
                    "outputs": [[type(each).__name__, *vars(each).values()] for each in graph.outputs],
                    "graph": serialize.dump(graph, _empty_like(graph)),
                }
        except NotPortable as reason:
            log.info("not kept for the next plan: the step holds %s", reason)
            return
        cache_folder.write_checked(self._path(batch), json.dumps(entry, separators=(",", ":")).encode())
        digest = _digest(entry)
        planner.kernels, planner.schedules = KernelGraphs(digest, graph), SchedulesOnDisk(digest)

    def _changed_by_script(self) -> str:
        """What the script changed that predictions read, and that an entry does not put back; "" for nothing."""
        if environment(_ROOMS) != self._environment:
            return "the script changes a knob"
        return "" if os.environ.get("LOCAL_WORLD_SIZE") == str(self._ranks_of_host) else "the script changes the ranks"

    def _path(self, batch: Batch) -> Path:
        name = hashlib.sha256(json.dumps([self._about, batch]).encode()).hexdigest()
        return cache_folder.entry_path("captured", name)


class KernelGraphs(MutableMapping[int | None, StepGraph]):
    """The graphs of kernels of a captured step by their budget of recomputation, kept on disk.

    Iteration and length are over those that were used in this process.
    """

    def __init__(self, about: str, graph: StepGraph) -> None:
        """``about`` tells the captured step ``graph`` from all others."""
        self._about = about
        self._graph = graph
        self._used: dict[int | None, StepGraph] = {}

    def __getitem__(self, budget: int | None) -> StepGraph:
        if budget not in self._used:
            path = self._path(budget)
            content = cache_folder.read_checked(path)
            if content is None:
                raise KeyError(budget)
            try:
                self._used[budget] = serialize.load(content.decode(), self._graph).check()
            except _DAMAGED as error:
                log.warning("%s cannot be read (%s: %s)", path, type(error).__name__, error)
                raise KeyError(budget) from None
        return self._used[budget]

    def __setitem__(self, budget: int | None, kernels: StepGraph) -> None:
        self._used[budget] = kernels
        with contextlib.suppress(NotPortable):
            cache_folder.write_checked(self._path(budget), serialize.dump(kernels, self._graph).encode())

    def __delitem__(self, budget: int | None) -> None:
        del self._used[budget]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._used)

    def __len__(self) -> int:
        return len(self._used)

    def _path(self, budget: int | None) -> Path:
        return cache_folder.entry_path(
            "captured", hashlib.sha256(f"{self._about} within {budget}".encode()).hexdigest()
        )


class SchedulesOnDisk:
    """What was decided for a captured step by cluster and limit, see :class:`weft.inductor.compiler.KeptSchedules`."""

    def __init__(self, captured: str) -> None:
        """``captured`` tells the captured step from all others."""
        self._captured = captured

    def get(self, about: str) -> str | None:
        """The text for a cluster and a limit, None where there is none."""
        content = cache_folder.read_checked(self._path(about))
        return None if content is None else content.decode()

    def put(self, about: str, text: str) -> None:
        """Keep a text for a cluster and a limit."""
        cache_folder.write_checked(self._path(about), text.encode())

    def _path(self, about: str) -> Path:
        # Knobs count as they are now: one may have been changed since the step was captured.
        key = json.dumps([self._captured, environment(_ROOMS), about])
        return cache_folder.entry_path("captured", hashlib.sha256(key.encode()).hexdigest())


def _content(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # which the run of the script reports
        return ""


# ---- parts of a step as JSON


def _empty_like(step: StepGraph) -> StepGraph:
    """A graph that shares nothing with ``step``: what is written against it stands alone."""
    return StepGraph(torch.fx.Graph(), [], [])


def _digest(entry: dict[str, Any]) -> str:
    """What tells a captured step from others with other graphs of kernels."""
    about = [entry[key] for key in ("graph", "inputs", "outputs", "groups", "settings", "key")]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _settings() -> list[str]:
    """What a script sets in torch that passes and the cost model read."""
    cudnn: Any = torch.backends.cudnn
    return [str(torch.get_default_dtype()), torch.get_float32_matmul_precision(), cudnn.conv.fp32_precision]


def _set(settings: list[str]) -> None:
    dtype, matmul, convolution = settings
    torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
    torch.set_float32_matmul_precision(matmul)
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = convolution


def _inputs(entries: list[list[Any]]) -> list[Input]:
    return [Input(name, Role(role), path, text, tuple(map(tuple, axes))) for name, role, path, text, axes in entries]


def _outputs(entries: list[list[Any]]) -> list[Output]:
    return [_OUTPUTS[kind](*fields) for kind, *fields in entries]


def _groups_now(step: StepGraph) -> list[list[Any]]:
    """Each name of a process group, a number for the group, and its ranks."""
    numbers: dict[str, int] = {}
    found: list[list[Any]] = []
    for name, group in step.groups.items():
        number = numbers.setdefault(group, len(numbers))
        whole = torch_adapter.process_group(group) is torch.distributed.group.WORLD
        found.append([name, number, None if whole else torch_adapter.group_ranks(group)])
    return found


def _groups_again(entries: list[list[Any]]) -> dict[str, str]:
    """The groups of a step, made in this fake world; the ranks of None are all ranks."""
    made: dict[int, str] = {}
    for _, number, ranks in entries:
        if number not in made:
            group: Any = torch.distributed.group.WORLD if ranks is None else torch.distributed.new_group(ranks)
            made[number] = group.group_name
    return {name: made[number] for name, number, _ in entries}
