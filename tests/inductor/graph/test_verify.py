"""The verifier of StepGraphs finds planted faults and names the neighbourhood and the user's line; true graphs pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from example_graphs import EXAMPLES, example

import weft
from tests.step_builder import StepBuilder
from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.errors import MalformedGraph
from weft.inductor.fusion.kernel_stages import generation_passes
from weft.inductor.graph.pass_runner import PassRunner, keeps_bits
from weft.inductor.graph.retarget import retarget
from weft.inductor.graph.verify import GraphVerifier
from weft.inductor.passes.pipeline import KERNEL_PASSES

Node = torch.fx.Node
aten = torch.ops.aten


def small_step() -> tuple[StepGraph, dict[str, Node]]:
    """A product, a transposed view of it, a sum of that, and an update in place of an input."""
    built = StepBuilder()
    x, w, total = (built.input(torch.randn(shape), Role.PARAMETER) for shape in ((4, 8), (8, 6), (6, 4)))
    product = built.call(aten.mm.default, x, w)
    turned = built.call(aten.t.default, product)
    doubled = built.call(aten.mul.Tensor, turned, 2.0)
    added = built.write(aten.add_.Tensor, total, doubled)
    built.returns(built.call(aten.sum.default, doubled))
    built.update(total, added)
    nodes = {"product": product, "turned": turned, "doubled": doubled, "added": added, "total": total}
    return built.build(), nodes


def test_a_true_graph_is_verified_whole() -> None:
    step, _ = small_step()
    verifier = GraphVerifier()
    verifier.start(step)
    assert verifier.recomputed == 5
    assert verifier.skipped == {}


@pytest.mark.parametrize(
    "text", ["CUDA error: no CUDA-capable device is detected", "CUDA driver version is insufficient"]
)
def test_what_needs_a_gpu_is_skipped_where_there_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is built for GPUs asks for one in some fake rules, on a laptop that plans for a cluster, too."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr("weft.inductor.graph.fake_values.fake_result", refused)
    step, _ = small_step()
    verifier = GraphVerifier()
    verifier.start(step)
    assert verifier.skipped == {"mm.default": 1, "t.default": 1, "mul.Tensor": 1, "add.Tensor": 1, "sum.default": 1}


def test_what_did_not_change_is_not_recomputed() -> None:
    step, nodes = small_step()
    verifier = GraphVerifier()
    verifier.start(step)
    first = verifier.recomputed
    verifier.verify(step)
    assert verifier.recomputed == first
    nodes["doubled"].args = (nodes["turned"], 3.0)
    verifier.verify(step)
    assert verifier.recomputed == first + 1


def like(node: Node, **changed: Any) -> torch.Tensor:
    """A fake of the node's value in new memory, with something changed."""
    val = node.meta["val"]
    layout = {"size": val.shape, "stride": val.stride(), "dtype": val.dtype, "device": val.device, **changed}
    with val.fake_mode:
        return torch.empty_strided(layout.pop("size"), layout.pop("stride"), **layout)


def _stale_strides(nodes: dict[str, Node]) -> None:
    nodes["doubled"].meta["val"] = like(nodes["doubled"], stride=(4, 1))


def _wrong_sizes(nodes: dict[str, Node]) -> None:
    nodes["product"].meta["val"] = like(nodes["product"], size=(4, 7), stride=(7, 1))


def _wrong_dtype(nodes: dict[str, Node]) -> None:
    nodes["product"].meta["val"] = like(nodes["product"], dtype=torch.bfloat16)


def _wrong_device(nodes: dict[str, Node]) -> None:
    nodes["product"].meta["val"] = like(nodes["product"], device="meta")


def _view_in_own_memory(nodes: dict[str, Node]) -> None:
    nodes["turned"].meta["val"] = like(nodes["turned"])


def _result_in_operand(nodes: dict[str, Node]) -> None:
    nodes["doubled"].meta["val"] = nodes["turned"].meta["val"]


def _operands_swapped(nodes: dict[str, Node]) -> None:
    nodes["product"].args = nodes["product"].args[::-1]


