# SPDX-License-Identifier: Apache-2.0
"""The exchange protocol as one pure table: states, transitions and slot access of a lane, seen from both sides.

A pair is (attention rank, FFN rank, stage). The attention side has one state per pair; the FFN side has one per lane
and FFN rank. ``Replay`` checks an event log against the table and against what must hold across the two sides.
``models/generate.py`` turns the same table into the model that spin searches; ``python -m afd_runtime.protocol
--markdown`` prints it for ``docs/protocol.md``. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
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
    """An event log breaks the protocol. index: of the event in the sorted log; event: that event."""

    def __init__(self, message: str, index: int = -1, event: LogEvent | None = None) -> None:
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


class LogEvent(NamedTuple):
    """One entry of an event log.

    time: any clock that all ranks share; a publish is stamped before its store, a see after its load. rank: ``"A0"``
    or ``"F1"``. lane: (attention rank, stage). step: of the lane, exchange: in the step, both from 0. peer: on the
    attention side the FFN rank that the event concerns, None for all attached ones. session: of an attach, None counts.
    """

    time: float
    rank: str
    lane: Lane
    step: int
    exchange: int
    event: str
    peer: int | None = None
    session: int | None = None


@dataclass
class _End:
    """One side of one pair. word: (step, exchange) that it is in."""

    state: State = State.DETACHED
    session: int = 0
    word: tuple[int, int] = (0, 0)
    last_step: int = -1


@dataclass
class _Cell:
    """One slot: the word that was published last, and whether the other side has seen it."""

    word: tuple[int, int] | None = None
    unread: bool = False


class Replay:
    """Checks an event log. ``check`` takes whole logs, ``feed`` one event after the other.

    Beside the table: steps of a lane grow, exchanges count 0, 1, 2 …; a word is seen only after it was published in
    the same session, and once; no slot is written over before its word was seen; a side never writes a slot while the
    other may touch it; after an abort nothing but confirm, lose, detach or attach; a lane attaches on both sides before
    its first step.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[Side, int, Lane], _End] = {}
        self._cells: dict[tuple[Slot, int, Lane], _Cell] = {}
        self._count = 0

    @classmethod
    def check(cls, log: Iterable[tuple]) -> Replay:
        """Replays a log of ``LogEvent`` or plain tuples in the order of their times. Raises ``ProtocolViolation``."""
        replay = cls()
        for entry in sorted((LogEvent(*entry) for entry in log), key=lambda entry: entry.time):
            replay.feed(entry)
        return replay

    def state(self, rank: str, lane: Lane, peer: int | None = None) -> State:
        """The state of a lane on an FFN rank (``"F1"``), or of its pair with FFN rank ``peer`` on an attention rank."""
        side, number = _parse(rank)
        key = (side, number if side is Side.FFN else peer or 0, lane)
        return self._ends[key].state if key in self._ends else State.DETACHED

    def feed(self, entry: LogEvent) -> None:
        """Takes the next event. Raises ``ProtocolViolation``."""
        index, self._count = self._count, self._count + 1
        side, number = _parse(entry.rank)
        try:
            event = Event(entry.event)
            if side is Side.FFN:
                peers = [number]
            elif entry.peer is not None:
                peers = [entry.peer]
            else:
                peers = sorted(f for s, f, lane in self._ends if s is side and lane == entry.lane)
            if side is Side.ATTENTION and number != entry.lane[0]:
                raise ProtocolViolation(f"{entry.rank} acts on a lane of attention rank {entry.lane[0]}")
            if not peers:
                raise ProtocolViolation(f"{event.value} of a lane that never attached")
            for peer in peers:
                self._apply(side, peer, event, entry)
        except ValueError as error:
            raise ProtocolViolation(f"event {index} {tuple(entry)}: {error}", index, entry) from None

    def _apply(self, side: Side, ffn_rank: int, event: Event, entry: LogEvent) -> None:
        end = self._ends.setdefault((side, ffn_rank, entry.lane), _End())
        other = self._ends.get((_other(side), ffn_rank, entry.lane), _End())
        before, word = end.word, (entry.step, entry.exchange)
        end.state = step(side, end.state, event)
        if event is Event.ATTACH:
            end.session = end.session + 1 if entry.session is None else entry.session
            end.word, end.last_step = (0, 0), -1
            if side is Side.ATTENTION:
                self._cells.update({(slot, ffn_rank, entry.lane): _Cell() for slot in Slot})
        elif event is Event.ANNOUNCE:
            if entry.step <= end.last_step or entry.exchange != 0:
                raise ProtocolViolation(f"step {word} after step {end.last_step}; steps grow, exchanges start at 0")
            if side is Side.ATTENTION and other.session != end.session:
                raise ProtocolViolation(f"announced in session {end.session}; FFN rank {ffn_rank} has {other.session}")
            end.last_step, end.word = entry.step, word
        elif event is Event.NEXT_EXCHANGE:
            end.word = (before[0], before[1] + 1)
            if word != end.word:
                raise ProtocolViolation(f"exchange {word} follows {before}; expected {end.word}")
        elif (end.state in IN_STEP[side] or event is Event.END_STEP) and word != before:
            raise ProtocolViolation(f"{event.value} of {word} while the lane is in {before}")
        if other.session == end.session:  # otherwise one of them still uses the windows of a session that has ended
            self._touch(side, event, ffn_rank, entry.lane, end.word)
            pair = (end.state, other.state) if side is Side.ATTENTION else (other.state, end.state)
            slot = conflict(*pair)
            if slot is not None:
                raise ProtocolViolation(f"both sides may touch the {slot.value} slot: {pair[0].value}, {pair[1].value}")

    def _touch(self, side: Side, event: Event, ffn_rank: int, lane: Lane, word: tuple[int, int]) -> None:
        slot = Slot.REQUEST if event in (Event.PUBLISH_REQUEST, Event.SEE_REQUEST) else Slot.REPLY
        cell = self._cells.setdefault((slot, ffn_rank, lane), _Cell())
        if event in (Event.PUBLISH_REQUEST, Event.PUBLISH_REPLY):
            if cell.unread:
                raise ProtocolViolation(f"the {slot.value} slot is overwritten before {cell.word} was seen")
            cell.word, cell.unread = word, True
        elif event in (Event.SEE_REQUEST, Event.SEE_REPLY):
            if (cell.word, cell.unread) != (word, True):
                held = f"{cell.word} ({'unread' if cell.unread else 'seen before'})" if cell.word else "nothing"
                raise ProtocolViolation(f"saw {word} in the {slot.value} slot, which holds {held}")
            cell.unread = False
        elif event is Event.CONFIRM and side is Side.FFN:
            for either in Slot:
                self._cells.setdefault((either, ffn_rank, lane), _Cell()).unread = False


def _other(side: Side) -> Side:
    return Side.FFN if side is Side.ATTENTION else Side.ATTENTION


def _parse(rank: str) -> tuple[Side, int]:
    if rank[:1] not in ("A", "F") or not rank[1:].isdigit():
        raise ProtocolViolation(f"rank is {rank!r}; allowed: 'A0', 'A1', …, 'F0', 'F1', …")
    return (Side.ATTENTION if rank[0] == "A" else Side.FFN), int(rank[1:])


def main(arguments: list[str]) -> int:
    """Prints the table as markdown."""
    if arguments != ["--markdown"]:
        print("usage: python -m afd_runtime.protocol --markdown", file=sys.stderr)
        return 2
    from afd_runtime.protocol_page import markdown

    print(markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
