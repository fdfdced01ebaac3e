"""``plan="auto"``: which Linears of a model to shard for tensor parallelism, found from where their features go.

The scheme is that of Megatron-LM (M. Shoeybi et al., arXiv:1909.08053): Linears that read a whole activation are
sharded by their output features, and the one that reads all of theirs by its input features, followed by one
all-reduce. A plan takes such a group where runs of the model (:mod:`weft.distributed.dtensor.feature_flow`) show that

- the outputs of the first Linears go to the last one and nowhere else,
- each block of its input depends on the same block of their outputs alone, so that heads stay whole,
- the code between computes a rank's part from a rank's part, so no number of heads or features is written into it,
- no parameter is used between them but those of norms that see one head at a time, whose gradients are then summed.

The Embedding of tokens is sharded by rows, and the Linear that makes logits by its output features, which are gathered.
All other parameters are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.distributed.dtensor.feature_flow import FeatureFlow, Marks, example_for
from weft.distributed.dtensor.projections import features_of
from weft.distributed.dtensor.styles import ColwiseParallel, RowwiseParallel, SequenceParallel
from weft.short_tracebacks import shortens_tracebacks

# An Embedding of fewer rows, or a Linear of fewer outputs, is no vocabulary: to shard it saves little. A choice.
_FEWEST_IN_A_VOCABULARY = 4096

_CHECKS = ArgumentChecks("parallelize")


@dataclass(frozen=True)
class _Group:
    """Linears to shard by output features, the one that reads them, and norms of heads between them: path patterns."""

    sources: tuple[str, ...]
    sink: str
    norms: tuple[tuple[str, int], ...] = ()  # with the sharded dimension of their input


@dataclass
class AutoPlan:
    """A plan for :func:`weft.parallelize`, and what it leaves alone.

    Attributes:
        styles: by path pattern, ``*`` for the numbers of layers.
        left_alone: by path pattern of a Linear or Embedding, why it is replicated.
    """

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line for each pattern."""
        width = max(map(len, [*self.styles, *self.left_alone]), default=0)
        lines = [f"{pattern:{width}}  {_described(style)}" for pattern, style in self.styles.items()]
        lines += [f"{pattern:{width}}  replicated: {why}" for pattern, why in self.left_alone.items()]
        return "\n".join(lines)


@shortens_tracebacks
def tensor_parallel_plan(
    module: nn.Module, ranks: int, example: tuple[object, ...] | Mapping[str, object] | None = None
) -> AutoPlan:
    """The plan that ``weft.parallelize(module, mesh, "auto")`` uses on a mesh of ``ranks`` ranks.

    The model runs on a tiny CPU input, a few times for each kind of Linear; its parameters are neither read nor changed
    and may be on the meta device. Linears are taken by pattern: all layers alike.

    Args:
        module: the model, not sharded yet.
        ranks: of the mesh dimension, at least 1.
        example: positional arguments, or keyword arguments, of the model's forward, small ones. Default: tokens or an
            image, by the model's configuration.

    Raises:
        InvalidArgument: no example is known, the model does not run on it, no group of Linears can be sharded, or
            `ranks` is less than 1.
        InvalidArgumentType: `module` is no module, or `ranks` no int.
    """
    checks = ArgumentChecks("weft.tensor_parallel_plan")
    checks.kind("module", module, nn.Module, "a torch.nn.Module", "Pass the model, not sharded yet")
    checks.number("ranks", ranks, least=1, whole=True, remedy="Pass the size of the mesh dimension to shard over")
    with torch_adapter.only_mode():  # in a fake world too, the example has values
        example = example_for(module) if example is None else example
        if example is None:
            raise _not_found(module, "what its forward takes is not known")
        return _PlanSearch(module, ranks, example).plan()


def _not_found(model: nn.Module, why: str) -> Exception:
    allowed = f"a plan by hand for {type(model).__name__}: {why}"
    remedy = "Pass example=(...), small arguments of the model's forward, or write the plan by hand"
    return _CHECKS.invalid("plan", "auto", allowed, remedy)


