"""Operations whose rule for fakes in torch is stricter than their kernels, or gives other strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from both_ways import batches, both_ways, training
from weft import torch_adapter
from weft.capture.fake import fake_rules
from weft.capture.fake.fake_rules import fake_result


@pytest.mark.parametrize("shapes", [((2, 0, 3), (2, 3, 4)), ((2, 3, 0), (2, 0, 4)), ((0, 3, 4), (0, 4, 5))])
def test_products_of_no_elements_accept_two_dtypes_as_the_kernel_does(shapes: list[tuple[int, ...]]) -> None:
    a, b = torch.zeros(shapes[0], dtype=torch.bfloat16), torch.zeros(shapes[1])
    step = lambda a, b: torch.bmm(a, b) + torch.bmm(a.float(), b.to(a.dtype))
    compiled = weft.compile(step)(a, b)
    assert compiled.dtype == step(a, b).dtype
    assert torch.equal(compiled, step(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_mm_accepts_every_float_dtype(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([2, 2, 5], dtype=torch.int32)
            return F.grouped_mm(x.to(dtype), self.weight, offs=ends)

    both_ways(training(lambda model, x: model(x).float().square().mean(), Experts), batches(shape=(5, 8)))


LAYOUTS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.rand(2, 3, 4) + 0.1,
    lambda: (torch.rand(2, 4, 3) + 0.1).transpose(1, 2),
    lambda: (torch.rand(3, 2, 4) + 0.1).transpose(0, 1),
]
# Decomposed before weft sees them, into operations with a rule of their own.
DECOMPOSED = {"aten.ldexp.Tensor", "aten.float_power.Scalar", "aten.special_xlogy.default", "aten.rrelu.default"}
# Their kernels take the strides from operands in an order of their own; nothing in a step has asked for them yet.
NOT_MENDED = {"aten.soft_margin_loss_backward.default"}


def _elementwise_operations() -> Iterator[Any]:
    """The overloads with a tag that says so, of which one to three operands are tensors, and those with a rule here."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or overload.endswith("out") or base.endswith("_"):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or any(each.alias_info for each in op._schema.arguments):
            continue
        returns = [str(each.type) for each in op._schema.returns]
        if (torch.Tag.pointwise in op.tags or op in fake_rules._RULES) and returns == ["Tensor"]:
            yield op


def _operands(op: Any) -> list[list[Any]]:
    """Operands of an operation in every mixture of layouts; empty where they cannot be made from its schema."""
    simple = {"number": 0.5, "Scalar": 0.5, "float": 0.5, "int": 1, "bool": False}
    choices: list[list[Any]] = []
    for each in op._schema.arguments:
        kind = str(each.type)
        if each.kwarg_only:
            break
        if kind == "Tensor":
            choices.append([make() for make in LAYOUTS])
        elif each.has_default_value():
            choices.append([each.default_value])
        else:
            choices.append([simple.get(kind)])
    return [list(each) for each in itertools.product(*choices)]


def test_strides_are_those_of_the_kernels() -> None:
    tried, wrong = set(), set()
    for op in _elementwise_operations():
        for operands in _operands(op)[:27]:
            try:
                real = op(*operands)
            except (RuntimeError, TypeError, IndexError):
                continue  # not for these dtypes or values
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in operands]
                fake = fake_result(op, fakes, {})
            tried.add(str(op))
            if (fake.shape, fake.stride(), fake.dtype) != (real.shape, real.stride(), real.dtype):
                wrong.add(str(op))
    assert len(tried) > 150
    assert wrong <= DECOMPOSED | NOT_MENDED


