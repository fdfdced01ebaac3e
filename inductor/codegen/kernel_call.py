"""A generated kernel as an operation of a graph: its inputs, its outputs and its launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.printers import PythonPrinter

from weft import knobs, torch_adapter
from weft.capture.user_code import Frame, format_frame
from weft.inductor.codegen.kernel import GeneratedKernel
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.graph.faults import is_fault, reported
from weft.inductor.graph.serializable import serializable
from weft.inductor.graph.sizes import spanned
from weft.inductor.loop_ir.ir import Buffer, Int

log = logging.getLogger(__name__)

_ALIGNMENT = 16  # bytes of a vector load

Layout = tuple[tuple[Int, ...], tuple[Int, ...]]  # sizes, strides


class Launchable(Protocol):
    """A compiled kernel."""

    def launch(self, grid: tuple[int, int, int], stream: int, *args: Any) -> None:
        """Start it on a stream."""


# Compiles a further kernel while the step runs: the variant for unaligned tensors.
Compiler = Callable[[Sequence[KernelSource]], Sequence[Launchable]]


@serializable
class Origin(NamedTuple):
    """An operation of a step, and the user's line that it comes from, where one is known."""

    operation: str
    frame: Frame | None

    def __str__(self) -> str:
        return f"{self.operation}: {format_frame(self.frame)}" if self.frame else self.operation


