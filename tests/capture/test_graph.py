"""Copies of step graphs."""

from __future__ import annotations

import torch
from torch import nn

import weft


def test_a_copy_is_what_torchs_own_copy_is() -> None:
    """Names, operands, metadata, and the order of users, which passes go by."""
    with weft.fake_world(4):
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to("cuda")
        weft.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        captured = weft.capture(step, torch.zeros(4, 16, device="cuda"))
    wanted = torch.fx.Graph()
    wanted.output(wanted.graph_copy(captured.graph, {}))
    copied = captured.copy()
    assert [(node.name, node.op, node.target, node.type) for node in copied.graph.nodes] == [
        (node.name, node.op, node.target, node.type) for node in wanted.nodes
    ]
    for node, other in zip(copied.graph.nodes, wanted.nodes, strict=True):
        assert str((node.args, node.kwargs)) == str((other.args, other.kwargs))
        assert [user.name for user in node.users] == [user.name for user in other.users]
        assert node.meta == other.meta
        assert node.graph is copied.graph
    first = next(iter(copied.graph.nodes))
    first.meta["module"] = "elsewhere"
    assert next(iter(captured.graph.nodes)).meta.get("module") != "elsewhere"
