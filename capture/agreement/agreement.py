"""Agreement: all ranks hold the same graph, or every rank raises an error that shows the difference.

Ranks compare the SHA-256 of their graph's text through the store of the process group. They never use a collective,
because a collective would hang if the graphs differ. The last rank to arrive (a counter in the store tells it) reads
all hashes and publishes a verdict; the other ranks wait for that one key. So where all agree, each rank makes a few
small requests, for any world size. Texts are sent only after a mismatch. One rank of the majority posts its text, the
first rank of each other group posts its difference from that text, and all others read these few lines.

With its hash a rank posts its claims (claims.py), on which members of one process group must agree beside the text.

A rank that died or does not arrive is found by a deadline. The rank whose deadline passes first publishes which ranks
are missing. The verdict that is published first counts, so all ranks raise the same error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement.claims import Claims, Disagreement, disagreement, linked, shared_orders
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.agreement.text_difference import difference, without_remarks
from weft.capture.fake.fake_world import current_fake_world
from weft.rank_watch import listed

log = logging.getLogger(__name__)

# Seconds to wait for a verdict after a deadline, and for a difference after a verdict.
GRACE_S = 5.0

COMPILES_AGAIN = "compiles again"
"""In the text of a rank that compiles a step again whose captured collectives are those of before."""
_OTHER_SIZES = (
    f"A rank that {COMPILES_AGAIN} met an argument of another size, alone; on GPUs all ranks schedule a step together. "
    "Mark that dimension with weft.mark_dynamic before the first call, on all ranks, or pad batches to one size"
)
_UNKNOWN = "(the difference is not known: rank {} left before it sent its part)"

# Number of groups besides the majority that are reported separately; further groups are reported as one.
MAX_GROUPS = 8


def agree(
    name: str,
    text: str,
    claims: Claims | None = None,
    *,
    place: tuple[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> bool:
    """Return once every rank of `group` (default: all ranks) has called this with an equal `text`.

    In a fake world, and without a process group, it returns at once.

    Args:
        name: of the comparison. Calls are matched by name and by how often each rank has called with this name.
        text: of this rank. Remarks in it (see text_difference.py) are shown and not compared.
        claims: what members of one process group must hold alike beside the text.
        place: what calls are matched by, in place of the name and the number of calls.
        group: the ranks that compare.
        timeout_s: seconds from this rank's call; default: the knob agreement_timeout_s.
        store, rank, world: used instead of those of the process group; all three or none.

    Returns:
        Whether the process groups that ranks claim link all of them to each other, directly or through other ranks.

    Raises:
        errors.GraphMismatch: on every rank: texts differ. The message names the ranks and shows the difference.
        errors.GroupMismatch: on every rank: texts are equal, and claims exclude each other.
        errors.AgreementTimeout: on every rank: ranks did not arrive in time. The message names them.
        errors.StoreLost: the process that holds the store is gone.
    """
    if store is None:
        if not dist.is_initialized() or current_fake_world() is not None:
            log.debug("%s: nobody to compare this graph with", name)
            return False
        store, rank = torch_adapter.default_store(), dist.get_rank()
        ranks = dist.get_process_group_ranks(group)
    else:
        assert rank is not None
        assert world is not None
        ranks = list(range(world))
    if len(ranks) == 1:
        return False
    start = time.monotonic()
    timeout_s = knobs.agreement_timeout_s if timeout_s is None else timeout_s
    where, number = place or (name, None)
    rendezvous = StoreRendezvous(f"agreement/{where}", ranks, rank, timeout_s, store=store, number=number)
    links = _TextComparison(name, rendezvous, text, claims or Claims()).run()
    log.debug(
        "%s: %d ranks agree on capture %d (%.3f s)", name, len(ranks), rendezvous.number, time.monotonic() - start
    )
    return links


@dataclass(frozen=True)
class _TextComparison:
    """One comparison, as one rank sees it."""

    name: str
    rendezvous: StoreRendezvous
    text: str
    claims: Claims

    def run(self) -> bool:
        """Return what :func:`agree` says where all texts are equal; otherwise raise what it says."""
        here = self.rendezvous
        here.post(f"hash/{here.rank}", json.dumps([_digest(self.text), self.claims.posted()]))
        is_last = here.count("arrived") == len(here.ranks)
        verdict = self._judge() if is_last else self._verdict()
        if "missing" in verdict:
            missing: list[int] = verdict["missing"]
            raise errors.AgreementTimeout(
                self.name, here.number, here.rank, missing, listed(missing), verdict["by"], verdict["waited"]
            )
        groups = [_RankGroup(digest, ranks) for digest, ranks in verdict["groups"]]
        if len(groups) > 1:
            self._show_mismatch(groups)
        if "disagreement" in verdict:
            found = Disagreement(*verdict["disagreement"])
            raise errors.GroupMismatch(
                self.name, here.rank, found.ranks, listed(found.ranks), found.what, self._line_with(found.concerns)
            )
        here.leave([f"hash/{here.rank}"], ["arrived", "judges", "verdict"])
        return verdict["linked"]

    def _verdict(self) -> dict[str, Any]:
        """Wait for the verdict. After the deadline this rank publishes it, unless another rank has begun to."""
        found = self.rendezvous.read("verdict")
        if found is None and self.rendezvous.count("judges") > 1:
            found = self.rendezvous.read("verdict", GRACE_S)
        return self._judge() if found is None else json.loads(found)

    def _judge(self) -> dict[str, Any]:
        """Publish the missing ranks, or the groups of ranks with equal texts. The first published verdict counts."""
        here = self.rendezvous
        keys = {f"hash/{rank}": rank for rank in here.ranks}
        missing = [keys[key] for key in here.absent(list(keys))]
        if missing:
            verdict: dict[str, Any] = {"missing": missing, "by": here.rank, "waited": here.timeout_s}
        else:
            posted = [json.loads(each) for each in here.read_all(list(keys))]
            orders = shared_orders([claims for _, claims in posted])
            groups = _groups(
                [f"{digest} {order}" for (digest, _), order in zip(posted, orders, strict=True)], here.ranks
            )
            verdict = {"groups": [(group.digest, group.ranks) for group in groups]}
            if len(groups) == 1:
                claims = dict(zip(here.ranks, (claims for _, claims in posted), strict=True))
                found = disagreement(claims)
                verdict |= {"linked": linked(claims)} if found is None else {"disagreement": found}
        return json.loads(here.post_first("verdict", json.dumps(verdict)))

    def _line_with(self, words: str) -> str:
        """The first line of the text that holds these words."""
        return next((line for line in self.text.splitlines() if words in line), "")

    def _show_mismatch(self, groups: list[_RankGroup]) -> None:
        """Raise with the difference. The first rank of each group computes it, the others of the group read it.

        Ranks of the majority see the difference of the first other group.
        """
        majority, *others = groups
        here = self.rendezvous
        shown_group = next((group for group in others if group.digest and here.rank in group.ranks), others[0])
        if here.rank == majority.first:
            here.post("text", base64.b64encode(zlib.compress(self.text.encode())).decode())
        if here.rank == shown_group.first:
            shown = self._difference(majority.first)
            here.post(f"difference/{here.rank}", shown)
        else:
            shown = here.read(f"difference/{shown_group.first}", 2 * GRACE_S) or _UNKNOWN.format(shown_group.first)
        if COMPILES_AGAIN in shown:
            shown += f"\n{_OTHER_SIZES}"
        self._wait_for_readers()
        differing = sorted(rank for group in others for rank in group.ranks)
        raise errors.GraphMismatch(self.name, here.rank, differing, _summary(majority, others), shown)

    def _wait_for_readers(self) -> None:
        """The error of a rank that holds the store ends it: no rank raises before all have read the difference."""
        with contextlib.suppress(errors.StoreLost):  # the holder knows that all have read it
            if self.rendezvous.count("readers") == len(self.rendezvous.ranks):
                self.rendezvous.post("all have read", "")
            else:
                self.rendezvous.read("all have read", GRACE_S)

    def _difference(self, reference: int) -> str:
        packed = self.rendezvous.read("text", GRACE_S)
        if packed is None:
            return _UNKNOWN.format(reference)
        text = zlib.decompress(base64.b64decode(packed)).decode()
        return difference(text, self.text, f"rank {reference}", f"rank {self.rendezvous.rank}")


@dataclass(frozen=True)
class _RankGroup:
    """Ranks, ascending, whose texts have the same hash, and which communicate parameters in the same order."""

    digest: str
    ranks: list[int]

    @property
    def first(self) -> int:
        return self.ranks[0]


def _groups(hashes: Sequence[str], ranks: Sequence[int]) -> list[_RankGroup]:
    """Ranks grouped by hash: the largest group first, then the others by their lowest rank.

    Of equally large groups the one with the lowest rank is the first. Groups beyond MAX_GROUPS become one without a
    hash.
    """
    by_hash: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in zip(ranks, hashes, strict=True):
        by_hash[digest].append(rank)
    groups = [_RankGroup(digest, sorted(found)) for digest, found in by_hash.items()]
    groups.sort(key=lambda group: group.first)
    majority = max(groups, key=lambda group: len(group.ranks))
    others = [group for group in groups if group is not majority]
    rest = sorted(rank for group in others[MAX_GROUPS:] for rank in group.ranks)
    return [majority, *others[:MAX_GROUPS], *([_RankGroup("", rest)] if rest else [])]


def _summary(majority: _RankGroup, others: list[_RankGroup]) -> str:
    if len(others) > 1:
        described = "; ".join(listed(group.ranks) + ("" if group.digest else " (several)") for group in others)
        return f"The most common is held by {listed(majority.ranks)}; others are held by {described}."
    (other,) = others
    tie = " As many hold the one as the other." if len(other.ranks) == len(majority.ranks) else ""
    return f"What {listed(other.ranks)} captured differs from what {listed(majority.ranks)} captured.{tie}"


def _digest(text: str) -> str:
    return hashlib.sha256(without_remarks(text).encode()).hexdigest()
