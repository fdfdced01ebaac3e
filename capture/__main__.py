"""``python -m weft.capture`` prints the captured graph of the toy training step."""

from __future__ import annotations

from weft.capture.toy import capture_toy

print(capture_toy())
