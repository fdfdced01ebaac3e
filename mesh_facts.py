"""Process group, size and DTensor layouts of a 1-D mesh, computed once: torch takes the host some 10 microseconds to
compute each of them, and an eager step needs them for every collective and every conversion of a DTensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from weft import torch_adapter

# Bounds of the caches, which are emptied there. More come only where each step makes a mesh or has other sizes.
_MOST_MESHES, _MOST_LAYOUTS = 16, 1000


@dataclass
class MeshFacts:
    """What is known of one mesh.

    Attributes:
        mesh: the 1-D mesh.
        group: name of its process group.
        size: number of its ranks.
    """

    mesh: DeviceMesh
    group: str
    size: int
    _specs: dict[Any, Any] = field(default_factory=dict)

    def spec_of(self, local: Tensor, placements: tuple[Placement, ...]) -> Any:
        """The ``dtensor_spec`` of a DTensor whose parts are all like ``local``."""
        about = placements, local.shape, local.stride(), local.dtype
        return self._remembered(about, lambda: torch_adapter.dtensor_spec_of(local, self.mesh, placements))

    def spec_like(self, spec: Any, placements: tuple[Placement, ...]) -> Any:
        """The ``dtensor_spec`` of a DTensor with the sizes and the dtype of another, laid out as ``placements``."""
        if placements == spec.placements:
            return spec
        make = lambda: type(spec)(self.mesh, placements, tensor_meta=spec.tensor_meta)
        return self._remembered((placements, spec.tensor_meta), make)

    def _remembered(self, about: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        try:
            found = self._specs.get(about)
        except TypeError:  # symbolic sizes have no hash
            return make()
        if found is None:
            if len(self._specs) >= _MOST_LAYOUTS:
                self._specs.clear()
            found = self._specs[about] = make()
        return found


# Not in `weft.distributed`, whose variables are state of a step that is captured.
_known: dict[int, MeshFacts] = {}


def facts_of(mesh: DeviceMesh) -> MeshFacts:
    """The facts of a mesh. Keeps the mesh alive, so that its id stays its own."""
    found = _known.get(id(mesh))
    if found is None:
        if len(_known) >= _MOST_MESHES:
            _known.clear()
        found = _known[id(mesh)] = MeshFacts(mesh, mesh.get_group().group_name, mesh.size())
    return found
