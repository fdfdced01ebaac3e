"""Faults of weft's own in a compilation, and the parts of the compiler that it can do without.

A pass, a fusion or a kernel that fails must not end a run that could go on without it. An attempt to compile a step
notes in :class:`Faults` which part failed. :func:`weft.inductor.compiler.compile_graph` then compiles the captured
graph again without that part. What a left-out part would have done runs as ATen kernels.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft import knobs
from weft.capture.node_meta import source_line
from weft.errors import HOW_TO_REDUCE, CudaError, InternalFault, WeftError

Node = torch.fx.Node

Guard = Callable[[Iterable[Node]], contextlib.AbstractContextManager[None]]
"""Makes the context in which nodes are worked on. It may suppress an exception and note it against the nodes."""

_MOST_NAMES = 8
_MOST_CHARACTERS = 600


class Part(NamedTuple):
    """A part of the compiler that a compilation can do without.

    Attributes:
        kind: "pass": one pass. "operation": the generated kernel of an operation, which then runs as its ATen kernel.
            "inlining", "fusion": of all loop nests. "recording": as CUDA graphs. "transports": over symmetric memory.
            "kernels": all generated kernels. "passes": all that are not required. "schedule": of the collectives.
        name: of the pass, or of the operation's node; else empty.
    """

    kind: str
    name: str = ""


@dataclass(frozen=True)
class LeftOut:
    """What a compilation leaves out.

    Attributes:
        parts: the parts.
        verified: whether the verifiers run after every pass, to find which pass broke what a later one failed on.
    """

    parts: frozenset[Part] = frozenset()
    verified: bool = False

    def __contains__(self, kind: str) -> bool:
        return any(part.kind == kind for part in self.parts)

    def __or__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.parts | other.parts, self.verified or other.verified)

    def names(self, kind: str) -> frozenset[str]:
        """The names of the parts of one kind."""
        return frozenset(part.name for part in self.parts if part.kind == kind)

    def variant(self) -> str:
        """What changes the graph of kernels beside the knobs, for the key of its cache."""
        kinds = ("operation", "inlining", "fusion")
        return json.dumps(sorted(part for part in self.parts if part.kind in kinds))

    def text(self) -> str:
        """As JSON."""
        return json.dumps([sorted(self.parts), self.verified])

    @staticmethod
    def read(text: str) -> LeftOut:
        """What :meth:`text` wrote."""
        parts, verified = json.loads(text)
        return LeftOut(frozenset(Part(kind, name) for kind, name in parts), bool(verified))


# The part that is left out where a stage fails and no smaller part is to blame.
_PART_OF_STAGE = {
    "inline": "inlining",
    "fuse": "fusion",
    "schedule": "schedule",
    "binding": "transports",
    "program": "recording",
}
_LAST_RESORTS = ("kernels", "passes", "schedule")


class Faults:
    """The faults of one attempt to compile a step.

    Attributes:
        error: the first; None without any.
        parts: the parts to blame, each with the user's line that it works on, "" where there is none.
        stage: the innermost stage of the compilation that ``error`` ended.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.parts: dict[Part, str] = {}
        self.stage = ""

    @contextlib.contextmanager
    def blame(self, parts: Sequence[Part]) -> Iterator[None]:
        """Note ``parts`` where the block raises a fault that nothing smaller is to blame for."""
        try:
            yield
        except Exception as error:
            if is_fault(error) and self.error is not error:
                self.note(error, dict.fromkeys(parts, ""))
            raise

    @contextlib.contextmanager
    def blame_nodes(self, nodes: Iterable[Node]) -> Iterator[None]:
        """:meth:`blame` of the kernels of ``nodes``."""
        try:
            yield
        except Exception as error:
            if is_fault(error) and self.error is not error:
                self.note(error, _operations(nodes))
            raise

    @contextlib.contextmanager
    def collect(self, nodes: Iterable[Node]) -> Iterator[None]:
        """Note the kernels of ``nodes`` where the block raises a fault, and go on after the block: layers that repeat
        have the same fault many times, and all are found in one attempt. :meth:`raise_first` must follow."""
        try:
            yield
        except Exception as error:
            if not is_fault(error):
                raise
            self.note(error, _operations(nodes))

    def ended(self, stage: str, error: Exception) -> None:
        """Note that ``error`` ended a stage. Stages inside others come first."""
        if is_fault(error) and not (self.stage and self.error is error):
            self.note(error, {})
            self.stage = stage

    def raise_first(self) -> None:
        """Raise the first fault, if any was noted."""
        if self.error is not None:
            raise self.error

    def note(self, error: Exception, parts: dict[Part, str]) -> None:
        """Note a fault and the parts to blame, each with the user's line."""
        if self.error is None:
            self.error = error
        self.parts |= parts

    def more(self, left_out: LeftOut, available: frozenset[str]) -> LeftOut | None:
        """What to leave out in addition in the next attempt. None: nothing is left that could help.

        Args:
            left_out: in the attempt that had these faults.
            available: the kinds that this compilation can leave out as a whole.
        """
        # A kernel that fails is at fault itself. A pass that fails may be the victim of an earlier one, which only a
        # verified attempt tells.
        operations = bool(self.parts) and all(part.kind == "operation" for part in self.parts)
        if not (operations or left_out.verified or knobs.verify_graphs):
            return LeftOut(verified=True)  # a pass may have failed on what an earlier one had broken
        parts = frozenset(self.parts) - left_out.parts
        whole = [_PART_OF_STAGE.get(self.stage), *_LAST_RESORTS]
        others = (Part(kind) for kind in whole if kind in available and kind not in left_out)
        parts = parts or frozenset([part for part in [next(others, None)] if part is not None])
        return LeftOut(parts) if parts else None

    def report(self, left_out: LeftOut) -> str:
        """What a user is told: that ``left_out`` is left out, why, and what to do."""
        lines = [line for part, line in self.parts.items() if part in left_out.parts and line]
        lines = lines or [line for line in [_line_at(self.error)] if line]
        where = "".join(f"\n  {line}" for line in list(dict.fromkeys(lines))[:_MOST_NAMES])
        assert self.error is not None
        return reported(described(left_out), self.error, where)


