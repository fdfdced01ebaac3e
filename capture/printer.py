"""Prints a StepGraph as readable Python: typed inputs, one line per node, the user's lines as comments.

The text parses as Python, but it is for reading and not for running. Names of operations are short (``aten.mm``), and
types are written as ``f32[4, 16]``.
"""

from __future__ import annotations

import ast
import linecache
import operator
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from weft.capture.node_kinds import group_of, is_collective
from weft.capture.sizes_in_bytes import collective_bytes, format_bytes, tensor_bytes
from weft.capture.step_interface import Input, Return, Update
from weft.capture.user_code import Frame, shown_file

if TYPE_CHECKING:
    from weft.capture.graph import StepGraph

_WIDTH = 120
_MANY = 4
_SPACE = "\0"  # stands for a space inside a string, where a line must not break
_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_OPERATORS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
}


def print_graph(step: StepGraph) -> str:
    """The text of ``step``: a header with counts, a function with one argument per input, its nodes and its outputs.

    A comment after an empty line marks where the user's line, the module or the stage changes. The bytes of a
    collective are those of its larger side.
    """
    lines = [*_header(step), "def step("]
    for entry, node in zip(step.inputs, step.placeholders, strict=True):
        lines.append(f"    {node.name}: {annotation(node.meta['val'])},  # {_described(entry)}")
    lines += [") -> tuple:", *_body(step), *_results(step)]
    return "\n".join(lines).replace(_SPACE, " ")


def annotation(val: Any) -> str:
    """``f32[4, 16]`` for a tensor, the Python type of a number, a bracketed list of either; "" where nothing
    is known."""
    if isinstance(val, torch.Tensor):
        return f"{_dtype(val.dtype)}[{', '.join(str(size) for size in val.shape) or '()'}]"
    if isinstance(val, (list, tuple)):
        shown = [annotation(item) for item in val]
        if len(shown) > _MANY:
            shown = [shown[0], "...", shown[-1]]
        return f"[{', '.join(shown)}]"
    for kinds, name in (
        ((torch.SymBool, bool), "bool"),
        ((torch.SymInt, int), "int"),
        ((torch.SymFloat, float), "float"),
    ):
        if isinstance(val, kinds):
            return name
    return "" if val is None else type(val).__name__


def operation(target: Any) -> str:
    """``aten.mm`` or ``aten.sum.dim_IntList`` for an operation, the name of any other function."""
    if hasattr(target, "_schema"):
        return str(target).removesuffix(".default")
    return re.sub(r"\W", "_", getattr(target, "__name__", type(target).__name__))


def place(frame: Frame) -> str:
    """``train.py:12 in step``, relative to the working directory where the file lies below it."""
    path = os.path.relpath(frame.filename) if os.path.isabs(frame.filename) else frame.filename
    return f"{shown_file(frame.filename) if path.startswith('..') else path}:{frame.lineno} in {frame.name}"


def _header(step: StepGraph) -> Iterator[str]:
    kinds = Counter(operation(node.target) for node in step.collectives())
    size = sum(tensor_bytes(node.meta["val"]) or 0 for node in step.placeholders)
    inputs = f"{len(step.inputs)} inputs of {format_bytes(size)}"
    yield f"# {len(step)} nodes, {inputs}, {len(step.outputs)} outputs"
    for kind, count in sorted(kinds.items()):
        yield f"# {count} {kind}"


def _described(entry: Input) -> str:
    return f"{entry.role.value} {entry.path}" + (f": {entry.sharding}" if entry.sharding else "")


def _body(step: StepGraph) -> Iterator[str]:
    before: tuple[Any, ...] | None = None
    for node in step.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        frames = node.meta.get("frames", ())
        here = node.meta.get("stage", ""), node.meta.get("module", ""), frames[0] if frames else None
        if here != before:
            yield ""
            yield f"    # {_origin(*here)}"
            before = here
        yield from _statement(node)


def _origin(stage: str, module: str, frame: Frame | None) -> str:
    words = [stage, module] if module else [stage]
    if frame is not None:
        source = linecache.getline(frame.filename, frame.lineno).strip()
        words.append(f"{place(frame)}: {source}" if source else place(frame))
    return " | ".join(word for word in words if word) or "no line of yours"


def _statement(node: torch.fx.Node) -> Iterator[str]:
    kind = annotation(node.meta.get("val"))
    makes = f"{node.name}: {kind} = " if kind else f"{node.name} = " if node.users else ""
    notes = [_communicated(node)] if is_collective(node) else []
    if node.meta.get("stream"):
        notes.append(f"on stream {node.meta['stream']}")
    yield from _wrapped(makes, _call(node), f"  # {', '.join(notes)}" if notes else "")


def _communicated(node: torch.fx.Node) -> str:
    size = collective_bytes(node)
    return f"over {group_of(node)}, {'as many bytes as the data says' if size is None else format_bytes(size)}"


def _call(node: torch.fx.Node) -> str:
    args = [_word(arg) for arg in node.args]
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if node.target in _OPERATORS and len(args) == 2:
        left = f"({args[0]})" if args[0].startswith("-") else args[0]
        return f"{left} {_OPERATORS[node.target]} {args[1]}"
    named = [f"{key}={_word(value)}" for key, value in node.kwargs.items()]
    return f"{operation(node.target)}({', '.join(args + named)})"


def _word(value: Any) -> str:
    """``value`` as text that parses as an expression."""
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_word(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_word(item)}' for key, item in value.items())}}}"
    text = str(value) if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) else repr(value)
    if value is None or isinstance(value, (bool, int, float)):
        return text
    if isinstance(value, str):
        return text.replace(" ", _SPACE)
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        text = repr(text)
    return text.replace(" ", _SPACE) if text[0] in "'\"" else text


def _results(step: StepGraph) -> Iterator[str]:
    paths = {entry.name: entry.path for entry in step.inputs}
    yield ""
    if not step.outputs:
        yield "    return ()"
        return
    yield "    return ("
    for what, value in zip(step.outputs, step.results, strict=True):
        if isinstance(what, Update):
            meaning = f"new value of {paths[what.input]}"
        else:
            meaning = "returned by the step" if isinstance(what, Return) else f"put at {what.path}"
        yield f"        {_word(value)},  # {meaning}"
    yield "    )"


def _wrapped(makes: str, call: str, note: str) -> Iterator[str]:
    """One statement, on one line, or with its arguments broken at spaces where the line is too long."""
    line = f"    {makes}{call}"
    if len(line) <= _WIDTH or "(" not in call:
        yield line + note
        return
    head, _, rest = call.partition("(")
    indent = " " * 8
    yield f"    {makes}{head}({note}"
    yield from textwrap.wrap(
        rest[:-1],
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield "    )"


def _dtype(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")
