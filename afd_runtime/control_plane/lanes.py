# SPDX-License-Identifier: Apache-2.0
"""The attention ranks attached to one FFN rank, and which of them are in which active step.

No lock of its own: the control plane calls every method inside its lock, on the watcher thread or on the loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from afd_runtime.control_plane.cells import AbortCell
from afd_runtime.control_plane.messages import Abort, Aborted, Message, Order, Participant
from afd_runtime.control_plane.transport import Link
from afd_runtime.errors import AFDProtocolError
from afd_runtime.event_log import EventLog
from afd_runtime.protocol import Event
from afd_runtime.window import Window

logger = logging.getLogger("afd_runtime.ffn")


@dataclass(eq=False)
class AttachedRank:
    """One attached attention rank and its windows.

    given_up, announced: by stage, the last step that the rank gave up and the last one that it announced (-1: none).
    lost: why it is gone, or None. bells: its doorbells, mapped here, where ranks ring them.
    """

    attention_rank: int
    session: int
    link: Link
    request: Window
    reply: Window
    given_up: list[int]
    announced: list[int]
    lost: str | None = None
    bells: Window | None = None

    def in_step(self, stage: int, lane_step: int) -> bool:
        """Whether this step of this rank can still be served."""
        return self.lost is None and lane_step > self.given_up[stage]

    def close(self) -> None:
        """Frees the windows."""
        self.request.close()
        self.reply.close()
        if self.bells is not None:
            self.bells.close()


Member = tuple[AttachedRank, Participant]


@dataclass(eq=False)
class ActiveStep:
    """A step that the loop is in. abort: a flag for each rank in ``served``; members: the lanes still in it."""

    order: Order
    abort: AbortCell
    served: Sequence[int]
    members: dict[int, Member] = field(default_factory=dict)

    def end_wait(self, attention_rank: int) -> None:
        """Ends the wait for one lane."""
        self.abort.set(self.served.index(attention_rank))

    def has_left(self, attention_rank: int) -> bool:
        """Whether a member was lost or gave the step up."""
        lane, participant = self.members[attention_rank]
        return not lane.in_step(self.order.stage, participant.lane_step)


class LaneTable:
    """Attached ranks and active steps. ``send`` takes (link, message). log: of the FFN rank, or None."""

    def __init__(self, name: str, send: Callable[[Link, Message], None], log: EventLog | None = None) -> None:
        self.name, self._send, self._log = name, send, log
        self.ranks: dict[int, AttachedRank] = {}
        self._active: dict[int, ActiveStep] = {}

    def of(self, link: Link) -> AttachedRank:
        """The rank that is attached through ``link``. Raises ``AFDProtocolError`` where none is."""
        for lane in self.ranks.values():
            if lane.link is link:
                return lane
        raise AFDProtocolError(f"{link.name} is not attached")

    def enter(self, order: Order, abort: AbortCell, served: Sequence[int]) -> list[Member]:
        """The lanes of ``order`` that are served here and still in it; from now on a loss among them sets its flag.

        served: the attention ranks of this FFN rank; ``abort`` has a flag for each.
        """
        step = ActiveStep(order, abort, served)
        for participant in order.participants:
            lane = self.ranks.get(participant.attention_rank)
            if lane and lane.session == participant.session and lane.in_step(order.stage, participant.lane_step):
                step.members[participant.attention_rank] = (lane, participant)
                self._note(Event.ANNOUNCE, lane, order.stage, participant.lane_step)
        abort.clear()
        if step.members:
            self._active[order.stage] = step
        return list(step.members.values())

    def is_abandoned(self, stage: int) -> bool:
        """Whether the stage is in a step that every lane has left."""
        step = self._active.get(stage)
        return step is not None and all(step.has_left(rank) for rank in step.members)

    def take_losses(self, stage: int) -> list[tuple[int, str]]:
        """(attention rank, why) of the lanes that left the active step; the loop touches their slots no more."""
        step = self._active[stage]
        return [(rank, self._remove(step, rank)) for rank in list(step.members) if step.has_left(rank)]

    def drop(self, stage: int, attention_rank: int, reason: str, layer: int | None) -> None:
        """Takes a lane out of the active step and tells its attention rank why."""
        step = self._active[stage]
        if step.has_left(attention_rank):  # an abort or a loss came first: it is what the peer waits to see confirmed
            self._remove(step, attention_rank)
            return
        lane, participant = step.members.pop(attention_rank)
        lane.given_up[stage] = max(lane.given_up[stage], participant.lane_step)
        self._note(Event.ABORT, lane, stage, participant.lane_step)
        self._send(lane.link, Abort(stage, participant.lane_step, reason, layer))

    def leave(self, stage: int) -> None:
        """The loop is done with the active step of this stage."""
        step = self._active.get(stage)
        if step is None:
            return
        for rank in list(step.members):
            if step.has_left(rank):
                self._remove(step, rank)
        del self._active[stage]

    def give_up(self, lane: AttachedRank, message: Abort) -> None:
        """The rank gave a step up: confirmed now, or by the loop once it has let go of the slots."""
        dropped = lane.given_up[message.stage] >= message.lane_step
        lane.given_up[message.stage] = max(lane.given_up[message.stage], message.lane_step)
        step = self._active.get(message.stage)
        member = step.members.get(lane.attention_rank) if step else None
        if step is not None and member is not None and member[0] is lane and step.has_left(lane.attention_rank):
            step.end_wait(lane.attention_rank)
        else:
            self._note_given_up(lane, message.stage, message.lane_step, known=dropped)
            self._send(lane.link, Aborted(message.stage, message.lane_step))

    def forget(self, lane: AttachedRank, reason: str) -> None:
        """The rank is gone: its place is free, its steps go on without it, its memory goes with the last of them."""
        lane.lost = reason
        self.ranks.pop(lane.attention_rank, None)
        for step in self._active.values():
            if any(member is lane for member, _ in step.members.values()):
                step.end_wait(lane.attention_rank)
        for stage in set(range(len(lane.given_up))) - self._stages_of(lane):
            self._note(Event.LOSE, lane, stage, lane.announced[stage])
        self._free(lane)
        logger.info("%s: attention rank %d left: %s", self.name, lane.attention_rank, reason)

    def _remove(self, step: ActiveStep, attention_rank: int) -> str:
        lane, _ = step.members.pop(attention_rank)
        if lane.lost is None:
            self._note_given_up(lane, step.order.stage, lane.given_up[step.order.stage])
            # the newest step it gave up: it may have given up the next one too before the loop let go of this one
            self._send(lane.link, Aborted(step.order.stage, lane.given_up[step.order.stage]))
            return "gave the step up"
        self._note(Event.LOSE, lane, step.order.stage, lane.announced[step.order.stage])
        self._free(lane)
        return lane.lost

    def _free(self, lane: AttachedRank) -> None:
        if not self._stages_of(lane):
            lane.close()

    def _stages_of(self, lane: AttachedRank) -> set[int]:
        """The stages whose active step the rank is in."""
        return {
            stage for stage, step in self._active.items() if any(member is lane for member, _ in step.members.values())
        }

    def _note(self, event: Event, lane: AttachedRank, stage: int, lane_step: int, exchange: int = 0) -> None:
        if self._log is not None:
            self._log.note(event, (lane.attention_rank, stage), max(0, lane_step), exchange, session=lane.session)

    def _note_given_up(self, lane: AttachedRank, stage: int, lane_step: int, known: bool = False) -> None:
        if self._log is not None:
            self._log.note_given_up((lane.attention_rank, stage), lane_step, session=lane.session, known=known)
