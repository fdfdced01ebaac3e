"""Gradients that a step replaces, as one does that begins with ``zero_grad()``.

Until a call replaces them, the gradients of the call before take as much memory as the new ones. So guards hold none
of them, and where the step does not read them, they are let go before the program runs, as ``zero_grad()`` lets them go
at the beginning of an eager step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.capture.record.captured_step import Effect
from weft.capture.state.containers import Container, StatePlace, TensorLike


class UserTensors(dict[int, StatePlace]):
    """The places of the user's own tensors, by id.

    Attributes:
        referred: the places that were looked up. Templates do that for the tensors that they refer to.
    """

    def __init__(self, places: dict[int, StatePlace]) -> None:
        super().__init__(places)
        self.referred: list[StatePlace] = []

    def __getitem__(self, key: int) -> StatePlace:
        place = super().__getitem__(key)
        self.referred.append(place)
        return place


def release_replaced(effects: Sequence[Effect], read: Sequence[StatePlace], graph: torch.fx.Graph) -> list[Container]:
    """Have guards compare the gradients that the effects replace by shape and dtype, and hold none of them.

    Args:
        effects: what each call leaves in the Python state.
        read: the places of the graph's inputs, and those to which templates refer.
        graph: of the step.

    Returns:
        the parameters whose gradient no call reads: it may be let go before the program runs.
    """
    containers = {id(place.container) for place in read if place.key == "grad"}
    # User code that is called from the program may look at gradients that the step replaces later.
    calls_out = any(node.meta.get("effect") for node in graph.nodes)
    unread = []
    for effect in effects:
        container = effect.container
        is_read = id(container) in containers
        if effect.key == "grad" and (like := TensorLike.of_gradient(container, is_read=is_read)) is not None:
            container.by_value["grad"] = like
            if not is_read and not calls_out:
                unread.append(container)
    return unread
