"""The ATen executor: compiles a StepGraph to one readable Python function of ATen calls, bit for bit equal to eager.

The nodes run in the order of the graph. :mod:`weft.inductor.runtime.placement` decides the memory of each value, and
:mod:`weft.inductor.runtime.writer` deletes each variable after its last use. Nodes that earlier passes fused are calls
of generated kernels in the same function.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

import weft.gloo  # noqa: F401 - registers CPU all-gathers that may be in flight together
from weft import knobs, torch_adapter
from weft.capture.agreement import device_watch
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_wait
from weft.capture.node_meta import source_line
from weft.capture.sizes_in_bytes import format_bytes
from weft.capture.user_code import format_frame
from weft.errors import CollectiveFailed, RuntimeCheckFailed, StepFailed, WeftError
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.node_order import start_of
from weft.inductor.runtime.bindings import callable_of
from weft.inductor.runtime.gloo_collectives import interruptible
from weft.inductor.runtime.memory_plan import plan_memory
from weft.inductor.runtime.placement import place
from weft.inductor.runtime.verify import verify_program
from weft.inductor.runtime.writer import write_program
from weft.rank_watch import CannotEnd
from weft.torch_adapter import OpOverload

log = logging.getLogger(__name__)

Node = torch.fx.Node

_count = itertools.count()


class AtenProgram:
    """A compiled step.

    Call it with one value per input of the StepGraph (local tensors, Python numbers), in order. :meth:`boxed` takes a
    list of them and empties it, so that inputs are freed at their last use. Updated inputs are written in place. A call
    returns the values of the ``Create`` and ``Return`` outputs, in order.

    Args:
        source: the Python text to run; it defines ``run(inputs)``.
        names: the global names of the text with their values.
        lines: the node of each line of the text.

    Attributes:
        source: as given.

    Raises:
        CollectiveFailed: a collective failed or cannot end; names the user's line, and the ranks that are gone.
        StepFailed: another operation failed; names the user's line. Weft's own errors, and errors of user hooks, are
            passed on unchanged.
    """

    def __init__(self, source: str, names: dict[str, Any], lines: list[Node | None]) -> None:
        self.source = source
        self._lines = lines
        self._filename = f"<weft program {next(_count)}>"
        device_watch.programs[self._filename] = self
        # Tracebacks and debuggers show the text of the program through linecache.
        linecache.cache[self._filename] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            self._filename,
        )
        weakref.finalize(self, linecache.cache.pop, self._filename, None)
        # Only names that are called get the cheaper binding: an operation passed as an argument stays an OpOverload.
        collectives = interruptible(lines)
        called = re.compile(r"\b(\w+)\(").findall(source)
        namespace = dict(names)
        for name in {*called} & {*names}:
            if isinstance(names[name], OpOverload):
                namespace[name] = collectives.get(names[name]) or callable_of(names[name])
        exec(compile(source, self._filename, "exec"), namespace)
        self._run: Callable[[list[Any]], list[Any]] = namespace["run"]

    @property
    def operations(self) -> Counter[str]:
        """Number of operations that run in ``generated`` kernels and as ``aten`` kernels. Views count as neither."""
        counts: Counter[str] = Counter()
        for node in dict.fromkeys(self._lines):
            if node is not None and node.op == "call_function" and not looks_into(node):
                generated = "fused_ops" in node.meta
                counts["generated" if generated else "aten"] += node.meta["fused_ops"] if generated else 1
        return counts

    def __call__(self, *inputs: Any) -> list[Any]:
        """:meth:`boxed`, for a caller that holds the inputs during the call in any case."""
        return self.boxed([*inputs])

    def boxed(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs``; the list is empty afterwards, so that an input with no other reference is freed at its
        last use."""
        try:
            with torch_adapter.no_autocast():
                if not torch.is_grad_enabled():  # entering no_grad costs as much as two operations
                    return self._run(inputs)
                with torch.no_grad():
                    return self._run(inputs)
        except RuntimeCheckFailed as error:
            node = self._failing_node(error.__traceback__)
            line = source_line(node) if node is not None else ""
            raise RuntimeCheckFailed(error.condition, error.found, line) from None
        except WeftError:
            raise
        except Exception as error:
            node = self._failing_node(error.__traceback__)
            if node is None:
                raise
            # A collective fails at its wait. The user's line is that of the call.
            start = start_of(node) if is_wait(node) else node
            stack = [format_frame(frame) for frame in start.meta.get("frames", ())]
            if is_collective(start):
                why = str(error) if isinstance(error, CannotEnd) else f"{type(error).__name__}: {error}"
                raise CollectiveFailed(str(start.target), stack, why) from error
            # The user's own code raised: its error must reach the caller as in eager.
            if node.meta.get("effect"):
                error.add_note(f"raised in a compiled step at {stack[0] if stack else node.name}")
                raise
            raise StepFailed(str(node.target), stack, error, _fails_eagerly(node, error)) from error

    def collective_at(self, line: int) -> tuple[str, list[str]]:
        """The operation that a line of the text runs (from 1), and the user's lines that it came from."""
        node = self._lines[line - 1]
        assert node is not None
        start = start_of(node) if is_wait(node) else node
        return str(start.target), [format_frame(frame) for frame in start.meta.get("frames", ())]

    def _failing_node(self, traceback: TracebackType | None) -> Node | None:
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._filename:
                return self._lines[traceback.tb_lineno - 1]
            traceback = traceback.tb_next
        return None


