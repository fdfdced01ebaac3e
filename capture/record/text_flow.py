"""Where a text goes that a step makes: read from the source of the function that makes it.

``print(f"loss {loss.item():.4f}")`` makes a text and hands it to ``print``, and nothing else can look at it. A capture
must know that of a text of a value (:mod:`weft.capture.record.late_text`): a plain string cannot tell when it is
compared or parsed. So the syntax tree is followed from the expression that makes the text to what becomes of it:

- texts and displays around it (``"a" + f"..."``, ``", ".join([...])``, ``{"loss": f"..."}``) are followed further;
- a call of ``print``, of a logger's method or of a function marked ``@weft.opaque`` is an end, and so is the ``return``
  of the step itself;
- a local variable is followed to every place where the function reads it.

All else is unknown, and the answer is no.
"""

from __future__ import annotations

import ast
import builtins
import dis
import logging
import re
import string
import types
from collections.abc import Iterator

from weft.capture.source_tree import SourceTree, value_in
from weft.capture.state.code_names import OPAQUE
from weft.source_files import is_user_file

_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>")
_CONVERSIONS = ("str", "repr", "format")
# They see all local variables of the function that calls them.
_SEES_LOCALS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_LOGGERS = (logging.Logger, logging.RootLogger)
_LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "fatal", "log")
_LOGGING = [getattr(owner, name) for owner in (logging.Logger, logging) for name in _LEVELS if hasattr(owner, name)]
_PADDED = re.compile(r"%[-+ #0-9.*]+[sra]")  # a text of which a part is cut, or that is padded
# Instructions that make text of a value; other ones have other names in other versions of Python.
_FORMATTING = frozenset(
    dis.opmap[name]
    for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
    if name in dis.opmap
)
_TRACER = "weft.capture.record.tracer"


def goes_straight_out(frame: types.FrameType) -> bool:
    """Whether the text that the running instruction of a user's function makes is only printed, logged, given to an
    opaque function or returned by the step."""
    flow = _Flow.of(frame)
    made = None if flow is None else flow.making()
    return flow is not None and made is not None and _makes_text(made) and flow.ends_well(made)


class _Flow:
    """Follows texts through one running function."""

    def __init__(self, source: SourceTree, frame: types.FrameType) -> None:
        self._source = source
        self._running = frame
        while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
            frame = frame.f_back  # the function that the comprehension is written in
        self._frame = frame
        self._followed: set[str] = set()

    @classmethod
    def of(cls, frame: types.FrameType) -> _Flow | None:
        """The flow of the function that runs in a frame; None where its source is not known."""
        source = SourceTree.of(frame.f_code.co_filename)
        return None if source is None else cls(source, frame)

    def running(self) -> ast.AST | None:
        """The expression that is being evaluated."""
        return self._source.running(self._running)

    def making(self) -> ast.AST | None:
        """The expression that is being evaluated, or the format that it is one of the values of: Python compiles
        ``"%s, %r" % (a, b)`` to code without an operation ``%``, whose instructions have the places of ``a`` and ``b``.
        """
        node, running = self.running(), self._running
        formats = running.f_code.co_code[running.f_lasti] in _FORMATTING
        values = self._source.parents[node] if formats and node is not None else None
        made = self._source.parents[values] if isinstance(values, ast.Tuple) else None
        return made if isinstance(made, ast.BinOp) and made.right is values and _makes_text(made) else node

    def ends_well(self, node: ast.AST, *, is_text: bool = True) -> bool:
        """Whether all ends of the text that an expression gives are known, and none looks at it.

        Args:
            node: the expression.
            is_text: whether it gives the text itself, and not a list, tuple or dictionary with the text inside.
        """
        parent = self._source.parents[node]
        match parent:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return is_text and _is_text(right if node is left else left) and self.ends_well(parent)
            case ast.FormattedValue() | ast.JoinedStr():
                return is_text and _keeps_text(parent) and self.ends_well(parent)
            case ast.List() | ast.Tuple() | ast.ListComp() | ast.GeneratorExp():
                return node is getattr(parent, "elt", node) and self._in_list_ends_well(parent, is_text)
            case ast.Dict() if node in parent.values:
                return self.ends_well(parent, is_text=False)
            case ast.Starred():
                return self.ends_well(parent, is_text=False)
            case ast.keyword():
                return self.ends_well(parent, is_text=is_text)
            case ast.IfExp() if node is not parent.test:
                return self.ends_well(parent, is_text=is_text)
            case ast.Call():
                return self._is_out(parent) or (is_text and _keeps_text(parent) and self.ends_well(parent))
            case ast.Expr():
                return True
            case ast.Return() | ast.Lambda():
                return _is_of_the_step(self._frame) or self._caller_ends_well(is_text)
            case ast.Assign(targets=[ast.Name(id=name)]):
                return self._is_read_well(name, parent, is_text)
        return False

    def _in_list_ends_well(self, listed: ast.expr, is_text: bool) -> bool:
        """The same for what is in a list, tuple or comprehension, which ``", ".join`` may make one text again."""
        call = self._source.parents[listed]
        if is_text and isinstance(call, ast.Call) and _method_of_text(call) == "join":
            return self.ends_well(call)
        return not isinstance(listed, ast.GeneratorExp) and self.ends_well(listed, is_text=False)

    def _caller_ends_well(self, is_text: bool) -> bool:
        """The same for what this function returns to another one, which calls it by name."""
        caller = None if self._frame.f_back is None else _Flow.of(self._frame.f_back)
        call = None if caller is None else caller.running()
        if caller is None or not isinstance(call, ast.Call):
            return False
        called = value_in(caller._frame, call.func)
        called = called.__func__ if isinstance(called, types.MethodType) else called
        is_this = isinstance(called, types.FunctionType) and called.__code__ is self._frame.f_code
        return is_this and caller.ends_well(call, is_text=is_text)

    def _is_read_well(self, name: str, assignment: ast.AST, is_text: bool) -> bool:
        """The same for what is in a local variable, wherever the function reads it."""
        code = self._frame.f_code
        if name not in code.co_varnames or name in code.co_cellvars or _SEES_LOCALS.intersection(code.co_names):
            return False
        if name in self._followed:
            return True
        self._followed.add(name)
        nodes = ast.walk(self._source.function(assignment))
        uses = [each for each in nodes if isinstance(each, ast.Name) and each.id == name]
        if any(isinstance(self._source.parents[each], ast.AugAssign) for each in uses):
            return False
        return all(not isinstance(each.ctx, ast.Load) or self.ends_well(each, is_text=is_text) for each in uses)

    def _is_out(self, call: ast.Call) -> bool:
        """Whether a call prints, logs, or is recorded as opaque."""
        called = value_in(self._frame, call.func)
        if isinstance(called, types.MethodType) and isinstance(called.__self__, logging.Logger):
            return type(called.__self__) in _LOGGERS and called.__func__ in _LOGGING
        if not isinstance(called, (types.FunctionType, types.MethodType)):
            return False
        return called is builtins.print or called in _LOGGING or getattr(called, OPAQUE, False) is True


