"""TorchScript's functions, modules and graphs: private names of torch that only a capture of scripted code needs.

See :mod:`weft.torch_adapter`, which has all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

_LITERALS = ("aten::tensor", "aten::as_tensor")  # which its interpreter makes below the dispatcher
_PLAIN_KINDS = frozenset({"IntType", "FloatType", "BoolType", "StringType", "NoneType", "DeviceObjType", "ComplexType"})


def scripted_from(function: Any) -> Callable[..., Any] | None:
    """The Python function that `torch.jit.script` compiled. None where it was loaded from a file, or was traced: what a
    trace computes is not what its function does, for which sizes and branches are open."""
    is_traced = "__qualname__" not in vars(function)
    return None if is_traced else getattr(function, "_torchdynamo_inline", None)


def inlined_script(function: Any) -> Any:
    """A copy of the graph of a scripted function or method, with the graphs of all that it calls."""
    graph = function.graph.copy()
    # Each pass inlines callees as their executors hold them, with calls inside where optimizations are off.
    before, calls = None, _calls_in(graph)
    while calls and calls != before:
        with _disable_current_modes():  # passes compare constants by operations
            torch._C._jit_pass_inline(graph)
        before, calls = calls, _calls_in(graph)
    return graph


def lift_literals(graph: Any) -> Any:
    """Let an inlined script lift the tensors that it makes of numbers, as `torch.tensor` does in Python.

    Returns:
        The first node that makes one that cannot be lifted, None if there is none: of a list in which there are other
        values than constants, since the interpreter would write to the memory of a tensor, which a fake one does not
        have; or one that requires grad, which would be another leaf at each call.
    """
    for node in [each for each in script_nodes(graph) if each.kind() in _LITERALS]:
        made = literal = node.output()
        try:
            dtype, device, *requires_grad = map(_constant, list(node.inputs())[1:])
            if any(requires_grad):
                return node
            if next(node.inputs()).type().kind() == "ListType":
                graph.setInsertPoint(node)
                literal = graph.insertConstant(_constant_tensor(_constant(next(node.inputs())), dtype, device))
        except ValueError:
            return node
        lifted = graph.create("aten::lift_fresh", [literal], 1)
        lifted.insertAfter(node)
        made.replaceAllUsesAfterNodeWith(lifted, lifted.output())
        lifted.output().setType(made.type())
        if literal is not made:
            node.destroy()
    return None


def _constant_tensor(data: Any, dtype: int | None, device: torch.device | None) -> torch.Tensor:
    """A tensor of numbers; the dtype is numbered as C++ does."""
    with _disable_current_modes():
        kind = None if dtype is None else torch.ops.aten.zeros.default([0], dtype=dtype).dtype
        return torch.tensor(data, dtype=kind, device=device)


def _constant(value: Any) -> Any:
    """What a value of a script is; raises ValueError where it is no constant."""
    node = value.node()
    if node.kind() == "prim::ListConstruct":
        return [_constant(each) for each in node.inputs()]
    if node.kind() != "prim::Constant":
        raise ValueError
    return value.toIValue()


def _calls_in(graph: Any) -> list[str]:
    calls = [node for node in script_nodes(graph) if node.kind() in ("prim::CallMethod", "prim::CallFunction")]
    return [f"{node} {node.sourceRange()}" for node in calls]


def script_function(name: str, graph: Any) -> Callable[..., Any]:
    """A function that runs a graph of TorchScript's, with an executor of its own; errors call it `name`."""
    return torch._C._create_function_from_graph(name, graph)


@contextlib.contextmanager
def unoptimised_scripts() -> Iterator[None]:
    """Inside, executors of TorchScript's that were not used yet run graphs as they are, in this thread."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def bound_to_schema(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The arguments of a call of a scripted function in their order, defaults filled in; None where they do not fit."""
    bound = list(args)
    wanted = schema.arguments[len(args) :]
    if len(args) > len(schema.arguments) or not kwargs.keys() <= {each.name for each in wanted}:
        return None
    for each in wanted:
        if each.name not in kwargs and not each.has_default_value():
            return None
        bound.append(kwargs.get(each.name, each.default_value))
    return bound


def script_nodes(block: Any) -> Iterator[Any]:
    """The nodes of a graph of TorchScript's, those inside of branches and loops included."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from script_nodes(inner)


def script_line(node: Any) -> str:
    """The line of the script that a node comes from: `file:line`; "" where it is not known."""
    where = node.sourceRange()
    found = re.search(r'File "(.*)", line (\d+)', where) or re.match(r"(\S+):(\d+):\d+$", where)
    return f"{found[1]}:{found[2]}" if found else ""


def failed_script_line(error: Exception) -> str:
    """The line of the script at which TorchScript's interpreter failed: `file:line`; "" where it is not known."""
    found = re.findall(r'File "(.*)", line (\d+), in .*\n', str(error))
    return ":".join(found[-1]) if found else ""


@dataclasses.dataclass(frozen=True)
class ScriptAttributes:
    """The attributes of a scripted module, by kind: parameters; other tensors, or None; numbers, texts, and lists,
    tuples and dictionaries of all these; all others, which hold objects or lists of lists. Modules are none of them.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, module: Any) -> ScriptAttributes:
        """Those of a scripted module of C++."""
        types = _attribute_types(module._type())
        kinds: dict[str, str] = {name: _script_kind(kind) for name, (kind, _) in types.items()}
        parameters = tuple(name for name, _ in cast(Any, torch._C.ParameterDict(module)).items())
        by_kind = {kind: tuple(name for name, each in kinds.items() if each == kind) for kind in kinds.values()}
        tensors = tuple(name for name in by_kind.get("tensor", ()) if name not in parameters)
        return cls(parameters, tensors, by_kind.get("value", ()), by_kind.get("other", ()))


def scripted_modules(owner: Any, path: str = "self") -> Iterator[tuple[Any, str]]:
    """A scripted module of C++ and those inside it, with their paths."""
    yield owner, path
    for name, inner in cast(Any, torch._C.ModuleDict(owner)).items():
        yield from scripted_modules(inner, f"{path}.{name}")


def python_modules(module: torch.jit.ScriptModule) -> dict[str, Any] | None:
    """The modules inside of a scripted one, as Python knows them."""
    return getattr(module._modules, "_python_modules", None)


def unfollowed_attribute(node: Any) -> str | None:
    """The name of the attribute of a module that a node reads, if it is of the kind `others`."""
    if node.kind() != "prim::GetAttr" or _script_kind(node.output().type()) != "other":
        return None
    try:
        types = _attribute_types(node.input().type())
    except RuntimeError:
        return None  # an attribute of another object: of one that the graph makes, or that it read from a module
    return node.s("name") if node.s("name") in types else None


def _attribute_types(module_type: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each attribute of a type of modules; RuntimeError where it is another type."""
    concrete: Any = torch._C.ConcreteModuleType.from_jit_type(module_type)
    return concrete.get_attributes()


def _script_kind(kind: Any) -> str:
    inner = [_script_kind(each) for each in kind.containedTypes()]
    match kind.kind():
        case "TensorType":
            return "tensor"
        case "OptionalType":
            return inner[0]
        case "ListType" | "TupleType" | "DictType":
            nested = any(each.containedTypes() and each.kind() != "OptionalType" for each in kind.containedTypes())
            return "other" if nested or "other" in inner else "value"
        case name:
            return "value" if name in _PLAIN_KINDS else "other"
