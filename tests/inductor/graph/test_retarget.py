"""Steps captured on a CPU, as graphs of a GPU: devices, memory, attention and counters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_graphs import example
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.inductor.cost.gemm_shapes import arguments_of
from weft.inductor.graph.aliasing import share_storage
from weft.inductor.graph.retarget import counters, retarget
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes

Node = torch.fx.Node

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def names(step: StepGraph) -> set[str]:
    return {str(node.target).partition(".")[2] for node in step.graph.nodes}


def layouts(step: StepGraph) -> list[Any]:
    """Of every tensor its node, storage (numbered as they come), dtype, sizes, strides and offset."""
    numbers: dict[int, int] = {}
    return [
        (node.name, numbers.setdefault(t.untyped_storage()._cdata, len(numbers)), t.dtype, t.shape, t.stride())
        + (t.storage_offset(), t.untyped_storage().nbytes())
        for node in step.graph.nodes
        for t in tensors_of(node)
    ]


# ---- devices and memory


def test_everything_moves_and_shares_memory_as_before() -> None:
    step = example("dlrm")
    before = layouts(step)
    assert retarget(step, "cuda:0") is step
    assert layouts(step) == before
    assert {t.device for node in step.graph.nodes for t in tensors_of(node)} == {GPU}
    step.check()


def test_device_arguments_move_where_the_results_go() -> None:
    graph = weft.capture(lambda x: x + torch.arange(4, device="cpu"), torch.ones(4))
    (made,) = (node for node in retarget(graph, "cuda:1").graph.nodes if "arange" in node.name)
    assert made.kwargs["device"] == torch.device("cuda:1") == made.meta["val"].device


def test_there_and_back() -> None:
    step = weft.capture(lambda x: x.exp() + torch.zeros(4), torch.ones(4))
    text, before = str(step), layouts(step)
    retarget(retarget(step), "cpu")
    assert (str(step), layouts(step)) == (text, before)


def test_symbols_stay_symbols_and_nothing_more_is_assumed_of_them() -> None:
    step, inputs = attention_step(is_causal=True)
    for tensor in inputs:
        weft.mark_dynamic(tensor, 0)
    graph = weft.capture(step, *inputs)
    shape_env = torch_adapter.shape_env_of(graph.placeholders[0].meta["val"].fake_mode)
    assumed = torch_adapter.assumptions(shape_env)
    sizes = [str(node.meta["val"].shape) for node in graph.placeholders]
    retarget(graph)
    assert [str(node.meta["val"].shape) for node in graph.placeholders] == sizes
    assert not any(size.startswith("torch.Size([2") for size in sizes)
    assert "_scaled_dot_product_cudnn_attention.default" in names(graph)
    assert torch_adapter.assumptions(shape_env) == assumed


# ---- attention


def attention_step(
    dtype: torch.dtype = torch.bfloat16, width: int = 64, *, transposed: bool = True, **more: Any
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Attention of four heads over two heads of keys, forward and backward."""

    def step(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        heads = [x.transpose(1, 2) for x in inputs] if transposed else inputs
        out = F.scaled_dot_product_attention(*heads, enable_gqa=True, **more)
        out = out.transpose(1, 2) if transposed else out
        (out * weight).sum().backward()
        return out, *(x.grad for x in inputs)

    heads = [4, 2, 2]
    sizes = [(2, 16, n, width) if transposed else (2, n, 16, width) for n in heads]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, dtype=torch.float32, generator=generator).to(dtype) for size in (*sizes, sizes[0])]
    return step, tensors


