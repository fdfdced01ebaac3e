"""What kind of node a node of a StepGraph is: a collective, a wait, a random draw, an effect."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import torch.fx

from weft.capture.user_code import format_frame, user_line
from weft.errors import InvalidCollective, UncapturableLayout, UnregisteredCollective
from weft.shown_values import listed
from weft.torch_adapter import OpOverload

WAIT = torch.ops._c10d_functional.wait_tensor.default

COLLECTIVE_NAMESPACES = ("_c10d_functional", "weft_c10d")
"""Of torch's collectives and of weft's own. Every operation of these but the wait, and but those whose names begin with
an underscore, starts a collective. What each one does is said by the compiler's registry
(:mod:`weft.inductor.graph.collectives`); capture needs no more than this."""

GROUP_ARGUMENTS = ("group_name", "group")
"""Names of the argument that says over which process group a collective works."""


def is_collective(node: torch.fx.Node) -> bool:
    """Whether the node starts a collective (its wait is a node of its own): an operation, or a callable that says so
    (``collective``) and over which group (``group``)."""
    return node.op == "call_function" and calls_collective(node.target)


def calls_collective(target: Any) -> bool:
    """Whether a call of ``target`` starts a collective, see :func:`is_collective`."""
    return _of(target).collective


class _Traits(NamedTuple):
    """What is known of the target of a call. Every predicate of this file is one look-up of it: torch answers these
    questions about an operation with Python code at each call.

    Attributes:
        target: of an operation or a builtin; held, because its id is the key.
        collective: whether it starts a collective.
        waits: whether it waits for one.
        draws: whether it draws from a random generator.
        group: position and name of the argument that says over which process group, None where there is none.
        mutates: whether it writes to an argument.
        returns_nothing: whether it neither returns nor writes anything, so that it is called for what else it does.
    """

    target: OpOverload | BuiltinFunctionType | None
    collective: bool
    waits: bool
    draws: bool
    group: tuple[int, str] | None = None
    mutates: bool = False
    returns_nothing: bool = False

    @property
    def acts(self) -> bool:
        """Whether a call does more than to compute its result."""
        return self.collective or self.waits or self.draws or self.returns_nothing


_known: dict[int, _Traits] = {}


def _of(target: Any) -> _Traits:
    found = _known.get(id(target))
    if found is not None:
        return found
    if isinstance(target, BuiltinFunctionType):  # an eighth of the nodes of a step are getitem
        found = _known[id(target)] = _Traits(target, False, False, False)
        return found
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    if not isinstance(target, OpOverload):  # not kept: a kernel lives as long as its program
        return _of_python(getattr(target, "collective", False), getattr(target, "waits", False), draws)
    schema = target._schema
    starts = target.namespace in COLLECTIVE_NAMESPACES and target is not WAIT and not target._opname.startswith("_")
    groups = [(at, each.name) for at, each in enumerate(schema.arguments) if each.name in GROUP_ARGUMENTS]
    group = groups[0] if groups else None
    writes = schema.is_mutable
    nothing = not schema.returns and not writes
    found = _known[id(target)] = _Traits(target, starts, target is WAIT, draws, group, writes, nothing)
    return found


@functools.cache
def _of_python(collective: bool, waits: bool, draws: bool) -> _Traits:
    return _Traits(None, collective, waits, draws)


def mutates(target: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return isinstance(target, OpOverload) and _of(target).mutates


def is_wait(node: torch.fx.Node) -> bool:
    """Whether the node waits for a collective and hands on what it is given: the operation, or a callable that says so
    (``waits``)."""
    return calls_wait(node.target)


def calls_wait(target: Any) -> bool:
    """Whether a call of ``target`` waits for a collective, see :func:`is_wait`."""
    return target is WAIT or getattr(target, "waits", False)


def is_effect(node: torch.fx.Node) -> bool:
    """Whether the node must stay even when nothing uses its result (collectives, checks, opaque calls, random
    state)."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output") or bool(node.meta.get("effect"))
    return _of(node.target).acts or bool(node.meta.get("effect"))


