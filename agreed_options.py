"""What decides, besides the step itself, which collectives its form issues and when: ranks compare it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft import knobs, torch_adapter
from weft.capture.agreement.claims import NO_CLAIMS, Claims, claims_of
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.inductor.cost.cluster import is_described
from weft.inductor.graph.collectives import ranks_on_a_host


def communicates() -> bool:
    """Whether this process has peers, and is not in a fake world."""
    return torch_adapter.world_size() > 1 and current_fake_world() is None


def claims(graph: StepGraph) -> Claims:
    """What the collectives of a graph need of the other ranks; nothing where there are none."""
    return claims_of(graph) if communicates() else NO_CLAIMS


def options_text(options: Mapping[str, object], graph: StepGraph) -> str:
    """The options of a compiled step, the knobs and the machines, as far as ranks must have the same."""
    disabled = ", ".join(sorted(filter(None, map(str.strip, knobs.disable_passes.split(",")))))
    return (
        f"{', '.join(f'{name} {value}' for name, value in options.items())}\n"
        f"transports {knobs.transports or 'nccl'}, without passes {disabled or 'none'}\n"
        f"{_sizes(graph)}{_machines(graph)}"
        f"collectives on CPUs in buckets of {knobs.bucket_mib} MiB, {knobs.prefetch_mib} MiB ahead; "
        f"at most {knobs.form_limit} forms"
    )


def _machines(graph: StepGraph) -> str:
    """What decides how a step on GPUs is compiled, as each rank finds it: which groups are on one host, and whether a
    description of the cluster fits."""
    if not any(isinstance(val := node.meta["val"], torch.Tensor) and val.is_cuda for node in graph.placeholders):
        return ""
    here = (name for name, group in sorted(graph.groups.items()) if ranks_on_a_host(group))
    # Not which description: rank 0 alone decides the schedule, if all ranks come to the agreement on it.
    scheduled = "scheduled" if is_described() else "not scheduled, because no description of a cluster fits these GPUs"
    return f"groups on one host: {', '.join(here) or 'none'}\ncommunication is {scheduled}\n"


def _sizes(graph: StepGraph) -> str:
    """The sizes of the batch, where ranks say that they have the same."""
    if not knobs.even_batches:
        return ""
    names = {entry.name for entry in graph.inputs if entry.role is Role.BATCH}
    vals = [(node.name, node.meta["val"]) for node in graph.placeholders if node.name in names]
    return "".join(f"{name} {list(val.shape)}\n" for name, val in vals if isinstance(val, torch.Tensor))
