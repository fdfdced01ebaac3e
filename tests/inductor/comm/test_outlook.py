"""What the rest of a step needs, against walking through it."""

from __future__ import annotations

import random

from brute_force import random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inductor.comm.outlook import Outlook
from weft.inductor.comm.problem import Problem
from weft.inductor.comm.simulate import Holding


def ahead(problem: Problem, issued: list[int], left: list[int]) -> dict[int, int]:
    """Bytes held while each of ``left`` is issued, after ``issued``."""
    holding = Holding(problem)
    for task in issued:
        holding.issue(task)
    return {task: holding.issue(task) for task in left}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_it_foresees_what_the_rest_of_an_order_holds(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, most_tasks=12)
    left = list(range(len(problem.tasks)))
    outlook, holding, issued = Outlook(problem, tuple(left)), Holding(problem), list[int]()
    flags = bytearray(len(left))
    while left:
        place = left[0]
        ready = [at for at in left if all(flags[need] for need in problem.tasks[at].needs)]
        task = rng.choice(ready)
        if task != place:
            before = [at for at in left if at < task]
            known = ahead(problem, issued, left)
            most, where = outlook.copy().most(place, task)
            assert most == max(known[at] for at in before)
            assert where == max(at for at in before if known[at] == most)
            outlook.issue_ahead(task, holding.during(task) - holding.now, place)
        made = holding.during(task) - holding.now
        assert outlook.freed([task], flags) == holding.now + made - holding.after(task)
        holding.issue(task)
        flags[task] = True
        issued.append(task)
        left.remove(task)


def test_a_copy_goes_on_by_itself() -> None:
    problem = random_problem(random.Random(1))
    last = len(problem.tasks) - 1
    outlook = Outlook(problem, range(last + 1))
    most = outlook.most(0, last)
    outlook.copy().issue_ahead(last, 1000, 0)
    assert outlook.most(0, last) == most
