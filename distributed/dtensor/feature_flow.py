"""Which features of a module's output reach which features of another module's input, found by running the model.

Tensor parallelism may shard the output features of some Linears, and the input features of the one that reads them,
if each block of its input depends on the same block of their outputs alone. What lies between (splitting into heads,
rotary embeddings, attention, activations, norms of single heads) is ordinary Python that no rule could cover. So the
model runs on a tiny input whose features carry a mark, and the marks are read where they arrive. The mark is NaN, which
every floating-point operation passes on.

*Projections* (Linear, Embedding, and transformers' Conv1D) do not compute: they return numbers of their own, the same
in each run, with no mark unless they are the source of one. So marks go from one projection to the next, layers are
independent of each other, and one run examines all of them. No weight is read: parameters are expanded scalars, and the
model may be on the meta device.

Some operations lose marks (comparisons, ``nan_to_num``). So what a rank would compute is computed as well: projections
return one part of their numbers, and what arrives must be that part of what arrives in a whole run.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft import torch_adapter
from weft.distributed.dtensor.projections import features_of, is_projection

LENGTH = 8
"""Tokens of the input that the model runs on."""

_COPIED = 1 << 20  # elements of a stand-in that is a tensor of its own. A choice.


@dataclass(eq=False)
class Marks:
    """Where the marks of one run arrived.

    Attributes:
        inputs: by the path of a Linear, which features of its inputs had a mark, a bool tensor [input features].
        others: by the path of another module that has parameters and no children, which elements of its input had one;
            only where some had.
        result: whether the model's own result had a mark.
        arrived: by the path of a Linear, its inputs, one a call, where they were asked for.
        parameters: by the path of a Linear, the parameters that its input was computed from, but for those of
            projections and of the modules in ``others``.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
    result: bool = False
    arrived: dict[str, list[Tensor]] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)


class FeatureFlow:
    """Runs a model to find where output features of its projections arrive.

    Args:
        model: stays as it is: a copy that shares its parameters and buffers runs, which are not read. Its hooks run.
        example: positional arguments, or keyword arguments, of its forward. Values do not matter but for indices.
    """

    def __init__(self, model: nn.Module, example: tuple[object, ...] | Mapping[str, object]) -> None:
        # What forward keeps in attributes, such as a table that it computes once, would be kept from stand-ins.
        tensors = [*model.parameters(), *model.buffers()]
        self._model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
        self._args, self._kwargs = torch_adapter.tree_map(_on_cpu, (tuple(args), dict(kwargs)))
        # Cached keys and values would be results of the model, and marks on them would say that the model returns them.
        if "use_cache" in inspect.signature(model.forward).parameters:
            self._kwargs.setdefault("use_cache", False)
        self.projections = {path: each for path, each in self._model.named_modules() if is_projection(each)}

    def run(
        self,
        marked: Mapping[str, slice],
        parts: Mapping[str, slice] | None = None,
        kept: Collection[str] = (),
    ) -> Marks:
        """The marks of a run in which each projection in ``marked`` marks those of its output features.

        Args:
            parts: projections that return only these of their output features, as on one rank.
            kept: Linears whose inputs are in ``arrived``.

        Raises:
            Exception: what the model raises on this input.
        """
        marks, names, values = Marks(), *self._stand_ins()
        with contextlib.ExitStack() as stack:
            for path, module in self._model.named_modules():
                if path in self.projections:
                    forward = _projection(path, module, marked, parts or {}, marks, names, path in kept)
                    stack.enter_context(_with_forward(module, forward))
                elif not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False)):
                    stack.callback(module.register_forward_hook(_observer(path, marks)).remove)
            stack.enter_context(_evaluating(self._model))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the fused kernel of CPUs loses NaN in queries and keys
            result = torch.func.functional_call(self._model, values, self._args, self._kwargs, tie_weights=False)
        leaves: list[Any] = []
        torch_adapter.tree_map(leaves.append, result)
        marks.result = any(bool(_marks_of(leaf).any()) for leaf in leaves if isinstance(leaf, Tensor))
        return marks

    def _stand_ins(self) -> tuple[dict[int, str], dict[str, Tensor]]:
        """Names of leaves, and by name an expanded one for each parameter and buffer: they take no memory."""
        names: dict[int, str] = {}
        values: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            leaf = torch.ones((), requires_grad=parameter.is_floating_point())
            names[id(leaf)] = name
            value = leaf.expand(parameter.shape)
            # Products of batches take no expanded tensor. Weights of projections are not read.
            values[name] = value.contiguous() if parameter.numel() <= _COPIED else value
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            values[name] = torch.ones((), dtype=dtype).expand(buffer.shape)
        return names, values


