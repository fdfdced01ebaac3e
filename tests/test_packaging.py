"""The package is the repository's top level: what is listed, what a wheel holds, where it imports from."""

from __future__ import annotations

import email
import functools
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import weft

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the sources, and a folder with the sdist and the wheel that is built from the sdist.

    Built from copies: setuptools leaves build/ and egg-info beside the sources.
    """
    pytest.importorskip("setuptools", minversion="70.1")
    folder = tmp_path_factory.mktemp("built")
    source, dist = folder / "source", folder / "dist"
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    dist.mkdir()
    build = "import setuptools.build_meta as b, sys; getattr(b, sys.argv[1])(sys.argv[2])"
    run = functools.partial(subprocess.run, check=True, capture_output=True)
    run([sys.executable, "-c", build, "build_sdist", str(dist)], cwd=source)
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([sys.executable, "-c", build, "build_wheel", str(dist)], cwd=unpacked)
    return source, dist


def test_a_wheel_built_from_the_sdist_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    source, dist = built
    (wheel,) = dist.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {"weft/py.typed", "weft/state_checks.cpp"}
    for package in folders_with_init():
        folder = Path(*package.split(".")[1:])
        wanted |= {str(Path("weft") / folder / file.name) for file in (source / folder).glob("*.py")}
    data = [*(source / "inductor").rglob("*.toml"), *(source / "plan/templates").iterdir()]
    wanted |= {str(Path("weft") / file.relative_to(source)) for file in data}
    assert held == wanted


def test_an_installed_wheel_imports_and_trains(built: tuple[Path, Path], tmp_path: Path) -> None:
    (wheel,) = built[1].glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-cache-dir"]
    subprocess.run([*install, "--target", str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    program = (
        "import torch, weft\n"
        "model = torch.nn.Linear(2, 1)\n"
        "@weft.compile\n"
        "def step(x):\n"
        "    model(x).sum().backward()\n"
        "step(torch.ones(3, 2))\n"
        "print(weft.__file__, weft.__version__, model.weight.grad.tolist())\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split(maxsplit=2) == [
        str(tmp_path / "site" / "weft" / "__init__.py"),
        weft.__version__,
        "[[3.0, 3.0]]\n",
    ]
    command = [str(tmp_path / "site" / "bin" / "weft"), "--version"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"weft {weft.__version__}\n"


def test_metadata_has_the_version_of_the_package(built: tuple[Path, Path]) -> None:
    (wheel,) = built[1].glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == weft.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert any("torch" in one and "<" in one for one in metadata.get_all("Requires-Dist", []))


def test_a_package_index_takes_both(built: tuple[Path, Path]) -> None:
    (wheel,), (archive,) = built[1].glob("*.whl"), built[1].glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel)
    (name,) = (name for name in inside.namelist() if name.endswith("METADATA"))
    with tarfile.open(archive) as file:
        (info,) = (
            member for member in file.getmembers() if member.name.count("/") == 1 and member.name.endswith("PKG-INFO")
        )
        unpacked = file.extractfile(info)
        assert unpacked is not None
        texts = [inside.read(name), unpacked.read()]
    for text in texts:
        metadata = Metadata.from_email(text, validate=True)
        assert metadata.requires_python is not None
        assert "3.11" in metadata.requires_python


def test_twine_finds_no_fault_with_both(built: tuple[Path, Path]) -> None:
    pytest.importorskip("twine", reason="CI's job of integrations installs it")
    files = [*built[1].glob("*.whl"), *built[1].glob("*.tar.gz")]
    run = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert run.stdout.count("PASSED") == len(files) == 2, run.stdout + run.stderr


def test_constraints_admit_the_triton_that_torch_brings() -> None:
    """Builds of torch with CUDA, which PyPI has, depend on one version of triton; builds for CPUs on none."""
    for file, torch_version, brought in (
        ("constraints.txt", "2.13.0", "3.7.1"),
        ("constraints-torch-2.11.txt", "2.11.0", "3.6.0"),
    ):
        lines = [Requirement(line) for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        pinned = {line.name: line.specifier for line in lines}
        assert torch_version in pinned["torch"]
        assert brought in pinned["triton"]


def test_weft_imports_from_anywhere(tmp_path: Path) -> None:
    # Public names are imported when they are first used, after a program has set its seeds.
    seeded = "import random, weft; before = random.getstate(); weft.compile; assert random.getstate() == before"
    command = [sys.executable, "-c", f"{seeded}; print(weft.__file__)"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(run.stdout.strip()).resolve() == ROOT / "__init__.py"


# What Windows lacks, and macOS in part: modules, functions, signals, and the files of /proc. Modules of torch that look
# at them are imported before.
WITHOUT_UNIX = """
import sys
for name in ("triton", "resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
import os, signal, torch, torch.distributed.run
for name in ("register_at_fork", "fork", "geteuid", "getuid", "O_NOFOLLOW", "O_NONBLOCK", "sched_getaffinity",
             "sysconf", "memfd_create", "pidfd_open", "nice", "killpg", "getpgid", "setsid", "uname"):
    delattr(os, name)
for name in ("pthread_sigmask", "pthread_kill", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP", "SIGCHLD", "SIGSTOP",
             "SIGCONT", "setitimer", "alarm"):
    delattr(signal, name)

def without_proc(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(arguments[0])

sys.addaudithook(without_proc)
"""


def test_weft_plans_and_saves_where_triton_and_unix_are_missing(tmp_path: Path) -> None:
    """All public names are there. The command line predicts a run, as functions do. Saving names what is missing."""
    (tmp_path / "train.py").write_text(
        "import torch, weft\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "model = weft.fully_shard(torch.nn.Linear(64, 64), mesh=init_device_mesh('cuda', (8,)))\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "@weft.compile\n"
        "def step(x):\n"
        "    loss = model(x).mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss\n"
        "step(torch.randn(4, 64, device='cuda'))\n"
    )
    program = WITHOUT_UNIX + (
        "import weft\n"
        "from weft.launch.entry import main\n"
        "assert all(getattr(weft, name) is not None for name in weft.__all__)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "step = weft.compile(lambda x: model(x).sum().backward())\n"
        "step(torch.ones(3, 4))\n"
        "assert weft.explain(step).scheduled('h200x8').schedule.simulation.seconds > 0\n"
        "assert not weft.stopping()\n"
        "try:\n"
        "    weft.TrainState(model=model).save('checkpoints', 1)\n"
        "except weft.errors.CannotCheckpoint as error:\n"
        "    print(error)\n"
        "assert weft.TrainState(model=model).load('checkpoints') is None\n"
        "sys.argv = ['weft', 'plan', 'train.py', '--world-size', '8', '--cluster', 'h200x8']\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "needs a system whose processes inherit files" in run.stdout
    assert "step" in run.stdout.partition("inherit files")[2]


def test_weft_trains_where_triton_and_unix_are_missing() -> None:
    """As on macOS and Windows: kernels are refused by name, all else works on the CPU."""
    program = WITHOUT_UNIX + (
        "import weft\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "@weft.compile\n"
        "def step(x):\n"
        "    loss = model(x).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss.detach()\n"
        "assert step(torch.ones(3, 2)) > step(torch.ones(3, 2))\n"
        "print(weft.explain(step))\n"
        "try:\n"
        "    weft.explain(step).on('H200')\n"
        "except weft.errors.TritonMissing as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.rstrip().endswith(
        "weft's kernels need triton, which is not installed: `pip install triton` (3.6 to 3.9)"
    )
