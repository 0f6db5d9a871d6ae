# SPDX-License-Identifier: Apache-2.0
"""The table of the protocol and ``Replay``: a sound log passes, and each invariant can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from afd_runtime.protocol import (
    IN_STEP,
    NEXT,
    STATES,
    TABLE,
    Event,
    ProtocolViolation,
    Side,
    Slot,
    State,
    conflict,
    step,
)
from afd_runtime.protocol_page import BEGIN, END, markdown
from afd_runtime.replay import Replay

LANE = (0, 0)
ROOT = Path(__file__).parents[2]


def log(*entries: str) -> list[tuple]:
    """Entries such as ``"A0 publish_request 0 1"``: rank, event, step, exchange; on lane (0, 0)."""
    events = []
    for time, entry in enumerate(entries):
        rank, event, *numbers = entry.split()
        numbers = [int(number) for number in numbers] or [0, 0]
        events.append((float(time), rank, LANE, *numbers, event, 0 if rank[0] == "A" else None))
    return events


ATTACHED = ["F0 attach", "A0 attach"]
BEGUN = [*ATTACHED, "A0 announce 0 0", "F0 announce 0 0"]


def exchange(number: int, *, of_step: int = 0) -> list[str]:
    at = f"{of_step} {number}"
    return [f"A0 publish_request {at}", f"F0 see_request {at}", f"F0 publish_reply {at}", f"A0 see_reply {at}"]


STEP = [*BEGUN, *exchange(0), "A0 next_exchange 0 1", "F0 next_exchange 0 1", *exchange(1)]
ENDED = [*STEP, "A0 end_step 0 1", "F0 end_step 0 1"]


def refuses(match: str, *entries: str) -> ProtocolViolation:
    with pytest.raises(ProtocolViolation, match=match) as caught:
        Replay.check(log(*entries))
    assert caught.value.index == len(entries) - 1, "an earlier event was refused"
    return caught.value


def test_the_table_is_deterministic_and_complete() -> None:
    assert len(NEXT) == len(TABLE)
    for side in Side:
        reached, frontier = {State.DETACHED}, [State.DETACHED]
        while frontier:
            source = frontier.pop()
            for row in TABLE:
                if (row.side, row.source) == (side, source) and row.target not in reached:
                    reached.add(row.target)
                    frontier.append(row.target)
        assert reached == set(STATES[side])
        for row in TABLE:
            assert row.side is not side or {row.source, row.target} <= reached


def test_every_state_in_a_step_can_be_left_by_an_abort_and_a_loss() -> None:
    for side in Side:
        for state in IN_STEP[side]:
            assert step(side, state, Event.ABORT) is State.ABORTED
            assert step(side, state, Event.LOSE) is State.LOST
        after = {event for s, source, event in NEXT if s is side and source is State.ABORTED}
        assert after == {Event.CONFIRM, Event.LOSE, Event.DETACH}


def test_who_may_touch_which_slot() -> None:
    assert conflict(State.ANNOUNCED, State.COMPUTING) is Slot.REQUEST
    assert conflict(State.COMBINED, State.COMPUTING) is Slot.REPLY
    free = [(a, f) for a in STATES[Side.ATTENTION] for f in STATES[Side.FFN] if conflict(a, f)]
    assert free == [(State.ANNOUNCED, State.COMPUTING), (State.COMBINED, State.COMPUTING)]


def test_a_sound_log_of_two_steps_passes() -> None:
    second = ["A0 announce 1 0", "F0 announce 1 0", *exchange(0, of_step=1)]
    replay = Replay.check(log(*ENDED, *second))
    assert replay.state("A0", LANE) is State.COMBINED and replay.state("F0", LANE) is State.REPLY_PUBLISHED


def test_a_log_is_read_in_the_order_of_its_times() -> None:
    Replay.check(list(reversed(log(*ENDED))))


def test_an_attention_event_without_a_peer_concerns_all_of_them() -> None:
    both = [(0.0, "F0", LANE, 0, 0, "attach"), (1.0, "F1", LANE, 0, 0, "attach")]
    both += [(2.0, "A0", LANE, 0, 0, "attach", 0), (3.0, "A0", LANE, 0, 0, "attach", 1)]
    both += [(4.0, "A0", LANE, 0, 0, "announce")]
    replay = Replay.check(both)
    assert [replay.state("A0", LANE, peer) for peer in (0, 1)] == [State.ANNOUNCED] * 2


def test_an_aborted_step_is_followed_by_the_next_once_it_is_confirmed() -> None:
    aborted = [*BEGUN, "A0 publish_request 0 0", "A0 abort 0 0", "F0 abort 0 0", "F0 confirm 0 0"]
    again = ["A0 announce 1 0", "F0 announce 1 0", *exchange(0, of_step=1)]
    Replay.check(log(*aborted, "A0 confirm 0 0", *again))
    refuses("announce in state aborted", *aborted, again[0])


def test_a_lost_lane_attaches_again_with_fresh_windows() -> None:
    lost = [*BEGUN, "A0 publish_request 0 0", "F0 lose"]
    died = [*log(*lost), *[(10.0 + n, *rest) for n, *rest in log("A0 detach", *ATTACHED, *BEGUN[2:], *exchange(0))]]
    replay = Replay.check(died)
    assert replay.state("F0", LANE) is State.REPLY_PUBLISHED


@pytest.mark.parametrize(
    ("match", "entries"),
    [
        ("overwritten", [*BEGUN, "A0 publish_request 0 0", "A0 abort", "A0 confirm", "A0 announce 1 0",
                         "A0 publish_request 1 0"]),
        ("publish_request in state request_published", [*BEGUN, "A0 publish_request 0 0", "A0 publish_request 0 0"]),
        ("publish_reply in state announced", [*BEGUN, "F0 publish_reply 0 0"]),
        ("holds nothing", [*BEGUN, "F0 see_request 0 0"]),
        ("holds nothing", [*BEGUN, "A0 publish_request 0 0", "A0 see_reply 0 0"]),
        ("seen before", [*BEGUN, *exchange(0), "A0 next_exchange 0 1", "F0 next_exchange 0 1", "F0 see_request 0 1"]),
        ("expected", [*BEGUN, *exchange(0), "A0 next_exchange 0 2"]),
        ("while the lane is in", [*BEGUN, "A0 publish_request 0 1"]),
        ("while the lane is in", [*STEP, "F0 end_step 0 0"]),
        ("steps grow", [*ENDED, "A0 announce 0 0"]),
        ("exchanges start at 0", [*ENDED, "A0 announce 1 1"]),
        ("publish_request in state aborted", [*BEGUN, "A0 abort", "A0 publish_request 0 0"]),
        ("announce in state detached", ["F0 announce 0 0"]),
        ("never attached", ["F0 attach", "A1 announce 0 0"]),
        ("announced in session 1", ["A0 attach", "A0 announce 0 0"]),
        ("allowed: 'A0'", ["X0 attach"]),
        ("not a valid Event", ["A0 wave"]),
    ],
)  # fmt: skip
def test_each_invariant_can_fail(match: str, entries: list[str]) -> None:
    if "never attached" in match or "allowed" in match:
        bad = [(float(time), *entry) for time, entry in enumerate(
            (e.split()[0], (int(e.split()[0][1:]), 0), 0, 0, e.split()[1]) for e in entries)]  # fmt: skip
        with pytest.raises(ProtocolViolation, match=match):
            Replay.check(bad)
        return
    assert refuses(match, *entries).event is not None


def test_both_sides_at_one_slot_are_refused() -> None:
    early = [*BEGUN, "A0 publish_request 0 0", "F0 see_request 0 0", "A0 abort", "A0 confirm"]
    refuses("both sides may touch the request slot", *early, "A0 announce 1 0")


def test_a_rank_acts_on_its_own_lanes_only() -> None:
    with pytest.raises(ProtocolViolation, match="acts on a lane of attention rank 0"):
        Replay.check([(0.0, "A1", LANE, 0, 0, "attach", 0)])


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    made = page[page.index(BEGIN) : page.index(END) + len(END) + 1]
    assert made == markdown(), "run: python -m afd_runtime.protocol --markdown, and put it into docs/protocol.md"


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-m", "afd_runtime.protocol"]
    done = subprocess.run([*command, "--markdown"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout == markdown()
    assert subprocess.run(command, capture_output=True, cwd=ROOT, timeout=60, check=False).returncode == 2
