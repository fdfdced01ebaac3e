"""Orders of issue of random task graphs against the best order of each: ``make schedules SCHEDULES=100000``.

Small task graphs have few enough orders to try them all. The search of the schedule must come within a quarter of the
best one; nearly always it is the best one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from brute_force import least_seconds, random_task_graph

from weft.inductor.cost.simulate import simulate
from weft.inductor.schedule.search_order import search_order

# Times of the best order, below which a search is no failure.
MOST = 1.25
# What is counted: how many are at most so much slower than the best.
_STEPS = (1.0, 1.01, 1.05, 1.1, 1.25)


def ratio_to_best(seed: int) -> float:
    """Time of the order that the search finds, over that of the best order of the same task graph."""
    task_graph = random_task_graph(random.Random(seed))
    found = simulate(task_graph, search_order(task_graph)).seconds
    best = least_seconds(task_graph, at_most=found)
    return found / best if best else 1.0


def search(first: int, count: int, every: int = 5_000) -> list[tuple[float, int]]:
    """Print the distribution over the task graphs of ``count`` seeds; returns those above :data:`MOST` with seeds."""
    started, above, steps, worst = time.process_time(), [], Counter[float](), (1.0, first)
    for tried, seed in enumerate(range(first, first + count), start=1):
        ratio = ratio_to_best(seed)
        worst = max(worst, (ratio, seed))
        steps[next((step for step in _STEPS if ratio <= step + 1e-9), ratio)] += 1
        if ratio > MOST + 1e-9:
            above.append((ratio, seed))
            print(f"{ratio:.3f} times the best: seed {seed}", flush=True)
        if tried % every == 0 or tried == count:
            within = ", ".join(f"{steps[step]:,} within {step}" for step in _STEPS)
            seconds = time.process_time() - started
            print(
                f"{tried:,} problems: {within}, {len(above):,} above; the worst {worst[0]:.3f} (seed {worst[1]}); "
                f"{seconds:.0f} s of a processor",
                flush=True,
            )
    return above


def main() -> int:
    """The command line; 1 where an order is slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    options = parser.parse_args()
    return int(bool(search(options.first, options.problems)))


if __name__ == "__main__":
    sys.exit(main())
