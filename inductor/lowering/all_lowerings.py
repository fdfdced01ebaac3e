"""Imports every module of lowerings, which fills the table :data:`weft.inductor.lowering.registry.LOWERINGS`."""

from weft.inductor.lowering import (  # noqa: F401
    casts,
    gather,
    layout,
    norms,
    pointwise,
    pooling,
    random,
    reductions,
    softmax,
)
