# ruff: noqa: T201 - this page prints what it makes
# pyrefly: ignore-errors
"""weft from scratch: a distributed-training compiler in about 400 lines of code, to be read from top to bottom.

    python docs/from_scratch.py            # about 20 s on one CPU core; --full prints long artefacts whole

The real weft is large because it accepts any step, any model and any cluster. The idea is small, and this file shows
it on one model and two ranks. It imports torch, triton and the standard library, and nothing of weft:

    1  the user's step          a sharded MLP, its loss, backward with hooks, SGD
    2  step graph               one graph of values: what the step mutates becomes an output
    3  collectives, verifier    one table says what every collective is
    4  buckets                  few large collectives instead of many small ones
    5  schedule                 an order that starts them early, by a cost model
    6  fused kernel             pointwise operations become one Triton kernel
    7  Program                  the scheduled graph as Python text
    8  two processes            the same parameters as the eager step, bit for bit

Every section ends with "In weft": the folders of the repository that do the same job without the shortcuts.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
wait_tensor = c10d.wait_tensor.default
RANKS, LAYERS, WIDTH, BATCH, STEPS = 2, 8, 128, 256, 3

# ---- 1. The user's program ------------------------------------------------------------------------------------------
# A toy FSDP. Every parameter is stored as one shard per rank, cut along dimension 0. It is all-gathered before use, and
# its gradient is reduce-scattered: each rank gets the sum for its own shard. Both are functional collectives. The
# operation starts the communication and returns a new tensor; `wait_tensor` marks the first point where its contents
# may be read. Eagerly the wait follows at once. Section 5 moves the two apart.
#
# A collective takes the name of its group. Capture sees the name of the mesh dimension, "data", because a compiled
# step must be the same text on every rank. To run, each process maps it to its own group.
#
# In weft: distributed/fsdp/ (uneven shards, mixed precision, resharding after forward), distributed/ddp/.

GROUPS = {"data": "data"}


class Gather(torch.autograd.Function):
    """This rank's shard to the whole parameter; in backward, the whole gradient to this rank's shard of the sum."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return wait_tensor(c10d.all_gather_into_tensor.default(shard, RANKS, GROUPS["data"]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return wait_tensor(c10d.reduce_scatter_tensor.default(grad.contiguous(), "sum", RANKS, GROUPS["data"]))


class ShardedLinear(nn.Module):
    """nn.Linear whose parameters are shards: weight (WIDTH / RANKS, WIDTH), bias (WIDTH / RANKS,)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, whole in nn.Linear(WIDTH, WIDTH).named_parameters():  # the same random numbers on every rank
            self.register_parameter(name, nn.Parameter(whole.detach().chunk(RANKS)[rank].clone()))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Gather.apply(self.weight), Gather.apply(self.bias))


def average(param: Tensor) -> None:
    """The hook on every parameter: when its gradient is complete, the sum over ranks becomes the mean, in place."""
    param.grad.mul_(1 / RANKS)


class Training:
    """A model and its optimizer; `state` holds by name every tensor that a step changes."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[m for _ in range(LAYERS) for m in (ShardedLinear(rank), nn.GELU())])
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False
        )
        self.state: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            param.register_post_accumulate_grad_hook(average)
            # Optimizer state has to exist before capture: a tensor created inside the trace is a fake one.
            momentum = self.optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
            name = name.replace(".", "_")
            self.state |= {f"param_{name}": param, f"momentum_{name}": momentum}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """An ordinary training step: inputs and targets (BATCH, WIDTH) to a scalar loss."""
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The rank's own inputs and targets of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


