"""A compiled step as one Python file that imports only torch and triton, for reading, profiling and editing.

The file holds each kernel with the user's lines it came from, a function per kernel that allocates its outputs (or
takes them as ``out``) and launches it, and the calls in order. Run as a script it runs once on tensors of zeros,
where it communicates under torchrun on as many ranks as it was captured for.
Operations over lists of tensors and weft's own functions import weft. Calls of opaque functions, such as logging, are
left out: they give the step nothing. The head of the file names what is left out, the user's own operations, which the
reader has to register, and Python objects that exist only in the compiling process, which raise when called.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch

from weft import torch_adapter, triton_adapter
from weft.capture.graph import StepGraph
from weft.capture.record.assignment_problems import ASSIGNMENT_OPERATIONS
from weft.capture.record.opaque import OpaqueCall
from weft.capture.record.taped_ops import TAPED_OPERATIONS
from weft.capture.segments import branch
from weft.capture.user_code import printable
from weft.inductor.codegen.canonical import symbol
from weft.inductor.codegen.kernel_call import KernelCall, expression_text
from weft.inductor.graph.repro import known
from weft.inductor.graph.serialize import OPERATION_NAMESPACES
from weft.inductor.lowering.lower import device_kind
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.memory_plan import new_arena, part, plan_memory
from weft.inductor.runtime.multi_tensor import Launcher
from weft.inductor.runtime.placement import place
from weft.inductor.runtime.writer import write_program
from weft.torch_adapter import OpOverload

_MODULES = {"operator": operator, "math": math}
# The modules that register operations of weft's own, by the operations' names; the others are in `distributed/ops.py`.
_REGISTERED_BY = {
    **dict.fromkeys(TAPED_OPERATIONS, "weft.capture.record.taped_ops"),
    **dict.fromkeys(ASSIGNMENT_OPERATIONS, "weft.capture.record.assignment_problems"),
}
_OF_ARENAS = (new_arena, part)

_HEAD = '''"""A step compiled by weft: {kernels}, {calls}. Runs {where} with torch{also}.{notes}"""

from __future__ import annotations

import math
import operator
import re

import torch
'''

_TRITON = """import triton
import triton.language as tl
"""

_STAGES_OF_TRITON = """

