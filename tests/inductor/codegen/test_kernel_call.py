"""Kernels as calls of a graph: where their inputs lie, and what they do about it."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import knobs
from weft.errors import KernelCompilationFailed
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import run_passes


def call_of(step, *inputs: torch.Tensor) -> KernelCall:
    graph = make_kernels(run_passes(weft.capture(step, *inputs)))
    (call,) = (node.target for node in graph.graph.nodes if isinstance(node.target, KernelCall))
    return call


def test_an_input_in_another_layout_is_laid_out_first() -> None:
    """Some ATen kernels return another layout on a GPU than their fake tensor had."""
    x = torch.randn(6, 8)
    call = call_of(lambda x: x.exp() + 1, x)
    (wanted,) = call(x)
    call._relaid = None
    (found,) = call(x.t().contiguous().t())
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, x.exp() + 1)


def test_an_input_that_starts_anywhere_is_read_by_a_kernel_of_its_own() -> None:
    x = torch.randn(65)
    call = call_of(lambda x: x.exp(), x[:64])
    (found,) = call(x[1:])
    torch.testing.assert_close(found, x[1:].exp())
    assert call._unaligned is not None


def refuses(sources: object) -> list[object]:
    raise KernelCompilationFailed("planted", "planted by this test", "")


def test_unaligned_tensors_are_copied_where_the_kernel_for_them_does_not_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for into_memory in (True, False):
        call, x = several_outputs()
        wanted = [value.clone() for value in call(x)]
        call._compile = refuses
        unaligned = torch.empty(49)[1:].view(6, 8).copy_(x)
        memory = torch.full((66,), 7.0)
        out = [memory[1:49].view(6, 8), None, None] if into_memory else [None, None, None]
        with pytest.raises(KernelCompilationFailed):
            call(unaligned, out=out)
        assert (memory == 7.0).all()  # nothing was written
        caplog.clear()
        with knobs.override(strict=False):
            for _ in range(2):
                found = call(unaligned, out=out)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert (memory[0], *memory[49:]) == (7.0,) * 18
        (record,) = caplog.records
        assert "for unaligned tensors" in record.getMessage()


def several_outputs() -> tuple[KernelCall, torch.Tensor]:
    """A kernel that makes rows of mean 0 and variance 1, the means, and what it divided by."""
    x = torch.randn(6, 8)
    call = call_of(lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5), x)
    assert len(call.outputs) == 3
    return call, x


def test_outputs_are_written_where_they_are_told_to() -> None:
    call, x = several_outputs()
    wanted = call(x)
    places = [torch.full_like(value, 7.0) for value in wanted]
    for out in ([places[0], None, None], [None, *places[1:]], places):
        found = call(x, out=out)
        for value, place, right in zip(found, out, wanted, strict=True):
            assert torch.equal(value, right)
            assert place is None or value is place


def test_a_continued_buffer_stays_an_output_beside_one_that_is_told_its_place() -> None:
    call, x = several_outputs()
    wanted = call(x)
    continuing = KernelCall(call.generated, call.inputs, [call.outputs[0].name], call.outputs, ())
    continuing.attach(call.kernel, call._compile)  # type: ignore[arg-type]
    started, place, _ = (torch.full_like(value, 7.0) for value in wanted)
    found = continuing(x, started, out=[None, place, None])
    assert found[0] is started
    assert found[1] is place
    assert all(torch.equal(value, right) for value, right in zip(found, wanted, strict=True))
