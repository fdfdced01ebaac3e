"""All ranks hold the same graph, or all of them say where they do not.

Ranks compare the SHA-256 of their graph's text over the store of the process group, never through a
collective: a collective is just what would hang if they differed. The last rank to arrive (it sees so in a
counter) reads all hashes and publishes a verdict; the others wait for that one key. So where they agree each
rank makes a handful of small requests whatever the size of the world, and texts travel only where there is
something to show: one rank of the majority posts its text, the first rank of each other group posts its
difference from that, all others read those few lines.

A rank that dies or never comes is found by a deadline. The rank whose deadline passes first takes the part of
the last to arrive and publishes who is missing. The verdict that is published first counts, so all raise the
same error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.difference import difference
from weft.capture.fake_world import current_fake_world

log = logging.getLogger(__name__)

# Seconds in which a verdict follows a deadline, and a difference follows a verdict.
GRACE_S = 5.0

_UNKNOWN = "(the difference is not known: rank {} left before it sent its part)"

# Groups of ranks that are told apart beside the majority; those beyond are taken together.
MAX_GROUPS = 8


def agree(
    name: str,
    text: str,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> None:
    """Return once every rank of `group` (default: all ranks) has called this with an equal `text`.

    Ranks meet by `name` and by how often each has called with that name. `timeout_s` counts from this rank's
    call (default: the knob agreement_timeout_s). `store`, `rank` and `world` stand in for those of the
    process group; give all three or none. In a fake world there is nobody to agree with.

    Raises, on every rank:
        errors.GraphMismatch: texts differ; the message names the ranks and shows the difference.
        errors.AgreementTimeout: ranks did not come in time; the message names them.
        errors.StoreLost: the process that holds the store is gone.
    """
    if store is None:
        if not dist.is_initialized() or current_fake_world() is not None:
            log.debug("%s: nobody to compare this graph with", name)
            return
        store, rank = torch_adapter.default_store(), dist.get_rank()
        ranks = dist.get_process_group_ranks(group)
    else:
        assert rank is not None
        assert world is not None
        ranks = list(range(world))
    if len(ranks) == 1:
        return
    start = time.monotonic()
    timeout_s = knobs.agreement_timeout_s if timeout_s is None else timeout_s
    try:
        meetings = dist.PrefixStore(f"weft/agreement/{_digest(str(ranks))[:8]}/{name}", store)
        call = meetings.add(f"calls/{rank}", 1)
        _Meeting(name, call, dist.PrefixStore(str(call), meetings), ranks, rank, text, timeout_s).hold()
    except dist.DistNetworkError as error:
        raise errors.StoreLost(name, rank) from error
    log.debug("%s: %d ranks agree on capture %d (%.3f s)", name, len(ranks), call, time.monotonic() - start)


@dataclass(frozen=True)
class _Meeting:
    """One comparison, as one rank sees it. `store` is this meeting's own."""

    name: str
    call: int
    store: dist.Store
    ranks: Sequence[int]
    rank: int
    text: str
    timeout_s: float

    def hold(self) -> None:
        self.store.set(f"hash/{self.rank}", _digest(self.text))
        is_last = self.store.add("arrived", 1) == len(self.ranks)
        verdict = self._judge() if is_last else self._verdict()
        if "missing" in verdict:
            missing: list[int] = verdict["missing"]
            raise errors.AgreementTimeout(
                self.name, self.call, self.rank, missing, listed(missing), verdict["by"], verdict["waited"]
            )
        groups = [_Group(digest, ranks) for digest, ranks in verdict["groups"]]
        if len(groups) > 1:
            self._show_mismatch(groups)
        self._clean_up()

    def _verdict(self) -> dict[str, Any]:
        """Wait for the verdict. Past the deadline give it, unless another rank was the first to notice."""
        found = _await(self.store, "verdict", self.timeout_s)
        if found is None and self.store.add("judges", 1) > 1:
            found = _await(self.store, "verdict", GRACE_S)
        return self._judge() if found is None else json.loads(found)

    def _judge(self) -> dict[str, Any]:
        """Publish who is missing or which groups of ranks hold equal texts; what was published first
        counts."""
        keys = {f"hash/{rank}": rank for rank in self.ranks}
        missing = [keys[key] for key in _absent(self.store, list(keys))]
        if missing:
            verdict: dict[str, Any] = {"missing": missing, "by": self.rank, "waited": self.timeout_s}
        else:
            hashes = [value.decode() for value in self.store.multi_get(list(keys))]
            verdict = {"groups": [(group.digest, group.ranks) for group in _groups(hashes, self.ranks)]}
        return json.loads(self.store.compare_set("verdict", "", json.dumps(verdict)))

    def _show_mismatch(self, groups: list[_Group]) -> None:
        """Raise with the difference: worked out by the first rank of each group, read by the others of that
        group. Those who hold what most hold are shown the first group that does not."""
        majority, *others = groups
        digest = _digest(self.text)
        shown_group = next((group for group in others if group.digest == digest), others[0])
        if self.rank == majority.first:
            self.store.set("text", base64.b64encode(zlib.compress(self.text.encode())).decode())
        if self.rank == shown_group.first:
            self.store.set(f"difference/{self.rank}", self._difference(majority.first))
        found = _await(self.store, f"difference/{shown_group.first}", 2 * GRACE_S)
        shown = _UNKNOWN.format(shown_group.first) if found is None else found.decode()
        differing = sorted(rank for group in others for rank in group.ranks)
        raise errors.GraphMismatch(self.name, self.rank, differing, _summary(majority, others), shown)

    def _difference(self, reference: int) -> str:
        packed = _await(self.store, "text", GRACE_S)
        if packed is None:
            return _UNKNOWN.format(reference)
        text = zlib.decompress(base64.b64decode(packed)).decode()
        return difference(text, self.text, f"rank {reference}", f"rank {self.rank}")

    def _clean_up(self) -> None:
        """Leave nothing in the store; the last one out takes what all of them looked at."""
        self.store.delete_key(f"hash/{self.rank}")
        if self.store.add("left", 1) == len(self.ranks):
            for key in ("arrived", "judges", "verdict", "left"):
                self.store.delete_key(key)


