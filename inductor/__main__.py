"""``python -m weft.inductor``: the passes over a toy training step, its loop nests, its kernels, its program."""

from __future__ import annotations

from weft.capture.toy import capture_toy
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.fusion.fuse import FusedLoops, fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Loop
from weft.inductor.passes.pipeline import KERNEL_PASSES
from weft.inductor.runtime.aten import compile_aten


def show(title: str, *texts: object) -> None:
    """Print texts below a title."""
    print(f"# ---- {title}\n")
    for text in texts:
        print(f"{text}\n")


runner = PassRunner()
step = runner.run("graph", capture_toy(), KERNEL_PASSES)
program = compile_aten(kernel_graph(step, runner))
show("passes", runner.table())

lowered = lower(step, list(step.graph.nodes))
loops = [operation for operation in lowered.operations if isinstance(operation, Loop)]
show(f"{len(loops)} loop nests of {len(step)} nodes", *(f"# {loop.node.name}\n{loop.nest}" for loop in loops))

inlined = inline(lowered)
items = fuse(inlined, supports)
kernels = [item for item in items if isinstance(item, FusedLoops)]
show(
    f"{len(kernels)} kernels after fusion",
    *(f"# {', '.join(node.name for node in kernel.nodes)}\n{kernel.nest}" for kernel in kernels),
)

largest = max(kernels, key=lambda kernel: len(kernel.nodes))
dtypes = {name: lowered.buffers[name].dtype for name in (*largest.reads, *largest.writes)}
show(f"the kernel of {', '.join(node.name for node in largest.nodes)}", generate(largest.nest, dtypes).source.text)
show("the program", program.source)