@serializable
class KernelCall:
    """A call of a graph that launches one generated kernel.

    Called with the tensors that it reads, the tensors that earlier kernels wrote in part, and the numbers that it
    needs, in the order of ``inputs``, ``continued`` and ``symbols``. Returns the tensors that it wrote, in the order of
    ``outputs``; an output for which ``out`` has a tensor is written there.

    Attributes:
        generated: the kernel's text, its arguments and its grid.
        inputs: the buffers that are read only.
        continued: names of buffers that an earlier kernel wrote another part of.
        outputs: the buffers written; those that are not continued are allocated here.
        symbols: sizes and numbers that are known at the call.
        origins: the operations of the step that the kernel computes, and the user's lines they come from.
        bytes: what the kernel has to read and write, see :func:`weft.inductor.cost.roofline.bytes_moved`.
    """

    shares_as_fakes = True  # results lie in the memory of an input only where the fake tensors say so

    def __init__(
        self,
        generated: GeneratedKernel,
        inputs: Sequence[Buffer],
        continued: Sequence[str],
        outputs: Sequence[Buffer],
        symbols: Sequence[sympy.Symbol],
        origins: Sequence[Origin] = (),
        bytes: int = 0,
    ) -> None:
        # FX prints a call by its target's name, so graphs show which kernel runs.
        self.__name__ = self.__qualname__ = generated.source.name
        self.generated = generated
        self.inputs = tuple(inputs)
        self.continued = tuple(continued)
        self.outputs = tuple(outputs)
        self.symbols = tuple(symbols)
        self.origins = tuple(origins)
        self.bytes = bytes
        self.kernel: Launchable | None = None
        self._unaligned: Launchable | None = None
        self._unaligned_failed = False
        self._compile: Compiler | None = None
        self._static = not symbols
        # Without symbols all but addresses is known here, and a call computes nothing on the host.
        if self._static:
            self._numbers: tuple[Any, ...] = ()
            self._grid = generated.grid(())
            self._layouts = [(tuple(b.sizes), tuple(b.strides)) for b in self.outputs]
        else:
            scalars = [scalar.expression for scalar in generated.scalars]
            # One compiled lambda for all numbers of the call, since evaluating sympy expressions would take longer
            # than the kernel.
            self._evaluate = _function(self.symbols, [scalars, *((b.sizes, b.strides) for b in self.outputs)])
        # The kernel's order of arguments and the call's are both fixed, so the mapping is computed once.
        at = {name: position for position, name in enumerate((*(b.name for b in self.inputs), *self.continued))}
        output_at = {buffer.name: position for position, buffer in enumerate(self.outputs)}
        self._input_positions = [at.get(name, -1) for name in generated.buffers]
        self._output_positions = [output_at.get(name, -1) for name in generated.buffers]
        self._continues = [at.get(buffer.name, -1) for buffer in self.outputs]
        self._tensors = len(self.inputs) + len(self.continued)
        # None: not looked at yet.
        self._relaid: dict[int, Layout] | None = None

    @property
    def device(self) -> torch.device:
        """The device of its outputs."""
        return self.outputs[0].device

    def fake_result(self, recorded: Any, *args: Any) -> list[torch.Tensor]:
        """The results for fake arguments, for the graph's verifier: those that are continued are operands, the others
        are new, laid out as the kernel writes them."""
        mode = args[0].fake_mode if args and isinstance(args[0], FakeTensor) else recorded[0].fake_mode
        number = lambda n: n if isinstance(n, int) else torch_adapter.symbolic_size(mode, n)
        results = []
        for buffer, at in zip(self.outputs, self._continues, strict=True):
            sizes, strides = [[number(n) for n in numbers] for numbers in (buffer.sizes, buffer.strides)]
            new = lambda s=sizes, t=strides, b=buffer: torch.empty_strided(s, t, dtype=b.dtype, device=b.device)
            results.append(args[at] if at >= 0 else new())
        return results

    def attach(self, kernel: Launchable, compile_: Compiler) -> None:
        """Give the call its compiled kernel, and the means to compile a variant for unaligned tensors."""
        self.kernel, self._compile = kernel, compile_

    def __call__(self, *args: Any, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        # Strides are read at the first call only; a check of every argument at every call costs host time.
        if self._relaid is None:
            self._relaid = self._unexpected_layouts(args)
        if self._relaid:
            args = self._with_expected_layouts(args, self._relaid)
        if self._static:
            numbers, grid, layouts = self._numbers, self._grid, self._layouts
        else:
            numbers, *layouts = self._evaluate(*args[self._tensors :])
            grid = self.generated.grid(numbers)
        # Without planned memory, results are allocated here.
        if out is None:
            outputs = [
                args[at] if at >= 0 else torch.empty_strided(sizes, strides, dtype=output.dtype, device=output.device)
                for at, (sizes, strides), output in zip(self._continues, layouts, self.outputs, strict=True)
            ]
        else:
            outputs = self._outputs_in(args, layouts, out)
        tensors = [
            args[input_at] if input_at >= 0 else outputs[output_at]
            for input_at, output_at in zip(self._input_positions, self._output_positions, strict=True)
        ]
        # CUDA refuses an empty grid.
        # A symbolic size was 0. The outputs are empty then, and right.
        if 0 not in grid:
            self._launch(grid, tensors, numbers)
        return outputs

    def _launch(self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
        """Launch the kernel, or the variant without vector access where a tensor's address is no multiple of 16 bytes:
        the GPU stops with an error where a 16-byte load is not aligned to 16 bytes."""
        assert self.kernel is not None, f"{self.__name__} was not compiled"
        stream = _stream(tensors[0])
        # At each call: a slice of a batch may start anywhere, and another one at the next call.
        if all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors):
            self.kernel.launch(grid, stream, *tensors, *numbers)
        elif (variant := self._unaligned_variant()) is not None:
            variant.launch(grid, stream, *tensors, *numbers)
        else:
            # Slow, and always right: the last resort of a step that must run.
            copies = [_aligned(tensor) for tensor in tensors]
            self.kernel.launch(grid, stream, *copies, *numbers)
            for tensor, copy, made in zip(tensors, copies, self._output_positions, strict=True):
                # Outputs only; inputs are not written.
                if made >= 0 and copy is not tensor:
                    tensor.copy_(copy)

    def _outputs_in(
        self, args: Sequence[Any], layouts: Sequence[Layout], out: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The outputs: from ``out``, continued, or allocated as in a call without ``out``."""
        outputs = []
        for at, (there, (sizes, strides)) in enumerate(zip(out, layouts, strict=True)):
            buffer, source = self.outputs[at], self._continues[at]
            if there is None and source >= 0:
                there = args[source]
            if there is None:
                there = torch.empty_strided(sizes, strides, dtype=buffer.dtype, device=buffer.device)
            outputs.append(there)
        return outputs

    def _unexpected_layouts(self, args: Sequence[Any]) -> dict[int, Layout]:
        """The inputs whose strides are not those of their fake tensors, by position, with the expected layout.

        Some ATen kernels choose another layout on a GPU than the fake tensors say. It is the same at every call, so
        the first call decides.
        """
        found = {}
        for at, expected in enumerate(self.inputs):
            strides = args[at].stride()
            actual = zip(expected.sizes, expected.strides, strides, strict=True)
            # A dimension of one element may have any stride.
            if any(_known(size, here) and size != 1 and here != there for size, here, there in actual):
                log.info("%s reads %s after a copy: its strides are %s", self.__name__, expected.name, tuple(strides))
                found[at] = expected.sizes, expected.strides
        return found

    def _with_expected_layouts(self, args: Sequence[Any], layouts: Mapping[int, Layout]) -> tuple[Any, ...]:
        copied = list(args)
        for at, (sizes, strides) in layouts.items():
            tensor = args[at]
            copied[at] = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tuple(copied)

    def _unaligned_variant(self) -> Launchable | None:
        """The variant without vector access, compiled at its first launch; None where it does not compile. The kernel
        then runs on aligned copies."""
        if self._unaligned is None and not self._unaligned_failed:
            assert self._compile is not None, f"{self.__name__} was not compiled"
            try:
                self._unaligned = self._compile([self.generated.source.unaligned()])[0]
            except Exception as error:
                # A fault of the compiler may be worked around; running out of memory, or an interrupt, may not.
                if knobs.strict or not is_fault(error):
                    raise
                self._unaligned_failed = True
                lines = "".join(f"\n  {origin}" for origin in self.origins[:8])
                log.warning("%s", reported(f"{self.__name__} for unaligned tensors, which it copies", error, lines))
        return self._unaligned


def _known(*numbers: Int) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of the same layout at an aligned address."""
    if tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    # The whole span of memory with its gaps, so that the copy has the same strides, which the kernel has built in.
    flat = tensor.as_strided((spanned(tensor.shape, tensor.stride()),), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _function(symbols: Sequence[sympy.Symbol], tree: Any) -> Any:
    """A function of the symbols that gives ``tree`` with its expressions evaluated."""
    text = f"lambda {', '.join(map(str, symbols))}: {expression_text(tree)}"
    # The text is printed from sympy expressions of this step, never from input.
    return eval(text, {"math": __import__("math")})


def expression_text(tree: Any) -> str:
    """A number, an expression or a tuple of them as Python."""
    if isinstance(tree, (list, tuple)):
        return f"({''.join(expression_text(item) + ', ' for item in tree)})"
    return repr(tree) if isinstance(tree, int) else _HostPrinter().doprint(tree)


class _HostPrinter(PythonPrinter):
    """Prints Python that needs no module but ``math``: where a kernel is launched, symbols are plain numbers."""

    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self.doprint(expr.args[0])})"

    def _print_TruncToFloat(self, expr: sympy.Expr) -> str:
        return f"float(math.trunc({self.doprint(expr.args[0])}))"

    def _print_OpaqueUnaryFn_sqrt(self, expr: sympy.Expr) -> str:
        return self._print_Function(expr)

    def _print_Function(self, expr: sympy.Expr) -> str:
        name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
        return f"math.{name}({', '.join(map(self.doprint, expr.args))})"
