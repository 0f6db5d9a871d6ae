# SPDX-License-Identifier: Apache-2.0
"""Doorbells and clocks: a wait passes on word and ring, silences the bell, and counts the time; who rings, and whom."""

import time

import pytest
import torch
from kernel_harness import DEVICE, INTERPRETED, LONG_S, addresses

from afd_kernels import (
    Lane,
    MessageLayout,
    ReplyLayout,
    StatusCode,
    arrival,
    begin_step,
    dispatch,
    reply,
    signal_word,
    wait,
)
from afd_kernels.dispatch import dispatch_ref
from afd_kernels.reply import reply_ref
from afd_kernels.signal import open_bells
from afd_kernels.signal_host import BELL_OPEN, wait_ref

KINDS = pytest.mark.parametrize("kind", ["kernel", "host"])
SESSION, STEP, EXCHANGE = 40000, 0x12345678, 3
WORD = signal_word(SESSION, STEP, EXCHANGE)


def ring_of(word: int) -> int:
    return (word & 0xFFFFFF) << 2 | 1


class Lanes:
    """D slots that hold their word, lanes that expect it, quiet bells, a cell per lane (or one for all)."""

    def __init__(self, kind: str, peers: int, per_lane: bool) -> None:
        self.kind, self.per_lane = kind, per_lane
        self.device = DEVICE if kind == "kernel" else "cpu"
        make = {"dtype": torch.int64, "device": self.device}
        self.slots = [torch.zeros(128, dtype=torch.uint8, device=self.device) for _ in range(peers)]
        for slot in self.slots:
            slot[120:].view(torch.int64)[0] = WORD
        self.lanes = torch.zeros(peers, 8, **make)
        for lane in self.lanes:
            begin_step(lane, session=SESSION, step=STEP, rows=4)
            lane[Lane.EXCHANGE] = EXCHANGE
        if not per_lane:
            self.lanes = self.lanes[0].clone()
        self.status = torch.zeros(*([peers] if per_lane else []), 8, **make)
        self.abort = torch.zeros(peers if per_lane else 1, dtype=torch.int32, device=self.device)
        self.bells = torch.full((peers,), ring_of(WORD), dtype=torch.int32, device=self.device)
        self.clock = torch.tensor([10, 20, 30, 40], **make)

    def run(self, timeout_s: float = LONG_S) -> list[StatusCode]:
        table = addresses(self.slots).to(self.device)
        function = wait if self.kind == "kernel" else wait_ref
        function(table, self.lanes, abort=self.abort, status=self.status, timeout_s=timeout_s, bells=self.bells,
                 clock=self.clock)  # fmt: skip
        return [StatusCode(code) for code in self.status.view(-1, 8)[:, 0].tolist()]


@KINDS
@pytest.mark.parametrize("per_lane", [True, False])
@pytest.mark.parametrize("ring", [ring_of(WORD), ring_of(WORD) | BELL_OPEN])
def test_word_and_ring_pass_and_the_bell_is_silent(kind, per_lane, ring, launches):
    lanes = Lanes(kind, 5, per_lane)
    lanes.bells.fill_(ring)
    assert set(lanes.run()) == {StatusCode.OK}
    assert lanes.bells.tolist() == [0] * 5


@KINDS
@pytest.mark.parametrize(
    "bell", [0, BELL_OPEN, ring_of(WORD) - 4, ring_of(signal_word(SESSION, STEP, EXCHANGE - 1)) | BELL_OPEN]
)
def test_a_word_without_its_ring_does_not_pass(kind, bell, launches):
    """The ring of the exchange before is not this one's: it would be there too early in every exchange to come."""
    lanes = Lanes(kind, 3, per_lane=True)
    lanes.bells[1] = bell
    assert lanes.run(0.05) == [StatusCode.OK, StatusCode.TIMEOUT, StatusCode.OK]
    assert lanes.bells.tolist() == [0, bell | BELL_OPEN, 0], "open: nobody will wait for this lane any more"


@KINDS
def test_a_ring_without_its_word_does_not_pass(kind, launches):
    lanes = Lanes(kind, 2, per_lane=True)
    lanes.slots[0].zero_()
    assert lanes.run(0.05) == [StatusCode.TIMEOUT, StatusCode.OK]
    assert lanes.bells.tolist() == [ring_of(WORD) | BELL_OPEN, 0]


@KINDS
def test_a_failed_wait_of_one_lane_opens_every_bell(kind, launches):
    lanes = Lanes(kind, 3, per_lane=False)
    lanes.slots[2].zero_()
    assert lanes.run(0.05) == [StatusCode.TIMEOUT]
    assert all(bell & BELL_OPEN for bell in lanes.bells.tolist())


