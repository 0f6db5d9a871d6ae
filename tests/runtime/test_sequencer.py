# SPDX-License-Identifier: Apache-2.0
"""The order of units: what is merged, replaced and withdrawn, and that no interleaving of ranks deadlocks."""

from __future__ import annotations

import pytest

from afd_runtime.control_plane.messages import Announce, Order, Participant, StageStep
from afd_runtime.control_plane.sequencer import Sequencer, check_announce
from afd_runtime.errors import AFDProtocolError


def forward(step: int, *stages: int, rows: int = 4, warmup: bool = False) -> Announce:
    return Announce(tuple(StageStep(stage, step, rows) for stage in stages), is_warmup=warmup)


def lanes(orders: tuple[Order, ...]) -> dict[int, list[tuple[int, int]]]:
    """(attention rank, step) by stage of one unit."""
    assert len({order.number for order in orders}) <= 1
    return {order.stage: [(p.attention_rank, p.lane_step) for p in order.participants] for order in orders}


def test_one_stage_merges_what_is_pending_and_numbers_it() -> None:
    sequencer = Sequencer()
    assert sequencer.take() == sequencer.take(0) == ()
    sequencer.announce(3, 7, forward(5, 0, rows=9))
    sequencer.announce(1, 8, forward(2, 0, rows=0))
    sequencer.announce(1, 8, forward(0, 1))
    assert sequencer.take(0) == (Order(1, 0, (Participant(1, 8, 2, 0), Participant(3, 7, 5, 9))),)
    assert sequencer.take(0) == ()
    assert sequencer.take() == (Order(2, 1, (Participant(1, 8, 0, 4),)),)
    assert sequencer.take(1) == ()


@pytest.mark.parametrize("stage", [0, 1, None])
def test_stages_of_a_forward_are_one_unit_whoever_takes_it(stage: int | None) -> None:
    sequencer = Sequencer()
    sequencer.announce(2, 1, forward(3, 1, 0))
    sequencer.announce(0, 2, forward(7, 0, 1))
    assert lanes(sequencer.take(stage)) == {0: [(0, 7), (2, 3)], 1: [(0, 7), (2, 3)]}
    assert sequencer.take() == ()


def test_a_unit_takes_along_what_shares_a_stage_through_others() -> None:
    sequencer = Sequencer()
    for rank, stages in enumerate([(0, 1), (3,), (2,), (1, 2)]):
        sequencer.announce(rank, 1, forward(0, *stages))
    assert lanes(sequencer.take(0)) == {0: [(0, 0)], 1: [(0, 0), (3, 0)], 2: [(2, 0), (3, 0)]}
    assert lanes(sequencer.take(3)) == {3: [(1, 0)]}


def test_kinds_are_kept_apart_and_in_order() -> None:
    sequencer = Sequencer()
    sequencer.announce(0, 1, forward(0, 0, warmup=True))
    sequencer.announce(1, 2, forward(0, 0, 1))
    sequencer.announce(2, 3, forward(0, 0))
    sequencer.announce(3, 4, forward(0, 0, warmup=True))
    first = sequencer.take(1)  # stage 1 has no part in it, but its step must not overtake it in stage 0
    assert lanes(first) == {0: [(0, 0), (3, 0)]} and first[0].is_warmup
    second = sequencer.take(1)
    assert lanes(second) == {0: [(1, 0), (2, 0)], 1: [(1, 0)]} and not second[0].is_warmup
    assert [order.number for order in (*first, *second)] == [1, 2, 2]


def test_a_newer_step_replaces_the_one_of_its_lane_only() -> None:
    sequencer = Sequencer()
    sequencer.announce(0, 1, forward(0, 0, 1))
    sequencer.announce(0, 1, forward(1, 1))
    assert lanes(sequencer.take(0)) == {0: [(0, 0)]}
    assert lanes(sequencer.take(1)) == {1: [(0, 1)]}


def test_what_was_withdrawn_is_forgotten_stage_by_stage() -> None:
    sequencer = Sequencer()
    sequencer.announce(0, 1, forward(4, 0, 1))
    sequencer.announce(1, 2, forward(4, 0, 1))
    sequencer.withdraw(0, 1, 0, 3)  # an older step
    sequencer.withdraw(0, 99, 0, 4)  # another session
    sequencer.withdraw(0, 1, 0, 4)
    assert lanes(sequencer.take(1)) == {0: [(1, 4)], 1: [(0, 4), (1, 4)]}
    sequencer.announce(0, 1, forward(5, 0, 1))
    sequencer.announce(1, 2, forward(5, 1))
    sequencer.withdraw(0, 1)
    assert lanes(sequencer.take()) == {1: [(1, 5)]}
    sequencer.announce(1, 2, forward(6, 0, 1))
    sequencer.withdraw(1, 2, 0, 6)
    sequencer.withdraw(1, 2, 1, 7)
    assert sequencer.take() == ()


@pytest.mark.parametrize(
    ("announce", "message"),
    [
        (forward(3), r"announces stages \[\]; allowed: one or more of 0 … 1, each once"),
        (forward(3, 0, 0), r"announces stages \[0, 0\]"),
        (forward(3, 0, 2), r"announces stages \[0, 2\]"),
        (forward(3, -1), r"announces stages \[-1\]"),
        (forward(3, 0, 1, rows=17), "announces 17 rows; allowed: 0 … 16"),
        (forward(3, 0, rows=-1), "announces -1 rows"),
        (forward(2, 0, 1), "announces step 2 of stage 1 after 2; allowed: steps that grow"),
        (forward(2**32, 0), "announces step 4294967296 of stage 0 after -1"),
    ],
)
def test_bad_announcements_are_refused(announce: Announce, message: str) -> None:
    with pytest.raises(AFDProtocolError, match=f"someone {message}"):
        check_announce("someone", announce, [-1, 2], 16)
    check_announce("someone", forward(3, 1, 0, rows=16), [-1, 2], 16)
