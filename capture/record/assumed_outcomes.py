"""Questions about values that only check them: ``assert torch.isfinite(loss)``, ``if bad.any(): raise ValueError``.

One outcome of such a question goes on, and the other ends the step with an error. The first is the one to capture, at
once and whatever the value is. The other has a path only where it comes. torch's distributions ask a question for each
of their parameters, and each would end a capture otherwise.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Sequence

from weft.capture.source_tree import SourceTree

# Modules between the code that asks and this one.
_BETWEEN = ("weft.", "sympy.", "torch.fx.", "torch._", "torch.utils._", "torch.overrides")
_BUILTINS = ("bool", "any", "all")
_EXITS = ("exit", "quit")


def outcome_without_error() -> bool | None:
    """The outcome with which the code that asks a question now goes on, where the other one raises; else None."""
    frame = _asking(sys._getframe(1))
    source = None if frame is None else SourceTree.of(frame.f_code.co_filename)
    node = None if source is None or frame is None else source.running(frame)
    return None if source is None or node is None else _outcome(source, node)


def _asking(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != "torch" and not name.startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


def _outcome(source: SourceTree, node: ast.AST) -> bool | None:
    """The truth value of an expression with which the statement around it raises nothing."""
    alike = True  # whether the condition of the statement is true rather where the expression is
    while True:
        parent = source.parents[node]
        match parent:
            case ast.UnaryOp(op=ast.Not()):
                alike = not alike
            case ast.BoolOp() | ast.GeneratorExp() | ast.ListComp():
                pass
            case ast.Call(func=ast.Name(id=name)) if name in _BUILTINS:
                pass
            case ast.Assert() if node is parent.test:
                return alike
            case ast.If() if node is parent.test and _raises(parent.body) != _raises(parent.orelse):
                return alike != _raises(parent.body)
            case _:
                return None
        node = parent


def _raises(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements end with an exception."""
    match list(statements):
        case [*_, ast.Raise()]:
            return True
        case [*_, ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)))]:
            return name in _EXITS
    return False
