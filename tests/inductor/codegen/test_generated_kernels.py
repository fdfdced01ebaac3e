"""Kernels from text to launch: the interpreter against eager, the compiler's output, the cache, the workers, and the
launcher against a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import json
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from weft import cache_folder, cuda_driver, errors, knobs, triton_adapter
from weft.inductor.cache import kernel_cache
from weft.inductor.cache.kernel_cache import Binary, Resources
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.kernels import CompiledKernel, compile_kernels, inspect_kernel

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

ADD = KernelSource(
    "add",
    HEAD
    + """def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = i < n
    tl.store(out + i, tl.load(x + i, mask=kept) + tl.load(y + i, mask=kept), mask=kept)
""",
    {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"},
    {"BLOCK": 1024},
    frozenset({"x", "y", "out", "n"}),
    num_warps=4,
    num_stages=1,
)

SOFTMAX = KernelSource(
    "softmax",
    HEAD
    + """def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    i = tl.arange(0, BLOCK)
    kept = i < columns
    value = tl.load(x + row + i, mask=kept, other=float("-inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row + i, power / tl.sum(power, 0), mask=kept)
""",
    {"x": "*bf16", "out": "*bf16", "columns": "i32"},
    {"BLOCK": 2048},
    frozenset({"x", "out", "columns"}),
    num_warps=8,
    num_stages=1,
)

ROW_SUMS = KernelSource(
    "row_sums",
    HEAD
    + """def plus(a, b):
    c = a + b
    return c


@triton.jit
def row_sums(x, out, columns, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, columns, BLOCK):
        i = at + tl.arange(0, BLOCK)
        total += tl.load(x + row + i, mask=i < columns, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.reduce(total, 0, plus) * scale)
""",
    {"x": "*fp16", "out": "*fp32", "columns": "i32", "scale": "fp32"},
    {"BLOCK": 1024},
    frozenset({"x", "out", "columns"}),
    num_warps=4,
    num_stages=1,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache for each test."""
    with knobs.override(cache_dir=str(tmp_path)):
        yield tmp_path


def variants(count: int) -> list[KernelSource]:
    """Kernels of one name that differ in one constant of the text."""
    return [dataclasses.replace(ADD, text=ADD.text.replace("i < n", f"i < n - {k}")) for k in range(count)]


# ---- the interpreter


def test_interpreted_add_equals_eager() -> None:
    (kernel,) = compile_kernels([ADD], CPU)
    x, y, out = torch.randn(1500), torch.randn(1500), torch.zeros(1501)
    kernel.launch((2, 1, 1), 0, x, y, out, 1500)
    assert torch.equal(out[:1500], x + y)
    assert out[1500] == 0


def test_interpreted_softmax_of_masked_rows_rounds_to_bfloat16_as_eager() -> None:
    (kernel,) = compile_kernels([SOFTMAX], CPU)
    x = torch.randn(3, 1001, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    kernel.launch((3, 1, 1), 0, x, out, 1001)
    expected = x.double().softmax(-1).bfloat16()
    # Sums in another order move a value by an ulp of float32, which seldom crosses the middle of two bfloat16;
    # half of the values would be another if they were truncated.
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.0)
    assert (out != expected).sum() < 30


def test_interpreted_loop_with_a_helper_and_a_float_argument() -> None:
    (kernel,) = compile_kernels([dataclasses.replace(ROW_SUMS, constants={"BLOCK": 64})], CPU)
    x, out = torch.randn(3, 200, dtype=torch.float16), torch.zeros(3)
    kernel.launch((3, 1, 1), 0, x, out, 200, 0.5)
    torch.testing.assert_close(out.double(), x.double().sum(1) * 0.5, rtol=1e-5, atol=1e-5)


LANGUAGE = KernelSource(
    "language",
    HEAD
    + """def moments(mean1, square1, n1, mean2, square2, n2):
    delta = mean2 - mean1
    n = n1 + n2
    part = tl.where(n == 0.0, 0.0, n2 / n)
    return mean1 + delta * part, square1 + square2 + delta * delta * n1 * part, n


@triton.jit
def language(x, sums, places, random, other, rows, N: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * M + tl.arange(0, M)[None, :]
    value = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(value, 1))
    tl.store(places + i, tl.argmax(value, 1))
    mean, square, n = tl.reduce((value, value * 0.0, tl.full(value.shape, 1.0, tl.float32)), 1, moments)
    tl.store(rows + i, mean)
    tl.store(rows + N + i, square / n)
    largest, place = tl.max(value, 1, return_indices=True)
    tl.store(rows + 2 * N + i, largest)
    tl.atomic_add(rows + 3 * N + i * 0, tl.sum(value, 1))
    tl.store(random + at, tl.rand(11, at))
    tl.store(other + at, tl.sigmoid(value) + tl.math.erf(value) + tl.math.rsqrt(tl.abs(value)))
""",
    {"x": "*fp32", "sums": "*fp32", "places": "*i32", "random": "*fp32", "other": "*fp32", "rows": "*fp32"},
    {"N": 4, "M": 16},
    frozenset(),
    num_warps=4,
    num_stages=1,
)


def test_the_library_of_the_language_is_interpreted_too() -> None:
    (kernel,) = compile_kernels([LANGUAGE], CPU)
    x, rows, places = torch.randn(4, 16), torch.zeros(4, 4), torch.zeros(4, dtype=torch.int32)
    sums, random, other = torch.zeros(4, 16), torch.zeros(4, 16), torch.zeros(4, 16)
    kernel.launch((1, 1, 1), 0, x, sums, places, random, other, rows)
    torch.testing.assert_close(sums, x.cumsum(1))
    assert torch.equal(places.long(), x.argmax(1))
    torch.testing.assert_close(rows[:3], torch.stack([x.mean(1), x.var(1, correction=0), x.amax(1)]))
    torch.testing.assert_close(rows[3, 0], x.sum())
    torch.testing.assert_close(other, x.sigmoid() + x.erf() + x.abs().rsqrt())
    assert (random >= 0).all()
    assert (random < 1).all()
    assert random.unique().numel() == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_interpreted_casts_to_and_from_bfloat16_are_those_of_torch(dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.int32: "i32"}[dtype]
    text = HEAD + (
        "def cast(x, there, back, N: tl.constexpr):\n"
        "    i = tl.arange(0, N)\n"
        "    there_value = tl.load(x + i).to(tl.bfloat16)\n"
        "    tl.store(there + i, there_value)\n"
        "    tl.store(back + i, there_value.to(x.dtype.element_ty))\n"
    )
    signature = {"x": f"*{name}", "there": "*bf16", "back": f"*{name}"}
    (kernel,) = compile_kernels([KernelSource("cast", text, signature, {"N": 1024}, frozenset(), 4, 1)], CPU)
    x = torch.randn(1024) * 1000
    x[:7] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.39e38, 1e-40, 257.0])
    x = x.clamp(-60000, 60000).to(dtype)
    if dtype.is_floating_point:
        x[7:10] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    there, back = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros_like(x)
    kernel.launch((1, 1, 1), 0, x, there, back)
    torch.testing.assert_close(there, x.to(torch.bfloat16), rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(back, x.to(torch.bfloat16).to(dtype), rtol=0.0, atol=0.0, equal_nan=True)


def test_interpreting_leaves_nothing_behind_for_the_compiler() -> None:
    before = compile_pool.build([SOFTMAX], 90)
    (kernel,) = compile_kernels([SOFTMAX], CPU)
    x = torch.randn(1, 40, dtype=torch.bfloat16)
    kernel.launch((1, 1, 1), 0, x, torch.zeros_like(x), 40)
    kernel_cache.path_of(SOFTMAX, 90).unlink()
    assert compile_pool.build([SOFTMAX], 90) == before


def test_a_prepared_launch_is_the_launch() -> None:
    (kernel,) = compile_kernels([ADD], CPU)
    x, y, out = torch.randn(64), torch.randn(64), torch.zeros(64)
    launch = kernel.prepare((1, 1, 1), x, y.data_ptr(), out, 64)
    assert torch.equal(out, torch.zeros(64))
    launch(0)
    assert torch.equal(out, x + y)


def test_an_error_in_a_kernel_shows_the_line_of_its_text() -> None:
    broken = dataclasses.replace(ADD, text=ADD.text.replace("i < n", "i < absent"))
    (kernel,) = compile_kernels([broken], CPU)
    with pytest.raises(NameError) as caught:
        kernel.launch((1, 1, 1), 0, *[torch.zeros(4)] * 3, 4)
    assert "kept = i < absent" in "".join(traceback.format_exception(caught.value))


def test_an_argument_has_to_fit_its_type() -> None:
    (kernel,) = compile_kernels([ADD], CPU)
    x = torch.zeros(4)
    with pytest.raises(struct.error):
        kernel.launch((1, 1, 1), 0, x, x, x, 2**31)
    with pytest.raises(struct.error):
        kernel.launch((1, 1, 1), 0, x, x, 4)


def test_equal_sources_are_one_kernel_and_others_of_that_name_are_not() -> None:
    other = dataclasses.replace(ADD, text=ADD.text.replace("+ tl.load(y", "* tl.load(y"))
    again = KernelSource(**{f.name: getattr(ADD, f.name) for f in dataclasses.fields(ADD)})
    first, second, third = compile_kernels([ADD, other, again], CPU)
    assert first is third
    assert compile_kernels([again], CPU) == [first]
    x, y, out = torch.randn(8), torch.randn(8), torch.zeros(8)
    second.launch((1, 1, 1), 0, x, y, out, 8)
    assert torch.equal(out, x * y)


# ---- the compiler


@pytest.mark.parametrize("source", [ADD, SOFTMAX, ROW_SUMS], ids=lambda source: source.name)
def test_compiles_for_sm_90_without_spills_and_with_vector_loads(source: KernelSource) -> None:
    resources = inspect_kernel(source)
    assert resources.spills == 0
    assert resources.vector_loads > 0
    assert 0 < resources.registers <= 255
    assert (resources.shared > 0) == (source is not ADD)
    unknown = inspect_kernel(dataclasses.replace(source, divisible=frozenset()))
    assert unknown.vector_loads == 0


def test_spills_are_seen() -> None:
    crowded = dataclasses.replace(SOFTMAX, constants={"BLOCK": 65536}, num_warps=32)
    assert inspect_kernel(crowded).spills > 0


def test_an_asynchronous_load_counts_as_a_vector_load() -> None:
    assert inspect_kernel(dataclasses.replace(ROW_SUMS, num_stages=3)).vector_loads > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_kernel_that_does_not_compile_is_an_error_with_its_text(workers: int) -> None:
    broken = dataclasses.replace(ADD, text=ADD.text.replace("i < n", "i < absent"))
    with pytest.raises(errors.KernelCompilationFailed, match=r"absent is not defined[\s\S]*kept = i < absent"):
        compile_pool.build([broken, ADD], 90, workers)


def test_parameters_have_to_be_those_of_the_signature_in_order() -> None:
    swapped = dataclasses.replace(ADD, signature={"y": "*fp32", "x": "*fp32", "out": "*fp32", "n": "i32"})
    with pytest.raises(errors.KernelCompilationFailed, match="are not arguments"):
        compile_pool.build([swapped], 90)


# ---- the cache


def test_json_carries_a_source() -> None:
    source = dataclasses.replace(ADD, constants={"BLOCK": 8, "A": True, "B": 0.1, "C": None, "D": "x"})
    again = KernelSource.from_json(source.to_json())
    assert again == source
    assert list(again.signature) == list(source.signature)
    ones = [dataclasses.replace(ADD, constants={"BLOCK": one}) for one in (1, 1.0, True)]
    assert len({one.content for one in ones}) == 3


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-1],
    "only the header": lambda content: content[:100],
    "a byte of the cubin": lambda content: flip(content, len(content) - 200),
    "a byte of the header": lambda content: flip(content, 90),
    "a byte of the checksum": lambda content: flip(content, 3),
    "longer": lambda content: content + b"x",
    "other json": lambda content: b"\n".join([content.split(b"\n")[0], b"{}", content.split(b"\n", 2)[2]]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_rebuilt(damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    path = kernel_cache.path_of(ADD, 90)
    compiled = compile_pool.build([ADD], 90)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kernel_cache.read(path) is None
    assert "damaged" in caplog.text
    assert compile_pool.build([ADD], 90) == compiled
    assert path.read_bytes() == whole


def test_an_entry_that_checks_but_means_nothing_is_rebuilt() -> None:
    path = kernel_cache.path_of(ADD, 90)
    (binary,) = compile_pool.build([ADD], 90)
    header, _, cubin = kernel_cache.to_bytes(binary).partition(b"\n")
    fields = json.loads(header)
    assert kernel_cache.from_bytes(header + b"\n" + cubin) == binary
    senseless = [
        b"",
        b"[" * 100_000,
        b"null\n" + cubin,
        b"{}\n" + cubin,
        header + b"\ncubin",
        header + b"\n" + cubin.replace(binary.symbol.encode(), b"x" * len(binary.symbol)),
        *(
            json.dumps({**fields, name: value}).encode() + b"\n" + cubin
            for name in fields
            for value in (None, -1, 1.5, 1 << 40, "x", [], {}, "9" * 5000)
        ),
    ]
    for content in senseless:
        cache_folder.write_checked(path, content)
        assert kernel_cache.read(path) is None, content[:200]
    assert compile_pool.build([ADD], 90) == [binary]
    assert kernel_cache.read(path) == binary


def test_an_entry_under_the_name_of_another_is_not_taken() -> None:
    compile_pool.build([ADD], 90)
    path = kernel_cache.path_of(SOFTMAX, 90)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kernel_cache.path_of(ADD, 90).read_bytes())
    assert kernel_cache.read(path) is None


def test_a_warm_start_neither_compiles_nor_imports_triton() -> None:
    sources = [ADD, SOFTMAX, ROW_SUMS]
    compile_pool.build(sources, 90)
    code = (
        "import sys\n"
        "from weft.inductor.runtime import compile_pool\n"
        "from weft.inductor.codegen.kernel_source import KernelSource\n"
        "sources = [KernelSource.from_json(line) for line in sys.stdin]\n"
        "print(len(compile_pool.build(sources, 90)), 'triton' in sys.modules, 'torch' in sys.modules)\n"
    )
    assert run_python(code, "\n".join(source.to_json() for source in sources)) == "3 False False\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_kernels_are_compiled_where_there_is_no_cache(
    workers: int, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources, expected = variants(2), compile_pool.build(variants(2), 90)
    (cache / "file").write_text("")
    with knobs.override(cache_dir=str(cache / "file")):
        assert compile_pool.build(sources, 90, workers) == expected
    assert caplog.text.count("WEFT_CACHE_DIR") == 1
    with knobs.override(cache_dir=""):
        assert compile_pool.build(sources, 90, workers) == expected
    assert caplog.text.count("WEFT_CACHE_DIR") == 1


# ---- many processes


def run_python(code: str, text: str) -> str:
    environment = {"WEFT_CACHE_DIR": knobs.cache_dir}
    return start_python(code, environment).communicate(text)[0]


def start_python(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    code = f"import os, sys; sys.path[:] = {sys.path!r}; os.environ.update({environment!r})\n" + code
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_workers_compile_what_this_process_would() -> None:
    sources = variants(6)
    by_workers = compile_pool.build(sources, 90, workers=2)
    for source in sources:
        kernel_cache.path_of(source, 90).unlink()
    assert compile_pool.build(sources, 90, workers=0) == by_workers
    assert len({binary.cubin for binary in by_workers}) == 6


def test_a_worker_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "__name__", "weft.errors")
    with pytest.raises(errors.KernelCompilationFailed, match="ended with status 1"):
        compile_pool.build(variants(2), 90, workers=2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The workers that were started, where the machine has cores for three."""
    processes: list[subprocess.Popen[str]] = []
    start = compile_pool._start_worker
    monkeypatch.setattr(compile_pool, "_usable_workers", lambda: 3)
    monkeypatch.setattr(compile_pool, "_start_worker", lambda: processes.append(start()) or processes[-1])
    return processes


def test_workers_compile_ahead_what_is_built_later(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = variants(6)
    expected = compile_pool.build(sources, 90, workers=0)
    monkeypatch.setattr(compile_pool, "_compile_here", mock.Mock(side_effect=AssertionError("not compiled ahead")))
    with knobs.override(cache_dir=""):
        compile_pool.begin(sources, 90)
        assert not started, "nothing would wait for them"
        with compile_pool.kept_workers():
            compile_pool.start_workers()
            assert len(started) == 3
            compile_pool.begin(sources, 90)
            assert compile_pool.build([*sources, *sources], 90) == expected * 2
            assert all(process.poll() is None for process in started)
            assert compile_pool.build(variants(6), 90) == expected  # by the same processes
            assert compile_pool.build([SOFTMAX], 90)  # a single one too
    assert len(started) == 3
    assert all(process.poll() is not None for process in started)


def test_what_fails_ahead_is_raised_where_it_is_built(started: list[subprocess.Popen[str]]) -> None:
    broken = dataclasses.replace(ADD, text=ADD.text.replace("tl.load(", "tl.lode("))
    with compile_pool.kept_workers():
        compile_pool.begin([broken, *variants(4)], 90)
        with pytest.raises(errors.KernelCompilationFailed, match="lode"):
            compile_pool.build([broken], 90)
        assert len(compile_pool.build(variants(4), 90)) == 4
    assert started


@pytest.mark.timeout(60)
def test_workers_that_are_killed_leave_no_one_waiting(started: list[subprocess.Popen[str]]) -> None:
    with compile_pool.kept_workers():
        compile_pool.start_workers()
        for process in started:
            process.kill()
        compile_pool.begin(variants(8), 90)
        with pytest.raises(errors.KernelCompilationFailed, match="ended"):
            compile_pool.build(variants(8), 90)


def test_four_processes_fill_one_cache() -> None:
    sources = variants(6)
    code = (
        "import sys\n"
        "from weft.inductor.runtime import compile_pool\n"
        "from weft.inductor.codegen.kernel_source import KernelSource\n"
        "sources = [KernelSource.from_json(line) for line in sys.stdin]\n"
        "print([hash(b.cubin) for b in compile_pool.build(sources, 90)])\n"
    )
    environment = {"WEFT_CACHE_DIR": knobs.cache_dir, "PYTHONHASHSEED": "0"}
    processes = [start_python(code, environment) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n".join(source.to_json() for source in sources))
        process.stdin.close()
    files = {kernel_cache.path_of(source, 90) for source in sources}
    for process in processes:
        assert process.wait() == 0
    assert {path for path in cache_folder.directory().rglob("*") if path.is_file()} == files
    assert all(kernel_cache.read(path) is not None for path in files)


# ---- the launcher


class FakeLibrary:
    """Stands in for libcuda.so.1 and writes down what it is asked. A launch returns the next of `results`."""

    FUNCTION = 0x7F0000000008
    CONTEXT = 0x7F0000000010

    def __init__(self, sizes: list[int], results: list[int]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in ["cuInit", "cuModuleLoadData", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuCtxPushCurrent_v2"]:
            self.answer(name, lambda *arguments: 0)
        for name in ["cuMemcpyAsync", "cuStreamIsCapturing"]:
            self.answer(name, lambda *arguments: 1)
        self.answer("cuDeviceGet", lambda ordinal, device: 0)
        self.answer("cuCtxPopCurrent_v2", lambda context: 0)
        self.answer("cuCtxSetCurrent", lambda context: 0)
        self.answer("cuDevicePrimaryCtxRetain", lambda context, device: self.fill(context, self.CONTEXT))
        self.answer("cuModuleGetFunction", lambda function, module, name: self.fill(function, self.FUNCTION))
        self.answer("cuGetErrorName", lambda code, text: self.fill(text, b"CUDA_ERROR_%d" % code.value))
        self.answer("cuGetErrorString", lambda code, text: self.fill(text, b"something is wrong"))

        def launch(handle: Any, *rest: Any) -> int:
            *configuration, stream, pointers, extra = rest
            arguments = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
            self.calls.append(("launch", handle.value, *configuration, stream.value, b"".join(arguments), extra))
            return results.pop(0)

        self.cuLaunchKernel = launch

    def answer(self, name: str, what: Callable[..., int]) -> None:
        def function(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return what(*arguments)

        setattr(self, name, function)

    def fill(self, pointer: Any, value: Any) -> int:
        pointer._obj.value = value
        return 0

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


MIXED = KernelSource(
    "mixed",
    "",
    {"x": "*bf16", "flag": "i1", "n": "i32", "seed": "i64", "scale": "fp32", "count": "u8", "exact": "fp64"},
    {},
    frozenset(),
    num_warps=8,
    num_stages=1,
)
SIZES = [8, 1, 4, 8, 4, 1, 8, 8, 8]


def fake_kernel(results: list[int], shared: int = 0) -> tuple[CompiledKernel, FakeLibrary]:
    library = FakeLibrary(SIZES, results)
    binary = Binary("mixed_0", b"cubin", 8, Resources(32, 0, shared, 0))
    return CompiledKernel(MIXED, binary, 3, cuda_driver.Driver(library)), library


@pytest.mark.parametrize("prepared", [False, True])
def test_a_launch_passes_every_argument_with_its_size(prepared: bool) -> None:
    kernel, library = fake_kernel([0, 0], shared=1024)
    x = torch.zeros(4)
    for given in (x, x.data_ptr()):
        arguments = (given, True, -7, 2**40, 0.1, 255, 0.1)
        library.calls.clear()
        if prepared:
            kernel.prepare((4096, 2, 3), *arguments)(0x7F0000001000)
        else:
            kernel.launch((4096, 2, 3), 0x7F0000001000, *arguments)
        expected = struct.pack("=Q?iqfBdQQ", x.data_ptr(), True, -7, 2**40, 0.1, 255, 0.1, 0, 0)
        block = 8 * 32, 1, 1, 1024
        assert library.calls == [("launch", FakeLibrary.FUNCTION, 4096, 2, 3, *block, 0x7F0000001000, expected, None)]


def test_an_empty_grid_is_not_launched() -> None:
    kernel, library = fake_kernel([])
    arguments = (0, True, 0, 0, 0.0, 0, 0.0)
    kernel.launch((0, 1, 1), 0, *arguments)
    kernel.prepare((5, 0, 1), *arguments)(0)
    assert "launch" not in library.names()


def test_a_failed_launch_is_an_error_with_its_name() -> None:
    kernel, _ = fake_kernel([700])
    with pytest.raises(errors.CudaError, match=r"kernel mixed on a grid of \(5, 1, 1\).*CUDA_ERROR_700: something"):
        kernel.launch((5, 1, 1), 0, 0, True, 0, 0, 0.0, 0, 0.0)


def test_a_thread_without_a_context_is_given_that_of_the_kernel() -> None:
    kernel, library = fake_kernel([201, 0])
    library.calls.clear()
    kernel.launch((5, 1, 1), 0, 0, True, 0, 0, 0.0, 0, 0.0)
    assert library.names() == ["launch", "cuCtxSetCurrent", "launch"]
    assert library.calls[1][1].value == FakeLibrary.CONTEXT
    assert library.calls[0] == library.calls[2]


@pytest.mark.parametrize(("shared", "asks"), [(48 * 1024, False), (48 * 1024 + 1, True)])
def test_much_shared_memory_is_asked_for_and_the_context_is_put_back(shared: int, asks: bool) -> None:
    _, library = fake_kernel([], shared)
    assert ("cuFuncSetAttribute" in library.names()) == asks
    pushed, popped = library.names().index("cuCtxPushCurrent_v2"), library.names().index("cuCtxPopCurrent_v2")
    # The function is loaded here, not by the first launch.
    loaded = library.names().index("cuFuncGetAttribute")
    assert pushed < library.names().index("cuModuleLoadData") < loaded < popped == len(library.calls) - 1


def test_an_argument_of_half_precision_is_refused() -> None:
    with pytest.raises(errors.UnsupportedKernelArgument, match="takes scale as bf16"):
        cuda_driver.KernelArguments("scaled", {"x": "*bf16", "scale": "bf16"})


# ---- on a GPU


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_compiled_kernels_equal_eager_and_interpreted_ones(gpu: torch.device) -> None:
    add, softmax, sums, language = compile_kernels([ADD, SOFTMAX, ROW_SUMS, LANGUAGE], gpu)
    stream = torch.cuda.current_stream().cuda_stream
    x, y = torch.randn(2, 1500, device=gpu)
    out = torch.zeros(1501, device=gpu)
    add.launch((2, 1, 1), stream, x, y.data_ptr(), out, 1500)
    assert torch.equal(out[:1500], x + y)
    assert out[1500] == 0
    x = torch.randn(70, 1024, device=gpu, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    softmax.prepare((70, 1, 1), x, out, 1024)(stream)
    torch.testing.assert_close(out, x.double().softmax(-1).bfloat16(), rtol=2**-7, atol=0.0)
    totals = torch.zeros(70, device=gpu)
    sums.launch((70, 1, 1), stream, x.half(), totals, 1024, 0.5)
    torch.testing.assert_close(totals.double(), x.double().sum(1) * 0.5, rtol=1e-5, atol=1e-4)
    (interpreted,) = compile_kernels([LANGUAGE], CPU)
    x = torch.randn(4, 16)
    here = [torch.zeros(4, 16), torch.zeros(4, dtype=torch.int32), *torch.zeros(2, 4, 16), torch.zeros(4, 4)]
    there = [tensor.to(gpu) for tensor in here]
    interpreted.launch((1, 1, 1), 0, x, *here)
    language.launch((1, 1, 1), stream, x.to(gpu), *there)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a)


@pytest.mark.gpu
def test_a_first_launch_may_be_captured_and_come_from_any_thread(gpu: torch.device) -> None:
    (kernel,) = compile_kernels([variants(1)[0]], gpu)
    x, out = torch.randn(64, device=gpu), torch.zeros(64, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch((1, 1, 1), torch.cuda.current_stream().cuda_stream, x, x, out, 64)
    assert torch.equal(out, torch.zeros_like(out))
    graph.replay()
    assert torch.equal(out, x + x)
    out.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=kernel.launch, args=((1, 1, 1), 0, x, x, out, 64))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, x + x)


@pytest.mark.gpu
def test_more_shared_memory_than_is_given_unasked(gpu: torch.device) -> None:
    text = (
        HEAD
        + """def product(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))
"""
    )
    signature = {"x": "*bf16", "y": "*bf16", "out": "*fp32"}
    source = KernelSource("product", text, signature, {"N": 128}, frozenset(signature), 8, 1)
    (kernel,) = compile_kernels([source], gpu)
    assert kernel.resources is not None
    assert kernel.resources.shared > 48 * 1024
    x, y = torch.randn(2, 128, 128, device=gpu, dtype=torch.bfloat16)
    out = torch.zeros(128, 128, device=gpu)
    kernel.launch((1, 1, 1), torch.cuda.current_stream().cuda_stream, x, y, out)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-3, atol=1e-3)


# ---- triton's version


def test_the_version_is_that_of_the_triton_that_would_be_imported() -> None:
    import triton

    assert triton_adapter.version().split()[0] == triton.__version__


def test_the_parameters_of_the_text_are_those_the_interpreter_is_given() -> None:
    assert list(inspect.signature(SOFTMAX.function().fn).parameters) == [*SOFTMAX.signature, *SOFTMAX.constants]
