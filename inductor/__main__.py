"""``python -m weft.inductor``: the program that a toy training step runs as."""

from __future__ import annotations

from weft.capture.toy import capture_toy
from weft.inductor.runtime.aten import compile_aten

print(compile_aten(capture_toy()).source)