def test_a_loss_through_a_transposed_softplus_runs() -> None:
    """The backward of softplus took the strides of its input, so the step recorded a view where eager copies."""
    linear = torch.nn.Linear(8, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        linear.weight.grad = None
        found = torch.nn.functional.softplus(linear(x)).transpose(-1, -2)
        (found * torch.arange(16.0)).exp().sum().backward()
        return linear.weight.grad

    x = torch.randn(2, 16, 8) * 0.01
    expected = step(x).clone()
    assert torch.equal(weft.compile(step)(x), expected)


def test_no_result_of_an_operation_is_another_one() -> None:
    """Torch's rule for the backward of an LSTM on a CPU gives one fake for the gradients of both biases, once: then its
    cache of fake results gives two, and a path of a step had other operations than the one before it."""
    for _ in range(3):
        FakeTensorMode.cache_clear()

        def make() -> tuple[Any, list[Any]]:
            network = nn.LSTM(8, 8)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

            def step(x: torch.Tensor) -> bool:
                optimizer.zero_grad()
                network(x)[0].square().mean().backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.01)
                optimizer.step()
                return bool(network.bias_hh_l0.grad.sum() > 0)

            return step, [network]

        both_ways(make, batches(4), captures=None)


# ---- a GPU's rules, in a torch that has no GPU


def on_gpu(*sizes: int, dtype: torch.dtype = torch.bfloat16, last: bool = False) -> torch.Tensor:
    memory_format = torch.channels_last if last else torch.contiguous_format
    strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
    return torch_adapter.new_fake(MODE, torch.device("cuda:0"), dtype, sizes, strides, 0, None)


MODE = FakeTensorMode()
without_cuda = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has the rules of a GPU itself")


@without_cuda
@pytest.mark.parametrize("last", [False, True])
def test_convolutions_keep_channels_innermost_as_cudnn_does(last: bool) -> None:
    image, weight, grad = on_gpu(2, 16, 8, 8, last=last), on_gpu(32, 16, 3, 3), on_gpu(2, 32, 6, 6)
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    with torch_adapter.recomputing(MODE):
        out = fake_result(torch.ops.aten.convolution.default, (image, weight, None, *rest), {})
        given = (grad, image, weight, [32], *rest, [True, True, True])
        gradients = fake_result(torch.ops.aten.convolution_backward.default, given, {})
    assert [each.is_contiguous(memory_format=torch.channels_last) for each in (out, *gradients[:2])] == [last] * 3
    assert gradients[2].shape == (32,)


@without_cuda
@pytest.mark.parametrize("training", [False, True])
def test_statistics_of_batch_norms_are_float32_on_a_gpu(training: bool) -> None:
    image, vector = on_gpu(2, 16, 8, 8, last=True), on_gpu(16, dtype=torch.float32)
    with torch_adapter.recomputing(MODE):
        given = (image, vector, vector, vector, vector, training, 0.1, 1e-5)
        out, *statistics = fake_result(torch.ops.aten.native_batch_norm.default, given, {})
    assert (out.dtype, out.stride()) == (image.dtype, image.stride())
    assert [(each.dtype, tuple(each.shape)) for each in statistics] == [(torch.float32, (16 if training else 0,))] * 2


@pytest.mark.parametrize("driver", [None, "gels"])
@pytest.mark.parametrize(
    "shapes", [((5, 3), (5, 2)), ((3, 5), (3,)), ((2, 4, 5, 3), (2, 4, 5)), ((1, 5, 3), (4, 5, 2))]
)
def test_least_squares_has_the_layouts_of_the_kernel(shapes: Any, driver: str | None) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        found = torch.linalg.lstsq(a, b, driver=driver)
        found.solution.square().sum().backward()
        return [each.detach() for each in found], [a.grad, b.grad]

    compiled = weft.compile(step)
    for more in (0, 1, 2):
        a = torch.randn(*shapes[0][:-1], shapes[0][-1] + more, dtype=torch.float64)
        b = torch.randn(shapes[1], dtype=torch.float64)
        found, expected = compiled(a, b), step(a, b)
        torch.testing.assert_close(found, expected)  # LAPACK's own bits differ from call to call
        assert [each.stride() for each in found[0]] == [each.stride() for each in expected[0]]
