"""Orders of issue of random task graphs against the best order of each: ``make schedules SCHEDULES=100000``.

Small task graphs have few enough orders to try them all. The search of the schedule must come within a quarter of the
best one; nearly always it is the best one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterable

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


def search(ratios: Iterable[tuple[int, float]], every: int = 5_000) -> int:
    """Print the distribution of (seed, ratio); returns how many are above :data:`MOST`, which are printed."""
    above, tried, steps, worst = 0, 0, Counter[float](), (1.0, 0)
    for tried, (seed, ratio) in enumerate(ratios, start=1):
        worst = max(worst, (ratio, seed))
        steps[next((step for step in _STEPS if ratio <= step + 1e-9), ratio)] += 1
        if ratio > MOST + 1e-9:
            above += 1
            print(f"{ratio:.3f} times the best: seed {seed}", flush=True)
        if tried % every == 0:
            print(_counted(tried, steps, above, worst), flush=True)
    print(_counted(tried, steps, above, worst), flush=True)
    return above


def _counted(tried: int, steps: Counter[float], above: int, worst: tuple[float, int]) -> str:
    within = ", ".join(f"{steps[step]:,} within {step}" for step in _STEPS)
    return f"{tried:,} problems: {within}, {above:,} above; the worst {worst[0]:.3f} (seed {worst[1]})"


def main() -> int:
    """The command line; 1 where an order is slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.problems)
    if options.processes == 1:
        return min(search(zip(seeds, map(ratio_to_best, seeds), strict=True)), 1)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        return min(search(zip(seeds, pool.imap(ratio_to_best, seeds, chunksize=100), strict=True)), 1)


if __name__ == "__main__":
    sys.exit(main())
