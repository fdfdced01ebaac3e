from __future__ import annotations

import json
import sys
import timeit
import types
from pathlib import Path

import pytest
import torch

import weft
from weft.capture.user_code import Frame, format_frame, user_frames, user_line
from weft.source_files import is_own_file, is_user_file, is_weft_file


def test_innermost_frame_is_the_calling_line() -> None:
    def inner() -> tuple[Frame, ...]:
        return user_frames(2)

    line = sys._getframe().f_lineno + 1
    frames = inner()
    assert [f.name for f in frames] == ["inner", "test_innermost_frame_is_the_calling_line"]
    assert frames[1].lineno == line
    assert frames[0].filename == __file__
    assert format_frame(frames[1]) == f"{__file__}:{line} in test_innermost_frame_is_the_calling_line"


def test_frames_of_torch_and_the_standard_library_are_left_out() -> None:
    seen: list[tuple[Frame, ...]] = []

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            json.loads("{}", object_hook=lambda _: seen.append(user_frames(3)))
            return x

    Net()(torch.ones(1))
    names = [f.name for f in seen[0]]
    assert names == ["<lambda>", "forward", "test_frames_of_torch_and_the_standard_library_are_left_out"]


def test_a_backward_hook_sees_the_line_that_called_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[Frame, ...]] = []
    x.register_hook(lambda g: seen.append(user_frames(2)))
    x.sum().backward()
    assert [f.name for f in seen[0]] == [
        "<lambda>",
        "test_a_backward_hook_sees_the_line_that_called_backward",
    ]


def test_user_line_says_that_no_user_code_is_running() -> None:
    scope = {"user_line": user_line}
    # A file name that fx gives to code it generates: the innermost frames are machinery, this test is the
    # user.
    exec(compile("where = user_line()", "<eval_with_key>.0", "exec"), scope)
    assert "test_user_code.py" in str(scope["where"])
    assert user_frames(0) == ()


def test_the_walk_is_cheap() -> None:
    def deep(n: int) -> float:
        if n:
            return deep(n - 1)
        user_frames(4)
        return min(timeit.repeat(lambda: user_frames(4), number=1000, repeat=5)) / 1000

    # 10 microseconds on an idle machine; the test only guards against a walk that reads files or source.
    assert deep(20) < 50e-6


@pytest.mark.parametrize("name", ["<string>", "<stdin>", "<python-input-3>", "<ipython-input-2-ab12>", "<console>"])
def test_code_that_was_typed_in_is_the_users(name: str) -> None:
    scope = {"user_line": user_line}
    text = "\n\ndef step():\n    return user_line()\n\nwhere = [step(), (lambda: user_line())()]"
    exec(compile(text, name, "exec"), scope)
    assert scope["where"] == [f"{name}:4 in step", f"{name}:6 in <lambda>"]


def test_a_cell_of_a_notebook_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"/tmp/ipykernel_7/1234.py": ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    scope = {"user_line": user_line}
    exec(compile("\nwhere = user_line()", "/tmp/ipykernel_7/1234.py", "exec"), scope)
    assert scope["where"] == "Cell In[3]:2 in <module>"
    assert format_frame(Frame("train.py", 3, "step")) == "train.py:3 in step"


def test_packages_in_a_virtual_environment_inside_the_checkout_are_not_weft() -> None:
    root = Path(weft.__file__).parent
    package = root / ".venv/lib/python3.12/site-packages/transformers/modeling_utils.py"
    assert is_weft_file(str(root / "compile.py"))
    assert not is_weft_file(str(package))
    assert is_user_file(str(package))
    assert not is_own_file(str(package))
    assert not is_weft_file(str(root / "tests/harness.py"))


def test_a_folder_that_pip_installed_into_holds_libraries_beside_the_users_files(tmp_path: Path) -> None:
    """As ``pip install --target`` does it, in a folder of the user's."""
    files = ["library/__init__.py", "library/deep/layers.py", "single.py", "train.py", "mine/model.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    records = tmp_path / "library-1.0.dist-info" / "RECORD"
    records.parent.mkdir()
    records.write_text("library/__init__.py,sha256=1,6\nlibrary/deep/layers.py,,\nsingle.py,,\n../../bin/tool,,\n")
    assert [is_own_file(str(tmp_path / name)) for name in files] == [False, False, False, True, True]
    assert all(is_user_file(str(tmp_path / name)) for name in files)
