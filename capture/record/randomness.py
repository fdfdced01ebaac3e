"""Reads and writes of the state of random generators inside a step, as nodes of the graph.

Random operations keep their order in the graph, so a compiled step draws the same numbers as the eager step from the
same generator. Activation checkpointing also rewinds the generator: it reads its state and sets it again before it
recomputes. Both become nodes with effects, and so does a seed that the step sets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.host_arrays import python_number
from weft.capture.record.host_draws import HostDraws
from weft.capture.record.recorder import OpRecorder


def get_rng_state(device: str) -> torch.Tensor:
    """The state of the default generator of ``device``, a 1-D uint8 tensor on the CPU."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(device: str, state: torch.Tensor) -> None:
    """Set the default generator of ``device`` to ``state``."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def set_seed(seed: int, devices: str) -> None:
    """Seed the default generators of ``devices``: "all", "cpu", the current GPU ("cuda") or all GPUs ("cuda_all")."""
    seeds = {"all": torch.manual_seed, "cuda": torch.cuda.manual_seed, "cuda_all": torch.cuda.manual_seed_all}
    (torch.default_generator.manual_seed if devices == "cpu" else seeds[devices])(seed)


def new_seed() -> int:
    """Seed the default generators of all devices with a new number, and return it: ``torch.seed()``."""
    return torch.seed()


def initial_seed() -> int:
    """The seed of torch's default CPU generator."""
    return torch.initial_seed()


class RandomState:
    """Stands in for torch's functions that read or set a generator's state: each records a node.

    Args:
        draws: records numbers, and knows what belongs to the step.
    """

    def __init__(self, recorder: OpRecorder, draws: HostDraws) -> None:
        self._recorder = recorder
        self._draws = draws
        self._get_cuda_state = torch.cuda.get_rng_state
        # Functions of torch.random find the generator in their module, also where they were bound to another name.
        self._stand_in = _DefaultGenerator(self)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement)."""
        functions = [
            ("get_rng_state", self.read),
            ("set_rng_state", self.write),
            ("manual_seed", self.seed_all),
            ("seed", self.reseed),
            ("initial_seed", self.initial),
        ]
        for owner in (torch, torch.random):
            yield from ((owner, name, self.within(getattr(owner, name), function)) for name, function in functions)
        yield torch.random, "default_generator", self._stand_in
        for name, function in (
            ("manual_seed", lambda seed: self.seed(seed, "cuda")),
            ("manual_seed_all", lambda seed: self.seed(seed, "cuda_all")),
            ("get_rng_state", lambda device="cuda": self.read(device)),
            ("set_rng_state", lambda state, device="cuda": self.write(state, device)),
        ):
            yield torch.cuda, name, self.within(getattr(torch.cuda, name), function)

    def within(self, original: Any, function: Any) -> Any:
        """``function`` where the step calls, the original elsewhere (another thread)."""

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self._draws.intercepts() else original(*args, **kwargs)

        return called

    def read(self, device: Any = "cpu") -> torch.Tensor:
        """Record a read of a default generator's state."""
        name = _name(device)
        with torch_adapter.only_mode():
            real = torch.default_generator.get_state() if name == "cpu" else self._get_cuda_state(name)
        with torch_adapter.only_mode(self._recorder.fake_mode):
            val = torch.empty(real.shape, dtype=torch.uint8)
        self._recorder.effect(get_rng_state, name, val=val)
        return val

    def write(self, state: torch.Tensor, device: Any = "cpu") -> None:
        """Record that a default generator's state is set."""
        self._recorder.effect(set_rng_state, _name(device), state)

    def seed_all(self, seed: int) -> torch.Generator:
        """Record ``torch.manual_seed``."""
        return self.seed(seed, "all")

    def seed(self, seed: int, devices: str) -> torch.Generator:
        """Record that the default generators of ``devices`` are seeded, see :func:`set_seed`."""
        self._recorder.effect(set_seed, python_number(seed), devices)
        return torch.default_generator

    def reseed(self) -> Any:
        """Record ``torch.seed()``; the new seed is a symbol."""
        return self._draws.record(new_seed, (), {}, self._draws.fresh(int, "torch.seed"))

    def initial(self) -> Any:
        """Record ``torch.initial_seed()``; the seed is a symbol."""
        return self._draws.record(initial_seed, (), {}, self._draws.fresh(int, "torch.initial_seed"))


class _DefaultGenerator:
    """Stands in for torch's default generator in ``torch.random``."""

    def __init__(self, state: RandomState) -> None:
        real = torch.default_generator
        self.seed = state.within(real.seed, state.reseed)
        self.initial_seed = state.within(real.initial_seed, state.initial)
        self.get_state = state.within(real.get_state, state.read)
        self.set_state = state.within(real.set_state, state.write)
        self.manual_seed = state.within(real.manual_seed, lambda seed: state.seed(seed, "cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def _name(device: Any) -> str:
    if isinstance(device, int):
        return f"cuda:{device}"
    return str(device)
