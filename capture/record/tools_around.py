"""Modes of torch around a call that change or check what a compiled program does not do."""

from __future__ import annotations

import torch

from weft import torch_adapter
from weft.capture.fake.fake_cuda import RedirectCudaToCpu
from weft.capture.user_code import user_line
from weft.errors import AnomalyModeAround, FunctionModeAround


def refuse_tools_around(step: str) -> None:
    """Raise where the caller is inside a mode that changes or checks what a program does not do."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise AnomalyModeAround(step, user_line())
    # Users' modes see calls of functions, which a program does not make. Those of a fake world are weft's.
    seen = [type(mode) for mode in torch_adapter.function_modes() if not isinstance(mode, torch.device)]
    if foreign := [kind.__qualname__ for kind in seen if kind is not RedirectCudaToCpu]:
        raise FunctionModeAround(step, foreign[-1], user_line())
