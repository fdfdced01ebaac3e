"""Throughput against the limit of memory, from what ``train_llama.py`` measured: a table and a picture.

    torchrun --nproc-per-node 8 bench/train_llama.py --size 8b --length 8192 --out out/curve.jsonl \\
        --impl fsdp2+compile weft weft:memory_limit=55 weft:memory_limit=50 weft:memory_limit=45
    python bench/memory_curve.py out/curve.jsonl docs/memory.svg        # needs matplotlib

The table is Markdown. Peers, which take no limit, are points of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = ["", "limit GiB", "peak GiB", "predicted GiB", "ms", "predicted ms", "tokens/s a GPU"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the JSON lines of train_llama.py")
    parser.add_argument("picture", type=Path, nargs="?", help="an SVG to write")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    print(table(rows))
    if options.picture is not None:
        draw(rows, options.picture)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        figures = ["memory_limit", "peak_gib", "predicted_gib", "step_ms", "predicted_ms", "tokens_per_second"]
        cells = [f"{row[name]:,.1f}" if row[name] is not None else "" for name in figures]
        lines.append("| " + " | ".join([name_of(row), *cells]) + " |")
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> str:
    """The implementation, without knobs."""
    return str(row["impl"].partition(":")[0])


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "weft"  # the same picture of the same rows
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for name in dict.fromkeys(map(name_of, rows)):
        points = sorted((row["peak_gib"], row["tokens_per_second"]) for row in rows if name_of(row) == name)
        axes.plot(*zip(*points, strict=True), "o-" if len(points) > 1 else "s", label=name)
    first = rows[0]
    tokens = f"{first['batch']} x {first['length']} tokens a GPU"
    axes.set(xlabel="peak memory, GiB", ylabel="tokens/s a GPU", ylim=(0, None))
    axes.set_title(f"Llama {first['size'].upper()}, {tokens}, {first['world']} GPUs", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
