"""Recording and replay of a program as CUDA graphs.

The first calls run kernel by kernel, while libraries initialise and caching allocators warm up. The next call is
recorded, and later calls replay it: one launch from the host per step. A recording fixes addresses, sizes and Python
numbers. The program keeps one recording per combination of these, unless they change at every call.

- Parameters and optimizer states are read at their own addresses. If an address changes, the step is recorded again; an
  input whose address keeps changing is copied to a static buffer. Arguments of the step are always copied.
- Results are cloned, so that those of earlier steps stay valid, unlike with ``torch.compile(mode="reduce-overhead")``.
  A large result (a gradient that the step returns) is returned without a copy, if the caller drops it before the next
  call and no other recording shares its memory. Results that share memory are copied together.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role, Update
from weft.inductor.runtime.aten import AtenProgram
from weft.inductor.runtime.bound_plan import RECORDINGS
from weft.inductor.runtime.graph_recorder import CudaRecorder, CudaRecording
from weft.inductor.runtime.shared_results import SharedCopies, view_of_input
from weft.inductor.runtime.static_input import StaticInput

log = logging.getLogger(__name__)

_WARM_UP_CALLS = 2  # calls before the first recording
_MAX_RECORDINGS = 8  # recordings of one program that are kept, least recently used dropped first
# A recording pays off after this many replays. A program that is recorded more often gives up.
_REPLAYS_PER_RECORDING = 10
_FREE_RECORDINGS = 8  # recordings allowed before the ratio above counts
_MAX_ADDRESS_CHANGES = 2  # address changes in successive short-lived recordings before an input is copied
_LARGE_RESULT = 1 << 20  # bytes from which the copy of a result costs noticeable time and memory

Key = tuple[Any, ...]


class GraphedProgram:
    """A program that is recorded as a CUDA graph and replayed. Called like the program.

    Args:
        program: the program to record.
        step: the graph that it was compiled from.
        recorder: makes recordings; tests pass a fake one.
        internal: positions of results that only later partitions of the same step read, before the next call. They
            are returned without a copy.

    Attributes:
        recordings: number of recordings so far.
        replays: number of replays so far.
        why_not: why the program runs kernel by kernel after all; None while it is recorded.

    Raises:
        ReplayFailed: CUDA refuses a replay. All other errors are those of the program.
    """

    def __init__(
        self, program: AtenProgram, step: StepGraph, recorder: CudaRecorder, internal: frozenset[int] = frozenset()
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
        self._tensors = [isinstance(node.meta.get("val"), torch.Tensor) for node in step.placeholders]
        self._copied = [entry.role is Role.BATCH for entry in step.inputs]
        self._keys_of = self._key_functions()
        self._address_changes = [0] * len(step.inputs)
        self._kept_results: set[int] = set()
        self._calls = 0
        self._era = recorder.era
        self._recorded: OrderedDict[Key, _Recorded] = OrderedDict()
        # A replay calls no Python of the step. Peer collectives report ranks that are late through these functions,
        # which do not wait for the GPU; without them a missing rank would be a hang without a message.
        self._checks = [node.target.check for node in step.collectives() if hasattr(node.target, "check")]

    @property
    def source(self) -> str:
        """The Python text of the program."""
        return self.program.source

    @property
    def operations(self) -> Any:
        """Number of operations by kind, see :attr:`AtenProgram.operations`."""
        return self.program.operations

    def __call__(self, *inputs: Any) -> list[Any]:
        """See :meth:`AtenProgram.__call__`."""
        return self.boxed([*inputs])

    def boxed(self, inputs: list[Any]) -> list[Any]:
        """As :meth:`AtenProgram.boxed`. A replay reads its inputs at fixed addresses until its end."""
        self._calls += 1
        # Libraries allocate handles and workspaces in the first calls, which a capture forbids.
        if self.why_not is not None or self._calls <= _WARM_UP_CALLS:
            return self.program.boxed(inputs)
        recorded = self._find(inputs) or self._record(inputs)
        if recorded is None:
            return self.program.boxed(inputs)
        self.replays += 1
        # A check also makes the compute stream wait for the communication stream, on which calls from outside of this
        # recording may still run.
        for check in self._checks:
            check()
        with torch.no_grad():
            results = recorded.replay(inputs)
        inputs.clear()
        return results

    # ---- which recording

    def _find(self, inputs: Sequence[Any]) -> _Recorded | None:
        """The recording that can be replayed with these inputs; None where there is none."""
        # Another program's failed recording replaced the state of the random number generator: old graphs would draw
        # from the state that was replaced.
        if self.recorder.era != self._era:
            self._recorded.clear()
            self._era = self.recorder.era
        key = self._key(inputs)
        recorded = self._recorded.get(key)
        if recorded is None:
            return None
        in_use = recorded.results_in_use()
        if in_use:
            # A replay would overwrite results that the caller still has. Dropping the recording leaves them and their
            # memory alone; the next recording copies these results.
            self._kept_results |= in_use
            del self._recorded[key]
            return None
        self._recorded.move_to_end(key)
        return recorded

    def _key(self, inputs: Sequence[Any]) -> Key:
        """The properties of the inputs that a recording fixes."""
        return tuple(map(operator.call, self._keys_of, inputs))

    def _key_functions(self) -> list[Callable[[Any], Any]]:
        """For each input the property that a recording fixes: the layout of a copied tensor, the address of another
        tensor, the value of a number."""
        return [
            (_layout if copied else torch.Tensor.data_ptr) if tensor else _itself
            for tensor, copied in zip(self._tensors, self._copied, strict=True)
        ]

    def _copy_moving_inputs(self, inputs: Sequence[Any]) -> None:
        """Count the inputs whose address changed since the last recording. An input that changed soon after several
        recordings is copied to a static buffer from now on."""
        if not self._recorded:
            return
        last_key, last = next(reversed(self._recorded.items()))
        # The last recording has paid off: an address that changes this rarely is worth a new one.
        if last.replays >= _REPLAYS_PER_RECORDING:
            self._address_changes = [0] * len(self._address_changes)
        copied = list(self._copied)
        for at, (value, before) in enumerate(zip(inputs, last_key, strict=True)):
            if self._tensors[at] and not copied[at] and value.data_ptr() != before:
                self._address_changes[at] += 1
                copied[at] = self._address_changes[at] > _MAX_ADDRESS_CHANGES
        if copied != self._copied:
            self._copied = copied
            self._keys_of = self._key_functions()
            self._recorded.clear()

    # ---- recording

    def _record(self, inputs: Sequence[Any]) -> _Recorded | None:
        """Record the program for these inputs; None where recording fails or does not pay."""
        self._copy_moving_inputs(inputs)
        if self.recordings > min(_FREE_RECORDINGS + self.replays / _REPLAYS_PER_RECORDING, RECORDINGS - 1):
            self._give_up(f"it had to be recorded {self.recordings} times in {self.replays} calls: {self._change()}")
            return None
        self.recorder.make_room()
        static: list[Any] = [
            StaticInput(value) if copied and tensor else value
            for value, copied, tensor in zip(inputs, self._copied, self._tensors, strict=True)
        ]
        # The recording reads static buffers where inputs are copied, and the caller's own tensors elsewhere.
        recorded_inputs = [value.tensor if isinstance(value, StaticInput) else value for value in static]
        try:
            recording = self.recorder.record(lambda: self.program.boxed([*recorded_inputs]))
        except Exception as error:  # noqa: BLE001 - a step that cannot be recorded still runs kernel by kernel
            self._give_up(_reason(error))
            return None
        self.recordings += 1
        recorded = _Recorded(recording, static, recorded_inputs, self._updated, self.internal, self._kept_results)
        # The key is taken anew: `_copy_moving_inputs` may have changed what it consists of.
        self._recorded[self._key(inputs)] = recorded
        if len(self._recorded) > _MAX_RECORDINGS:
            self._recorded.popitem(last=False)
        log.info("recorded a CUDA graph (recording %d)", self.recordings)
        return recorded

    def _change(self) -> str:
        """Names of up to four inputs that differ between recordings, for the warning."""
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
    """One recording with the copies into and out of its memory."""

    def __init__(
        self,
        recording: CudaRecording,
        static: Sequence[Any],
        recorded_inputs: Sequence[Any],
        updated: Sequence[bool],
        internal: frozenset[int],
        kept: set[int],
    ) -> None:
        self.replays = 0
        self._recording = recording
        # A reference to the step's own tensors would keep replaced parameters and states in memory. The recording
        # needs only their addresses, which are in the key.
        self._copied = {at: value for at, value in enumerate(static) if isinstance(value, StaticInput)}
        self._written = [at for at in self._copied if updated[at]]
        # Results returned without a copy, each with the number of users of its storage when only we hold it.
        self._uncopied: dict[int, tuple[torch.Tensor, int]] = {}
        self._outputs = self._plan_outputs(recording.results, recorded_inputs, internal, kept)
        recording.results = []  # a result that is cloned needs no reference from here

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        """Copy the inputs in, replay, copy updated inputs back; returns the results."""
        for at, static in self._copied.items():
            static.fill(inputs[at])
        self._recording.replay()
        self.replays += 1
        # Behind the replay on the same stream, so the caller's tensor has the new value when the call returns.
        for at in self._written:
            inputs[at].copy_(self._copied[at].tensor, non_blocking=True)
        copies = self._shared.copied()
        return [copies[at] if at in copies else output(inputs) for at, output in enumerate(self._outputs)]

    def results_in_use(self) -> set[int]:
        """Positions of the results that were returned without a copy and that the caller still references."""
        return {at for at, (value, users) in self._uncopied.items() if torch_adapter.storage_users(value) > users}

    def _plan_outputs(
        self, results: Sequence[Any], recorded_inputs: Sequence[Any], internal: frozenset[int], kept: set[int]
    ) -> list[Callable[[Sequence[Any]], Any]]:
        """For each result a function from the call's inputs to the value to return."""
        of_inputs = {id(value): at for at, value in enumerate(recorded_inputs) if isinstance(value, torch.Tensor)}
        storages = [_storage(value) for value in (*recorded_inputs, *results)]
        plans: list[Callable[[Sequence[Any]], Any]] = []
        copied: dict[int, torch.Tensor] = {}
        for at, value in enumerate(results):
            source = of_inputs.get(id(value))
            if source is not None:  # a returned parameter is the caller's own object
                plans.append(lambda inputs, source=source: inputs[source])
            elif not isinstance(value, torch.Tensor) or at in internal:
                plans.append(lambda _, value=value: value)
            elif (view := view_of_input(value, recorded_inputs)) is not None:
                plans.append(view)
            elif self._recording.alone and at not in kept and _is_large(value) and storages.count(_storage(value)) == 1:
                # Sole user of its storage: the count of users shows whether the caller still has it.
                self._uncopied[at] = value, torch_adapter.storage_users(value)
                plans.append(lambda _, value=value: value.detach())
            else:
                plans.append(lambda _, value=value: value.clone())
                copied[at] = value
        self._shared = SharedCopies(copied)
        return plans


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride()


def _itself(value: Any) -> Any:
    return value


def _storage(value: Any) -> int | None:
    return torch_adapter.storage_key(value) if isinstance(value, torch.Tensor) else None


def _is_large(value: torch.Tensor) -> bool:
    return value.numel() * value.element_size() >= _LARGE_RESULT
