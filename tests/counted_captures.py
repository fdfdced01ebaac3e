"""Cases of steps over many calls, each with the number of captures that it may take."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, TypeVar

Make = TypeVar("Make", bound=Callable[..., Any])


class Cases(dict[str, tuple[Callable[..., Any], int]]):
    """What makes each case, and its number of captures, by the name of the function that makes it."""

    def case(self, captures: int = 2) -> Callable[[Make], Make]:
        """A case that is captured so many times at most: the first call finds no gradients, and the second one does."""

        def register(make: Make) -> Make:
            self[make.__name__] = make, captures
            return make

        return register


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """A batch as tokenizers give it: entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]

    def to(self, device: str) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self
