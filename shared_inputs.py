"""Modules that read one activation share its conversion: the gather over the ranks, or the sum of its gradient.

Query, key and value read the same activation, and so do gate and up. The style of each would gather it over the ranks
in forward, or sum its gradient over them in backward, as PyTorch's styles do. Here the second module gets what the
first one has computed: their gradients are added on each rank, and one collective serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakIdKeyDictionary

from weft import torch_adapter

Convert = Callable[[Any, DeviceMesh, Placement], Tensor]


class _Made(NamedTuple):
    """The result of a conversion; the mesh, the layout, and the versions of the input that it was computed for."""

    made: Tensor
    mesh: DeviceMesh
    how: tuple[Any, ...]


# The last conversion, by its input, while the input is alive. No more than one: under checkpointing inputs live until
# backward, and what was gathered of each must not. Not in `weft.distributed`, whose variables are state of a captured
# step.
_KNOWN = WeakIdKeyDictionary()


def shared(convert: Convert) -> Convert:
    """``convert(x, mesh, layout)``, which hands out its last result for an ``x`` again, while that is unchanged."""

    def converted(x: Any, mesh: DeviceMesh, layout: Placement) -> Tensor:
        # A leaf is kept alive by the graph of what is made of it, and would never go. Without a graph there is no
        # gradient to sum.
        if not isinstance(x, Tensor) or x.grad_fn is None or not torch.is_grad_enabled():
            return convert(x, mesh, layout)
        # The part of a DTensor may be written to by itself.
        part = torch_adapter.local_tensor(x)._version if isinstance(x, DTensor) else 0
        how = (x._version, part, layout)
        before = _KNOWN.get(x)
        if before is not None and before.mesh is mesh and before.how == how:
            return before.made  # type: ignore[no-any-return]
        made = convert(x, mesh, layout)
        _KNOWN.clear()
        _KNOWN[x] = _Made(made, mesh, how)
        return made

    return converted
