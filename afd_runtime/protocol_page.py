# SPDX-License-Identifier: Apache-2.0
"""The generated part of ``docs/protocol.md``: ``python -m afd_runtime.protocol --markdown``. Standard library only."""

from __future__ import annotations

from afd_runtime.protocol import ACCESS, IN_STEP, STATES, TABLE, Event, Side, State

BEGIN, END = "<!-- generated: protocol -->", "<!-- end of generated -->"

MEANING = {
    Event.ATTACH: "a new session with fresh, zeroed windows; exchange and step counts restart",
    Event.ANNOUNCE: "attention: the step was announced to the sequencer; FFN: the ordered step was entered",
    Event.PUBLISH_REQUEST: "the request is in the slot, then its word",
    Event.SEE_REQUEST: "the wait saw exactly the word it expected; the request is read from here on",
    Event.PUBLISH_REPLY: "the reply is in the slot, then its word",
    Event.SEE_REPLY: "the wait saw exactly the word it expected; the reply is read from here on",
    Event.NEXT_EXCHANGE: "everything was read; the exchange index is advanced by one",
    Event.END_STEP: "everything was read; that was the last exchange of the step",
    Event.ABORT: "this side gave the lane's step up, or learned that the other side did",
    Event.CONFIRM: "the FFN rank touches the slots of the given-up step no more, and the attention rank knows it",
    Event.LOSE: "the peer is gone: its process ended, went silent, detached or shut down",
    Event.DETACH: "this side closed",
}


def _diagram(side: Side) -> list[str]:
    """The transitions, without those that every state has in the same way (lose, detach)."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.DETACHED.value}"]
    for row in TABLE:
        if row.side is side and row.event not in (Event.LOSE, Event.DETACH):
            lines.append(f"    {row.source.value} --> {row.target.value}: {row.event.value}")
    return [*lines, "```"]


def _rows(side: Side) -> list[str]:
    lines = ["| state | event → next state | request slot | reply slot |", "|---|---|---|---|"]
    for state in STATES[side]:
        moves = [(t.event.value, t.target.value) for t in TABLE if t.side is side and t.source is state]
        access = {a.slot.value: "writes" if a.writes else "reads" for a in ACCESS.get((side, state), ())}
        moved = ", ".join(f"{event} → {target}" for event, target in moves)
        lines.append(f"| {state.value} | {moved} | {access.get('request', '—')} | {access.get('reply', '—')} |")
    return lines


def markdown() -> str:
    """Both sides as a diagram and a table, and what the events mean."""
    lines = [BEGIN, ""]
    for side, title in (
        (Side.ATTENTION, "attention rank, for each FFN rank and stage"),
        (Side.FFN, "FFN rank, for each lane"),
    ):
        inside = ", ".join(state.value for state in IN_STEP[side])
        lines += [f"### Seen from the {title}", "", *_diagram(side), ""]
        lines += [f"In a step: {inside}. Every attached state also has lose → lost and detach → detached.", ""]
        lines += [*_rows(side), ""]
    lines += ["### Events", "", "| event | meaning |", "|---|---|"]
    lines += [f"| {event.value} | {text} |" for event, text in MEANING.items()]
    return "\n".join([*lines, "", END, ""])
