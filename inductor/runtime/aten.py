"""The ATen executor: a StepGraph as one readable Python function of eager kernels, bit for bit as eager.

The nodes run in the order of the graph. Two decisions make the function: where each value lives
(:mod:`weft.inductor.runtime.placement`) and when each variable is dropped (at its last use,
:mod:`weft.inductor.runtime.writer`).
"""

from __future__ import annotations

import itertools
import linecache
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import torch

import weft.gloo  # noqa: F401 - all-gathers on the CPU that may be in flight together
from weft import torch_adapter
from weft.capture.costs import format_bytes
from weft.capture.graph import StepGraph
from weft.capture.user_code import format_frame
from weft.errors import RuntimeCheckFailed, StepFailed, WeftError
from weft.inductor.runtime.bindings import callable_of
from weft.inductor.runtime.cublas_lt import Shape
from weft.inductor.runtime.geometry import looks_into
from weft.inductor.runtime.memory_plan import plan_memory
from weft.inductor.runtime.placement import place
from weft.inductor.runtime.products import chosen, product_callables
from weft.inductor.runtime.writer import write_program
from weft.torch_adapter import OpOverload

log = logging.getLogger(__name__)

Node = torch.fx.Node

_count = itertools.count()


class AtenProgram:
    """A compiled step. Call it with one value an input of the StepGraph (local tensors, Python numbers), in
    order; or call :meth:`boxed` with a list of them, which it empties so that inputs go at their last use.

    Updated inputs are written in place. Returns the values of the outputs that are ``Create`` or ``Return``,
    in order.

    Args:
        algorithms: by which products of some shapes are to be computed, see :mod:`weft.inductor.runtime.products`.

    Attributes:
        source: the Python text that runs.

    Raises:
        StepFailed: an operation failed; names the user's line. Errors of weft's own, and whatever a call with
            effects (a hook of the user's) raises, come through as they are.
    """

    def __init__(
        self,
        source: str,
        names: dict[str, Any],
        lines: list[Node | None],
        algorithms: Mapping[Shape, str] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self._lines = lines
        self._filename = f"<weft program {next(_count)}>"
        linecache.cache[self._filename] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            self._filename,
        )
        weakref.finalize(self, linecache.cache.pop, self._filename, None)
        called = re.compile(r"\b(\w+)\(").findall(source)
        namespace, products = dict(names), product_callables(algorithms)
        for name in {*called} & {*names}:  # an operation that is handed to another one stays what it is
            if isinstance(names[name], OpOverload):
                namespace[name] = products.get(names[name]) or callable_of(names[name])
        exec(compile(source, self._filename, "exec"), namespace)
        self._run: Callable[[list[Any]], list[Any]] = namespace["run"]

    @property
    def operations(self) -> Counter[str]:
        """How many operations of the graph run in ``generated`` kernels, how many as kernels of ``aten``; a view is
        neither."""
        counts: Counter[str] = Counter()
        for node in dict.fromkeys(self._lines):
            if node is not None and node.op == "call_function" and not looks_into(node):
                generated = "operations" in node.meta
                counts["generated" if generated else "aten"] += node.meta["operations"] if generated else 1
        return counts

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.boxed([*inputs])

    def boxed(self, inputs: list[Any]) -> list[Any]:
        """Run over ``inputs``, a list that is empty afterwards: what nobody else holds is freed at its last use."""
        try:
            with torch_adapter.no_autocast():
                if not torch.is_grad_enabled():  # as below AOTAutograd: no_grad costs as much as two operations
                    return self._run(inputs)
                with torch.no_grad():
                    return self._run(inputs)
        except RuntimeCheckFailed as error:
            node = self._failing_node(error.__traceback__)
            frames = node.meta.get("frames", ()) if node is not None else ()
            line = format_frame(frames[0]) if frames else ""
            raise RuntimeCheckFailed(error.condition, error.found, line) from None
        except WeftError:
            raise
        except Exception as error:
            node = self._failing_node(error.__traceback__)
            if node is None:
                raise
            stack = [format_frame(frame) for frame in node.meta.get("frames", ())]
            if node.meta.get("effect"):
                error.add_note(f"raised in a compiled step at {stack[0] if stack else node.name}")
                raise
            raise StepFailed(str(node.target), stack, error) from error

    def _failing_node(self, traceback: TracebackType | None) -> Node | None:
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._filename:
                return self._lines[traceback.tb_lineno - 1]
            traceback = traceback.tb_next
        return None


def compile_aten(step: StepGraph, *, device: torch.device | None = None, planned: bool = False) -> AtenProgram:
    """Make a program that runs the nodes of ``step`` as they stand, with eager kernels.

    Args:
        device: where tensors made by the step go; None leaves them where the capture had them.
        planned: whether what can lies in one block of memory, held from the beginning of a call to its end, where each
            value's place is planned; otherwise all memory comes from torch's allocator, and goes back at a last use.

    Raises:
        MalformedGraph: the graph has a node or an update that no executor can run.
    """
    placement = place(step)
    plan = plan_memory(step, placement) if planned else None
    if plan is not None:
        log.info("%s in %s of memory, %s at once", *map(format_bytes, (plan.made, plan.size, plan.held)))
    return AtenProgram(*write_program(step, placement, device, plan), chosen(step.graph))
