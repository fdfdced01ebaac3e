"""Draws the figures of how_it_works.md and of the README from a step that weft captures and schedules.

    python docs/figures.py [folder]         # writes timeline.svg, step_graph.svg and arena.svg, by default to docs/

The step is that of a Llama 8B of four layers on 64 H200 in a fake world: nothing runs, all times are predicted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.capture.node_kinds import is_collective
from weft.inductor.cost.build_task_graph import build
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.simulate import COMPUTE, Simulation, simulate
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES
from weft.inductor.runtime.memory_plan import ArenaSpan, plan_memory
from weft.inductor.runtime.placement import leaves, place
from weft.inductor.schedule.scheduled_graph import predicted_schedule
from weft.plan.charts import COLOURS_OF_PARTS
from weft.plan.timeline import Lane, lanes

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from llama import SHAPES, Llama

WORLD, LAYERS, TOKENS, CLUSTER = 64, 4, 2048, "h200x8"
WIDTH, LABEL = 960, 150
STAGES = {
    "forward": "#0072b2",
    "backward": "#009e73",
    "optimizer": "#b5a642",
    "communication": "#cc79a7",
    "": "#999999",
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    with weft.fake_world(WORLD):
        step = captured_step()
        cluster = load_cluster(CLUSTER)
        before = predicted_in_order(step)
        after = predicted_schedule(step, cluster)
        arena = arena_figure(after.step)
    (folder / "timeline.svg").write_text(
        timelines(
            ("Collectives where the step calls them", before[0], lanes(*before)),
            ("Collectives as weft schedules them", after.simulation, lanes(after.simulation, after.nodes)),
        )
    )
    (folder / "step_graph.svg").write_text(graph_figure(step))
    (folder / "arena.svg").write_text(arena)


def captured_step() -> weft.StepGraph:
    """Rank 0's step, for GPUs."""
    mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Llama(type(SHAPES["8b"])(**{**vars(SHAPES["8b"]), "layers": LAYERS}))
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        weft.fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
    return retarget(weft.capture(step, ids, ids))


def predicted_in_order(step: weft.StepGraph) -> tuple[Simulation, Sequence[torch.fx.Node]]:
    """The same kernels, with each collective called and waited for where the step calls it, over NCCL."""
    runner = PassRunner()
    graph = kernel_graph(runner.run("graph", step.copy(), KERNEL_PASSES), runner)
    task_graph, nodes = build(graph, load_cluster(CLUSTER))
    return simulate(task_graph), nodes


# ---- the timeline


def timelines(*parts: tuple[str, Simulation, list[Lane]]) -> str:
    """Lanes of slices, one part above the other, on one scale of time."""
    longest = max(simulation.seconds for _, simulation, _ in parts)
    scale = (WIDTH - LABEL - 20) / longest
    pieces, top = [], 30
    for title, simulation, found in parts:
        exposed = simulation.exposed_seconds / simulation.seconds
        pieces.append(text(10, top, f"{title}: {simulation.seconds * 1e3:.0f} ms a step", "title"))
        pieces.append(text(WIDTH - 10, top, f"{exposed:.0%} of it exposed communication, predicted", "label", "end"))
        top += 12
        for lane in (lane for lane in found if lane.slices):
            pieces.append(text(LABEL - 10, top + 17, name_of(lane.name), "label", "end"))
            pieces.append(box(LABEL, top, longest * scale, 24, "#f1f1f1"))
            for each in lane.slices:
                colour = COLOURS_OF_PARTS.get(each.kind, "#777777")
                width = max((each.end - each.start) * scale, 0.4)
                pieces.append(box(LABEL + each.start * scale, top, width, 24, colour))
            top += 28
        top += 34
    known = {"GEMM": "GEMM", "attention": "attention", "memory-bound kernels": "generated kernels"}
    known |= {"optimizer": "optimizer", "gather": "all-gather", "reduce": "reduce-scatter", "wait": "wait (exposed)"}
    pieces += legend([(words, COLOURS_OF_PARTS[kind]) for kind, words in known.items()], top - 14)
    return svg(top + 8, "One training step before and after scheduling", pieces)


def name_of(stream: str) -> str:
    """``all-gather`` of ``dp:gather``."""
    if stream == COMPUTE:
        return "computation"
    return {"gather": "all-gather", "reduce": "reduce-scatter"}.get(stream.rpartition(":")[2], stream)


