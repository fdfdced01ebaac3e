"""The second door: models through torch.compile(backend="weft") beside the same models run eagerly."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import weft
import weft.backend
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph]:
    """The graphs that reach the compiler, in order."""
    seen: list[StepGraph] = []
    make = weft.backend._program
    monkeypatch.setattr(weft.backend, "_program", lambda step, mode: (seen.append(step), make(step, mode))[1])
    return seen


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="weft", **options)


def same(found: Any, wanted: Any) -> None:
    """Equal bit for bit, with the same dtypes, strides and requires_grad."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, check_stride=True)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (found, wanted)), strict=True):
        if isinstance(a, Tensor):
            assert a.requires_grad == b.requires_grad


def train(model: nn.Module, run: Any, batches: list[Tensor], seed: int = 1) -> list[Any]:
    """Loss of each step of AdamW, then gradients, parameters and buffers."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = run(batch).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
    return [losses, grads, list(model.parameters()), list(model.buffers())]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.gelu(mixed)), 0.25, self.training)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), (6, 8)),
    "transformer": (lambda: nn.Sequential(Block(), Block()), (2, 5, 16)),
    "convnet": (conv_net, (4, 3, 8, 8)),
    "recurrent": (lambda: Recurrent(), (3, 5, 8)),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


# ---- training and inference against eager


@pytest.mark.parametrize("name", MODELS)
def test_training_is_eager_training_bit_for_bit(name: str) -> None:
    """Or that of the graph which torch traces, run by its own ``aot_eager``: on some CPUs that graph's products, whose
    operands lie otherwise than autograd's, are added up in another order."""
    make, shape = MODELS[name]
    model = make()
    twin, traced = copy.deepcopy(model), copy.deepcopy(model)
    batches = [torch.randn(shape) for _ in range(3)]
    found = train(model, compiled(model, fullgraph=True), batches)
    torch.testing.assert_close(found, train(twin, twin, batches), rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.compiler.reset()
    same(found, train(traced, torch.compile(traced, backend="aot_eager", fullgraph=True), batches))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Any, graphs: list[StepGraph]) -> None:
    model = nn.Sequential(conv_net(), nn.Softmax(-1)).eval()
    x = torch.randn(2, 3, 8, 8)
    with guard():
        same(compiled(model)(x), model(x))
    assert len(graphs) == 1


def test_inputs_that_want_gradients_get_them() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a.sin() @ b).relu()

    found, wanted = ([torch.randn(4, 4, requires_grad=True) for _ in range(2)] for _ in range(2))
    for a, b in zip(found, wanted, strict=True):
        b.data.copy_(a.data)
    compiled(function)(*found).sum().backward()
    function(*wanted).sum().backward()
    same([a.grad for a in found], [b.grad for b in wanted])


def test_gradients_add_up_over_calls_before_backward() -> None:
    """Between the two forwards the running statistics that the first saved are written."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4)
    fast = compiled(model)
    for run in (fast, twin):
        (run(x) + run(2 * x)).square().sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    same(list(model.buffers()), list(twin.buffers()))


def test_autocast_around_and_inside() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    with torch.autocast("cpu", torch.bfloat16):
        same(compiled(model)(x), model(x))
    same(compiled(inside)(x), inside(x))
    assert inside(x).dtype == torch.bfloat16


def test_dropout_draws_what_eager_draws() -> None:
    function = lambda x: F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(3)
    fast = compiled(function)
    x = torch.ones(64, 3)
    for seed in range(3):
        torch.manual_seed(seed)
        found = fast(x), torch.rand(2)
        torch.manual_seed(seed)
        same(found, (function(x), torch.rand(2)))


@pytest.mark.parametrize("residual", [True, False])
def test_users_may_write_to_what_a_model_returns(residual: bool) -> None:
    """A product of three axes is a view; what is written over it is returned as no view, as eager's result is none."""

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x) if residual else super().forward(x) * 2

    model = Model(8, 8)
    fast, x = compiled(model), torch.randn(2, 3, 8)
    found, wanted = fast(x), model(x)
    same(found.mul_(2), wanted.mul_(2))
    same(torch.autograd.grad(found.sum(), model.weight), torch.autograd.grad(wanted.sum(), model.weight))
    with torch.no_grad():
        assert not fast(x)._is_view()


