"""A program recorded as CUDA graphs.

The first calls run kernel by kernel: libraries set themselves up then, and allocators settle. The next one is recorded
and from there on replayed: the host does one launch a step. A recording fixes where tensors lie, sizes, and numbers;
for each combination that comes up there is one, as long as they do not change at every call.

- Parameters and states are used where they are; should they move, the step is recorded again, and what keeps moving is
  copied. Arguments of the step are always copied into place.
- Results are copied out, so that those of earlier steps stay valid, unlike those of
  ``torch.compile(mode="reduce-overhead")``. Large ones (gradients that are left behind) are handed out as they are
  while nobody keeps them until the next call, and no other recording works where they lie.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import Role, StepGraph, Update
from weft.inductor.multi_tensor.bound import RECORDINGS
from weft.inductor.runtime.aten import AtenProgram
from weft.inductor.runtime.graph_recorder import Recorder, Recording
from weft.inductor.runtime.static_input import StaticInput

log = logging.getLogger(__name__)

_WARM_UP = 2  # calls before recording
_KEPT = 8  # recordings of one program
_PAID_BY = 10  # replays that are worth a recording
_ADVANCE = 8  # recordings that need not be paid for yet
_MOVES = 2  # how often an input may move, each time soon after the last, before it is copied
_LARGE = 1 << 20  # bytes of a result from which a copy matters

Key = tuple[Any, ...]


class GraphedProgram:
    """A program that is recorded and replayed. Called like the program.

    Args:
        program: what is recorded.
        step: what it was made from.
        recorder: records it; may be another in a test.
        internal: numbers of results that go no further than to the rest of the step, before the next call.

    Attributes:
        recordings: how often it was recorded.
        why_not: why it runs kernel by kernel after all, once that is known.
    """

    def __init__(
        self, program: AtenProgram, step: StepGraph, recorder: Recorder, internal: frozenset[int] = frozenset()
    ) -> None:
        self.program = program
        self.recorder = recorder
        self.internal = internal
        self.recordings = 0
        self.replays = 0
        self.why_not: str | None = None
        updated = {what.input for what in step.outputs if isinstance(what, Update)}
        self._updated = [entry.name in updated for entry in step.inputs]
        self._names = [entry.path for entry in step.inputs]
        self._tensors = [isinstance(node.meta["val"], torch.Tensor) for node in step.placeholders]
        self._copied = [entry.role is Role.BATCH for entry in step.inputs]
        self._fixed = self._what_is_fixed()
        self._moves = [0] * len(step.inputs)
        self._kept_results: set[int] = set()
        self._calls = 0
        self._era = recorder.era
        self._recorded: OrderedDict[Key, _Recorded] = OrderedDict()
        # What asks, without waiting for the GPU, whether other ranks came: replays call nothing of the step.
        self._checks = [node.target.check for node in step.collectives() if hasattr(node.target, "check")]

    @property
    def source(self) -> str:
        return self.program.source

    @property
    def operations(self) -> Any:
        return self.program.operations

    def __call__(self, *inputs: Any) -> list[Any]:
        self._calls += 1
        if self.why_not is not None or self._calls <= _WARM_UP:
            return self.program(*inputs)
        recorded = self._find(inputs) or self._record(inputs)
        if recorded is None:
            return self.program(*inputs)
        self.replays += 1
        for check in self._checks:
            check()
        with torch.no_grad():
            return recorded.replay(inputs)

    # ---- which recording

    def _find(self, inputs: Sequence[Any]) -> _Recorded | None:
        """The recording that serves these inputs."""
        if self.recorder.era != self._era:
            self._recorded.clear()
            self._era = self.recorder.era
        key = self._key(inputs)
        recorded = self._recorded.get(key)
        if recorded is None:
            return None
        held = recorded.held()
        if held:
            # A replay would overwrite them: they stay as they are, and so does their memory.
            self._kept_results |= held
            del self._recorded[key]
            return None
        self._recorded.move_to_end(key)
        return recorded

    def _key(self, inputs: Sequence[Any]) -> Key:
        """What a recording fixes of the inputs."""
        return tuple(map(operator.call, self._fixed, inputs))

    def _what_is_fixed(self) -> list[Callable[[Any], Any]]:
        """For each input what a recording fixes of it: a number, how a copied tensor is laid out, where others lie."""
        return [
            (_layout if copied else torch.Tensor.data_ptr) if tensor else _itself
            for tensor, copied in zip(self._tensors, self._copied, strict=True)
        ]

    def _notice_moves(self, inputs: Sequence[Any]) -> None:
        """Count what moved since the last recording; what did so soon after each recording is copied from now on."""
        if not self._recorded:
            return
        last_key, last = next(reversed(self._recorded.items()))
        if last.replays >= _PAID_BY:
            self._moves = [0] * len(self._moves)
        copied = list(self._copied)
        for at, (value, before) in enumerate(zip(inputs, last_key, strict=True)):
            if self._tensors[at] and not copied[at] and value.data_ptr() != before:
                self._moves[at] += 1
                copied[at] = self._moves[at] > _MOVES
        if copied != self._copied:
            self._copied = copied
            self._fixed = self._what_is_fixed()
            self._recorded.clear()

    # ---- recording

    def _record(self, inputs: Sequence[Any]) -> _Recorded | None:
        """Record the program for these inputs; None where it cannot be done."""
        self._notice_moves(inputs)
        if self.recordings > min(_ADVANCE + self.replays / _PAID_BY, RECORDINGS - 1):
            self._give_up(f"it had to be recorded {self.recordings} times in {self.replays} calls: {self._change()}")
            return None
        self.recorder.make_room()
        static: list[Any] = [
            StaticInput(value) if copied and tensor else value
            for value, copied, tensor in zip(inputs, self._copied, self._tensors, strict=True)
        ]
        given = [value.tensor if isinstance(value, StaticInput) else value for value in static]
        try:
            recording = self.recorder.record(lambda: self.program(*given))
        except Exception as error:  # noqa: BLE001 - whatever recording cannot do, running can
            self._give_up(_reason(error))
            return None
        self.recordings += 1
        recorded = _Recorded(recording, static, given, self._updated, self.internal, self._kept_results)
        self._recorded[self._key(inputs)] = recorded
        if len(self._recorded) > _KEPT:
            self._recorded.popitem(last=False)
        log.info("recorded a CUDA graph (recording %d)", self.recordings)
        return recorded

    def _change(self) -> str:
        """The inputs that differ between recordings."""
        keys = list(self._recorded)
        names = [name for name, *values in zip(self._names, *keys, strict=True) if len(set(values)) > 1]
        return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''} changed" if names else "results were kept"

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._recorded.clear()
        log.warning("the step runs kernel by kernel, not as a CUDA graph: %s", why)


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, torch.OutOfMemoryError):
        return "there is not enough memory for the recording, which keeps what it uses"
    return f"recording failed: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"


class _Recorded:
    """One recording, with what goes in and comes out of it."""

    def __init__(
        self,
        recording: Recording,
        static: Sequence[Any],
        given: Sequence[Any],
        updated: Sequence[bool],
        internal: frozenset[int],
        kept: set[int],
    ) -> None:
        self.replays = 0
        self._recording = recording
        # The step's own tensors must not be kept alive from here: only where they lie matters.
        self._copied = {at: value for at, value in enumerate(static) if isinstance(value, StaticInput)}
        self._written = [at for at in self._copied if updated[at]]
        self._handed: dict[int, tuple[torch.Tensor, int]] = {}
        self._outputs = self._plan_outputs(recording.results, given, internal, kept)
        recording.results = []

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        for at, static in self._copied.items():
            static.fill(inputs[at])
        self._recording.replay()
        self.replays += 1
        for at in self._written:
            inputs[at].copy_(self._copied[at].tensor, non_blocking=True)
        return [output(inputs) for output in self._outputs]

    def held(self) -> set[int]:
        """Numbers of the results that were handed out and that somebody still has."""
        return {at for at, (value, users) in self._handed.items() if torch_adapter.storage_users(value) > users}

    def _plan_outputs(
        self, results: Sequence[Any], given: Sequence[Any], internal: frozenset[int], kept: set[int]
    ) -> list[Callable[[Sequence[Any]], Any]]:
        """For each result how it reaches the caller."""
        of_inputs = {id(value): at for at, value in enumerate(given) if isinstance(value, torch.Tensor)}
        memory = [_storage(value) for value in (*given, *results)]
        plans: list[Callable[[Sequence[Any]], Any]] = []
        for at, value in enumerate(results):
            source = of_inputs.get(id(value))
            if source is not None:
                plans.append(lambda inputs, source=source: inputs[source])
            elif not isinstance(value, torch.Tensor) or at in internal:
                plans.append(lambda _, value=value: value)
            elif self._recording.alone and at not in kept and _is_large(value) and memory.count(_storage(value)) == 1:
                self._handed[at] = value, torch_adapter.storage_users(value)
                plans.append(lambda _, value=value: value.detach())
            else:
                plans.append(lambda _, value=value: value.clone())
        return plans


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride()


def _itself(value: Any) -> Any:
    return value


def _storage(value: Any) -> int | None:
    return torch_adapter.storage_key(value) if isinstance(value, torch.Tensor) else None


def _is_large(value: torch.Tensor) -> bool:
    return value.numel() * value.element_size() >= _LARGE
