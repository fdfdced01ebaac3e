"""The command ``weft``: mistakes that weft knows, those in its environment too, end the process with their text."""

from __future__ import annotations

import sys

import weft
from weft.errors import WeftError
from weft.launch.leave import leave, status_of


def main() -> None:
    """Run the command line; ``weft --version`` needs nothing else of it. The environment is read when the other modules
    are imported, so that happens here."""
    if sys.argv[1:] == ["--version"]:
        print(f"weft {weft.__version__}")
        return
    from weft.capture.garbage_collection import garbage_collection_paused

    try:
        with garbage_collection_paused():  # which takes a fifth of the time of all imports otherwise
            from weft.launch.cli import main as run
    except WeftError as error:
        sys.exit(f"weft: {error}")
    try:
        run()
    except SystemExit as error:
        leave(status_of(error))
    leave(0)
