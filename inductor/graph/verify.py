"""The verifier of a StepGraph: its grammar, and fake values that are what the operations give.

``StepGraph.check`` verifies what costs next to nothing: order, waits, groups, updates, the schema of metadata. Here the
fake value of every node is recomputed from its operands and compared with what the node records: sizes, strides, dtype,
device, and in whose memory it lies. Random draws must stay in order from pass to pass. On in all tests; in production
under ``knobs.verify_graphs``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, neighbourhood
from weft.capture.node_kinds import is_random
from weft.capture.node_meta import source_line
from weft.capture.record.functional_ops import Functionalized, operation_of
from weft.errors import MalformedGraph
from weft.inductor.graph.aliasing import SCATTERS
from weft.inductor.graph.fake_values import NOT_STATED, SAVED_STATISTICS_DIFFER, infer
from weft.inductor.graph.sizes import tensors_in, tensors_of
from weft.torch_adapter import OpOverload

Node = torch.fx.Node


class GraphVerifier:
    """Verifies a graph again and again while passes change it: what did not change is not recomputed.

    Attributes:
        recomputed: how many fake values were recomputed so far.
        skipped: calls that do not state their result, by name.
    """

    def __init__(self) -> None:
        self.recomputed = 0
        self.skipped: dict[str, int] = {}
        self._known: dict[Any, Any] = {}  # what was verified, and the fakes it was about, so that their ids stay theirs
        self._draws: list[str] = []

    def start(self, step: StepGraph) -> None:
        """Verify a graph that no pass has seen yet.

        Raises:
            MalformedGraph: see :meth:`verify`.
        """
        self._draws = random_draws(step)
        self.verify(step)

    def after_pass(self, step: StepGraph, name: str, *, draws_in_kernels: bool = False) -> None:
        """Verify the graph that a pass returned.

        Args:
            name: of the pass, for messages.
            draws_in_kernels: generated kernels may have taken draws over.

        Raises:
            MalformedGraph: see :meth:`verify`; or the pass dropped a random draw, or changed the order of two.
        """
        self.verify(step, f" after {name}")
        before, after = self._draws, random_draws(step)
        self._draws = after
        if not draws_in_kernels:
            kept = set(before) & set(after)
            lost = len(after) < len(before)
            moved = [draw for draw in before if draw in kept] != [draw for draw in after if draw in kept]
            if lost or moved:
                what = "dropped a random draw" if lost else "changed the order of random draws"
                raise MalformedGraph(f"{name} {what}: {before} became {after}", "")

    def verify(self, step: StepGraph, when: str = "") -> None:
        """Verify ``step``.

        Raises:
            MalformedGraph: the grammar is broken (see ``StepGraph.check``), or a recorded fake value is not what the
                node computes. The message has the neighbourhood of the node and the user's line.
        """
        step.check()
        for node in step.graph.nodes:
            if node.op != "call_function":
                continue
            key = _key(node)
            if key in self._known:
                continue
            fault = self._fault(node, step)
            if fault is not None:
                line = source_line(node)
                where = f", from {line}" if line else ""
                raise MalformedGraph(f"{node.name}{where}: {fault}{when}", neighbourhood(step.graph.nodes, node))
            self._known[key] = [node.meta.get("val"), [used.meta.get("val") for used in node.all_input_nodes]]

    def _fault(self, node: Node, step: StepGraph) -> str | None:
        recorded = node.meta.get("val")
        operation = operation_of(node.target)
        if operation in SAVED_STATISTICS_DIFFER:
            return None
        try:
            expected = infer(node, step.groups)
        except Exception as error:  # noqa: BLE001 (whatever the operation says of its operands is the fault)
            return f"{node.target} cannot be computed from its operands: {type(error).__name__}: {error}"
        if expected is NOT_STATED:
            name = getattr(node.target, "__name__", type(node.target).__name__)
            self.skipped[name] = self.skipped.get(name, 0) + 1
            return None
        self.recomputed += 1
        return _difference(node, expected, recorded)


def random_draws(step: StepGraph) -> list[str]:
    """Names of the nodes that draw from a generator, in order."""
    return [node.name for node in step.graph.nodes if is_random(node)]


# ---- comparison


def _difference(node: Node, expected: Any, recorded: Any) -> str | None:
    """How what ``node`` records differs from what it computes; None where it does not."""
    wanted, found = tensors_in(expected), tensors_in(recorded)
    if len(wanted) != len(found):
        return f"{len(found)} tensors are recorded, not {len(wanted)}"
    sources = {
        torch_adapter.storage_key(tensor): tensor for used in node.all_input_nodes for tensor in tensors_of(used)
    }
    writes = _writes(node)
    for at, (want, have) in enumerate(zip(wanted, found, strict=True)):
        where = f"result {at}: " if len(wanted) > 1 else ""
        if (fault := _tensor_difference(node, want, have, sources, writes)) is not None:
            return where + fault
    return None


def _tensor_difference(
    node: Node, want: torch.Tensor, have: torch.Tensor, sources: dict[int, torch.Tensor], writes: bool
) -> str | None:
    if want.dtype != have.dtype:
        return f"dtype {have.dtype} is recorded, not {want.dtype}"
    if want.device != have.device:
        return f"device {have.device} is recorded, not {want.device}"
    if torch_adapter.unbacked_symbols(want) - torch_adapter.unbacked_symbols(have):
        return None  # a size that depends on data got a new symbol here: nothing is known about it
    if not _same(want.shape, have.shape):
        return f"sizes {_shown(have.shape)} are recorded, not {_shown(want.shape)}"
    if have.layout is not torch.strided:
        return None
    memory, own = torch_adapter.storage_key(want), torch_adapter.storage_key(have)
    # A view must be recorded in its operand's memory: liveness would free that memory too early otherwise.
    if memory in sources and not writes:
        if own != memory:
            return "memory of its own is recorded for a view of an operand"
        if not _same([want.storage_offset()], [have.storage_offset()]):
            return f"offset {have.storage_offset()} is recorded, not {want.storage_offset()}"
    elif own in sources:
        # And the other way round: new memory that is recorded as an operand's would be written over.
        if not writes:
            return "an operand's memory is recorded for a new tensor"
        want = have if node.target in SCATTERS else _written(node, have)
    if not _same_strides(want, have):
        return f"strides {_shown(have.stride())} are recorded, not {_shown(want.stride())}"
    return None


def _writes(node: Node) -> bool:
    """Whether the recorded value may be memory of an operand that the executor writes over."""
    in_place = "inplace" in node.meta or isinstance(node.target, Functionalized) or node.target in SCATTERS
    return in_place or bool(getattr(node.target, "updated", ())) or bool(getattr(node.target, "continued", ()))


def _written(node: Node, have: torch.Tensor) -> torch.Tensor:
    """The operand whose memory and place ``have`` takes: a value written in place has its layout."""
    key = torch_adapter.storage_key(have)
    tensors = [tensor for used in node.all_input_nodes for tensor in tensors_of(used)]
    there = [tensor for tensor in tensors if torch_adapter.storage_key(tensor) == key]
    same = (tensor for tensor in there if _same(tensor.shape, have.shape) and _same_strides(tensor, have))
    return next(same, there[0])


def _same(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch_adapter.surely_equal(a, b) for a, b in pairs)


def _same_strides(want: torch.Tensor, have: torch.Tensor) -> bool:
    """Whether elements have the same places. The stride of a dimension of one element says nothing."""
    if any(type(size) is int and size == 0 for size in have.shape):
        return True
    dims = zip(have.shape, want.stride(), have.stride(), strict=True)
    return all((type(size) is int and size == 1) or torch_adapter.surely_equal(a, b) for size, a, b in dims)


def _shown(numbers: Any) -> str:
    return str([n if type(n) is int else str(n) for n in numbers])


def _key(node: Node) -> Any:
    """What a node's fake value is verified for: the call, its operands' fakes and its own, by identity."""
    return (
        node.target if isinstance(node.target, (OpOverload, type(operator.getitem))) else id(node.target),
        _frozen(node.args),
        _frozen(node.kwargs),
        _identity(node.meta.get("val")),
        id(node.meta.get("inplace")),
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, Node):
        return "%", _identity(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _frozen(item)) for key, item in value.items()])
    return type(value).__name__, str(value)


def _identity(val: Any) -> Any:
    """Lists of fakes by their elements: passes change lists."""
    return tuple([_identity(item) for item in val]) if isinstance(val, (list, tuple)) else id(val)