def _is_of_the_step(frame: types.FrameType) -> bool:
    """Whether no function of the user's called this one: what it returns, the step returns."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") != _TRACER:
        if is_user_file(caller.f_code.co_filename):
            return False
        caller = caller.f_back
    return caller is not None


def _makes_text(node: ast.AST) -> bool:
    """Whether an expression makes text of values and of texts in it, which it neither cuts nor pads."""
    match node:
        case ast.FormattedValue(format_spec=None):
            return True
        case ast.FormattedValue(conversion=-1, format_spec=ast.JoinedStr(values=specification)):
            # A number in the specification has the place of the whole text in Python 3.11.
            return all(isinstance(each, ast.Constant) for each in specification)
        case ast.JoinedStr():
            return all(_makes_text(each) for each in node.values if isinstance(each, ast.FormattedValue))
        case ast.BinOp(left=ast.Constant(value=str() as template), op=ast.Mod()):
            return _PADDED.search(template) is None
        case ast.Call(func=ast.Name(id=name)):
            return name in _CONVERSIONS and len(node.args) <= 2
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as template))):
            method = _method_of_text(node)
            return method == "join" or (method == "format" and all(map(_is_whole, _fields(template))))
    return False


def _method_of_text(call: ast.Call) -> str:
    """The method of a text in the source that is called; "" for another call."""
    match call.func:
        case ast.Attribute(value=ast.Constant(value=str()), attr=name):
            return name
    return ""


def _keeps_text(node: ast.expr) -> bool:
    """Whether an expression puts the texts in it into a text as they are."""
    match node:
        case ast.FormattedValue(conversion=conversion, format_spec=specification):
            return conversion in (-1, ord("s")) and specification is None
        case ast.JoinedStr():
            return True
        case ast.Call(func=ast.Name(id="str"), args=[_], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as template), attr="format")):
            return all(
                not specification and conversion in (None, "s") for specification, conversion in _fields(template)
            )
    return False


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is certain to give a text."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) and _is_text(node.right)
    return (isinstance(node, ast.Constant) and isinstance(node.value, str)) or _makes_text(node)


def _fields(template: str) -> Iterator[tuple[str | None, str | None]]:
    """The format specification and the conversion of each field."""
    try:
        for _, _, specification, conversion in string.Formatter().parse(template):
            yield specification, conversion
    except ValueError:  # which str.format raises too
        yield "<", "s"


def _is_whole(field: tuple[str | None, str | None]) -> bool:
    specification, conversion = field
    return not (specification and conversion)
