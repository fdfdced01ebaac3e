"""A kernel as text with all that compiling it depends on, named by its content."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.inductor.graph.serializable import serializable

_REGISTERS = 65536  # 32-bit registers of a multiprocessor, from sm_70 to sm_100
_MOST_REGISTERS = 255  # of a thread: what an instruction can name


def registers_per_thread(num_warps: int) -> int:
    """The registers that a thread may have where one program of ``num_warps`` warps fills a multiprocessor."""
    return min(_REGISTERS // (32 * num_warps), _MOST_REGISTERS)


@serializable
@dataclass(frozen=True, eq=False)
class KernelSource:
    """One kernel, before it is compiled.

    `text` is a Python module: imports, functions that the kernel calls, and a `@triton.jit` function called `name`.
    It imports from triton alone: what is elsewhere is not part of the content. Its parameters are those of `signature`
    (argument -> "*bf16", "i32", "fp32", ..., as triton writes types) in the same order, and those of `constants` (bool,
    int, float, str or None), which are `tl.constexpr`. `divisible` are arguments known to be multiples of 16 (pointers:
    of 16 bytes); without them there are no vector loads. A constant `ARCH` becomes the architecture (90 for sm_90) when
    the kernel is compiled; it is 0 here, and in the interpreter. A constant `ALIGNED` says whether all pointers are
    multiples of 16 bytes. `registers` is how many a thread may have: by itself the assembler may have fewer, and spill,
    so that a multiprocessor could hold more programs than will be launched.
    """

    name: str
    text: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int
    registers: int | None = None

    @property
    def shape(self) -> str:
        """The first word of its name: "pointwise", "copy", "row", "column" or "mixed"; see
        :class:`~weft.inductor.codegen.kernel_plan.KernelPlan`."""
        return self.name.partition("_")[0]

    # By content: sources are keys of caches on disk and between processes, where objects differ.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSource) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def unaligned(self) -> KernelSource:
        """The kernel for pointers of any alignment: multiples of their elements' size, not of 16 bytes."""
        constants = {name: value if name != "ALIGNED" else False for name, value in self.constants.items()}
        return replace(self, divisible=frozenset(), constants=constants)

    @functools.cached_property
    def content(self) -> str:
        """The same for two sources exactly where they compile to the same (64 hexadecimal digits)."""
        # Cached, since a source is frozen; it is asked at every look-up of a kernel.
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """All of it as one line, the order of the arguments included."""
        fields = asdict(self)
        # A list keeps the order, which `json` objects promise to nobody. Constants and `divisible` have no order of
        # meaning, so they are sorted.
        fields["signature"] = list(self.signature.items())
        fields["constants"] = sorted(self.constants.items())
        fields["divisible"] = sorted(self.divisible)
        return json.dumps(fields)

    @classmethod
    def from_json(cls, line: str) -> KernelSource:
        """What `to_json` wrote."""
        fields = json.loads(line)
        fields["signature"] = dict(fields["signature"])
        fields["constants"] = dict(fields["constants"])
        fields["divisible"] = frozenset(fields["divisible"])
        return cls(**fields)

    def function(self) -> Any:
        """Run the text and return its `@triton.jit` function. Tracebacks show the lines of the text."""
        file = f"<weft kernel {self.name} {self.content[:8]}>"
        # Without a time of modification linecache never looks for a file of that name.
        # Tracebacks and the debugger then show the line of the generated text.
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        # A namespace of its own, since Triton looks up helpers in a function's globals: two kernels may carry
        # different texts of one name.
        names: dict[str, Any] = {"__name__": f"weft_kernel_{self.content[:8]}"}
        exec(compile(self.text, file, "exec"), names)
        return names[self.name]
