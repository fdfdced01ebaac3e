"""The few functions of CUDA's driver that kernels and copies need, through ctypes.

The driver's C interface is stable across versions of CUDA, and a call costs less than triton's launchers do: those
of 3.6 are C files that gcc compiles for every signature (0.3 s each), those of 3.9 take arguments apart one by one.
With it a start from a warm cache does not import triton.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import c_char_p, c_int, c_void_p
from dataclasses import dataclass
from typing import Any

from weft import errors
from weft.triton_adapter import SCRATCH_PARAMETERS

# Of enum CUfunction_attribute and enum CUresult in cuda.h.
_NUMBER_OF_REGISTERS = 4
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_ERROR_INVALID_CONTEXT = 201

# What a kernel may have without asking for it, in bytes.
_SHARED_WITHOUT_ASKING = 48 * 1024

# Letters of the struct module for triton's types of arguments.
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
    """A kernel on a GPU: its CUfunction and the CUcontext it lives in."""

    handle: c_void_p
    context: c_void_p


class Arguments:
    """Memory for one set of a kernel's arguments, laid out as the driver reads it.

    Raises errors.UnsupportedKernelArgument.
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
        # Writes the values given to it; pointers are addresses. Raises struct.error where one does not fit its type.
        self.fill = functools.partial(arguments.pack_into, self._buffer, 0)


class Driver:
    """CUDA's driver, or in a test something that stands in for it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        # Without types of arguments, which would double the cost of the call: numbers are passed as 32 bits, so that
        # addresses have to be c_void_p.
        self.launch = library.cuLaunchKernel
        self.copy = library.cuMemcpyAsync
        # None before CUDA 12.8. CUDA 13 added cuMemcpyBatchAsync_v2, with other arguments, and kept this one.
        self.copy_batch: Any = getattr(library, "cuMemcpyBatchAsync", None)
        library.cuStreamIsCapturing.argtypes = [c_void_p, c_void_p]
        library.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
        library.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
        library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
        library.cuFuncGetAttribute.argtypes = [c_void_p, c_int, c_void_p]
        library.cuCtxPushCurrent_v2.argtypes = [c_void_p]
        library.cuCtxSetCurrent.argtypes = [c_void_p]

    def load(self, cubin: bytes, symbol: str, shared: int, device: int) -> Function:
        """Load a kernel into the primary context of a GPU, which is the one that torch uses, for good: a CUDA graph
        may hold on to it. `shared` is in bytes. Raises errors.CudaError."""
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
                asked = library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                self.check(asked, f"{what} with {shared} bytes of shared memory")
            # Drivers load a function when something first needs it. That should not be a launch, which may be in the
            # capture of a CUDA graph, where memory cannot be allocated.
            registers = ctypes.byref(c_int())
            self.check(library.cuFuncGetAttribute(registers, _NUMBER_OF_REGISTERS, function), what)
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(c_void_p()))
        return Function(function, context)

    def launch_again(self, code: int, function: Function, *configuration: Any) -> int:
        """The result of a launch, whose first result was `code`: a thread that has not used the GPU yet has no
        current context, is given that of the kernel, and launches again."""
        if code != _ERROR_INVALID_CONTEXT:
            return code
        self.check(self._library.cuCtxSetCurrent(function.context), "making a CUDA context current")
        return self.launch(function.handle, *configuration)

    def is_capturing(self, stream: int) -> bool:
        """Whether what is issued to the stream of that address is recorded in a CUDA graph. Raises errors.CudaError."""
        status = c_int()
        self.check(self._library.cuStreamIsCapturing(stream, ctypes.byref(status)), "looking at a CUDA stream")
        return bool(status.value)

    def check(self, code: int, what: str) -> None:
        """Raises errors.CudaError where `code` is not success (0)."""
        if code:
            raise errors.CudaError(what, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))

    def _text(self, function: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, function)(c_int(code), ctypes.byref(text))
        return (text.value or b"error %d" % code).decode()


@functools.cache
def driver() -> Driver:
    """The driver of this machine. Raises errors.NoCudaDriver."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise errors.NoCudaDriver(error) from error
