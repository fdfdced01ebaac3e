"""What the server process of ``tests/harness.py`` does once, before it forks the ranks of a test.

It imports what each rank would import: torch's symbolic machinery, pytest, hypothesis and all of weft, which takes
longer than most tests. And it collects garbage: a full collection, due once the heap has grown by a quarter since the
last one, copies every page that a rank shares with the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path

import weft

# Private torch names are here only to be loaded early: nothing calls them.
_MODULES = [
    "concurrent.futures.process",
    "pytest",
    "hypothesis",  # some machines with GPUs have none
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.validator",
    "torch.utils.checkpoint",
    "sympy.tensor.tensor",
    "torch._subclasses.schema_check_mode",
    "torch._dynamo.guards",
    "torch.export._trace",
    "torch._functorch.aot_autograd",
    *sorted(set(weft._HOMES.values())),
]

for _name in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
# This folder is on the path for this import alone: what ranks start must find what any process finds.
_folders = os.environ.pop("PYTHONPATH").split(os.pathsep)
if _others := [folder for folder in _folders if folder != str(Path(__file__).parent)]:
    os.environ["PYTHONPATH"] = os.pathsep.join(_others)
gc.collect()