# As in a compiled step, packed 16-bit integer operations are replaced, because ptxas compiles some of them wrongly.
# This needs a separate cache directory: cache keys of Triton 3.6 do not include the hook.
triton.knobs.runtime.add_stages_inspection_hook = replace_packed_integers
triton.knobs.cache.dir = f"{triton.knobs.cache.dir}/weft"
"""

_LEFT_OUT = '''

def left_out(what):
    """Stands for a call that the step makes and that gives it nothing."""
    return lambda *operands, **settings: None
'''

_ELSEWHERE = '''

def elsewhere(what):
    """Stands for an object that exists only in the process that compiled the step."""

    def call(*args, **kwargs):
        raise RuntimeError(f"{what} is not part of this file")

    return call
'''

_CONNECT = '''

def connect(world, groups):
    """Start the process group that torchrun describes, and make the groups of the step under the names it calls them.

    ``groups``: by name the ranks of the group that the process which wrote this file was in. The other ranks have the
    same group, moved by as many ranks as they are apart.
    """
    import os

    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    if int(os.environ.get("WORLD_SIZE", 1)) != world:
        raise SystemExit(f"{{__file__}} communicates: run it with torchrun --nproc-per-node {{world}}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    made = {{}}
    for name, ranks in groups.items():
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        span, parts = stride * len(ranks), {{}}
        for rank in range(world):
            parts.setdefault((rank // span, rank % stride), []).append(rank)
        made[name], _ = dist.new_subgroups_by_enumeration(list(parts.values()))
    for group in (dist.group.WORLD, *made.values()):
        _unregister_process_group(group.group_name)  # the step may call another group so
    for name, group in made.items():
        _register_process_group(name, group)
'''.replace("{{", "{").replace("}}", "}")

_IN_PLACE = '''

def in_place(operation, updated):
    """The operation, with its new values copied into the arguments at positions ``updated``."""

    def call(*args):
        *fresh, = operation(*args)
        new = [fresh.pop() for _ in updated][::-1]
        for at, values in zip(updated, new):
            for old, value in zip(args[at], values):
                old.copy_(value)
        return fresh

    return call
'''

_INTO = '''

def into(operation):
    """The operation, with its results copied into the tensors of ``out``."""

    def call(*args, out=None):
        results = operation(*args)
        for targets, values in zip(out or [], results):
            values[:] = [value if target is None else target.copy_(value) for target, value in zip(targets, values)]
        return results

    return call
'''

_UNPAD_SHARD = '''

def unpad_shard(rank_in):
    """``weft::unpad_shard`` of the rank that wrote this file, which was number ``rank_in[group]`` of each group.

    All ranks run that rank's program, on tensors of its sizes. Where shards are uneven, their own would be shorter.
    """

    def call(padded, size, group, dtype):
        rows = padded.shape[0]
        length = min(max(size - rank_in[group] * rows, 0), rows)
        return padded[:length].to(dtype, copy=True, memory_format=torch.contiguous_format)

    return call
'''


def program_file(step: StepGraph, planned: bool = False) -> str:
    """The text of the file for ``step``, a graph after the kernel passes.

    Args:
        step: the graph; its fused loops are calls of generated kernels.
        planned: whether values lie in one planned arena, as in :func:`weft.inductor.runtime.aten.compile_aten`.

    Raises:
        MalformedGraph: the graph has a node or an update that no program can run.
    """
    placement = place(step)
    plan = plan_memory(step, placement) if planned else None
    source, names, _ = write_program(step, placement, None, plan)
    kernels = {name: value for name, value in names.items() if isinstance(value, KernelCall)}
    groups, run = _groups(step)
    bound = list(_bound(names, groups))
    needed = ["what works on lists of tensors"] * bool(_lists(names)) + ["its own operations"] * bool(
        _modules_of_own_operations(bound)
    )
    needed += ["its own functions"] * any(_importable(value) for value in names.values())
    also = " and triton" * bool(kernels) + (f", and weft for {' and '.join(needed)}" if needed else "")
    where = "on a GPU" if _on_gpu(step) else "on a CPU"
    notes = [note for note in (run, *_not_here(names)) if note]
    head = "".join(f"\n\n{_docstring_line(note)}" for note in notes) + "\n" * bool(notes)
    parts = [
        _HEAD.format(
            kernels=_many(len(kernels), "kernel"),
            calls=_many(len(names) - len(kernels) - 1, "other call"),
            also=also,
            notes=head,
            where=where,
        )
    ]
    if kernels:
        pattern = triton_adapter.PACKED_INTEGERS.pattern
        parts += [_TRITON, f"\nPACKED_INTEGERS = re.compile({pattern!r}, re.MULTILINE)\n"]
        parts += [f"\n\n{inspect.getsource(function)}" for function in triton_adapter.STAGE_FUNCTIONS]
        parts += [_STAGES_OF_TRITON]
    if modules := _modules_of_own_operations(bound):
        parts.append("\n" + "".join(f"import {module}  # torch.ops.weft\n" for module in modules))
    if groups:
        parts.append(_CONNECT)
    helpers = (_IN_PLACE, _INTO, _LEFT_OUT, _ELSEWHERE, _UNPAD_SHARD)
    parts += [text for text in helpers if any(re.search(rf"\b{_name(text)}\(", line) for line in bound)]
    parts += [f"\n\n{inspect.getsource(value)}" for value in names.values() if value in _OF_ARENAS]
    parts += [f"\n\n{function}\n" for function in _functions(kernels.values())]
    parts += [f"\n\n{_launch(name, call)}" for name, call in kernels.items()]
    parts += ["\n\n", *(f"{line}\n" for line in bound), f"\n\n{source}", f"\n\n{_script(step, groups)}"]
    return "".join(parts)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _name(text: str) -> str:
    """The name of the function that ``text`` defines."""
    return text.split("def ", 1)[1].split("(", 1)[0]


# ---- kernels


def _functions(calls: Iterable[KernelCall]) -> list[str]:
    """The distinct Triton functions of all kernels: equal layers share one."""
    functions_seen: dict[str, None] = {}
    for call in calls:
        _, *functions = call.generated.source.text.split("@triton.jit\n")
        functions_seen |= dict.fromkeys(f"@triton.jit\n{function.rstrip()}" for function in functions)
    return list(functions_seen)


def _launch(name: str, call: KernelCall) -> str:
    """A function that allocates the outputs of a kernel and launches it."""
    kernel, source = call.generated, call.generated.source
    names_of = {buffer: _variable(buffer) for buffer in kernel.buffers}
    parameters = [names_of[buffer] for buffer in (*(b.name for b in call.inputs), *call.continued)]
    lines = [f"def {name}({', '.join([*parameters, *map(str, call.symbols), 'out=None'])}):"]
    lines += ['    """', *(f"    {_docstring_line(str(origin))}" for origin in call.origins), '    """']
    for at, buffer in enumerate(call.outputs):
        if buffer.name not in call.continued:
            layout = f"{expression_text(buffer.sizes)}, {expression_text(buffer.strides)}, dtype={buffer.dtype}"
            lines.append(f"    {names_of[buffer.name]} = out[{at}] if out else None")
            lines.append(f"    if {names_of[buffer.name]} is None:")
            lines.append(f'        {names_of[buffer.name]} = torch.empty_strided({layout}, device="{buffer.device}")')
    symbols = {symbol(at): scalar.expression for at, scalar in enumerate(kernel.scalars)}
    sizes = [(size.xreplace(symbols) if isinstance(size, sympy.Expr) else size, block) for size, block in kernel.blocks]
    programs = [f"triton.cdiv({expression_text(size)}, {block})" for size, block in sizes]
    arguments = [*names_of.values(), *(expression_text(scalar.expression) for scalar in kernel.scalars)]
    arguments += [f"{constant}={value!r}" for constant, value in source.constants.items()]
    arguments += [f"num_warps={source.num_warps}", f"num_stages={source.num_stages}"]
    lines.append(f"    {source.name}[({' * '.join(programs) or '1'},)]({', '.join(arguments)})")
    lines.append(f"    return [{', '.join(names_of[buffer.name] for buffer in call.outputs)}]")
    return "\n".join(lines) + "\n"


def _docstring_line(text: str) -> str:
    """``text`` as a line of a docstring between triple quotes: no character of it ends the string or is an escape."""
    return printable(text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"'))


def _variable(buffer: str) -> str:
    """A variable for a buffer in the function that launches a kernel, apart from the names which that function uses."""
    word = re.sub(r"\W", "_", buffer)
    return f"{word}_" if word in ("out", "torch", "triton") else word


# ---- other names


def _bound(names: dict[str, Any], groups: Iterable[str]) -> Iterator[str]:
    """The statements that define the global names of a program, which makes the process groups ``groups``."""
    rank_in = {group: torch_adapter.group_rank(group) for group in groups}
    for kind in sorted({type(call) for call in _lists(names)}, key=str):
        yield f"from {kind.__module__} import {kind.__name__}"
    for name, value in names.items():
        if value in _OF_ARENAS:
            if name != value.__name__:  # the name was taken by an input
                yield f"{name} = {value.__name__}"
        elif rank_in and value is torch.ops.weft.unpad_shard.default:
            yield f"{name} = unpad_shard({rank_in})"
        elif _importable(value):
            yield f"from {value.__module__} import {value.__name__} as {name}"
        elif value is not torch and not isinstance(value, KernelCall):
            yield f"{name} = {_expression(value)}"


def _expression(value: Any) -> str:
    if isinstance(value, OpOverload):
        return f"torch.ops.{value}"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, MultiTensor):
        return repr(value)
    if isinstance(value, Launcher):
        updated = [at for at, _ in value.effects.writes]
        return (
            f"in_place({value.effects.functional!r}, {updated})" if updated else f"into({value.effects.functional!r})"
        )
    name = _python_name(value)
    if _is_left_out(value):
        return f"left_out({name!r})"
    module = next((word for word, module in _MODULES.items() if getattr(module, name, None) is value), None)
    return f"{module}.{name}" if module else f"elsewhere({name!r})"


def _python_name(value: Any) -> str:
    """What the head of the file and errors call ``value``."""
    if isinstance(value, OpaqueCall):
        value = value.function
    return getattr(value, "__name__", "") or type(value).__name__


def _is_left_out(value: Any) -> bool:
    """Whether the file does without ``value``: opaque functions, and checks that a branch goes the way of the graph."""
    return isinstance(value, OpaqueCall) or value is branch


def _importable(value: Any) -> bool:
    """Whether ``value`` is a function of weft that any process can import."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__name__", "")
    if value is branch or value in _OF_ARENAS or not module.startswith("weft."):
        return False
    return getattr(sys.modules.get(module), name, None) is value


