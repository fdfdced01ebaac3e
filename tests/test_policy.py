"""The rules of the house, held by reading the sources: who imports whom, which torch names, what size."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
OUTSIDE = ("tests", "examples", "bench", "docs")
BUILT = ("build", "dist", "out")

# From the ground up: each floor imports only from those before it. The basement may be imported by all.
FLOORS = [
    "distributed",
    "capture",
    "inductor",
    "verify",
    "replay",
    "program_form",
    "branching_form",
    "agreed_options",
    "step_summary",
    "compile_options",
    "compile",
    "backend",
    "metrics",
    "explain_tables",
    "explain",
    "plan",
    "launch",
]
BASEMENT = [
    "shown_values",
    "errors",
    "argument_checks",
    "threads_at_exit",
    "gloo",
    "logs",
    "tensor_subclasses",
    "dtensor_placements",
    "thread_patches",
    "torch_adapter",
    "torchscript_adapter",
    "mesh_facts",
    "shared_inputs",
    "triton_adapter",
    "transport_rows",
    "knobs",
    "source_files",
    "short_tracebacks",
    "cuda_driver",
    "host_processes",
    "rank_watch",
    "cache_folder",
    "state_checks",
    "graph_hashes",
    "dynamo_entry",
]

# The floors inside inductor/, from the ground up: a file imports only from its own folder and from those before it.
INNER_FLOORS = [
    "graph",
    "loop_ir",
    "lowering",
    "codegen",
    "multi_tensor",
    "passes",
    "cache",
    "runtime",
    "transports",
    "cost",
    "fusion",
    "schedule",
    "compiler",
]

# The folders inside capture/, from the ground up, under the same rule. Its files at the top may be imported by all of
# them; the last two files stand above the folders.
CAPTURE_FLOORS = ["fake", "state", "record", "guards", "agreement"]
CAPTURE_ROOF = ["toy", "__main__"]

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
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "CompiledStep",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "NoParallel",
    "OffloadPolicy",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateModule",
    "ResumableSampler",
    "RowwiseParallel",
    "SequenceParallel",
    "StepGraph",
    "TrainState",
    "UnshardHandle",
    "WeftError",
    "capture",
    "compile",
    "errors",
    "explain",
    "fake_world",
    "flush_log",
    "log",
    "log_to",
    "fully_shard",
    "knobs",
    "load_safetensors",
    "loss_parallel",
    "mark_dynamic",
    "mark_static",
    "materialize",
    "maybe_mark_dynamic",
    "metrics",
    "opaque",
    "parallelize",
    "parallelize_module",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "save_safetensors",
    "share_comm_ctx",
    "stopping",
    "tensor_parallel_plan",
]


@dataclass(frozen=True, eq=False)
class Source:
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """`capture` for capture/graph.py, `errors` for errors.py, `` for the package's own __init__.py."""
        first = self.path.parts[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @functools.cached_property
    def names(self) -> list[tuple[int, str]]:
        """Every dotted name that the file imports or spells out, aliases resolved, with its line."""
        return list(self._names())

    def _names(self) -> Iterator[tuple[int, str]]:
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


@functools.cache
def python_files() -> list[Path]:
    """The Python files of the checkout, relative to it. Environments and build folders are not entered."""
    found = []
    for folder, inner, files in os.walk(ROOT):
        at_top = Path(folder) == ROOT
        inner[:] = [name for name in inner if not name.startswith(".") and not (at_top and name in BUILT)]
        found += [Path(folder, file).relative_to(ROOT) for file in files if file.endswith(".py")]
    return sorted(found)


@functools.cache
def sources(*folders: str) -> list[Source]:
    """The Python files of the package, or of the named folders beside it."""
    return [
        Source(path, ast.parse((ROOT / path).read_text(), str(path)))
        for path in python_files()
        if (path.parts[0] in folders if folders else path.parts[0] not in OUTSIDE)
    ]


def private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.endswith("__") for p in parts)


def allowed(name: str) -> bool:
    return any(name == stable or name.startswith(stable + ".") for stable in ALLOWED_TORCH)


def test_a_room_imports_only_from_floors_below_it() -> None:
    wrong = []
    for source in sources():
        for line, name in source.names:
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package != "weft" or source.room in ("", room) or room in ("", "__version__"):
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


