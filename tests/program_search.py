"""Many random programs, eager and compiled: how many are equal, are refused, are wrong or fail.

    python tests/program_search.py --programs 5000 --seed 7 --folder /tmp/programs

The modes take turns. A program that is wrong or fails is reduced, printed and written to the folder;
``tests/program_runs.py`` repeats it. ``--only 12 40`` runs single programs of a seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from program_reduction import reduced
from program_runs import EagerFailed, compare
from random_programs import ROWS, draw_plan, write

MODES = ("bitwise", "default")


def outcome_of(source: str, mode: str) -> str:
    """``equal``, ``refused: CLASS: ...``, ``wrong: ...``, ``raw: ...``, or ``eager fails`` (says nothing of weft)."""
    try:
        found = compare(source, mode=mode)
    except EagerFailed:
        return "eager fails"
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return f"raw: {type(error).__name__}: {error}"
    return "equal" if found == "captured" else found


def outcomes(seed: int, programs: int, most_lines: int, rows: int = 9) -> Iterator[tuple[str, str, str]]:
    """(mode, text, outcome) of so many random programs."""
    return map(partial(outcome_at, seed, most_lines, rows), range(programs))


def outcome_at(seed: int, most_lines: int, rows: int, at: int) -> tuple[str, str, str]:
    """(mode, text, outcome) of program number ``at`` of a seed."""
    source = write(draw_plan(f"{seed}-{at}", most_lines, rows))
    mode = MODES[at % len(MODES)]
    return mode, source, outcome_of(source, mode)


def failure(outcome: str) -> str | None:
    """How a program failed, as far as its reduced form must fail alike; None where it did not."""
    kind, _, rest = outcome.partition(": ")
    if kind == "raw":
        return f"raw: {_reason(rest)}"
    return kind if kind == "wrong" else None


def _reason(text: str) -> str:
    """The first line of an error without its numbers and names of files."""
    first = re.sub(r"/\S+\.py:\d+", "FILE", text.partition("\n")[0])
    return re.sub(r"\d+", "N", first)[:160]


def main() -> int:
    """Search, and print the counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--lines", type=int, default=12, help="the most lines of a step")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the programs to run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("random_programs"))
    chosen = parser.parse_args()
    numbers = chosen.only or range(chosen.programs)
    run = partial(outcome_at, chosen.seed, chosen.lines, len(ROWS))
    if chosen.processes == 1:
        counts = _search(zip(numbers, map(run, numbers), strict=True), chosen)
    else:
        with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
            counts = _search(zip(numbers, pool.imap(run, numbers, chunksize=10), strict=True), chosen)
    print(f"seed {chosen.seed}, {len(numbers)} programs of at most {chosen.lines} lines: {dict(counts)}")
    return min(counts["wrong"] + counts["raw"], 1)


def _search(results: Iterable[tuple[int, tuple[str, str, str]]], chosen: argparse.Namespace) -> Counter[str]:
    """Report what fails as it is found, then the reasons of refusals; returns the counts."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    begin = time.monotonic()
    for done, (at, (mode, source, outcome)) in enumerate(results, 1):
        kind, _, rest = outcome.partition(": ")
        counts[kind] += 1
        if kind == "refused":
            reasons[_reason(rest)] += 1
        if (failed := failure(outcome)) is not None:
            short = reduced(source, lambda text: failure(outcome_of(text, mode)) == failed)  # noqa: B023
            chosen.folder.mkdir(parents=True, exist_ok=True)
            file = chosen.folder / f"{chosen.seed}-{at}.py"
            file.write_text(short)
            print(f"{file} {mode}: {outcome}\n{short[short.index('ROWS =') :]}", flush=True)
        if done % 100 == 0:
            print(f"{done} programs, {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:6} refused: {reason}")
    return counts


if __name__ == "__main__":
    os.environ.setdefault("WEFT_VERIFY_GRAPHS", "1")
    os.environ.setdefault("WEFT_STRICT", "1")
    sys.exit(main())
