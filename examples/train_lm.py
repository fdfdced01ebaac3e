"""Train a byte-level language model on the Python standard library, sharded and compiled by weft.

    torchrun --nproc-per-node 2 examples/train_lm.py            # two gloo processes, or one a GPU over NCCL
    torchrun --nproc-per-node 2 examples/train_lm.py --eager    # the same, the step not compiled
    torchrun --nproc-per-node 2 examples/train_lm.py --peer     # the same, sharded by torch and not compiled

Writes metrics.jsonl and loss.png to out/; with --tensorboard what TensorBoard shows, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from lm.data import Bigram, Corpus, read_corpus, validation_batches
from lm.model import Config, sample
from lm.screen import Metrics, Screen, draw_losses
from lm.trainer import Kind, Settings, Trainer, mean_over_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft

PROMPT = b"def "
COMPARED_STEPS = 20
VALIDATION_BATCHES = 8
FINAL_BATCHES = 32


def main() -> None:
    options = parse_arguments()
    device = join_ranks()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings() if device.type == "cpu" else Settings(steps=2000, batch=32)
    settings = replace(settings, steps=options.steps or settings.steps, seed=options.seed)

    screen = Screen(settings.steps, options.out / "metrics.jsonl", dist.get_rank() == 0, options.tensorboard)
    screen.say("reading the standard library ...")
    corpus = read_corpus()
    screen.say("building the model ...")
    trainer = Trainer(options.kind, Config(), settings, corpus, mesh, device)
    screen.say(introduction(trainer, options.kind))
    if options.kind == "compiled":
        screen.say("the first step is captured and compiled, which takes some seconds ...")
    with screen:
        losses, rows = train(trainer, screen)

    bigram = bigram_loss(corpus, trainer)
    final = trainer.validate(FINAL_BATCHES)
    screen.say(f"validation loss {final:.3f} nats per byte; a bigram model of the same text: {bigram:.3f}")
    if options.kind == "compiled":
        screen.say(compare_with_eager(losses, settings, corpus, mesh, device, screen))
    plain = trainer.unsharded()
    if dist.get_rank() == 0:
        curve = draw_losses(rows, bigram, options.out / "loss.png")
        text = sample(plain, PROMPT, options.sample).decode(errors="replace")
        screen.say(f"a sample:\n{'-' * 70}\n{text}\n{'-' * 70}")
        screen.say(f"{curve}   numbers: {options.out / 'metrics.jsonl'}")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--eager", dest="kind", action="store_const", const="eager", help="do not compile the step")
    kinds.add_argument("--peer", dest="kind", action="store_const", const="peer", help="torch's FSDP2, not compiled")
    parser.add_argument("--steps", type=int, help="how many steps (320 on CPUs, 2000 on GPUs)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--sample", type=int, default=300, help="bytes to draw from the trained model")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for metrics.jsonl and loss.png")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write what TensorBoard shows, too")
    parser.set_defaults(kind="compiled")
    return parser.parse_args()


def join_ranks() -> torch.device:
    """Start the process group that torchrun describes; returns this rank's device, a GPU if all have one."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def introduction(trainer: Trainer, kind: Kind) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    corpus = trainer.corpus
    return (
        f"{parameters / 1e6:.1f} M parameters on {trainer.world} x {trainer.device.type}, {kind}; "
        f"text: {corpus.train_files} files, {len(corpus.train) / 1e6:.1f} MB to train on, "
        f"{corpus.validation_files} files, {len(corpus.validation) / 1e6:.1f} MB to validate"
    )


def train(trainer: Trainer, screen: Screen) -> tuple[list[float], list[Metrics]]:
    """Take all steps. Returns this rank's loss at each step, and the rows that were shown."""
    steps = trainer.settings.steps
    show_every, validate_every = max(1, steps // 40), max(1, steps // 8)
    tokens = trainer.world * trainer.settings.batch * trainer.length
    losses: list[float] = []
    rows: list[Metrics] = []
    begin = window = time.perf_counter()
    for step in range(1, steps + 1):
        loss, norm = trainer.train()
        losses.append(loss.item())
        screen.advance(step)
        if step % show_every and step != steps:
            continue
        now = time.perf_counter()
        recent = losses[rows[-1].step if rows else 0 :]
        rate = tokens * len(recent) / (now - window)
        due = step % validate_every == 0 or step == steps
        validation = trainer.validate(VALIDATION_BATCHES) if due else None
        mean = mean_over_ranks(torch.tensor(recent, device=trainer.device).mean())
        used, seconds, mfu = memory_gib(trainer.device), now - begin, mfu_of(trainer)
        rows.append(Metrics(step, mean, norm.item(), validation, rate, used, seconds, mfu))
        screen.show(rows[-1])
        window = time.perf_counter()
    return losses, rows


def memory_gib(device: torch.device) -> float:
    """The most memory this process has held: on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows has none
        return 0.0
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def mfu_of(trainer: Trainer) -> float | None:
    """Percent of the GPU's peak, where weft knows it and the step is compiled."""
    if not isinstance(trainer.step, weft.CompiledStep):
        return None
    return weft.metrics(trainer.step).get("mfu(%)")


def bigram_loss(corpus: Corpus, trainer: Trainer) -> float:
    """A bigram model's loss on the very bytes of the last validation."""
    bigram = Bigram(corpus.train)
    parts = validation_batches(
        corpus.validation, FINAL_BATCHES, trainer.rank, trainer.world, trainer.settings.batch, trainer.length
    )
    losses = [bigram.loss(ids, labels) for ids, labels in parts]
    return mean_over_ranks(torch.tensor(losses, device=trainer.device).mean())


def compare_with_eager(
    losses: list[float],
    settings: Settings,
    corpus: Corpus,
    mesh: DeviceMesh,
    device: torch.device,
    screen: Screen,
) -> str:
    """Take the first steps again from the same seed, uncompiled, and set the losses side by side."""
    count = min(COMPARED_STEPS, len(losses))
    again = Trainer("eager", Config(), settings, corpus, mesh, device)
    steps = screen.track("taking the first steps again, uncompiled", count)
    differences = [abs(losses[i] - again.train()[0].item()) for i in steps]
    largest = torch.tensor(max(differences), device=device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    verdict = "equal bit for bit" if largest.item() == 0 else "not equal"
    difference = f"largest difference {largest.item():g} ({verdict})"
    return f"compiled against uncompiled, first {count} losses: {difference}"


if __name__ == "__main__":
    main()
