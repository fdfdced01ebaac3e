"""What mkdocs fills in when it builds the site: errors, public names, and the files outside docs/ that pages link to.

Each linked file of Python becomes a page of its own, so that the site has no link that leads nowhere.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import weft

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "errors.py"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the files of the site: adds a page for each file outside docs/ that a page links to."""
    from mkdocs.structure.files import File

    found = {path for file in files.documentation_pages() for path in outside(file.src_uri).values()}
    for path in sorted(found):
        name = path.relative_to(ROOT).as_posix()
        text = f"# {name}\n\n```{'python' if path.suffix == '.py' else 'text'}\n{path.read_text()}\n```\n"
        files.append(File.generated(config, f"files/{name}.md", content=text))
    return files


def outside(page: str) -> dict[str, Path]:
    """The links of a page of docs/ to files outside docs/, with these files."""
    folder = (ROOT / "docs" / page).parent
    text = (ROOT / "docs" / page).read_text() if (ROOT / "docs" / page).exists() else ""
    targets = {link: (folder / link).resolve() for link in LINK.findall(text)}
    return {link: path for link, path in targets.items() if path.is_file() and ROOT / "docs" not in path.parents}


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    here = "" if page is None else page.file.src_uri
    for link, path in outside(here).items() if here else ():
        to = os.path.relpath(f"files/{path.relative_to(ROOT).as_posix()}.md", os.path.dirname(here) or ".")
        markdown = markdown.replace(f"]({link}", f"]({to}")
    for mark, fill in (("<!-- errors -->", errors), ("<!-- public names -->", public_names)):
        if mark in markdown:
            markdown = markdown.replace(mark, fill())
    return markdown


# ---- errors


def errors() -> str:
    """For each class of error what it means, an example, and its message, which ends with the remedy."""
    parts, messages = [], dict[str, str]()
    for line in ast.parse(SOURCE.read_text()).body:
        if isinstance(line, ast.ClassDef):
            parts.append(f"## {line.name}\n\n{_prose(ast.get_docstring(line) or '')}\n")
            inherited = (messages.get(ast.unparse(base), "") for base in line.bases)
            messages[line.name] = _message(line) or next(filter(None, inherited), "")
            if message := messages[line.name]:
                parts.append(f"```text\n{message}\n```\n")
            if found := examples().get(line.name):
                parts.append(f"{found[0]}:\n\n```python\n{found[1]}\n```\n")
    return "\n".join(parts)


def _prose(docstring: str) -> str:
    return docstring.partition("\n\nAttributes:")[0].replace("``", "`")


def _message(error: ast.ClassDef) -> str:
    """The text that is passed to the base class, with the names of what is filled in."""
    for call in ast.walk(error):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".__init__") and call.args:
            return re.sub(r"\s+", " ", _text(call.args[-1])).strip()
    return ""


def _text(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    if isinstance(value, ast.BinOp):
        return _text(value.left) + _text(value.right)
    if isinstance(value, ast.FormattedValue):
        return _text(value.value)
    names = [part for part in re.findall(r"[a-z_]+", ast.unparse(value)) if part not in _NO_NAMES]
    return f"<{names[-1].strip('_').replace('_', ' ')}>" if names else "<...>"


_NO_NAMES = frozenset(
    ["self", "shown", "listed", "join", "choices", "str", "repr", "if", "else", "or", "and", "len", "for"]
)


@functools.cache
def examples() -> dict[str, tuple[str, str]]:
    """For each error where its example is from and the code that raises it: that of error_examples.toml, or of the
    shortest test that expects it, of which the block alone where the whole is long."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        lines = text.splitlines()
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            for block in (node for node in ast.walk(function) if isinstance(node, ast.With)):
                for name in _raised(block):
                    whole = function.end_lineno - function.body[0].lineno if function.end_lineno else 0
                    first, last = (
                        (function.body[0].lineno, function.end_lineno)
                        if whole <= 16
                        else (block.lineno, block.end_lineno)
                    )
                    code = textwrap.dedent("\n".join(lines[first - 1 : last]))
                    found.setdefault(name, []).append(
                        (code.count("\n"), f"`{file.relative_to(ROOT).as_posix()}`", code)
                    )
    shortest = {
        name: min((each for each in each_of if each[0] >= 2), default=min(each_of)) for name, each_of in found.items()
    }
    written = tomllib.loads((ROOT / "docs/error_examples.toml").read_text())
    from_tests = {name: (f"Example, from {file}", code) for name, (_, file, code) in shortest.items()}
    return from_tests | {name: ("Example", code.strip()) for name, code in written.items()}


def _raised(block: ast.With) -> list[str]:
    """The names of the errors that a ``with pytest.raises(...)`` expects."""
    names = []
    for item in block.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call.args:
            kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
            names += [ast.unparse(kind).rpartition(".")[2] for kind in kinds]
    return names


# ---- public names


def public_names() -> str:
    """A directive of mkdocstrings for each public name that is weft's, and a line for those that are PyTorch's."""
    parts, of_torch = [], []
    for name in weft.__all__:
        value = getattr(weft, name)
        if isinstance(value, ModuleType):
            continue  # pages of their own
        if value.__module__.startswith("torch."):
            of_torch.append(f"`{name}`")
        else:
            parts.append(f"::: {value.__module__}.{value.__qualname__}")
    return "\n\n".join([*parts, f"PyTorch's own, under weft's name: {', '.join(of_torch)}."])
