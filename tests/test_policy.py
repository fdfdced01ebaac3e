"""The rules of the house, held by reading the sources: who imports whom, which torch names, what size."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
OUTSIDE = ("tests", "examples", "bench", "docs")

# From the ground up: each floor imports only from those before it. The basement may be imported by all.
FLOORS = ["distributed", "capture", "inductor", "plan", "verify", "compile", "backend", "explain", "launch"]
BASEMENT = ["errors", "gloo", "logs", "torch_adapter", "triton_adapter", "knobs", "dynamo_entry"]

# All that the compiler sees of a wrapper is collectives in a graph.
FORBIDDEN = {("inductor", "distributed")}

# Private by name, stable in fact: what weft may use without going through torch_adapter.
ALLOWED_TORCH = (
    "torch._check",  # documented, despite its underscore
    "torch._decomp",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch.distributed._symmetric_memory",
    "torch.ops",
    "torch.utils._sympy",
)

MAX_LINES = 600

PUBLIC = [
    "CompiledStep",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ReplicateModule",
    "StepGraph",
    "WeftError",
    "capture",
    "compile",
    "explain",
    "fake_world",
    "fully_shard",
    "mark_dynamic",
    "mark_static",
    "materialize",
    "maybe_mark_dynamic",
    "opaque",
    "replicate",
]


@dataclass(frozen=True)
class Source:
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """`capture` for capture/graph.py, `errors` for errors.py, `` for the package's own __init__.py."""
        first = self.path.parts[0].removesuffix(".py")
        return "" if first == "__init__" else first

    def names(self) -> Iterator[tuple[int, str]]:
        """Every dotted name that the file imports or spells out, aliases resolved, with its line."""
        aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    aliases[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.path}:{node.lineno}: relative import"
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    yield node.lineno, f"{node.module}.{alias.name}"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and (dotted := spelled(node)) is not None:
                first, _, rest = dotted.partition(".")
                if first in aliases:
                    yield node.lineno, f"{aliases[first]}.{rest}"


def spelled(node: ast.expr) -> str | None:
    """`a.b.c` for the expression a.b.c, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := spelled(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def sources(*folders: str) -> list[Source]:
    """The Python files of the package, or of the named folders beside it."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT)
        top = path.parts[0]
        if top.startswith(".") or top in {"build", "dist", "out"}:
            continue
        if top in folders or (not folders and top not in OUTSIDE):
            found.append(Source(path, ast.parse(file.read_text(), str(path))))
    return found


def private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.endswith("__") for p in parts)


def allowed(name: str) -> bool:
    return any(name == stable or name.startswith(stable + ".") for stable in ALLOWED_TORCH)


def test_a_room_imports_only_from_floors_below_it() -> None:
    wrong = []
    for source in sources():
        for line, name in source.names():
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package != "weft" or source.room in ("", room):
                continue
            if room in BASEMENT:
                fine = source.room in FLOORS or BASEMENT.index(room) <= BASEMENT.index(source.room)
            else:
                fine = (
                    source.room in FLOORS
                    and room in FLOORS
                    and FLOORS.index(room) < FLOORS.index(source.room)
                    and (source.room, room) not in FORBIDDEN
                )
            if not fine:
                wrong.append(f"{source.path}:{line}: {name}")
    assert not wrong, "imports that climb:\n" + "\n".join(sorted(set(wrong)))


def test_every_room_stands_on_a_floor() -> None:
    assert {source.room for source in sources()} <= {*FLOORS, *BASEMENT, ""}


def test_private_torch_names_stay_in_the_adapter() -> None:
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in [*sources(), *sources("examples")]
        if source.path != Path("torch_adapter.py")
        for line, name in source.names()
        if private(name) and not allowed(name)
    }
    assert not wrong, "private torch names outside torch_adapter.py:\n" + "\n".join(sorted(wrong))


def test_triton_is_compiled_and_interpreted_by_the_adapter_alone() -> None:
    """Elsewhere there is at most the language, for functions whose text goes into kernels."""
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in sources()
        if source.path != Path("triton_adapter.py")
        for line, name in source.names()
        if name.partition(".")[0] == "triton" and name.split(".")[1:2] not in ([], ["jit"], ["language"])
    }
    assert not wrong, "triton outside triton_adapter.py:\n" + "\n".join(sorted(wrong))


def test_inductor_is_a_peer_and_not_a_dependency() -> None:
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in [*sources(), *sources("tests", "examples")]
        for line, name in source.names()
        if name.startswith("torch._inductor")
    }
    assert not wrong, "torch._inductor is for bench/ only:\n" + "\n".join(sorted(wrong))


def test_files_stay_small() -> None:
    sizes = {source.path: len((ROOT / source.path).read_text().splitlines()) for source in sources()}
    # One file each by rule, whatever they hold: functions and classes that do not depend on each other.
    limits = {Path("torch_adapter.py"): 1000, Path("errors.py"): 1000}
    assert not {str(path): size for path, size in sizes.items() if size >= limits.get(path, MAX_LINES)}


def test_subpackages_only_name_their_public_names() -> None:
    """A sub-package's __init__.py holds a docstring, imports and __all__."""
    for source in sources():
        if source.path.name != "__init__.py" or not source.room:
            continue
        for node in source.tree.body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and spelled(node.targets[0]) == "__all__"
            imports = isinstance(node, ast.Import | ast.ImportFrom)
            assert docstring or names or imports, f"{source.path}:{node.lineno}"


def test_public_names() -> None:
    assert sorted(weft.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", weft.__all__)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(weft, name).__doc__


def test_a_public_name_is_not_hidden_by_a_room_of_the_same_name() -> None:
    code = (
        "import importlib, types, weft\n"
        "homes = sorted(set(weft._HOMES.values()))\n"
        "[importlib.import_module(home) for home in homes]\n"
        "hidden = [n for n in weft.__all__ if isinstance(getattr(weft, n), types.ModuleType)]\n"
        "assert not hidden, hidden\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_weft_is_cheap_and_starts_no_cuda() -> None:
    code = (
        "import time, torch\n"
        "start = time.process_time()\n"
        "import weft\n"
        "print(time.process_time() - start, torch.cuda.is_initialized())\n"
    )
    command = [sys.executable, "-c", code]
    answers = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert min(float(seconds) for seconds, _ in answers) < 0.2
    assert {started for _, started in answers} == {"False"}
