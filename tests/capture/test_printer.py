"""The printed graph parses as Python, assigns every node once, and uses the names that the user would."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.capture.graph import StepGraph
from weft.capture.printer import annotation
from weft.capture.record.readable_names import readable_name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def train_step() -> Any:
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(batch["x"]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_a_training_step_prints_roles_lines_and_stages() -> None:
    graph = weft.capture(train_step(), {"x": torch.randn(4, 8)})
    text = str(graph)
    arguments, assigned = check_python(text, graph)
    assert arguments == {
        "optimizer_param_groups_0_lr": "float",
        "args_0_x": "f32[4, 8]",
        "model_0_linear_weight": "f32[8, 8]",
        "model_0_linear_bias": "f32[8]",
        "model_1_linear_weight": "f32[8, 8]",
        "model_1_linear_bias": "f32[8]",
    }
    assert assigned["addmm"] == "f32[4, 8]"
    assert "addmm: f32[4, 8] = aten.addmm(model_0_linear_bias, args_0_x, t)" in text
    assert "# parameter model.0.linear.weight" in text
    assert "# batch args[0]['x']" in text
    line = line_of("return torch.relu(self.linear(x))")
    where = f"tests/capture/test_printer.py:{line} in forward"
    assert f"# forward | model.1.linear | {where}: return torch.relu(self.linear(x))" in text
    assert re.search(r"# backward \| model\.0\.linear \| .*: return torch\.relu\(self\.linear\(x\)\)", text)
    assert re.search(r"# optimizer \| .* in step: optimizer\.step\(\)", text)
    assert "sum_1,  # returned by the step" in text
    assert re.search(r"add\w*,  # new value of model\.1\.linear\.bias", text)


def check_python(text: str, graph: StepGraph) -> tuple[dict[str, str], dict[str, str]]:
    """Parse; every node is assigned once, before its uses. Returns the annotations of arguments and
    variables."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = {arg.arg: ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation}
    assert list(arguments) == [node.name for node in graph.placeholders]
    known = set(arguments)
    assigned: dict[str, str] = {}
    functions = {"aten", "torch", "weft", "_c10d_functional", "c10d_functional", "device"}
    for statement in function.body:
        used = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if isinstance(statement, ast.AnnAssign):
            used -= {n.id for n in ast.walk(statement.annotation) if isinstance(n, ast.Name)}
        called = {n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert used <= known | functions | called, ast.unparse(statement)
        if isinstance(statement, ast.AnnAssign | ast.Assign):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            assert isinstance(target, ast.Name)
            assert target.id not in known
            known.add(target.id)
            assigned[target.id] = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
    named = {
        n.name for n in graph.graph.nodes if n.op == "call_function" and (n.users or n.meta.get("val") is not None)
    }
    assert named == set(assigned)
    return arguments, assigned


def line_of(source: str) -> int:
    text = inspect.getsource(inspect.getmodule(line_of))  # type: ignore[arg-type]
    return next(at for at, line in enumerate(text.splitlines(), 1) if line.strip() == source)


@pytest.mark.fake
def test_collectives_are_printed_with_group_and_bytes() -> None:
    with weft.fake_world(4, target_device="cpu"):
        mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = weft.fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh)

        def step(x: Tensor) -> None:
            model(x).sum().backward()

        graph = weft.capture(step, torch.randn(2, 8))
        text = str(graph)
    arguments, _ = check_python(text, graph)
    assert arguments["model_weight"] == "f32[2, 8]"
    assert re.search(r"# parameter model\.weight: \[8, 8\] torch\.float32 over {'dp': 4} as \[Shard\(dim=0\)\]", text)
    assert re.search(r"_c10d_functional\.all_gather_into_tensor\w*\(.*\)  # over \w+, 256 B", text)
    assert re.search(r"_c10d_functional\.reduce_scatter_tensor\w*\(.*\)  # over \w+, 256 B", text)


def test_symbolic_sizes_and_checks_are_printed() -> None:
    table = torch.zeros(5, 3)

    def step(x: Tensor, counts: Tensor) -> Tensor:
        first, second = counts.tolist()
        return table.new_zeros(first, 3).sum() + table.new_zeros(second, 3).sum() + x.sum() / (x.size(0) - 7)

    x = torch.randn(6, 2)
    weft.mark_dynamic(x, 0)
    graph = weft.capture(step, x, torch.tensor([2, 3]))
    arguments, assigned = check_python(str(graph), graph)
    assert re.fullmatch(r"f32\[s\d+, 2\]", arguments["args_0"])
    assert any(re.fullmatch(r"f32\[u\d+, 3\]", kind) for kind in assigned.values())


def test_a_call_with_hundreds_of_operands_is_broken_into_lines() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(100))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> None:
        for layer in model:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = weft.capture(step, torch.randn(2, 2))
    text = str(graph)
    check_python(text, graph)
    assert max(len(line.partition("  #")[0]) for line in text.splitlines()) <= 130


def test_annotations_of_values() -> None:
    assert annotation(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert annotation(torch.zeros((), dtype=torch.int64)) == "i64[()]"
    assert annotation([torch.zeros(1), 2, True]) == "[f32[1], int, bool]"
    assert annotation([torch.zeros(n) for n in range(9)]) == "[f32[0], ..., f32[8]]"
    assert annotation(None) == ""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.blocks.0.weight", "model_blocks_0_weight"),
        ("opt.state[model.0.weight].exp_avg", "opt_state_model_0_weight_exp_avg"),
        ("args[0]['x']", "args_0_x"),
        ("lambda", "lambda_"),
        ("input", "input_"),
        ("0.weight", "_0_weight"),
        ("[]", "input_"),
    ],
)
def test_paths_become_python_names(path: str, name: str) -> None:
    assert readable_name(path) == name
    assert name.isidentifier()
