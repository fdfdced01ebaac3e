"""The package is the repository's top level: what is listed, what a wheel holds, where it imports from."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = {"tests", "examples", "bench", "docs", "build", "dist", "out"}


def folders_with_init() -> set[str]:
    """Every package below the top level, as `weft.a.b`."""
    found = {"weft"}
    for file in ROOT.rglob("__init__.py"):
        parts = file.parent.relative_to(ROOT).parts
        if parts and not parts[0].startswith(".") and parts[0] not in OUTSIDE:
            found.add(".".join(("weft", *parts)))
    return found


def test_every_folder_is_listed_in_pyproject() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == folders_with_init()
    assert len(listed) == len(set(listed))


def test_every_module_lies_in_a_package() -> None:
    packages = {Path(*name.split(".")[1:]) for name in folders_with_init()}
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT)
        if not path.parts[0].startswith(".") and path.parts[0] not in OUTSIDE:
            assert path.parent in packages, f"{path} lies in a folder without __init__.py"


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="70.1")
    # Built from a copy: setuptools leaves build/ and egg-info beside the sources.
    source = tmp_path / "source"
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {"weft/py.typed"}
    for package in folders_with_init():
        folder = Path(*package.split(".")[1:])
        wanted |= {str(Path("weft") / folder / file.name) for file in (source / folder).glob("*.py")}
    wanted |= {str(Path("weft") / file.relative_to(source)) for file in (source / "inductor").rglob("*.toml")}
    assert held == wanted


def test_weft_imports_from_anywhere(tmp_path: Path) -> None:
    # Public names are imported when they are first used, after a program has set its seeds.
    seeded = "import random, weft; before = random.getstate(); weft.compile; assert random.getstate() == before"
    command = [sys.executable, "-c", f"{seeded}; print(weft.__file__)"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(run.stdout.strip()).resolve() == ROOT / "__init__.py"
