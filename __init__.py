"""weft: a distributed PyTorch training step, captured as one graph and compiled.

The public names and nothing else. Each is imported from its home at first use, so that `import weft` costs
next to nothing (DTensor alone takes half a second to import) and starts no CUDA.
"""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.capture.fake.fake_world import fake_world as fake_world
    from weft.capture.graph import StepGraph as StepGraph
    from weft.capture.guards.dynamic_marks import mark_dynamic as mark_dynamic
    from weft.capture.guards.dynamic_marks import mark_static as mark_static
    from weft.capture.guards.dynamic_marks import maybe_mark_dynamic as maybe_mark_dynamic
    from weft.capture.record.opaque import opaque as opaque
    from weft.compile import CompiledStep as CompiledStep
    from weft.compile import capture as capture
    from weft.compile import compile as compile
    from weft.distributed.ddp import ReplicateModule as ReplicateModule
    from weft.distributed.ddp import replicate as replicate
    from weft.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from weft.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
    from weft.distributed.fsdp import FSDPModule as FSDPModule
    from weft.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from weft.distributed.fsdp import OffloadPolicy as OffloadPolicy
    from weft.distributed.fsdp import UnshardHandle as UnshardHandle
    from weft.distributed.fsdp import fully_shard as fully_shard
    from weft.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
    from weft.distributed.fsdp import share_comm_ctx as share_comm_ctx
    from weft.distributed.materialize import materialize as materialize
    from weft.distributed.stop_signal import stopping as stopping
    from weft.distributed.train_state import TrainState as TrainState
    from weft.errors import WeftError as WeftError
    from weft.explain import explain as explain

__all__ = [
    "CPUOffloadPolicy",
    "CompiledStep",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "StepGraph",
    "TrainState",
    "UnshardHandle",
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
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "stopping",
]

_HOMES = {
    "CPUOffloadPolicy": "weft.distributed.fsdp",
    "CompiledStep": "weft.compile",
    "DataParallelMeshDims": "weft.distributed.fsdp",
    "FSDPModule": "weft.distributed.fsdp",
    "MixedPrecisionPolicy": "weft.distributed.fsdp",
    "OffloadPolicy": "weft.distributed.fsdp",
    "ReplicateModule": "weft.distributed.ddp",
    "StepGraph": "weft.capture.graph",
    "TrainState": "weft.distributed.train_state",
    "UnshardHandle": "weft.distributed.fsdp",
    "WeftError": "weft.errors",
    "capture": "weft.compile",
    "compile": "weft.compile",
    "explain": "weft.explain",
    "fake_world": "weft.capture.fake.fake_world",
    "fully_shard": "weft.distributed.fsdp",
    "mark_dynamic": "weft.capture.guards.dynamic_marks",
    "mark_static": "weft.capture.guards.dynamic_marks",
    "materialize": "weft.distributed.materialize",
    "maybe_mark_dynamic": "weft.capture.guards.dynamic_marks",
    "opaque": "weft.capture.record.opaque",
    "register_fsdp_forward_method": "weft.distributed.fsdp",
    "replicate": "weft.distributed.ddp",
    "share_comm_ctx": "weft.distributed.fsdp",
    "stopping": "weft.distributed.stop_signal",
}


class _Package(ModuleType):
    """The package itself, as a class so that a public name wins over a folder of the same name.

    `weft.capture` is a function, and its home lies below the folder `weft.capture`. Python binds a submodule
    to its name in the package when it is first imported; that binding is refused for public names.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        home = sys.modules.get(_HOMES[name])
        if home is None:
            before = random.getstate()  # a package that is imported below draws from Python's generator
            home = importlib.import_module(_HOMES[name])
            random.setstate(before)
        value = getattr(home, name)
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