def cudnn_by_hand(step: StepGraph, inputs: list[Tensor]) -> list[Tensor]:
    """Runs a graph with products and a softmax in the place of cuDNN's attention; arguments by their names."""
    values: dict[Node, Any] = dict(zip(step.placeholders, inputs, strict=True))
    forward = aten._scaled_dot_product_cudnn_attention.default
    returns = [result.name for result in forward._schema.returns]

    def attended(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        query, key, value = query.float(), *(x.float().repeat_interleave(2, 1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ value

    def given(node: Node) -> dict[str, Any]:
        described = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        return torch.fx.node.map_arg(  # type: ignore[return-value]
            dict(zip(described, node.args, strict=False)) | node.kwargs, lambda used: values[used]
        )

    for node in step.graph.nodes:
        if node.target is forward:
            got = given(node)
            assert got["dropout_p"] == 0.0
            assert got["attn_bias"] is None
            assert got["compute_log_sumexp"]
            out = attended(got["query"], got["key"], got["value"], got["is_causal"], got.get("scale"))
            result = dict.fromkeys(returns) | {"output": out.to(got["query"].dtype)}
            result |= {"logsumexp": "sums", "philox_seed": "seed", "philox_offset": "offset"}
            values[node] = list(result.values())
        elif node.target is aten._scaled_dot_product_cudnn_attention_backward.default:
            got = given(node)
            assert (got["logsumexp"], got["philox_seed"], got["philox_offset"]) == ("sums", "seed", "offset")
            assert (got["max_q"], got["max_k"], got["dropout_p"]) == (16, 16, 0.0)
            leaves = [got[name].detach().requires_grad_() for name in ("query", "key", "value")]
            out = attended(*leaves, got["is_causal"], got.get("scale"))
            torch.testing.assert_close(out.to(got["out"].dtype), got["out"])
            values[node] = torch.autograd.grad(out, leaves, got["grad_out"].float())
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: values[used])  # type: ignore
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return [values[node] for node in step.results]


@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}])
def test_attention_is_cudnns(more: dict[str, Any]) -> None:
    step, inputs = attention_step(**more)
    captured = weft.capture(step, *inputs)
    outputs = [node.meta["val"] for node in captured.results]
    graph = retarget(captured).check()
    assert not any("for_cpu" in name for name in names(graph))
    for node, before in zip(graph.results, outputs, strict=True):
        assert (node.meta["val"].stride(), node.meta["val"].dtype) == (before.stride(), before.dtype)
    view, *_ = graph.results
    assert "transpose" in view.name
    assert share_storage(view, view.args[0])
    wanted = step(*inputs)
    with torch.enable_grad():
        found = cudnn_by_hand(graph, inputs)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_fakes_of_attention_are_those_of_torch() -> None:
    step, inputs = attention_step(is_causal=True)
    graph = retarget(weft.capture(step, *inputs))
    checked = 0
    for node in graph.graph.nodes:
        if "cudnn" not in str(node.target):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])  # type: ignore
        with inputs_mode(node):
            results = node.target(*args, **kwargs)
        for user in node.users:
            assert user.target is operator.getitem
            one, other = results[user.args[1]], user.meta["val"]
            assert (one.shape, one.stride(), one.dtype, one.device) == (
                other.shape,
                other.stride(),
                other.dtype,
                other.device,
            )
            checked += 1
    assert checked == 4 + 3  # output, logsumexp, two numbers of the generator; three gradients


def inputs_mode(node: Node) -> Any:
    return node.all_input_nodes[0].meta["val"].fake_mode


@pytest.mark.parametrize(
    "build",
    [
        lambda: attention_step(torch.float32),
        lambda: attention_step(width=36),
        lambda: attention_step(width=256),
        lambda: attention_step(transposed=False),  # cuDNN's output lies as the query, the CPU's does not
        lambda: attention_step(attn_mask=torch.zeros(16, 16, dtype=torch.bfloat16)),
    ],
)
def test_other_attention_stays(build: Callable[[], Any]) -> None:
    step, inputs = build()
    graph = retarget(weft.capture(step, *inputs)).check()
    assert {"_scaled_dot_product_flash_attention_for_cpu.default"} <= names(graph)
    assert not any("cudnn" in name for name in names(graph))


def test_attention_without_backward_makes_no_logsumexp() -> None:
    _, inputs = attention_step()
    graph = weft.capture(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *(inputs[0].transpose(1, 2),) * 3)
    (node,) = (node for node in retarget(graph).graph.nodes if "cudnn" in node.name)
    assert arguments_of(node)["compute_log_sumexp"] is False


# ---- counters