def _not_here(names: dict[str, Any]) -> list[str]:
    """What the head of the file says about what it leaves out, and what it cannot run without."""
    values = list(names.values())
    opaque = dict.fromkeys(_python_name(value) for value in values if isinstance(value, OpaqueCall))
    own = dict.fromkeys(f"{v.namespace}::{v._schema.name.partition('::')[2]}" for v in values if _is_custom(v))
    gone = dict.fromkeys(_python_name(v) for v in values if _expression_kind(v) == "elsewhere")
    said = [f"Calls of opaque functions are left out: {', '.join(opaque)}."] * bool(opaque)
    said += ["It follows one way of each branch on a value."] * (branch in values)
    said += [f"Import what registers these operations before running it: {', '.join(own)}."] * bool(own)
    said += [f"These objects of the compiling process are missing, and raise when called: {', '.join(gone)}."] * bool(
        gone
    )
    return said


def _is_custom(value: Any) -> bool:
    return isinstance(value, OpOverload) and value.namespace not in OPERATION_NAMESPACES


def _expression_kind(value: Any) -> str:
    """The helper that an expression for ``value`` calls, or its text up to the first bracket."""
    if value is torch or isinstance(value, KernelCall) or value in _OF_ARENAS or _importable(value):
        return ""
    return _expression(value).partition("(")[0]


