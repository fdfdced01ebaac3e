"""Recording work on a GPU as a CUDA graph, and leaving everything usable where that fails."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from weft import torch_adapter
from weft.errors import ReplayFailed

log = logging.getLogger(__name__)


class Recording(Protocol):
    """Recorded work.

    Attributes:
        results: what the function that was recorded returned: tensors that each replay writes again.
        alone: whether nothing but its own replays writes to the results.
    """

    results: list[Any]
    alone: bool

    def replay(self) -> None:
        """Do the work, on the tensors that it was recorded with."""


class Recorder(Protocol):
    """Records what a function starts on a device."""

    def make_room(self) -> None:
        """Give back what is cached of the device's memory, before what a recording needs outside it is made."""

    def record(self, run: Callable[[], list[Any]]) -> Recording:
        """Record ``run``, whose work is not done then. Raises whatever ``run`` or the recording of it raises."""

    @property
    def era(self) -> int:
        """Recordings of an earlier era must not be replayed."""


class CudaRecording:
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any], alone: bool) -> None:
        self._graph = graph
        self.results = results
        self.alone = alone

    def replay(self) -> None:
        try:
            self._graph.replay()
        except RuntimeError as error:
            raise ReplayFailed(error) from error


class CudaRecorder:
    """Records CUDA graphs on one GPU.

    All graphs of a GPU share one pool of memory, which lives as long as any of them: only one runs at a time. A graph
    leaves alone what was held when it was recorded, but results of one recorded later may lie where it works.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.era = 0
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory still points to them

    def make_room(self) -> None:
        """Recordings work in a pool of their own. A tensor made in a part of a block that is cached, such as what the
        calls before worked in, would keep all of it from being given back."""
        torch.cuda.empty_cache()

    def record(self, run: Callable[[], list[Any]]) -> CudaRecording:
        stream = torch.cuda.current_stream(self.device)
        alive = next(iter(self._graphs), None)
        pool = torch.cuda.graph_pool_handle() if alive is None else alive.pool()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that runs now may call what cannot be recorded
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        except Exception:
            if torch.cuda.current_stream(self.device) != stream:
                self._failed.append(graph)
                self._recover(stream, pool)
            raise
        finally:
            if collecting:
                gc.enable()
        self._graphs.add(graph)
        return CudaRecording(graph, results, alone=alive is None)

    def _recover(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """After a recording that could not even be ended: torch leaves the side stream current, the allocator in the
        pool, and the generator in the recording, where it draws no more numbers."""
        torch.cuda.set_stream(stream)
        torch_adapter.abandon_capture(self.device, pool)
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        # Graphs recorded earlier go on drawing from the state that was replaced.
        self.era += 1
        self._graphs.clear()
        log.info("took back a recording on %s that could not be ended; earlier ones are made again", self.device)


@functools.cache
def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder of a GPU."""
    return CudaRecorder(device)
