"""Guard on the memory of arrays among the arguments: what the step writes, it must not have as another input too.

A tensor is made in the memory of such an array at each call, so that its storage tells nothing. Addresses are compared.
"""

from __future__ import annotations

from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.memory_of_arrays import extent_on_host, meet
from weft.capture.state.containers import StatePlace
from weft.capture.state.state_reader import PlaceReader


class ArrayMemoryGuard:
    """Guards that no two inputs of which one is an array overlap, where the step writes to one of the two.

    Args:
        captured: the step.
    """

    def __init__(self, captured: CapturedStep) -> None:
        arguments = captured.arguments
        written = {entry.name for entry, _ in captured.graph.updates()}
        places = list(zip(captured.graph.inputs, captured.places, strict=True))
        tensors = [(entry, place) for entry, place in places if extent_on_host(place.get())] if arguments.arrays else []
        is_array = lambda place: place.container is arguments.container and place.key in arguments.arrays
        arrays = [(entry.name in written, place) for entry, place in tensors if is_array(place)]
        writes_arrays = any(is_written for is_written, _ in arrays)
        others = [
            (entry.name in written, place)
            for entry, place in tensors
            if not is_array(place) and (writes_arrays or entry.name in written)
        ]
        compared = [*arrays, *others] if writes_arrays or others else []
        self._written = [is_written for is_written, _ in compared]
        self._places: list[StatePlace] = [place for _, place in compared]
        self._count = len(arrays)
        self._reader = PlaceReader(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def failure(self) -> str | None:
        """Which inputs overlap, as text; None where none do that must not."""
        if not self._places:
            return None
        extents = list(map(extent_on_host, self._reader.read()))
        for at, mine in enumerate(extents[: self._count]):
            for other, theirs in enumerate(extents[at + 1 :], at + 1):
                writes = self._written[at] or self._written[other]
                if writes and mine is not None and theirs is not None and meet(mine, theirs):
                    return f"{self._places[at].path} shares memory with {self._places[other].path} now"
        return None
