# SPDX-License-Identifier: Apache-2.0
"""wait, as a kernel and on the host: passes, times out, aborts, refuses, waits older words out."""

import threading
import time

import pytest
import torch
from kernel_harness import DEVICE, INTERPRETED, LONG_S, addresses

from afd_kernels import MODE_OFFLINE, MODE_ONLINE, Lane, Status, StatusCode, begin_step, signal_word, wait
from afd_kernels.signal_host import publish_host, wait_ref

SESSIONS = (1, 32767, 40000, 65535)


class Waiter:
    """D slots, their lanes, abort flag and status cell, and one of the two implementations."""

    def __init__(self, kind: str, launches) -> None:
        self.kind, self.launches = kind, launches
        self.device = DEVICE if kind == "kernel" else "cpu"

    def setup(self, peers: int, *, session=40000, step=100, exchange=3, one_lane=False):
        self.slots = [torch.zeros(128, dtype=torch.uint8, device=self.device) for _ in range(peers)]
        self.lanes = torch.zeros(peers, 8, dtype=torch.int64, device=self.device)
        for lane in self.lanes:
            begin_step(lane, session=session, step=step, rows=4)
            lane[Lane.EXCHANGE] = exchange
        if one_lane:
            self.lanes = self.lanes[0].clone()
        self.word = signal_word(session, step, exchange)
        self.abort = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.status = torch.full((8,), -7, dtype=torch.int64, device=self.device)

    def put(self, word: int, *peers: int) -> None:
        for peer in peers or range(len(self.slots)):
            self.slots[peer][120:].view(torch.int64)[0] = word

    def table(self) -> torch.Tensor:
        return addresses(self.slots).to(self.device)

    def run(self, timeout_s: float, table: torch.Tensor | None = None) -> StatusCode | None:
        """The code, None where the status cell was not touched."""
        modes = self.lanes.view(-1, 8)[:, Lane.MODE].tolist()
        function, before = (wait, sum(self.launches.values())) if self.kind == "kernel" else (wait_ref, None)
        table = self.table() if table is None else table
        function(table, self.lanes, abort=self.abort, status=self.status, timeout_s=timeout_s)
        if before is not None and table.numel():
            assert self.launches["_wait_kernel"] and sum(self.launches.values()) == before + 1
        state = self.status.tolist()
        if state != [-7] * 8:
            modes[state[Status.PEER] if self.lanes.dim() == 2 else 0] = MODE_OFFLINE
        assert self.lanes.view(-1, 8)[:, Lane.MODE].tolist() == modes, "only the lane that failed is set offline"
        assert state[4:] == [-7] * 4
        if state == [-7] * 8:
            return None
        return StatusCode(state[Status.CODE])

    def reported(self) -> tuple[int, int, int]:
        return tuple(self.status[1:4].tolist())


@pytest.fixture(params=["kernel", "host"])
def waiter(request, launches) -> Waiter:
    return Waiter(request.param, launches)


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("peers,one_lane", [(1, False), (2, True), (5, False), (33, True), (40, False)])
def test_passes(waiter, peers, one_lane, session):
    waiter.setup(peers, session=session, one_lane=one_lane)
    waiter.put(waiter.word)
    assert waiter.run(LONG_S) is None


def test_each_lane_expects_its_own_word(waiter):
    waiter.setup(3)
    for peer, lane in enumerate(waiter.lanes):
        begin_step(lane, session=7 + 30000 * peer, step=peer, rows=0)
        waiter.put(signal_word(7 + 30000 * peer, peer, 0), peer)
    assert waiter.run(LONG_S) is None


def test_no_peers(waiter):
    waiter.setup(0)
    assert waiter.run(LONG_S) is None


@pytest.mark.parametrize("late", [(0,), (2,), (1, 4), (0, 1, 2, 3, 4)])
def test_times_out(waiter, late):
    waiter.setup(5)
    waiter.put(waiter.word)
    waiter.put(0, *late)
    start = time.monotonic()
    assert waiter.run(0.05) == StatusCode.TIMEOUT
    assert waiter.reported() == (late[0], waiter.word, 0)
    assert time.monotonic() - start < 10
    if not (INTERPRETED and waiter.kind == "kernel"):
        assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("older", [(100, 2), (99, 3), (99, 65535), (0, 1), (0, 0)])
def test_older_words_are_waited_out(waiter, older, session):
    waiter.setup(3, session=session)
    waiter.put(waiter.word)
    old = signal_word(session, *older)
    waiter.put(old, 1)
    assert waiter.run(0.02) == StatusCode.TIMEOUT
    assert waiter.reported() == (1, waiter.word, old)


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("newer", [(100, 4), (101, 0), (2**32 - 1, 65535)])
def test_newer_words_are_refused_at_once(waiter, newer, session):
    waiter.setup(3, session=session)
    waiter.put(waiter.word, 0)
    new = signal_word(session, *newer)
    waiter.put(new, 2)
    assert waiter.run(LONG_S) == StatusCode.PROTOCOL
    assert waiter.reported() == (2, waiter.word, new)


