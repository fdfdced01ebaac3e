"""Names in code, found by a pass over its bytes, against Python's own disassembler; and what is remembered of code."""

from __future__ import annotations

import dis
import inspect
import json
import textwrap
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from weft.capture.state.bytecode import is_method_load, level_of_import, uses_of_names
from weft.capture.state.code_names import code_names, globals_of, mark_opaque, variables_of


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def compiled(source: str) -> types.CodeType:
    return compile(textwrap.dedent(source), "<names>", "exec")


# So many names and constants that positions take more than one byte.
MANY = (
    "def many():\n"
    + "".join(f"    x{at} = a{at}.b{at}\n    y = 's{at}'\n" for at in range(600))
    + "    from ..far import z\n    import near\n    a599.called()\n"
)
SOURCES = {
    "many": compiled(MANY),
    "class": compiled("class A(B):\n    x = y\n    def f(self):\n        super().g()\n        return super().h\n"),
    "deletes": compiled("def f(a):\n    global g\n    g = 1\n    del g, a.b\n"),
    **{module.__name__: compiled(inspect.getsource(module)) for module in (inspect, typing, json.decoder)},
}


@pytest.mark.parametrize("name", SOURCES)
def test_names_are_those_that_the_disassembler_shows(name: str) -> None:
    for code in codes_of(SOURCES[name]):
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        named = [step for step in steps if step.opcode in dis.hasname]
        found = list(uses_of_names(code))
        assert [(use.op, use.name) for use in found] == [(step.opcode, step.argval) for step in named]
        imports = [at for at, step in enumerate(steps) if step.opname == "IMPORT_NAME"]
        levels = [value if isinstance(value := steps[at - 2].argval, int) else 0 for at in imports]
        assert levels == [level_of_import(code, use.at) for use in found if dis.opname[use.op] == "IMPORT_NAME"]


def test_names_that_are_only_called_are_told_from_those_that_are_read() -> None:
    (_, code) = codes_of(compiled("def f(a):\n    a.called()\n    a.read\n    a.set = 1\n"))
    called = {use.name for use in uses_of_names(code) if is_method_load(use)}
    assert called == {"called"}


def test_names_of_inner_functions_count_until_these_are_opaque() -> None:
    code = compiled("def f():\n    def g():\n        return inner_name\n    return outer_name, g\n").co_consts[0]
    inner = next(each for each in code.co_consts if isinstance(each, types.CodeType))
    assert code_names(code) == variables_of(code) == globals_of(code) == {"inner_name", "outer_name"}
    mark_opaque(inner)
    assert code_names(code) == variables_of(code) == globals_of(code) == {"outer_name"}


def test_code_is_not_kept_alive_by_its_names() -> None:
    scope: dict[str, Any] = {}
    exec("def f(): return some_name", scope)
    code = scope["f"].__code__
    assert code_names(code) == {"some_name"}
    gone = weakref.ref(code)
    scope.clear()  # the function holds it
    del code
    assert gone() is None


def module_with(factor: float) -> dict[str, Any]:
    """The variables of a module of the user's; those of two calls have equal code."""
    variables: dict[str, Any] = {"__name__": "scaling", "FACTOR": factor}
    exec(compile("def scaled(x):\n    return x * FACTOR\n", __file__, "exec"), variables)
    return variables


def test_variables_of_two_modules_with_equal_code_are_both_guarded() -> None:
    one, other = module_with(2.0), module_with(3.0)
    first: Callable[[torch.Tensor], torch.Tensor] = one["scaled"]
    second: Callable[[torch.Tensor], torch.Tensor] = other["scaled"]
    assert first.__code__ == second.__code__

    def step(x: torch.Tensor) -> torch.Tensor:
        return first(x) + second(x)

    compiled_step, x = weft.compile(step), torch.ones(2)
    assert torch.equal(compiled_step(x), step(x))
    other["FACTOR"] = 10.0
    assert torch.equal(compiled_step(x), step(x))
