"""Kernels that can be launched: compiled for a GPU, or the same text in triton's interpreter for the CPU."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_void_p

import torch

from weft import triton_adapter
from weft.inductor.runtime import compile_pool, cuda
from weft.inductor.runtime.kernel_cache import Binary, Resources
from weft.inductor.runtime.kernel_source import KernelSource

Grid = tuple[int, int, int]

# A pointer is given as a tensor or as an address; an address costs the launch less.
Argument = torch.Tensor | int | float

_THREADS_PER_WARP = 32


class Kernel(ABC):
    """A kernel on a device. Nothing about it is decided at launch: arguments only have to fit `source.signature`.

    `resources` is what it needs of the GPU; None for an interpreted kernel, which is not compiled.
    """

    def __init__(self, source: KernelSource, resources: Resources | None) -> None:
        self.source = source
        self.name = source.name
        self.resources = resources

    @abstractmethod
    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        """Run the kernel on `grid` programs; nothing where that is empty. `stream` is the address of a CUDA stream
        (0 for the default one; the interpreter has none), `args` are those of the signature, in order.

        Raises struct.error for an argument that does not fit its type, errors.CudaError.
        """

    @abstractmethod
    def prepare(self, grid: Grid, *args: Argument) -> Callable[[int], None]:
        """The launch with this grid and these arguments, as a function of the stream: for arguments known before.
        Tensors are not kept alive."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.source.content[:8]}>"


class CompiledKernel(Kernel):
    """A kernel on one GPU.

    The Python of a launch of 8 arguments, without what the driver does, takes 2.0 us on an EPYC (0.06 us more for each
    tensor instead of an address), and that of a prepared one 0.7 us. A launch is for the GPU that is current.
    """

    def __init__(self, source: KernelSource, binary: Binary, device: int, driver: cuda.Driver) -> None:
        super().__init__(source, binary.resources)
        self._driver = driver
        self._call = driver.launch
        self._function = driver.load(binary.cubin, binary.symbol, binary.resources.shared, device)
        self._handle = self._function.handle
        # The size of a program in threads, three numbers, and its dynamic shared memory.
        self._block = binary.num_warps * _THREADS_PER_WARP, 1, 1, binary.resources.shared
        self._arguments = cuda.Arguments(source.name, source.signature)
        self._fill = self._arguments.fill
        self._pointers = self._arguments.pointers
        # Two threads may run two programs with the same kernel.
        self._lock = threading.Lock()

    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        x, y, z = grid
        if not (x and y and z):
            return
        values = _values(args)
        with self._lock:
            self._fill(*values)
            stream_ = c_void_p(stream)
            if code := self._call(self._handle, x, y, z, *self._block, stream_, self._pointers, None):
                self._failed(code, grid, stream, self._arguments)

    def prepare(self, grid: Grid, *args: Argument) -> Callable[[int], None]:
        arguments = cuda.Arguments(self.name, self.source.signature)
        arguments.fill(*_values(args))
        call, pointers = self._call, arguments.pointers
        configuration = self._handle, *grid, *self._block

        def launch(stream: int) -> None:
            if code := call(*configuration, c_void_p(stream), pointers, None):
                self._failed(code, grid, stream, arguments)

        return launch if all(grid) else lambda stream: None

    def _failed(self, code: int, grid: Grid, stream: int, arguments: cuda.Arguments) -> None:
        """A launch returned `code`: repair that, or raise."""
        configuration = *grid, *self._block, c_void_p(stream), arguments.pointers, None
        code = self._driver.launch_again(code, self._function, *configuration)
        self._driver.check(code, f"launching kernel {self.name} on a grid of {grid}")


class InterpretedKernel(Kernel):
    """A kernel on the CPU, in triton's interpreter: some microseconds for each operation of each program."""

    def __init__(self, source: KernelSource) -> None:
        super().__init__(source, None)
        self._function = source.function()
        self._check = cuda.Arguments(source.name, source.signature)

    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        values = _values(args)
        # For the errors that a launch on a GPU would raise.
        self._check.fill(*values)
        triton_adapter.interpret(self._function, self.source.signature, self.source.constants, grid, values)

    def prepare(self, grid: Grid, *args: Argument) -> Callable[[int], None]:
        values = _values(args)
        return lambda stream: self.launch(grid, stream, *values)


def _values(args: tuple[Argument, ...]) -> list[int | float]:
    return [arg if type(arg) in _NUMBERS else arg.data_ptr() for arg in args]  # type: ignore[union-attr]


_NUMBERS = frozenset({int, float, bool})


# ---- from sources to kernels

_kernels: dict[tuple[KernelSource, torch.device], Kernel] = {}


def compile_kernels(sources: Sequence[KernelSource], device: torch.device) -> list[Kernel]:
    """Kernels for `sources` on `device`, in order: a GPU (with its index), or the CPU, which interprets them.

    Equal sources give the same kernel, in this call and in all of this process. Compiled kernels come from the cache
    on disk where they are in it. Raises errors.KernelCompilationFailed, errors.UnsupportedKernelArgument,
    errors.CacheUnusable, errors.TritonMissing, errors.CudaError, errors.NoCudaDriver.
    """
    missing = [source for source in dict.fromkeys(sources) if (source, device) not in _kernels]
    made: Sequence[Kernel]
    if device.type == "cpu":
        made = [InterpretedKernel(source) for source in missing]
    else:
        assert device.index is not None, "a GPU is told from the others by its index"
        binaries = compile_pool.build(missing, arch_of(device))
        pairs = zip(missing, binaries, strict=True)
        made = [CompiledKernel(source, binary, device.index, cuda.driver()) for source, binary in pairs]
    for source, kernel in zip(missing, made, strict=True):
        # Another thread may have made it meanwhile: all get the same.
        _kernels.setdefault((source, device), kernel)
    return [_kernels[source, device] for source in sources]


def arch_of(device: torch.device) -> int:
    """A GPU's architecture as triton numbers them: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def inspect_kernel(source: KernelSource, arch: int = 90) -> Resources:
    """What `source` needs, compiled for sm_<arch>; no GPU is needed. Raises what compile_pool.build does."""
    (binary,) = compile_pool.build([source], arch)
    return binary.resources
