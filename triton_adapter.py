"""The one place where weft touches triton names that triton does not promise to keep.

Each function works on triton 3.6 and 3.9 and is tested on both. Triton is imported inside the functions: neither
`import weft` nor a start from a warm kernel cache pays for it, and worker processes use this file without torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from weft import errors

# ---- which triton


@functools.cache
def version() -> str:
    """Triton's version and the size of its compiler's library, found without importing triton.

    The size tells builds of one version apart. Raises errors.TritonMissing.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise errors.TritonMissing
    home = Path(spec.origin).parent
    found = re.search(r"__version__ = ['\"](.+?)['\"]", Path(spec.origin).read_text())
    assert found is not None, spec.origin
    sizes = [library.stat().st_size for library in sorted(home.glob("_C/libtriton*.so"))]
    return f"{found[1]} {sizes}"


# ---- from a function to a cubin


@dataclass(frozen=True)
class Compiled:
    """What triton makes of one kernel. `name` is its symbol in `cubin`, `shared` its dynamic shared memory in bytes."""

    name: str
    cubin: bytes
    ptx: str
    num_warps: int
    shared: int


# Triton's kernels end in two addresses of scratch memory, which are null where the kernel uses none.
SCRATCH_PARAMETERS = 2


def compile_function(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: frozenset[str],
    num_warps: int,
    num_stages: int,
    arch: int,
    registers: int | None = None,
) -> Compiled:
    """Compile a `@triton.jit` function for NVIDIA's architecture `arch` (90 for sm_90); no GPU is needed.

    The stages are run here and not by `triton.compile`, which first reads all of triton to make a cache key (0.3 s
    a process) and then writes every stage to a cache that weft does not use. Raises whatever triton raises, and
    ValueError where the parameters of the function are not `signature` (in order) and `constants`, or where the
    kernel needs scratch memory, which the launcher does not provide. A constant `ARCH` is given as `arch`.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    names = list(function.arg_names)
    constants = {n: arch if n == "ARCH" else value for n, value in constants.items()}
    if [n for n in names if n not in constants] != list(signature) or not set(constants) <= set(names):
        raise ValueError(f"parameters {names} are not arguments {list(signature)} and constants {list(constants)}")
    source = ASTSource(
        fn=function,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in sorted(divisible)},
    )
    target = GPUTarget("cuda", arch, 32)
    backend: Any = make_backend(target)
    # Fused multiply-adds are what CUDA's own compiler makes of ATen's kernels; the default of 3.10 will be without.
    wanted = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, "maxnreg": registers}
    # Assertions are left out without `debug`. With it integers would be checked for overflow, too.
    wanted |= {"debug": "tl.device_assert(" in function.src, "sanitize_overflow": False}
    options = backend.parse_options(wanted)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    results: dict[str, Any] = {}
    for stage, run in stages.items():
        made = run(made, metadata)
        if stage == "ptx":
            made = without_packed_integers(made)
        results[stage] = made
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"]:
        raise ValueError(f"{metadata['name']} needs scratch memory of the launcher")
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", results["ptx"], re.DOTALL)
    assert entry is not None, results["ptx"]
    assert entry[1].count(".param") == len(signature) + SCRATCH_PARAMETERS, entry[0]
    return Compiled(metadata["name"], results["cubin"], results["ptx"], metadata["num_warps"], metadata["shared"])


PACKED_INTEGERS = re.compile(r"^[ \t]*(add|min|max)\.([su]16)x2[ \t]+(%\w+), ([%\w]+), ([%\w]+);", re.MULTILINE)


def without_packed_integers(ptx: str) -> str:
    """PTX in which each packed 16-bit integer operation is replaced by two scalar operations.

    LLVM narrows index arithmetic to 16 bits and packs two values into a register (`add.s16x2`). If one half is
    undefined, ptxas 12.8 to 13.0 (not 13.4) swap the halves and lose the addend: x + 1 becomes
    `VIADD.16x2 R5, R0, 0x0`. The backward of a max pool then read wrong windows. Raises ValueError for a packed
    operation without a known replacement.
    """
    unpacked = PACKED_INTEGERS.sub(_on_each_half, ptx)
    if (left := re.search(r"^.*\.[su]16x2\b.*$", unpacked, re.MULTILINE)) is not None:
        raise ValueError(f"ptxas may compile this packed operation wrongly: {left[0].strip()}")
    return unpacked


def _on_each_half(found: re.Match[str]) -> str:
    operation, kind, result, first, second = found.groups()
    return "\n".join(
        (
            "\t{ .reg .b16 low, high, low_2, high_2; .reg .b32 packed;",  # registers local to this block
            f"\tmov.b32 packed, {first}; mov.b32 {{low, high}}, packed;",  # an operand may be an immediate
            f"\tmov.b32 packed, {second}; mov.b32 {{low_2, high_2}}, packed;",
            f"\t{operation}.{kind} low, low, low_2; {operation}.{kind} high, high, high_2;",
            f"\tmov.b32 {result}, {{low, high}}; }}",
        )
    )


def replace_packed_integers(*stages_of_backend: Any) -> tuple[str, str]:
    """A hook for ``triton.knobs.runtime.add_stages_inspection_hook``, which applies :func:`without_packed_integers` to
    the kernels that Triton compiles in a program file.

    Triton calls it with a backend and its compilation stages, which it changes. As of Triton 3.7, Triton also calls it
    without arguments: the two strings are part of its cache keys.
    """
    if stages_of_backend:
        _, stages, *_ = stages_of_backend
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: without_packed_integers(make(source, metadata))
    return "without packed integers", "without packed integers"


# Functions that a program file embeds.
STAGE_FUNCTIONS = (without_packed_integers, _on_each_half, replace_packed_integers)


def resource_usage(cubin: Path) -> tuple[int, int]:
    """Registers a thread and bytes of local memory (spills and stack) a thread, as cuobjdump reports them."""
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


# ---- the interpreter

# Interpreting exchanges names inside triton.language, which compiling reads.
_language = threading.RLock()


def compiling() -> contextlib.AbstractContextManager[Any]:
    """Hold this while compiling in a process that may also interpret in another thread."""
    return _language


def interpret(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    grid: tuple[int, int, int],
    values: Sequence[int | float],
) -> None:
    """Run a `@triton.jit` function in triton's interpreter, program after program.

    `values` are those of `signature`, in order; pointers are addresses of host memory. Needs neither a GPU nor
    TRITON_INTERPRET, which would make a whole process interpret. Each numpy operation costs some microseconds.
    """
    from triton.runtime import interpreter

    with _language, _interpreted_language(function):
        arguments = {n: _argument(kind, value) for (n, kind), value in zip(signature.items(), values, strict=True)}
        run = _device_function(function.fn).fn
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    run(**arguments, **constants)


class _DeviceFunction:
    """A function that kernels call, as the interpreter wants it: called as it is, and `fn` for reductions."""

    def __init__(self, plain: FunctionType) -> None:
        self.plain = plain

    @functools.cached_property
    def fn(self) -> Any:
        from triton.runtime.interpreter import FunctionRewriter

        return FunctionRewriter(self.plain).rewrite_ast()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


# Reductions are recognised by identity of their combine function: one object for each function.
_device_function = functools.cache(_DeviceFunction)


def _argument(kind: str, value: int | float) -> Any:
    """The interpreter's tensor of one argument, with the type that a compiled kernel would be given."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    type_ = tl.str_to_ty(kind, None)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=interpreter._get_np_dtype(type_)), type_), type_)


