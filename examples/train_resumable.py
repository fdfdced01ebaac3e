"""A training loop that goes on bit for bit after a lost rank, a preemption or a damaged checkpoint.

weft launch examples/train_resumable.py --processes 2 --max-restarts 3
weft launch examples/train_resumable.py --gpus 8 --nodes 2 --partition gpu --requeue -- --steps 100000
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import weft


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()

    begun = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(dist.get_rank())  # each rank draws dropout of its own

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8)).to(device)
    weft.fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    @weft.compile
    def train_step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        return mean

    samples = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(samples, samples[:, :8].argmax(1))
    sampler = weft.ResumableSampler(len(dataset), batch_size=64)
    loader = DataLoader(dataset, batch_sampler=sampler)

    state = weft.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    first = state.load(options.folder) or 0
    weft.stopping()  # from here on, a signal ends the loop after a whole step
    batches = sampler.batches(loader)
    with open(options.folder.with_suffix(".jsonl"), "a") as log:
        for step in range(first + 1, options.steps + 1):
            loss = train_step(*(part.to(device) for part in next(batches)))
            scheduler.step()
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": loss.item()}), file=log, flush=True)
                if step == first + 1:
                    print(f"step {step} done {time.perf_counter() - begun:.1f} s after the start", flush=True)
            if stop := weft.stopping():
                print(f"rank {dist.get_rank()} stops after step {step}", flush=True)
            if stop or step % options.save_every == 0 or step == options.steps:
                state.save(options.folder, step, wait=stop)
            if stop:
                break
    state.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
