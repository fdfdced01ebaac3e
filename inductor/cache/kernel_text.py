"""Checks that the text of a kernel from a cache file can only compute.

A kernel's text is a Python module. Python executes it once to define the functions, and Triton's interpreter executes
all of it, so a changed file could run any code as this user. The check is an allow-list of what weft generates. It
refuses other imports, defaults, decorators other than ``@triton.jit``, names that are neither local nor listed here,
and attributes that are not listed here.
"""

from __future__ import annotations

import ast
import re

from weft.inductor.codegen.kernel_source import KernelSource

_TYPE = re.compile(r"\*?[a-z]+\d+[a-z0-9]*")
_IMPORTS = frozenset({"import triton", "import triton.language as tl"})
_BUILTINS = frozenset({"float", "int", "min", "max", "range", "True", "False", "None"})
# Allowed names of triton.language. Its submodules (core, math, ...) are left out: they give access to os and others.
LANGUAGE = frozenset(
    {
        *("abs", "ceil", "cos", "div_rn", "erf", "exp", "exp2", "floor", "fma", "log", "log2", "maximum", "minimum"),
        *("rsqrt", "sin", "sqrt", "sqrt_rn", "where", "philox", "uint_to_uniform_float", "pair_uniform_to_normal"),
        *("arange", "broadcast_to", "full", "join", "reshape", "zeros", "max", "min", "sum", "reduce", "PropagateNan"),
        *("load", "store", "debug_barrier", "device_assert", "inline_asm_elementwise", "program_id", "cdiv", "range"),
        *("static_range", "constexpr", "multiple_of", "pointer_type", "bfloat16", "float16", "float32", "float64"),
        *("float8e4nv", "float8e5", "int1", "int8", "int16", "int32", "int64", "uint8", "uint32"),
    }
)
# Allowed attributes of values inside a kernel.
_ATTRIBUTES = frozenset({"ALL", "dtype", "element_ty", "primitive_bitwidth", "shape", "to"})
_NODES = (
    *(ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.While, ast.If, ast.Return, ast.Pass, ast.Assert),
    *(ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.UnaryOp, ast.Subscript, ast.Slice, ast.keyword),
    *(ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.List, ast.Tuple, ast.Name, ast.Attribute, ast.Starred),
    *(ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop),
)


def check_kernel(source: KernelSource) -> None:
    """Check a kernel's text, signature and constants.

    Raises:
        ValueError, SyntaxError: the text does more than define a kernel, or a type or constant is not one of Triton's.
    """
    if not all(map(_TYPE.fullmatch, source.signature.values())):
        raise ValueError(f"no types of triton's: {source.signature}")
    if any(type(value) not in (bool, int, float, str, type(None)) for value in source.constants.values()):
        raise ValueError(f"no constants of a kernel: {source.constants}")
    check_kernel_text(source.text, source.name)


def check_kernel_text(text: str, name: str) -> None:
    """Check a kernel's text.

    Raises:
        ValueError, SyntaxError: the text does more than define functions, one of them called ``name``.
    """
    functions = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef):
            functions.append(statement)
        elif ast.unparse(statement) not in _IMPORTS:
            raise ValueError(f"a kernel's text has a statement outside of functions: line {statement.lineno}")
    known = {function.name for function in functions}
    if name not in known or known & {"triton", "tl", *_BUILTINS}:
        raise ValueError(f"a kernel's text defines {sorted(known)}, not {name}")
    for function in functions:
        _check_function(function, known)


def _check_function(function: ast.FunctionDef, functions: set[str]) -> None:
    """Check one function; ``functions`` are the names that the module defines."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    unusual = [*arguments.defaults, *arguments.kw_defaults, arguments.vararg, arguments.kwarg, function.returns]
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    annotations = {ast.unparse(one.annotation) for one in parameters if one.annotation is not None}
    if any(unusual) or decorators != ["triton.jit"] or not annotations <= {"tl.constexpr"}:
        raise ValueError(f"the definition of {function.name} in a kernel's text is not plain")
    inside = [node for statement in function.body for node in ast.walk(statement)]
    stored = {node.id for node in inside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local = stored | {parameter.arg for parameter in parameters}
    if local & {"triton", "tl", *_BUILTINS}:
        raise ValueError(f"{function.name} in a kernel's text changes the meaning of a name")
    for node in inside:
        if not isinstance(node, _NODES):
            raise ValueError(f"{type(node).__name__} in a kernel's text")
        if isinstance(node, ast.Name) and node.id not in local | functions | {"tl"} | _BUILTINS:
            raise ValueError(f"{node.id} in a kernel's text")
        if isinstance(node, ast.Attribute):
            of_language = isinstance(node.value, ast.Name) and node.value.id == "tl"
            if node.attr not in (LANGUAGE if of_language else _ATTRIBUTES) or not isinstance(node.ctx, ast.Load):
                raise ValueError(f"{ast.unparse(node)} in a kernel's text")
