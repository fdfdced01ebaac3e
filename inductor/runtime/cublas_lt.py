"""Matrix products by cuBLASLt, by an algorithm of the caller's choice.

cuBLAS guesses which of its kernels suits a product best. cuBLASLt, the same library by another door, says what it would
try next, too; an algorithm is 64 bytes that mean the same in every process with that version of the library.
(NVIDIA, "cuBLAS Library", cublasLtMatmulAlgoGetHeuristic and cublasLtMatmul.)
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor

# Numbers of cublasLt.h and library_types.h.
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_TRANSPOSES = 3, 4
_MOST_WORKSPACE, *_ALIGNMENTS = 1, 5, 6, 7, 8

ALIGNMENT = 16  # bytes: of every matrix, and of every row or column
_MOST = 16  # algorithms that are asked for


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint8 * 64),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Shape:
    """Of ``a @ b``, or of ``c + a @ b`` in the place of ``c``: an (m, k) and a (k, n) matrix, the result (m, n) and
    contiguous, all of one dtype, sums in float32.

    Attributes:
        a, b: sizes, then strides in elements.
        dtype: bfloat16 or float16.
        adds: whether there is a ``c``.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: torch.dtype
    adds: bool = False

    @staticmethod
    def of(a: Tensor, b: Tensor, adds: bool = False) -> Shape:
        return Shape((*a.shape, *a.stride()), (*b.shape, *b.stride()), a.dtype, adds)

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.a[0] * self.a[1] * self.b[1]

    @property
    def fits(self) -> bool:
        """Whether both matrices lie row by row or column by column, aligned, no row over another."""
        wide = ALIGNMENT // 2
        lie = all(
            1 in strides and max(strides) % wide == 0 and max(strides) >= sizes[strides.index(1)]
            for sizes, strides in ((matrix[:2], matrix[2:]) for matrix in (self.a, self.b))
        )
        return lie and self.dtype in _DTYPES and self.b[1] % wide == 0 and min(*self.a[:2], self.b[1]) > 1


class Product:
    """Products of one shape on one GPU. Holds what cuBLASLt has to be told for each call but for addresses."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self._handle = _handle(self.device)
        # The library thinks in columns: the transpose of the result is that of b times that of a.
        self._first, first = _matrix(shape.b, shape.dtype)
        self._second, second = _matrix(shape.a, shape.dtype)
        self._result, _ = _matrix((shape.a[0], shape.b[1], shape.b[1], 1), shape.dtype)
        self._description = _made("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
        for attribute, transposed in zip(_TRANSPOSES, (first, second), strict=True):
            _set("cublasLtMatmulDescSetAttribute", self._description, attribute, ctypes.c_int(transposed))
        self._one, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(shape.adds))

    def algorithms(self) -> list[bytes]:
        """What the library would try, best guess first; without memory of their own, in fixed orders of sums."""
        preference = _made("cublasLtMatmulPreferenceCreate")
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.c_uint64(0))
        for attribute in _ALIGNMENTS:
            _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.c_uint32(ALIGNMENT))
        found, count = (_Found * _MOST)(), ctypes.c_int(0)
        matrices = self._first, self._second, self._result, self._result
        told = self._handle, self._description, *matrices, preference, _MOST, found, ctypes.byref(count)
        try:
            _call("cublasLtMatmulAlgoGetHeuristic", *told)
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [bytes(each.algorithm) for each in found[: count.value] if each.state == 0]

    def run(self, algorithm: Any, a: Tensor, b: Tensor, result: Tensor) -> None:
        """Write the product into ``result``, on the current stream.

        Args:
            algorithm: one of :meth:`algorithms`, in a ctypes buffer.

        Raises:
            RuntimeError: cuBLASLt refuses the call.
        """
        pointer = ctypes.c_void_p
        place = pointer(result.data_ptr())
        status = _library().cublasLtMatmul(
            self._handle,
            self._description,
            ctypes.byref(self._one),
            pointer(b.data_ptr()),
            self._first,
            pointer(a.data_ptr()),
            self._second,
            ctypes.byref(self._beta),
            place,
            self._result,
            place,
            self._result,
            algorithm,
            None,
            ctypes.c_size_t(0),
            pointer(torch.cuda.current_stream(self.device).cuda_stream),
        )
        if status:
            raise RuntimeError(f"cublasLtMatmul failed: {status}")


@functools.cache
def product_of(shape: Shape, device: torch.device) -> Product:
    """One for each shape and GPU: what cuBLASLt was told is never taken back."""
    return Product(shape, device)


def version() -> int:
    """Of the library: algorithms mean nothing to another one."""
    get = _library().cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return get()


@functools.cache
def _library() -> Any:
    """The one that torch has loaded."""
    torch.cuda.current_blas_handle()
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"\S*/libcublasLt\.so\S*", maps)
    if found is None:
        raise RuntimeError("torch has loaded no libcublasLt.so")
    return ctypes.CDLL(found[0])


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _made("cublasLtCreate")


def _matrix(matrix: tuple[int, ...], dtype: torch.dtype) -> tuple[ctypes.c_void_p, bool]:
    """The layout of the transpose of a matrix, and whether it is that of the matrix itself, to be transposed."""
    rows, columns, row_stride, column_stride = matrix
    transposed = column_stride != 1
    sizes = (rows, columns, column_stride) if transposed else (columns, rows, row_stride)
    words = (ctypes.c_uint64(sizes[0]), ctypes.c_uint64(sizes[1]), ctypes.c_int64(sizes[2]))
    return _made("cublasLtMatrixLayoutCreate", _DTYPES[dtype], *words), transposed


def _made(create: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(create, ctypes.byref(made), *arguments)
    return made


def _set(function: str, what: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(function, what, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} failed: {status}")
