"""Generated kernels against what their nests mean: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from nest_eval import evaluate

from weft.inductor.codegen import kernel, kernel_plan, shared_columns
from weft.inductor.codegen.kernel import GeneratedKernel, generate
from weft.inductor.loop_ir.ir import Buffer, Nest
from weft.inductor.loop_ir.verify import verify_nest
from weft.inductor.runtime.kernels import compile_kernels

# A counter-example prints its nest and its kernel: making it smaller would take minutes in the interpreter.
SEARCH = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@contextlib.contextmanager
def planned_with(**constants: Any) -> Iterator[None]:
    """Inside, kernels are planned with these constants of ``kernel_plan``, ``shared_columns``, and are not kept."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            modules = [module for module in (kernel_plan, shared_columns) if hasattr(module, name)]
            assert modules, name
            for module in modules:
                patch.setattr(module, name, value)
        kernel._generate_canonical.cache_clear()
        yield
    kernel._generate_canonical.cache_clear()


def check(
    nest: Nest, buffers: Mapping[str, torch.Tensor], numbers: Mapping[str, int] | None = None, tolerance: float = 2e-5
) -> GeneratedKernel:
    """Run a nest's kernel in the interpreter, and as machine code where there is a GPU, and compare every buffer with
    the oracle's."""
    verify_nest(nest, {name: _flat(name, buffer) for name, buffer in buffers.items()})
    generated = generate(nest, {name: buffer.dtype for name, buffer in buffers.items()})
    given_ = [scalar.expression.subs(numbers or {}) for scalar in generated.scalars]
    values = [float(v) if s.dtype.is_floating_point else int(v) for s, v in zip(generated.scalars, given_, strict=True)]
    want = {name: buffer.clone() for name, buffer in buffers.items()}
    evaluate(nest, want, numbers)
    for device in [torch.device("cpu"), *[torch.device("cuda", 0)] * torch.cuda.is_available()]:
        compiled = compile_kernels([generated.source], device)[0]
        got = {name: _copied(buffer, device) for name, buffer in buffers.items()}
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        try:
            compiled.launch(generated.grid(values), stream, *(got[name] for name in generated.buffers), *values)
        except Exception as error:
            error.add_note(f"{nest}\n{generated.source.text}")
            raise
        for name in buffers:
            torch.testing.assert_close(
                got[name].cpu(),
                want[name],
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda m, name=name, device=device: f"{name} on {device}: {m}\n{nest}\n{generated.source.text}",
            )
    return generated


def _copied(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device).copy_(buffer)


def _flat(name: str, tensor: torch.Tensor) -> Buffer:
    return Buffer(name, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())


def tensors(seed: int = 0, **sizes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
