"""``weft.TrainState``: all state that training needs to go on with the same bits, saved and loaded as one."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from weft import graph_hashes
from weft.distributed.checkpoint import writer
from weft.distributed.checkpoint.exchange import Ranks
from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.distributed.checkpoint.read import load_into, newest_valid
from weft.distributed.checkpoint.staging import SharedMemory, stage
from weft.distributed.checkpoint.tensor_bytes import bytes_of
from weft.distributed.checkpoint.write import SaveRequest
from weft.errors import CannotCheckpoint, CheckpointMismatch, CheckpointNotLoaded, CheckpointNotSaved
from weft.rank_watch import CannotEnd
from weft.short_tracebacks import methods_shorten_tracebacks

_log = logging.getLogger(__name__)

# The entry of the checkpoint that holds what rank N keeps for itself, as bytes of torch.save.
_OWN = "weft.rank_{}"


@methods_shorten_tracebacks
class TrainState:
    """The state of a training run.

    Modules and optimizers are stored as torch's distributed checkpoints (DCP) store them, under the names given here:
    other programs read them with ``torch.distributed.checkpoint``, and another world size can load them. Everything
    else is stored for each rank: what ``state_dict()`` of the other objects returns, and the states of the random
    number generators of torch (CPU and all GPUs), Python and numpy.

        state = weft.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
        first = state.load("checkpoints") or 0
        for step in range(first, steps):
            train_step(*batch)
            if step % 100 == 99:
                state.save("checkpoints", step + 1)
        state.wait()

    Args:
        keep_last: how many checkpoints stay in a folder.
        objects: by name, with methods ``state_dict()`` and ``load_state_dict()``. The parameters of an optimizer must
            belong to one of the modules.

    Raises:
        CannotCheckpoint: an object lacks these methods, or an optimizer has parameters of no module given here.
    """

    def __init__(self, *, keep_last: int = 3, **objects: object) -> None:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise CannotCheckpoint("keep_last", f"{keep_last!r} is no positive number of checkpoints")
        self.keep_last = keep_last
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {n: value for n, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
        self.others: dict[str, Any] = {
            n: v for n, v in objects.items() if n not in self.modules and n not in self.optimizers
        }
        for name, value in self.others.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise CannotCheckpoint(
                    name,
                    f"{value!r} (of type {type(value).__name__}) has no state_dict() and load_state_dict(). Add them, "
                    "or leave it out",
                )
        self._module_of = {name: self._owner(name, optimizer) for name, optimizer in self.optimizers.items()}
        self._ranks: Ranks | None = None
        self._save: writer.Save | None = None

    # ---- saving

    def save(self, folder: str | os.PathLike[str], step: int, *, wait: bool = False) -> None:
        """Save the state after ``step`` steps. Collective.

        The state is copied to memory that another process, which the first save starts, writes from while training goes
        on. A save that is still under way is waited for first, so two are never written at once. This process does not
        end before its last save has. The memory, as much as this rank's part of the state, is kept for the next save.

        Args:
            folder: of the run; each checkpoint gets a subfolder.
            step: number of training steps done; what :meth:`load` returns.
            wait: return when the checkpoint is complete.

        Raises:
            CheckpointNotSaved: the previous save failed, or this one did and ``wait`` is set. The checkpoints of before
                are still there.
            CannotCheckpoint: an object's state holds something other than tensors, numbers, strings and containers.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CannotCheckpoint("step", f"{step!r} is no number of training steps")
        self.wait()
        ranks = self._all_ranks(folder)
        if ranks.lost is not None:
            raise CheckpointNotSaved(step, folder, str(ranks.lost))
        version, graphs, where = _weft_version(), graph_hashes.recorded(), os.path.abspath(folder)

        def prepare(memory: SharedMemory) -> SaveRequest:
            state = self._sharded_state()
            state[_OWN.format(ranks.rank)] = _to_bytes(self._own_state())
            staged = stage(state, ranks.rank, memory)
            return SaveRequest(where, step, staged, ranks.rank, ranks.world_size, self.keep_last, version, graphs)

        self._save = writer.begin(ranks, step, where, prepare)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way, if any.

        Raises:
            CheckpointNotSaved: it failed, or it waits for a rank whose process is dead or stopped.
        """
        save, self._save = self._save, None
        if save is not None:
            save.wait()

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._save is not None and self._save.under_way

    # ---- loading

    def load(self, folder: str | os.PathLike[str], *, strict: bool = False) -> int | None:
        """Load the newest checkpoint in ``folder`` that is what was written. Collective.

        Every file is compared with the manifest before any of it is unpickled. With another world size, modules and
        optimizers are resharded, all ranks load rank 0's other objects, and generators are left alone.

        Args:
            strict: raise if the newest checkpoint is damaged. Otherwise a warning names the files and tensors, and the
                one before is loaded.

        Returns:
            The number of training steps that it was saved after; None where the folder holds no checkpoint.

        Raises:
            CheckpointDamaged: all checkpoints are damaged, or the newest is and ``strict`` is set.
            CheckpointMismatch: it is the checkpoint of another model or optimizer.
            CheckpointNotLoaded: a rank whose process is dead or stopped does not take part.
        """
        self.wait()
        ranks = self._all_ranks(folder)
        newest = self._with_others(folder, lambda: newest_valid(CheckpointFolder(folder), ranks, strict))
        if newest is None:
            return None
        path, manifest = newest
        state = self._sharded_state()
        own = self._own_entry(manifest.world_size, ranks)
        if own not in manifest.tensors:
            raise CheckpointMismatch(path, [own], [])
        state[own] = torch.empty(manifest.tensors[own][1], dtype=torch.uint8)
        self._with_others(folder, lambda: load_into(path, manifest, state, ranks))
        for name, module in self.modules.items():
            set_model_state_dict(module, state[name])
        for name, optimizer in self.optimizers.items():
            set_optimizer_state_dict(self._module_of[name], optimizer, state[name])
        self._load_own(_from_bytes(state[own]), same_world=manifest.world_size == ranks.world_size)
        return manifest.step

    def _own_entry(self, saved: int, ranks: Ranks) -> str:
        if saved != ranks.world_size:
            _log.warning(
                "the checkpoint was written by %d ranks and is loaded by %d: random generators are left alone, and "
                "other objects load the state of rank 0, so numbers differ from those of an uninterrupted run",
                saved,
                ranks.world_size,
            )
        return _OWN.format(ranks.rank if saved == ranks.world_size else 0)

    # ---- the parts of the state

    def _sharded_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: get_model_state_dict(module) for name, module in self.modules.items()}
        for name, optimizer in self.optimizers.items():
            state[name] = get_optimizer_state_dict(self._module_of[name], optimizer)
        return state

    def _own_state(self) -> dict[str, Any]:
        generators: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            generators["numpy"] = [str(kind), keys.tolist(), *rest]
        return {
            "generators": generators,
            "objects": {name: _plain(name, value.state_dict()) for name, value in self.others.items()},
        }

    def _load_own(self, own: dict[str, Any], same_world: bool) -> None:
        for name, value in self.others.items():
            if name not in own["objects"]:
                raise CheckpointMismatch(name, [name], [])
            value.load_state_dict(own["objects"][name])
        generators = own["generators"]
        if not same_world:
            return  # equal states on all ranks would draw equal dropout masks
        torch.set_rng_state(generators["torch"])
        random.setstate(_tuples(generators["python"]))
        if "cuda" in generators and torch.cuda.is_available():
            for device, generator in enumerate(generators["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(generator, device)
        if "numpy" in generators:
            import numpy

            kind, keys, *rest = generators["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))

    def _owner(self, name: str, optimizer: torch.optim.Optimizer) -> nn.Module:
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in self.modules.values():
            if wanted <= {id(p) for p in module.parameters()}:
                return module
        raise CannotCheckpoint(
            name, "no single module given here has all of its parameters. Give TrainState the module that has them"
        )

    def _all_ranks(self, folder: str | os.PathLike[str]) -> Ranks:
        if self._ranks is None:
            try:
                self._ranks = Ranks()
            except CannotEnd as error:
                raise CheckpointNotLoaded(folder, str(error)) from None
        return self._ranks

    def _with_others(self, folder: str | os.PathLike[str], action: Callable[[], Any]) -> Any:
        """What a collective part of a load returns."""
        assert self._ranks is not None
        try:
            return self._ranks.call(action)
        except CannotEnd as error:
            raise CheckpointNotLoaded(folder, str(error)) from None


def _plain(name: str, state: Any) -> Any:
    """``state`` as it will be loaded; refused now if that would fail then."""
    try:
        return _from_bytes(_to_bytes(state))
    except Exception as error:
        raise CannotCheckpoint(
            name, f"its state_dict() holds more than tensors, numbers, strings and containers of them: {error}"
        ) from error


def _to_bytes(value: Any) -> torch.Tensor:
    """``value`` as a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    """The value that :func:`_to_bytes` encoded. Nothing is imported or executed by name."""
    return torch.load(io.BytesIO(bytes_of(data)), weights_only=True)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _weft_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("weft")
    except PackageNotFoundError:
        return "unknown"
