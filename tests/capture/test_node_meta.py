"""The schema of node metadata: inheritance to new nodes, and what the verifier of a StepGraph refuses."""

from __future__ import annotations

import pytest
import torch

from tests.step_builder import StepBuilder
from weft.capture.node_meta import META_KEYS, Inherit, meta_of, same_meta
from weft.capture.user_code import Frame
from weft.errors import MalformedGraph

aten = torch.ops.aten

HERE, THERE = (Frame("a.py", 1, "f"),), (Frame("b.py", 2, "g"),)


def nodes(*metas: dict[str, object]) -> list[torch.fx.Node]:
    graph = torch.fx.Graph()
    made = [graph.placeholder(f"x{at}") for at in range(len(metas))]
    for node, meta in zip(made, metas, strict=True):
        node.meta = dict(meta)
    return made


def test_copied_keys_come_from_the_first_node_that_has_them():
    one, other = nodes({"frames": HERE, "stage": "forward"}, {"frames": THERE, "stream": 2, "module": "m"})
    assert meta_of([one, other], val=3) == {"frames": HERE, "stage": "forward", "stream": 2, "module": "m", "val": 3}


def test_merged_keys_join_the_values_of_all_nodes():
    pair = nodes({"param_names": ("a",), "regathers": 1}, {"param_names": ("b", "c"), "regathers": 1})
    assert meta_of(pair, val=None) == {"param_names": ("a", "b", "c"), "regathers": 2, "val": None}


def test_dropped_keys_are_not_inherited_but_may_be_stated():
    (node,) = nodes({"val": 1, "inplace": aten.add_.Tensor, "effect": True, "fused_ops": 3, "arena_slots": (None,)})
    assert meta_of(node, val=2) == {"val": 2}
    assert meta_of(node, val=2, effect=True) == {"val": 2, "effect": True}


def test_a_node_that_stands_for_the_same_call_keeps_every_key():
    (node,) = nodes({"val": 1, "inplace": aten.add_.Tensor, "effect": True, "stage": "forward"})
    assert same_meta(node, stage="backward") == {**node.meta, "stage": "backward"}


def test_every_key_is_declared_once_with_a_line_of_documentation():
    assert len({key.name for key in META_KEYS}) == len(META_KEYS)
    assert all(key.doc for key in META_KEYS)
    assert all((key.merge is not None) == (key.rule is Inherit.MERGED) for key in META_KEYS)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"colour": "red"}, "unknown metadata key 'colour'"),
        ({"module": 3}, "metadata 'module' is a int"),
        ({"stage": "sideways"}, "unknown stage 'sideways'"),
        ({"frames": ("train.py:3",)}, "a frame that is no Frame"),
    ],
)
def test_a_graph_with_metadata_outside_the_schema_is_malformed(meta: dict[str, object], message: str):
    built = StepBuilder()
    x = built.input(torch.ones(2))
    built.call(aten.relu.default, x).meta.update(meta)
    with pytest.raises(MalformedGraph, match=message):
        built.build()