# ---- 2. Capture: from a Python step to a graph of values ------------------------------------------------------------
# `make_fx` runs the step once on fake tensors, which have a shape and a dtype but no memory. Every ATen operation that
# runs is recorded, whether the model, autograd, a hook or the optimizer called it. No process group is needed,
# because a fake collective only computes a shape. The real parameters do not change.
#
# A parameter is a constant of the trace (`get_attr`). It becomes an input, which is found by the tensor's identity.
#
# The trace mutates: the hook recorded `mul_(grad, 0.5)`, the optimizer `add_(param, ..., alpha=-lr)`. A compiler wants
# values: a value never changes, so its readers can move freely. `functionalize` walks the trace in order and keeps,
# for every tensor of the trace, its value at this point:
#
#     mul_(grad, 0.5)     becomes   grad2 = mul(grad, 0.5); reads of grad from here on read grad2
#     add_(param, ...)    becomes   param2 = add(param, ...); the graph's output says "new param: param2"
#
# `p.grad` is a Python attribute and does not occur in the graph. Only the value that was stored in it does.
#
# Views are the difficulty. After `mul_(view, 0.5)` the base has changed too, and its recorded value is out of date.
# The toy refuses to read it. weft writes the changed view back into its base.
#
# In weft: capture/record/ (tracer, functional forms, a count of hooks so that none is lost), capture/state/ (inputs
# and effects), capture/guards/ (what must still hold on the next call). There, lr is an input; here, a constant.


def is_view(op: Any) -> bool:
    """Whether the result shares the first operand's memory; the schema of the operation says `Tensor(a)`."""
    return (alias := op._schema.returns[0].alias_info) is not None and not alias.is_write


def writes(op: Any) -> bool:
    """Whether the operation changes its first operand in place; the schema says `Tensor(a!)`."""
    return (alias := op._schema.arguments[0].alias_info) is not None and alias.is_write


def capture(training: Training, rank: int) -> fx.Graph:
    """Record one step. Inputs: the state by name, then the batch. Output: (loss, {name of an input: new value})."""
    step = lambda x, y: training.step(x, y)
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*batch(rank, 0))
    functionalize(traced.graph, lift(traced, training.state))
    name_collectives(traced.graph)
    return verify(traced.graph)


def lift(traced: fx.GraphModule, state: dict[str, Tensor]) -> dict[str, fx.Node]:
    """Make the trace's constants inputs of its graph; remove the profiler's marks."""
    graph, names = traced.graph, {id(tensor): name for name, tensor in state.items()}
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        inputs = {name: graph.placeholder(name) for name in state}
    for name, node in inputs.items():
        node.meta["val"] = first.meta["val"].fake_mode.from_tensor(state[name].detach())
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr":
            node.replace_all_uses_with(inputs[names[id(getattr(traced, node.target))]])
        if node.op == "get_attr" or (node.op == "call_function" and node.target.namespace == "profiler"):
            graph.erase_node(node)
    return inputs


def functionalize(graph: fx.Graph, inputs: dict[str, fx.Node]) -> None:
    """Replace mutations by values, as the text above says."""
    current: dict[fx.Node, fx.Node] = {}  # a tensor of the trace that was written -> its value at this point
    memory = {node: node for node in graph.nodes}  # value -> the value that owns its memory
    stale: set[fx.Node] = set()  # values whose memory was written since

    def read(node: fx.Node) -> fx.Node:
        if (value := current.get(node, node)) in stale:
            raise NotImplementedError(f"{node} was changed through another view of its memory")
        return value

    for node in operations(graph):
        operands, op = node.args, node.target
        node.args, node.kwargs = fx.map_arg(node.args, read), fx.map_arg(node.kwargs, read)
        if is_view(op):
            memory[node] = memory[node.args[0]]
        if writes(op):  # aten.mul_.Tensor -> aten.mul.Tensor
            node.target = getattr(getattr(aten, op.overloadpacket.__name__.removesuffix("_")), op._overloadname)
            stale |= {value for value, owner in memory.items() if owner is memory[node.args[0]]}
            current[operands[0]] = node
            node._rename(operands[0].name)  # the next version of a parameter: param_0_weight_1
        elif op._schema.is_mutable:
            raise NotImplementedError(f"{op} writes to an operand other than the first")
    loss = fx.map_arg(graph.output_node().args[0], read)
    updates = {name: read(node) for name, node in inputs.items() if read(node) is not node}
    graph.output_node().args = ((loss, updates),)


