"""``torch.compile(..., backend="weft")`` works once weft is imported, whether or not it is installed.

An installed package tells Dynamo of its backend by an entry point, which is metadata that an installer writes. Where
weft runs from its sources there is none, so the same entry point is offered through ``importlib.metadata``'s own hook
for finders. Dynamo itself is not imported: that takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

GROUP = "torch_dynamo_backends"
NAME = "weft"
VALUE = "weft.backend:weft"

_ANY = importlib.metadata.DistributionFinder.Context()


class _Sources(importlib.metadata.Distribution):
    """The metadata of weft as it runs; one that is installed comes before it."""

    def read_text(self, filename: str) -> str | None:
        texts = {"METADATA": f"Name: {NAME}\n", "entry_points.txt": f"[{GROUP}]\n{NAME} = {VALUE}\n"}
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"the metadata of weft lists no files: {path}")


class _Finder(importlib.metadata.DistributionFinder):
    finds_weft = True

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """No module comes from here."""

    def find_distributions(self, context: Any = _ANY) -> Iterator[importlib.metadata.Distribution]:
        if context.name in (None, NAME):
            yield _Sources()


def install() -> None:
    """Offer the entry point from now on. Installing twice does nothing."""
    if any(getattr(finder, "finds_weft", False) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Finder())
    if "torch._dynamo" in sys.modules:  # it looks for entry points once
        from weft import torch_adapter

        torch_adapter.offer_backend(NAME, importlib.metadata.EntryPoint(NAME, VALUE, GROUP))
