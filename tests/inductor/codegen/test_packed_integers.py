"""No packed 16-bit integer operation reaches ptxas, which compiles some of them wrongly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.triton_adapter import without_packed_integers

# As LLVM writes x + 1 of an index x that 16 bits hold, beside an undefined half.
KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry plus_one(.param .u64 source, .param .u64 result)
.reqntid 32
{
	.reg .b16 %rs<8>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<8>;
	ld.param.b64 %rd1, [source];
	ld.param.b64 %rd2, [result];
	ld.global.b32 %r1, [%rd1];
	and.b32 %r2, %r1, 31;
	cvt.u16.u32 %rs1, %r2;
	mov.b32 %r3, {%rs2, %rs1};
	mov.b32 %r4, 65536;
	add.s16x2 	%r5, %r3, %r4;
	mov.b32 {_, %rs3}, %r5;
	cvt.u32.u16 %r6, %rs3;
	st.global.b32 [%rd2], %r6;
	ret;
}
"""


def test_an_operation_on_two_halves_becomes_two_operations() -> None:
    written = without_packed_integers(KERNEL)
    assert "16x2" not in written
    assert "add.s16 low, low, low_2; add.s16 high, high, high_2;" in written
    assert "mov.b32 %r5, {low, high};" in written
    assert written.startswith(KERNEL.partition("\tadd.s16x2")[0])
    assert written.endswith(KERNEL.partition("%r4;\n")[2])


def test_ptx_without_packed_integers_stays_as_it_is() -> None:
    halves = "\tcvt.rn.bf16x2.f32 %r1, %r2, %r3;\n\tadd.rn.f16x2 %r1, %r2, %r3;\n"
    text = KERNEL.replace("add.s16x2", "add.s32") + halves
    assert without_packed_integers(text) == text


def test_a_packed_operation_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max\.s16x2\.relu"):
        without_packed_integers("\tmax.s16x2.relu %r1, %r2, %r3;\n")


def instructions(ptx: str, folder: Path) -> str:
    """What ptxas makes of a text for sm_90."""
    from triton import knobs

    (folder / "kernel.ptx").write_text(ptx)
    command = [knobs.nvidia.ptxas.path, "-arch=sm_90", "kernel.ptx", "-o", "kernel.cubin"]
    subprocess.run(command, check=True, cwd=folder)
    shown = [knobs.nvidia.nvdisasm.path, "-c", "kernel.cubin"]
    return subprocess.run(shown, check=True, cwd=folder, capture_output=True, text=True).stdout


def test_what_ptxas_makes_of_it_adds_one(tmp_path: Path) -> None:
    assert "16x2" in instructions(KERNEL, tmp_path)
    added = instructions(without_packed_integers(KERNEL), tmp_path)
    assert "16x2" not in added
    assert "0x1" in added


@pytest.mark.parametrize("operation", ["add.s16x2", "add.u16x2", "min.s16x2", "min.u16x2", "max.s16x2", "max.u16x2"])
@pytest.mark.parametrize("operand", ["%r4", "65536", "0x10001"])
def test_every_operation_is_still_assembled(operation: str, operand: str, tmp_path: Path) -> None:
    text = KERNEL.replace("add.s16x2 \t%r5, %r3, %r4", f"{operation} \t%r5, %r3, {operand}")
    assert operation in text
    made = instructions(without_packed_integers(text), tmp_path)
    assert "16x2" not in made or not operation.startswith("add")  # min.s16 of one value is VIMNMX.S16x2


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
@pytest.mark.parametrize("size", [(2, 96, 32, 32), (2, 24, 56, 56), (3, 7, 17, 33), (2, 64, 112, 112)])
def test_gradients_of_max_pools_reach_the_pixels_they_came_from(
    size: tuple[int, int, int, int], kernel: int, stride: int, padding: int
) -> None:
    """After a batch norm, as in the first layers of a convolutional network: its sums share the kernel.

    The pixels of a channel differ by more than rounding, from each other and from zero.
    """
    batch, channels, height, width = size
    pixels = batch * height * width
    draws = torch.Generator().manual_seed(0)
    levels = torch.stack([torch.randperm(pixels, generator=draws) for _ in range(channels)])
    values = ((levels + 0.5) / pixels - 0.5).view(channels, batch, height, width).transpose(0, 1).contiguous()
    signs = torch.linspace(-1, 1, batch * channels).view(batch, channels, 1, 1)

    def gradients(run: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        layers = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(kernel, stride, padding))
        model = layers.to("cuda", dtype)
        x = values.to("cuda", dtype).requires_grad_()
        weight = signs.to("cuda", dtype)

        def step() -> None:
            (model(x).sin() * weight).sum().backward()

        run(step)()
        return [each.grad.double() for each in (x, *model.parameters()) if each.grad is not None]

    exact = gradients(lambda step: step, torch.float64)
    for found, wanted in zip(gradients(weft.compile, torch.float32), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * wanted.abs().max().item())
