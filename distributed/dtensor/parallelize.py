"""``weft.parallelize``: shard the modules that a plan names over the ranks of one mesh dimension."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import ParallelStyle

from weft.argument_checks import ArgumentChecks
from weft.distributed.dtensor.auto_plan import tensor_parallel_plan
from weft.distributed.dtensor.styles import replicate_parameters
from weft.short_tracebacks import shortens_tracebacks

Module = TypeVar("Module", bound=nn.Module)

_CHECKS = ArgumentChecks("parallelize")
# Styles that convert what enters and leaves a module, and leave its parameters alone.
_PREPARE = (
    torch_parallel.PrepareModuleInput,
    torch_parallel.PrepareModuleOutput,
    torch_parallel.PrepareModuleInputOutput,
)
_SHOWN = 10


@shortens_tracebacks
def parallelize(
    module: Module,
    mesh: DeviceMesh,
    plan: ParallelStyle | dict[str, ParallelStyle] | Literal["auto"],
    *,
    src_data_rank: int | None = 0,
    example: tuple[object, ...] | Mapping[str, object] | None = None,
) -> Module:
    """Shard ``module`` in place for tensor or sequence parallelism, and return it.

    Mirrors ``torch.distributed.tensor.parallel.parallelize_module``, whose styles may be used too. It differs in this:

    - A plan entry that names no module is an error, not a warning. So are two styles for one module's parameters.
    - Parameters that no entry names become ``Replicate()`` DTensors of ``mesh``, so that ``clip_grad_norm_`` and fused
      or foreach optimizers take all parameters together. Where the plan shards activations along the sequence, they
      must be named: as ``SequenceParallel`` if their module sees a part of the sequence, else as ``NoParallel``.
    - A parameter that two modules share stays shared.

    Call it before ``fully_shard`` or ``replicate``, and before the optimizer is made.

    Args:
        mesh: of one dimension, such as ``mesh["tp"]``.
        plan: a style for ``module`` itself, or styles by the path of a module inside; ``*`` stands for any one name.
            "auto": the plan of :func:`weft.tensor_parallel_plan`, which the first rank of ``mesh`` prints.
        src_data_rank: the rank of ``mesh`` whose values of the parameters all ranks take. None: each rank's own.
        example: for "auto", see :func:`weft.tensor_parallel_plan`.

    Raises:
        InvalidArgumentType, InvalidArgument: no plan is found for "auto", ``mesh`` has other than one dimension, an
            entry of ``plan`` names no module or no style, a module has two styles, a style does not fit its module,
            shared parameters would be sharded differently, or a parameter that a plan of sequence parallelism must name
            is not named.
    """
    derived = isinstance(plan, str) and plan == "auto"
    if derived:
        _check_targets(_CHECKS, module, mesh)
        found = tensor_parallel_plan(module, mesh.size(), example)
        if mesh.get_local_rank() == 0:
            print(f"tensor parallel plan of {type(module).__name__} on {mesh.size()} ranks:\n{found}")  # noqa: T201 - to be read and checked
        plan = found.styles
    styles = _matched(_CHECKS, module, mesh, plan)
    unnamed = _unnamed(module, styles)
    # A derived plan shards no activation outside of its groups, so what it does not name sees whole ones.
    if not derived and unnamed and any(_along_sequence(style) for _, style in styles):
        names = [f"{path}.{name}" if path else name for path, owner in unnamed for name in owner._parameters]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        allowed = f"a plan that names every parameter, since it shards activations along the sequence; {shown} missing"
        remedy = "Add SequenceParallel() for modules that see a part of the sequence, NoParallel() for the others"
        raise _CHECKS.invalid("plan", list(_as_dict(plan)), allowed, remedy)
    shared = _shared(module)
    _apply(styles, mesh, src_data_rank)
    for _, owner in unnamed:
        replicate_parameters(owner, mesh, src_data_rank)
    _share_again(shared)
    return module


@shortens_tracebacks
def parallelize_module(
    module: Module,
    device_mesh: DeviceMesh,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle],
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """``parallelize`` for one part of a plan: parameters that no entry names stay as they are, as with torch's function
    of this name. So a script may call it for the model and then for each of its layers.

    Raises:
        InvalidArgumentType, InvalidArgument: as :func:`parallelize`, but for parameters that are not named.
    """
    styles = _matched(ArgumentChecks("parallelize_module"), module, device_mesh, parallelize_plan)
    shared = _shared(module)
    _apply(styles, device_mesh, src_data_rank)
    _share_again(shared)
    return module


def _check_targets(checks: ArgumentChecks, module: Any, mesh: Any) -> None:
    checks.kind("module", module, nn.Module, "a torch.nn.Module", "Pass the model")
    remedy = 'Make one with torch.distributed.init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))'
    checks.kind("mesh", mesh, DeviceMesh, "a torch.distributed.DeviceMesh", remedy)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        pick = f'Pass one dimension of it, such as mesh["{names[-1]}"]' if names else "Name its dimensions and pass one"
        raise checks.invalid("mesh", mesh, "a mesh of one dimension", pick)


def _check(checks: ArgumentChecks, module: Any, mesh: Any, plan: Any) -> None:
    _check_targets(checks, module, mesh)
    remedy = 'Write {"path": style}, or "auto"'
    checks.kind("plan", plan, (ParallelStyle, dict), "a style, or styles by module path", remedy)
    for path, style in _as_dict(plan).items():
        checks.kind(f"plan[{path!r}]", style, ParallelStyle, "a style such as ColwiseParallel()", "Pass an instance")


def _as_dict(plan: ParallelStyle | dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    return plan if isinstance(plan, dict) else {"": plan}


def _matched(checks: ArgumentChecks, module: Any, mesh: Any, plan: Any) -> list[tuple[nn.Module, ParallelStyle]]:
    """The arguments are checked. Returns the modules that the entries name, in order, with their styles."""
    _check(checks, module, mesh, plan)
    paths = dict(module.named_modules(remove_duplicate=False))
    found: list[tuple[nn.Module, ParallelStyle]] = []
    given: dict[int, str] = {}
    for pattern, style in _as_dict(plan).items():
        matches = [path for path in paths if _fits(path, pattern)]
        if not matches:
            near = difflib.get_close_matches(pattern, paths, 3)
            remedy = f"Did you mean {', '.join(near)}?" if near else "Leave it out"
            raise checks.invalid("plan", pattern, f"paths of modules; {pattern!r} names none", remedy)
        for path in matches:
            if not isinstance(style, _PREPARE):
                _check_parameters(checks, paths[path], path, pattern, given)
            found.append((paths[path], style))
    return found


def _check_parameters(
    checks: ArgumentChecks, target: nn.Module, path: str, pattern: str, given: dict[int, str]
) -> None:
    """No other entry of the plan shards the module's parameters, and nobody did before."""
    if (other := given.setdefault(id(target), pattern)) != pattern:
        allowed = f"one style for the parameters of each module; {other!r} and {pattern!r} both name {path!r}"
        raise checks.invalid("plan", pattern, allowed, "Leave one of the two out")
    done = next((name for name, parameter in target.named_parameters() if isinstance(parameter, DTensor)), None)
    if done is not None:
        allowed = f"modules with plain parameters; {path}.{done} is a DTensor"
        raise checks.invalid("plan", pattern, allowed, "Shard each module once, and call fully_shard afterwards")