# ---- sizes


def test_a_size_that_changes_is_compiled_once_more(graphs: list[StepGraph]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    fast = compiled(model)
    for rows in (4, 7, 9, 16, 33):
        x = torch.randn(rows, 8)
        same(fast(x), model(x))
        fast(x).sum().backward()
    assert len(graphs) == 4  # forward and backward, for the first size and for all others
    assert any(entry.role is Role.SCALAR for entry in graphs[-2].inputs)


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_dynamic_sizes_from_the_start(name: str, graphs: list[StepGraph]) -> None:
    make, shape = MODELS[name]
    model = make()
    twin = copy.deepcopy(model)
    fast = compiled(model, dynamic=True)
    for rows in (6, 7, 9):  # no other size of the batch: Dynamo takes equal sizes to stay equal
        batches = [torch.randn(rows, *shape[1:])]
        same(train(model, fast, batches), train(twin, twin, batches))
    assert len(graphs) == 2


def test_static_sizes_compile_anew(graphs: list[StepGraph]) -> None:
    fast = compiled(lambda x: x * x.shape[0], dynamic=False)
    for rows in (3, 4, 5):
        same(fast(torch.ones(rows)), torch.full((rows,), float(rows)))
    assert len(graphs) == 3


def test_sizes_in_arithmetic_and_outputs() -> None:
    def function(x: Tensor) -> Any:
        rows = x.shape[0]
        return x.view(rows // 2, 2, -1).sum(1), rows * 3, x.new_full((rows + 1,), rows)

    fast = compiled(function, dynamic=True)
    for rows in (4, 6, 10):
        x = torch.randn(rows, 6)
        same(fast(x), function(x))


def test_numbers_as_arguments() -> None:
    function = lambda x, a, b: x * a + b
    fast = compiled(function)
    x = torch.randn(5)
    for a, b in ((2, 0.5), (3, 0.25), (4, 1.5)):
        same(fast(x, a, b), function(x, a, b))


def test_sizes_that_the_data_decides() -> None:
    def function(x: Tensor) -> Tensor:
        found = x.nonzero()
        return found * 2 + found.shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = compiled(function, fullgraph=True)
        for x in (torch.tensor([0, 1, 2]), torch.tensor([1, 0, 5, 6]), torch.zeros(3)):
            same(fast(x), function(x))


# ---- what Dynamo allows a function to do


def test_a_graph_break_makes_two_graphs(graphs: list[StepGraph]) -> None:
    printed: list[float] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        printed.append(y.sum().item())
        return y.cos()

    x = torch.randn(4)
    same(compiled(function)(x), x.sin().cos())
    assert printed == [x.sin().sum().item()]
    assert len(graphs) == 2


def test_written_inputs() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.add_(1)
        y[1:].mul_(x[1:])
        z.copy_(y)
        return x + y + z

    found, wanted = ([torch.ones(4), torch.arange(4.0), torch.zeros(4, dtype=torch.float64)] for _ in range(2))
    fast = compiled(function)
    for _ in range(3):
        same([fast(*found), *found], [function(*wanted), *wanted])


def test_written_inputs_are_updates_of_the_graph(graphs: list[StepGraph]) -> None:
    compiled(lambda x, y: (x.add_(y), y * x))(torch.ones(4), torch.ones(4))
    assert [entry.path for entry, _ in graphs[0].updates()] == ["x"]


def test_written_leaves_and_their_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = 1
        y.relu_()
        return y @ y

    a, b = (torch.arange(9.0).view(3, 3).sub(4).requires_grad_() for _ in range(2))
    compiled(function)(a).sum().backward()
    function(b).sum().backward()
    same(a.grad, b.grad)


def test_outputs_that_alias_inputs_and_each_other() -> None:
    def function(x: Tensor) -> Any:
        y = x * 2
        return x, x.view(-1), x[1:], y, y.t(), y.detach(), y.view(-1)[2:]

    x = torch.randn(3, 4)
    found, wanted = compiled(function)(x), function(x)
    same(found, wanted)
    assert found[0] is x
    assert [t._base is None or t._base is x for t in found[:3]] == [True] * 3
    found[1].zero_()
    found[4].fill_(7)
    assert not x.any()
    same([t.unique() for t in found[3:]], [torch.tensor([7.0])] * 4)


def test_equal_outputs_are_tensors_of_their_own() -> None:
    def function(x: Tensor) -> Any:
        y = x.exp()
        return y, y.detach(), x + 1, x + 1, y.clone()

    x = torch.randn(3, requires_grad=True)
    first, detached, *others = compiled(function)(x)
    assert [first.requires_grad, detached.requires_grad] == [True, False]
    first.sum().backward()
    same(x.grad, x.detach().exp())
    assert len({t.data_ptr() for t in (first, *others)}) == 4
    assert detached.data_ptr() == first.data_ptr()


def test_outputs_that_are_no_float_tensors() -> None:
    def function(x: Tensor, flag: bool) -> Any:
        return {"none": None, "index": x.argmax(), "mask": x > 0, "text": "a", "nested": [(x.sum(), 3)]}

    x = torch.randn(5, requires_grad=True)
    found, wanted = compiled(function)(x, True), function(x, True)
    same([found["index"], found["mask"], found["nested"][0][0]], [wanted["index"], wanted["mask"], x.sum()])
    assert (found["none"], found["text"], found["nested"][0][1]) == (None, "a", 3)


def test_functions_that_do_nothing() -> None:
    x = torch.randn(3)
    assert compiled(lambda x: x)(x) is x
    assert compiled(lambda x: None)(x) is None
    same(compiled(lambda: torch.ones(2))(), torch.ones(2))


def test_constants_in_the_function() -> None:
    function = lambda x: x + torch.tensor([1.0, 2.0, 3.0])
    fast = compiled(function)
    for _ in range(2):
        same(fast(torch.zeros(3)), torch.tensor([1.0, 2.0, 3.0]))


def test_branches_on_data() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,))

    fast = compiled(function, fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        same(fast(x), function(x))


def test_checkpointed_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    batches = [torch.randn(3, 4)]

    def run(part: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)

    model[2] = twin[2] = nn.Identity()
    same(train(model, compiled(run(model)), batches), train(twin, run(twin), batches))


def test_tensor_subclasses_come_apart() -> None:
    x = TwoTensor(torch.ones(2, 3), torch.full((2, 3), 2.0))
    function = lambda x: (x * 2).sin() + 1
    found, wanted = compiled(function)(x), function(x)
    assert isinstance(found, TwoTensor)
    same([found.a, found.b], [wanted.a, wanted.b])


# ---- what the compiler sees, memory, mistakes


def test_roles_paths_and_lines(graphs: list[StepGraph]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled(model)(torch.randn(3, 4)).sum().backward()
    forward, backward = graphs
    roles = {entry.path.partition(".")[2]: entry.role for entry in forward.inputs}
    assert {roles[path] for path in ("0.weight", "1.bias")} == {Role.PARAMETER}
    assert roles["1.running_mean"] is Role.BUFFER
    assert {node.meta["stage"] for node in backward.graph.nodes if node.op == "call_function"} == {"backward"}


def test_nodes_know_the_users_lines(graphs: list[StepGraph]) -> None:
    compiled(lambda x: x.sin())(torch.randn(3))
    (node,) = (node for node in graphs[0].graph.nodes if node.op == "call_function")
    assert node.meta["frames"][0].filename == __file__


def test_attention_stays_one_operation(graphs: list[StepGraph]) -> None:
    compiled(Block())(torch.randn(2, 5, 16)).sum().backward()
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("attention" in name for name in names) == 2
    assert not any("softmax" in name for name in names)


def test_backward_frees_what_forward_saved_as_it_goes() -> None:
    """When the gradient of the first layer is computed, the activation saved by the last one is gone."""
    alive: list[bool] = []
    saved: list[weakref.ref[Tensor]] = []

    @torch.library.custom_op("weft_test::remember", mutates_args=())
    def remember(x: Tensor) -> Tensor:
        return x.clone()

    @torch.library.custom_op("weft_test::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(saved[0]() is not None)
        return x.clone()

    @torch.library.custom_op("weft_test::take", mutates_args=())
    def take(grad: Tensor, x: Tensor) -> Tensor:
        saved.append(weakref.ref(x))
        return grad * x

    for op in (remember, look, take):
        op.register_fake(lambda x, *rest: torch.empty_like(x))
    remember.register_autograd(
        lambda ctx, grad: take(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

    class LookInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return look(grad)

    x = torch.randn(8, requires_grad=True)
    compiled(lambda x: remember(LookInBackward.apply(x.sin())).sum())(x).backward()
    assert alive == [False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "max-speed"}, "mode='max-speed' is not known"),
        ({"options": {"bucket_mb": 3}}, "knobs.bucket_mb does not exist"),
        ({"options": {"bucket_mib": "many"}}, "knobs.bucket_mib = 'many' is not accepted: this knob takes int"),
    ],
)
def test_options_that_weft_does_not_know(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match="weft") as caught:
        compiled(lambda x: x + 1, **options)(torch.ones(2))
    assert said in str(caught.value)


def test_options_are_knobs() -> None:
    same(compiled(lambda x: x + 1, options={"bucket_mib": 3})(torch.ones(2)), torch.full((2,), 2.0))


def test_a_failing_operation_names_the_users_line() -> None:
    fast = compiled(lambda x, i: x[i], dynamic=False)
    with pytest.raises(Exception, match="out of") as caught:
        fast(torch.ones(3), torch.tensor([5]))
    assert "test_backend.py" in str(caught.value)


RUN = "import torch; f = torch.compile(lambda x: x.sin() + 1, backend='weft'); print(f(torch.zeros(2)).tolist())"


@pytest.mark.parametrize(
    "script",
    [
        f"import weft, sys; assert 'torch._dynamo' not in sys.modules; {RUN}",
        f"import torch._dynamo; torch._dynamo.list_backends(); import weft; {RUN}",
        f"import weft, importlib; importlib.reload(weft); import torch._dynamo; importlib.reload(weft); {RUN}",
    ],
)
def test_importing_weft_is_enough_to_name_the_backend(script: str) -> None:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.split() == ["[1.0,", "1.0]"], run.stderr


VALUE_GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "prod along": lambda x: x.prod(0),
    "prod along the last": lambda x: x.prod(-1, keepdim=True),
    "cumprod": lambda x: x.cumprod(-1),
    "prod inside": lambda x: (x.exp() * x.sin()).prod(1).sum() * x.prod(),
    "max": lambda x: x.round().max(),
    "median": lambda x: x.round().median(),
    "masked_fill": lambda x: (x * 2).masked_fill(x > 0, x.mean()),
    "determinant": lambda x: torch.linalg.det(x @ x.mT),
}
ZEROS = {"none": [], "one": [(0, 1)], "two": [(0, 1), (2, 1)], "in columns": [(0, 1), (2, 3)]}


@pytest.mark.parametrize("name", VALUE_GRADIENTS)
@pytest.mark.parametrize("zeros", ZEROS)
def test_gradients_that_depend_on_values(name: str, zeros: str) -> None:
    x = torch.randn(4, 5)
    for at in ZEROS[zeros]:
        x[at] = 0.0
    function, found = VALUE_GRADIENTS[name], []
    for run in (compiled(function, fullgraph=True), function):
        leaf = x.clone().requires_grad_()
        run(leaf).sum().backward()
        found.append(leaf.grad)
    same(*found)


@pytest.mark.parametrize("function", [torch.linalg.eig, lambda x: torch.linalg.eigh(x + x.mH)])
@pytest.mark.parametrize("on_phase", [False, True])
def test_a_loss_on_the_phase_of_eigenvectors_is_refused_as_in_eager(function: Any, on_phase: bool) -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    loss = lambda x: (function(x)[1].real if on_phase else function(x)[1].abs()).sum()
    found: list[Any] = []
    for run in (compiled(loss, fullgraph=True), loss):
        leaf = x.clone().requires_grad_()
        try:
            run(leaf).backward()
            found.append(leaf.grad)
        except RuntimeError as error:
            found.append(str(error))
    assert isinstance(found[1], str) == on_phase
    if on_phase:
        assert found[0] == found[1]
    else:
        same(*found)
