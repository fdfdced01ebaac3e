"""What autograd saves of gathered parameters: a note how to make it again, instead of memory.

With `reshard_after_forward`, a gathered parameter must not outlive forward. But operations save it, or views
of it, for backward. While such a module runs, a saved tensor that lies in the memory of a gathered parameter
is replaced by a recipe (which parameter, which view); backward gathers the parameter again and takes the same
view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.distributed.fsdp.param import ShardedParameter
from weft.tensor_subclasses import Shell, plain_parts


@dataclass(frozen=True)
class View:
    """A tensor as seen from the whole parameter that it lies in.

    With `order`, it is the parameter with each dimension cut to (start, length) and then permuted; else it is
    given by strides: compilers follow a permutation more easily.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    cuts: tuple[tuple[int, int, int], ...] = ()
    order: tuple[int, ...] | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of ``whole``, a contiguous tensor of the gathered parameter's shape."""
        if self.order is None:
            return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)
        for dim, start, length in self.cuts:
            whole = whole.narrow(dim, start, length)
        return whole if self.order == tuple(range(whole.ndim)) else whole.permute(self.order)


def describe(tensor: torch.Tensor, whole: torch.Tensor) -> View:
    """The view of the contiguous `whole` that `tensor`, which shares its memory and dtype, is."""
    offset = int(tensor.storage_offset() - whole.storage_offset())
    plain = View(tuple(tensor.shape), tensor.stride(), offset)
    if tensor.ndim != whole.ndim:
        return plain
    by_stride = {stride: dim for dim, stride in enumerate(whole.stride()) if whole.shape[dim] != 1}
    order = [by_stride.get(stride, -1) for stride in tensor.stride()]
    if len(by_stride) != whole.ndim or sorted(order) != list(range(whole.ndim)):
        return plain
    cuts = []
    for dim in sorted(range(whole.ndim), key=whole.stride, reverse=True):
        start, offset = divmod(offset, whole.stride(dim)) if whole.stride(dim) else (0, offset)
        length = tensor.shape[order.index(dim)]
        if start + length > whole.shape[dim]:
            return plain
        if length != whole.shape[dim]:
            cuts.append((dim, start, length))
    return View(plain.shape, plain.stride, plain.offset, tuple(cuts), tuple(order)) if offset == 0 else plain


@dataclass(frozen=True)
class Recipe:
    """What stands for a saved tensor: a view of a parameter that is to be gathered again.

    A tensor subclass (a DTensor, or what a parameter's own `fsdp_post_all_gather` made) is one around views of the
    plain tensors inside the parameter.

    Args:
        views: for each plain tensor inside the saved one, by the attributes that lead to it: the attributes that lead
            to a plain tensor inside the parameter, and the view of that one.
        shell: the saved tensor without memory, None for a plain tensor.
    """

    param: ShardedParameter
    views: dict[tuple[str, ...], tuple[tuple[str, ...], View]]
    shell: Shell | None

    def follow(self, whole: torch.Tensor) -> torch.Tensor:
        """The saved tensor, as a view of the parameter gathered again."""
        parts = plain_parts(whole)
        found = {path: view.of(parts[at]) for path, (at, view) in self.views.items()}
        return found[()] if self.shell is None else self.shell.around(found)


@dataclass(frozen=True)
class PassedOn:
    """A saved tensor that hooks further out have packed."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any


def saved_as_recipes(
    params: list[ShardedParameter], gather_again: Callable[[ShardedParameter], torch.Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """The context in which what is saved of the gathered `params` is saved as a recipe.

    Everything else goes to the hooks that were innermost before: torch applies one pair only, and activation
    checkpointing around the module is such a pair.
    """
    gathered = {
        torch_adapter.storage_key(part): (param, at)
        for param in params
        if param.gathered is not None
        for at, part in plain_parts(param.gathered).items()
    }
    outer = torch_adapter.innermost_saved_tensor_hooks()

    def recipe(tensor: torch.Tensor) -> Recipe | None:
        if tensor.layout is not torch.strided:
            return None
        owner, views = None, {}
        for path, part in plain_parts(tensor).items():
            param, at = gathered.get(torch_adapter.storage_key(part), (None, ()))
            whole = None if param is None or param.gathered is None else plain_parts(param.gathered)[at]
            if whole is None or whole.dtype != part.dtype or owner not in (None, param):
                return None
            owner, views[path] = param, (at, describe(part, whole))
        return None if owner is None else Recipe(owner, views, None if () in views else Shell.of(tensor))

    def pack(tensor: torch.Tensor) -> Any:
        found = recipe(tensor)
        if found is not None:
            return found
        if outer is not None:
            return PassedOn(outer[1], outer[0](tensor))
        # An operation that saves its own result would hold it, and the result holds the operation: a cycle that nothing
        # but a backward breaks. Torch gives what is unpacked its place in the graph back.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Recipe):
            return packed.follow(gather_again(packed.param))
        return packed.unpack(packed.packed) if isinstance(packed, PassedOn) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
