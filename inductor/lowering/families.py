"""All families of lowerings: importing this module fills the table."""

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
