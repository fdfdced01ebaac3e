"""weft: a distributed PyTorch training step, captured as one graph and compiled.

The public names and nothing else. Each is imported from its home at first use, so that `import weft` costs
next to nothing (DTensor alone takes half a second to import) and starts no CUDA.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.errors import WeftError as WeftError

__all__ = ["WeftError"]

_HOMES = {
    "WeftError": "weft.errors",
}


class _Package(ModuleType):
    """The package itself, as a class so that a public name wins over a folder of the same name.

    `weft.capture` is a function, and its home lies below the folder `weft.capture`. Python binds a submodule
    to its name in the package when it is first imported; that binding is refused for public names.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
