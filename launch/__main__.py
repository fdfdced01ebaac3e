"""``python -m weft.launch``: the command line, as ``weft`` is where the package is installed."""

from __future__ import annotations

from weft.launch.entry import main

main()