@contextlib.contextmanager
def _interpreted_language(function: Any) -> Iterator[None]:
    """Let triton.language, and all that `function` can call, compute with numpy inside the block."""
    import triton
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    changes: list[tuple[dict[str, Any], str, Any]] = []
    for names in _namespaces(function):
        for name, value in list(names.items()):
            if isinstance(value, JITFunction):
                changes.append((names, name, value))
                names[name] = _device_function(value.fn)
    builder: Any = interpreter.InterpreterBuilder
    plain = builder.cast_impl, builder.create_fp_to_fp, builder.create_splat, builder.create_fma
    options = interpreter.interpreter_builder.options
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        # 3.6 asks numpy for the int of an array of one element, which numpy 2.4 refuses.
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        builder.cast_impl, builder.create_fp_to_fp = _casts(*plain[:2])
        builder.create_splat = _splat
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
        if not hasattr(interpreter._interpreter, "fma_fp32"):
            builder.create_fma = _fma
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            yield
    finally:
        builder.cast_impl, builder.create_fp_to_fp, builder.create_splat, builder.create_fma = plain
        interpreter.interpreter_builder.options = options
        scope.restore()
        for names, name, value in changes:
            names[name] = value


def _namespaces(function: Any) -> list[dict[str, Any]]:
    """All namespaces in which code that `function` calls looks up names, where they hold functions for kernels."""
    from triton import language as tl
    from triton.runtime.jit import JITFunction

    found: dict[int, dict[str, Any]] = {}
    waiting = [function.fn.__globals__, vars(tl)]
    while waiting:
        names = waiting.pop()
        if id(names) in found:
            continue
        found[id(names)] = names
        for value in list(names.values()):
            if isinstance(value, JITFunction):
                waiting.append(value.fn.__globals__)
            elif isinstance(value, ModuleType) and any(isinstance(v, JITFunction) for v in list(vars(value).values())):
                waiting.append(vars(value))
    return list(found.values())


def _splat(self: Any, wanted: Any, scalar: Any) -> Any:
    """The interpreter's own takes the type from the handle, which after a comparison is that of what was compared."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    data = np.full(wanted.shape, scalar.data.reshape(-1)[0], dtype=scalar.data.dtype)
    return TensorHandle(data, scalar.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """3.6 rounds the product, too. In float64 that of two float32 is exact, and one sum in 2**28 rounds twice."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    exact = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _casts(cast: Any, cast_rounded: Any) -> tuple[Any, Any]:
    """The interpreter's two casts, right for bfloat16: as they are, they truncate to it, and 3.6 reads its bits as
    an integer where it is cast to anything but float32."""
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def to_bfloat16(values: Any) -> Any:
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        # Half a unit of the last place that is kept, and ties to even; a NaN keeps its sign and becomes quiet.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        before, after = source.dtype.scalar, wanted.scalar
        if before == after or tl.bfloat16 not in (before, after):
            return cast(self, source, wanted)
        data = source.data
        if before == tl.bfloat16:
            data = (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        data = to_bfloat16(data) if after == tl.bfloat16 else data.astype(_get_np_dtype(wanted))
        return TensorHandle(data, after)

    def create_fp_to_fp(self: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, wanted.scalar):
            return cast_impl(self, source, wanted)
        return cast_rounded(self, source, wanted, rounding)

    return cast_impl, create_fp_to_fp
