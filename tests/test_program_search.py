"""The tools of the random-program test: reasons are counted alike, programs are reduced to what fails."""

from __future__ import annotations

from program_reduction import reduced
from program_search import failure
from random_programs import draw_plan, write


def test_a_program_is_reduced_to_the_lines_that_fail() -> None:
    source = write(draw_plan("31-4988"))
    needed = "s.opt.step()"
    assert source.count(needed) == 2
    short = reduced(source, lambda text: text.count(needed) >= 1)
    body = short[short.index("def step") : short.index("return s, step")].splitlines()
    assert [line.strip() for line in body[1:] if line.strip()] == [needed, "return None"]
    compile(short, "short", "exec")


def test_failures_with_other_numbers_are_alike() -> None:
    first = failure("raw: RuntimeError: size 3 at /tmp/1.py:4 in step\nmore")
    assert first == failure("raw: RuntimeError: size 12 at /tmp/27.py:31 in step") != failure("raw: KeyError: 3")
    assert failure("wrong: after call 0") == "wrong"
    assert failure("equal") is failure("refused: TextOfValue: a text") is failure("eager fails") is None
