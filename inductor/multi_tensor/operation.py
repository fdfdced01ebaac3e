"""The interface of operations on lists of tensors: a graph's call, its reference, and its launches on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.multi_tensor.launch_plan import LaunchPlan


# A call of a graph is its target: equal calls are equal by their fields (frozen dataclasses), and serialise by them.
class MultiTensor(ABC):
    """A call of a graph on lists of tensors and scalars, functional like all calls of a graph.

    Called with real tensors it computes with ATen's kernels, out of place. This is the reference that its own kernels
    are tested against, and what runs on a CPU. It returns a list of lists: those that are new, then the new values of
    each list of ``updated``.

    Attributes:
        updated: positions of the arguments that the kernels overwrite with their new values.
    """

    shares_as_fakes = True  # results lie in the memory of an argument only where the fake tensors say so

    @property
    def updated(self) -> tuple[int, ...]:
        """See the class; none unless a subclass says so."""
        return ()

    @abstractmethod
    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        """The results."""

    def fake_result(self, recorded: Any, *arguments: Any) -> list[list[torch.Tensor]]:
        """The results for fake arguments, for the graph's verifier."""
        # Fake tensors take the reference's path, so results have the sizes, strides and dtypes that ATen gives.
        return self(*arguments)

    @abstractmethod
    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """The launches on a GPU.

        Args:
            arguments: the call's, with fake tensors.
        """

    @property
    def __name__(self) -> str:
        return type(self).__name__.lower()
