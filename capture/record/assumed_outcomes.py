"""Data-dependent branches whose outcome is the same at nearly every call: that one is captured whatever the value is.

``assert torch.isfinite(loss)``, ``if bad.any(): raise ValueError``: after one outcome of such a branch the step goes
on, and after the other it ends with an error. The first is captured at once. The other has a path only where it comes.
torch's distributions check each of their parameters, and each check would end a capture otherwise.

torch itself branches on sizes that the data decides: whether one is 1, which would be broadcast, whether there are
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

# Gradients that check one thing of the data, whether the loss depends on the phases of vectors, and raise if it does.
_CHECKING_NODES = frozenset({"LinalgEighBackward0", "LinalgEigBackward0", "LinalgSvdBackward0"})
# Modules between the code that branches and this one.
_BETWEEN = ("weft.", "sympy.", "torch.fx.", "torch._", "torch.utils._", "torch.overrides")
_BUILTINS = ("bool", "any", "all")
_EXITS = ("exit", "quit")
_CACHE = dis.opmap["CACHE"]


def outcome_without_error() -> bool | None:
    """The outcome with which the code that branches now goes on, where the other one raises; else None.

    A function that returns the condition, as ``return bool(valid.all())``, evaluates it for the one that calls it.
    """
    node = torch_adapter.running_autograd_node()
    if node is not None and node.name() in _CHECKING_NODES:
        return True
    frame = _branching_frame(sys._getframe(1))
    same, returned = True, False
    while frame is not None:
        source = SourceTree.of(frame.f_code.co_filename)
        node = None if source is None else source.running(frame)
        if source is None or node is None or (returned and not isinstance(node, ast.Call)):
            return None
        outcome, same, returned = _outcome(source, node, same)
        if not returned:
            return outcome
        frame = frame.f_back
    return None


def evaluated_in_a_call() -> bool:
    """Whether a function that the user's code calls evaluates the condition, or an index, and not that code itself."""
    frame = _branching_frame(sys._getframe(1))
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    while code[at] == _CACHE:  # up to Python 3.12 a call of a function in Python runs behind its instruction
        at -= 2
    operation = dis.opname[code[at]]
    # Python 3.11 calls a function in C at PRECALL, once the code around it has run a few times.
    return operation.startswith(("CALL", "PRECALL")) or operation.endswith(("_SUBSCR", "_SLICE"))


def branch_place() -> tuple[types.CodeType, int] | None:
    """The place in the user's code that branches now: its code, and the offset of the instruction."""
    frame = _branching_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


def outcome_without_skip() -> bool | None:
    """The outcome with which a loop of the user's code does not skip an item: ``if len(rows) == 0: continue``. None
    for a branch of another form.

    An expert without tokens is rare. Where it comes, its path is captured then. Nothing is known of a condition without
    ``continue``: ``if mask.any():`` may lead to an expert, and to what is done about numbers that are not finite.
    """
    frame = _branching_frame(sys._getframe(1))
    source = None if frame is None else SourceTree.of(frame.f_code.co_filename)
    node = None if source is None or frame is None else source.running(frame)
    if source is None or node is None:
        return None
    same = True
    while isinstance(parent := source.parents[node], ast.UnaryOp) and isinstance(parent.op, ast.Not):
        node, same = parent, not same
    skips = isinstance(parent, ast.If) and node is parent.test and isinstance(parent.body[-1], ast.Continue)
    return not same if skips else None


def usual_outcome(condition: Any) -> bool | None:
    """The outcome of a condition on sizes that nearly all calls have; None for a condition of another kind."""
    if isinstance(condition, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)) and condition.rhs in (0, 1):
        return isinstance(condition, (sympy.Gt, sympy.Ge))
    if not isinstance(condition, (sympy.Eq, sympy.Ne)):
        return None
    compares_two = all(side.free_symbols for side in condition.args)
    return compares_two is isinstance(condition, sympy.Eq)


def _branching_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != "torch" and not name.startswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


def _outcome(source: SourceTree, node: ast.AST, same: bool) -> tuple[bool | None, bool, bool]:
    """The truth value of an expression with which the statement around it raises nothing.

    Args:
        same: whether the condition is true where the expression is, not where it is false.

    Returns:
        The truth value of the condition, None where it is not known; ``same`` of the whole expression; and whether the
        statement returns that expression.
    """
    while True:
        parent = source.parents[node]
        match parent:
            case ast.UnaryOp(op=ast.Not()):
                same = not same
            case ast.BoolOp() | ast.GeneratorExp() | ast.ListComp():
                pass
            case ast.Call(func=ast.Name(id=name)) if name in _BUILTINS:
                pass
            case ast.Assert() if node is parent.test:
                return same, same, False
            case ast.If() if node is parent.test and _raises(parent.body) != _raises(parent.orelse):
                return same != _raises(parent.body), same, False
            case ast.Return():
                return None, same, True
            case _:
                return None, same, False
        node = parent


def _raises(statements: Sequence[ast.stmt]) -> bool:
    """Whether statements end with an exception."""
    match list(statements):
        case [*_, ast.Raise()]:
            return True
        case [*_, ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)))]:
            return name in _EXITS
    return False