def reported(what: str, error: Exception, where: str) -> str:
    """What a user is told of a part ``what`` that is left out because of ``error``, raised at the lines ``where``."""
    text = str(error).partition("\n")[0][:_MOST_CHARACTERS]
    return (
        f"weft goes on without {what}, which failed: {type(error).__name__}: {text}{where}\n"
        "The step computes the same and may be slower. This is a fault in weft; please report it. "
        f"{HOW_TO_REDUCE}. WEFT_STRICT=1 raises the error"
    )


def is_fault(error: BaseException) -> bool:
    """Whether an error of the compilation is a fault of weft's own, which another way to compile the step may avoid.
    Not: what tells the user of a mistake or of other ranks, exhausted memory, and a file or GPU that fails."""
    if isinstance(error, WeftError):
        return isinstance(error, (InternalFault, CudaError))
    # Another way to compile the step would meet the same memory, disk or GPU.
    outside = isinstance(error, (MemoryError, OSError, torch.OutOfMemoryError))
    return isinstance(error, Exception) and not outside and type(error).__name__ != "AcceleratorError"


def described(left_out: LeftOut) -> str:
    """The parts in words."""
    words = [f"the pass {name}" for name in sorted(left_out.names("pass"))]
    operations = sorted(left_out.names("operation"))
    if operations:
        more = f" and {len(operations) - _MOST_NAMES} more" if len(operations) > _MOST_NAMES else ""
        words.append(f"generated kernels for {', '.join(operations[:_MOST_NAMES])}{more}")
    whole = {
        "inlining": "inlining of loop nests",
        "fusion": "fusion of loop nests",
        "recording": "CUDA graphs",
        "transports": "transports over symmetric memory",
        "kernels": "generated kernels",
        "passes": "all graph passes that are not required",
        "schedule": "a schedule of the collectives",
    }
    return ", ".join([*words, *(text for kind, text in whole.items() if kind in left_out)])


def unguarded(nodes: Iterable[Node]) -> contextlib.AbstractContextManager[None]:
    """A :data:`Guard` that lets every exception pass."""
    return contextlib.nullcontext()


def _operations(nodes: Iterable[Node]) -> dict[Part, str]:
    return {Part("operation", node.name): source_line(node) for node in nodes}


def _line_at(error: Exception | None) -> str:
    """The user's line of the node that the innermost function with one was working on when ``error`` was raised."""
    found, traceback = "", error.__traceback__ if error is not None else None
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            found = (source_line(value) if isinstance(value, Node) else "") or found
        traceback = traceback.tb_next
    return found
