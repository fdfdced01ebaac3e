"""Recording of CUDA graphs, and recovery of the stream, allocator and generator after a recording that failed."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.errors import ReplayFailed

log = logging.getLogger(__name__)


class CudaRecording:
    """A CUDA graph with the results of the function that it recorded.

    Attributes:
        results: the values that the function returned; each replay writes the tensors among them again.
        alone: whether no other recording writes to the memory of the results.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any], alone: bool) -> None:
        self._graph = graph
        self.results = results
        self.alone = alone

    def replay(self) -> None:
        """Run the recorded work on the current stream, on the tensors that it was recorded with. Raises ReplayFailed if
        CUDA returns an error."""
        try:
            self._graph.replay()
        except RuntimeError as error:
            raise ReplayFailed(error) from error


class CudaRecorder:
    """Records CUDA graphs on one GPU.

    All graphs of a GPU share one memory pool, which exists as long as one of them: only one graph runs at a time. A
    graph does not write to tensors that were alive at its recording. Results of a graph recorded later may lie in
    memory that it uses for intermediate values.

    Attributes:
        era: number that grows when earlier recordings become invalid; those must not be replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.era = 0
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory still points to them

    def make_room(self) -> None:
        """Empty torch's cache, before the static inputs of a recording are allocated: one in a part of a cached segment
        would keep the whole segment from being returned, while the recording needs that memory for its own pool."""
        torch.cuda.empty_cache()

    def record(self, run: Callable[[], list[Any]]) -> CudaRecording:
        """Capture the work of ``run`` on a side stream. Raises every error of ``run`` and of the capture."""
        stream = torch.cuda.current_stream(self.device)
        # One pool for all graphs: each recording has the memory of a whole step, and they never run at the same time.
        alive = next(iter(self._graphs), None)
        pool = torch.cuda.graph_pool_handle() if alive is None else alive.pool()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that runs during the capture may make a call that invalidates it
        try:
            # Thread-local: in the default mode a call of another thread, such as the watchdog of NCCL, would invalidate
            # the capture.
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
        """Restore torch's state after a capture that could not be ended.

        Torch then leaves the side stream current, the allocator in the graph's pool, and the random number generator in
        capture mode, in which it draws no numbers.
        """
        torch.cuda.set_stream(stream)
        torch_adapter.abandon_capture(self.device, pool)
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        # Graphs recorded earlier would go on drawing from the generator state that was replaced.
        self.era += 1
        self._graphs.clear()
        log.info("abandoned a capture on %s that could not be ended; earlier graphs are recorded again", self.device)


@functools.cache
def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder of ``device``, one per GPU and process, because graphs share a pool."""
    return CudaRecorder(device)
