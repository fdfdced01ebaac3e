"""The fake values of a finished graph, without what ties them to autograd's graph.

Autograd's nodes hold the hooks of the step, and with them the user's model. Python's garbage collector does not see
cycles through these nodes, so a fake value that requires grad would keep the model alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft import torch_adapter
from weft.capture.record.operands import map_operands


def detach_from_autograd(graph: torch.fx.Graph, fake_mode: FakeTensorMode) -> None:
    """Replace the fake values of all nodes that require grad by detached ones."""

    def cut(val: Any) -> Any:
        detach = isinstance(val, torch.Tensor) and val.requires_grad
        return torch_adapter.detached_fake(val) if detach else val

    with torch_adapter.only_mode(fake_mode):
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = map_operands(node.meta["val"], cut)
