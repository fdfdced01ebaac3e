"""Operations that resize the tensor that they are given as ``out=``.

Torch resizes it where its shape is not that of the result. Other tensors of the same memory keep their layout in eager;
in a graph they would get that of the new value. So a resize is captured only where nothing shows the former layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.operands import tensors_in
from weft.capture.user_code import user_line
from weft.errors import UncapturableMutation
from weft.torch_adapter import OpOverload

# What torch says where it would resize a fake tensor of symbolic sizes.
_CANNOT_RESIZE = "tried to directly modify sizes"
_REMEDY = "give it a tensor of the result's shape"


def written_by(
    op: OpOverload,
    compute: Callable[[], Any],
    written: Any,
    fakes: Any,
    has_views: Callable[[torch.Tensor], bool],
    node_of: Callable[[torch.Tensor], Any],
) -> Any:
    """What ``compute()``, an operation that writes, returns.

    Args:
        compute: runs ``op`` on fakes.
        written: the tensors that it writes, the user's or those of the capture.
        fakes: the fakes that it writes in their place.
        has_views: whether the step made other tensors of the memory of one.
        node_of: gives the node of the present value of one, whose fake may be the one that is resized.

    Raises:
        UncapturableMutation: it resizes one whose former layout the step can still see.
    """
    before = [(fake.shape, fake.stride()) for fake in tensors_in(fakes)]
    nodes = [node_of(tensor) for tensor in tensors_in(written)]
    try:
        result = compute()
    except RuntimeError as error:
        if _CANNOT_RESIZE not in str(error):
            raise
        what = f"{op} at {user_line()}: out= resizes a tensor whose sizes differ between calls"
        raise UncapturableMutation(f"{what}; {_REMEDY}") from error
    for tensor, fake, node, (shape, strides) in zip(tensors_in(written), tensors_in(fakes), nodes, before, strict=True):
        if len(shape) == fake.dim() and all(map(torch_adapter.surely_equal, shape, fake.shape)):
            continue
        # Python reads the sizes of a tensor in the user's state from the real one. An argument is the caller's.
        is_argument = isinstance(node, torch.fx.Node) and node.op == "placeholder"
        if tensor is not fake or is_argument or has_views(tensor):
            sizes = f"from {tuple(shape)} to {tuple(fake.shape)}"
            whose = "it is part of the state of the step" if tensor is not fake else "the step has views of it"
            whose = "it is an argument of the step" if tensor is fake and is_argument else whose
            what = f"{op} at {user_line()}: out= resizes a tensor {sizes}, and {whose}"
            raise UncapturableMutation(f"{what}; {_REMEDY}")
        if isinstance(fake, FakeTensor) and isinstance(node, torch.fx.Node) and node.meta.get("val") is fake:
            with torch_adapter.only_mode(fake.fake_mode):
                node.meta["val"] = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    return result
