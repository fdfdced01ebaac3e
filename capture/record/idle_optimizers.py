"""A warning about optimizers that change nothing, of which torch says nothing."""

from __future__ import annotations

import logging
from weakref import WeakSet

import torch

from weft.capture.user_code import user_line

log = logging.getLogger(__name__)

_known: WeakSet[torch.optim.Optimizer] = WeakSet()


def warn_of_idle(optimizer: torch.optim.Optimizer) -> None:
    """Say once of an optimizer that has made a step that none of its parameters has a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer not in _known and parameters and all(parameter.grad is None for parameter in parameters):
        _known.add(optimizer)
        log.warning(
            "%s.step at %s changes nothing: none of its %d parameters has a gradient. If the optimizer was made before "
            "fully_shard, replicate or materialize, it has parameters that the model no longer has: make it after them",
            type(optimizer).__name__,
            user_line(),
            len(parameters),
        )