@dataclass(frozen=True)
class _Group:
    """Ranks (ascending) whose texts have one hash."""

    digest: str
    ranks: list[int]

    @property
    def first(self) -> int:
        return self.ranks[0]


def _groups(hashes: Sequence[str], ranks: Sequence[int]) -> list[_Group]:
    """Ranks by hash: the largest group first (of equal ones, that of the lowest rank), then by their first
    rank. Groups beyond MAX_GROUPS are put into one, under no hash."""
    by_hash: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in zip(ranks, hashes, strict=True):
        by_hash[digest].append(rank)
    groups = [_Group(digest, sorted(found)) for digest, found in by_hash.items()]
    groups.sort(key=lambda group: group.first)
    majority = max(groups, key=lambda group: len(group.ranks))
    others = [group for group in groups if group is not majority]
    rest = sorted(rank for group in others[MAX_GROUPS:] for rank in group.ranks)
    return [majority, *others[:MAX_GROUPS], *([_Group("", rest)] if rest else [])]


def _summary(majority: _Group, others: list[_Group]) -> str:
    if len(others) > 1:
        told = "; ".join(listed(group.ranks) + ("" if group.digest else " (several)") for group in others)
        return f"The most common is held by {listed(majority.ranks)}; others are held by {told}."
    (other,) = others
    tie = " As many hold the one as the other." if len(other.ranks) == len(majority.ranks) else ""
    return f"What {listed(other.ranks)} captured differs from what {listed(majority.ranks)} captured.{tie}"


def listed(ranks: Sequence[int], at_most: int = 20) -> str:
    """Ascending ranks in words: `rank 3`, `ranks 0-6, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ["-".join(map(str, run)) for run in runs[:at_most]]
    more = f" and more ({len(ranks)} in all)" if len(runs) > at_most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}{more}"


def _await(store: dist.Store, key: str, seconds: float) -> bytes | None:
    """The value of a key once some rank has set it, None where that takes longer than `seconds`."""
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.01)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        # Stores have several ways to say that time is up; whether the key is there is the same question to
        # all.
        if not store.check([key]):
            return None
    return store.get(key)


def _absent(store: dist.Store, keys: list[str]) -> list[str]:
    """Those of `keys` that nobody has set. Few requests where few are absent."""
    if store.check(keys):
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    return _absent(store, keys[:half]) + _absent(store, keys[half:])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
