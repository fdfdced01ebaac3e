"""Whether the kernels that weft generates compute the gradients of other people's models: eager in float64 decides.

Each case of ``model_coverage.py`` that trains one module computes a loss and its gradients from the same weights,
without dropout: eagerly in float64, eagerly in float32, and compiled in float32, at once and in a second call. The
error of gradients is the 2-norm of their difference from float64's, over that of float64's gradients, of all
parameters together. TF32 is off. Eager also computes with weights that differ by a rounding error, since a loss may be
so steep that no implementation is exact: one input of a ReLU within rounding of zero changes all gradients before it.
Where eager's error is above STEEP, or the compiled error is too large, each run is compared with a float64 run that
replays its activation pattern (``activation_pattern.py``), and these errors decide. An error of eager's above
UNDECIDED decides nothing: a batch norm over two values gives one and minus one, and its gradient is rounding alone.
The case then runs with its batches joined to one. Outcomes beside those of ``model_coverage.py``:

    equal       the compiled gradients' error is at most TOLERANCE times eager's largest, or below NOISE
    different   it is larger
    not run     also where eager's error is above UNDECIDED with all batches
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from activation_pattern import ActivationPattern, Pattern
from coverage_case import Case, Trained, shown
from torch.utils._pytree import tree_map, tree_map_only

import weft
from weft.errors import WeftError

Row = dict[str, Any]
Gradients = dict[str, torch.Tensor]

TOLERANCE = 4.0
NOISE = 1e-5
STEEP = 1e-4
UNDECIDED = 0.1
PERTURBED = 4  # eager runs with other weights


def run_case(case: Case, begin: Callable[[str], None] = lambda phase: None) -> Row:
    """Compare the gradients of one case; see the module's text for the outcomes."""
    row = _compared(case, begin)
    if _decides(row):
        return row
    row = _compared(lambda: _with_one_batch(case()), begin)
    return row if _decides(row) else {**row, "outcome": "not run", "error": "rounding decides eager's gradients too"}


def _decides(row: Row) -> bool:
    return row.get("eager_error_at_same_pattern", row.get("eager_error", 0.0)) <= UNDECIDED


def _with_one_batch(trained: Trained) -> Trained:
    """The case with all of its batches joined to one, along the first dimension."""
    join = lambda first, *rest: torch.cat([first, *rest]) if isinstance(first, torch.Tensor) else first
    return replace(trained, batches=[tree_map(join, *trained.batches)])


def _compared(case: Case, begin: Callable[[str], None]) -> Row:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begin("eager")
    try:
        exact, _ = _gradients(case, device, torch.float64)
        of_eager = _error(_gradients(case, device, torch.float32)[0], exact)
        perturbed = [_gradients(case, device, torch.float32, perturbed=at) for at in range(1, 1 + PERTURBED)]
        of_eager = max(of_eager, *(_error(found, exact) for found, _ in perturbed))
        if not math.isfinite(of_eager):
            return {"outcome": "not run", "error": "gradients are not finite"}
    except Exception as error:  # noqa: BLE001, whatever a library raises
        return {"outcome": "not run", "error": shown(error)}
    begin("compiled")
    start = time.perf_counter()
    try:
        first, second = _gradients(case, device, torch.float32, compiled=True)
    except WeftError as error:
        return {"outcome": "refused", "error": shown(error)}
    except Exception as error:  # noqa: BLE001
        return {"outcome": "crashed", "error": shown(error), "trace": traceback.format_exc()[-3000:]}
    of_weft = max(_error(found, exact) for found in (first, second))
    row: Row = {"eager_error": of_eager, "weft_error": of_weft, "weft_s": round(time.perf_counter() - start, 2)}
    steep = of_eager > STEEP
    if of_weft <= max(TOLERANCE * of_eager, NOISE) and not steep:
        return {"outcome": "equal", **row}
    of_eager = max(_error_at_same_pattern(case, device, perturbed=at)[0] for at in range(1 + PERTURBED))
    of_weft, pattern = _error_at_same_pattern(case, device, compiled=True)
    own = ActivationPattern()
    _gradients(case, device, torch.float64, pattern=own)
    flipped = sum(int((one != other).sum()) for one, other in zip(own.recorded, pattern, strict=True))
    row |= {"flipped": flipped, "eager_error_at_same_pattern": of_eager, "weft_error_at_same_pattern": of_weft}
    if of_weft <= max(TOLERANCE * of_eager, NOISE):
        return {"outcome": "equal", **row}
    worst = max(exact, key=lambda name: (first[name] - exact[name]).norm().item())
    text = f"error {of_weft:.1e}, eager's {of_eager:.1e}, most of it in {worst}"
    return {"outcome": "different", "error": text, **row}


def _error_at_same_pattern(
    case: Case, device: str, *, compiled: bool = False, perturbed: int = 0
) -> tuple[float, Pattern]:
    """The error of float32 gradients against float64 with the same activation pattern, and that pattern."""
    made = ActivationPattern()
    found, _ = _gradients(case, device, torch.float32, compiled=compiled, perturbed=perturbed, pattern=made)
    exact, _ = _gradients(case, device, torch.float64, pattern=ActivationPattern(made.recorded))
    return _error(found, exact), made.recorded


def _gradients(
    case: Case,
    device: str,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    perturbed: int = 0,
    pattern: ActivationPattern | None = None,
) -> tuple[Gradients, Gradients]:
    """The gradients by name, in float64 on the CPU, of a first call and of a second one with the same batch."""
    torch.manual_seed(0)
    trained = case()
    if trained.model is None or trained.loss is None:
        raise ValueError("the case trains no single module")
    model, loss_of = trained.model, trained.loss
    _stop_dropout(model)
    model.to(device, dtype)
    choose: Any = getattr(model, "set_experts_implementation", None)
    if dtype == torch.float64 and choose is not None:
        choose("eager")  # grouped GEMMs have no float64
    if perturbed:
        draw = torch.Generator(device).manual_seed(perturbed)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + torch.finfo(dtype).eps * torch.randn(each.shape, device=device, generator=draw))
    batch = tree_map_only(
        torch.Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), trained.batches[0]
    )
    recorder = pattern or ActivationPattern()  # without `pattern` nothing is attached, and it stays empty
    if pattern is not None:
        pattern.attach(model)

    def step(batch: Any) -> Pattern:
        recorder.recorded = []
        loss_of(batch).backward()
        return recorder.recorded

    run, found = weft.compile(step) if compiled else step, []
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2 if compiled else 1):
        for name, buffer in model.named_buffers():
            buffer.copy_(statistics[name])  # of batch norms
        model.zero_grad()
        torch.manual_seed(1)
        recorder.recorded = run(batch)
        named = {name: each.grad for name, each in model.named_parameters()}
        found.append({name: grad.double().cpu() for name, grad in named.items() if grad is not None})
    return found[0], found[-1]


def _stop_dropout(model: torch.nn.Module) -> None:
    """Set all rates of dropout and of masked inputs to zero: of modules, and of the configuration that Hugging Face
    models read."""
    for holder in (*model.modules(), getattr(model, "config", None)):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, float) and (name == "p" or "drop" in name or name.startswith("mask_")):
                setattr(holder, name, 0.0)


def _error(found: Gradients, exact: Gradients) -> float:
    if found.keys() != exact.keys():
        return float("inf")
    apart = sum((found[name] - exact[name]).square().sum().item() for name in exact)
    return (apart / max(sum(each.square().sum().item() for each in exact.values()), 1e-300)) ** 0.5
