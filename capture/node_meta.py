"""The schema of ``node.meta``: every key that a node of a StepGraph may carry, declared once.

A key has a type and a rule of inheritance, which says what a node that is made from other nodes gets of theirs.
:func:`meta_of` applies the rules, :func:`same_meta` is for a node that stands for the same call as another.
:func:`meta_fault` names what does not follow the schema; the verifier of a StepGraph asks it for every node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.fx

from weft.capture.user_code import Frame, format_frame

Meta = dict[str, Any]

STAGES = ("forward", "backward", "optimizer", "")


class Inherit(enum.Enum):
    """What a node that is made from other nodes gets of a key of theirs.

    COPIED: the value of the first source that has the key. MERGED: the values of all sources, joined by
    ``MetaKey.merge``. DROPPED: nothing; the maker of the node states the value, or the node has none.
    """

    COPIED = enum.auto()
    MERGED = enum.auto()
    DROPPED = enum.auto()


@dataclass(frozen=True)
class MetaKey:
    """One key of ``node.meta``.

    Attributes:
        name: the key.
        kinds: the classes that a value may be of; empty where any value may stand.
        rule: what a node made from others gets of it.
        doc: what the value says.
        merge: for MERGED, the joined value of the values of several sources.
    """

    name: str
    kinds: tuple[type, ...]
    rule: Inherit
    doc: str
    merge: Callable[[list[Any]], Any] | None = None


def _joined(tuples: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(item for one in tuples for item in one)


META_KEYS: tuple[MetaKey, ...] = (
    MetaKey("val", (), Inherit.DROPPED, "fake tensor, symbolic number, or (nested) list of them: the result"),
    MetaKey("frames", (tuple,), Inherit.COPIED, "the user's lines, innermost first, as Frame"),
    MetaKey("module", (str,), Inherit.COPIED, 'dotted path of the module whose forward made it, "" outside any'),
    MetaKey("stage", (str,), Inherit.COPIED, '"forward", "backward" or "optimizer"'),
    MetaKey("stream", (int,), Inherit.COPIED, "side stream that the user issued it on; absent on the default stream"),
    MetaKey("inplace", (), Inherit.DROPPED, "the in-place operation that the executor runs instead, maybe on a clone"),
    MetaKey("effect", (bool,), Inherit.DROPPED, "the call must run even if nothing uses its result"),
    MetaKey("digest", (str,), Inherit.DROPPED, "of a branch: hash of the nodes recorded before it"),
    MetaKey("fence", (bool,), Inherit.DROPPED, "no node may be moved before this one"),
    MetaKey("recomputed", (bool,), Inherit.COPIED, "backward computes again a value of forward"),
    MetaKey("scalar_in_memory", (tuple,), Inherit.DROPPED, "(name, index): the tensor that also holds this number"),
    MetaKey("fused_ops", (int,), Inherit.DROPPED, "ATen operations that a generated kernel is the first to compute"),
    MetaKey("capture_order", (int,), Inherit.COPIED, "position of a collective among the captured collectives"),
    MetaKey("agreed_rows", (str,), Inherit.COPIED, "of a collective: hash of row-wise operations that ranks share"),
    MetaKey("members", (tuple,), Inherit.MERGED, "positions of the captured collectives that it carries", _joined),
    MetaKey("param_names", (tuple,), Inherit.MERGED, "names of the parameters that a collective moves", _joined),
    MetaKey("regathers", (int,), Inherit.MERGED, "all-gathers of a bucket that repeat an earlier all-gather", sum),
    MetaKey("held", (bool,), Inherit.MERGED, "of a collective: the caller of some rank holds a result of it", any),
    MetaKey("transport", (str,), Inherit.COPIED, "transport that the schedule chose for a collective"),
    MetaKey("arena_slots", (tuple,), Inherit.DROPPED, "for each result its place in the symmetric arena, or None"),
)

_KINDS = {key.name: key.kinds for key in META_KEYS}
_FRAME = frozenset({Frame})
_INHERITED = tuple(key for key in META_KEYS if key.rule is not Inherit.DROPPED)


def meta_of(sources: torch.fx.Node | Iterable[torch.fx.Node], *, val: Any, **own: Any) -> Meta:
    """Metadata of a new node that is made from ``sources``.

    Args:
        sources: the nodes that the new node replaces or derives from; the first one gives the keys that are copied.
        val: the fake value of the new node.
        own: keys that the new node states itself. They win over inherited ones.
    """
    metas = [sources.meta] if isinstance(sources, torch.fx.Node) else [source.meta for source in sources]
    made: Meta = {}
    for key in _INHERITED:
        values = [meta[key.name] for meta in metas if key.name in meta]
        if values:
            made[key.name] = values[0] if key.merge is None else key.merge(values)
    return {**made, **own, "val": val}


def same_meta(node: torch.fx.Node, **changed: Any) -> Meta:
    """Metadata of a node that stands for the same call as ``node``: every key, but for those ``changed``."""
    return {**node.meta, **changed}


def source_line(node: torch.fx.Node) -> str:
    """The innermost of the user's lines that ``node`` comes from, as text; "" where none is known."""
    frames = node.meta.get("frames")
    return format_frame(frames[0]) if frames else ""


def meta_fault(node: torch.fx.Node) -> str | None:
    """What in ``node.meta`` does not follow the schema; None where everything does."""
    meta = node.meta
    for name, value in meta.items():
        kinds = _KINDS.get(name)
        if kinds is None:
            return f"unknown metadata key {name!r}"
        if kinds and not isinstance(value, kinds):
            return f"metadata {name!r} is a {type(value).__name__}"
    if (stage := meta.get("stage", "")) not in STAGES:
        return f"unknown stage {stage!r}"
    return None if _FRAME.issuperset(map(type, meta.get("frames", ()))) else "a frame that is no Frame"