def optimizer_step(make: Callable[[list[Tensor]], torch.optim.Optimizer], **more: Any) -> StepGraph:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = make(list(model.parameters()))

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return weft.capture(step, torch.ones(3, 4))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_counters_that_the_host_reads_stay_on_the_cpu(kind: Any, foreach: bool) -> None:
    step = retarget(optimizer_step(lambda parameters: kind(parameters, foreach=foreach)))
    on_cpu = {node.name for node in step.placeholders if node.meta["val"] is not None and _is_on_cpu(node)}
    steps = {entry.name for entry in step.inputs if entry.path.endswith(".step")}
    if kind is torch.optim.RMSprop:  # which counts and never reads
        assert not on_cpu
    else:
        assert on_cpu - steps <= {entry.name for entry in step.inputs if entry.path == "constant"}
        assert steps
        assert steps <= on_cpu
    for node in step.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        assert _is_on_cpu(node.args[0])
    assert all(not t.dim() for node in step.graph.nodes for t in tensors_of(node) if t.device == CPU)


def test_fused_counters_are_on_the_gpu() -> None:
    step = optimizer_step(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert not counters(step)
    assert not any(_is_on_cpu(node) for node in retarget(step).graph.nodes)


def test_what_the_host_reads_of_results_is_on_the_gpu() -> None:
    def step(x: Tensor) -> float:
        return x.sum().item() * 2

    graph = retarget(weft.capture(step, torch.ones(4)))
    assert not any(_is_on_cpu(node) for node in graph.graph.nodes)


def test_nodes_that_one_names_stay() -> None:
    graph = weft.capture(lambda x, y: (x + 1, y * 2), torch.ones(4), torch.ones(4))
    kept = {graph.placeholders[1], *graph.placeholders[1].users}
    retarget(graph, keep=kept.__contains__)
    assert {node for node in graph.graph.nodes if _is_on_cpu(node)} == kept


def _is_on_cpu(node: Any) -> bool:
    return any(tensor.device == CPU for tensor in tensors_of(node))


# ---- what follows


def test_collectives_are_not_packed_for_a_gpu() -> None:
    """``pack`` copies collectives of CPU tensors into one buffer."""
    with weft.fake_world(2):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
        weft.fully_shard(model, mesh=mesh)

        def step(x: Tensor) -> Tensor:
            return model(x)

        graph = weft.capture(step, torch.ones(8, 64))
        passed = run_passes(graph, KERNEL_PASSES)
        moved = run_passes(retarget(graph.copy()), KERNEL_PASSES)
    assert "cat.default" in names(passed)
    assert "cat.default" not in names(moved)
    assert not any(_is_on_cpu(node) for node in moved.graph.nodes)
    assert moved.groups == graph.groups


def test_an_explanation_is_of_the_gpus_graph(tmp_path: Path) -> None:
    step, inputs = attention_step(is_causal=True)
    explained = weft.explain(step, *inputs)
    with knobs.override(cache_dir=str(tmp_path)):
        found = explained.on("H200").kernel_report
    assert found is not None
    called = {calls.operation: calls.why for calls in found.calls}
    assert called["aten._scaled_dot_product_cudnn_attention.default"] == "a library's kernel"
    assert not any("for_cpu" in name for name in called)
    assert "for_cpu" in str(explained.step_graph)  # the captured graph is as it was captured


def test_batch_norms_of_half_precision_have_the_statistics_of_a_gpu() -> None:
    norm = torch.nn.BatchNorm2d(16)

    def step(x: Tensor) -> Tensor:
        loss = norm(x).float().square().mean()
        loss.backward()
        return loss

    graph = retarget(weft.capture(step, torch.randn(2, 16, 4, 4, dtype=torch.bfloat16)))
    (forward,) = [node for node in graph.graph.nodes if node.name == "functional_native_batch_norm"]
    assert [val.dtype for val in forward.meta["val"][:3]] == [torch.bfloat16, torch.float32, torch.float32]
    assert all(user.meta["val"].dtype == forward.meta["val"][user.args[1]].dtype for user in forward.users)
    assert not any("batch_norm" in name for name in names(run_passes(graph, KERNEL_PASSES)))
