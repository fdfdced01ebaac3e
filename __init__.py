"""weft: a distributed PyTorch training step, captured as one graph and compiled.

The public names and nothing else. Each is imported from its home at first use, so that `import weft` costs
next to nothing (DTensor alone takes half a second to import) and starts no CUDA.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.capture.fake_world import fake_world as fake_world
    from weft.capture.graph import StepGraph as StepGraph
    from weft.capture.marks import mark_dynamic as mark_dynamic
    from weft.capture.marks import mark_static as mark_static
    from weft.capture.marks import maybe_mark_dynamic as maybe_mark_dynamic
    from weft.capture.opaque import opaque as opaque
    from weft.compile import CompiledStep as CompiledStep
    from weft.compile import capture as capture
    from weft.compile import compile as compile
    from weft.distributed.ddp import ReplicateModule as ReplicateModule
    from weft.distributed.ddp import replicate as replicate
    from weft.distributed.fsdp import FSDPModule as FSDPModule
    from weft.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from weft.distributed.fsdp import fully_shard as fully_shard
    from weft.distributed.materialize import materialize as materialize
    from weft.errors import WeftError as WeftError
    from weft.explain import explain as explain

__all__ = [
    "CompiledStep",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ReplicateModule",
    "StepGraph",
    "WeftError",
    "capture",
    "compile",
    "explain",
    "fake_world",
    "fully_shard",
    "mark_dynamic",
    "mark_static",
    "materialize",
    "maybe_mark_dynamic",
    "opaque",
    "replicate",
]

_HOMES = {
    "CompiledStep": "weft.compile",
    "FSDPModule": "weft.distributed.fsdp",
    "MixedPrecisionPolicy": "weft.distributed.fsdp",
    "ReplicateModule": "weft.distributed.ddp",
    "StepGraph": "weft.capture.graph",
    "WeftError": "weft.errors",
    "capture": "weft.compile",
    "compile": "weft.compile",
    "explain": "weft.explain",
    "fake_world": "weft.capture.fake_world",
    "fully_shard": "weft.distributed.fsdp",
    "mark_dynamic": "weft.capture.marks",
    "mark_static": "weft.capture.marks",
    "materialize": "weft.distributed.materialize",
    "maybe_mark_dynamic": "weft.capture.marks",
    "opaque": "weft.capture.opaque",
    "replicate": "weft.distributed.ddp",
}


class _Package(ModuleType):
    """The package itself, as a class so that a public name wins over a folder of the same name.

    `weft.capture` is a function, and its home lies below the folder `weft.capture`. Python binds a submodule
    to its name in the package when it is first imported; that binding is refused for public names.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
importlib.import_module("weft.logs").install()
importlib.import_module("weft.dynamo_entry").install()
