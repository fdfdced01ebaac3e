"""``globals()``, ``vars(module)``, ``eval`` and ``exec``: variables of a module by names that a step computes."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft

CALLS = 5
ONE = 1
THIS = sys.modules[__name__]
Step = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    reset()
    yield
    for name in [name for name in globals() if name.startswith("var_")]:
        del globals()[name]


def reset() -> None:
    for name in [name for name in globals() if name.startswith("var_")]:
        del globals()[name]
    globals().update(var_1=2, var_tensor=torch.zeros(2))


def read(x: torch.Tensor) -> Any:
    return x * globals()[f"var_{ONE}"]


def read_of_a_module(x: torch.Tensor) -> Any:
    return x * vars(THIS)[f"var_{ONE}"] * THIS.__dict__[f"var_{ONE}"] * read.__globals__[f"var_{ONE}"]


def absent(x: torch.Tensor) -> Any:
    return x * globals().get(f"var_{ONE + 1}", 1)


def written(x: torch.Tensor) -> Any:
    variables = globals()
    variables[f"var_{ONE}"] = variables[f"var_{ONE}"] + 1
    variables.update({f"var_{at}": variables.setdefault(f"var_{at}", 0) + 1 for at in (7, 8)})
    variables["_".join(["var", "tensor"])] = variables["_".join(["var", "tensor"])] + x
    return x * variables[f"var_{ONE}"]


def evaluated(x: torch.Tensor) -> Any:
    exec(f"var_{9} = var_{ONE} + 1", globals())
    return x * eval(f"var_{ONE} + var_{9}")


def evaluated_in_an_object(x: torch.Tensor) -> Any:
    return x * eval(f"s.x{ONE}", {"s": STATE})


def evaluated_among_local_names(x: torch.Tensor) -> Any:
    factor, found = 3, dict[str, Any]()  # noqa: F841 - it is evaluated
    exec("made = factor * var_1", globals(), {"factor": 1})
    exec("made = var_1", {"var_1": 2}, found)
    return (
        x * eval("factor") * found["made"] * (eval("x", {}, {"x": 2}) + eval("STATE.x1", None)),
        sorted(vars()),
        dir(),
    )


def listed(x: torch.Tensor) -> Any:
    found = [
        sorted(name for name in names if not name.startswith("__")) for names in (globals(), dir(THIS), vars(THIS))
    ]
    return x * len(found[0]), found, len(globals()), "getattr" in globals(), "int" in vars(THIS)


STATE = types.SimpleNamespace(x1=2)
STEPS: list[Step] = [
    read,
    read_of_a_module,
    absent,
    written,
    evaluated,
    evaluated_in_an_object,
    evaluated_among_local_names,
    listed,
]


@pytest.mark.parametrize("step", STEPS)
def test_each_call_does_as_eager_does(step: Step) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[str]:
        reset()
        STATE.x1 = 2
        called, found = wrap(step), []
        for at in range(CALLS):
            result = str(called(torch.full((2,), float(at + 1))))
            found.append((result, [(name, str(value)) for name, value in globals().items() if name.startswith("var_")]))
            globals()["var_1"] += 1
            STATE.x1 += 1
            if at == 1:
                globals()["var_2"] = 5
            if at == 3:
                del globals()["var_2"]
        return list(map(str, found))

    eager = run(lambda step: step)
    assert run(weft.compile) == eager


def test_variables_that_no_code_asks_for_do_not_count() -> None:
    step = weft.compile(read)
    step(torch.ones(2))
    globals()["var_other"] = 1
    step(torch.ones(2))
    assert len(step.captures) == 1


MADE = "made_module"


def looked_up(x: torch.Tensor) -> Any:
    return x * sys.modules[f"made_{'module'}"].v


def looked_up_or_not(x: torch.Tensor) -> Any:
    found = sys.modules.get(MADE)
    return x * (1 if found is None else found.v), f"other_{ONE}" in sys.modules


def imported(x: torch.Tensor) -> Any:
    return x * importlib.import_module(MADE).v


def imported_by_the_builtin(x: torch.Tensor) -> Any:
    return x * __import__(MADE).v


def written_in_a_module(x: torch.Tensor) -> Any:
    module = sys.modules[MADE]
    module.v = module.v + 1  # type: ignore[attr-defined]
    return x * module.v


@pytest.mark.parametrize("step", [looked_up, looked_up_or_not, imported, imported_by_the_builtin, written_in_a_module])
@pytest.mark.parametrize("in_file", [True, False], ids=["file", "made"])
def test_modules_by_names_that_the_step_computes(
    step: Step, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{MADE}.py").write_text("v = 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def put(value: float) -> types.ModuleType:
        sys.modules.pop(MADE, None)
        module = importlib.import_module(MADE) if in_file else types.ModuleType(MADE)
        monkeypatch.setitem(sys.modules, MADE, module)
        module.v = value  # type: ignore[attr-defined]
        return module

    def run(wrap: Callable[[Any], Any]) -> list[str]:
        module, called, found = put(2), wrap(step), []
        for at in range(CALLS):
            if at == 2:
                module.v = 5  # type: ignore[attr-defined]
            if at == 3:
                module = put(9)
            found.append(f"{called(torch.ones(2))} {module.v}")
        return found

    eager = run(lambda step: step)
    assert run(weft.compile) == eager


RELATIVE = """
import importlib

def by_the_builtin(name):
    return __import__(name, globals(), locals(), ["v"], 1).v

def by_importlib(name):
    return importlib.import_module(f".{name}", package=__package__).v
"""


@pytest.mark.parametrize("name", ["by_the_builtin", "by_importlib"])
def test_modules_by_relative_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"package_{name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(RELATIVE)
    (tmp_path / package / "inner.py").write_text("v = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    load = getattr(importlib.import_module(package), name)
    inner = importlib.import_module(f"{package}.inner")
    compiled = weft.compile(lambda x: x * load("inn" + "er"))
    for value in (2, 2, 5, 7):
        inner.v = value  # type: ignore[attr-defined]
        assert compiled(torch.ones(())).item() == value
