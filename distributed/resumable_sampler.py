"""``weft.ResumableSampler``: batches in an order whose position survives a restart on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from weft import torch_adapter
from weft.errors import CannotCheckpoint, InvalidArgument
from weft.short_tracebacks import methods_shorten_tracebacks

T = TypeVar("T")


@methods_shorten_tracebacks
class ResumableSampler(Sampler[list[int]]):
    """Batches of indices of a dataset, shuffled anew in every epoch, the same on any number of ranks.

    The order of all samples follows from the seed and the epoch. A batch is a range of that order, of which each rank
    takes its part, so the position is one number that does not depend on the number of ranks. Samples at the end of an
    epoch that fill no batch are left out.

        sampler = weft.ResumableSampler(len(dataset), batch_size=64)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        state = weft.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        first = state.load("checkpoints") or 0
        for step, batch in enumerate(sampler.batches(loader), first):

    The position counts the batches that :meth:`batches` has handed out. Those that the workers of the loader hold
    ready do not count, so none is lost in a restart.

    Args:
        length: samples in the dataset.
        batch_size: samples that all ranks together take in a step; a multiple of the number of ranks.
        seed: of the order; the same on all ranks.
        shuffle: False takes the samples as they come.

    Raises:
        InvalidArgument: a batch cannot be shared equally among the ranks, or the dataset fills no batch.
    """

    def __init__(self, length: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.length, self.batch_size, self.seed, self.shuffle = length, batch_size, seed, shuffle
        self.epoch = 0
        self.taken = 0  # batches of this epoch
        self._drawn = False
        self._counted = False
        world = torch_adapter.world_size()
        if batch_size < 1 or batch_size % world:
            raise InvalidArgument(
                *("weft.ResumableSampler", "batch_size", batch_size, f"a multiple of {world}, the number of ranks"),
                "It counts the samples of all ranks together",
            )
        if length < batch_size:
            raise InvalidArgument(
                *("weft.ResumableSampler", "length", length, f"at least {batch_size}, the batch size"),
                "Take a smaller batch or a larger dataset",
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.length // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's parts of the batches that are left in this epoch."""
        self._drawn = True
        order = self._order()
        world = torch_adapter.world_size()
        share = self.batch_size // world
        first = (dist.get_rank() if world > 1 else 0) * share
        for batch in range(self.taken, len(self)):
            begin = batch * self.batch_size + first
            yield order[begin : begin + share].tolist()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of ``loader``, whose ``batch_sampler`` this is, epoch after epoch from the position on."""
        self._counted = True
        while True:
            # An iterator of DataLoader draws a seed. A run that is resumed in the middle of an epoch makes one more
            # iterator than the uninterrupted run, and must not draw other dropout masks for that.
            generator = torch.get_rng_state()
            iterator = iter(loader)
            torch.set_rng_state(generator)
            for batch in iterator:
                self.taken += 1
                if self.taken == len(self):
                    self.epoch, self.taken = self.epoch + 1, 0
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position.

        Raises:
            CannotCheckpoint: batches were taken from a loader that :meth:`batches` was not given, and not counted.
        """
        if self._drawn and not self._counted:
            raise CannotCheckpoint(
                "sampler", "the batches were not counted. Take them from sampler.batches(loader) in place of loader"
            )
        return {"epoch": self.epoch, "taken": self.taken, **self._kind()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the position of ``state``.

        Raises:
            CannotCheckpoint: it is a position in another order.
        """
        for name, value in self._kind().items():
            if state.get(name) != value:
                raise CannotCheckpoint(
                    "sampler",
                    f"its {name} was {state.get(name)} and is {value}: a position in another order means nothing",
                )
        self.epoch, self.taken = int(state["epoch"]), int(state["taken"])

    def _kind(self) -> dict[str, Any]:
        return {"length": self.length, "batch_size": self.batch_size, "seed": self.seed, "shuffle": self.shuffle}

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.length, generator=generator)