def _lists(names: dict[str, Any]) -> list[MultiTensor]:
    """The multi-tensor operations among the values."""
    calls = [value.effects.functional if isinstance(value, Launcher) else value for value in names.values()]
    return [call for call in calls if isinstance(call, MultiTensor)]


# ---- running it


def _groups(step: StepGraph) -> tuple[dict[str, tuple[int, ...]], str]:
    """The process groups of the step by the names that torch has for them, each with its ranks, and what the head of
    the file says about them. No groups where the file cannot make them."""
    if not step.groups:
        return {}, ""
    world = torch_adapter.world_size()
    try:
        groups = {name: torch_adapter.group_ranks(name) for name in step.groups.values()}
    except RuntimeError:
        return (
            {},
            "It communicates over process groups that were gone when it was written: call run() in them.",
        )
    if not all(_is_regular(ranks, world) for ranks in groups.values()):
        return {}, "It communicates over groups of ranks that no mesh has: call run() where they are."
    return groups, f"It communicates: torchrun --nproc-per-node {world} this file. On several hosts add --nnodes."


def _is_regular(ranks: tuple[int, ...], world: int) -> bool:
    """Whether groups like this one, moved, are all ranks: those of a dimension of a mesh."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    first = ranks[0]
    aligned = first % (stride * len(ranks)) < stride if stride > 0 else False
    evenly = ranks == tuple(range(first, first + stride * len(ranks), stride)) if aligned else False
    return evenly and world % (stride * len(ranks)) == 0


def _modules_of_own_operations(bound: Iterable[str]) -> list[str]:
    """The modules that register the operations of weft's own among these names."""
    names = [line.partition("torch.ops.weft.")[2].partition(".")[0] for line in bound if "torch.ops.weft." in line]
    return sorted({_REGISTERED_BY.get(name, "weft.distributed.ops") for name in names})


def _script(step: StepGraph, groups: dict[str, tuple[int, ...]]) -> str:
    lines = ['if __name__ == "__main__":']
    if _on_gpu(step):
        what = 'f"{__file__} runs on a GPU, and torch finds none here"'
        lines += ["    if not torch.cuda.is_available():", f"        raise SystemExit({what})"]
    lines += [f"    connect({torch_adapter.world_size()}, {groups})"] if groups else []
    lines += ["    run(", "        ["]
    for entry, node in zip(step.inputs, step.placeholders, strict=True):
        lines.append(f"            {_zeros(node.meta['val'])},  # {entry.role.value} {printable(entry.path)}")
    lines += ["        ]", "    )"] + ["    torch.distributed.destroy_process_group()"] * bool(groups)
    return "\n".join(lines) + "\n"


def _on_gpu(step: StepGraph) -> bool:
    return device_kind(step.graph.nodes) != "cpu"


def _zeros(val: Any) -> str:
    if not isinstance(val, torch.Tensor):
        return repr(known(val))
    sizes, strides = ([known(n) for n in numbers] for numbers in (val.shape, val.stride()))
    return f'torch.empty_strided({sizes}, {strides}, dtype={val.dtype}, device="{val.device}").zero_()'
