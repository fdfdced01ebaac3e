"""The state of random generators, read and set inside a step.

Random operations keep their order in the graph, so that a compiled step draws the same numbers as the eager one from
the same generator. Activation checkpointing also rewinds the generator, by reading its state and setting it again;
those two become nodes here, and so does a seed that the step sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.recorder import Recorder


def get_rng_state(device: str) -> torch.Tensor:
    """State of the default generator of ``device`` (uint8 tensor on the CPU)."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(device: str, state: torch.Tensor) -> None:
    """Set the default generator of ``device`` to ``state``."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def set_seed(seed: int, devices: str) -> None:
    """Seed the default generators of all devices, of the current GPU (``cuda``) or of all GPUs (``cuda_all``)."""
    {"all": torch.manual_seed, "cuda": torch.cuda.manual_seed, "cuda_all": torch.cuda.manual_seed_all}[devices](seed)


@contextlib.contextmanager
def record_random_state(recorder: Recorder) -> Iterator[None]:
    """While active, torch's functions that read or set a generator's state make nodes instead."""

    def read(device: Any = "cpu") -> torch.Tensor:
        name = _name(device)
        with torch_adapter.only_mode():
            real = (
                originals[torch, "get_rng_state"]() if name == "cpu" else originals[torch.cuda, "get_rng_state"](name)
            )
        with torch_adapter.only_mode(recorder.fake_mode):
            val = torch.empty(real.shape, dtype=torch.uint8)
        recorder.effect(get_rng_state, name, val=val)
        return val

    def write(state: torch.Tensor, device: Any = "cpu") -> None:
        recorder.effect(set_rng_state, _name(device), state)

    def seed_all(seed: int) -> torch.Generator:
        recorder.effect(set_seed, seed, "all")
        return torch.default_generator

    patches = [
        (torch, "get_rng_state", lambda: read()),
        (torch, "set_rng_state", lambda state: write(state)),
        (torch.random, "get_rng_state", lambda: read()),
        (torch.random, "set_rng_state", lambda state: write(state)),
        (torch, "manual_seed", seed_all),
        (torch.random, "manual_seed", seed_all),
        (torch.cuda, "manual_seed", lambda seed: recorder.effect(set_seed, seed, "cuda")),
        (torch.cuda, "manual_seed_all", lambda seed: recorder.effect(set_seed, seed, "cuda_all")),
        (torch.cuda, "get_rng_state", lambda device="cuda": read(device)),
        (torch.cuda, "set_rng_state", lambda state, device="cuda": write(state, device)),
    ]
    originals = {(owner, name): getattr(owner, name) for owner, name, _ in patches}
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def _name(device: Any) -> str:
    if isinstance(device, int):
        return f"cuda:{device}"
    return str(device)
