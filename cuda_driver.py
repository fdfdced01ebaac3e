"""The functions of the CUDA driver that load and launch kernels and copy memory, through ctypes.

The driver's C interface is stable across CUDA versions. A call costs less than one through triton's launchers: gcc
compiles those of triton 3.6 for every signature (0.3 s each), and those of 3.9 unpack the arguments one by one. A start
from a warm cache does not import triton at all.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from weft import errors
from weft.triton_adapter import SCRATCH_PARAMETERS

# Of enum CUfunction_attribute and enum CUresult in cuda.h.
_NUMBER_OF_REGISTERS = 4
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_ERROR_INVALID_CONTEXT = 201

# Bytes of dynamic shared memory that a kernel gets without cuFuncSetAttribute.
_SHARED_WITHOUT_ASKING = 48 * 1024

# Format letters of the struct module for triton's argument types.
_LETTERS = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}


@dataclass(frozen=True)
class Function:
    """A loaded kernel: its CUfunction and the CUcontext that it belongs to."""

    handle: c_void_p
    context: c_void_p


class KernelArguments:
    """One set of kernel arguments in host memory, in the layout that cuLaunchKernel reads.

    Raises:
        UnsupportedKernelArgument: the signature has a type without a struct format.
    """

    def __init__(self, kernel: str, signature: dict[str, str]) -> None:
        layout = "@"
        offsets = []
        for name, kind in signature.items():
            letter = "Q" if kind.startswith("*") else _LETTERS.get(kind)
            if letter is None:
                raise errors.UnsupportedKernelArgument(kernel, name, kind)
            layout += letter
            offsets.append(struct.calcsize(layout) - struct.calcsize(letter))
        arguments = struct.Struct(layout)
        # The scratch addresses follow, and stay null.
        offsets += [arguments.size] * SCRATCH_PARAMETERS
        self._buffer = ctypes.create_string_buffer(arguments.size + struct.calcsize("Q"))
        start = ctypes.addressof(self._buffer)
        self.pointers = (c_void_p * len(offsets))(*(start + offset for offset in offsets))
        # fill(*values) writes the arguments, pointers as addresses. Raises struct.error if a value does not fit.
        self.fill = functools.partial(arguments.pack_into, self._buffer, 0)


class Driver:
    """The CUDA driver. Tests pass another ``library`` in its place."""

    def __init__(self, library: Any) -> None:
        self._library = library
        # These two have no ``argtypes``, which would double the cost of a call. ctypes then passes plain ints as 32
        # bits, so callers must wrap addresses in c_void_p.
        self.launch = library.cuLaunchKernel
        self.copy = library.cuMemcpyAsync
        # None before CUDA 12.8. CUDA 13 added cuMemcpyBatchAsync_v2, with other arguments, and kept this one.
        self.copy_batch: Any = getattr(library, "cuMemcpyBatchAsync", None)
        library.cuStreamIsCapturing.argtypes = [c_void_p, c_void_p]
        # Named so since CUDA 12, before which the functions of this name had to be enabled.
        if (write_word := getattr(library, "cuStreamWriteValue32_v2", None)) is not None:
            write_word.argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
        library.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
        library.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
        library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
        library.cuFuncGetAttribute.argtypes = [c_void_p, c_int, c_void_p]
        library.cuCtxPushCurrent_v2.argtypes = [c_void_p]
        library.cuCtxSetCurrent.argtypes = [c_void_p]

    def load(self, cubin: bytes, symbol: str, shared: int, device: int) -> Function:
        """Load a kernel into the primary context of a GPU, the one that torch uses. It is never unloaded, because a
        CUDA graph may still refer to it.

        Args:
            cubin: the compiled module.
            symbol: name of the kernel in it.
            shared: dynamic shared memory in bytes.
            device: index of the GPU.

        Raises:
            CudaError: the driver returned an error.
        """
        ordinal, context, module, function = c_int(), c_void_p(), c_void_p(), c_void_p()
        what = f"loading kernel {symbol}"
        library = self._library
        self.check(library.cuInit(0), what)
        self.check(library.cuDeviceGet(ctypes.byref(ordinal), c_int(device)), what)
        self.check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), what)
        self.check(library.cuCtxPushCurrent_v2(context), what)
        try:
            self.check(library.cuModuleLoadData(ctypes.byref(module), cubin), what)
            self.check(library.cuModuleGetFunction(ctypes.byref(function), module, symbol.encode()), what)
            if shared > _SHARED_WITHOUT_ASKING:
                status = library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                self.check(status, f"{what} with {shared} bytes of shared memory")
            # Drivers load a function when something first needs it. That should not be a launch, which may be in the
            # capture of a CUDA graph, where memory cannot be allocated.
            registers = ctypes.byref(c_int())
            self.check(library.cuFuncGetAttribute(registers, _NUMBER_OF_REGISTERS, function), what)
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(c_void_p()))
        return Function(function, context)

    def launch_again(self, code: int, function: Function, *configuration: Any) -> int:
        """Retry a launch that returned ``code``, and return the new code.

        A thread that has not used the GPU yet has no current context. It gets that of the kernel. Other codes are
        returned unchanged.
        """
        if code != _ERROR_INVALID_CONTEXT:
            return code
        self.check(self._library.cuCtxSetCurrent(function.context), "making a CUDA context current")
        return self.launch(function.handle, *configuration)

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream at address ``stream`` is being captured into a CUDA graph. Raises CudaError."""
        status = c_int()
        self.check(self._library.cuStreamIsCapturing(stream, ctypes.byref(status)), "looking at a CUDA stream")
        return bool(status.value)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Have a stream write a 32-bit word after all work that it has. ``address`` is 4-byte aligned, of a GPU's
        memory or of pinned memory. Raises CudaError."""
        self.check(
            self._library.cuStreamWriteValue32_v2(stream, address, value, 0), "writing a word from a CUDA stream"
        )

    def check(self, code: int, what: str) -> None:
        """Raise CudaError if ``code`` is not 0 (success); ``what`` names the failed action in the message."""
        if code:
            raise errors.CudaError(what, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))

    def _text(self, function: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, function)(c_int(code), ctypes.byref(text))
        return (text.value or b"error %d" % code).decode()


@functools.cache
def driver() -> Driver:
    """The CUDA driver of this machine. Raises NoCudaDriver if ``libcuda.so.1`` cannot be loaded."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise errors.NoCudaDriver(error) from error
