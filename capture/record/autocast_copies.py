"""The copies of weights that ``torch.autocast`` keeps while a region of it lasts.

Eager casts a float32 weight once in a region of autocast and keeps the copy until the outermost region ends. Where a
region is left open over an optimizer step, eager goes on with the copy from before the update: the forward no longer
sees what training changed. A compiled step casts the weights as they are. Both give the same numbers as long as no
weight was updated since its copy was made, and that is checked here, at each call of a step that a region surrounds:

- :func:`check_copies` lets autocast make the copies that the step would make, so that later eager code in the region
  finds them, and raises where one is older than its weight;
- :func:`weights_updated` notes which weights a compiled step changed. Generated kernels do not move version counters.

Autocast's cache can only be asked by an operation that it casts for (:func:`autocast_copy`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.state.containers import StatePlace
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.user_code import user_line
from weft.errors import StaleAutocastCopy
from weft.torch_adapter import TorchDispatchMode


@dataclass(frozen=True)
class AutocastCopy:
    """A copy that a captured step makes of a weight.

    Attributes:
        step: name of the step.
        place: of the weight.
        dtype: of the copy.
        after_write: whether the step writes to the weight before it casts it.
    """

    step: str
    place: StatePlace
    dtype: torch.dtype
    after_write: bool


@dataclass
class _Known:
    """A copy that was seen to equal its weight: the two, the weight's version then, and whether a step changed it."""

    weight: weakref.ref[torch.Tensor]
    copy: weakref.ref[torch.Tensor]
    version: int
    changed: bool = False


# By the id of the weight. Autocast's cache is one for all threads, and so is this.
known_copies: dict[int, _Known] = {}


def may_be_copied(tensor: torch.Tensor) -> bool:
    """Whether autocast would keep a copy of this tensor: it is a leaf in float32 that requires grad."""
    return tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and tensor.layout is torch.strided


class _SeesCopy(TorchDispatchMode):
    """Under a matrix product: notes its operand, as autocast has it, and makes that one where ``make`` says so."""

    def __init__(self, make: bool) -> None:
        super().__init__()
        self.make = make
        self.made = False
        self.operand: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.made = True
            return func(*args, **kwargs) if self.make else torch.empty(0, dtype=kwargs["dtype"])
        self.operand = args[0]
        return torch.empty(0, dtype=args[0].dtype)


def autocast_copy(weight: torch.Tensor, dtype: torch.dtype | None, *, make: bool) -> torch.Tensor | None:
    """The copy of a float32 leaf that autocast keeps in the region that this thread is in.

    Args:
        weight: the leaf.
        dtype: of the copy to make; None stands for the region's.
        make: whether to let autocast make the copy where it has none. If not, it gets an empty one, so the caller must
            clear the cache.

    Returns:
        The very tensor that autocast would use; None where it has none (``make=False``), or does not keep copies.
    """
    kind = weight.device.type
    if not torch.amp.is_autocast_available(kind):
        return None
    mode = _SeesCopy(make)
    with (
        torch_adapter.only_mode(),
        torch.enable_grad(),
        torch.autocast(kind, dtype or torch.get_autocast_dtype(kind)),
        mode,
    ):
        torch.mm(weight, weight)
    return None if mode.made and not make else mode.operand


def check_copies(copies: Iterable[AutocastCopy]) -> None:
    """Make the copies that a step will make in the region around it, where autocast has none yet.

    Raises:
        StaleAutocastCopy: autocast has a copy of a weight from before an update, which eager would use.
    """
    for each in copies:
        weight = each.place.outer()
        known = known_copies.get(id(weight))
        if known is not None and known.weight() is weight:
            copy = known.copy()
            if copy is not None and not known.changed and known.version == _version(weight):
                continue
        if each.after_write:
            raise StaleAutocastCopy(each.step, each.place.path, str(each.dtype), user_line())
        copy = autocast_copy(weight, each.dtype, make=True)
        if copy is None:
            continue
        if not _equal(copy, weight):
            raise StaleAutocastCopy(each.step, each.place.path, str(each.dtype), user_line())
        known_copies[id(weight)] = _Known(weakref.ref(weight), weakref.ref(copy), _version(weight))


def weights_updated(places: Iterable[StatePlace]) -> None:
    """Note that a compiled step wrote to the tensors at these places. Only of use where there are ``known_copies``."""
    for key in [key for key, each in known_copies.items() if each.copy() is None or each.weight() is None]:
        del known_copies[key]
    if known_copies:
        written = {torch_adapter.storage_key(place.get()) for place in places}
        for each in known_copies.values():
            weight = each.weight()
            if weight is not None and torch_adapter.storage_key(inner_tensor(weight)[0]) in written:
                each.changed = True


@contextmanager
def emptied(step: str, leaves: list[tuple[torch.Tensor, str]]) -> Iterator[None]:
    """Inside, autocast has no copies but those that a capture makes; afterwards none of those.

    Copies of the weights ``leaves`` (with their names) are made anew.

    Raises:
        StaleAutocastCopy: one of them is older than its weight.
    """
    before = [(leaf, name, autocast_copy(leaf, None, make=False)) for leaf, name in leaves]
    for leaf, name, copy in before:
        if copy is not None and not _equal(copy, leaf):
            raise StaleAutocastCopy(step, name, str(copy.dtype), user_line())
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for leaf, _, copy in before:
            if copy is not None:
                autocast_copy(leaf, copy.dtype, make=True)


def _version(weight: torch.Tensor) -> int:
    return inner_tensor(weight)[0]._version


@torch.no_grad()
def _equal(copy: torch.Tensor, weight: torch.Tensor) -> bool:
    copy, weight = inner_tensor(copy)[0].detach(), inner_tensor(weight)[0].detach()
    return torch.equal(copy.nan_to_num(), weight.to(copy.dtype).nan_to_num())
