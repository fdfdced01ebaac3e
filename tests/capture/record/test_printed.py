"""What a step prints and logs is printed and logged by every call, with the numbers of that call."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import OutsideEffect, TextOfValue

log = logging.getLogger("a training script")


def test_each_call_prints_and_logs_what_eager_does(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        print("step")
        print("loss", loss.item(), x, end="!\n")
        log.info("loss %.3f of %s", loss.item(), x)
        log.debug("below the level")
        return loss

    def run(called: Callable[..., Any]) -> tuple[str, list[Any]]:
        caplog.clear()
        for value in (1.0, 2.0, 3.0):
            called(torch.full((2,), value))
        records = [r for r in caplog.records if r.name == log.name]
        return capsys.readouterr().out, [(r.getMessage(), r.lineno, r.levelno) for r in records]

    with caplog.at_level(logging.INFO, logger=log.name):
        eager, compiled = run(step), run(weft.compile(step))
    assert compiled == eager
    assert eager[0].count("step") == len(eager[1]) == 3


TEXTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "f-string of a number": lambda x: print(f"{x.sum().item():.3f}"),
    "f-string of a tensor": lambda x: print(f"{x}"),
    "str of a number": lambda x: str(x.sum().item()),
    "repr of a tensor": lambda x: repr(x),
    "format": lambda x: "{}".format(x.sum().item()),  # noqa: UP032
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_value_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(TextOfValue, match=r"test_printed\.py:\d+"):
        weft.compile(TEXTS[name])(torch.ones(2))


def test_files_are_not_opened_once_only(tmp_path: pathlib.Path) -> None:
    def opened(x: torch.Tensor) -> None:
        with open(tmp_path / "a", "w") as file:
            file.write("x")

    for step in (opened, lambda x: (tmp_path / "a").write_text("x")):
        with pytest.raises(OutsideEffect, match=r"opens a file at .*test_printed\.py:\d+"):
            weft.compile(step)(torch.ones(2))
    assert not (tmp_path / "a").exists()


def test_a_module_that_is_imported_in_a_step_opens_files_and_prints_as_in_eager(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.txt").write_text("3")
    (tmp_path / "imported_in_a_step.py").write_text(
        "import pathlib\n"
        "def read():\n"
        "    return int((pathlib.Path(__file__).parent / 'settings.txt').read_text())\n"
        "FACTOR = read()\n"
        "print('read', FACTOR)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def step(x: torch.Tensor) -> torch.Tensor:
        import imported_in_a_step  # type: ignore[missing-import]

        return x * imported_in_a_step.FACTOR

    compiled = weft.compile(step)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert capsys.readouterr().out == "read 3\n"