def operations(graph: fx.Graph) -> list[fx.Node]:
    """All nodes but inputs and output, in order."""
    return [node for node in graph.nodes if node.op == "call_function"]


# ---- 3. One table of collectives, and a verifier --------------------------------------------------------------------
# Bucketing, cost model and code generation need to know which operand is the payload and how many bytes move. If each
# recognised collectives by name, a new collective would be a change in each. So one table answers for all of them, and
# no code after it names a collective operation.
#
# A payload is a matrix: an all-gather turns 1 row into RANKS rows, a reduce-scatter RANKS rows into 1. In both cases
# payloads can be concatenated along the columns, so one function merges either kind.
#
# The identity of a collective is more than its shape. If one rank swaps two reduce-scatters of equal shape, no error is
# raised and the sums are wrong. So collectives carry the names of their parameters, and ranks compare them.
#
# The verifier recomputes every node's fake value from its operands. A pass that swaps operands or leaves an old shape
# behind is found at that pass, and not as a wrong number after training.
#
# In weft: inductor/graph/ (collectives.py, the registry; schema of node metadata; verifier; liveness).


def gather_into(shard: Tensor, ranks: int, group: str) -> Tensor:
    """All-gather by its `out=` form. The other form can write to freed memory when gloo has two in flight."""
    out = shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))
    c10d.all_gather_into_tensor_out.default(shard, ranks, group, out=out)
    return out


@dataclass(frozen=True)
class Collective:
    """One row of the table. `payload`, `ranks` and `group` are positions of operands."""

    kind: str
    payload: int
    ranks: int
    group: int
    rows: Callable[[int], tuple[int, int]]  # of payload and result, by the number of ranks
    run: Callable[..., Tensor]


all_gather, reduce_scatter = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
COLLECTIVES = {
    all_gather: Collective("all_gather", 0, 1, 2, lambda ranks: (1, ranks), gather_into),
    reduce_scatter: Collective("reduce_scatter", 0, 2, 3, lambda ranks: (ranks, 1), reduce_scatter),
}