def _on_cpu(x: Any) -> Any:
    """A stand-in for a tensor of the arguments; indices are kept where they have values."""
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        return torch.ones(x.shape)
    has_values = not x.is_meta and not isinstance(x, FakeTensor)
    return x.detach().cpu() if has_values else torch.ones(x.shape, dtype=x.dtype)


def _projection(
    path: str,
    module: nn.Module,
    marked: Mapping[str, slice],
    parts: Mapping[str, slice],
    marks: Marks,
    names: dict[int, str],
    is_kept: bool,
) -> Callable[..., Tensor]:
    """The forward of a projection that only notes marks and makes its own."""
    numbers = torch.Generator().manual_seed(zlib.crc32(path.encode()))

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        looks_up = isinstance(module, nn.Embedding)
        if not looks_up:
            seen = _marks_of(x).flatten(0, -2).any(0) if x.dim() > 1 else _marks_of(x)
            known = marks.inputs.get(path)
            marks.inputs[path] = seen if known is None else known | seen
            marks.parameters.setdefault(path, []).extend(_leaves_of(x, names))
            if is_kept:
                marks.arrived.setdefault(path, []).append(x.detach())
        y = torch.randn(*(x.shape if looks_up else x.shape[:-1]), features_of(module)[1], generator=numbers)
        if path in marked:
            y[..., marked[path]] = torch.nan
        return y[..., parts[path]].contiguous() if path in parts else y

    return forward


def _observer(path: str, marks: Marks) -> Callable[..., Any]:
    """A forward hook that notes the marks that a module gets. Its parameters are accounted for by ``others``."""

    def observe(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
        seen = [_marks_of(each) for each in tensors]
        if seen and bool(seen[0].any()):
            known = marks.others.get(path)
            same = known is not None and known.shape == seen[0].shape
            marks.others[path] = known | seen[0] if same else seen[0]  # type: ignore[operator]
            return result.detach() if isinstance(result, Tensor) else result
        return None

    return observe


def _marks_of(x: Tensor) -> Tensor:
    return x.detach().isnan() if x.is_floating_point() else torch.zeros(x.shape, dtype=torch.bool)


def _leaves_of(x: Tensor, names: Mapping[int, str]) -> list[str]:
    """The parameters that ``x`` was computed from."""
    found, seen, stack = [], set(), [x.grad_fn]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is not None:
            found.append(names[id(leaf)])
        stack += [following for following, _ in function.next_functions]
    return found


@contextlib.contextmanager
def _with_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Another forward for the duration of the context, on this instance."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: no randomness, and no statistics of a batch."""
    flags = {module: module.training for module in model.modules()}
    try:
        for module in flags:
            module.training = False
        yield
    finally:
        for module, training in flags.items():
            module.training = training


# ---- an input to run on


def example_for(model: nn.Module) -> tuple[Any, ...] | dict[str, Any] | None:
    """A small input for ``model``: by its configuration for models of transformers, tokens for a model that begins with
    an Embedding and takes one argument; None where neither is known."""
    tokens = torch.ones(1, LENGTH, dtype=torch.long)
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        if model.main_input_name == "pixel_values":
            size = getattr(config, "image_size", None)
            height, width = size if isinstance(size, (tuple, list)) else (size, size)
            return {"pixel_values": torch.ones(1, config.num_channels, height, width)} if height and width else None
        asks_decoder = getattr(config, "is_encoder_decoder", False)
        return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if asks_decoder else {})
    needed = [
        each
        for each in inspect.signature(model.forward).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) == 1 and any(isinstance(module, nn.Embedding) for module in model.modules()):
        return (tokens,)
    return None
