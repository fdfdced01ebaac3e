"""Roots and quotients without branches: numpy's to the bit in the interpreter, a GPU's exact instructions on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.codegen.triton_text import write_kernel
from weft.inductor.multi_tensor.rounded_division import quotient_lines, reciprocal_lines, square_root_lines
from weft.inductor.runtime.kernels import compile_kernels

BLOCK = 1024
SIGNATURE = dict.fromkeys(("a", "b", "roots", "quotients", "exact_roots", "exact_quotients"), "*fp32")


def source() -> KernelSource:
    lines = [
        "at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "x = tl.load(a + at)",
        "y = tl.load(b + at)",
        *square_root_lines("result", "y"),
        "tl.store(roots + at, result)",
        "tl.store(exact_roots + at, tl.sqrt_rn(y))",
        *reciprocal_lines("inverse_y", "y"),
        *quotient_lines("result", "x", "y", "inverse_y"),
        "tl.store(quotients + at, result)",
        "tl.store(exact_quotients + at, tl.div_rn(x, y))",
    ]
    return write_kernel("both", lines, SIGNATURE, {"BLOCK": BLOCK})


def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Roots of ``b`` and quotients ``a / b``, then both by the language's own functions."""
    results = tuple(torch.empty_like(a) for _ in range(4))
    (kernel,) = compile_kernels([source()], a.device)
    stream = torch.cuda.current_stream().cuda_stream if a.is_cuda else 0
    kernel.launch((len(a) // BLOCK, 1, 1), stream, a, b, *results)
    return results


def operands(count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of all magnitudes that are allowed, among them zeros, infinities and (``a``) NaNs."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(least: float, most: float) -> torch.Tensor:
        fractions = 1 + torch.rand(count, device=device, generator=generator)
        exponents = torch.randint(int(least), int(most), [count], device=device, generator=generator)
        return torch.ldexp(fractions, exponents)

    a, b = numbers(-100, 60), numbers(-40, 60)
    a[::3].neg_()
    for at, odd in enumerate([0.0, -0.0, torch.inf, -torch.inf, torch.nan]):
        a[at::64] = odd
    b[1::7], b[2::11] = 0.0, torch.inf
    return a, b


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To the bit, and signs of zeros; one NaN is as good as another."""
    return bool(((ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())).all())


def test_roots_and_quotients_are_numpys() -> None:
    a, b = operands(64 * BLOCK)
    roots, quotients, *_ = run(a, b)
    with np.errstate(all="ignore"):
        assert same(roots, torch.from_numpy(np.sqrt(b.numpy())))
        assert same(quotients, torch.from_numpy(a.numpy() / b.numpy()))


def test_roots_of_all_magnitudes_are_numpys() -> None:
    bits = torch.randint(-(2**31), 2**31, [64 * BLOCK], generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    b = bits.to(torch.int32).view(torch.float32)
    roots, *_ = run(torch.ones_like(b), b)
    with np.errstate(all="ignore"):
        assert same(roots, torch.from_numpy(np.sqrt(b.numpy())))


@pytest.mark.gpu
def test_roots_and_quotients_are_a_gpus_exact_ones() -> None:
    a, b = operands(1 << 26, "cuda")
    roots, quotients, exact_roots, exact_quotients = run(a, b)
    assert same(roots, exact_roots)
    assert same(quotients, exact_quotients)
    b = torch.arange(-(2**31), 2**31, 61, device="cuda").to(torch.int32)
    b = b[: len(b) // BLOCK * BLOCK].view(torch.float32)
    roots, _, exact_roots, _ = run(torch.ones_like(b), b)
    assert same(roots, exact_roots)
