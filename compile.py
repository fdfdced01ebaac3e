"""``weft.compile``: a training step in, a step that runs one captured graph out.

The first call captures the step, agrees with the other ranks, compiles and runs. Later calls check the guards and run;
when a guard fails the step is captured again, with sizes that changed kept symbolic from then on.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from weft import knobs, torch_adapter
from weft.capture.agreement import agree
from weft.capture.dynamic import MARKS
from weft.capture.fake_world import current_fake_world
from weft.capture.garbage import no_collections
from weft.capture.graph import Role, StepGraph
from weft.capture.guards import Guards
from weft.capture.reading import Places
from weft.capture.recorder import recording
from weft.capture.signature import signature
from weft.capture.tracer import CapturedStep, capture_step
from weft.errors import AgreementTimeout, GraphMismatch, StoreLost, UnknownOption, WeftError
from weft.inductor.compiler import MODES, compile_graph
from weft.inductor.passes.split_all_reduce import ranks_on_a_host
from weft.verify import verify_first_call

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class _Entry:
    """One captured form of a step with its guards and its program."""

    def __init__(self, captured: CapturedStep, mode: str, memory_limit: int | None) -> None:
        self.captured = captured
        self.guards = Guards(captured)
        self.program = compile_graph(captured.graph, mode, memory_limit)
        self._inputs = Places(captured.places)

    def run(self, leaves: list[Any]) -> Any:
        captured = self.captured
        captured.arguments.bind(leaves)
        outputs = self.program(*self._inputs.read())
        # All values first: one effect may move what another one replaces.
        values = [effect.template and effect.template.fill(outputs) for effect in captured.effects]
        result = captured.result.fill(outputs)
        for effect, value in zip(captured.effects, values, strict=True):
            if effect.template is None:
                effect.container.remove(effect.key)
            else:
                effect.container.set(effect.key, value)
        return result


class CompiledStep(Generic[P, R]):
    """A step that runs compiled; called like the function it was made from.

    Attributes:
        entries: captured forms, the one used last first.
        captures: how often the step was captured, with the reason of each.
    """

    def __init__(
        self,
        step: Callable[P, R],
        *,
        mode: str = "default",
        dynamic: bool | None = None,
        memory_limit: int | None = None,
        verify: bool = False,
        fallback: str | None = None,
    ) -> None:
        functools.update_wrapper(self, step)
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        self.__qualname__: str = getattr(step, "__qualname__", self.__name__)
        self.step = step
        self.mode = mode
        self.dynamic = dynamic
        self.memory_limit = memory_limit
        self.verify = verify
        self.fallback = fallback
        self.entries: list[_Entry] = []
        self.captures: list[str] = []
        self._changed: dict[Any, set[tuple[int, int]]] = {}
        self._agreed: set[str] = set()
        self._uncompiled = False

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._uncompiled or recording() is not None:  # a step inside a step is captured as part of it
            return self.step(*args, **kwargs)
        leaves, spec = torch_adapter.flatten((args, kwargs))
        reasons: list[str] = []
        entry = self._find(leaves, spec, reasons)
        return self._first_call(args, kwargs, reasons) if entry is None else entry.run(leaves)

    def entry_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        """The captured form that serves this call, captured now where there is none; nothing runs."""
        reasons: list[str] = []
        return self._find(*torch_adapter.flatten((args, kwargs)), reasons) or self.capture(args, kwargs, reasons)

    def _find(self, leaves: list[Any], spec: Any, reasons: list[str]) -> _Entry | None:
        """The form whose guards hold, moved to the front; why the others do not serve goes to ``reasons``."""
        for at, entry in enumerate(self.entries):
            if entry.guards.unchanged(leaves, spec):
                return self._to_front(at)
        for at, entry in enumerate(self.entries):
            if (why := entry.guards.failure(leaves, spec)) is None:
                return self._to_front(at)
            reasons.append(why)
        return None

    def _to_front(self, at: int) -> _Entry:
        self.entries.insert(0, self.entries.pop(at))
        return self.entries[0]

    def _first_call(self, args: Any, kwargs: Any, reasons: list[str]) -> Any:
        try:
            entry = self.capture(args, kwargs, reasons)
        except (GraphMismatch, AgreementTimeout, StoreLost):
            raise  # ranks that differ must not go on, compiled or not
        except WeftError as error:
            if self.fallback != "eager":
                raise
            log.warning("%s runs uncompiled from here on: %s", self.__name__, error)
            self._uncompiled = True
            return self.step(*args, **kwargs)
        leaves, _ = torch_adapter.flatten((args, kwargs))
        if self.verify and len(self.entries) == 1:
            return verify_first_call(self.step, entry.captured, args, kwargs, functools.partial(entry.run, leaves))
        return entry.run(leaves)

    @no_collections()
    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], reasons: list[str]) -> _Entry:
        """Capture one call, agree with the other ranks, and keep the result at the front of ``entries``."""
        self._say_why(reasons)
        try:
            captured = capture_step(self.step, args, kwargs, dynamic=self._dynamic_dims(args, kwargs))
        except Exception as error:
            self._tell_of_failure(error)
            raise
        self._agree(
            f"{signature(captured.graph)}\n"
            f"mode {self.mode}, memory limit {self.memory_limit}, transports {knobs.transports or 'nccl'}\n"
            f"{_sizes(captured.graph)}{_hosts(captured.graph)}"
            f"collectives on CPUs in buckets of {knobs.bucket_mib} MiB, {knobs.prefetch_mib} MiB ahead"
        )
        self.entries.insert(0, _Entry(captured, self.mode, self.memory_limit))
        nodes, seen = len(captured.graph), captured.recorded
        log.info("captured %s in %.2f s: %d nodes of %d operations", self.__name__, captured.seconds, nodes, seen)
        return self.entries[0]

    def _agree(self, text: str) -> None:
        """Show that all ranks run the same operations and collectives, once for each form of the step."""
        if text not in self._agreed and torch_adapter.world_size() > 1 and current_fake_world() is None:
            agree(self.__qualname__, text)
        self._agreed.add(text)

    def _tell_of_failure(self, error: Exception) -> None:
        """Ranks that did capture must not wait for this one; all ranks may run uncompiled, or none."""
        try:
            self._agree(f"{self.__qualname__} cannot be captured: {type(error).__name__}")
        except WeftError:
            if self.fallback == "eager":
                raise

    def _say_why(self, reasons: list[str]) -> None:
        if not self.captures:
            self.captures.append("first call")
            return
        why = "; ".join(dict.fromkeys(reasons)) or "first call in this form"
        self.captures.append(why)
        log.info("capturing %s again (capture %d): %s", self.__name__, len(self.captures), why)
        if len(self.captures) == knobs.recapture_limit + 1:
            log.warning(
                "%s was captured %d times; each capture costs seconds. Last reason: %s. "
                "Mark sizes that change with weft.mark_dynamic, or keep what changes in a tensor.",
                self.__name__,
                len(self.captures),
                why,
            )

    def _dynamic_dims(self, args: Any, kwargs: Any) -> frozenset[tuple[int, int]]:
        """Dimensions to keep symbolic: all with ``dynamic=True``, those that changed between captures otherwise."""
        leaves, spec = torch_adapter.flatten((args, kwargs))
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if self.dynamic is True:
            dims = {(at, dim) for at, leaf in tensors for dim in range(leaf.dim())}
        elif self.dynamic is False:
            dims = set()
        else:
            dims = self._changed.setdefault(spec, set())
            for entry in self.entries:
                if entry.captured.arguments.spec == spec:
                    dims |= _changed_dims(leaves, entry.captured)
        static = {
            (at, dim) for at, leaf in tensors for dim, mark in getattr(leaf, MARKS, {}).items() if mark == "static"
        }
        return frozenset(dims - static)


def _hosts(graph: StepGraph) -> str:
    """Which groups are on one host, of a step on GPUs, as each rank makes it out: passes go by that."""
    if not any(isinstance(val := node.meta["val"], torch.Tensor) and val.is_cuda for node in graph.placeholders):
        return ""
    here = (name for name, group in sorted(graph.groups.items()) if ranks_on_a_host(group))
    return f"groups on one host: {', '.join(here) or 'none'}\n"


def _sizes(graph: StepGraph) -> str:
    """The sizes of the batch, where ranks say that they have the same."""
    if not knobs.even_batches:
        return ""
    names = {entry.name for entry in graph.inputs if entry.role is Role.BATCH}
    vals = [(node.name, node.meta["val"]) for node in graph.placeholders if node.name in names]
    return "".join(f"{name} {list(val.shape)}\n" for name, val in vals if isinstance(val, torch.Tensor))


def _changed_dims(leaves: list[Any], captured: CapturedStep) -> set[tuple[int, int]]:
    changed = set()
    for at, (now, shape) in enumerate(zip(leaves, captured.arguments.shapes, strict=True)):
        if isinstance(now, torch.Tensor) and shape is not None and now.dim() == len(shape):
            changed |= {(at, dim) for dim, (a, b) in enumerate(zip(now.shape, shape, strict=True)) if a != b}
    return changed


def compile(
    step: Callable[P, R] | None = None,
    *,
    mode: str = "default",
    dynamic: bool | None = None,
    memory_limit: float | None = None,
    verify: bool | None = None,
    fallback: str | None = None,
) -> Any:
    """Compile a training step. A drop-in decorator: without it the step trains with the same numbers.

    Args:
        step: a function (or method) that runs forward, ``.backward()``, clipping and optimizers in any combination.
        mode: ``"default"`` runs generated kernels on GPUs, the whole step as one CUDA graph where that can be: sums
            may be taken in another order than eager takes them. ``"bitwise"`` runs eager's own ATen kernels, bit for
            bit the eager step; on a CPU both do.
        dynamic: True keeps every size of the tensor arguments symbolic, False none, None those that were seen to
            change.
        memory_limit: GiB of tensors that a GPU may hold at once, those of the model and of the optimizer included. The
            fastest schedule that fits is taken: the more memory, the less is communicated twice. By default nine
            tenths of the GPU's memory. It means nothing on a CPU.
        verify: run the first call both ways and compare loss, gradients and updated state (default: ``WEFT_VERIFY``).
        fallback: ``"eager"`` runs the step uncompiled, said once, when it cannot be captured; None raises.

    Returns:
        A callable with the step's signature.

    Raises:
        UnknownOption: an option has a value weft does not know.
    """
    if mode not in MODES:
        raise UnknownOption("mode", mode, list(MODES))
    if fallback not in (None, "eager"):
        raise UnknownOption("fallback", fallback, [None, "eager"])
    if memory_limit is not None and not memory_limit > 0:
        raise UnknownOption("memory_limit", memory_limit, ["GiB, more than 0", None])
    options: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "verify": verify, "fallback": fallback}
    if step is None:
        return functools.partial(compile, memory_limit=memory_limit, **options)
    options["verify"] = knobs.verify if verify is None else verify
    limit = None if memory_limit is None else int(memory_limit * 2**30)
    return CompiledStep(step, memory_limit=limit, **options)


def capture(step: Callable[..., Any], *args: Any, **kwargs: Any) -> StepGraph:
    """Capture one call ``step(*args, **kwargs)`` and return its graph; nothing runs.

    Works on real tensors and, inside :func:`weft.fake_world`, on fake ones.
    """
    inner = step.step if isinstance(step, CompiledStep) else step
    return capture_step(inner, args, kwargs).graph