def is_ordered(node: torch.fx.Node) -> bool:
    """Whether the node keeps its place among its like: an effect that is neither a collective nor the wait for one."""
    if node.op != "call_function":
        return is_effect(node)
    traits = _of(node.target)
    return not traits.collective and not traits.waits and (traits.acts or bool(node.meta.get("effect")))


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator, so that its order among such nodes matters."""
    return node.op == "call_function" and _of(node.target).draws


@functools.cache
def sizes_differ_by_rank(target: object) -> bool:
    """Whether a collective operation splits its tensor into parts of given sizes, which differ between ranks."""
    if getattr(target, "namespace", "") not in COLLECTIVE_NAMESPACES:
        return False
    return any("split_sizes" in argument.name for argument in target._schema.arguments)  # type: ignore[attr-defined]


def group_of(node: torch.fx.Node) -> str:
    """Name of the process group that a node's operation works over, "" for one that takes no group.

    Raises:
        errors.UnregisteredCollective: a collective whose group has another name, so that nothing is known of it.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return target.group if is_collective(node) else ""  # type: ignore[union-attr]
    traits = _of(target)
    if traits.collective and traits.group is None:
        raise unregistered(node)
    return group_among(target, node.args, node.kwargs)


def group_among(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The process group among the operands of a call of ``op``, "" where it takes none."""
    argument = _of(op).group
    if argument is None:
        return ""
    at, name = argument
    group = args[at] if at < len(args) else kwargs.get(name)
    return group if isinstance(group, str) else ""


def set_group(node: torch.fx.Node, name: str) -> None:
    """Let the collective operation ``node`` work over the process group ``name``."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    at = next(at for at, argument in enumerate(names) if argument in GROUP_ARGUMENTS)
    if at < len(node.args):
        node.update_arg(at, name)
    else:
        node.update_kwarg(names[at], name)


def unregistered(node: torch.fx.Node) -> UnregisteredCollective:
    """The error that nothing is known of the collective that ``node`` starts, with the user's line."""
    frames = node.meta.get("frames", ())
    return UnregisteredCollective(str(node.target), format_frame(frames[0]) if frames else "")


def check_layout(what: object, tensor: torch.Tensor) -> None:
    """Check that graphs can hold a tensor, of which ``what`` has to do with it.

    Raises:
        UncapturableLayout: it is sparse, or otherwise not strided.
    """
    if tensor.layout is not torch.strided:
        raise UncapturableLayout(str(what), tensor.layout, user_line())


@functools.cache
def needs_check(target: object) -> bool:
    """Whether :func:`check_operands` has something to check for an operation."""
    if _makes_quantized(target):
        return True
    name = str(target) if getattr(target, "namespace", "") in COLLECTIVE_NAMESPACES else ""
    # Gathers take tensors of several dtypes.
    return ("_coalesced" in name and "reduce" in name) or sizes_differ_by_rank(target)


def _makes_quantized(target: object) -> bool:
    name = getattr(target, "_opname", "") if getattr(target, "namespace", "") == "aten" else ""
    return re.search("(^|_)quantized?(_|$)", name) is not None and "fake_quantize" not in name


def check_operands(target: Any, operands: tuple[Any, ...]) -> None:
    """Check what torch would find out when a collective runs, or when a graph has a quantized tensor.

    Raises:
        InvalidCollective: the tensors of a coalesced reduction have several dtypes.
        UncapturableLayout: the result is quantized, for which torch's fake tensors have no dtype.
    """
    if _makes_quantized(target):
        raise UncapturableLayout(str(target), "quantized", user_line())
    if sizes_differ_by_rank(target):
        return check_splits(*operands[:3])
    dtypes = dict.fromkeys(tensor.dtype for tensor in operands[0])
    if len(dtypes) > 1:
        what = f"its tensors have the dtypes {listed(list(map(str, dtypes)))}: call it once for those of each dtype"
        raise InvalidCollective(target._opname, what, user_line())
    return None


def check_splits(sent: torch.Tensor, theirs: list[Any], ours: list[Any]) -> None:
    """Splits of an all-to-all that only the data decides: sizes, of which those sent must cover the tensor."""
    for size in (*theirs, *ours):
        torch._check(size >= 0, lambda size=size: f"{size} is no size to split by")
    torch._check(sum(ours) == sent.shape[0], lambda: f"splits {ours} do not cover {sent.shape[0]} rows")
