"""Train a Hugging Face Llama, sharded over all ranks; evaluate it, and generate with a plain copy afterwards.

    torchrun --nproc-per-node 2 examples/hf_fsdp.py --steps 60

The model is small and starts from random weights, so that nothing is downloaded: `from_pretrained` works as well.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import weft

SYMBOLS = 31


def counting(rows: int, device: torch.device) -> torch.Tensor:
    """Rows that count upwards from anywhere: int64 [rows, 12]."""
    return (torch.randint(SYMBOLS, (rows, 1), device=device) + torch.arange(12, device=device)) % SYMBOLS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)  # the same first weights on all ranks
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device)
    for layer in model.model.layers:
        weft.fully_shard(layer, mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1 + dist.get_rank())

    @weft.compile
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @weft.compile
    def evaluate(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    test = counting(64, device)
    before = evaluate(test).item()
    for _ in range(options.steps):
        train_step(counting(32, device))
    after = evaluate(test).item()

    # All ranks gather the weights once; generation then communicates no more.
    weights = model.state_dict().items()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights}
    if dist.get_rank() == 0:
        plain = LlamaForCausalLM(config).to(device)
        plain.load_state_dict(whole)
        prompt = torch.tensor([[3, 4, 5]], device=device)
        text = plain.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
        print(f"test loss {before:.2f} -> {after:.2f}; counting on from 3, 4, 5: {text[0].tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
