"""Every kind of hook on every target, plain and with collectives, compiled against uncompiled, on 2 ranks.

    python bench/hooks_matrix.py            # about a minute on 2 cores

One row a kind and target, one column a variant of what the hook does; `=` says that losses, gradients,
parameters, buffers and firings of 3 steps are equal bit for bit, and that an opaque hook saw the same values
in the same order.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hook_cases import STEPS, compare, table

from harness import run_ranks


def main() -> int:
    started = time.perf_counter()
    ranks = run_ranks(compare, 2, None, timeout=900)
    rows = [(case, first + second) for (case, first), (_, second) in zip(*ranks, strict=True)]
    print(table(rows))
    wrong = sum(bool(differs) for _, differs in rows)
    print(
        f"{len(rows)} combinations, {STEPS} steps, 2 processes, torch {torch.__version__}: "
        f"{len(rows) - wrong} equal to eager, {wrong} not; {time.perf_counter() - started:.0f} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
