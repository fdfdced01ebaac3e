"""What a function is made of besides its code: the variables that it closes over and its defaults.

Two functions may close over one variable, and a function over itself. So a variable is an object, too.
"""

from __future__ import annotations

import types
from typing import Any

from weft.capture.state.object_parts import ObjectForm, ObjectParts


def cell_parts(cell: types.CellType) -> ObjectParts:
    """What a variable that functions close over holds: nothing before it is assigned."""
    try:
        parts = [cell.cell_contents]
    except ValueError:
        parts = []
    return ObjectParts(ObjectForm(types.CellType, types.CellType), [], parts)


def function_parts(function: types.FunctionType) -> ObjectParts:
    """The variables that a function closes over, and its defaults."""
    cells, defaults, named = function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}
    count, names = len(cells), list(named)

    def make(parts: list[Any]) -> types.FunctionType:
        positional, by_name = parts[count : count + len(defaults)], parts[count + len(defaults) :]
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, tuple(positional) or None, tuple(parts[:count])
        )
        made.__kwdefaults__ = dict(zip(names, by_name, strict=True)) or None
        for name in ("__annotations__", "__doc__", "__module__", "__qualname__"):
            setattr(made, name, getattr(function, name))
        return made

    form = ObjectForm(types.FunctionType, object, node=make)
    return ObjectParts(form, [], [*cells, *defaults, *named.values()])
