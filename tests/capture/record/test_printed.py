"""What a step prints and logs is printed and logged by every call, with the numbers of that call."""
# ruff: noqa: UP031 - formats by ``%`` are what is tested

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
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


def shown(x: torch.Tensor) -> str:
    return f"<{x.sum().item():.2f}>"


class Reporter:
    """Logs as trainers do: through an attribute, and with a text that another method makes."""

    def __init__(self) -> None:
        self.logger = log

    def text(self, metrics: dict[str, Any]) -> str:
        return "  ".join(f"{name}: {value:.4f}" for name, value in metrics.items())

    def __call__(self, x: torch.Tensor) -> None:
        metrics = {"sum": x.sum().item(), "mean": x.mean()}
        self.logger.info("step " + self.text(metrics))
        message = f"first {x[0].item()}"
        if x.mean() > 1.5:
            message = f"{message} of {x.tolist()}"
        x.mul_(2)
        self.logger.warning(message)


KEPT: list[str] = []


@weft.opaque
def noted(text: str, *, also: list[str]) -> None:
    KEPT.extend([text, *also])


def texts(x: torch.Tensor) -> Any:
    total = x.sum()
    y = x.clone()
    print(f"total {total:.3f} of {y} and {total.item()!r}", f"{total.item() * 100:>9.1f}%", [f"{x[0]}"])
    print("{:.2f} {}".format(total.item(), y), "and %s" % total.item(), str(y), sep=f"-{total}-")  # noqa: UP032
    print(", ".join([f"{at}={each.item()}" for at, each in enumerate(x)]) + "." if x.shape[0] > 1 else f"{x[0]}")
    noted(f"{total:.1f}", also=[repr(y), format(total.item(), "e")])
    Reporter()(y)
    print(shown(y))
    str(total.item())
    line = f"end {total.item() > 5} {shown(y)}"
    return {"text": line, "same": (line, [f"{y[0].item()}"]), "sum": total}


