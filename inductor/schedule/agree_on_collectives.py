"""One list of collectives on all ranks, after the passes that merge, drop and rewrite them.

Ranks have agreed on the collectives that they captured, and not on what they compute between those. Passes look at
both: collectives are merged where nothing is computed between them, and a gather that nothing reads is dropped. So
ranks compare what their passes came to. If they came to different lists, all of them compile the step again without
these passes, and keep every collective as it was captured. A schedule may still merge and reorder those, because ranks
agree on it (:mod:`weft.inductor.schedule.agree_on_schedule`).

A rank may capture a step again alone, when a size changed on that rank only. Nobody is asked where its passes come to a
list that all ranks agreed on before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.graph import StepGraph
from weft.inductor.graph.collectives import payload_of, shared_operands
from weft.inductor.graph.faults import LeftOut

log = logging.getLogger(__name__)

Node = torch.fx.Node


class AgreedCollectives:
    """The lists of collectives that ranks agreed on for one step with the same captured collectives and options.

    Args:
        linked: whether these collectives link all ranks to each other.
        announce: called before ranks compile together, if it is not for the first time: it raises where other ranks do
            not compile now.

    Attributes:
        linked, announce: as given.
        issued: what names the list of the form that was compiled last.
        left_out: what ranks left out of that compilation because of faults.
    """

    def __init__(self, linked: bool = False, announce: Callable[[], object] = lambda: None) -> None:
        self.linked = linked
        self.announce = announce
        self.issued = ""
        self.left_out = LeftOut()
        self._lists: set[str] = set()

    @property
    def is_new(self) -> bool:
        """Whether ranks have agreed on no list yet, so that all of them compile now."""
        return not self._lists

    def all_issue(self, step: StepGraph, stage: str, *, ordered: bool) -> bool:
        """Whether all ranks' passes came to the collectives of ``step``. Where not, no rank may issue them, and all
        compile the step again with each as it was captured.

        Ranks come together here, but for lists that they agreed on before.

        Args:
            step: the graph after all passes.
            stage: what else these passes depended on.
            ordered: whether the collectives are issued in the order of the graph, and not in one that ranks agree on
                later.

        Raises:
            errors.ScheduleTimeout: a rank did not come within ``knobs.peer_timeout_s`` seconds.
            errors.StoreLost: the process that holds the store is gone.
        """
        lines = [_line(node) for node in step.collectives()]
        # Where ranks agree on a schedule afterwards, the order is decided there, so a different order of the same
        # collectives is no reason to give up the passes.
        digest = hashlib.sha256("\n".join(lines if ordered else sorted(lines)).encode()).hexdigest()
        own, captured = f"{digest[:16]} {stage}", f"as captured {stage}"
        # "As captured" needs no digest: ranks agreed on what they captured before they compiled.
        if own not in self._lists and captured not in self._lists:
            # The other ranks may be in the middle of a step that they compiled long ago, and would never come to this
            # rendezvous. `announce` raises then, instead of waiting for the timeout.
            if self._lists:
                self.announce()
            self._lists.add(own if _all_have(digest) else captured)
        # Also where nobody was asked: the list of an earlier compilation tells.
        self.issued = own if own in self._lists else captured
        return self.issued == own

    def adopt(self, issued: str) -> None:
        """Agree on the list that ``issued`` was in an earlier process: all ranks have read what they compiled there."""
        self._lists.add(issued)
        self.issued = issued


def rank_that_differs(place: str, own: str) -> str | None:
    """A rank with another text than the first rank, the same one on all ranks; None where all have the same.

    All ranks must call this in the same order; ``place`` tells it from other rendezvous of all ranks.

    Raises:
        errors.ScheduleTimeout: a rank did not come within ``knobs.peer_timeout_s`` seconds.
        errors.StoreLost: the process that hosts the store is gone.
    """
    if torch_adapter.world_size() == 1 or current_fake_world() is not None:
        return None
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    late = lambda _: errors.ScheduleTimeout(rank, "some ranks", knobs.peer_timeout_s)
    rendezvous = StoreRendezvous(place, ranks, rank, knobs.peer_timeout_s, late)
    # Everyone compares with the first rank: a handful of requests per rank, whatever the world size.
    first = rendezvous.broadcast(own)
    odd = rendezvous.first_objection(None if own == first else str(rank))
    # The store lives as long as the job, so every comparison would leave its keys there.
    rendezvous.leave([], ["first", "objection", "answered", "all"])
    return odd


def _all_have(own: str) -> bool:
    odd = rank_that_differs("collectives", own)
    if odd is None:
        return True
    log.log(
        logging.WARNING if dist.get_rank() == 0 else logging.DEBUG,  # all ranks have found the same
        "rank %s computes something else between the collectives of the step than rank 0: no pass merges, drops or "
        "rewrites them on any rank. Compute the same on all ranks for the fastest step",
        odd,
    )
    return False


def _line(node: Node) -> str:
    """What partners have to know of a collective."""
    # `members` are positions among the captured collectives. Without them, two all-reduces of equal sizes that are
    # swapped on one rank would look the same, and give wrong sums.
    sizes = [_static(used.meta["val"].numel()) for used in payload_of(node)]
    # Where each rank computes its part of the rows for all, ranks must compute the same, down to the constants.
    rows = node.meta.get("agreed_rows", "")
    return f"{node.meta.get('members')} {node.target} {shared_operands(node)} {sizes} {rows}"


def _static(size: int | torch.SymInt) -> str:
    # A symbolic size is a number of this rank's call. Ranks compare those for each call, not here.
    return str(size) if isinstance(size, int) else "?"
