# SPDX-License-Identifier: Apache-2.0
"""The packed message: offsets by other arithmetic, views, words, lane states, refusals."""

import pytest
import torch
from kernel_harness import DEVICE

from afd_kernels import (
    MODE_OFFLINE,
    MODE_ONLINE,
    Header,
    Lane,
    MessageLayout,
    ReplyLayout,
    begin_step,
    signal_word,
    split_word,
    tensor_at,
)
from afd_kernels.testing import poison

LAYOUTS = [
    MessageLayout(1, 0, 1, 1, torch.float32),
    MessageLayout(62, 5, 6, 33, torch.float16),
    MessageLayout(160, 64, 8, 2048, torch.bfloat16),
    MessageLayout(1024, 3, 32, 7, torch.float32, with_token_ids=True),
    MessageLayout(31, 9, 4, 129, torch.float8_e4m3fn),
    MessageLayout(256, 4096, 8, 7168, torch.bfloat16),
]


def up(nbytes: int) -> int:
    while nbytes % 128:
        nbytes += 1
    return nbytes


def by_hand(layout: MessageLayout) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each part, from the table in the module's docstring."""
    scales = -(-layout.hidden_size // 128) * 4 if layout.dtype == torch.float8_e4m3fn else 0
    sizes = {
        "expert_offsets": 4 * (layout.num_experts + 1),
        "pairs": 4 * layout.cap_rows * layout.top_k,
        "weights": 4 * layout.cap_rows * layout.top_k,
        "token_ids": 4 * layout.cap_rows * layout.with_token_ids,
        "row_scales": layout.cap_rows * scales,
        "rows": layout.cap_rows * layout.hidden_size * torch.empty(0, dtype=layout.dtype).element_size(),
    }
    at, parts = 128, {}
    for name, size in sizes.items():
        parts[name] = (at, size)
        at += up(size)
    return parts | {"end": (at, 0)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_offsets(layout):
    parts = by_hand(layout)
    assert layout.nbytes == parts.pop("end")[0]
    for name, (at, _) in parts.items():
        assert layout.offset(name) == at, name
    row = layout.hidden_size * layout.dtype.itemsize + layout.top_k * 8
    assert layout.bytes_used(0) == 128 + 4 * (layout.num_experts + 1)
    assert layout.bytes_used(layout.cap_rows) == layout.bytes_used(0) + layout.cap_rows * row
    assert layout == MessageLayout(**{f: getattr(layout, f) for f in layout.__dataclass_fields__})


@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=str)
def test_views_lie_where_the_offsets_say(layout):
    buffer = torch.zeros(layout.nbytes + 64, dtype=torch.uint8, device=DEVICE)
    views = layout.views(buffer)
    assert views.header.data_ptr() == buffer.data_ptr() and views.header.numel() == 32
    assert views.signal.data_ptr() == buffer.data_ptr() + 120 and views.signal.dtype == torch.int64
    for name, (at, size) in by_hand(layout).items():
        if name != "end":
            view = getattr(views, name)
            assert view.numel() * view.element_size() == size and view.is_contiguous(), name
            assert size == 0 or view.data_ptr() == buffer.data_ptr() + at, name
            view.view(torch.uint8).fill_(1)
    assert int(buffer.sum()) == sum(size for _, size in by_hand(layout).values())
    assert (buffer[:128] == 0).all() and (buffer[layout.nbytes :] == 0).all()


@pytest.mark.parametrize(
    "rows,hidden,dtype", [(0, 5, torch.float32), (3, 33, torch.float16), (64, 128, torch.bfloat16)]
)
def test_reply_layout(rows, hidden, dtype):
    layout = ReplyLayout(rows, hidden, dtype)
    assert layout.nbytes == 128 + up(rows * hidden * dtype.itemsize)
    assert layout.bytes_used(rows) == 8 + rows * hidden * dtype.itemsize
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    views = layout.views(buffer)
    assert views.rows.shape == (rows, hidden) and views.rows.dtype == dtype
    assert views.signal.data_ptr() == buffer.data_ptr() + 120
    assert rows == 0 or views.rows.data_ptr() == buffer.data_ptr() + 128


@pytest.mark.parametrize(
    "layout", [MessageLayout(4, 3, 2, 8, torch.float32), ReplyLayout(3, 8, torch.float32)], ids=str
)
def test_slots_that_do_not_fit(layout):
    good = torch.zeros(layout.nbytes + 128, dtype=torch.uint8, device=DEVICE)
    for buffer in (good[: layout.nbytes - 1], good[8 : layout.nbytes + 8], good.view(torch.int32), good.view(2, -1)):
        with pytest.raises(ValueError, match=f"allowed: uint8\\[{layout.nbytes}\\] or more, 16-byte aligned"):
            layout.views(buffer)


@pytest.mark.parametrize(
    "change,match",
    [({"num_experts": 0}, "num_experts is 0; allowed: 1 … 1024"), ({"num_experts": 1025}, "num_experts is 1025"),
     ({"top_k": 33}, "top_k is 33; allowed: 1 … 32"), ({"top_k": 0}, "top_k is 0"),
     ({"cap_rows": -1}, "cap_rows is -1"),
     ({"hidden_size": 0}, "hidden_size is 0"), ({"dtype": torch.float64}, "dtype is torch.float64; allowed: float32"),
     ({"cap_rows": 1 << 26, "top_k": 32}, r"cap_rows \* top_k is 2147483648; allowed: below 2\*\*31")],
)  # fmt: skip
def test_layouts_that_are_refused(change, match):
    good = {"num_experts": 4, "cap_rows": 8, "top_k": 2, "hidden_size": 16, "dtype": torch.float32}
    with pytest.raises(ValueError, match=match):
        MessageLayout(**(good | change))


@pytest.mark.parametrize("session", [0, 1, 32767, 32768, 65535])
@pytest.mark.parametrize("step", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("exchange", [0, 1, 65535])
def test_words(session, step, exchange):
    word = signal_word(session, step, exchange)
    assert split_word(word) == (session, step, exchange)
    assert -(2**63) <= word < 2**63 and word % 2**64 == session * 2**48 + step * 2**16 + exchange
    assert int(torch.tensor([word], dtype=torch.int64)) == word
    assert signal_word(session, step, 0) | exchange == word


@pytest.mark.parametrize("field,bits", [("session", 16), ("step", 32), ("exchange", 16)])
def test_words_out_of_range(field, bits):
    for value in (-1, 1 << bits):
        with pytest.raises(ValueError, match=f"{field} is {value}; allowed: 0 … {(1 << bits) - 1}"):
            signal_word(**({"session": 1, "step": 1, "exchange": 1} | {field: value}))


@pytest.mark.parametrize("mode", [MODE_ONLINE, MODE_OFFLINE])
def test_begin_step(mode):
    lane = poison(8, dtype=torch.int64, device=DEVICE)
    begin_step(lane, session=40000, step=7, rows=12, mode=mode)
    assert lane.tolist() == [signal_word(40000, 7, 0), 0, mode, 12, 0, 0, 0, 0]
    assert (Lane.WORD, Lane.EXCHANGE, Lane.MODE, Lane.ROWS) == (0, 1, 2, 3)


def test_begin_step_refuses():
    lane = poison(8, dtype=torch.int64, device=DEVICE)
    for kwargs, match in (
        ({"mode": 2}, "mode is 2"),
        ({"rows": -1}, "rows is -1"),
        ({"session": 1 << 16}, "session is"),
    ):
        with pytest.raises(ValueError, match=match):
            begin_step(lane, **({"session": 1, "step": 1, "rows": 1} | kwargs))
    assert (lane == 0x5B5B5B5B).all()


def test_header_fields_leave_the_signal_alone():
    assert max(Header) * 4 < 120 and list(Header) == list(range(len(Header)))


def test_tensor_at():
    memory = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    view = tensor_at(memory.data_ptr() + 16, 8, DEVICE)
    assert view.dtype == torch.uint8 and view.device == memory.device and view.tolist() == list(range(16, 24))
    view[0] = 99
    assert int(memory[16]) == 99
    assert tensor_at(0, 0, DEVICE).numel() == 0
    with pytest.raises(ValueError, match="the slot is not attached"):
        tensor_at(0, 8, DEVICE)