def _apply(styles: list[tuple[nn.Module, ParallelStyle]], mesh: DeviceMesh, src_data_rank: int | None) -> None:
    for target, style in styles:
        style.src_data_rank = src_data_rank
        style._apply(target, mesh)


def _fits(path: str, pattern: str) -> bool:
    names, tokens = path.split("."), pattern.split(".")
    return len(names) == len(tokens) and all(map(fnmatch, names, tokens))


def _unnamed(module: nn.Module, styles: list[tuple[nn.Module, ParallelStyle]]) -> list[tuple[str, nn.Module]]:
    """Modules with parameters of their own that no style is for, by path. Those that are DTensors already stay."""
    targets = [target for target, style in styles if not isinstance(style, _PREPARE)]
    named = {id(each) for target in targets for each in target.modules()}
    found = []
    for path, owner in module.named_modules():
        own = [parameter for parameter in owner._parameters.values() if parameter is not None]
        if own and id(owner) not in named and not any(isinstance(each, DTensor) for each in own):
            found.append((path, owner))
    return found


def _along_sequence(style: ParallelStyle) -> bool:
    """Whether a style shards activations along another dimension than the last."""
    layouts: list[Any] = []
    for value in vars(style).values():
        layouts += value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(layout, Placement) and isinstance(layout, Shard) and layout.dim != -1 for layout in layouts)


def _shared(module: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """The places of each parameter that stands at several: (path, module, name)."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((f"{path}.{name}", owner, name))
    return [found for found in places.values() if len(found) > 1]


def _share_again(shared: list[list[tuple[str, nn.Module, str]]]) -> None:
    for (first_path, owner, name), *others in shared:
        first: Any = owner._parameters[name]
        for path, other, other_name in others:
            one: Any = other._parameters[other_name]
            if isinstance(first, DTensor) is not isinstance(one, DTensor) or first.placements != one.placements:
                allowed = f"the same sharding of the weight that {first_path} and {path} share"
                remedy = "Use RowwiseParallel for an Embedding and ColwiseParallel for the Linear that has its weight"
                raise _CHECKS.invalid("plan", [str(p.placements) for p in (first, one)], allowed, remedy)
            other._parameters[other_name] = first
