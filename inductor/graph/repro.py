"""A StepGraph as a Python file that makes it again: to be read, sent with a report, reduced.

The file is a function of one call of :class:`Builder` a node, with the user's lines as comments. Nothing of the process
that wrote it is in it: inputs are layouts, sizes that were symbols are the numbers of the captured call, and what only
that process can compute again (collectives, hooks, random numbers, operations of other libraries) is an input too.
"""

from __future__ import annotations

import math
import operator
import runpy
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.capture.graph import StepGraph
from weft.capture.node_meta import source_line
from weft.capture.record.functional_ops import Functionalized, operation_of
from weft.capture.step_interface import Input, Output, Return, Role, Update
from weft.capture.user_code import printable
from weft.errors import NotASavedGraph, UnknownOption
from weft.torch_adapter import OpOverload

Node = torch.fx.Node
Target = Callable[..., Any]

_NAMESPACES = ("aten", "prims")
_MODULES = {"operator": operator, "math": math}
_TAKEN = frozenset({"aten", "prims", "torch", "build", "device", "step", "functional", "Builder", *_MODULES})

_FILE = '''"""A step as weft captured it: the calls of ATen and their layouts.

    python {name}     # reduces it to the calls that generated kernels get wrong, if any
"""

import math
import operator
import sys

import torch

from weft.capture.graph import StepGraph
from weft.inductor.graph.repro import Builder, functional

aten, prims = torch.ops.aten, torch.ops.prims


def build(device: str) -> StepGraph:
    step = Builder(device)
{body}
    return step.build()


if __name__ == "__main__":
    import tyro

    from weft.launch.minify import main

    tyro.cli(main, args=[__file__, *sys.argv[1:]])
'''


def functional(op: OpOverload, *writes: str) -> Functionalized:
    """``op`` without its writes to the arguments named ``writes``, whose new values it returns after its results."""
    return Functionalized(op, writes)


class Builder:
    """Makes a StepGraph node by node; fakes of the results are computed on the way.

    Args:
        device: of all tensors that are not said to be on the CPU.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        kind = torch.device(device)
        self.device = torch.device(kind.type, 0) if kind.type == "cuda" and kind.index is None else kind
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._graph = torch.fx.Graph()
        self._inputs: list[Input] = []
        self._outputs: list[Output] = []
        self._results: list[Node] = []

    def tensor(
        self,
        name: str,
        dtype: torch.dtype,
        sizes: Sequence[int],
        strides: Sequence[int],
        role: str = "batch",
        *,
        on_cpu: bool = False,
    ) -> Node:
        """An input: a tensor of a layout, and what it is to the training run (a value of :class:`Role`)."""
        device = torch.device("cpu") if on_cpu else self.device
        with self._mode:
            return self._input(name, torch.empty_strided(sizes, strides, dtype=dtype, device=device), Role(role))

    def number(self, name: str, value: float) -> Node:
        """An input: a number."""
        return self._input(name, value, Role.SCALAR)

    def _input(self, name: str, val: Any, role: Role) -> Node:
        last = next(reversed(self._graph.find_nodes(op="placeholder")), None)
        with self._graph.inserting_after(last) if last else self._graph.inserting_before():
            node = self._graph.create_node("placeholder", name, name=name)
        node.meta["val"] = val
        self._inputs.append(Input(node.name, role, node.name))
        return node

    def call(
        self,
        name: str,
        target: Target,
        *args: Any,
        strides: Sequence[int] | None = None,
        inplace: OpOverload | None = None,
        **kwargs: Any,
    ) -> Node:
        """A call of an operation.

        Args:
            strides: of the result, where it was written over a tensor that has them.
            inplace: the operation that the step called, where that wrote over its argument.
        """
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda used: used.meta["val"])  # type: ignore
        with self._mode, torch.no_grad():
            val = target(*fake_args, **fake_kwargs)
            if strides is not None:
                val = torch.empty_strided(val.shape, strides, dtype=val.dtype, device=val.device)
        node.meta["val"] = val
        if inplace is not None:
            node.meta["inplace"] = inplace
        return node

    def result(self, node: Node, updates: Node | None = None) -> None:
        """Let the step return ``node``, or make it the new value of the input ``updates``."""
        self._outputs.append(Return(len(self._outputs)) if updates is None else Update(updates.name))
        self._results.append(node)

    def build(self) -> StepGraph:
        """The graph.

        Raises:
            MalformedGraph: it is none.
        """
        self._graph.output(tuple(self._results))
        return StepGraph(self._graph, self._inputs, self._outputs).check()


def save(step: StepGraph, path: str | Path) -> None:
    """Write ``step`` as a Python file."""
    Path(path).write_text(_FILE.format(name=Path(path).name, body=body(step, units(step))))


def load(path: str | Path, device: str | torch.device = "cpu") -> StepGraph:
    """The graph of a file that :func:`save` wrote. The file is a program and is run: read it first.

    Args:
        device: where its tensors are to be.

    Raises:
        NotASavedGraph: there is no such file, or it is another program.
        UnknownOption: there is no such device here.
    """
    kinds: list[object] = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if str(device).partition(":")[0] not in kinds:
        raise UnknownOption("device", str(device), kinds)
    try:
        build = runpy.run_path(str(path))["build"]
    except KeyError:
        raise NotASavedGraph(path, "it defines no function build") from None
    except OSError as error:
        raise NotASavedGraph(path, error.strerror or type(error).__name__) from error
    except (Exception, SystemExit) as error:  # whatever another program does
        raise NotASavedGraph(path, f"running it raises {type(error).__name__}: {error}") from error
    return build(device)


def part(step: StepGraph, kept: Collection[Node]) -> StepGraph:
    """The calls ``kept`` (of :func:`units`) as a step: what they read is an input, what others read of them a
    result."""
    names = {"torch": torch, "aten": torch.ops.aten, "prims": torch.ops.prims, "functional": functional, **_MODULES}
    builder = Builder(_device(step))
    lines = "\n".join(line.removeprefix("    ") for line in body(step, kept).splitlines())
    exec(lines, {**names, "step": builder})
    return builder.build()


# ---- which calls


def units(step: StepGraph) -> list[Node]:
    """The calls that can be made again elsewhere, in order. An element of a result belongs to the call that made it."""
    return [node for node in step.graph.nodes if node.op == "call_function" and _repeatable(node)]


def _repeatable(node: Node) -> bool:
    target = operation_of(node.target)
    if not isinstance(target, OpOverload):
        return _module(target) is not None and not _is_element(node)
    # Random numbers and uninitialised memory are other values in another process, so they become inputs.
    unknown = torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name
    return target.namespace in _NAMESPACES and not unknown and not node.meta.get("effect")


def _is_element(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], Node)


def _module(target: Any) -> str | None:
    """The module that has a function of Python's under its name."""
    name = getattr(target, "__name__", "")
    return next((module for module, held in _MODULES.items() if getattr(held, name, None) is target), None)


