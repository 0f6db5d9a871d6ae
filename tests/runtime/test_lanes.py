# SPDX-License-Identifier: Apache-2.0
"""LaneTable: which step a confirmation names, and that every abort gets one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from afd_runtime.control_plane.cells import AbortCell
from afd_runtime.control_plane.lanes import AttachedRank, LaneTable
from afd_runtime.control_plane.messages import Abort, Aborted, Order, Participant

SERVED = (4, 7)


@pytest.fixture
def table():
    """A table with attention ranks 4 and 7 in step 5 of stage 0, and what it has sent."""
    sent: list = []
    lanes = LaneTable("FFN rank 0", lambda link, message: sent.append((link, message)))
    window = SimpleNamespace(close=lambda: None)
    for rank in SERVED:
        lanes.ranks[rank] = AttachedRank(rank, 1, f"link {rank}", window, window, given_up=[-1], announced=[5])  # type: ignore[arg-type]
    order = Order(1, 0, tuple(Participant(rank, 1, 5, 3) for rank in SERVED))
    abort = AbortCell(torch.device("cpu"), len(SERVED))
    assert len(lanes.enter(order, abort, SERVED)) == 2
    return lanes, sent, abort


def test_a_loss_ends_the_wait_of_its_lane_only(table) -> None:
    lanes, sent, abort = table
    lanes.give_up(lanes.ranks[7], Abort(0, 5, "enough"))
    assert abort.tensor.tolist() == [0, 1] and sent == []
    assert lanes.take_losses(0) == [(7, "gave the step up")]
    assert sent == [("link 7", Aborted(0, 5))]


def test_a_confirmation_names_the_newest_step_that_was_given_up(table) -> None:
    """The rank gave up step 5 and, before the loop let go of it, step 6: it waits for the confirmation of step 6."""
    lanes, sent, _ = table
    lanes.give_up(lanes.ranks[4], Abort(0, 5, "enough"))
    lanes.give_up(lanes.ranks[4], Abort(0, 6, "enough again"))
    lanes.take_losses(0)
    assert ("link 4", Aborted(0, 6)) in sent


def test_an_abort_that_came_before_a_drop_is_confirmed(table) -> None:
    lanes, sent, _ = table
    lanes.give_up(lanes.ranks[4], Abort(0, 5, "enough"))
    lanes.drop(0, 4, "its message is malformed", 1)
    assert sent == [("link 4", Aborted(0, 5))]
    lanes.drop(0, 7, "its message is malformed", 1)
    assert sent[1] == ("link 7", Abort(0, 5, "its message is malformed", 1))
