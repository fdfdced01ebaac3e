"""``torch.compile(model, backend="weft")`` on a CPU beside eager and torch's own ``aot_eager``.

    OMP_NUM_THREADS=1 python bench/cpu_backend.py
    OMP_NUM_THREADS=2 python bench/cpu_backend.py --only mlp --size small --seconds 20

Of each model there is one so small that what a call costs beside its kernels shows, and one of a usual size. The column
``eager`` of backends is Dynamo alone: what its guards cost any backend. The column ``itself`` is eager once more: what
the measuring is worth. All ways run one and the same model, since where weights lie in memory shows in times. In each
round every way runs once, in an order drawn anew, since each finds the caches and the heap as the one before left them;
a round gives one ratio to eager a way, so what disturbs the machine for longer than a round disturbs both sides of it.
Each line gives eager's median time and, for each other way, the median ratio (below 1 is faster than eager) with the
middle half of the ratios. Times of one thread are those it ran for: a machine that others use too takes time away.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft  # noqa: F401 - makes the backend known

BACKENDS = ("weft", "aot_eager", "eager")
OTHERS = ("itself", *BACKENDS)
Call = Callable[[], object]


class Block(nn.Module):
    """A transformer's: attention and a feed-forward part, each behind a norm."""

    def __init__(self, dim: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def mlp(width: int, rows: int) -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 16)), torch.randn(rows, width)


def transformer(dim: int, batch: int, length: int) -> tuple[nn.Module, Tensor]:
    return Block(dim, dim // 32), torch.randn(batch, length, dim)


def convnet(channels: int, batch: int, side: int) -> tuple[nn.Module, Tensor]:
    def stage(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    head = nn.Linear(2 * channels * (side // 4) ** 2, 10)
    layers = [*stage(3, channels), *stage(channels, 2 * channels), nn.Flatten(), head]
    return nn.Sequential(*layers), torch.randn(batch, 3, side, side)


MODELS: dict[str, dict[str, Callable[[], tuple[nn.Module, Tensor]]]] = {
    "small": {
        "mlp": lambda: mlp(256, 64),
        "transformer": lambda: transformer(128, 4, 32),
        "convnet": lambda: convnet(16, 8, 32),
    },
    "usual": {
        "mlp": lambda: mlp(1024, 256),
        "transformer": lambda: transformer(384, 8, 128),
        "convnet": lambda: convnet(32, 32, 64),
    },
}


def forward(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    """Inference."""
    model.eval()

    def call() -> object:
        with torch.no_grad():
            return run(x)

    return call


def training(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    """Forward, backward and a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def call() -> object:
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return call


WORK: dict[str, Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Call]] = {
    "forward": forward,
    "training": training,
}


def ways(make: Callable[[], tuple[nn.Module, Tensor]], work: str) -> dict[str, Call]:
    """The same work on one model: as it is (""), as it is again, then by each backend, warmed up."""
    torch.manual_seed(0)
    model, x = make()
    calls = {}
    for way in ("", *OTHERS):
        run = torch.compile(model, backend=way) if way in BACKENDS else model
        calls[way] = WORK[work](model, run, x)
        for _ in range(10):
            calls[way]()
    return calls


def times(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Seconds of each way in each round, of as many rounds as fit."""
    found: dict[str, list[float]] = {way: [] for way in calls}
    order, draw = list(calls), random.Random(0)
    gc.collect()
    gc.disable()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            draw.shuffle(order)
            for way in order:
                started = clock()
                calls[way]()
                found[way].append(clock() - started)
    finally:
        gc.enable()
    return found


def ratio(theirs: list[float], eager: list[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, eager, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring for each line")
    parser.add_argument("--size", choices=[*MODELS], action="append", help="all without it")
    parser.add_argument("--only", default="", help="a part of the names of the models to run")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'':28}{'eager, us':>10}{'rounds':>8}" + "".join(f"{way:>22}" for way in OTHERS))
    for size in options.size or MODELS:
        for model, make in MODELS[size].items():
            for work in WORK if options.only in model else ():
                torch.compiler.reset()
                found = times(ways(make, work), options.seconds)
                eager = statistics.median(found[""]) * 1e6
                ratios = "".join(f"{ratio(found[way], found['']):>22}" for way in OTHERS)
                name = f"{size} {model}, {work}"
                print(f"{name:28}{eager:10.0f}{len(found['']):8}{ratios}", flush=True)


if __name__ == "__main__":
    main()