# ---- their text


def body(step: StepGraph, kept: Collection[Node]) -> str:
    """The statements that make the calls ``kept``, indented."""
    return "\n".join(f"    {line}" for line in _ReproWriter(step, set(kept)).lines())


class _ReproWriter:
    def __init__(self, step: StepGraph, kept: set[Node]) -> None:
        self.step = step
        self.kept = kept
        for node in step.graph.nodes:
            if _is_element(node) and node.args[0] in self.kept:
                self.kept.add(node)
        self.device = _device(step)

    def lines(self) -> Iterator[str]:
        roles = {entry.name: entry.role for entry in self.step.inputs}
        for node in self.step.graph.nodes:
            if node in self.kept:
                yield from self._call(node)
            elif any(user in self.kept for user in node.users):
                yield f"{_variable(node)} = {self._input(node, roles.get(node.name, Role.BATCH))}"
        updated = {node: entry.name for entry, node in self.step.updates()}
        for node in self.step.graph.nodes:
            if node in self.kept and any(user not in self.kept for user in node.users) and _is_value(node):
                yield from self._result(node, updated.get(node))

    def _result(self, node: Node, updates: str | None) -> Iterator[str]:
        place = next((n for n in self.step.placeholders if n.name == updates), None)
        reads = place is not None and any(user in self.kept for user in place.users)
        yield f"step.result({_variable(node)}{f', updates={_variable(place)}' if place is not None and reads else ''})"

    def _input(self, node: Node, role: Role) -> str:
        return self._made(node.name, node.meta["val"], role)

    def _made(self, name: str, val: Any, role: Role) -> str:
        if isinstance(val, (list, tuple)):
            return f"[{', '.join(self._made(f'{name}_{at}', item, role) for at, item in enumerate(val))}]"
        if isinstance(val, torch.Tensor):
            where = ", on_cpu=True" if val.device != self.device else ""
            layout = f"{val.dtype}, {_numbers(val.shape)}, {_numbers(val.stride())}"
            return f'step.tensor("{name}", {layout}, "{role.value}"{where})'
        return f'step.number("{name}", {known(val)!r})'

    def _call(self, node: Node) -> Iterator[str]:
        words = [f'"{node.name}"', self._target(node.target)]
        words += [self._word(arg) for arg in node.args]
        words += [f"{name}={self._word(value)}" for name, value in node.kwargs.items()]
        inplace = node.meta.get("inplace")
        if isinstance(inplace, OpOverload):
            val = node.meta["val"]
            words += [f"strides={_numbers(val.stride())}"] if isinstance(val, torch.Tensor) else []
            words.append(f"inplace={inplace}")
        line = source_line(node)
        remark = f"  # {printable(line)}" if line else ""
        yield f"{_variable(node)} = step.call({', '.join(words)}){remark}"

    def _target(self, target: Any) -> str:
        if isinstance(target, Functionalized):
            return f"functional({', '.join([str(target.op), *map(repr, target.writes)])})"
        return str(target) if isinstance(target, OpOverload) else f"{_module(target)}.{target.__name__}"

    def _word(self, value: Any) -> str:
        if isinstance(value, Node):
            return _variable(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._word, value))}]"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._word, (value.start, value.stop, value.step)))})"
        if isinstance(value, torch.device):
            return "step.device" if value == self.device else repr(str(value))
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        number = known(value)
        return f"float('{number}')" if isinstance(number, float) and not math.isfinite(number) else repr(number)


def _variable(node: Node) -> str:
    return f"{node.name}_" if node.name in _TAKEN else node.name


def _is_value(node: Node) -> bool:
    return not isinstance(node.meta["val"], (list, tuple))


def _numbers(values: Sequence[Any]) -> str:
    return str([known(value) for value in values])


def known(value: Any) -> Any:
    """The number that a symbol had in the captured call; 1 where that had none."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def _device(step: StepGraph) -> torch.device:
    vals = (node.meta.get("val") for node in step.graph.nodes)
    devices = [val.device for val in vals if isinstance(val, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
