"""Every sample of torch's database of operations, through weft beside eager.

    python bench/opinfo.py                                # captured as training steps; some minutes on 2 cores
    python bench/opinfo.py --through torch.compile --samples 1
    python bench/opinfo.py --device cuda --only nn.functional
    python bench/opinfo.py --device cuda --part 3/16      # the third of 16 processes side by side
    python bench/opinfo.py --interpreted --samples 1      # generated kernels, in triton's interpreter

Prints how many samples gave what eager gives, and how many operations of their graphs run in generated kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

# Instead of this folder: its `coverage` is not the package that numba imports.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from opinfo_cases import Outcome, cases, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--samples", type=int, help="at most so many of a case; all without it")
    parser.add_argument("--through", choices=["weft.compile", "torch.compile"], default="weft.compile")
    parser.add_argument("--interpreted", action="store_true", help="run generated kernels on the CPU, interpreted")
    parser.add_argument("--part", default="1/1", help="which of how many equal parts of the cases to run")
    chosen = parser.parse_args()
    part, parts = map(int, chosen.part.split("/"))
    started = time.perf_counter()
    total, run_cases = Outcome(), 0
    wanted = [case for case in cases(device=chosen.device) if chosen.only in str(case)]
    for case in wanted[part - 1 :: parts]:
        dynamo = chosen.through == "torch.compile"
        outcome = run(case, chosen.samples, chosen.device, dynamo=dynamo, interpreted=chosen.interpreted)
        for failure in outcome.failures:
            print(failure.replace("\n", " "), flush=True)
        total.add(outcome)
        run_cases += 1
    seconds = time.perf_counter() - started
    counts, operations = total.counts, total.operations
    print(
        f"torch {torch.__version__}, {chosen.device}: {run_cases} cases, {counts.total()} samples in {seconds:.0f} s\n"
        + "\n".join(f"  {count:7,} {what}" for what, count in counts.most_common())
        + f"\noperations: {operations['generated']:,} in generated kernels, {operations['aten']:,} as ATen kernels"
    )
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
