"""Questions about values whose outcome is the same at nearly every call: that one is captured without asking.

``assert torch.isfinite(loss)``, ``if bad.any(): raise ValueError``: one outcome of such a question goes on, and the
other ends the step with an error. The first is the one to capture, at once and whatever the value is. The other has a
path only where it comes. torch's distributions ask a question for each of their parameters, and each would end a
capture otherwise.

torch itself asks about sizes that the data decides: whether one is 1, which would be broadcast, whether there are
elements at all, and whether two sizes are the same. The usual outcomes are that none is 0 or 1, and that those which
must be the same for an operation are. Of the user's code it is that a loop skips no item.
"""

from __future__ import annotations

import ast
import dis
import sys
import types
from collections.abc import Sequence
from typing import Any

import sympy

from weft import torch_adapter
from weft.capture.source_tree import SourceTree

# Gradients that ask one question of the data, whether the loss depends on the phases of vectors, and raise if it does.
_CHECKING_NODES = frozenset({"LinalgEighBackward0", "LinalgEigBackward0", "LinalgSvdBackward0"})
# Modules between the code that asks and this one.
_BETWEEN = ("weft.", "sympy.", "torch.fx.", "torch._", "torch.utils._", "torch.overrides")
_BUILTINS = ("bool", "any", "all")
_EXITS = ("exit", "quit")
_CACHE = dis.opmap["CACHE"]


def outcome_without_error() -> bool | None:
    """The outcome with which the code that asks a question now goes on, where the other one raises; else None.

    A function that returns the answer, as ``return bool(valid.all())``, asks for the one that calls it.
    """
    node = torch_adapter.running_autograd_node()
    if node is not None and node.name() in _CHECKING_NODES:
        return True
    frame = _asking(sys._getframe(1))
    alike, returned = True, False
    while frame is not None:
        source = SourceTree.of(frame.f_code.co_filename)
        node = None if source is None else source.running(frame)
        if source is None or node is None or (returned and not isinstance(node, ast.Call)):
            return None
        outcome, alike, returned = _outcome(source, node, alike)
        if not returned:
            return outcome
        frame = frame.f_back
    return None


def asked_by_a_call() -> bool:
    """Whether a function that the user's code calls asks the question, or an index, and not that code itself."""
    frame = _asking(sys._getframe(1))
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    while code[at] == _CACHE:  # up to Python 3.12 a call of a function in Python runs behind its instruction
        at -= 2
    operation = dis.opname[code[at]]
    # Python 3.11 calls a function in C at PRECALL, once the code around it has run a few times.
    return operation.startswith(("CALL", "PRECALL")) or operation.endswith(("_SUBSCR", "_SLICE"))


def asked_at() -> tuple[types.CodeType, int] | None:
    """The place in the user's code that asks a question now: its code, and the offset of the instruction."""
    frame = _asking(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


def outcome_without_skip() -> bool | None:
    """The outcome with which a loop of the user's code does not skip an item: ``if len(rows) == 0: continue``. None
    for a question of another form.

    An expert without tokens is rare. Where it comes, its path is captured then. Nothing is known of a condition without
    ``continue``: ``if mask.any():`` may lead to an expert, and to what is done about numbers that are not finite.
    """
    frame = _asking(sys._getframe(1))
    source = None if frame is None else SourceTree.of(frame.f_code.co_filename)
    node = None if source is None or frame is None else source.running(frame)
    if source is None or node is None:
        return None
    alike = True
    while isinstance(parent := source.parents[node], ast.UnaryOp) and isinstance(parent.op, ast.Not):
        node, alike = parent, not alike
    skips = isinstance(parent, ast.If) and node is parent.test and isinstance(parent.body[-1], ast.Continue)
    return not alike if skips else None


def usual_outcome(question: Any) -> bool | None:
    """The outcome of a question about sizes that nearly all calls have; None for a question of another kind."""
    if isinstance(question, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)) and question.rhs in (0, 1):
        return isinstance(question, (sympy.Gt, sympy.Ge))
    if not isinstance(question, (sympy.Eq, sympy.Ne)):
        return None
    compares_two = all(side.free_symbols for side in question.args)
    return compares_two is isinstance(question, sympy.Eq)


def _asking(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != "torch" and not name.startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


def _outcome(source: SourceTree, node: ast.AST, alike: bool) -> tuple[bool | None, bool, bool]:
    """The truth value of an expression with which the statement around it raises nothing.

    Args:
        alike: whether what is asked is true rather where the expression is.

    Returns:
        The truth value of what is asked, None where it is not known; ``alike`` of the whole expression; and whether the
        statement returns that expression.
    """
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
                return alike, alike, False
            case ast.If() if node is parent.test and _raises(parent.body) != _raises(parent.orelse):
                return alike != _raises(parent.body), alike, False
            case ast.Return():
                return None, alike, True
            case _:
                return None, alike, False
        node = parent


def _raises(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements end with an exception."""
    match list(statements):
        case [*_, ast.Raise()]:
            return True
        case [*_, ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)))]:
            return name in _EXITS
    return False