# ---- the graph


def graph_figure(step: weft.StepGraph) -> str:
    """Each operation of the step as a cell, in order, coloured by stage; collectives stand above and below."""
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    columns, size, top = 75, 11.6, 56
    pieces = [text(10, 24, f"One step as one graph: {len(nodes)} operations, in the order of the step", "title")]
    cells: dict[str, list[str]] = {}
    for at, node in enumerate(nodes):
        row, column = divmod(at, columns)
        stage = "communication" if is_collective(node) else str(node.meta.get("stage") or "")
        x, y = 20 + column * (size + 0.8), top + row * (size + 6)
        cells.setdefault(stage, []).append(f"M{x:.1f} {y:.1f}h{size}v{size}h-{size}z")
    for stage, squares in cells.items():
        pieces.append(f'<path d="{"".join(squares)}" fill="{STAGES.get(stage, STAGES[""])}"/>')
    rows = -(-len(nodes) // columns)
    bottom = top + rows * (size + 6) + 18
    names = [(f"{name or 'other'}: {len(cells[name])}", STAGES[name]) for name in STAGES if name in cells]
    pieces += legend(names, bottom)
    return svg(bottom + 22, "A training step as one graph", pieces)


# ---- the arena


def arena_figure(step: weft.StepGraph) -> str:
    """Values in the arena: from left to right when they are live, from bottom to top where they are."""
    placement = place(step)
    plan = plan_memory(step, placement)
    order = list(step.graph.nodes)
    height, top = 300, 56
    pieces = [
        text(10, 24, f"The arena: {plan.size / 2**30:.2f} GiB for values of {plan.total / 2**30:.1f} GiB", "title"),
        text(WIDTH - 10, 24, f"lower bound {plan.peak_live / 2**30:.2f} GiB (peak of live bytes)", "label", "end"),
        box(LABEL, top, WIDTH - LABEL - 20, height, "#f1f1f1"),
    ]
    x_scale, y_scale = (WIDTH - LABEL - 20) / len(order), height / plan.size
    for at, node in enumerate(order):
        colour = STAGES.get(str(node.meta.get("stage") or ""), STAGES[""])
        for span in flat(plan.spans.get(node)):
            count = (sum((n - 1) * s for n, s in zip(span.sizes, span.strides, strict=True)) + 1) * span.dtype.itemsize
            y = top + height - (span.offset + count) * y_scale
            ends = [leaf.memory.root.busy_until for leaf in leaves(placement.trees[node]) if leaf.memory is not None]
            width = max((max([at, *ends]) + 1 - at) * x_scale, 0.5)
            pieces.append(box(LABEL + at * x_scale, y, width, max(count * y_scale, 0.4), colour, 0.75))
    pieces.append(text(LABEL - 10, top + 12, f"{plan.size / 2**30:.2f} GiB", "label", "end"))
    pieces.append(text(LABEL - 10, top + height, "offset 0", "label", "end"))
    pieces.append(text(LABEL, top + height + 20, "first kernel", "label"))
    pieces.append(text(WIDTH - 20, top + height + 20, "last kernel", "label", "end"))
    pieces += legend([(f"made in {s}", STAGES[s]) for s in ("forward", "backward", "optimizer")], top + height + 46)
    return svg(top + height + 66, "The arena over one step", pieces)


def flat(spans: object) -> Iterator[ArenaSpan]:
    if isinstance(spans, ArenaSpan):
        yield spans
    elif isinstance(spans, list):
        for each in spans:
            yield from flat(each)


# ---- pieces


def svg(height: float, title: str, pieces: Iterable[str]) -> str:
    style = "text{font-family:sans-serif;fill:#222}.title{font-size:16px;font-weight:600}.label{font-size:13px}"
    body = "\n".join(pieces)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{title}">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>\n{body}\n</svg>\n'
    )


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> str:
    seen = "" if opacity == 1.0 else f' fill-opacity="{opacity}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"{seen}/>'


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    words = re.sub(r"&", "&amp;", words)
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def legend(names: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    x = 20.0
    for words, colour in names:
        yield box(x, y - 11, 13, 13, colour)
        yield text(x + 19, y, words, "label")
        x += 46 + 7.4 * len(words)


if __name__ == "__main__":
    main()