def _written_with_other_strides(nodes: dict[str, Node]) -> None:
    val = nodes["total"].meta["val"]
    with val.fake_mode:
        nodes["added"].meta["val"] = val.as_strided((6, 4), (1, 6))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_stale_strides, r"strides \[4, 1\] are recorded, not \[1, 6\]"),
        (_wrong_sizes, r"sizes \[4, 7\] are recorded, not \[4, 6\]"),
        (_wrong_dtype, "dtype torch.bfloat16 is recorded, not torch.float32"),
        (_wrong_device, "device meta is recorded, not cpu"),
        (_view_in_own_memory, "memory of its own is recorded for a view"),
        (_result_in_operand, "an operand's memory is recorded for a new tensor"),
        (_operands_swapped, "mm.default cannot be computed from its operands"),
        (_written_with_other_strides, r"strides \[1, 6\] are recorded, not \[4, 1\]"),
    ],
)
def test_planted_faults_are_found(fault: Callable[[dict[str, Node]], None], message: str) -> None:
    step, nodes = small_step()
    fault(nodes)
    with pytest.raises(MalformedGraph, match=message) as caught:
        GraphVerifier().start(step)
    assert "-->" in str(caught.value)
    assert "test_verify.py" in str(caught.value)


def test_an_update_must_have_the_sizes_and_dtype_of_its_input() -> None:
    built = StepBuilder()
    x, y = built.input(torch.ones(3)), built.input(torch.ones(4))
    built.update(x, built.call(aten.neg.default, y))
    with pytest.raises(MalformedGraph, match=r"the new value of in_0 is .*\[4\], not .*\[3\]"):
        built.build()


def drawing_step() -> StepGraph:
    built = StepBuilder()
    x = built.input(torch.ones(8))
    draws = [built.call(aten.bernoulli.p, x, 0.5) for _ in range(2)]
    built.returns(built.call(aten.add.Tensor, *draws))
    return built.build()


@keeps_bits
def drop_a_draw(step: StepGraph) -> StepGraph:
    first, second = step.graph.find_nodes(op="call_function", target=aten.bernoulli.p)
    second.replace_all_uses_with(first)
    step.graph.erase_node(second)
    return step


@keeps_bits
def swap_two_draws(step: StepGraph) -> StepGraph:
    first, second = step.graph.find_nodes(op="call_function", target=aten.bernoulli.p)
    second.append(first)
    return step


@pytest.mark.parametrize(("pass_", "fault"), [(drop_a_draw, "dropped a"), (swap_two_draws, "changed the order of")])
def test_passes_keep_random_draws_in_order(pass_: Any, fault: str) -> None:
    with pytest.raises(MalformedGraph, match=f"{pass_.__name__} {fault} random draw"):
        PassRunner().run("graph", drawing_step(), [pass_])


def test_the_knob_switches_the_verifier() -> None:
    with knobs.override(verify_graphs=False):
        PassRunner().run("graph", drawing_step(), [swap_two_draws])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_models_are_true_after_every_pass(name: str) -> None:
    runner = PassRunner()
    step = runner.run("graph", retarget(example(name), "cuda:0"), KERNEL_PASSES)
    runner.run("kernels", step, generation_passes(runner))
    verifier = runner._verifier
    unstated = {"to_memory", "adam", "segment_sum", "_embedding_bag.default", "index.Tensor", "one_hot_sum"}
    unstated.add("native_layer_norm.default")  # its statistics have another dtype on CPUs
    assert set(verifier.skipped) <= {*unstated, "functional_native_batch_norm", "onehotsum", "segmentsum"}
    assert verifier.recomputed > 0.9 * (verifier.recomputed + sum(verifier.skipped.values()))


def test_a_size_that_is_halved_and_doubled_is_the_size_where_it_is_even() -> None:
    @weft.compile(dynamic=True)
    def step(ids: torch.Tensor) -> None:
        ids.reshape(-1, 2).unsqueeze(0).mul_(2)

    for size in (6, 2, 8):
        ids = torch.arange(size)
        step(ids)
        assert ids.tolist() == [2 * at for at in range(size)]
