"""The folder in which the checkpoints of one training run lie, one subfolder each.

A checkpoint is written to ``step_000001000.partial`` and renamed to ``step_000001000`` once it is complete, so a
process that is killed at any moment leaves a whole checkpoint or one that nobody loads. Older checkpoints are removed
after that, never before.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from weft.distributed.checkpoint.manifest import sync_folder

_NAME = re.compile(r"step_(\d{9,})(\.replaced)?")


class CheckpointFolder:
    """The checkpoints below ``path``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def final(self, step: int) -> Path:
        """Where the complete checkpoint of ``step`` lies."""
        return self.path / f"step_{step:09d}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written."""
        return self.path / f"step_{step:09d}.partial"

    def newest_first(self) -> list[tuple[int, Path]]:
        """Complete checkpoints, with their steps, the newest first. Damaged ones are among them."""
        found: dict[int, Path] = {}
        if not self.path.is_dir():
            return []
        for entry in self.path.iterdir():
            match = _NAME.fullmatch(entry.name)
            # A checkpoint that was being replaced counts only where the new one was not renamed yet.
            if match and entry.is_dir() and (match[2] is None or not self.final(int(match[1])).exists()):
                found[int(match[1])] = entry
        return sorted(found.items(), reverse=True)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` to. What killed processes left is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob("step_*.partial"):
            shutil.rmtree(left)
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def commit(self, step: int) -> Path:
        """Give the complete checkpoint of ``step`` its name; one that had the name before is removed."""
        final, replaced = self.final(step), self.path / f"step_{step:09d}.replaced"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(self.partial(step), final)
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def keep_last(self, count: int) -> None:
        """Remove all but the ``count`` newest complete checkpoints."""
        for _, path in self.newest_first()[count:]:
            shutil.rmtree(path, ignore_errors=True)
