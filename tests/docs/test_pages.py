"""README, CONTRIBUTING and docs/: links lead somewhere, Python blocks run and print what the page shows, names exist.

Blocks of one page run in order, in one process of their own, in one namespace. What a page leaves out to stay short
(a model, a batch) stands in a comment before the block that needs it, which readers do not see::

    <!-- setup
    model = torch.nn.Linear(4, 4)
    -->

A ``text`` block that follows a ``python`` block shows what that block prints. ``...`` stands for any text, and runs of
spaces count as one.
"""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import page_parts
import weft
from harness import ScriptRun, run_script, run_script_on_ranks
from page_parts import CODE, FENCE, PROCESSES, broken_links, pages

ROOT = Path(__file__).parents[2]
PAGES = pages(ROOT)
TARGETS = ("inductor", "capture", "distributed", "launch", "tests", "bench", "docs", "examples")
NAMED_FILE = re.compile(rf"`((?:{'|'.join(TARGETS)})/[\w/]+(?:\.py|\.md|\.toml|/)?)`")

DOTTED = re.compile(r"`(weft(?:\.\w+)+)(?:\(\))?`")
# On a line that names one file: functions, classes and constants of it, constants with or without their value.
OF_FILE = re.compile(r"`(\w+\(\)|_*[A-Z]\w+|_*[A-Z][A-Z_0-9]* = [^`]+)`")
END_OF_BLOCK = "---- end of a block"


def program(text: str) -> str:
    """The Python of a page, in order; empty where it has none. It prints a line after each block."""
    return page_parts.program(text, f"print({END_OF_BLOCK!r}, flush=True)")


def wrong_outputs(text: str, printed: str) -> list[str]:
    """Blocks whose output differs from what the page shows, with both."""
    wrong = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for found, output in zip(CODE.finditer(text), printed.split(END_OF_BLOCK), strict=False):
        shown = found["shown"]
        if shown is not None and not doctest.OutputChecker().check_output(shown.strip(), output.strip(), flags):
            wrong.append(f"the page shows\n{shown}\nthe block prints\n{output.strip()}")
    return wrong


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing_of_files(text: str) -> list[str]:
    """Functions, classes and constants that a line says are in the one file it names, and that are not there."""
    missing = []
    for line in FENCE.sub("", text).splitlines():
        files = [name for name in NAMED_FILE.findall(line) if name.endswith(".py")]
        if len(files) != 1 or not (ROOT / files[0]).exists():
            continue
        source = (ROOT / files[0]).read_text()
        for name in OF_FILE.findall(line):
            pattern = rf"^{re.escape(name)}(?=\s|$)" if " = " in name else rf"\b{name.removesuffix('()')}\b"
            if not re.search(pattern, source, re.MULTILINE):
                missing.append(f"{name} in {files[0]}")
    return missing


def run(code: str, folder: Path, processes: int = 1) -> ScriptRun:
    """Run a page's program; of several processes what the first one prints, unless another fails."""
    file = folder / "page.py"
    file.write_text(code)
    if processes == 1:
        return run_script(file)
    runs = run_script_on_ranks(file, processes)
    return next((each for each in runs if each.returncode), runs[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = {name for name in NAMED_FILE.findall(page.read_text()) if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_a_page_mentions_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    assert not [name for name in DOTTED.findall(text) if not resolves(name)]
    assert not missing_of_files(text)


def test_the_architecture_page_links_every_room() -> None:
    architecture = (ROOT / "docs/architecture.md").read_text()
    rooms = [page.name for page in (ROOT / "docs/rooms").glob("*.md")]
    assert rooms
    assert not [name for name in rooms if f"](rooms/{name})" not in architecture]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if program(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    processes = PROCESSES.search(text)
    result = run(program(text), tmp_path, int(processes[1]) if processes else 1)
    assert result.returncode == 0, f"{page.name}:\n{result.stderr[-3000:]}"
    assert not (wrong := wrong_outputs(text, result.stdout)), "\n".join(wrong)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[here](#a-heading) [gone](missing.md) [no heading](#other) [site](https://x.org)\n")
    assert broken_links(page) == ["missing.md", "#other"]


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    text = "<!-- setup\nx = 1\n-->\ntext\n\n```python\nassert x == 2\n```\n"
    assert run(program(text), tmp_path).returncode != 0
    assert run(program(text.replace("== 2", "== 1")), tmp_path).returncode == 0


def test_an_output_that_differs_is_found(tmp_path: Path) -> None:
    text = "```python\nprint(1 + 1, 'and more')\n```\n\n```text\n2 and ...\n```\n"
    assert not wrong_outputs(text, run(program(text), tmp_path).stdout)
    other = text.replace("2 and", "3 and")
    assert len(wrong_outputs(other, run(program(other), tmp_path).stdout)) == 1


def test_a_name_that_does_not_exist_is_found() -> None:
    assert resolves("weft.inductor.compiler.compile_graph")
    assert not resolves("weft.inductor.compiler.gone")
    assert not resolves("weft.inductor.gone.compile_graph")
    line = "`capture/graph.py`: `drop_dead()`, `Gone`, `log = 1`, `LOG = 1`"
    assert missing_of_files(line) == [f"{name} in capture/graph.py" for name in ("Gone", "LOG = 1")]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, which mkdocs loads."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_is_that_of_the_classes(hooks: ModuleType) -> None:
    text = hooks.on_page_markdown((ROOT / "docs/errors.md").read_text())
    classes = [value for value in vars(weft.errors).values() if isinstance(value, type)]
    mine = {value.__name__: value for value in classes if issubclass(value, weft.WeftError)}
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert set(parts) == set(mine)
    assert len(mine) > 100
    without = {"WeftError"}  # the base of all
    assert {name for name, part in parts.items() if "```python" not in part} <= without
    assert {name for name, part in parts.items() if "```text" not in part} == {"WeftError", "InternalFault"}
    assert all(part.partition("\n")[2].strip() for part in parts.values())
    assert "Call weft.materialize(model, device=...) before the first forward" in parts["MetaParameters"]
    assert "<!--" not in text


def test_the_reference_names_every_public_function_and_class(hooks: ModuleType) -> None:
    text = hooks.on_page_markdown((ROOT / "docs/reference.md").read_text())
    directives = [line.removeprefix("::: ") for line in text.splitlines() if line.startswith("::: ")]
    assert all(resolves(name) and pkgutil.resolve_name(name).__doc__ for name in directives)
    named = {name.rpartition(".")[2] for name in directives} | set(re.findall(r"`(\w+)`", text))
    assert [name for name in weft.__all__ if name not in named] == ["errors", "knobs"]
