"""Launchable kernels: compiled for a GPU, or the same source in triton's interpreter on the CPU."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any

import torch

from weft import cuda_driver, errors, triton_adapter
from weft.inductor.cache.kernel_cache import Binary, Resources
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.runtime import compile_pool

log = logging.getLogger(__name__)

Grid = tuple[int, int, int]

# A pointer is passed as a tensor or as an address; an address makes the launch cheaper.
Argument = torch.Tensor | int | float

_THREADS_PER_WARP = 32  # on all NVIDIA GPUs


class Kernel(ABC):
    """A kernel on a device. It is not specialised at launch: any arguments that fit ``source.signature`` are valid.

    Attributes:
        source: text, signature and launch parameters.
        name: name of the Triton function.
        resources: registers, spills and shared memory; None for an interpreted kernel.
    """

    def __init__(self, source: KernelSource, resources: Resources | None) -> None:
        self.source = source
        self.name = source.name
        self.resources = resources

    @abstractmethod
    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        """Run the kernel; an empty grid does nothing.

        Args:
            grid: number of programs in x, y and z.
            stream: address of a CUDA stream, 0 for the default stream; ignored by the interpreter.
            args: arguments in the order of the signature.

        Raises:
            struct.error: an argument does not fit its type.
            CudaError: the driver returned an error.
        """

    @abstractmethod
    def prepare(self, grid: Grid, *args: Argument) -> Callable[[int], None]:
        """A function of the stream that launches with this grid and these arguments. It keeps no tensor alive: the
        caller must, until the launch."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.source.content[:8]}>"


class CompiledKernel(Kernel):
    """A kernel loaded on one GPU, which must be the current GPU at a launch.

    A launch with 8 arguments costs 2.0 us of Python on an EPYC, without the driver's own time, plus 0.06 us for each
    tensor in place of an address. A prepared launch costs 0.7 us.
    """

    def __init__(self, source: KernelSource, binary: Binary, device: int, driver: cuda_driver.Driver) -> None:
        super().__init__(source, binary.resources)
        self._driver = driver
        self._call = driver.launch
        self._function = driver.load(binary.cubin, binary.symbol, binary.resources.shared, device)
        self._handle = self._function.handle
        # Threads per program in x, y and z, and dynamic shared memory in bytes.
        self._block = binary.num_warps * _THREADS_PER_WARP, 1, 1, binary.resources.shared
        self._arguments = cuda_driver.KernelArguments(source.name, source.signature)
        self._fill = self._arguments.fill
        self._pointers = self._arguments.pointers
        # Two threads may launch the same kernel, and its argument buffer is shared between launches.
        self._lock = threading.Lock()

    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        """Launch on ``stream``, see :meth:`Kernel.launch`."""
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
        """A prepared launch with its own argument buffer, see :meth:`Kernel.prepare`."""
        arguments = cuda_driver.KernelArguments(self.name, self.source.signature)
        arguments.fill(*_values(args))
        call, pointers = self._call, arguments.pointers
        configuration = self._handle, *grid, *self._block

        def launch(stream: int) -> None:
            if code := call(*configuration, c_void_p(stream), pointers, None):
                self._failed(code, grid, stream, arguments)

        return launch if all(grid) else lambda stream: None

    def _failed(self, code: int, grid: Grid, stream: int, arguments: cuda_driver.KernelArguments) -> None:
        """Retry a launch that returned ``code`` (a thread without a context), or raise CudaError."""
        configuration = *grid, *self._block, c_void_p(stream), arguments.pointers, None
        code = self._driver.launch_again(code, self._function, *configuration)
        self._driver.check(code, f"launching kernel {self.name} on a grid of {grid}")


class InterpretedKernel(Kernel):
    """A kernel in triton's interpreter on the CPU. Each operation of each program takes some microseconds."""

    def __init__(self, source: KernelSource) -> None:
        super().__init__(source, None)
        self._function = source.function()
        self._check = cuda_driver.KernelArguments(source.name, source.signature)

    def launch(self, grid: Grid, stream: int, *args: Argument) -> None:
        """Interpret the kernel, see :meth:`Kernel.launch`."""
        values = _values(args)
        # Raises the errors that a launch on a GPU would raise for arguments that do not fit.
        self._check.fill(*values)
        triton_adapter.interpret(self._function, self.source.signature, self.source.constants, grid, values)

    def prepare(self, grid: Grid, *args: Argument) -> Callable[[int], None]:
        """A prepared interpretation, see :meth:`Kernel.prepare`."""
        values = _values(args)
        return lambda stream: self.launch(grid, stream, *values)


def _values(args: tuple[Argument, ...]) -> list[int | float]:
    return [arg if type(arg) in _NUMBERS else _value(arg) for arg in args]  # type: ignore[misc]


def _value(arg: Any) -> int | float:
    """The address of a tensor. Numbers of numpy's, such as a learning rate from an array, become Python's."""
    return arg.data_ptr() if isinstance(arg, torch.Tensor) else arg.item()


_NUMBERS = frozenset({int, float, bool})


# ---- from sources to kernels

_kernels: dict[tuple[KernelSource, torch.device], Kernel] = {}


def compile_kernels(sources: Sequence[KernelSource], device: torch.device) -> list[Kernel]:
    """Launchable kernels for ``sources`` on ``device``, in order.

    Equal sources give the same kernel object in the whole process. Compiled kernels are read from the cache on disk if
    they are in it.

    Args:
        sources: the kernels.
        device: a GPU with its index, or the CPU, where kernels are interpreted.

    Raises:
        KernelCompilationFailed, TritonMissing: see :func:`compile_pool.build`.
        UnsupportedKernelArgument: a signature has a type that cannot be passed.
        CudaError, NoCudaDriver: the kernel cannot be loaded.
    """
    missing = [source for source in dict.fromkeys(sources) if (source, device) not in _kernels]
    kernels: Sequence[Kernel]
    if device.type == "cpu":
        kernels = [InterpretedKernel(source) for source in missing]
    else:
        assert device.index is not None, "a GPU is given with its index"
        binaries = compile_pool.build(missing, arch_of(device))
        kernels = [_loaded(source, binary, device) for source, binary in zip(missing, binaries, strict=True)]
    for source, kernel in zip(missing, kernels, strict=True):
        # Another thread may have created it meanwhile: the first one wins for all.
        _kernels.setdefault((source, device), kernel)
    return [_kernels[source, device] for source in sources]


def _loaded(source: KernelSource, binary: Binary, device: torch.device) -> CompiledKernel:
    """A kernel on a GPU. Where the driver refuses machine code, the entry of the cache may be what is wrong."""
    try:
        return CompiledKernel(source, binary, device.index, cuda_driver.driver())
    except errors.CudaError:
        rebuilt = compile_pool.rebuild(source, arch_of(device))
        if rebuilt == binary:
            raise
        log.warning("the cache held other machine code for kernel %s, which was compiled again", source.name)
        return CompiledKernel(source, rebuilt, device.index, cuda_driver.driver())


def arch_of(device: torch.device) -> int:
    """The architecture of a GPU as triton numbers it: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def inspect_kernel(source: KernelSource, arch: int = 90) -> Resources:
    """Registers, spills and shared memory of ``source`` compiled for sm_<arch>. Needs no GPU. Raises the errors of
    :func:`compile_pool.build`."""
    (binary,) = compile_pool.build([source], arch)
    return binary.resources
