"""``python -m weft.capture``: the graph that a toy training step is captured as."""

from __future__ import annotations

from weft.capture.toy import capture_toy

print(capture_toy())
