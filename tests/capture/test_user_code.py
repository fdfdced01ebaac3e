from __future__ import annotations

import json
import sys
import timeit

import torch

from weft.capture.user_code import Frame, format_frame, user_frames, user_line


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
