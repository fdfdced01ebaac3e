"""The command line: one function a subcommand, whose arguments are its options."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from weft.capture.garbage_collection import garbage_collection_paused
from weft.errors import WeftError
from weft.inductor.transports.symmetric_memory import NO_MULTICAST

# The module of this folder that has the function of that name. Only that of the subcommand that runs is imported:
# `weft plan` needs no checkpoints, and `weft status` no planner.
COMMANDS = {
    "launch": "launch",
    "logs": "runs",
    "status": "runs",
    "cancel": "runs",
    "plan": "plan",
    "calibrate": "calibrate",
    "checkpoint": "checkpoint",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand that ``arguments`` (those of the process where None) name. Mistakes that weft knows end the
    process with their text and status 1."""
    for name, value in NO_MULTICAST.items():
        # Before any library looks. What is set otherwise stays, and symmetric memory is then refused.
        os.environ.setdefault(name, value)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in COMMANDS:
            tyro.cli(_function(given[0]), prog=f"weft {given[0]}", args=given[1:])
            return
        functions = {name: _function(name) for name in COMMANDS}
        tyro.extras.subcommand_cli_from_dict(
            functions, prog="weft", description="Tools around compiled training steps.", args=given
        )
    except WeftError as error:
        sys.exit(f"weft: {error}")


def _function(command: str) -> Callable[..., Any]:
    with garbage_collection_paused():  # which takes a fifth of the time of all imports otherwise
        return getattr(importlib.import_module(f"weft.launch.{COMMANDS[command]}"), command)
