"""Arrays of numpy's in the Python state that are inputs of the graph, and not compared with what they held.

The content of a small array is a guard, as long as the step can be captured so. A large one takes too long to compare;
one that the step indexes with symbolic numbers, or writes computed values to, has other elements at each call. Such an
array is an input, as arrays among the arguments that change are (:mod:`weft.capture.record.numpy_arguments`): the step
gets a stand-in for it, and each call reads and writes the memory of the array itself. That the same array is in its
place is a guard, as for any object.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch

from weft.capture.record.array_recorder import ArrayRecorder
from weft.capture.record.number_tables import entries_at
from weft.capture.record.numpy_arguments import may_be_input, tensors_of
from weft.capture.record.recorder import OpRecorder
from weft.capture.state.containers import Container, Content
from weft.capture.state.contents import compared_array, is_input_for_its_size
from weft.capture.state.reachable_state import ReachableState


class LargeArrays:
    """The large arrays that a step can reach.

    Args:
        state: what it can reach.
        indexed: paths of arrays of any size that the step indexes with symbolic numbers.
    """

    def __init__(self, state: ReachableState, indexed: Collection[str]) -> None:
        numpy = sys.modules.get("numpy")
        found = [] if numpy is None else [each for each in state.objects if isinstance(each, numpy.ndarray)]
        self._arrays = {id(each): each for each in found if is_input_for_its_size(each)}
        tables = (value for _, _, value in entries_at(state.containers, indexed))
        self._arrays |= {id(each): each for each in tables if may_be_input(each)}
        self._stand_ins: dict[int, Any] = {}
        self.tensors: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def put_into(self, containers: list[Container], recorder: OpRecorder, arrays: ArrayRecorder) -> None:
        """Put stand-ins into the entries of containers that hold one of the arrays.

        An array in a tuple, where nothing can be put, or in no entry (in an object that the walk cannot look into) is
        compared before each call in spite of its size. It gets no stand-in elsewhere either: a read of the array in the
        tuple would miss what is written through the stand-in.
        """
        if not self._arrays:
            return
        fixed = {id(value) for each in containers for value in _in_fixed_places(each)}
        for container in list(containers):
            for key, value in container.before.items():
                replaced = id(value) in self._arrays and id(value) not in fixed
                if replaced and key not in container.stand_ins and _can_replace(container):
                    container.stand_in(key, self._stand_in(value, container.label(key), recorder, arrays))
        # What is an input is not compared, and the rest is.
        is_input = lambda each: isinstance(each, Content) and id(each.obj) in self._stand_ins
        compared = {id(each.obj) for each in containers if isinstance(each, Content)}
        others = [each for at, each in self._arrays.items() if at not in self._stand_ins and at not in compared]
        containers[:] = [each for each in containers if not is_input(each)] + [*map(compared_array, others)]

    def _stand_in(self, array: Any, path: str, recorder: OpRecorder, arrays: ArrayRecorder) -> Any:
        if id(array) not in self._stand_ins:
            # Without the class: numpy's arrays in files read and write their memory as others do.
            (tensor,) = tensors_of([array.view(sys.modules["numpy"].ndarray)])
            self.tensors.append(tensor)
            known = recorder.input_fake(tensor)
            fake = recorder.new_input(tensor).val if known is None else known
            self._stand_ins[id(array)] = arrays.argument(fake, array, path)
        return self._stand_ins[id(array)]


def _in_fixed_places(container: Container) -> Iterator[Any]:
    """What a container holds in tuples, or holds itself where nothing can be put."""
    pending = [each for each in container.before.values() if isinstance(each, tuple)]
    if not _can_replace(container):
        pending += container.before.values()
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        else:
            yield value


def _can_replace(container: Container) -> bool:
    """Whether another object can be put into the entries of a container."""
    return not isinstance(container, Content) and not isinstance(container.obj, (tuple, set, frozenset))
