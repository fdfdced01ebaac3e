"""AdamW on one GPU over the parameters of a Llama: torch's fused kernel, torch.compile's, and weft's.

    python bench/optimizer.py --size 1b

Two workloads in float32 and bfloat16: the update alone, and the tail of a step (norm of gradients, clipping, update).
Each line gives milliseconds, the rate at which the bytes that must move are moved, that rate as a share of a plain
copy's, and the speed relative to torch's fused kernel. ``--sweep`` times weft's kernel with other sizes of chunks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, Llama

from weft.inductor.multi_tensor import launch_plan as planning
from weft.inductor.multi_tensor.adam import Adam
from weft.inductor.multi_tensor.norm import Norm
from weft.inductor.runtime.bound_plan import BoundLaunches

LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
Update = Callable[[], Any]


def main() -> None:
    options = arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    copied = copy_rate(device)
    print(f"copy: {copied / 1e9:.0f} GB/s")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        state = State.of(options.size, dtype, device)
        print(f"{options.size}, {dtype}: {state.elements / 1e9:.3f} B parameters, {len(state.params)} tensors")
        rows += [{"dtype": str(dtype), **row} for row in compare(state, copied, options.impl)]
        agreement(state)
        if options.sweep:
            sweep(state, copied)
        del state
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.writelines(json.dumps({"size": options.size, "copy": copied, **row}) + "\n" for row in rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="1b", choices=list(SHAPES))
    parser.add_argument("--impl", nargs="+", default=list(UPDATES), choices=list(UPDATES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/optimizer.jsonl"))
    return parser.parse_args()


@dataclass
class State:
    """What an update reads and writes: parameters with gradients, averages, step counts."""

    params: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]

    @staticmethod
    def of(size: str, dtype: torch.dtype, device: torch.device) -> State:
        with torch.device("meta"):
            shapes = [parameter.shape for parameter in Llama(SHAPES[size]).parameters()]
        generator = torch.Generator(device).manual_seed(0)

        def random(shape: torch.Size, scale: float) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype, generator=generator) * scale

        params = [random(shape, 0.02).requires_grad_() for shape in shapes]
        for param in params:
            param.grad = random(param.shape, 1e-3)
        averages = [random(shape, 1e-3) for shape in shapes]
        squares = [random(shape, 1e-3).square_() for shape in shapes]
        return State(params, averages, squares, [torch.tensor(9.0, device=device) for _ in shapes])

    @property
    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    @property
    def elements(self) -> int:
        return sum(param.numel() for param in self.params)

    @property
    def element_bytes(self) -> int:
        return self.params[0].element_size()

    def clone(self) -> State:
        params = [param.detach().clone().requires_grad_() for param in self.params]
        for new, old in zip(params, self.params, strict=True):
            new.grad = old.grad.clone() if old.grad is not None else None
        lists = ([tensor.clone() for tensor in list_] for list_ in (self.averages, self.squares, self.steps))
        return State(params, *lists)


# ---- the updates that are compared


def torch_optimizer(state: State, **kind: Any) -> torch.optim.AdamW:
    lr = torch.tensor(LR, device=state.params[0].device) if kind.get("capturable") else LR
    optimizer = torch.optim.AdamW(state.params, lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY, **kind)
    for at, param in enumerate(state.params):
        optimizer.state[param] = {
            "step": state.steps[at],
            "exp_avg": state.averages[at],
            "exp_avg_sq": state.squares[at],
        }
    return optimizer


def fused(state: State, clip: bool) -> Update:
    return _with_torch(state, clip, torch_optimizer(state, fused=True))


def compiled(state: State, clip: bool) -> Update:
    return torch.compile(_with_torch(state, clip, torch_optimizer(state, foreach=True, capturable=True)))


def _with_torch(state: State, clip: bool, optimizer: torch.optim.AdamW) -> Update:
    def update() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(state.params, MAX_NORM, foreach=True)
        optimizer.step()

    return update


def weft_kernels(state: State, clip: bool) -> Update:
    device = state.params[0].device
    params = [param.detach() for param in state.params]
    lr = torch.tensor(LR, device=device)
    coefficient = torch.ones((), device=device) if clip else None
    lists = [params, state.grads, state.averages, state.squares, [], state.steps]
    call = Adam(True, *BETAS, DECAY, EPS)
    step_arguments = [*lists, lr, coefficient, None, None]
    step = BoundLaunches(call.plan(step_arguments), device)
    step.bind(step_arguments, [])
    norms = torch.empty(len(params), dtype=params[0].dtype, device=device)
    norm = BoundLaunches(Norm(2.0).plan([state.grads]), device)
    norm.bind([state.grads], [[norms]])
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0

    def update() -> None:
        if coefficient is not None:
            norm.launch(stream)
            total = torch.linalg.vector_norm(norms, 2.0)
            coefficient.copy_((MAX_NORM / (total + 1e-6)).clamp(max=1.0))
        step.launch(stream)

    return update


UPDATES: dict[str, Callable[[State, bool], Update]] = {
    "fused": fused,
    "compile": compiled,
    "weft": weft_kernels,
}


# ---- measuring


def compare(state: State, copied: float, impls: list[str]) -> list[dict[str, Any]]:
    rows = []
    for clip in (False, True):
        # Parameter, gradient and two averages are read, all but the gradient written; a norm reads gradients again.
        moved = state.elements * state.element_bytes * (8 if clip else 7)
        base = 0.0
        for impl in impls:
            seconds = measure(UPDATES[impl](state, clip), state.params[0].device)
            base = base or seconds
            row = {"work": "clip + update" if clip else "update", "impl": impl, "ms": seconds * 1e3}
            row |= {"GB/s": moved / seconds / 1e9, "of copy": moved / seconds / copied, "speed": base / seconds}
            rows.append(row)
            print(
                f"  {row['work']:14} {impl:8} {row['ms']:8.3f} ms {row['GB/s']:6.0f} GB/s"
                f" {row['of copy']:6.1%} of copy {row['speed']:6.3f}x"
            )
            torch.compiler.reset()
    return rows


def agreement(state: State) -> None:
    """How weft's results after two clipped steps differ from those of torch's fused kernel."""
    ours, theirs = state.clone(), state.clone()
    mine, reference = weft_kernels(ours, True), fused(theirs, True)
    for _ in range(2):
        mine()
        reference()
        # torch has clipped its gradients in memory: both go on from the same ones.
        for a, b in zip(theirs.grads, ours.grads, strict=True):
            a.copy_(b)
    for name, attribute in {"parameters": "params", "averages": "averages", "squares": "squares"}.items():
        pairs = [
            (a.detach(), b.detach()) for a, b in zip(getattr(ours, attribute), getattr(theirs, attribute), strict=True)
        ]
        equal = sum(int((a == b).sum()) for a, b in pairs) / state.elements
        # Units in the last place of a typical element: near zero, where sums cancel, units are as small as one likes.
        apart = max(float((a - b).abs().max() / b.float().square().mean().sqrt()) for a, b in pairs)
        ulps = apart / torch.finfo(state.params[0].dtype).eps
        print(f"  {name}: {equal:.4%} equal to the bit, others at most {ulps:.2f} ulp apart")


def sweep(state: State, copied: float) -> None:
    default = planning.LARGEST_CHUNK, planning.BLOCK, planning.WARPS
    moved = state.elements * state.element_bytes * 7
    for chunk, block, warps in itertools.product((4096, 8192, 16384, 32768, 65536), (512, 1024, 2048), (4, 8)):
        planning.LARGEST_CHUNK, planning.BLOCK, planning.WARPS = chunk, block, warps
        seconds = measure(weft_kernels(state, False), state.params[0].device)
        print(f"  chunk {chunk:6} block {block:5} warps {warps}: {moved / seconds / copied:6.1%} of copy")
    planning.LARGEST_CHUNK, planning.BLOCK, planning.WARPS = default


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy of 4 GiB reads and writes (16 MiB on a CPU)."""
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure(lambda: target.copy_(source), device)


def measure(update: Update, device: torch.device, rounds: int = 5, calls: int = 5) -> float:
    """Median seconds of a call."""
    if device.type == "cpu":
        update()
        start = time.perf_counter()
        update()
        return time.perf_counter() - start
    for _ in range(3):
        update()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            update()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
