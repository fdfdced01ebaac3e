"""Names of graph inputs that a reader recognises."""

from __future__ import annotations

import builtins
import keyword
import re
from typing import Any

_OF_PROGRAMS = frozenset({"inputs", "run", "torch"})  # names that the text of every program has a use for


def readable_name(path: str) -> str:
    """``model_blocks_0_weight`` for the path ``model.blocks.0.weight``: a valid Python name, perhaps not unique."""
    name = re.sub(r"\W+", "_", path).strip("_") or "input"
    if keyword.iskeyword(name) or hasattr(builtins, name) or name in _OF_PROGRAMS:
        return f"{name}_"
    return f"_{name}" if name[0].isdigit() else name


def argument_path(path: tuple[Any, ...]) -> str:
    """``args[0]['ids']`` or ``labels`` for the path of a leaf in ``(args, kwargs)``."""
    outer, *rest = path
    tail = "".join(str(part) for part in rest)
    return f"args{tail}" if str(outer) == "[0]" else tail.replace("['", "", 1).replace("']", "", 1)
