"""How often a compilation asks what a node is: predicates asked of nodes, by stage, and the way of one parameter.

    python bench/node_questions.py
    python bench/node_questions.py --layers 8 --parameter model_embedding_weight --top 15

A sharded Llama is compiled up to its program, on fakes and without a GPU. A *predicate* is a function of ``inductor/``
or ``capture/`` that takes a node and by its annotation answers with a bool, or with None. For each stage it prints how
many were asked, how many of these were of another node or by another predicate, and how many predicates and files that
were. The *way of a parameter* is every function there that is called with its placeholder as an argument: their files,
their return statements that ran, and those of predicates. A graph that is copied has other nodes.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from compile_time import llama

import weft
from weft import knobs
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule.scheduled_graph import scheduled_graph

ROOT = os.path.dirname(weft.__file__) + os.sep
Node = torch.fx.Node


def predicates() -> set[tuple[str, int]]:
    """File and first line of every function that answers with a bool or None."""
    found = set()
    for path in [*Path(ROOT, "inductor").rglob("*.py"), *Path(ROOT, "capture").rglob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.returns is not None:
                answer = ast.unparse(function.returns)
                first = function.decorator_list[0].lineno if function.decorator_list else function.lineno
                if answer == "bool" or "| None" in answer:
                    found.add((str(path.relative_to(ROOT)), first))
    return found


class Questions(PassRunner):
    """Counts while it runs. ``asked``: by stage, predicate and node. ``returns``: of calls with the parameter."""

    def __init__(self, parameter: str) -> None:
        super().__init__()
        self.parameter, self.stage = parameter, "schedule"
        self.asked: Counter[tuple[str, tuple[str, str], Node]] = Counter()
        self.returns: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
        self._known = predicates()

    def timed(self, stage: str, run: Callable[[], Any]) -> Any:
        """As a runner's; what is asked meanwhile counts for the stage."""
        outer, self.stage = self.stage, stage
        try:
            return super().timed(stage, run)
        finally:
            self.stage = outer

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """The profiler."""
        code = frame.f_code
        file = code.co_filename.removeprefix(ROOT)
        if event not in ("call", "return") or not file.startswith(("inductor/", "capture/")):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        node = next((each for name in arguments if isinstance(each := frame.f_locals.get(name), Node)), None)
        is_predicate = (file, code.co_firstlineno) in self._known
        if event == "call" and node is not None and is_predicate:
            self.asked[self.stage, (file, code.co_name), node] += 1
        if event == "return" and node is not None and node.op == "placeholder" and node.name == self.parameter:
            self.returns[is_predicate].add((file, frame.f_lineno))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--parameter", default="model_blocks_0_up_weight")
    parser.add_argument("--top", type=int, default=0, help="predicates to print of each stage")
    options = parser.parse_args()
    questions = Questions(options.parameter)
    with tempfile.TemporaryDirectory() as cache, knobs.override(cache_dir=cache), weft.fake_world(8):
        step, arguments = llama("llama-1b-fsdp", options)
        graph = weft.capture(step, *arguments)
        sys.setprofile(questions)
        made, _ = scheduled_graph(graph, load_cluster("h200x8"), None, True, questions)
        questions.timed("program", lambda: compile_aten(made, planned=True))
        sys.setprofile(None)
    stages: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for (stage, predicate, _), count in questions.asked.items():
        stages[stage][predicate] += count
    for stage, of in stages.items():
        distinct, files = sum(each[0] == stage for each in questions.asked), {file for file, _ in of}
        print(f"{stage}: {of.total()} questions, {distinct} distinct, {len(of)} predicates in {len(files)} files")
        for (file, name), count in of.most_common(options.top):
            print(f"    {count:7d}  {name} of {file}")
    print(f"in all: {questions.asked.total()} questions, {len(questions.asked)} distinct")
    ran = questions.returns[True] | questions.returns[False]
    of_predicates = f"{len(questions.returns[True])} of them of predicates"
    print(f"{options.parameter}: {len({file for file, _ in ran})} files, {len(ran)} returns, {of_predicates}")


if __name__ == "__main__":
    main()
