"""The syntax tree of the code that runs: what the source says about the expression that is being evaluated."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import linecache
import types
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


class SourceTree:
    """The syntax tree of a file.

    Attributes:
        lines: of the file.
        parents: the node around each node.
    """

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.parents: dict[ast.AST, ast.AST] = {}
        self._found: dict[tuple[int | None, ...], ast.expr] = {}
        self._conditional: set[tuple[int | None, ...]] = set()
        for node in ast.walk(ast.parse("".join(lines))):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, (ast.If, ast.Assert)):
                self._conditional.add(_place(node))
            elif isinstance(node, ast.expr):
                # The outermost comes first. Parts of an f-string have the place of the whole in Python 3.11.
                self._found.setdefault(_place(node), node)

    @classmethod
    def of(cls, filename: str) -> SourceTree | None:
        """The tree of a file; None where there is no source, or none that can be parsed."""
        lines = linecache.getlines(filename)
        known = _trees.get(filename)
        if known is None or known.lines is not lines:
            try:
                known = cls(lines) if lines else None
            except SyntaxError:  # the line magic of a notebook, a file that has changed
                known = None
            if known is not None:
                _trees[filename] = known
        return known

    def running(self, frame: types.FrameType) -> ast.expr | None:
        """The outermost expression of those at the place of the running instruction, in a frame of this file."""
        places = list(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2 + 1))
        if places and places[-1] in self._conditional:
            # Python 3.11 asks for the truth of an expression at the place of the statement, right after the expression.
            places = [place for place in places if place != places[-1]]
        return self._found.get(places[-1]) if places else None

    def function(self, node: ast.AST) -> ast.AST:
        """The innermost function around a node, or the module."""
        while not isinstance(node, _FUNCTIONS):
            node = self.parents[node]
        return node


def value_in(frame: types.FrameType, node: ast.expr) -> Any:
    """What a name, or an attribute of a name, is now in a running function, where looking at it runs no code of the
    user's; else None."""
    if isinstance(node, ast.Name):
        code = frame.f_code
        if node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return frame.f_locals.get(node.id)
        return frame.f_globals.get(node.id, vars(builtins).get(node.id))
    if isinstance(node, ast.Attribute):
        owner = value_in(frame, node.value)
        if node.attr in getattr(owner, "__dict__", {}):
            return vars(owner)[node.attr]
        found = inspect.getattr_static(type(owner), node.attr, None)
        if isinstance(found, types.FunctionType):
            return types.MethodType(found, owner)
        return None if hasattr(type(found), "__get__") else found
    return None


def _place(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


_trees: dict[str, SourceTree] = {}