def collectives(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that start communication, in order."""
    return [node for node in operations(graph) if node.target in COLLECTIVES]


def payload(node: fx.Node) -> fx.Node:
    """What the collective sends."""
    return node.args[COLLECTIVES[node.target].payload]


def size_bytes(*nodes: fx.Node) -> int:
    """Bytes of the nodes' values."""
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def name_collectives(graph: fx.Graph) -> None:
    """Name a collective after the parameter that it sends or, for a gradient, that its result first updates."""
    updates = graph.output_node().args[0][1]
    names = {node: node.name for node in graph.nodes if node.op == "placeholder"} | {v: n for n, v in updates.items()}
    for node in collectives(graph):
        reached = [payload(node)]
        while reached[0] not in names:
            reached += reached.pop(0).users
        node.meta["params"] = (names[reached[0]].partition("_")[2],)
        node._rename(f"{COLLECTIVES[node.target].kind}_{node.meta['params'][0]}")


def fake_result(node: fx.Node) -> Tensor:
    """What the operation returns for its operands' fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return node.target(*args, **kwargs)


def verify(graph: fx.Graph) -> fx.Graph:
    """Raise if the order is not topological, a recorded value is wrong, or a collective is read without its wait."""
    graph.lint()
    for node in operations(graph):
        recorded, found = [(v.shape, v.stride(), v.dtype) for v in (node.meta["val"], fake_result(node))]
        if recorded != found:
            raise AssertionError(f"{node}: recorded as {recorded}, its operands give {found}")
        if node.target in COLLECTIVES and [user.target for user in node.users] != [wait_tensor]:
            raise AssertionError(f"{node}: a collective has one wait and no other reader, this has {list(node.users)}")
    return graph


# ---- 4. Buckets -----------------------------------------------------------------------------------------------------
# A collective costs a fixed time plus a time per byte. Adjacent collectives of one kind, group and dtype are merged to
# pay the fixed time once: their payloads are concatenated and their result is cut. Bits do not change: an all-gather
# copies, and a reduce-scatter adds the same numbers as before.
#
# Larger is not always better. A bucket of gradients starts when its last gradient is complete, and the first layer
# waits for the whole first bucket of parameters. Section 5 predicts the step for several limits and takes the best.
#
# In weft: inductor/schedule/ (buckets, order, transport and peak memory are decided together).


def bucket(graph: fx.Graph, limit: int) -> fx.Graph:
    """A copy where adjacent payloads of together at most `limit` bytes share a collective. Its order is not valid yet:
    the first members' readers come before the merged collective. `list_schedule` finds an order."""
    graph = copy.deepcopy(graph)
    buckets: dict[Any, list[list[fx.Node]]] = {}
    for node in collectives(graph):
        kind = (node.target, node.args[COLLECTIVES[node.target].group], payload(node).meta["val"].dtype)
        last = buckets.setdefault(kind, [[]])[-1]
        if last and size_bytes(*map(payload, [*last, node])) > limit:
            buckets[kind].append([node])
        else:
            last.append(node)
    for members in [members for kind in buckets.values() for members in kind]:
        if len(members) > 1:
            merge(graph, members)
    return graph


def merge(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Replace collectives by one over their concatenated payloads."""

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(op, args, kwargs)
        node.meta["val"] = fake_result(node)  # metadata of a new node is never copied from an old one
        return node

    row, args = COLLECTIVES[members[0].target], list(members[0].args)
    rows_in, rows_out = row.rows(args[row.ranks])
    with graph.inserting_before(members[-1]):
        flat = [call(aten.view.default, payload(member), [rows_in, -1]) for member in members]
        args[row.payload] = call(aten.view.default, call(aten.cat.default, flat, 1), [-1])
        merged = call(members[0].target, *args)
        merged.meta["params"] = sum((member.meta["params"] for member in members), ())
        merged._rename(f"{row.kind}_bucket")
        result = call(aten.view.default, call(wait_tensor, merged), [rows_out, -1])
        stop = 0
        for member in members:
            wait = next(iter(member.users))
            start, stop = stop, stop + wait.meta["val"].numel() // rows_out
            piece = call(aten.slice.Tensor, result, 1, start, stop)
            piece = call(aten.clone.default, piece, memory_format=torch.contiguous_format)
            wait.replace_all_uses_with(call(aten.view.default, piece, list(wait.meta["val"].shape)))
            graph.erase_node(wait)
            graph.erase_node(member)


# ---- 5. Cost model, timeline, list schedule -------------------------------------------------------------------------
# A collective takes latency + bytes / bandwidth (the alpha-beta model). Computation takes the larger of
# operations / peak and bytes / memory bandwidth (the roofline). Views take nothing.
#
# A rank has two resources that work at the same time: its processor and the network. Starting a collective takes no
# processor time. A wait does, until the result is there: this time is the *exposed* communication.
#
# A list schedule (Graham 1966) walks through simulated time. Of the operations whose operands exist it takes
#   1. a collective, if there is one: the earlier it starts, the more computation hides it;
#   2. else the one that can begin first: a wait whose collective is still under way comes after other work;
#   3. of equals the one that is due first. An operation is due at its own position in the captured order or, if that
#      is earlier, when its first reader is. So computation keeps the captured order, but the payload of a bucket of
#      parameters is as urgent as the layer that reads the first of them.
# The order follows from the graph and the machine, so every rank finds the same one.
#
# Early all-gathers cost memory, because gathered parameters exist for longer. The toy ignores it; weft has a budget.
#
# In weft: inductor/cost/ (clusters, calibration, simulator, trace files), inductor/schedule/ (peak memory).


@dataclass(frozen=True)
class Machine:
    """Seconds per collective; bytes/s of the network; FLOP/s; bytes/s of memory. Two CPU hosts, 10 Gbit/s."""

    latency: float = 150e-6
    network: float = 1.2e9
    flops: float = 50e9
    memory: float = 20e9

    def seconds(self, node: fx.Node) -> float:
        """How long the node uses its resource: the network for a collective, else the processor."""
        if row := COLLECTIVES.get(node.target):
            ranks = node.args[row.ranks]
            whole = size_bytes(payload(node)) * ranks / row.rows(ranks)[0]
            return self.latency + whole * (ranks - 1) / ranks / self.network  # a ring sends all parts but one
        if is_view(node.target) or node.target is wait_tensor:
            return 0.0
        flops = 0.0
        if node.target in (aten.mm.default, aten.addmm.default):
            flops = 2.0 * node.meta["val"].numel() * node.args[-1].meta["val"].shape[0]
        return max(flops / self.flops, size_bytes(node, *node.all_input_nodes) / self.memory)


@dataclass
class Clock:
    """Simulated time of one rank (seconds): `run` its operations in order."""

    machine: Machine
    now: float = 0.0
    exposed: float = 0.0
    network_free: float = 0.0
    arrives: dict[fx.Node, float] = field(default_factory=dict)  # by collective
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def begin(self, node: fx.Node) -> float:
        """When the processor can go on to this node; a wait holds it until the result arrives."""
        return max(self.now, self.arrives[node.args[0]]) if node.target is wait_tensor else self.now

    def run(self, node: fx.Node) -> None:
        """Advance by one operation."""
        start, seconds, kind = self.begin(node), self.machine.seconds(node), "compute"
        if node.target in COLLECTIVES:
            start, kind = max(start, self.network_free), COLLECTIVES[node.target].kind
            self.network_free = self.arrives[node] = start + seconds
        else:
            self.exposed += start - self.now
            self.now = start + seconds
        self.spans.append((kind, start, start + seconds))


def simulate(graph: fx.Graph, machine: Machine) -> Clock:
    """The predicted timeline of the graph in its present order."""
    clock = Clock(machine)
    for node in operations(graph):
        clock.run(node)
    return clock


def list_schedule(graph: fx.Graph, machine: Machine) -> fx.Graph:
    """Order the graph's operations as the text above says. Raises CycleError if buckets depend on each other."""
    position = {node: i for i, node in enumerate(operations(graph))}
    missing = {node: [o for o in node.all_input_nodes if o in position] for node in position}
    due = dict(position)
    for node in reversed(list(TopologicalSorter(missing).static_order())):  # readers before operands
        due[node] = min([due[node], *(due[user] for user in node.users if user in due)])
    clock, ready = Clock(machine), [node for node in position if not missing[node]]
    while ready:
        node = min(ready, key=lambda n: (n.target not in COLLECTIVES, clock.begin(n), due[n], position[n]))
        ready.remove(node)
        clock.run(node)
        graph.output_node().prepend(node)
        for user in (user for user in node.users if user in position):
            missing[user].remove(node)
            if not missing[user]:
                ready.append(user)
    return verify(graph)


def plan(graph: fx.Graph, machine: Machine) -> tuple[fx.Graph, list[str]]:
    """The graph in buckets and in order, by the bucket limit with the shortest predicted step; what was tried."""
    tried = {kib: list_schedule(bucket(graph, kib * 1024), machine) for kib in (0, 40, 80, 160, 320, 640)}
    clocks = {kib: simulate(scheduled, machine) for kib, scheduled in tried.items()}
    best = min(clocks, key=lambda kib: clocks[kib].now)
    return tried[best], [
        f"limit {kib:4} KiB: {len(collectives(tried[kib])):2} collectives, step {clock.now * 1e3:.2f} ms, "
        f"exposed {clock.exposed * 1e3:.2f} ms{'  <- best' if kib == best else ''}"
        for kib, clock in clocks.items()
    ]


def timeline(clock: Clock, end: float, columns: int = 105) -> list[str]:
    """Time from 0 to `end`: the processor (C); all-gathers (A) and reduce-scatters (R) on the network."""
    rows = {"compute": ["."] * columns, "network": ["."] * columns}
    for kind, start, stop in clock.spans:
        for column in range(round(start / end * columns), round(stop / end * columns)):
            rows["compute" if kind == "compute" else "network"][column] = kind[0].upper()
    return [f"{name} {''.join(row)}" for name, row in rows.items()]


# ---- 6. One fused kernel --------------------------------------------------------------------------------------------
# An unfused pointwise operation reads its operands from memory and writes its result back. In a fused kernel the values
# between stay in registers. Operations can be fused if nothing outside the group lies between two of them, since
# a kernel cannot stop in the middle.
#
# The group becomes a loop over i with expressions of the elements at i. Expressions are data, and equal ones compare
# equal. So a dictionary from expression to variable is common-subexpression elimination. Triton text is written
# from the loop alone. (In weft names are canonical as well, so a layer that occurs 32 times gives one kernel.)
#
# In weft: inductor/lowering/ (one rule per ATen operation), inductor/loop_ir/ (sympy indices, reductions),
# inductor/fusion/, inductor/codegen/ (Triton text), inductor/multi_tensor/ (one kernel updates all parameters).


@dataclass(frozen=True)
class Expr:
    """`load` of a named input, or `+` or `*` of expressions and numbers."""

    op: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """for i in range(size): name[i] = expression, for each store."""

    size: int
    loads: tuple[str, ...]
    stores: dict[str, Expr]


LOWERINGS: dict[Any, Callable[..., Expr]] = {
    aten.mul.Tensor: lambda a, b: Expr("*", (a, b)),
    aten.add.Tensor: lambda a, b, alpha=1: Expr("+", (a, b if alpha == 1 else Expr("*", (b, alpha)))),
}


def fusible_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Connected pointwise operations on tensors of one memory layout, so that one index addresses all of them."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    above: dict[fx.Node, set[fx.Node]] = {}  # all that a node depends on
    layout = lambda node: (node.meta["val"].shape, node.meta["val"].stride())
    for node in graph.nodes:
        operands = node.all_input_nodes
        above[node] = set(operands).union(*(above[operand] for operand in operands))
        if node.target not in LOWERINGS or len({layout(n) for n in [node, *operands]}) > 1:
            continue
        groups[node] = [node]
        for other in [groups[operand] for operand in operands if operand in groups]:
            union = {*other, *groups[node]}
            outside = {o for member in union for o in member.all_input_nodes} - union
            if not any(above[o] & union for o in outside):
                merged = [member for member in above if member in union]  # in the graph's order
                groups.update((member, merged) for member in merged)
    return list(groups.values())


def lower(group: list[fx.Node]) -> Loop:
    """The loop that computes a group. It stores the members that are read outside of the group."""
    loads = dict.fromkeys(o for node in group for o in node.all_input_nodes if o not in group)
    values = {node: Expr("load", (node.name,)) for node in loads}
    for node in group:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = LOWERINGS[node.target](*args, **kwargs)
    stores = {node.name: values[node] for node in group if any(user not in group for user in node.users)}
    return Loop(group[0].meta["val"].numel(), tuple(node.name for node in loads), stores)


def triton_text(loop: Loop) -> str:
    """The loop as a Triton kernel. Each program computes BLOCK indices; the mask cuts the last block."""
    variables: dict[Expr, str] = {}
    body = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < size"]

    def emit(value: Any) -> str:
        if not isinstance(value, Expr):
            return repr(value)
        if value not in variables:
            load = value.op == "load"
            text = f"tl.load({value.args[0]} + i, mask)" if load else f" {value.op} ".join(map(emit, value.args))
            variables[value] = f"v{len(variables)}"
            body.append(f"{variables[value]} = {text}")
        return variables[value]

    body += [f"tl.store({name} + i, {emit(value)}, mask)" for name, value in loop.stores.items()]
    pointers = ", ".join([*loop.loads, *loop.stores])
    lines = ["import triton", "import triton.language as tl", "", "@triton.jit"]
    return "\n    ".join(["\n".join([*lines, f"def fused({pointers}, size, BLOCK: tl.constexpr):"]), *body])


def kernel_error(group: list[fx.Node], text: str, device: str) -> float:
    """Run the kernel and the group's ATen operations on random inputs; the largest difference of the results."""
    loop, shape = lower(group), group[0].meta["val"].shape
    values = {name: torch.randn(shape, device=device) for name in loop.loads}
    outputs = {name: torch.empty(shape, device=device) for name in loop.stores}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.py")  # triton.jit reads a function's source from its file
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("kernel", file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        module.fused[(-(-loop.size // 1024),)](*values.values(), *outputs.values(), loop.size, BLOCK=1024)
    for node in group:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: values[operand.name])
        values[node.name] = node.target(*args, **kwargs)
    return max((output - values[name]).abs().max().item() for name, output in outputs.items())


# ---- 7. The Program -------------------------------------------------------------------------------------------------
# The scheduled graph is written as Python text, and this text is what runs. To debug a step, read it. `del` after
# a value's last reader frees its memory. At the end the updates are copied into the inputs.
#
# This Program calls ATen for every operation, so it can equal eager bit for bit. The kernel of section 6 rounds
# a * b + c at other places than ATen does. It is compared with a tolerance instead.
#
# In weft: inductor/runtime/ (executor, memory plan, streams, CUDA graphs), inductor/transports/.


def program_text(graph: fx.Graph) -> str:
    """The graph as a function of its inputs by name and the groups by mesh dimension."""
    last = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
    lines = ["def step(inputs, groups):"]

    def spell(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"inputs[{arg.target!r}]" if arg.op == "placeholder" else arg.name
        return f"[{', '.join(map(spell, arg))}]" if isinstance(arg, list | tuple) else repr(arg)

    for node in operations(graph):
        args, op = [spell(arg) for arg in node.args], str(node.target).replace("_c10d_functional", "c10d")
        args += [f"{key}={spell(arg)}" for key, arg in node.kwargs.items()]
        if row := COLLECTIVES.get(node.target):
            lines.append(f"    # {row.kind}: {', '.join(node.meta['params'])}")
            args[row.group], op = f"groups[{args[row.group]}]", f"COLLECTIVES[{op}].run"
        dead = [o.name for o in node.all_input_nodes if last[o] is node and o.op != "placeholder"]
        lines.append(f"    {node.name} = {op}({', '.join(args)})" + (f"; del {', '.join(dead)}" if dead else ""))
    loss, updates = graph.output_node().args[0]
    lines += [f"    inputs[{name!r}].copy_({value.name})" for name, value in updates.items()]
    return "\n".join([*lines, f"    return {loss.name}", ""])


# ---- 8. Two processes -----------------------------------------------------------------------------------------------
# Each rank captures and compiles its own step. Before the first collective the ranks compare their texts through a
# key-value store. A collective cannot do this: ranks with different programs could hang in it.
#
# Then the same three steps run twice, eagerly and as the Program, and every parameter, momentum and loss is compared
# bit for bit. Nothing here changes the order of a sum, and with two ranks a + b = b + a. In weft every pass declares
# whether it keeps every bit or may change sums, and a test holds it to that.
#
# In weft: compile.py, inductor/compiler.py (the order of passes), capture/agreement/, verify.py (compares with eager).


def agree(store: dist.Store, rank: int, text: str) -> None:
    """Raise on every rank, with the first line that differs, unless all ranks have the same program."""
    store.set(f"program{rank}", text)
    for other in range(RANKS):
        theirs = store.get(f"program{other}").decode()
        for mine, line in zip(f"{text}<end>".splitlines(), f"{theirs}<end>".splitlines(), strict=False):
            if mine != line:
                raise RuntimeError(f"ranks {rank} and {other} have different programs:\n{mine}\n{line}")


def compare_with_eager(rank: int, text: str) -> int:
    """Train both ways from the same start. Returns how many tensors are equal; raises with the names of others."""
    GROUPS["data"] = dist.group.WORLD.group_name
    program = {"torch": torch, "aten": aten, "c10d": c10d, "COLLECTIVES": COLLECTIVES, "device": torch.device}
    exec(text, program)
    eager, compiled = Training(rank), Training(rank)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(STEPS):
        x, y = batch(rank, number)
        with torch.no_grad():
            loss = program["step"]({**compiled.state, "x_1": x, "y_1": y}, GROUPS)
        pairs[f"loss_{number}"] = (eager.step(x, y), loss)
    pairs |= {name: (tensor, compiled.state[name]) for name, tensor in eager.state.items()}
    if unequal := [name for name, pair in pairs.items() if not torch.equal(*pair)]:
        raise AssertionError(f"rank {rank}: not equal to eager: {', '.join(unequal)}")
    return len(pairs)


def rank_main(rank: int, folder: str) -> None:
    """One process: compile, agree, compare."""
    torch.set_num_threads(1)
    text = program_text(plan(capture(Training(rank), rank), Machine())[0])
    store = dist.FileStore(f"{folder}/store", RANKS)
    agree(store, rank, text)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    Path(folder, str(rank)).write_text(f"rank {rank}: {compare_with_eager(rank, text)} tensors equal to eager")
    dist.destroy_process_group()


def show(title: str, lines: list[str], shown: int = 16) -> None:
    """Print an artefact; the middle of a long one only with --full."""
    if len(lines) > shown + 1 and "--full" not in sys.argv:
        lines = [*lines[: shown // 2], f"... {len(lines) - shown // 2 * 2} more lines", *lines[-(shown // 2) :]]
    print(f"\n== {title}", *lines, sep="\n")


def main() -> None:
    """Print what each section makes, then run two ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # has to be set before triton is imported
    graph, machine = capture(Training(0), 0), Machine()
    show(f"captured graph: {len(operations(graph))} operations", program_text(graph).splitlines())

    scheduled, tried = plan(graph, machine)
    before, after = simulate(graph, machine), simulate(scheduled, machine)
    show("bucket limits", tried)
    buckets = [f"{node}: {', '.join(node.meta['params'])}" for node in collectives(scheduled)]
    show(f"collectives: {len(collectives(graph))} -> {len(buckets)}", buckets)
    show(f"eager order: {before.now * 1e3:.2f} ms", timeline(before, before.now))
    show(f"scheduled: {after.now * 1e3:.2f} ms", timeline(after, before.now))
    print(f"\nexposed communication: {before.exposed * 1e3:.2f} ms -> {after.exposed * 1e3:.2f} ms (predicted)")

    group = max(fusible_groups(scheduled), key=len)
    kernel = triton_text(lower(group))
    show(f"{len(group)} operations as one kernel", kernel.splitlines(), 100)
    print(f"\nlargest difference from ATen on {device}: {kernel_error(group, kernel, device):.1e}")

    show("program", program_text(scheduled).splitlines())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder,), nprocs=RANKS)
        show(f"after {STEPS} steps", [Path(folder, str(rank)).read_text() for rank in range(RANKS)])
    print("equal on both ranks")


if __name__ == "__main__":
    main()