def test_texts_that_go_straight_out_are_made_at_every_call(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    with caplog.at_level(logging.INFO, logger=log.name):
        for called in (texts, weft.compile(texts)):
            caplog.clear()
            KEPT.clear()
            results = [called(torch.full((2,), value)) for value in (1.0, 2.0, 3.0, 0.25)]
            found.append([results, list(KEPT), capsys.readouterr().out, [r.getMessage() for r in caplog.records]])
            assert all(type(result["text"]) is str for result in results)
    assert found[1] == found[0]


def by_percent(x: torch.Tensor) -> Any:
    total, count = x.sum(), int((x > 1).sum())
    print("[%d/%d] loss %.4f, mean %8.3e%%" % (count, x.shape[0], total.item(), x.mean()))
    print(
        "lr %g of %s, "
        "sum %+.2f, text %s%c" % (0.1, x.shape[0], x[0], total, "!")
    )  # fmt: skip
    line = "first %5.1f" % x[0].item() + ", %r" % total.item()
    log.info(line)
    noted("%.2f and %i" % (x[1], count), also=[each % total for each in ()])
    print("in lists: %s and %s" % ([total.item()], [total, {"x": x[0]}]), "%s" % [x])
    print("of numpy: %s, %r" % (np.clip(total.item(), 0.5, 5.0), np.round(total.item())))
    print("nothing to fill in: 100%% of %s" % "all", "%d" % 3.7, "%(a)d" % {"a": 3})
    return {"text": "%.3f" % total.item(), "plain": "%s" % "a", "rest": count % 2}


def test_formats_by_percent_are_filled_in_at_every_call(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    code = by_percent.__code__
    with caplog.at_level(logging.INFO, logger=log.name):
        for called in (by_percent, weft.compile(by_percent)):
            caplog.clear()
            KEPT.clear()
            results = [called(torch.full((2,), value)) for value in (1.0, 2.0, 3.0, 0.25)]
            found.append([results, list(KEPT), capsys.readouterr().out, [r.getMessage() for r in caplog.records]])
            assert all(type(result["text"]) is str and type(result["plain"]) is str for result in results)
    assert found[1] == found[0]
    assert by_percent.__code__ is code


def listed_by_percent(x: torch.Tensor) -> None:
    print("%s" % (list(map(str, x.tolist())),))


def compared_by_percent(x: torch.Tensor) -> None:
    if "%.1f" % x.sum().item() == "2.0":
        print("two")


def width_of_the_data(x: torch.Tensor) -> None:
    print("%*d" % ((x > 0).sum().item(), 3))


def compared(x: torch.Tensor) -> None:
    line = f"{x.sum().item():.1f}"
    print(line)
    print("two" if line == "2.0" else "other")


def seen_by_callee(x: torch.Tensor) -> None:
    def show(line: str) -> None:
        print(line, len(line))

    show(f"{x.sum().item()}")


def in_closure(x: torch.Tensor) -> None:
    line = f"{x.sum().item()}"
    print((lambda: line)())


def as_key(x: torch.Tensor) -> Any:
    return {f"{x.sum().item()}": 1}


def padded(x: torch.Tensor) -> None:
    print(f"{x.sum().item()!s:>20}")


def padded_text(x: torch.Tensor) -> None:
    print(f"{x.sum().item():.2f} {shown(x):>20}")


def padded_by_format(x: torch.Tensor) -> None:
    print("{!s:>20}".format(x.sum().item()))  # noqa: UP032


def padded_by_percent(x: torch.Tensor) -> None:
    print("%20s" % x.sum().item())


def escaped(x: torch.Tensor) -> None:
    print(f"{[f'{x.sum().item()}']}")


def represented(x: torch.Tensor) -> None:
    print(repr(f"{x.sum().item()}"))


def specified(x: torch.Tensor) -> None:
    print(f"{1.5:>{(x > 0).sum().item()}}")


def cut(x: torch.Tensor) -> None:
    print(f"{x.sum().item()}"[:3])


def sorted_by_text(x: torch.Tensor) -> Any:
    return sorted(x.unbind(), key=lambda each: f"{each.item()}")


def grown(x: torch.Tensor) -> None:
    line = "a"
    line += f"{x.sum().item()}"
    print(line)


def looked_up(x: torch.Tensor) -> None:
    line = f"{x.sum().item()}"
    print(len(locals()["line"]))


READ = [
    *(
        compared,
        seen_by_callee,
        in_closure,
        as_key,
        padded,
        padded_text,
        padded_by_format,
        padded_by_percent,
        escaped,
        represented,
    ),
    compared_by_percent,
    listed_by_percent,
    *(cut, sorted_by_text, grown, looked_up, specified),
]


@pytest.mark.parametrize("step", READ)
def test_a_text_of_a_value_that_may_be_read_is_refused_with_its_line(step: Callable[..., Any]) -> None:
    with pytest.raises(TextOfValue, match=r"test_printed\.py:\d+"):
        weft.compile(step)(torch.ones(2))


def test_a_size_that_changes_has_the_width_of_its_format() -> None:
    step = lambda x: (x + 1, {"%4s|%-5r|%03d" % (x.shape[0], x.shape[0], x.shape[0]): 1})
    compiled = weft.compile(step)
    for rows in (2, 3, 4):
        assert list(compiled(torch.ones(rows, 2))[1]) == list(step(torch.ones(rows, 2))[1])


def test_a_width_that_the_data_decides_is_that_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    for called in (width_of_the_data, weft.compile(width_of_the_data)):
        for positive in (1, 3, 1):
            called(torch.tensor([1.0] * positive + [-1.0]))
        assert capsys.readouterr().out == "3\n  3\n3\n"


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
    (tmp_path / "opens_files_when_imported.py").write_text(
        "import pathlib\n"
        "def read():\n"
        "    return int((pathlib.Path(__file__).parent / 'settings.txt').read_text())\n"
        "FACTOR = read()\n"
        "print('read', FACTOR)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def step(x: torch.Tensor) -> torch.Tensor:
        import opens_files_when_imported  # type: ignore[missing-import]

        return x * opens_files_when_imported.FACTOR

    compiled = weft.compile(step)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert capsys.readouterr().out == "read 3\n"


def test_texts_of_torchs_objects_show_numbers_that_change() -> None:
    linear, drop, norm = torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.LayerNorm(2, eps=1e-3)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> Any:
        group = optimizer.param_groups[0]
        return linear(x).detach(), repr(optimizer), str(drop), f"{norm}", "%s" % linear, norm.extra_repr(), group["lr"]

    compiled = weft.compile(step)
    for _ in range(4):
        ours, eager = compiled(torch.ones(2)), step(torch.ones(2))
        assert ours[1:] == eager[1:]
        optimizer.param_groups[0]["lr"] *= 0.5
        drop.p += 0.1
        norm.eps *= 2
        linear.out_features += 1


def test_the_level_of_a_logger_changes_between_calls(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of a step that logs")

    def step(x: torch.Tensor) -> Any:
        logger.info("the sum is %s", x.sum().item())
        return x * 2 if logger.isEnabledFor(logging.INFO) else x * logger.level

    compiled, found = weft.compile(step), []
    for run in (compiled, step):
        caplog.clear()
        results = []
        for level in (logging.INFO, logging.ERROR, logging.DEBUG, logging.CRITICAL, logging.INFO):
            logger.setLevel(level)
            results.append(run(torch.ones(2)).tolist())
        found.append([results, [record.getMessage() for record in caplog.records if record.name == logger.name]])
    assert found[0] == found[1]


def test_another_thread_logs_the_numbers_that_a_capture_changes() -> None:
    state = {"count": 0, "rate": 0.5}
    asked, answered = threading.Event(), threading.Event()
    texts: list[str] = []

    def monitor() -> None:
        while asked.wait(60) and state["count"] < 4:
            asked.clear()
            texts.append(f"{state['count']:d} {state['rate']:.3f} {state['count']} {state['rate']!r}")
            answered.set()

    thread = threading.Thread(target=monitor, daemon=True)
    thread.start()

    def step(x: torch.Tensor) -> torch.Tensor:
        state["count"] += 1
        state["rate"] *= 0.5
        asked.set()
        answered.wait(60)
        answered.clear()
        return x * state["count"] * state["rate"]

    def shown() -> set[str]:
        texts.clear()
        state.update(count=0, rate=0.5)
        called = weft.compile(step)
        for _ in range(3):
            called(torch.ones(2))
        return set(texts)

    assert shown() == {"1 0.250 1 0.25", "2 0.125 2 0.125", "3 0.062 3 0.0625"}
    state["count"] = 4
    asked.set()
    thread.join()