def test_a_folder_of_the_compiler_imports_only_from_folders_below_it() -> None:
    wrong = []
    for source in sources("inductor"):
        if len(source.path.parts) == 2 and source.path.name in ("__init__.py", "__main__.py"):
            continue
        floor = source.path.parts[1].removesuffix(".py")
        assert floor in INNER_FLOORS, f"{source.path} is on no inner floor"
        for line, name in source.names:
            parts = name.split(".")
            if parts[:2] == ["weft", "inductor"] and len(parts) > 2:
                below = INNER_FLOORS.index(parts[2]) if parts[2] in INNER_FLOORS else len(INNER_FLOORS)
                if below > INNER_FLOORS.index(floor):
                    wrong.append(f"{source.path}:{line}: {name}")
    assert not wrong, "imports that climb:\n" + "\n".join(sorted(set(wrong)))


def test_a_folder_of_the_capture_imports_only_from_folders_below_it() -> None:
    """``toy.py`` and ``__main__.py`` stand above the folders, all other files of capture/ below them."""
    wrong = []
    order = {name: at for at, name in enumerate([*CAPTURE_FLOORS, *CAPTURE_ROOF], start=1)}
    for source in sources("capture"):
        first = source.path.parts[1].removesuffix(".py")
        assert first in order or len(source.path.parts) == 2, f"{source.path} is on no floor of capture/"
        for line, name in source.names:
            parts = name.split(".")
            if parts[:2] == ["weft", "capture"] and len(parts) > 2 and order.get(parts[2], 0) > order.get(first, 0):
                wrong.append(f"{source.path}:{line}: {name}")
    assert not wrong, "imports that climb:\n" + "\n".join(sorted(set(wrong)))


def test_files_do_not_import_each_other_in_a_cycle() -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    modules = {module_name(source.path): source for source in sources()}
    imports = {name: imported_modules(source, modules) - {name} for name, source in modules.items()}
    finished: set[str] = set()
    for start in sorted(imports):
        walk(start, imports, [], finished)


def module_name(path: Path) -> str:
    return ".".join(["weft", *path.with_suffix("").parts]).removesuffix(".__init__")


def imported_modules(source: Source, modules: dict[str, Source]) -> set[str]:
    found: set[str] = set()
    pending: list[ast.AST] = [source.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else str(node.module))
        pending.extend(ast.iter_child_nodes(node))
    return found & set(modules) - {"weft"}


def walk(module: str, imports: dict[str, set[str]], path: list[str], finished: set[str]) -> None:
    assert module not in path, "files import each other: " + " -> ".join([*path[path.index(module) :], module])
    if module not in finished:
        for imported in sorted(imports[module]):
            walk(imported, imports, [*path, module], finished)
        finished.add(module)


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(source.path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_private_torch_names_stay_in_the_adapter() -> None:
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in [*sources(), *sources("examples")]
        if source.path not in (Path("torch_adapter.py"), Path("torchscript_adapter.py"))
        for line, name in source.names
        if private(name) and not allowed(name)
    }
    assert not wrong, "private torch names outside of the adapters:\n" + "\n".join(sorted(wrong))


def test_triton_is_compiled_and_interpreted_by_the_adapter_alone() -> None:
    """Elsewhere there is at most the language, for functions whose text goes into kernels."""
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in sources()
        if source.path != Path("triton_adapter.py")
        for line, name in source.names
        if name.partition(".")[0] == "triton" and name.split(".")[1:2] not in ([], ["jit"], ["language"])
    }
    assert not wrong, "triton outside triton_adapter.py:\n" + "\n".join(sorted(wrong))


def test_inductor_is_a_peer_and_not_a_dependency() -> None:
    wrong = {
        f"{source.path}:{line}: {name}"
        for source in [*sources(), *sources("tests", "examples")]
        for line, name in source.names
        if name.startswith("torch._inductor")
    }
    assert not wrong, "torch._inductor is for bench/ only:\n" + "\n".join(sorted(wrong))


def test_files_stay_small() -> None:
    sizes = {source.path: len((ROOT / source.path).read_text().splitlines()) for source in sources()}
    # One file each by rule, whatever they hold: functions and classes that do not depend on each other.
    limits = {Path("torch_adapter.py"): 1600, Path("errors.py"): 1400}
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
        "hidden = [n for n in weft._HOMES if isinstance(getattr(weft, n), types.ModuleType)]\n"
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


def test_public_names_have_docstrings() -> None:
    """Functions, classes and the methods of public classes, in every folder of the package.

    Setters of a property need none: readers see the getter's.
    """
    missing = []
    for source in sources():
        for node in source.tree.body:
            is_public_class = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            for member in [node, *(node.body if is_public_class else ())]:
                named = isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                setter = any(
                    getattr(decorator, "attr", "") == "setter" for decorator in getattr(member, "decorator_list", ())
                )
                if named and not setter and not member.name.startswith("_") and ast.get_docstring(member) is None:
                    missing.append(f"{source.path}:{member.lineno}: {member.name}")
    assert not missing, "\n".join(missing)
