# SPDX-License-Identifier: Apache-2.0
"""begin_step and enter_step: what a step writes, by value, and what it leaves offline."""

import pytest
import torch
from kernel_harness import DEVICE

from afd_kernels import MODE_ONLINE, StepMember, enter_step, signal_word
from afd_kernels.step import enter_step_ref
from afd_kernels.testing import poison


def tables(lanes: int, device=DEVICE) -> tuple[torch.Tensor, ...]:
    shapes = ((lanes,), (lanes,), (lanes, 8))
    return tuple(poison(*shape, dtype=torch.int64, device=device) for shape in shapes)


def member(index: int) -> StepMember:
    return StepMember(
        index, (1 << 46) + 4096 * index, (1 << 45) + 128 * index, 1 + 1900 * index, (1 << 31) + index, index
    )


@pytest.mark.parametrize(
    "lanes,indices", [(1, [0]), (5, [3]), (5, [4, 0, 2]), (16, list(range(16))), (7, [6, 1, 5, 2, 0]), (33, [32, 31])]
)
def test_enter_step(lanes, indices, launches):
    """Members are online with their word, rows and slots; every other lane is offline and has no slot."""
    slots, replies, states = tables(lanes)
    members = [member(i) for i in indices]
    enter_step(slots, replies, states, members)
    for lane in range(lanes):
        m = member(lane)
        if lane in indices:
            assert (int(slots[lane]), int(replies[lane])) == (m.slot, m.reply_slot)
            assert states[lane, :4].tolist() == [signal_word(m.session, m.step, 0), 0, MODE_ONLINE, m.rows]
        else:
            assert int(slots[lane]) == int(replies[lane]) == 0 and states[lane, :4].tolist() == [0] * 4
    assert launches["_enter_kernel"] == -(-len(indices) // 4)
    twin = tables(lanes, "cpu")
    enter_step_ref(*twin, members)
    assert all(torch.equal(a.cpu(), b) for a, b in zip((slots, replies), twin[:2], strict=True))
    assert torch.equal(states[:, :4].cpu(), twin[2][:, :4])


def test_no_member(launches):
    slots, replies, states = tables(3)
    enter_step(slots, replies, states, [])
    assert not slots.any() and not replies.any() and not states.any()


def test_index_past_the_tables_is_refused():
    with pytest.raises(ValueError, match="lane is 3; allowed: 0 … 2"):
        enter_step(*tables(3), [member(3)])
