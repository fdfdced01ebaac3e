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
    from weft import errors as errors
    from weft import knobs as knobs
    from weft.capture.fake.fake_world import fake_world as fake_world
    from weft.capture.graph import StepGraph as StepGraph
    from weft.capture.guards.dynamic_marks import mark_dynamic as mark_dynamic
    from weft.capture.guards.dynamic_marks import mark_static as mark_static
    from weft.capture.guards.dynamic_marks import maybe_mark_dynamic as maybe_mark_dynamic
    from weft.capture.record.opaque import opaque as opaque
    from weft.compile import CompiledStep as CompiledStep
    from weft.compile import capture as capture
    from weft.compile import compile as compile
    from weft.distributed.checkpoint.safetensors_files import load_safetensors as load_safetensors
    from weft.distributed.checkpoint.safetensors_files import save_safetensors as save_safetensors
    from weft.distributed.ddp import ReplicateModule as ReplicateModule
    from weft.distributed.ddp.replicate import replicate as replicate
    from weft.distributed.dtensor import ColwiseParallel as ColwiseParallel
    from weft.distributed.dtensor import NoParallel as NoParallel
    from weft.distributed.dtensor import PrepareModuleInput as PrepareModuleInput
    from weft.distributed.dtensor import PrepareModuleInputOutput as PrepareModuleInputOutput
    from weft.distributed.dtensor import PrepareModuleOutput as PrepareModuleOutput
    from weft.distributed.dtensor import RowwiseParallel as RowwiseParallel
    from weft.distributed.dtensor import SequenceParallel as SequenceParallel
    from weft.distributed.dtensor import loss_parallel as loss_parallel
    from weft.distributed.dtensor.auto_plan import tensor_parallel_plan as tensor_parallel_plan
    from weft.distributed.dtensor.parallelize import parallelize as parallelize
    from weft.distributed.dtensor.parallelize import parallelize_module as parallelize_module
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
    from weft.distributed.resumable_sampler import ResumableSampler as ResumableSampler
    from weft.distributed.stop_signal import stopping as stopping
    from weft.distributed.train_state import TrainState as TrainState
    from weft.errors import WeftError as WeftError
    from weft.explain import explain as explain
    from weft.metrics import flush_log as flush_log
    from weft.metrics import log as log
    from weft.metrics import log_to as log_to
    from weft.metrics import metrics as metrics
    from weft.plan.plan import plan as plan

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - names of one module together
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "CompiledStep",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "NoParallel",
    "OffloadPolicy",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateModule",
    "ResumableSampler",
    "RowwiseParallel",
    "SequenceParallel",
    "StepGraph",
    "TrainState",
    "UnshardHandle",
    "WeftError",
    "capture",
    "compile",
    "errors",
    "explain",
    "fake_world",
    "flush_log",
    "log",
    "log_to",
    "fully_shard",
    "knobs",
    "load_safetensors",
    "loss_parallel",
    "mark_dynamic",
    "mark_static",
    "materialize",
    "maybe_mark_dynamic",
    "metrics",
    "opaque",
    "parallelize",
    "parallelize_module",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "save_safetensors",
    "share_comm_ctx",
    "stopping",
    "tensor_parallel_plan",
]

_HOMES = {
    "CPUOffloadPolicy": "weft.distributed.fsdp",
    "ColwiseParallel": "weft.distributed.dtensor",
    "CompiledStep": "weft.compile",
    "DataParallelMeshDims": "weft.distributed.fsdp",
    "FSDPModule": "weft.distributed.fsdp",
    "MixedPrecisionPolicy": "weft.distributed.fsdp",
    "NoParallel": "weft.distributed.dtensor",
    "OffloadPolicy": "weft.distributed.fsdp",
    "PrepareModuleInput": "weft.distributed.dtensor",
    "PrepareModuleInputOutput": "weft.distributed.dtensor",
    "PrepareModuleOutput": "weft.distributed.dtensor",
    "ReplicateModule": "weft.distributed.ddp",
    "ResumableSampler": "weft.distributed.resumable_sampler",
    "RowwiseParallel": "weft.distributed.dtensor",
    "SequenceParallel": "weft.distributed.dtensor",
    "StepGraph": "weft.capture.graph",
    "TrainState": "weft.distributed.train_state",
    "UnshardHandle": "weft.distributed.fsdp",
    "WeftError": "weft.errors",
    "capture": "weft.compile",
    "compile": "weft.compile",
    "explain": "weft.explain",
    "fake_world": "weft.capture.fake.fake_world",
    "flush_log": "weft.metrics",
    "log": "weft.metrics",
    "log_to": "weft.metrics",
    "metrics": "weft.metrics",
    "fully_shard": "weft.distributed.fsdp",
    "load_safetensors": "weft.distributed.checkpoint.safetensors_files",
    "loss_parallel": "weft.distributed.dtensor",
    "mark_dynamic": "weft.capture.guards.dynamic_marks",
    "mark_static": "weft.capture.guards.dynamic_marks",
    "materialize": "weft.distributed.materialize",
    "maybe_mark_dynamic": "weft.capture.guards.dynamic_marks",
    "opaque": "weft.capture.record.opaque",
    "parallelize": "weft.distributed.dtensor",
    "parallelize_module": "weft.distributed.dtensor",
    "plan": "weft.plan.plan",
    "register_fsdp_forward_method": "weft.distributed.fsdp",
    "replicate": "weft.distributed.ddp",
    "save_safetensors": "weft.distributed.checkpoint.safetensors_files",
    "share_comm_ctx": "weft.distributed.fsdp",
    "stopping": "weft.distributed.stop_signal",
    "tensor_parallel_plan": "weft.distributed.dtensor",
}


# Modules that are public as a whole.
_MODULES = ("errors", "knobs")

# Taken now: while a step is captured, the module's functions refuse or record, and its first `weft.log` may be there.
_get_generator_state, _set_generator_state = random.getstate, random.setstate


class _Package(ModuleType):
    """The package itself, as a class so that a public name wins over a folder of the same name.

    `weft.capture` is a function, and its home lies below the folder `weft.capture`. Python binds a submodule
    to its name in the package when it is first imported; that binding is refused for public names.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"weft.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        home = sys.modules.get(_HOMES[name])
        if home is None:
            before = _get_generator_state()  # a package that is imported below draws from Python's generator
            home = importlib.import_module(_HOMES[name])
            _set_generator_state(before)
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