class _PlanSearch:
    """Looks for the groups of one model."""

    def __init__(self, model: nn.Module, ranks: int, example: tuple[object, ...] | Mapping[str, object]) -> None:
        self.model, self.ranks = model, ranks
        try:
            self.flow = FeatureFlow(model, example)
        except Exception as error:
            raise _not_found(model, f"it cannot be copied ({type(error).__name__}: {error})") from error
        self.members: dict[str, list[str]] = {}
        for path in self.flow.projections:
            self.members.setdefault(_pattern(path), []).append(path)
        self.called: frozenset[str] = frozenset()
        self.found = AutoPlan()

    def plan(self) -> AutoPlan:
        """What is found."""
        try:
            unmarked = self.flow.run({})
        except Exception as error:
            why = f"it does not run on a small input on the CPU ({type(error).__name__}: {error})"
            raise _not_found(self.model, why) from error
        self.called = frozenset(unmarked.inputs)
        reached = {pattern: self._reached(pattern) for pattern in self.members}
        for pattern, paths in self.members.items():
            if not isinstance(self._first(pattern), nn.Embedding) and not any(
                path in unmarked.inputs for path in paths
            ):
                self._leave(pattern, "the model did not call it on the example")
        for group in self._groups(reached):
            self._add(group)
        self._vocabulary(reached)
        for pattern in self.members:
            if pattern not in self.found.styles:
                self._leave(pattern, _where_it_goes(*reached[pattern]))
        if not any(isinstance(style, RowwiseParallel) for style in self.found.styles.values()):
            raise _not_found(self.model, f"no group of Linears fits\n{self.found}\n")
        return self.found

    # ---- groups

    def _reached(self, pattern: str) -> tuple[frozenset[str], bool]:
        """The patterns of Linears that read the outputs of these, and whether the model returns them."""
        marks = self.flow.run(self._all_of(pattern))
        return frozenset(_pattern(path) for path, seen in marks.inputs.items() if bool(seen.any())), marks.result

    def _groups(self, reached: dict[str, tuple[frozenset[str], bool]]) -> Iterator[_Group]:
        """The groups that can be sharded; why others cannot is noted."""
        for sink in self.members:
            readers = [pattern for pattern, (readers, _) in reached.items() if sink in readers and pattern != sink]
            sources = [each for each in readers if reached[each] == (frozenset([sink]), False)]
            if not sources:
                continue
            group = _Group(tuple(sources), sink)
            why = self._obstacle(group, set(readers) - set(sources))
            if why is None:
                norms = self._between(group)
                why = norms if isinstance(norms, str) else None
                if not isinstance(norms, str):
                    yield _Group(group.sources, sink, norms)
            if why is not None:
                for pattern in (*group.sources, sink):
                    self._leave(pattern, why)

    def _obstacle(self, group: _Group, others: set[str]) -> str | None:
        """Why a group cannot be sharded by its structure."""
        if missing := [path for path in self._paths((*group.sources, group.sink)) if path not in self.called]:
            return f"the model did not call {missing[0]} on the example"
        if others:
            return f"{group.sink} reads {', '.join(sorted(others))} too, which others read"
        for pattern in (*group.sources, group.sink):
            if isinstance(self._first(pattern), nn.Embedding):
                return f"{group.sink} reads the Embedding {pattern}"
            sizes = {features_of(self.flow.projections[path]) for path in self.members[pattern]}
            at = 0 if pattern == group.sink else 1
            if bad := next((size[at] for size in sizes if size[at] % self.ranks), None):
                return f"{bad} features of {pattern} do not divide by {self.ranks} ranks"
        return None

    def _between(self, group: _Group) -> tuple[tuple[str, int], ...] | str:
        """The norms between the sources and the sink, with the dimension that is sharded there; or why the group cannot
        be sharded by what is between them."""
        dimensions: dict[str, set[int]] = {}
        for rank in range(self.ranks):
            marks = self.flow.run(
                {
                    path: _block(features_of(self.flow.projections[path])[1], self.ranks, rank)
                    for path in self._paths(group.sources)
                }
            )
            for path, seen in marks.others.items():
                found = _sharded_dimension(seen, self.ranks, rank)
                if found is None or not _normalizes_behind(self.model.get_submodule(path), seen.shape, found):
                    return f"{_pattern(path)} between them needs all features"
                dimensions.setdefault(_pattern(path), set()).add(found)
            for path in self.members[group.sink]:
                seen = marks.inputs.get(path)
                if seen is not None and bool(seen[_outside(seen.shape[0], self.ranks, rank)].any()):
                    return f"the input of {group.sink} is not cut as the outputs of {', '.join(group.sources)} are"
        if bad := next((path for path, found in dimensions.items() if len(found) > 1), None):
            return f"{bad} between them has no one dimension that is sharded"
        return self._on_a_part(group) or tuple((path, found.pop()) for path, found in dimensions.items())

    def _on_a_part(self, group: _Group) -> str | None:
        """Why the code between does not compute one rank's part from one rank's part of the features; None where it
        does."""
        sinks, sources = self.members[group.sink], self._paths(group.sources)
        whole = self.flow.run({}, kept=sinks).arrived
        marked: Marks = self.flow.run(self._all_of(*group.sources))
        if names := next((marked.parameters[path] for path in sinks if marked.parameters[path]), None):
            return f"the parameter {names[0]} is used between them, whose gradient on a rank would be partial"
        for rank in range(self.ranks):
            parts = {path: _block(features_of(self.flow.projections[path])[1], self.ranks, rank) for path in sources}
            try:
                part: Marks = self.flow.run({}, parts, sinks)
            except Exception as error:  # noqa: BLE001 - whatever the model raises, the group cannot be sharded
                return f"the code between does not run on a part of the features ({type(error).__name__}: {error})"
            for path in sinks:
                for one, all_features in zip(part.arrived[path], whole[path], strict=True):
                    expected = all_features[..., _block(all_features.shape[-1], self.ranks, rank)]
                    if one.shape != expected.shape:
                        return "the code between gives other sizes on a part of the features"
                    if not torch.allclose(one, expected, rtol=1e-4, atol=1e-5):
                        return "the code between gives other numbers on a part of the features"
        return None

    def _add(self, group: _Group) -> None:
        self.found.styles |= {pattern: ColwiseParallel() for pattern in group.sources}
        for pattern, dimension in group.norms:
            self.found.styles[pattern] = SequenceParallel(sequence_dim=dimension, use_local_output=True)
        self.found.styles[group.sink] = RowwiseParallel()

    # ---- vocabularies

    def _vocabulary(self, reached: dict[str, tuple[frozenset[str], bool]]) -> None:
        """Shard the Embedding of tokens and the Linear of logits. Where they share a weight, both or none."""
        styles: dict[str, ParallelStyle] = {}
        for pattern in self.members:
            first = self._first(pattern)
            if isinstance(first, nn.Embedding):
                if first.num_embeddings >= _FEWEST_IN_A_VOCABULARY and first.max_norm is None:
                    styles[pattern] = RowwiseParallel(input_layouts=Replicate())
            elif reached[pattern] == (frozenset(), True) and features_of(first)[1] >= _FEWEST_IN_A_VOCABULARY:
                styles[pattern] = ColwiseParallel(output_layouts=Replicate())
        sharded = {path for pattern in styles for path in self.members[pattern]}
        for pattern in [*styles]:
            others = [path for path in self.members[pattern] if self._shared_with(path) - sharded]
            if others:
                why = f"its parameters are also those of {', '.join(sorted(self._shared_with(others[0]) - sharded))}"
                for each in [*styles]:
                    del styles[each]
                    self._leave(each, why)
                break
        self.found.styles |= styles

    def _shared_with(self, path: str) -> set[str]:
        """Modules that have a parameter in common with the one at ``path``, by path, this one left out."""
        own = {id(each) for each in self.flow.projections[path].parameters(recurse=False)}
        modules = self.model.named_modules(remove_duplicate=False)
        return {other for other, each in modules if own & {id(p) for p in each.parameters(recurse=False)}} - {path}

    # ---- patterns

    def _first(self, pattern: str) -> nn.Module:
        return self.flow.projections[self.members[pattern][0]]

    def _paths(self, patterns: Sequence[str]) -> list[str]:
        return [path for pattern in patterns for path in self.members[pattern]]

    def _all_of(self, *patterns: str) -> dict[str, slice]:
        return dict.fromkeys(self._paths(patterns), slice(None))

    def _leave(self, pattern: str, why: str) -> None:
        self.found.left_alone.setdefault(pattern, why)


