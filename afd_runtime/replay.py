# SPDX-License-Identifier: Apache-2.0
"""``Replay``: checks event logs against the protocol's table and against what must hold across the two sides.

Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from afd_runtime.protocol import IN_STEP, NEXT, Event, Lane, ProtocolViolation, Side, Slot, State, conflict, step

WORD_EVENTS = (
    Event.PUBLISH_REQUEST, Event.SEE_REQUEST, Event.PUBLISH_REPLY, Event.SEE_REPLY, Event.NEXT_EXCHANGE,
)  # fmt: skip
_SLOTS = {
    Event.PUBLISH_REQUEST: Slot.REQUEST, Event.SEE_REQUEST: Slot.REQUEST,
    Event.PUBLISH_REPLY: Slot.REPLY, Event.SEE_REPLY: Slot.REPLY,
}  # fmt: skip


class LogEvent(NamedTuple):
    """One entry of an event log.

    time: any clock that all ranks share; a publish is stamped before its store, a see after its load. rank: ``"A0"``
    or ``"F1"``. lane: (attention rank, stage). step: of the lane, exchange: in the step, both from 0. peer: on the
    attention side the FFN rank that the event concerns, None for all attached ones. session: None is the one that this
    side attached last; of an attach, None counts. words: False at an attach whose words only a device sees: none of
    ``WORD_EVENTS`` is logged in that session. process: which process of the rank it is, any name.
    """

    time: float | int
    rank: str
    lane: Lane
    step: int
    exchange: int
    event: str
    peer: int | None = None
    session: int | None = None
    words: bool = True
    process: str = ""


@dataclass
class _End:
    """One side of one pair, in one session. word: (step, exchange) that it is in."""

    session: int
    process: str
    words: bool
    state: State = State.DETACHED
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
    its first step, and an FFN rank lets go of a lane's last session before it serves the next.

    A process may end at any time: its ends stay where their last event has left them, and a successor, another
    ``process`` of the rank, attaches.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[Side, int, Lane], list[_End]] = {}  # newest session last
        self._cells: dict[tuple[Slot, int, Lane, int], _Cell] = {}
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
        ends = self._ends.get((side, number if side is Side.FFN else peer or 0, lane))
        return ends[-1].state if ends else State.DETACHED

    def feed(self, entry: LogEvent) -> None:
        """Takes the next event. Raises ``ProtocolViolation``."""
        index, self._count = self._count, self._count + 1
        side, number = _parse(entry.rank)
        try:
            event = Event(entry.event)
            if side is Side.ATTENTION and number != entry.lane[0]:
                raise ProtocolViolation(f"{entry.rank} acts on a lane of attention rank {entry.lane[0]}")
            peers = self._peers(side, number, entry)
            if not peers:
                raise ProtocolViolation(f"{event.value} of a lane that never attached")
            for peer in peers:
                self._apply(side, peer, event, entry)
        except ValueError as error:
            raise ProtocolViolation(f"event {index} {tuple(entry)}: {error}", index, entry) from None

    def _peers(self, side: Side, number: int, entry: LogEvent) -> list[int]:
        if side is Side.FFN:
            return [number]
        if entry.peer is not None:
            return [entry.peer]
        return sorted(key[1] for key in self._ends if key[::2] == (side, entry.lane) and self._end(key, entry))

    def _end(self, key: tuple[Side, int, Lane], entry: LogEvent) -> _End | None:
        """The end that the event is of."""
        for end in reversed(self._ends.get(key, ())):
            if end.process == entry.process and entry.session in (None, end.session):
                return end
        return None

    def _opposite(self, side: Side, ffn_rank: int, lane: Lane, session: int) -> _End | None:
        ends = self._ends.get((_other(side), ffn_rank, lane), ())
        return next((end for end in reversed(ends) if end.session == session), None)

    def _apply(self, side: Side, ffn_rank: int, event: Event, entry: LogEvent) -> None:
        key = (side, ffn_rank, entry.lane)
        if event is Event.ATTACH:
            self._attach(key, entry)
            return
        end = self._end(key, entry) or _End(0, entry.process, True)
        before, word = end.word, (entry.step, entry.exchange)
        if not end.words:
            if event in WORD_EVENTS:
                raise ProtocolViolation(f"{event.value} in a session whose words only the device sees")
            end.state = _before(side, end.state, event)
        end.state = step(side, end.state, event)
        if event is Event.ANNOUNCE:
            self._check_announce(key, end, word)
            end.last_step, end.word = entry.step, word
        elif event is Event.NEXT_EXCHANGE:
            end.word = (before[0], before[1] + 1)
            if word != end.word:
                raise ProtocolViolation(f"exchange {word} follows {before}; expected {end.word}")
        elif (end.state in IN_STEP[side] or (event is Event.END_STEP and end.words)) and word != before:
            raise ProtocolViolation(f"{event.value} of {word} while the lane is in {before}")
        self._check_slots(key, end, event)

    def _attach(self, key: tuple[Side, int, Lane], entry: LogEvent) -> None:
        side, ffn_rank, lane = key
        ends = self._ends.setdefault(key, [])
        last = next((end for end in reversed(ends) if end.process == entry.process), None)
        session = (ends[-1].session if ends else 0) + 1 if entry.session is None else entry.session
        end = _End(session, entry.process, entry.words)
        # an FFN rank whose loop has still to let go of the lost process takes its successor in
        replaced = side is Side.FFN and last is not None and last.state in IN_STEP[side] and last.session != session
        end.state = step(side, State.DETACHED if last is None or replaced else last.state, Event.ATTACH)
        ends.append(end)
        if side is Side.ATTENTION:
            self._cells.update({(slot, ffn_rank, lane, session): _Cell() for slot in Slot})

    def _check_announce(self, key: tuple[Side, int, Lane], end: _End, word: tuple[int, int]) -> None:
        side, ffn_rank, lane = key
        if word[0] <= end.last_step or word[1] != 0:
            raise ProtocolViolation(f"step {word} after step {end.last_step}; steps grow, exchanges start at 0")
        if side is Side.ATTENTION and self._opposite(side, ffn_rank, lane, end.session) is None:
            theirs = [other.session for other in self._ends.get((Side.FFN, ffn_rank, lane), ())]
            raise ProtocolViolation(f"announced in session {end.session}; FFN rank {ffn_rank} has {theirs}")
        for other in self._ends[key]:
            if other is not end and other.process == end.process and other.state in IN_STEP[side]:
                raise ProtocolViolation(f"step {word} begins while session {other.session} is in step {other.word}")

    def _check_slots(self, key: tuple[Side, int, Lane], end: _End, event: Event) -> None:
        side, ffn_rank, lane = key
        other = self._opposite(side, ffn_rank, lane, end.session)
        if other is None:  # nobody shares the windows of this session
            return
        slots = {slot: self._cells.setdefault((slot, ffn_rank, lane, end.session), _Cell()) for slot in Slot}
        if event in _SLOTS:
            _touch(_SLOTS[event], slots[_SLOTS[event]], event, end.word)
        elif event is Event.CONFIRM and side is Side.FFN:
            for cell in slots.values():
                cell.unread = False
        pair = (end.state, other.state) if side is Side.ATTENTION else (other.state, end.state)
        slot = conflict(*pair)
        if slot is not None:
            raise ProtocolViolation(f"both sides may touch the {slot.value} slot: {pair[0].value}, {pair[1].value}")


def _touch(slot: Slot, cell: _Cell, event: Event, word: tuple[int, int]) -> None:
    if event in (Event.PUBLISH_REQUEST, Event.PUBLISH_REPLY):
        if cell.unread:
            raise ProtocolViolation(f"the {slot.value} slot is overwritten before {cell.word} was seen")
        cell.word, cell.unread = word, True
        return
    if (cell.word, cell.unread) != (word, True):
        held = f"{cell.word} ({'unread' if cell.unread else 'seen before'})" if cell.word else "nothing"
        raise ProtocolViolation(f"saw {word} in the {slot.value} slot, which holds {held}")
    cell.unread = False


def _before(side: Side, state: State, event: Event) -> State:
    """Where words that were not logged may have led to from ``state``, so that ``event`` is allowed there."""
    reached = [state]
    for current in reached:
        if (side, current, event) in NEXT:
            return current
        targets = [NEXT.get((side, current, word)) for word in WORD_EVENTS]
        reached += [target for target in targets if target is not None and target not in reached]
    return state


def _other(side: Side) -> Side:
    return Side.FFN if side is Side.ATTENTION else Side.ATTENTION


def _parse(rank: str) -> tuple[Side, int]:
    if rank[:1] not in ("A", "F") or not rank[1:].isdigit():
        raise ProtocolViolation(f"rank is {rank!r}; allowed: 'A0', 'A1', …, 'F0', 'F1', …")
    return (Side.ATTENTION if rank[0] == "A" else Side.FFN), int(rank[1:])


def replay_directory(directory: str) -> int:
    """Checks the logs in ``directory`` and prints what it found. 0: sound, 1: a violation, 2: no logs to read."""
    from afd_runtime.event_log import read_logs

    try:
        log = read_logs(directory)
    except (OSError, ValueError) as error:
        print(f"{directory}: {error}", file=sys.stderr)
        return 2
    try:
        Replay.check(log)
    except ProtocolViolation as violation:
        print(violation, file=sys.stderr)
        return 1
    print(f"{len(log)} events of {len({entry.process for entry in log})} processes: no violation")
    return 0
