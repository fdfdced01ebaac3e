"""Random steps that gather shards, compute with them, reduce what they made, and update the shards in place."""

from __future__ import annotations

import random
from typing import Any

import torch

from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node

SIZE = 4  # of the square matrices that everything whole is
GROUPS = ("dp", "other")


def nothing(value: torch.Tensor) -> None:
    """A call with an effect: it keeps its place among its like."""


class RandomStep:
    """``count`` random operations over shards of a group of ``world`` ranks.

    Attributes:
        step: the graph, over the groups of ``GROUPS``.
        shapes: of its inputs, in order.
    """

    def __init__(self, seed: int, world: int, groups: dict[str, str], count: int = 30) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.b = StepBuilder()
        self.batch = self.b.input(torch.ones(SIZE, SIZE), Role.BATCH)
        self.shards = [self.b.input(torch.ones(SIZE // world, SIZE)) for _ in range(4)]
        self.owners = list(self.shards)
        self.whole = [self.batch]
        self.reduced: list[Node] = []
        for _ in range(count):
            self.random.choice([self.gather, self.gather, self.gather, self.compute, self.compute, self.reduce,
                                self.reduce, self.sum, self.update, self.draw, self.call])()  # fmt: skip
        for owner, shard in zip(self.owners, self.shards, strict=True):
            self.b.update(owner, shard)
        self.b.returns(self.whole[-1], *self.reduced[-2:])
        self.step = self.b.build(groups)
        self.shapes = [tuple(node.meta["val"].shape) for node in self.step.placeholders]

    def waited(self, start: Node) -> Node:
        return self.b.call(c10d.wait_tensor.default, start, val=start.meta["val"])

    def group(self) -> str:
        return self.random.choice(GROUPS)

    def gather(self) -> None:
        shard: Any = self.random.choice(self.shards)
        if self.random.random() < 0.3:
            shard = self.b.call(aten._to_copy.default, shard, dtype=torch.float64)
        full = self.waited(self.b.call(c10d.all_gather_into_tensor.default, shard, self.world, self.group()))
        if full.meta["val"].dtype is torch.float64:
            full = self.b.call(aten._to_copy.default, full, dtype=torch.float32)
        if self.random.random() < 0.5:
            full = self.b.call(aten.t.default, self.b.call(aten.slice.Tensor, full, 0, 0, SIZE))
        self.whole.append(full)

    def compute(self) -> None:
        left, right = self.random.choice(self.whole), self.random.choice(self.whole)
        self.whole.append(self.b.call(aten.tanh.default, self.b.call(aten.mm.default, left, right)))

    def scaled(self, by: float) -> Node:
        """One of the whole values times a number, without gaps in memory, as collectives want it."""
        value = self.b.call(aten.mul.Tensor, self.random.choice(self.whole), by)
        return self.b.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def reduce(self) -> None:
        value = self.scaled(0.5)
        start = self.b.call(c10d.reduce_scatter_tensor.default, value, "sum", self.world, self.group())
        self.reduced.append(self.waited(start))

    def sum(self) -> None:
        value = self.scaled(0.25)
        if self.random.random() < 0.5:
            start = self.b.write(c10d.all_reduce_.default, value, "sum", self.group())
        else:
            start = self.b.call(c10d.all_reduce.default, value, "sum", self.group())
        self.whole.append(self.waited(start))

    def update(self) -> None:
        if self.reduced:
            at = self.random.randrange(len(self.shards))
            grad = self.random.choice(self.reduced)
            self.shards[at] = self.b.write(aten.add_.Tensor, self.shards[at], grad, alpha=-0.1)

    def draw(self) -> None:
        self.whole.append(self.b.call(aten.rand_like.default, self.random.choice(self.whole)))

    def call(self) -> None:
        self.b.effect(nothing, self.random.choice(self.whole))


def values(shapes: list[tuple[int, ...]], seed: int) -> list[torch.Tensor]:
    """Inputs for a step, small enough that products stay finite."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 0.5 for shape in shapes]


def outcome(program: Any, shapes: list[tuple[int, ...]], rank: int) -> list[torch.Tensor]:
    """What a program returns and leaves behind."""
    inputs = values(shapes, rank)
    torch.manual_seed(7)
    results = program(*inputs)
    return [result.clone() for result in (*results, *inputs)]


def the_steps(seeds: range, world: int, groups: dict[str, str]) -> list[tuple[StepGraph, list[tuple[int, ...]]]]:
    return [(made.step, made.shapes) for made in (RandomStep(seed, world, groups) for seed in seeds)]
