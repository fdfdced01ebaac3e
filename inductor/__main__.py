"""``python -m weft.inductor``: what becomes of a toy training step: loop nests, kernels, the program."""

from __future__ import annotations

from weft.capture.toy import capture_toy
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.emit import emit
from weft.inductor.fuse import Kernel, fuse
from weft.inductor.inline import inline
from weft.inductor.lower import Loop, lower
from weft.inductor.passes.pipeline import EVERY_PASS, run_passes
from weft.inductor.runtime.aten import compile_aten


def show(title: str, *texts: object) -> None:
    """Print texts below a title."""
    print(f"# ---- {title}\n")
    for text in texts:
        print(f"{text}\n")


step = run_passes(capture_toy(), EVERY_PASS)
lowered = lower(step, list(step.graph.nodes))
loops = [operation for operation in lowered.operations if isinstance(operation, Loop)]
show(f"{len(loops)} loop nests of {len(step)} nodes", *(f"# {loop.node.name}\n{loop.nest}" for loop in loops))

inlined = inline(lowered)
items = fuse(inlined, supports)
kernels = [item for item in items if isinstance(item, Kernel)]
show(
    f"{len(kernels)} kernels after fusion",
    *(f"# {', '.join(node.name for node in kernel.nodes)}\n{kernel.nest}" for kernel in kernels),
)

largest = max(kernels, key=lambda kernel: len(kernel.nodes))
dtypes = {name: lowered.buffers[name].dtype for name in (*largest.reads, *largest.writes)}
show(f"the kernel of {', '.join(node.name for node in largest.nodes)}", generate(largest.nest, dtypes).source.text)
show("the program", compile_aten(emit(inlined, items).check()).source)
