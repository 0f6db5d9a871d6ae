# SPDX-License-Identifier: Apache-2.0
"""begin_step, fill_inbox and enter_step: what a step writes, and what it leaves offline."""

import pytest
import torch
from kernel_harness import DEVICE

from afd_kernels import (
    INBOX_FIELDS,
    MODE_OFFLINE,
    MODE_ONLINE,
    StepMember,
    begin_step,
    enter_step,
    fill_inbox,
    leave_step,
    signal_word,
)
from afd_kernels.signal_host import BELL_OPEN
from afd_kernels.step import enter_step_ref
from afd_kernels.testing import poison

RUNG = 4097  # some ring: odd


def inbox(lanes: int, members: list[StepMember]) -> torch.Tensor:
    box = torch.full((lanes, INBOX_FIELDS), -5, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    fill_inbox(box, members)
    return box


def tables(lanes: int, device=DEVICE) -> tuple[torch.Tensor, ...]:
    shapes = ((lanes,), (lanes,), (lanes, 8))
    return tuple(poison(*shape, dtype=torch.int64, device=device) for shape in shapes)


def member(index: int) -> StepMember:
    return StepMember(
        index, (1 << 46) + 4096 * index, (1 << 45) + 128 * index, 1 + 1900 * index, (1 << 31) + index, index,
        (1 << 44) + 4 * index,
    )  # fmt: skip


@pytest.mark.parametrize(
    "lanes,indices", [(1, [0]), (5, [3]), (5, [4, 0, 2]), (16, list(range(16))), (7, [6, 1, 5, 2, 0]), (33, [32, 31])]
)
def test_enter_step(lanes, indices, launches):
    """Members are online with their word, rows and slots; every other lane is offline and has no slot."""
    slots, replies, states = tables(lanes)
    box = inbox(lanes, [member(i) for i in indices])
    peer_bells = poison(lanes, dtype=torch.int64, device=DEVICE)
    before = torch.tensor([0, RUNG, BELL_OPEN, RUNG | BELL_OPEN], dtype=torch.int32).repeat(lanes)[:lanes]
    bells = before.to(DEVICE)
    enter_step(box, slots, replies, states, peer_bells=peer_bells, bells=bells)
    for lane in range(lanes):
        m = member(lane)
        if lane in indices:
            assert (int(slots[lane]), int(replies[lane]), int(peer_bells[lane])) == (m.slot, m.reply_slot, m.bell)
            assert states[lane, :4].tolist() == [signal_word(m.session, m.step, 0), 0, MODE_ONLINE, m.rows]
            assert int(bells[lane]) == int(before[lane]) & ~BELL_OPEN, "a ring that has come stays"
        else:
            assert int(slots[lane]) == int(replies[lane]) == 0 and states[lane, :4].tolist() == [0] * 4
            assert int(bells[lane]) == int(before[lane]) | BELL_OPEN
    assert launches["_enter_kernel"] == 1
    twin, twin_bells = tables(lanes, "cpu"), (torch.zeros(lanes, dtype=torch.int64), before.clone())
    enter_step_ref(box, *twin, peer_bells=twin_bells[0], bells=twin_bells[1])
    assert all(torch.equal(a.cpu(), b) for a, b in zip((slots, replies), twin[:2], strict=True))
    assert torch.equal(states[:, :4].cpu(), twin[2][:, :4])
    assert torch.equal(bells.cpu(), twin_bells[1]) and torch.equal(peer_bells.cpu(), twin_bells[0])


def test_no_member(launches):
    slots, replies, states = tables(3)
    enter_step(inbox(3, []), slots, replies, states)
    assert not slots.any() and not replies.any() and not states[:, :4].any()


def test_the_record_is_read_when_the_launch_runs(launches):
    """One captured launch serves every step: a second record shows in the second launch, nothing of the first."""
    slots, replies, states = tables(4)
    box = inbox(4, [member(1), member(2)])
    enter_step(box, slots, replies, states)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    fill_inbox(box, [member(3)])
    enter_step(box, slots, replies, states)
    assert slots.tolist() == [0, 0, 0, member(3).slot]
    assert states[:, 2].tolist() == [MODE_OFFLINE] * 3 + [MODE_ONLINE]


@pytest.mark.parametrize("mode", [MODE_OFFLINE, MODE_ONLINE])
@pytest.mark.parametrize("peers", [1, 3, 33])
def test_begin_step_and_its_bells(mode, peers, launches):
    lane = poison(8, dtype=torch.int64, device=DEVICE)
    before = torch.tensor([BELL_OPEN, 0, RUNG, RUNG | BELL_OPEN], dtype=torch.int32).repeat(peers)[:peers]
    bells = before.to(DEVICE)
    begin_step(lane, session=40000, step=7, rows=5, mode=mode, bells=bells)
    assert lane[:4].tolist() == [signal_word(40000, 7, 0), 0, mode, 5]
    want = before & ~BELL_OPEN if mode == MODE_ONLINE else before | BELL_OPEN
    assert torch.equal(bells.cpu(), want)


@pytest.mark.parametrize("layers", [1, 61, 64, 129])
def test_leave_step_copies_the_clocks_into_host_memory(layers, launches):
    clocks = torch.randint(1 << 60, (layers, 4), device=DEVICE)
    out = torch.full((layers, 4), -1, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    leave_step(clocks, out)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(out, clocks.cpu()) and launches["_leave_kernel"] == 1


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="lane is 3; allowed: 0 … 2"):
        inbox(3, [member(3)])
    with pytest.raises(ValueError, match=r"inbox is torch.int64\[3, 5\] on cpu; allowed: int64\[A, 8\] in host memory"):
        fill_inbox(torch.zeros(3, 5, dtype=torch.int64), [])
    with pytest.raises(ValueError, match="bells and peer_bells belong together"):
        enter_step(inbox(3, []), *tables(3), bells=torch.zeros(3, dtype=torch.int32, device=DEVICE))
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="inbox is not in pinned host memory"):
            enter_step(inbox(3, []).clone(), *tables(3))
