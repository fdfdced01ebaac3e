"""Ranks agree on what a compilation leaves out.

A left-out pass may change which collectives a graph issues, and in which order. So where a step communicates, ranks
come to a checkpoint in the store before each thing that they do together, and at the end of a compilation. Where one of
them has a fault, all compile again without the same parts.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.fake.fake_world import current_fake_world
from weft.inductor.graph.faults import LeftOut
from weft.rank_watch import listed


class Objection(Exception):
    """A rank cannot go on with this attempt to compile. The same on all ranks; never seen by users.

    Attributes:
        rank: of them.
        left_out: what all ranks are to leave out in addition.
    """

    def __init__(self, rank: int, left_out: LeftOut) -> None:
        super().__init__(rank, left_out)
        self.rank = rank
        self.left_out = left_out


class Checkpoints:
    """The checkpoints of one compilation, as one rank sees them. All ranks come to each of them.

    Args:
        communicates: whether the step has collectives.
        together: whether all ranks compile this step now.

    Attributes:
        rank: this one.
        alone: whether other ranks run the same collectives and cannot be asked now.
    """

    def __init__(self, communicates: bool, together: bool) -> None:
        # In a fake world there is nobody to ask.
        peers = communicates and torch_adapter.world_size() > 1 and current_fake_world() is None
        # Leaving a part out can change the list of collectives. A rank that nobody answers must not do that.
        self.alone = peers and not together
        self._active = peers and together
        self.rank = dist.get_rank() if peers else 0

    def arrive(self) -> None:
        """Return once all ranks have come without a fault.

        Raises:
            Objection: a rank has one. The same on all ranks.
            RankCannotCompile: a rank gave up.
            ScheduleTimeout, StoreLost: a rank did not come, or the store is gone.
        """
        self._answer(None)

    def object(self, left_out: LeftOut) -> Objection:
        """Come with a fault, for which ``left_out`` is to be left out. The objection that counts, the same on all
        ranks. Raises as :meth:`arrive`."""
        if not self._active:
            return Objection(self.rank, left_out)
        try:
            self._answer(json.dumps([self.rank, left_out.text()]))
        except Objection as chosen:
            return chosen
        raise AssertionError("an objection that no rank has seen")

    def give_up(self, error: Exception) -> None:
        """Tell the other ranks that this one raises ``error``, without waiting for them."""
        # These three come from the other ranks, or from the lack of them: there is nobody to tell.
        told = isinstance(error, (errors.RankCannotCompile, errors.ScheduleTimeout, errors.StoreLost))
        if self._active and not told:
            rendezvous = self._rendezvous()
            # In this order: whoever reads the answers finds `failed`. The empty objection only makes the others look
            # for it. The rank does not wait: it is about to raise, and others may be compiling for minutes.
            rendezvous.post("failed", json.dumps([self.rank, f"{type(error).__name__}: {error}"]))
            rendezvous.answer("")

    def _answer(self, objection: str | None) -> None:
        if not self._active:
            return
        rendezvous = self._rendezvous()
        # Answers are only counted, so they cannot tell who is late. These keys can.
        rendezvous.post(f"here/{self.rank}", "")
        chosen = rendezvous.first_objection(objection)
        if chosen is None:
            rendezvous.leave([f"here/{self.rank}"], ["answered", "all"])
            return
        # Before the objection: a rank that gives up will not take part in another attempt, whatever is left out.
        if not rendezvous.absent(["failed"]):
            raise errors.RankCannotCompile(*json.loads(rendezvous.read_all(["failed"])[0]))
        # One objection counts, the same for all ranks. A rank with another fault objects again in the next attempt.
        rank, left_out = json.loads(chosen)
        raise Objection(rank, LeftOut.read(left_out))

    def _rendezvous(self) -> StoreRendezvous:
        ranks = range(dist.get_world_size())

        def late(keys: list[str]) -> Exception:
            missing = rendezvous.absent([f"here/{rank}" for rank in ranks])
            return errors.ScheduleTimeout(
                self.rank, listed([int(key.partition("/")[2]) for key in missing]), knobs.peer_timeout_s
            )

        # Numbered by how often a rank has come: attempts and checkpoints keep apart without names of their own.
        rendezvous = StoreRendezvous("compilation", ranks, self.rank, knobs.peer_timeout_s, late)
        return rendezvous
