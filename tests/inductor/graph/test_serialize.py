"""A serialized graph is data: hostile entries run nothing, import nothing and are refused with one class of error."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from step_builder import StepBuilder
from weft import cache_folder, knobs
from weft.capture.graph import StepGraph
from weft.errors import CacheUnusable
from weft.inductor.cache import graph_cache, kernel_cache
from weft.inductor.cache.kernel_text import LANGUAGE, check_kernel, check_kernel_text
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph import serialize
from weft.inductor.graph.serializable import construct, fits, serializable
from weft.inductor.graph.serialize import FUNCTIONS, InvalidGraphData, NotPortable
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes

aten = torch.ops.aten
MARK = "hostile_entry_ran"


def step_of_kernels() -> tuple[StepGraph, StepGraph]:
    """A small captured step, and the same with kernels."""
    build = StepBuilder()
    x = build.input(torch.zeros(4, 8))
    doubled = build.call(aten.mul.Tensor, build.call(aten.exp.default, x), 2)
    build.returns(build.call(aten.sum.dim_IntList, doubled, [1]))
    step = build.build()
    return step, kernel_graph(run_passes(step.copy(), KERNEL_PASSES))


@pytest.fixture(scope="module")
def entry() -> tuple[StepGraph, dict[str, Any]]:
    step, kernels = step_of_kernels()
    assert any(isinstance(node.target, KernelCall) for node in kernels.graph.nodes)
    return step, json.loads(serialize.dump(kernels, step))


def _replace(tables: dict[str, Any], kind: str, new: list[Any], name: str = "") -> None:
    """Put ``new`` in the place of the first entry of a kind."""
    table = tables["table"]
    at = next(at for at, found in enumerate(table) if found[0] == kind and name in ("", found[1]))
    table[at] = new


def _field(tables: dict[str, Any], kind: str, at: int, value: Any) -> None:
    found = next(found for found in tables["table"] if found[0] == "object" and found[1] == kind)
    found[2 + at] = value


def _append(tables: dict[str, Any], new: list[Any]) -> int:
    tables["table"].append(new)
    return len(tables["table"]) - 1


def _call(tables: dict[str, Any]) -> list[Any]:
    return next(node for node in tables["nodes"] if node[0] == "call_function")


def _call_of(tables: dict[str, Any], described: list[Any], *arguments: Any) -> None:
    """Let the first call be of another thing."""
    node = _call(tables)
    node[2], node[3] = _append(tables, described), list(arguments)


def _size(tables: dict[str, Any], tree: Any) -> None:
    """Let an expression be the size of a kernel's result."""
    number = _append(tables, ["expression", tree])
    _field(tables, "Buffer", 3, ["(", ["#", number]])


CODE = f"__import__('os').environ.__setitem__('{MARK}', '1')"
COMMAND = f"touch {MARK}"

HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a function of the operating system": lambda t: _call_of(t, ["function", "os", "system"], COMMAND),
    "a function by its qualified name": lambda t: _call_of(t, ["function", "os.system"], COMMAND),
    "a builtin that evaluates text": lambda t: _call_of(t, ["function", "builtins.eval"], CODE),
    "a builtin that executes text": lambda t: _call_of(t, ["function", "builtins.exec"], CODE),
    "a function of torch that loads pickles": lambda t: _call_of(t, ["function", "torch.load"], "file"),
    "a function that calls another": lambda t: _call_of(t, ["function", "operator.methodcaller"], "system"),
    "a function of weft that runs a file": lambda t: _call_of(t, ["function", "weft.inductor.graph.repro.load"], "f"),
    "a class of another library": lambda t: _replace(t, "object", ["object", "Popen", COMMAND]),
    "a class with its module": lambda t: _replace(t, "object", ["object", "subprocess", "Popen", COMMAND]),
    "a class of weft that is no data": lambda t: _replace(t, "object", ["object", "CompiledKernel"]),
    "a class by a path of attributes": lambda t: _replace(t, "object", ["object", "KernelCall.__init__"]),
    "an operation of another namespace": lambda t: _call_of(t, ["op", "users::anything", ""]),
    "an operation that opens a file": lambda t: _call_of(t, ["op", "aten::from_file", ""], "/etc/passwd"),
    "an attribute of a namespace that is no operation": lambda t: _call_of(t, ["op", "aten::__class__", ""]),
    "an attribute of an operation that is no overload": lambda t: _call_of(t, ["op", "aten::add", "__init__"]),
    "a method of a tensor": lambda t: _call(t).__setitem__(slice(0, 3), ["call_method", "x", "register_hook"]),
    "a module of the graph": lambda t: _call(t).__setitem__(slice(0, 3), ["call_module", "x", "forward"]),
    "an attribute of the graph": lambda t: _call(t).__setitem__(slice(0, 3), ["get_attr", "x", "__class__"]),
    "a call of a string": lambda t: _call(t).__setitem__(2, "os.system"),
    "a call of a dtype": lambda t: _call_of(t, ["word", "torch.float32"]),
    "code in the name of a node": lambda t: _call(t).__setitem__(1, f"x = {CODE}; y"),
    "code in the name of an argument": lambda t: _call(t).__setitem__(4, ["{", [f"a={CODE}, b", 1]]),
    "code as a size": lambda t: _field(t, "Buffer", 3, ["(", CODE]),
    "code as a symbol": lambda t: _size(t, ["Symbol", f"({CODE})", []]),
    "code as a number of an expression": lambda t: _size(t, ["Float", CODE, 53]),
    "code as an operand of an expression": lambda t: _size(t, ["Add", CODE, 1]),
    "code as a fraction": lambda t: _size(t, ["Rational", CODE, 2]),
    "a function of sympy that evaluates text": lambda t: _size(t, ["sympify", CODE]),
    "a class of sympy that evaluates text": lambda t: _size(t, ["Lambda", ["Symbol", "x", []], CODE]),
    "a power that fills all memory": lambda t: _size(t, ["Pow", 10, ["Pow", 10, 60]]),
    "a line of the user's with a line feed": lambda t: _field(
        t, "Origin", 1, ["#", _append(t, ["object", "Frame", "f.py", 1, f"f\n{CODE}"])]
    ),
    "an object with a field of another type": lambda t: _field(t, "KernelCall", 0, CODE),
    "an object with too few fields": lambda t: _replace(t, "object", ["object", "KernelCall"], "KernelCall"),
    "an entry that contains itself": lambda t: (
        t["table"].__setitem__(0, ["dict", ["{", ["a", ["#", 0]]]]) or _call(t).__setitem__(5, 0)
    ),
    "metadata that no node has": lambda t: _call(t).__setitem__(5, _append(t, ["dict", ["{", ["hook", 1]]])),
    "metadata of another type": lambda t: _call(t).__setitem__(5, _append(t, ["dict", ["{", ["frames", CODE]]])),
    "a node that comes later": lambda t: _call(t).__setitem__(3, [["%", 1000]]),
    "a device that is none": lambda t: _replace(t, "device", ["device", CODE]),
    "no tables": lambda t: t.clear(),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_is_refused_and_runs_nothing(
    change: Callable[[dict[str, Any]], Any],
    entry: tuple[StepGraph, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, tables = entry
    monkeypatch.chdir(tmp_path)
    changed = copy.deepcopy(tables)
    change(changed)
    assert changed != tables
    ran: list[tuple[str, Any]] = []
    _audited.append(ran)
    try:
        with pytest.raises(InvalidGraphData):
            serialize.load(json.dumps(changed), step)
    finally:
        _audited.remove(ran)
    assert not [event for event in ran if event[0] in ("os.system", "subprocess.Popen", "os.exec", "os.putenv")]
    assert not (tmp_path / MARK).exists()
    assert MARK not in os.environ


_audited: list[list[tuple[str, Any]]] = []


def _audit(event: str, arguments: Any) -> None:
    for ran in _audited:
        ran.append((event, arguments))


sys.addaudithook(_audit)


def test_an_unchanged_entry_is_read(entry: tuple[StepGraph, dict[str, Any]]) -> None:
    step, tables = entry
    found = serialize.load(json.dumps(tables), step)
    assert json.loads(serialize.dump(found, step)) == tables


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": 1}', "[" * 5000 + "]" * 5000])
def test_text_that_is_no_entry_is_refused(text: str, entry: tuple[StepGraph, dict[str, Any]]) -> None:
    with pytest.raises(InvalidGraphData):
        serialize.load(text, entry[0])


# ---- the closed lists


def test_no_function_of_the_table_takes_text_or_files() -> None:
    assert not {"eval", "exec", "open", "getattr", "load", "call", "attrgetter"} & {
        name.rpartition(".")[2] for name in FUNCTIONS
    }


def test_an_operation_of_a_users_library_makes_a_graph_not_portable() -> None:
    build = StepBuilder()
    x = build.input(torch.zeros(4))
    build.returns(build.call(torch.ops.quantized.relu6.default, x, val=x.meta["val"]))
    with pytest.raises(NotPortable, match="quantized"):
        serialize.dump(build.build())


def test_objects_are_made_of_listed_classes_with_declared_types() -> None:
    assert construct("Cast", [torch.float32]) == Cast(torch.float32)
    with pytest.raises(ValueError, match="declared"):
        construct("Cast", ["torch.float32"])
    with pytest.raises(ValueError, match="1 fields, not 0"):
        construct("Cast", [])
    with pytest.raises(AssertionError, match="two serializable classes"):
        serializable(type("Cast", (), {}))


def test_types_are_exact() -> None:
    assert fits((1, 2), tuple[int, ...])
    assert not fits((1, True), tuple[int, ...])
    assert not fits("12", list[str])
    assert not fits([1], tuple[int, ...])
    assert fits({"a": (1.5, None)}, dict[str, tuple[float, int | None]])
    assert not fits({"a": (1.5, "b")}, dict[str, tuple[float, int | None]])


# ---- the text of kernels

PLAIN = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(a, N: tl.constexpr):\n    {}\n"

HOSTILE_TEXTS = {
    "a statement of the module": f"{CODE}\n" + PLAIN.format("pass"),
    "another import": "import os\n" + PLAIN.format("pass"),
    "an import inside": PLAIN.format("import os"),
    "a default": PLAIN.format("pass").replace("a, N", f"a={CODE}, N"),
    "an annotation": PLAIN.format("pass").replace("tl.constexpr", CODE),
    "a decorator": PLAIN.format("pass").replace("triton.jit", "eval"),
    "no decorator": PLAIN.format("pass").replace("@triton.jit", ""),
    "a builtin": PLAIN.format("open('file')"),
    "an import by a builtin": PLAIN.format(CODE),
    "a module of triton's": PLAIN.format("tl.core.os.system('true')"),
    "a module of triton's by a name": PLAIN.format("x = tl.core"),
    "an attribute of an object": PLAIN.format("a.__class__"),
    "a method that formats": PLAIN.format("'{0.__class__}'.format(a)"),
    "a function inside": PLAIN.format("f = lambda: a"),
    "a class inside": PLAIN.format("class A: pass"),
    "a comprehension": PLAIN.format("[a for a in N]"),
    "an assignment to an attribute": PLAIN.format("tl.load = a"),
    "another meaning of a name": PLAIN.format("tl = a"),
    "another kernel": PLAIN.format("pass").replace("kernel", "other"),
    "an exception": PLAIN.format("raise a"),
    "a global": PLAIN.format("global a"),
    "no Python": "@triton.jit\ndef kernel(",
}


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_text_that_does_more_than_compute_is_refused(text: str) -> None:
    check_kernel_text(PLAIN.format("tl.store(a, tl.load(a).to(tl.float32) + float('inf'))"), "kernel")
    with pytest.raises((ValueError, SyntaxError)):
        check_kernel_text(text, "kernel")


def test_kernels_that_weft_generates_pass() -> None:
    for node in step_of_kernels()[1].graph.nodes:
        if isinstance(node.target, KernelCall):
            check_kernel(node.target.generated.source)


def test_every_name_of_triton_that_kernels_are_written_with_is_listed() -> None:
    written = "".join(path.read_text() for path in Path(kernel_cache.__file__).parents[1].glob("codegen/*.py"))
    used = set(re.findall(r"\btl\.(\w+)(?![\w{])", written))
    assert used <= LANGUAGE


def test_an_entry_with_a_hostile_kernel_is_made_again(tmp_path: Path) -> None:
    with knobs.override(cache_dir=str(tmp_path)):
        step, kernels = step_of_kernels()
        graph_cache.cached(step, lambda given: kernels)
        (path,) = (file for file in (tmp_path / "graphs").rglob("*") if file.is_file())
        content = cache_folder.read_checked(path)
        assert content is not None
        hostile = content.replace(b"import triton\\n", f"import triton\\n{CODE}\\n".encode())
        assert hostile != content
        cache_folder.write_checked(path, hostile)
        assert graph_cache.cached(step, lambda given: kernels) is kernels
        assert MARK not in os.environ
        assert cache_folder.read_checked(path) == content


# ---- who can write


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with knobs.override(cache_dir=str(tmp_path / "cache")):
        with pytest.raises(CacheUnusable, match="everybody can write"):
            cache_folder.directory()
        (tmp_path / "cache").chmod(0o700)
        assert cache_folder.directory() == tmp_path / "cache"


def test_a_folder_of_a_group_is_refused_unless_the_group_is_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o770)
    with knobs.override(cache_dir=str(tmp_path / "cache")):
        monkeypatch.setattr(cache_folder, "_is_private_group", lambda group: False)
        with pytest.raises(CacheUnusable, match="its group can write"):
            cache_folder.directory()
        monkeypatch.setattr(cache_folder, "_is_private_group", lambda group: True)
        cache_folder.directory()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    with knobs.override(cache_dir=str(tmp_path / "cache")), pytest.raises(CacheUnusable, match="user 12345"):
        cache_folder.directory()


def test_a_folder_that_is_made_is_private(tmp_path: Path) -> None:
    with knobs.override(cache_dir=str(tmp_path / "new" / "cache")):
        assert cache_folder.directory().stat().st_mode & 0o777 == 0o700
