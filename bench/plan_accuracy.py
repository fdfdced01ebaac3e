"""How far predictions are from measurements: steps of library models and Llama shapes, on one GPU and on several.

    python bench/models.py --impl weft --no-dropout --out out/models.jsonl         # measured, on a GPU
    torchrun --nproc-per-node 2 bench/train_llama.py ... --out out/llama.jsonl     # measured, with its prediction
    python bench/plan_accuracy.py predict --no-dropout --cluster h100x8 --out out/predicted.jsonl   # without a GPU
    python bench/plan_accuracy.py report --measured out/models.jsonl out/llama.jsonl --predicted out/predicted.jsonl

The report gives each step's ratio of measured to predicted time, and the errors that remain when all predictions are
multiplied by one factor, the geometric mean of the ratios of the *other* models (leave one model out).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import train_step
from zoo import WORKLOADS, Workload

import weft

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--models", nargs="+", default=[workload.name for workload in WORKLOADS])
    predicting.add_argument("--cluster", default="h100x8")
    predicting.add_argument("--processes", type=int, default=2)
    predicting.add_argument("--tiny", action="store_true")
    predicting.add_argument("--no-dropout", action="store_true", help="as bench/models.py --no-dropout")
    predicting.add_argument("--out", type=Path, required=True)
    predicting.set_defaults(run=predict)
    reporting = commands.add_parser("report")
    reporting.add_argument("--measured", type=Path, nargs="+", required=True)
    reporting.add_argument("--predicted", type=Path, required=True)
    reporting.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


def predict(options: argparse.Namespace) -> None:
    """Write a line for each model."""
    chosen = [workload for workload in WORKLOADS if workload.name in options.models]
    dropout = not options.no_dropout
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        jobs = [
            (workload.name, pool.apply_async(prediction, (workload.name, options.cluster, options.tiny, dropout)))
            for workload in chosen
        ]
        with options.out.open("a") as out:
            for name, job in jobs:
                try:
                    row = job.get()
                except Exception as error:  # noqa: BLE001 - whatever went wrong is a result
                    row = {"error": f"{type(error).__name__}: {error}"[:300]}
                print(name, row, flush=True)
                out.write(json.dumps({"model": name, **row}) + "\n")


def prediction(name: str, cluster: str, tiny: bool, dropout: bool) -> Row:
    """What weft predicts of a model's training step on one GPU of a cluster."""
    workload: Workload = next(each for each in WORKLOADS if each.name == name)
    with weft.fake_world(1):
        model = workload.build(tiny=tiny, dropout=dropout).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        (batch,) = workload.batches(1, torch.device("cpu"), tiny=tiny)
        batch = {key: value.cuda() for key, value in batch.items()}
        found = weft.plan(train_step(workload, model, optimizer, "cuda"), batch, cluster=cluster)
    return {"predicted_ms": found.step_seconds * 1e3, "predicted_gib": found.peak_bytes / 2**30}


def report(options: argparse.Namespace) -> None:
    """Print the ratios and errors."""
    predicted = {row["model"]: row for row in rows([options.predicted]) if "error" not in row}
    pairs: list[tuple[str, float, float, float, float]] = []
    for row in rows(options.measured):
        name = row.get("model") or f"{row.get('size')} {row.get('impl')}"
        guess = predicted.get(name, row)
        if "step_ms" in row and guess.get("predicted_ms"):
            memory = row.get("reserved_gib") or row.get("peak_gib") or math.nan
            pairs.append((name, row["step_ms"], guess["predicted_ms"], memory, guess.get("predicted_gib") or math.nan))
    ratios = [measured / guessed for _, measured, guessed, *_ in pairs]
    print(f"{'step':24} {'measured':>9} {'predicted':>9} {'ratio':>6} {'left out':>8} {'GiB':>6} {'pred.':>6}")
    errors = []
    for at, (name, measured, guessed, memory, guessed_memory) in enumerate(pairs):
        factor = geometric_mean(ratios[:at] + ratios[at + 1 :])
        errors.append(guessed * factor / measured - 1)
        times = f"{measured:9.2f} {guessed:9.2f} {ratios[at]:6.3f} {errors[-1]:+8.1%}"
        print(f"{name:24} {times} {memory:6.2f} {guessed_memory:6.2f}")
    plain = [guessed / measured - 1 for _, measured, guessed, *_ in pairs]
    for title, values in (("as predicted", plain), ("one factor, leaving each model out", errors)):
        mape = statistics.mean(map(abs, values))
        worst = max(values, key=abs)
        print(f"{title}: {len(values)} steps, MAPE {mape:.1%}, worst {worst:+.1%}, mean {statistics.mean(values):+.1%}")


def rows(files: Sequence[Path]) -> list[Row]:
    """The lines of JSON files."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def geometric_mean(values: Sequence[float]) -> float:
    """1.0 for none."""
    return math.exp(statistics.mean(map(math.log, values))) if values else 1.0


if __name__ == "__main__":
    main()