@KINDS
def test_lanes_that_take_no_part_are_open(kind, launches):
    lanes = Lanes(kind, 3, per_lane=True)
    lanes.lanes[1, Lane.MODE] = 0
    lanes.bells[1] = 0
    assert set(lanes.run()) == {StatusCode.OK}
    assert lanes.bells.tolist() == [0, BELL_OPEN, 0]


@KINDS
def test_the_clock_counts_the_wait(kind, launches):
    lanes = Lanes(kind, 2, per_lane=True)
    lanes.slots[0].zero_()
    lanes.run(0.05)
    waited, computed, replied, end = lanes.clock.tolist()
    assert (computed, replied) == (20, 30)
    if not (INTERPRETED and kind == "kernel"):  # the interpreter has no clock
        assert 0.05e9 <= waited - 10 < 5e9 and end > 40


@KINDS
@pytest.mark.parametrize("online", [True, False])
def test_dispatch_rings_after_it_published(kind, online, launches):
    """Two peers, of which the second listens to no bell; an offline lane rings nobody."""
    device = DEVICE if kind == "kernel" else "cpu"
    layout = MessageLayout(2, 4, 2, 8, torch.float32)
    slots = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    theirs = torch.zeros(8, dtype=torch.int32, device=device)
    lane = torch.zeros(8, dtype=torch.int64, device=device)
    begin_step(lane, session=SESSION, step=STEP, rows=3, mode=int(online))
    lane[Lane.EXCHANGE] = EXCHANGE
    function = dispatch if kind == "kernel" else dispatch_ref
    function(
        torch.randn(3, 8, device=device), torch.tensor([[0, 3], [1, 2], [3, 0]], dtype=torch.int32, device=device),
        torch.rand(3, 2, device=device) + 0.1, expert_bucket=torch.arange(4, dtype=torch.int32, device=device),
        slots=addresses(slots).to(device), layout=layout, lane=lane,
        bells=torch.tensor([theirs.data_ptr() + 8, 0], device=device),
    )  # fmt: skip
    assert theirs.tolist() == [0, 0, ring_of(WORD) if online else 0, 0, 0, 0, 0, 0]
    assert [int(layout.views(slot).signal) for slot in slots] == [WORD if online else 0] * 2


@KINDS
def test_reply_rings_the_lanes_it_answers_and_counts_its_time(kind, launches):
    device = DEVICE if kind == "kernel" else "cpu"
    layout, replies = MessageLayout(2, 4, 2, 8, torch.float32), ReplyLayout(4, 8, torch.float32)
    slots = torch.zeros(3, layout.nbytes, dtype=torch.uint8, device=device)
    answers = torch.zeros(3, replies.nbytes, dtype=torch.uint8, device=device)
    lanes = torch.zeros(3, 8, dtype=torch.int64, device=device)
    for lane in lanes:
        begin_step(lane, session=SESSION, step=STEP, rows=0)
        lane[Lane.EXCHANGE] = EXCHANGE
    lanes[1, Lane.MODE] = 0
    theirs = torch.zeros(4, dtype=torch.int32, device=device)
    clock = torch.zeros(4, dtype=torch.int64, device=device)
    schedule = arrival(addresses(list(slots)).to(device), torch.zeros_like(lanes), layout)
    y = torch.zeros(schedule.cap_rows * schedule.top_k, 8, device=device)
    bells = torch.tensor([theirs.data_ptr(), theirs.data_ptr() + 4, theirs.data_ptr() + 8], device=device)
    function = reply if kind == "kernel" else reply_ref
    start = time.monotonic_ns()
    clock[3] = start
    function(y, schedule, addresses(list(answers)).to(device), lanes, replies, bells=bells, clock=clock)
    assert theirs.tolist() == [ring_of(WORD), 0, ring_of(WORD), 0]
    assert [int(replies.views(answer).signal) for answer in answers] == [WORD, 0, WORD]
    if kind == "host":
        computed, replied, end = clock[1:].tolist()
        assert computed >= 0 and replied > 0 and end == start + computed + replied


@KINDS
def test_opening_keeps_a_ring(kind, launches):
    bells = torch.tensor(
        [0, ring_of(WORD), BELL_OPEN, 0], dtype=torch.int32, device=DEVICE if kind == "kernel" else "cpu"
    )
    open_bells(bells[:3])
    assert bells.tolist() == [BELL_OPEN, ring_of(WORD) | BELL_OPEN, BELL_OPEN, 0]