def _fails_eagerly(node: Node, error: Exception) -> bool | None:
    """Whether the operation of ``node`` also fails on the operands of the failed call, run by itself; None where that
    is not known, or costs more than an operation."""
    op = node.target
    # A GPU reports errors of other operations too, and out of memory says nothing of an operation. Collectives wait.
    late = isinstance(error, torch.OutOfMemoryError) or type(error).__name__ == "AcceleratorError"
    if late or not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return None
    operands = _operands(node, error.__traceback__)
    if operands is None:
        return None
    args, kwargs = operands
    try:
        with torch.random.fork_rng(enabled=torch.Tag.nondeterministic_seeded in op.tags):
            op(*args, **kwargs)
    except Exception:  # noqa: BLE001 - any error is the answer
        return True
    # The program may have run the operation in place, which torch refuses for more tensors (expanded ones).
    return None if "inplace" in node.meta else False


def _operands(node: Node, traceback: TracebackType | None) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The values that the variables named like the operands of ``node`` have in the failed program."""
    while traceback is not None and traceback.tb_frame.f_code.co_name != "run":
        traceback = traceback.tb_next
    if traceback is None:
        return None
    names = traceback.tb_frame.f_locals
    if any(used.name not in names for used in node.all_input_nodes):
        return None
    value = lambda used: names[used.name]
    return torch.fx.map_arg(node.args, value), torch.fx.map_arg(node.kwargs, value)  # type: ignore[return-value]


def compile_aten(step: StepGraph, *, device: torch.device | None = None, planned: bool = False) -> AtenProgram:
    """Compile ``step`` to a program that runs its nodes in order.

    Args:
        step: the graph.
        device: device of tensors that the step creates; None keeps the devices of the capture.
        planned: whether values lie at planned offsets in one arena, allocated for the length of a call. Otherwise all
            memory comes from torch's allocator and is freed at the last use.

    Raises:
        MalformedGraph: the graph has a node or an update that no program can run.
        MalformedProgram: the verifier found a fault in the text (with the knob ``verify_graphs`` on).
    """
    placement = place(step)
    plan = plan_memory(step, placement) if planned else None
    if plan is not None:
        log.info(
            "arena of %s for %s of values, %s of them live at once",
            *map(format_bytes, (plan.size, plan.total, plan.peak_live)),
        )
    program = write_program(step, placement, device, plan)
    if knobs.verify_graphs:
        verify_program(step, *program)
    return AtenProgram(*program)