def _where_it_goes(readers: frozenset[str], returned: bool) -> str:
    """Why Linears whose outputs go there are no part of a group."""
    if len(readers) > 1:
        return f"its outputs go to {', '.join(sorted(readers)[:3])}{', ...' if len(readers) > 3 else ''}"
    return "the model returns its outputs" if returned else "its outputs go to no Linear, or to itself"


def _pattern(path: str) -> str:
    """The path with ``*`` for numbers, which stand for layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _block(size: int, ranks: int, rank: int) -> slice:
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def _outside(size: int, ranks: int, rank: int) -> torch.Tensor:
    """The places outside of a rank's block."""
    chosen = torch.ones(size, dtype=torch.bool)
    chosen[_block(size, ranks, rank)] = False
    return chosen


def _sharded_dimension(seen: torch.Tensor, ranks: int, rank: int) -> int | None:
    """The dimension along which the marks are exactly this rank's block; None where there is none."""
    for dimension, size in enumerate(seen.shape):
        along = seen.movedim(dimension, 0).flatten(1)
        expected = ~_outside(size, ranks, rank)
        if size % ranks == 0 and bool((along.any(1) == expected).all()) and bool(along[expected].all()):
            return dimension
    return None


def _normalizes_behind(module: nn.Module, shape: torch.Size, dimension: int) -> bool:
    """Whether a module is a norm over dimensions behind ``dimension`` of its input alone: by its name, and because its
    parameters have the shape of those."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    behind = all(len(each) < len(shape) - dimension and shape[len(shape) - len(each) :] == each for each in shapes)
    return behind and "norm" in type(module).__name__.lower()


def _described(style: ParallelStyle) -> str:
    if isinstance(style, SequenceParallel):
        return f"{type(style).__name__}(sequence_dim={style.sequence_sharding[0].dim})"  # type: ignore[union-attr]
    if isinstance(style, ColwiseParallel) and style.output_layouts == (Replicate(),):
        return "ColwiseParallel(output_layouts=Replicate())"
    if isinstance(style, RowwiseParallel) and style.input_layouts == (Replicate(),):
        return "RowwiseParallel(input_layouts=Replicate())"
    return f"{type(style).__name__}()"
