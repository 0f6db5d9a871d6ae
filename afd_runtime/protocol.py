# SPDX-License-Identifier: Apache-2.0
"""The exchange protocol as one pure table: states, transitions and slot access of a lane, seen from both sides.

A pair is (attention rank, FFN rank, stage). The attention side has one state per pair; the FFN side has one per lane
and FFN rank. ``afd_runtime.replay`` checks an event log against the table and against what must hold across the two
sides. ``models/generate.py`` turns the same table into the model that spin searches; ``python -m afd_runtime.protocol
--markdown`` prints it for ``docs/protocol.md``, ``--replay DIR`` checks the logs in DIR. Standard library only.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import NamedTuple

Lane = tuple[int, int]  # (attention rank, stage)


class Side(str, Enum):
    """Who looks at the pair."""

    ATTENTION = "attention"
    FFN = "ffn"


class State(str, Enum):
    """State of a pair, from one side. Which states a side has: ``STATES``."""

    DETACHED = "detached"
    IDLE = "idle"
    ANNOUNCED = "announced"
    REQUEST_PUBLISHED = "request_published"
    COMPUTING = "computing"
    REPLY_PUBLISHED = "reply_published"
    COMBINED = "combined"
    ABORTED = "aborted"
    LOST = "lost"


class Event(str, Enum):
    """What moves a pair from one state to the next."""

    ATTACH = "attach"
    ANNOUNCE = "announce"
    PUBLISH_REQUEST = "publish_request"
    SEE_REQUEST = "see_request"
    PUBLISH_REPLY = "publish_reply"
    SEE_REPLY = "see_reply"
    NEXT_EXCHANGE = "next_exchange"
    END_STEP = "end_step"
    ABORT = "abort"
    CONFIRM = "confirm"
    LOSE = "lose"
    DETACH = "detach"


class Slot(str, Enum):
    """The two slots of a pair: the request slot is FFN memory, the reply slot attention memory."""

    REQUEST = "request"
    REPLY = "reply"


class Access(NamedTuple):
    """What a side does to a slot."""

    slot: Slot
    writes: bool


class Transition(NamedTuple):
    """One row of the table."""

    side: Side
    source: State
    event: Event
    target: State


_A, _F, _S, _E = Side.ATTENTION, Side.FFN, State, Event
IN_STEP = {
    _A: (_S.ANNOUNCED, _S.REQUEST_PUBLISHED, _S.COMBINED),
    _F: (_S.ANNOUNCED, _S.COMPUTING, _S.REPLY_PUBLISHED),
}
STATES = {side: (_S.DETACHED, _S.IDLE, *IN_STEP[side], _S.ABORTED, _S.LOST) for side in Side}
ACCESS: dict[tuple[Side, State], tuple[Access, ...]] = {
    (_A, _S.ANNOUNCED): (Access(Slot.REQUEST, True),),
    (_F, _S.COMPUTING): (Access(Slot.REQUEST, False), Access(Slot.REPLY, True)),
    (_A, _S.COMBINED): (Access(Slot.REPLY, False),),
}
TABLE: tuple[Transition, ...] = (
    Transition(_A, _S.IDLE, _E.ANNOUNCE, _S.ANNOUNCED),
    Transition(_A, _S.ANNOUNCED, _E.PUBLISH_REQUEST, _S.REQUEST_PUBLISHED),
    Transition(_A, _S.REQUEST_PUBLISHED, _E.SEE_REPLY, _S.COMBINED),
    Transition(_A, _S.COMBINED, _E.NEXT_EXCHANGE, _S.ANNOUNCED),
    Transition(_A, _S.COMBINED, _E.END_STEP, _S.IDLE),
    Transition(_F, _S.IDLE, _E.ANNOUNCE, _S.ANNOUNCED),
    Transition(_F, _S.ANNOUNCED, _E.SEE_REQUEST, _S.COMPUTING),
    Transition(_F, _S.COMPUTING, _E.PUBLISH_REPLY, _S.REPLY_PUBLISHED),
    Transition(_F, _S.REPLY_PUBLISHED, _E.NEXT_EXCHANGE, _S.ANNOUNCED),
    Transition(_F, _S.REPLY_PUBLISHED, _E.END_STEP, _S.IDLE),
    Transition(_F, _S.IDLE, _E.ABORT, _S.ABORTED),  # given up before the order was entered
    *(Transition(side, state, _E.ABORT, _S.ABORTED) for side in Side for state in IN_STEP[side]),
    *(Transition(side, _S.ABORTED, _E.CONFIRM, _S.IDLE) for side in Side),
    *(Transition(side, s, _E.LOSE, _S.LOST) for side in Side for s in (_S.IDLE, *IN_STEP[side], _S.ABORTED)),
    *(Transition(side, s, _E.DETACH, _S.DETACHED) for side in Side for s in STATES[side][1:]),
    *(Transition(side, s, _E.ATTACH, _S.IDLE) for side in Side for s in (_S.DETACHED, _S.LOST)),
)
NEXT = {(t.side, t.source, t.event): t.target for t in TABLE}


class ProtocolViolation(ValueError):
    """An event log breaks the protocol. index: of the event in the sorted log; event: that event, a ``LogEvent``."""

    def __init__(self, message: str, index: int = -1, event: tuple | None = None) -> None:
        super().__init__(message)
        self.index, self.event = index, event


def step(side: Side, state: State, event: Event) -> State:
    """The state after ``event``. Raises ``ProtocolViolation`` where the table has no such transition."""
    try:
        return NEXT[side, state, event]
    except KeyError:
        allowed = ", ".join(e.value for s, source, e in NEXT if s is side and source is state)
        raise ProtocolViolation(
            f"{event.value} in state {state.value} of the {side.value} side; allowed: {allowed}"
        ) from None


def conflict(attention: State, ffn: State) -> Slot | None:
    """The slot that one side writes while the other may read or write it, or None."""
    for mine in ACCESS.get((Side.ATTENTION, attention), ()):
        for theirs in ACCESS.get((Side.FFN, ffn), ()):
            if mine.slot is theirs.slot and (mine.writes or theirs.writes):
                return mine.slot
    return None


def main(arguments: list[str]) -> int:
    """Prints the table as markdown, or checks event logs."""
    if arguments == ["--markdown"]:
        from afd_runtime.protocol_page import markdown

        print(markdown(), end="")
        return 0
    if len(arguments) == 2 and arguments[0] == "--replay":
        from afd_runtime.replay import replay_directory

        return replay_directory(arguments[1])
    print("usage: python -m afd_runtime.protocol --markdown | --replay DIR", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
