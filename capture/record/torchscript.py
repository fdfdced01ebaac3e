"""Functions and modules compiled by ``torch.jit.script`` and ``torch.jit.trace``, while a step is captured.

A scripted function is captured as it was written: its Python function runs in its place.

A scripted module, and a function that was traced or loaded from a file, have a graph of TorchScript's and no Python.
TorchScript's interpreter runs that graph. It calls the dispatcher for each operation, so the recorder sees operations
and autograd alike. What must not run is TorchScript's *profiling executor*: it specialises graphs to the tensors that
it is called with, fuses them by a compiler of its own, and takes gradients by formulas of its own (of ``tanh``,
``pow``, ``softplus``) from the second call on. On fake tensors it goes wrong, and the user's module would remember
them. So each call of a capture interprets a copy of the graph, which has an executor of its own, with optimizations
off in this thread.

That says what a captured step computes: the operations of the graph as it is, with autograd's gradients. Eager
computes the same at the first call, and at every call under ``torch.jit.optimized_execution(False)``. Its later calls
differ from these in the last bits.

An exception of Python's does not get through the interpreter, which makes a text of it. :class:`_InterpreterMode`
keeps it, and it is raised again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter, torchscript_adapter
from weft.capture.record.literals import LIFTS
from weft.capture.record.operands import tensors_in
from weft.capture.record.recorder import OpRecorder
from weft.capture.user_code import user_line
from weft.errors import ScriptedModule
from weft.thread_patches import present, replaced
from weft.torch_adapter import OpOverload, TorchDispatchMode

# What runs outside of this thread, or is code that a walk over a graph does not see.
_REFUSED = {
    "prim::fork": "torch.jit.fork, which runs in another thread",
    "prim::awaitable": "an awaitable",
    "prim::Print": "print()",
    "prim::tolist": "tolist()",
    "prim::PythonOp": "Python code, by torch.jit.ignore",
    "prim::CallMethod": "a method of an interface or of a class of C++",
    "prim::CallFunction": "a function that is not known before it runs",
    "aten::backward": "backward() inside of TorchScript",
    "aten::grad": "torch.autograd.grad inside of TorchScript",
}
_FAILED = (
    "TorchScript's interpreter failed, as it does where it wants the value of a tensor as a plain number or as text"
)


class _InterpreterMode(TorchDispatchMode):
    """Active while TorchScript's interpreter runs a graph, above the recorder.

    Args:
        known: ids of the tensors that are arguments, parameters, buffers or attributes.

    Attributes:
        error: the last exception that an operation raised.
    """

    def __init__(self, recorder: OpRecorder, known: frozenset[int]) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._recorder, self._known = recorder, known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            kwargs = kwargs or {}
            if func not in LIFTS and not func._schema.is_mutable and self._are_sizes(tensors_in((args, kwargs))):
                with self._recorder.paused():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise

    def _are_sizes(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors are numbers that the graph knows: a trace keeps sizes in tensors without dimensions."""
        return bool(tensors) and all(
            not isinstance(each, FakeTensor)
            and not each.dim()
            and each.device.type == "cpu"
            and not each.requires_grad
            and id(each) not in self._known
            for each in tensors
        )


@contextlib.contextmanager
def scripts_interpreted(recorder: OpRecorder) -> Iterator[None]:
    """While active, a call of a scripted function runs the Python function that it was compiled from, and a call of
    any other graph of TorchScript's is interpreted operation by operation.

    Raises:
        ScriptedModule: inside, where a graph does what a capture cannot see.
    """
    kind: Any = torch.jit.ScriptFunction
    method: Any = torch.ScriptMethod  # type: ignore[attr-defined]
    functions, methods = present(kind, "__call__"), present(method, "__call__")
    interpret = functools.partial(_interpreted, recorder, functions)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = torchscript_adapter.scripted_from(function)
        if source is not None:
            return source(*args, **kwargs)
        return interpret(functions, function, (), args, kwargs)

    def call_method(function: Any, *args: Any, **kwargs: Any) -> Any:
        return interpret(methods, function, (function.owner,), args, kwargs)

    with replaced(kind, "__call__", call), replaced(method, "__call__", call_method):
        yield


def _interpreted(
    recorder: OpRecorder,
    run: Callable[..., Any],
    compiled: Callable[..., Any],
    function: Any,
    owner: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A call of a graph of TorchScript's, operation by operation.

    Args:
        run: runs a scripted function.
        compiled: runs ``function`` as eager would.
        owner: the module of C++ that a method belongs to; nothing of a function.

    Raises:
        ScriptedModule: the graph does what a capture cannot follow.
    """
    bound = torchscript_adapter.bound_to_schema(function.schema, (*owner, *args), kwargs)
    if bound is None:
        return compiled(function, *args, **kwargs)  # which says what is wrong with the arguments
    graph = torchscript_adapter.inlined_script(function)
    name = f"module {owner[0]._type().name()}" if owner else "function"
    _prepare(graph, name)
    modules = [each for module in owner for each in torchscript_adapter.scripted_modules(module)]
    known = [*tensors_in((args, kwargs)), *(each for module, _ in modules for each in _tensors_of(module))]
    values = _values_of(modules)
    mode = _InterpreterMode(recorder, frozenset(map(id, known)))
    try:
        with mode, torchscript_adapter.unoptimised_scripts():
            result = run(torchscript_adapter.script_function(function.name, graph), *bound)
    except BaseException as error:
        if mode.error is not None:
            raise mode.error from None
        if type(error) is RuntimeError:
            raise ScriptedModule(name, user_line(), _FAILED, torchscript_adapter.failed_script_line(error)) from error
        raise  # of the script: torch.jit.Error
    changed = [path for path, value in _values_of(modules).items() if value != values[path]]
    if changed:
        raise ScriptedModule(name, user_line(), f"it changes {changed[0]}, which is no tensor")
    return result


def _prepare(graph: Any, name: str) -> None:
    """Refuse what the recorder would not see, and let it see tensors that are made of numbers."""
    for node in torchscript_adapter.script_nodes(graph):
        what = _REFUSED.get(node.kind())
        if what is None and (attribute := torchscript_adapter.unfollowed_attribute(node)) is not None:
            what = f"the attribute {attribute}, which holds objects"
        if what is not None:
            raise ScriptedModule(name, user_line(), f"it has {what}", torchscript_adapter.script_line(node))
    if (node := torchscript_adapter.lift_literals(graph)) is not None:
        why = "it makes a tensor of a list of numbers that are no constants, or one of numbers that requires grad"
        raise ScriptedModule(name, user_line(), why, torchscript_adapter.script_line(node))


def _tensors_of(module: Any) -> list[torch.Tensor]:
    attributes = torchscript_adapter.ScriptAttributes.of(module)
    found = [module.getattr(each) for each in (*attributes.parameters, *attributes.tensors)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _values_of(modules: list[tuple[Any, str]]) -> dict[str, Any]:
    """The attributes of modules that are no tensors; those in lists by their ids."""
    read = lambda value: id(value) if isinstance(value, torch.Tensor) else repr(value)
    return {
        f"{path}.{name}": torch_adapter.tree_map(read, module.getattr(name))
        for module, path in modules
        for name in torchscript_adapter.ScriptAttributes.of(module).values
    }
