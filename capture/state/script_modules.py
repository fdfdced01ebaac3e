"""The state of modules that ``torch.jit.script`` or ``torch.jit.trace`` compiled, which is in C++.

Parameters, buffers and other attributes are read by name. A tensor among them is one object in Python, however often
it is read, so that its gradient, its hooks and the state of an optimizer belong to it. A list or dictionary is a new
copy at each read. It counts by its content, and so do numbers and texts. A scripted module keeps the types of its
attributes, so no number of it can be a symbol.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from weft import torchscript_adapter
from weft.capture.state.containers import Attributes, Container, Content, label_of
from weft.capture.state.type_facts import BOOKKEEPING
from weft.capture.step_interface import Role

# What holds the attributes above, in the dictionary of a scripted module.
_OF_SCRIPTS = frozenset(
    {"_c", "_concrete_type", "_actual_script_module", "_initializing", "_parameters", "_buffers", "_modules", "_name"}
)


def script_state(module: torch.jit.ScriptModule, path: str) -> Iterator[tuple[Container, Role | None]]:
    """What a scripted module holds, with the role of its tensors: attributes, modules, and hooks of Python's."""
    label = label_of(path)
    held = module._c
    attributes = torchscript_adapter.ScriptAttributes.of(held)
    for names, role in ((attributes.parameters, Role.PARAMETER), (attributes.tensors, Role.BUFFER)):
        if names:
            yield Attributes(held, path, frozenset(names), label), role
    for name in attributes.values:
        read, write = functools.partial(_read, name), functools.partial(_write, name, held.getattr(name))
        yield Content(held, label(name), read, write), None
    if (inner := torchscript_adapter.python_modules(module)) is not None:
        yield Container(inner, path, label=label), None
    own = vars(module)
    kept = {name for name, value in own.items() if not isinstance(value, torch.ScriptMethod)}  # type: ignore[attr-defined]
    yield Container(own, path, frozenset(kept) - BOOKKEEPING - _OF_SCRIPTS, label), None


def _read(name: str, held: Any) -> Any:
    value = held.getattr(name)
    if isinstance(value, dict):
        return tuple(each for item in value.items() for each in item)
    return tuple(value) if isinstance(value, list) else value


def _write(name: str, before: Any, held: Any, value: Any) -> None:
    if isinstance(before, dict):
        value = dict(zip(value[::2], value[1::2], strict=True))
    elif isinstance(before, list):
        value = list(value)
    held.setattr(name, value)
