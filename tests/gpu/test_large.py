# SPDX-License-Identifier: Apache-2.0
"""Products of sizes past 2^31 (case 21): right values on sampled rows, not only finite ones. Needs about 60 GB."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from afd_kernels import (  # noqa: E402
    MessageLayout,
    ReplyLayout,
    SwiGLU,
    arrival,
    begin_step,
    combine,
    dispatch,
    experts_forward,
    fused_experts,
    reply,
    top_k_from_logits,
    wait,
)
from afd_kernels.testing import assert_close, moe_oracle  # noqa: E402

TOP_K, HIDDEN, EXPERTS, INNER = 8, 7168, 12, 32
TOKENS = 2**31 // (TOP_K * HIDDEN) + 120  # tokens * k * H is past 2^31
GIB = 1 << 30


def need(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / GIB:.0f} are free")


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    torch.cuda.empty_cache()


def sampled(tokens: int) -> torch.Tensor:
    """Rows near both ends, on both sides of the row whose pairs cross 2^31 elements, and some between."""
    cross = 2**31 // (TOP_K * HIDDEN)
    rows = [0, 1, tokens // 3, tokens // 2, cross - 1, cross, cross + 1, tokens - 2, tokens - 1]
    return torch.tensor(sorted({r for r in rows if 0 <= r < tokens}))


class Inputs:
    def __init__(self, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> None:
        g = torch.Generator("cuda").manual_seed(0)
        make = {"device": "cuda", "generator": g, "dtype": dtype}
        self.x = torch.randn(tokens, HIDDEN, **make)
        self.w_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, **make) * HIDDEN**-0.5
        self.w_down = torch.randn(EXPERTS, HIDDEN, INNER, **make) * INNER**-0.5
        logits = torch.randn(tokens, EXPERTS, device="cuda", generator=g)
        self.weights, self.ids = top_k_from_logits(logits, top_k=TOP_K, renormalize=True)

    def check(self, out: torch.Tensor, w_up=None, w_down=None) -> None:
        assert out.isfinite().all()
        rows = sampled(out.shape[0]).cuda()
        want = moe_oracle(
            self.x[rows], self.w_up if w_up is None else w_up, self.w_down if w_down is None else w_down,
            self.weights[rows], self.ids[rows],
        )  # fmt: skip
        assert_close(out[rows], want, dtype=self.x.dtype)
        # every other row: not zero, not a neighbour's
        norms = out.float().square().mean(1).sqrt()
        assert (norms > 0.01).all()


def test_fused_experts():
    need(12)
    i = Inputs()
    assert TOKENS * TOP_K * HIDDEN > 2**31
    out = torch.full_like(i.x, float("nan"))
    fused_experts(i.x, i.w_up, i.w_down, i.weights, i.ids, out=out)
    i.check(out)
    # blocks of rows on their own give the same values: nothing wrapped around
    for start in (0, TOKENS - 1000):
        part = slice(start, start + 1000)
        alone = fused_experts(i.x[part], i.w_up, i.w_down, i.weights[part].contiguous(), i.ids[part].contiguous())
        assert_close(out[part], alone.double(), dtype=torch.bfloat16)


@pytest.mark.parametrize("reply_dtype", [torch.bfloat16, torch.float32])
def test_exchange(reply_dtype):
    """Two peers, one lane whose rows and pairs are past 2^31 elements."""
    need(30)
    i, size = Inputs(), EXPERTS // 2
    layout, replies = MessageLayout(size, TOKENS, TOP_K, HIDDEN, i.x.dtype), ReplyLayout(TOKENS, HIDDEN, reply_dtype)
    requests = [torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    answers = [torch.zeros(replies.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    lane = torch.zeros(8, dtype=torch.int64, device="cuda")
    begin_step(lane, session=40000, step=1, rows=TOKENS)
    table = torch.tensor([r.data_ptr() for r in requests], device="cuda")
    bucket = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    abort, status = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    row_map = dispatch(i.x, i.ids, i.weights, expert_bucket=bucket, slots=table, layout=layout, lane=lane)
    for peer in range(2):
        lanes, mine = lane.clone()[None], slice(peer * size, (peer + 1) * size)
        wait(table[peer : peer + 1], lanes, abort=abort, status=status, timeout_s=20.0)
        schedule = arrival(table[peer : peer + 1], lanes, layout, block_m=64)
        y = experts_forward(schedule, i.w_up[mine], i.w_down[mine])
        reply(y, schedule, torch.tensor([answers[peer].data_ptr()], device="cuda"), lanes, replies)
        del y
    back = torch.tensor([a.data_ptr() for a in answers], device="cuda")
    wait(back, lane, abort=abort, status=status, timeout_s=20.0)
    out = combine(back, row_map, replies, lane, out=torch.full_like(i.x, float("nan")))
    assert int(status[0]) == 0
    i.check(out)
    for peer in range(2):  # rows arrived where the map says
        rows = sampled(TOKENS).cuda()
        rows = rows[row_map[peer, rows] >= 0]
        assert torch.equal(layout.views(requests[peer]).rows[row_map[peer, rows].long()], i.x[rows])


def test_rows_of_a_slot_past_2_31_elements():
    """row * H itself past 2^31: 300,000 rows of 7168 in one message, and the combine of them."""
    need(30)
    tokens = 2**31 // HIDDEN + 300
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    x.copy_((torch.arange(tokens, device="cuda") % 251)[:, None].expand_as(x))
    layout, replies = MessageLayout(1, tokens, 1, HIDDEN, x.dtype), ReplyLayout(tokens, HIDDEN, x.dtype)
    assert tokens * HIDDEN > 2**31
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    lane = torch.zeros(8, dtype=torch.int64, device="cuda")
    begin_step(lane, session=1, step=1, rows=tokens)
    row_map = dispatch(
        x, torch.zeros(tokens, 1, dtype=torch.int32, device="cuda"), torch.ones(tokens, 1, device="cuda"),
        expert_bucket=torch.zeros(1, dtype=torch.int32, device="cuda"),
        slots=torch.tensor([slot.data_ptr()], device="cuda"), layout=layout, lane=lane,
    )  # fmt: skip
    message = layout.views(slot)
    assert torch.equal(message.pairs, torch.arange(tokens, dtype=torch.int32, device="cuda"))
    assert torch.equal(message.rows, x)
    # the message's rows, read back as if they were a reply's: the row map is the identity
    answer = torch.empty(replies.nbytes, dtype=torch.uint8, device="cuda")
    replies.views(answer).rows.copy_(x)
    out = combine(torch.tensor([answer.data_ptr()], device="cuda"), row_map.flip(1).contiguous(), replies, lane)
    assert torch.equal(out, x.flip(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_expert_stride_past_2_31(transposed):
    """Experts further apart than 2^31 elements: views of one large buffer, the last expert at 3 * 2^30 elements."""
    need(20)
    i = Inputs(tokens=70)
    experts, apart = 4, (1 << 30) + 4096
    at, nan = 2 * INNER * HIDDEN, {"fill_value": float("nan"), "dtype": torch.bfloat16, "device": "cuda"}
    buffer = torch.full(((experts - 1) * apart + at,), **nan)
    assert (experts - 1) * apart > 2**31
    rows = (1, 2 * INNER) if transposed else (HIDDEN, 1)
    w_up = torch.as_strided(buffer, (experts, 2 * INNER, HIDDEN), (apart, *rows)).copy_(i.w_up[:experts])
    down = torch.full(((experts - 1) * apart + HIDDEN * INNER + at,), **nan)
    rows = (1, HIDDEN) if transposed else (INNER, 1)
    w_down = torch.as_strided(down, (experts, HIDDEN, INNER), (apart, *rows), at).copy_(i.w_down[:experts])
    i.ids, i.weights = i.ids[:, :3] % experts, i.weights[:, :3]
    i.ids[:, 0] = experts - 1
    i.ids, i.weights = i.ids.contiguous(), i.weights.contiguous()
    out = fused_experts(i.x, w_up, w_down, i.weights, i.ids, activation=SwiGLU())
    i.check(out, w_up, w_down)


def test_logits_past_2_31():
    """tokens * E past 2^31 in the top-k."""
    need(20)
    experts = 1024
    tokens = 2**31 // experts + 50
    logits = torch.zeros(tokens, experts, dtype=torch.bfloat16, device="cuda")
    best = (torch.arange(tokens, device="cuda") * 7919) % experts
    logits.scatter_(1, best[:, None], 3.0)
    weights, ids = top_k_from_logits(logits, top_k=2, renormalize=True)
    assert torch.equal(ids[:, 0].long(), best)
    second = torch.where(best == 0, 1, 0)
    assert torch.equal(ids[:, 1].long(), second)
    assert (weights[:, 0] - 20.0855 / 21.0855).abs().max() < 1e-4
