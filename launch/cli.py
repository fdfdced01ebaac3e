"""The command line: one function a subcommand, whose arguments are its options."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from weft.errors import WeftError
from weft.inductor.transports.symmetric_memory import NO_MULTICAST
from weft.launch.calibrate import calibrate
from weft.launch.checkpoint import checkpoint
from weft.launch.launch import launch
from weft.launch.plan import plan
from weft.launch.runs import cancel, logs, status

COMMANDS = {
    "launch": launch,
    "logs": logs,
    "status": status,
    "cancel": cancel,
    "plan": plan,
    "calibrate": calibrate,
    "checkpoint": checkpoint,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand that ``arguments`` (those of the process where None) name. Mistakes that weft knows end the
    process with their text and status 1."""
    for name, value in NO_MULTICAST.items():
        # Before any library looks. What is set otherwise stays, and symmetric memory is then refused.
        os.environ.setdefault(name, value)
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="weft", description="Tools around compiled training steps.", args=arguments
        )
    except WeftError as error:
        sys.exit(f"weft: {error}")