@pytest.mark.parametrize("session,foreign", [(1, 2), (2, 1), (40000, 39999), (40000, 1), (1, 40000), (65535, 32768)])
@pytest.mark.parametrize("when", [(100, 3), (0, 1), (5000, 0)])
def test_foreign_sessions_are_refused_at_once(waiter, session, foreign, when):
    waiter.setup(2, session=session)
    waiter.put(signal_word(foreign, *when), 1)
    assert waiter.run(LONG_S) == StatusCode.PROTOCOL
    assert waiter.reported() == (1, waiter.word, signal_word(foreign, *when))


def test_aborts(waiter):
    waiter.setup(3)
    waiter.put(waiter.word, 0, 2)
    waiter.abort[0] = 1
    start = time.monotonic()
    assert waiter.run(LONG_S) == StatusCode.ABORTED
    assert waiter.reported() == (1, waiter.word, 0)
    assert time.monotonic() - start < LONG_S / 2


def test_abort_does_not_spoil_words_that_are_there(waiter):
    waiter.setup(3)
    waiter.put(waiter.word)
    waiter.abort[0] = 1
    assert waiter.run(LONG_S) is None


@pytest.mark.parametrize("offline", [(0,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("what", ["offline", "no slot"])
def test_lanes_that_are_not_waited_for(waiter, what, offline):
    waiter.setup(4)
    waiter.put(waiter.word)
    for peer in offline:
        waiter.put(signal_word(9, 9, 9), peer)  # a foreign word there is not looked at either
        if what == "offline":
            waiter.lanes[peer, Lane.MODE] = MODE_OFFLINE
    table = waiter.table()
    if what == "no slot":
        table[list(offline)] = 0
    assert waiter.run(LONG_S, table) is None


def test_one_offline_lane_for_all(waiter):
    waiter.setup(4, one_lane=True)
    waiter.lanes[Lane.MODE] = MODE_OFFLINE
    assert waiter.run(LONG_S) is None
    waiter.lanes[Lane.MODE] = MODE_ONLINE
    assert waiter.run(0.02) == StatusCode.TIMEOUT


def test_offline_is_not_blamed(waiter):
    waiter.setup(3)
    waiter.lanes[0, Lane.MODE] = MODE_OFFLINE
    waiter.put(waiter.word, 1)
    assert waiter.run(0.02) == StatusCode.TIMEOUT
    assert waiter.reported() == (2, waiter.word, 0)


def test_wait_changes_nothing_else(waiter):
    waiter.setup(3)
    waiter.put(waiter.word)
    lanes, slots = waiter.lanes.clone(), [s.clone() for s in waiter.slots]
    waiter.run(LONG_S)
    assert torch.equal(lanes, waiter.lanes) and all(map(torch.equal, slots, waiter.slots))


def test_host_waits_for_a_late_word(launches):
    waiter = Waiter("host", launches)
    waiter.setup(2)
    waiter.put(signal_word(40000, 99, 0))

    def late():
        for slot in waiter.slots:
            time.sleep(0.05)
            publish_host(slot.data_ptr(), waiter.word)

    thread = threading.Thread(target=late)
    start = time.monotonic()
    thread.start()
    assert waiter.run(LONG_S) is None
    assert time.monotonic() - start >= 0.1
    thread.join()


def test_host_abort_while_waiting(launches):
    waiter = Waiter("host", launches)
    waiter.setup(2)
    timer = threading.Timer(0.05, lambda: waiter.abort.fill_(1))
    timer.start()
    assert waiter.run(LONG_S) == StatusCode.ABORTED
    timer.join()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
def test_kernel_waits_for_a_late_word(launches):
    """Another stream publishes while the kernel polls; then the same with the abort flag."""
    torch.cuda._sleep(1)  # a kernel's first launch waits for the kernel that polls
    for what in ("word", "abort"):
        waiter = Waiter("kernel", launches)
        waiter.setup(2)
        for slot in waiter.slots:  # alignment picks the kernel that fills
            slot[120:].view(torch.int64).fill_(0)
        waiter.abort.fill_(0)
        table, side = waiter.table(), torch.cuda.Stream()
        torch.cuda.synchronize()
        wait(table, waiter.lanes, abort=waiter.abort, status=waiter.status, timeout_s=LONG_S)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            if what == "abort":
                waiter.abort.fill_(1)
            else:
                for slot in waiter.slots:
                    slot[120:].view(torch.int64).fill_(waiter.word)
        torch.cuda.synchronize()
        assert int(waiter.status[Status.CODE]) == (StatusCode.ABORTED if what == "abort" else -7)
    launches.expect("_wait_kernel")


def per_lane(waiter, peers: int, **kwargs) -> None:
    """A cell and an abort flag for each lane: the others go on."""
    waiter.setup(peers, **kwargs)
    waiter.put(waiter.word)
    waiter.abort = torch.zeros(peers, dtype=torch.int32, device=waiter.device)
    waiter.status = torch.full((peers, 8), -7, dtype=torch.int64, device=waiter.device)


def run_per_lane(waiter, timeout_s: float) -> dict[int, tuple[int, ...]]:
    """{lane: its cell} of the lanes whose cells were written; each of them, and no other, is offline."""
    function = wait if waiter.kind == "kernel" else wait_ref
    before = waiter.lanes.clone()
    function(waiter.table(), waiter.lanes, abort=waiter.abort, status=waiter.status, timeout_s=timeout_s)
    cells = {i: tuple(c[:4]) for i, c in enumerate(waiter.status.tolist()) if c[:4] != [-7] * 4}
    assert all(c[4:] == [-7] * 4 for c in waiter.status.tolist())
    for i in range(len(before)):
        before[i, Lane.MODE] = MODE_OFFLINE if i in cells else before[i, Lane.MODE]
    assert torch.equal(before, waiter.lanes)
    return cells


def test_per_lane_passes(waiter):
    per_lane(waiter, 35)
    assert run_per_lane(waiter, LONG_S) == {}


@pytest.mark.parametrize("late", [(0,), (4,), (1, 3), (0, 1, 2, 3, 4)])
def test_per_lane_time_limit(waiter, late):
    per_lane(waiter, 5)
    waiter.put(0, *late)
    assert run_per_lane(waiter, 0.02) == {i: (StatusCode.TIMEOUT, i, waiter.word, 0) for i in late}


def test_per_lane_wrong_words_do_not_end_the_wait_of_others(waiter):
    per_lane(waiter, 6)
    foreign, newer = signal_word(3, 1, 1), signal_word(40000, 101, 0)
    waiter.put(foreign, 1)
    waiter.put(newer, 4)
    waiter.put(0, 2)
    assert run_per_lane(waiter, 0.02) == {
        1: (StatusCode.PROTOCOL, 1, waiter.word, foreign),
        4: (StatusCode.PROTOCOL, 4, waiter.word, newer),
        2: (StatusCode.TIMEOUT, 2, waiter.word, 0),
    }


def test_per_lane_abort_ends_one_lane_only(waiter):
    per_lane(waiter, 3)
    waiter.put(0, 0, 2)
    waiter.abort[2] = waiter.abort[1] = 1  # lane 1's word is there: its flag spoils nothing
    cells = run_per_lane(waiter, 0.3)
    assert cells[2][0] == StatusCode.ABORTED and cells[0][0] == StatusCode.TIMEOUT and set(cells) == {0, 2}


def test_a_failed_wait_sets_its_lane_offline(waiter):
    waiter.setup(3)
    waiter.put(waiter.word, 0)
    assert waiter.run(0.02) == StatusCode.TIMEOUT
    assert waiter.lanes[:, Lane.MODE].tolist() == [MODE_ONLINE, MODE_OFFLINE, MODE_ONLINE]
    waiter.setup(3, one_lane=True)
    assert waiter.run(0.02) == StatusCode.TIMEOUT
    assert int(waiter.lanes[Lane.MODE]) == MODE_OFFLINE


def test_per_lane_next_wait_skips_the_failed(waiter):
    per_lane(waiter, 37)
    waiter.put(signal_word(9, 1, 1), 0)
    waiter.put(0, 2, 36)
    assert set(run_per_lane(waiter, 0.02)) == {0, 2, 36}
    waiter.status.fill_(-7)
    assert run_per_lane(waiter, LONG_S) == {}


def test_per_lane_offline_has_no_status(waiter):
    per_lane(waiter, 3)
    waiter.lanes[:, Lane.MODE] = MODE_OFFLINE
    waiter.put(0)
    waiter.abort.fill_(1)
    assert run_per_lane(waiter, LONG_S) == {}


def test_per_lane_shapes(launches):
    waiter = Waiter("kernel", launches)
    per_lane(waiter, 3)
    table, given = waiter.table(), {"abort": waiter.abort, "status": waiter.status, "timeout_s": 1.0}
    for lanes, change, match in [
        (waiter.lanes[0].clone(), {}, r"status is int64\[D, 8\] for one lane"),
        (waiter.lanes, {"abort": waiter.abort[:1]}, "abort has shape"),
        (waiter.lanes, {"status": waiter.status[:2]}, "status has shape"),
        (waiter.lanes, {"status": waiter.status.repeat(1, 2)[:, ::2]}, "status is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=match):
            wait(table, lanes, **(given | change))
    launches.expect_none()


@pytest.mark.skipif(INTERPRETED, reason="pinned memory beside a GPU")
def test_status_and_abort_in_pinned_host_memory(launches):
    waiter = Waiter("kernel", launches)
    per_lane(waiter, 3)
    waiter.abort, waiter.status = waiter.abort.cpu().pin_memory(), waiter.status.cpu().pin_memory()
    waiter.put(0, 1, 2)
    waiter.abort[2] = 1
    wait(waiter.table(), waiter.lanes, abort=waiter.abort, status=waiter.status, timeout_s=0.2)
    torch.cuda.synchronize()
    assert waiter.status[:, Status.CODE].tolist() == [-7, StatusCode.TIMEOUT, StatusCode.ABORTED]
    launches.expect("_wait_kernel")
