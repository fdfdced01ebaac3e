"""Which parameters and buffers one call of `replicate` manages, found anew by name each time.

A parameter may be exchanged for another object after the wrap (materialized from meta, loaded with
`assign=True`), so what is kept is the place where it lives, not the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ModuleSlot:
    """A place in a module that holds a parameter: `owner.name`, known to the user as `path`."""

    owner: nn.Module
    name: str
    path: str

    def get(self) -> torch.Tensor | None:
        """The tensor registered under this name now; None where the module registered None."""
        return self.owner._parameters[self.name]


def managed_modules(roots: Sequence[nn.Module], excluded: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The modules under `roots` and their paths, without the trees under `excluded`; each module once."""
    skipped = set(excluded) - set(roots)
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, path: str) -> None:
        if module in found or module in skipped:
            return
        found[module] = path
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    for root in roots:
        visit(root, "")
    return found


def parameter_slots(modules: dict[nn.Module, str], ignored: set[nn.Parameter]) -> list[ModuleSlot]:
    """Every place of a parameter in `modules`, tied parameters once for each place."""
    return [
        ModuleSlot(module, name, f"{path}.{name}" if path else name)
        for module, path in modules.items()
        for name, param in module._parameters.items()
        if param is not None and param not in ignored
    ]


def parameters(slots: Iterable[ModuleSlot]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters now in `slots`, each once, with the path of its first place."""
    seen: set[nn.Parameter] = set()
    for slot in slots:
        param = slot.get()
        # During a forward in lower precision the place holds the cast tensor, which is not a Parameter.
        if isinstance(param, nn.Parameter) and param not in seen:
            seen.add(param)
            yield slot.path, param


def buffers(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The buffers of `modules`, each once."""
    seen: set[torch.Tensor] = set()
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield buffer
