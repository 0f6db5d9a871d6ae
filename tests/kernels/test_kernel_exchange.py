# SPDX-License-Identifier: Apache-2.0
"""The whole path of D peers and A lanes: dispatch, wait, arrival, experts, reply, wait, combine."""

import pytest
import torch
from kernel_harness import DEVICE, GUARD, World, blocks, passes, round_robin, same_bits, shard, to_cpu

from afd_kernels import (
    MODE_OFFLINE,
    MODE_ONLINE,
    Header,
    Lane,
    MessageLayout,
    SwiGLU,
    arrival,
    experts_forward,
    fused_experts,
    reply,
    signal_word,
)
from afd_kernels.testing import assert_close, expert_inputs, moe_oracle, poison

KERNELS = ("_dispatch_kernel", "_wait_kernel", "_merge_kernel", "_p_experts_up_kernel", "_p_experts_down_kernel",
           "_reply_kernel", "_combine_kernel")  # fmt: skip
GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)


class Case:
    """Inputs for each lane, experts cut over the peers, and what a whole model would answer."""

    def __init__(self, peers, lanes, experts, top_k, dtype, *, tokens=7, hidden=24, intermediate=20, placement=blocks,
                 activation=SwiGLU(), reply_dtype=None, cap=None) -> None:  # fmt: skip
        self.activation, self.dtype = activation, dtype
        self.tokens = [tokens + 3 * a for a in range(lanes)]
        make = {"dtype": dtype, "device": DEVICE, "bias": True}
        self.inputs = [expert_inputs(n, experts, hidden, intermediate, top_k, seed=a, **make)
                       for a, n in enumerate(self.tokens)]  # fmt: skip
        self.experts = self.inputs[0]
        self.ids = [i.topk_ids.clone() for i in self.inputs]
        self.weights = [i.topk_weights.clone() for i in self.inputs]
        size, self.bucket = placement(experts, peers)
        self.size = size
        self.shards = shard(self.experts, self.bucket, size, peers)
        layout = MessageLayout(size, cap or max(self.tokens) + 2, top_k, hidden, dtype)
        self.world = World(peers, lanes, layout, reply_dtype)
        self.world.begin(self.tokens)

    def want(self, lane: int, rows: int | None = None) -> torch.Tensor:
        i, e = self.inputs[lane], self.experts
        out = moe_oracle(i.x, e.w_up, e.w_down, self.weights[lane], self.ids[lane], activation=self.activation,
                         b_up=e.b_up, b_down=e.b_down)  # fmt: skip
        if rows is not None:
            out[rows:] = 0
        return out

    def send(self) -> list[torch.Tensor]:
        return [self.world.send(a, i.x, self.ids[a], self.weights[a], self.bucket) for a, i in enumerate(self.inputs)]

    def serve(self) -> None:
        for peer in range(self.world.num_peers):
            self.world.serve(peer, self.shards[peer], self.activation)

    def run(self, out_dtype=None) -> list[torch.Tensor]:
        maps = self.send()
        self.serve()
        return [self.world.receive(a, row_map, out_dtype) for a, row_map in enumerate(maps)]

    def check(self, outs: list[torch.Tensor], rows: list[int] | None = None) -> None:
        for a, out in enumerate(outs):
            assert_close(out, self.want(a, rows and rows[a]), dtype=self.dtype, what=f"lane {a}")


SIZES = [
    (1, 1, 1, 1),
    (1, 2, 5, 2),
    (2, 1, 7, 3),
    (2, 3, 8, 2),
    (3, 2, 62, 6),
    (4, 1, 160, 8),
    (5, 4, 12, 4),
    (2, 8, 6, 1),
]


@pytest.mark.parametrize("placement", [blocks, round_robin])
@pytest.mark.parametrize("peers,lanes,experts,top_k", SIZES)
def test_sizes(peers, lanes, experts, top_k, placement, launches):
    """Peers that do not divide the experts have NaN weights for the experts they lack."""
    case = Case(peers, lanes, experts, top_k, torch.float32, placement=placement, tokens=4)
    case.check(case.run())
    launches.expect(*KERNELS)
    assert launches["_dispatch_kernel"] == lanes and launches["_reply_kernel"] == peers


@pytest.mark.parametrize("reply_dtype", [None, torch.float32])
@pytest.mark.parametrize("activation", [SwiGLU(), GPT_OSS, SwiGLU(gate_first=False, limit=10.0)])
def test_dtypes(activation, reply_dtype, dtype, launches):
    case = Case(2, 2, 7, 3, dtype, activation=activation, reply_dtype=reply_dtype)
    case.check(case.run(out_dtype=dtype))
    launches.expect(*KERNELS)


def test_fp32_replies_of_half_rows_round_less(launches):
    """Four partial sums in fp32 are closer to the truth than four rounded ones."""
    errors = []
    for reply_dtype in (torch.float16, torch.float32):
        case = Case(4, 1, 8, 4, torch.float16, tokens=20, reply_dtype=reply_dtype, placement=round_robin)
        (out,) = case.run(out_dtype=torch.float32)
        errors.append((out.cpu().double() - case.want(0)).square().mean().sqrt().item())
    assert errors[1] < errors[0]
    launches.expect(*KERNELS)


def test_one_peer_equals_the_layer_on_one_rank(dtype, launches):
    case = Case(1, 1, 6, 2, dtype, reply_dtype=dtype, tokens=9, cap=9)
    (out,) = case.run()
    i, e = case.inputs[0], case.experts
    whole = fused_experts(i.x, e.w_up, e.w_down, case.weights[0], case.ids[0], b_up=e.b_up, b_down=e.b_down)
    assert same_bits(out, whole)
    launches.expect(*KERNELS)


def test_several_exchanges_of_one_step(dtype, launches):
    """A model's layers: same slots, the exchange counts up, each with its own rows and routing."""
    case = Case(2, 2, 7, 3, dtype)
    first = case.run()
    for exchange in range(1, 4):
        for a, i in enumerate(case.inputs):
            i.x.copy_(i.x.flip(0) * 0.75)
            case.ids[a] = (case.ids[a] + 1) % 7
        outs = case.run()
        case.check(outs)
        assert case.world.lanes[:, Lane.EXCHANGE].tolist() == [exchange + 1] * 2
        for a in range(2):
            word = signal_word(40000 + a, 5, exchange)
            for peer in range(2):
                header = case.world.message(peer, a).header.tolist()
                assert (header[Header.STEP], header[Header.EXCHANGE]) == (5, exchange)
                assert int(case.world.message(peer, a).signal) == word
                assert int(case.world.reply_layout.views(case.world.replies[peer][a]).signal) == word
        assert not same_bits(outs[0], first[0])
    launches.expect(*KERNELS)


def test_steps_that_shrink_and_grow(launches):
    """Rows left over from a larger step are not read: case 19."""
    case = Case(2, 2, 7, 3, torch.float32, cap=64, tokens=30)
    case.check(case.run())
    for step, rows in enumerate([[1, 30], [0, 2], [30, 33]], start=6):
        case.world.begin(rows, step=step)
        case.check(case.run(), rows)
    launches.expect(*KERNELS)


@pytest.mark.parametrize("rows", [[0, 0], [0, 5], [7, 0], [3, 10], [1, 1]])
def test_rows_of_the_step(rows, launches):
    """Rows past lane[ROWS] are padding: not sent, and zero in the result, NaN or not."""
    case = Case(2, 2, 7, 3, torch.float32)
    case.world.begin(rows)
    for a, n in enumerate(rows):
        case.inputs[a].x[n:] = float("nan")
    outs = case.run()
    for a, n in enumerate(rows):
        assert (outs[a][n:] == 0).all()
        clean = case.want(a)
        clean[n:] = 0
        assert_close(outs[a], clean)
        for peer in range(2):
            assert int(case.world.message(peer, a).header[Header.ROWS]) <= n
    launches.expect(*KERNELS)


@pytest.mark.parametrize("offline", [0, 1, 2])
def test_offline_lane(offline, launches):
    case = Case(2, 3, 7, 3, torch.float32)
    modes = [MODE_OFFLINE if a == offline else MODE_ONLINE for a in range(3)]
    case.world.begin(case.tokens, modes=modes)
    before = [to_cpu(slots[offline]) for slots in (*case.world.requests, *case.world.replies)]
    outs = case.run()
    assert (outs[offline] == 0).all()
    case.check(outs, [0 if a == offline else 99 for a in range(3)])
    after = [slots[offline].cpu() for slots in (*case.world.requests, *case.world.replies)]
    assert all(map(torch.equal, before, after)), "an offline lane's slot was touched"
    assert case.world.lanes[:, Lane.EXCHANGE].tolist() == [int(a != offline) for a in range(3)]
    launches.expect(*KERNELS)


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("unmapped", [False, True])
def test_a_lane_that_leaves_after_its_rows_were_merged(gone, unmapped, launches):
    case = Case(1, 3, 7, 3, torch.float32)
    world, lanes = case.world, case.world.ffn_lanes[0]
    maps = case.send()
    passes(world.requests_to(0), lanes)
    schedule = arrival(world.requests_to(0), lanes, world.layout)
    y = experts_forward(schedule, **case.shards[0])
    lanes[gone, Lane.MODE] = MODE_OFFLINE
    replies, before = world.replies_from(0), to_cpu(world.replies[0][gone])
    if unmapped:
        replies[gone] = 0
        schedule.weight_address[gone] = 64
    reply(y, schedule, replies, lanes, world.reply_layout)
    assert torch.equal(world.replies[0][gone].cpu(), before), "the slot of a lane that left was touched"
    for a in {0, 1, 2} - {gone}:
        assert_close(world.receive(a, maps[a]), case.want(a))
    launches.expect(*KERNELS)


def test_all_lanes_offline(launches):
    case = Case(2, 2, 7, 3, torch.float32)
    case.world.begin([7, 10], modes=[MODE_OFFLINE] * 2)
    assert all((out == 0).all() for out in case.run())
    launches.expect(*KERNELS)


def test_choices_that_are_nowhere(dtype, launches):  # cases 17, 18
    case = Case(2, 2, 7, 3, dtype)
    for a in range(2):
        case.ids[a][1], case.ids[a][2, 1], case.ids[a][3, 0] = -1, -1, 7
        case.weights[a][4], case.weights[a][5, 2] = 0, 0
        case.inputs[a].x[4] = float("nan")  # its weights are 0
    outs = case.run()
    for out in outs:
        assert (out[1] == 0).all() and (out[4] == 0).all()
    case.check(outs)
    launches.expect(*KERNELS)


def test_nan_row_stays_alone(launches):
    case = Case(2, 2, 7, 3, torch.float32)
    clean = case.run()
    case.inputs[0].x[3] = float("nan")
    case.world.begin(case.tokens, step=6)
    outs = case.run()
    assert outs[0][3].isnan().all() and same_bits(outs[1], clean[1])
    good = [r for r in range(7) if r != 3]
    assert same_bits(outs[0][good], clean[0][good])
    launches.expect(*KERNELS)


@pytest.mark.parametrize("peer", [0, 1, 2])
def test_one_peer_has_no_token(peer, launches):  # case 28
    case = Case(3, 2, 9, 2, torch.float32)
    others = torch.tensor([e for e in range(9) if e // 3 != peer], dtype=torch.int32, device=DEVICE)
    for a, ids in enumerate(case.ids):
        case.ids[a] = others[ids.long() % 6]
    case.check(case.run())
    for a in range(2):
        assert int(case.world.message(peer, a).header[Header.ROWS]) == 0
        assert int(case.world.reply_layout.views(case.world.replies[peer][a]).signal) != 0
    launches.expect(*KERNELS)


@pytest.mark.parametrize("expert", [0, 6])
def test_all_tokens_on_one_expert(expert, launches):  # case 13
    case = Case(2, 2, 7, 1, torch.float32, tokens=35)
    for a in range(2):
        case.ids[a].fill_(expert)
    case.check(case.run())
    launches.expect(*KERNELS)


def test_what_travels(dtype, launches):
    """Rows at a rank are exactly the tokens with an expert there; the rest of each slot still holds its poison."""
    case = Case(3, 2, 12, 2, dtype, placement=round_robin, tokens=11, cap=40)
    case.ids[0][4, 0] = -1
    case.weights[1][2, 1] = 0
    case.run()
    for a in range(2):
        here = torch.where(case.weights[a] != 0, case.ids[a], -1)
        for peer in range(3):
            tokens = ((here >= 0) & (here % 3 == peer)).any(1).nonzero().squeeze(1)
            message, slot = case.world.message(peer, a), case.world.requests[peer][a]
            n = len(tokens)
            assert int(message.header[Header.ROWS]) == n
            assert same_bits(message.rows[:n], case.inputs[a].x[tokens])
            pairs = int(message.header[Header.PAIRS])
            for part in (message.rows[n:], message.weights[n:], message.pairs[pairs:]):
                assert (part.view(torch.uint8) == 0x5B).all()
            answer, layout = case.world.replies[peer][a], case.world.reply_layout
            assert (layout.views(answer).rows[n:].contiguous().view(torch.uint8) == 0x5B).all()
            assert (answer[:120] == 0x5B).all() and (answer[-GUARD:] == 0x5B).all() and (slot[-GUARD:] == 0x5B).all()
    launches.expect(*KERNELS)


def test_reused_y_and_schedule_show_nothing_of_before(launches):
    """The FFN rank keeps its buffers; what a larger step left in them is not read."""
    case = Case(1, 2, 7, 3, torch.float32, cap=40, tokens=30)
    world, schedule = case.world, None
    y = poison(2 * 40 * 3, 24, dtype=torch.float32, device=DEVICE)
    for step, rows in enumerate([[30, 33], [2, 1], [0, 4], [30, 2]], start=5):
        world.begin(rows, step=step)
        maps = case.send()
        passes(world.requests_to(0), world.ffn_lanes[0])
        schedule = arrival(world.requests_to(0), world.ffn_lanes[0], world.layout, schedule=schedule)
        experts_forward(schedule, **case.shards[0], y=y)
        reply(y, schedule, world.replies_from(0), world.ffn_lanes[0], world.reply_layout)
        case.check([world.receive(a, row_map) for a, row_map in enumerate(maps)], rows)
    launches.expect(*KERNELS)


def test_repeatable(dtype, launches):
    """Bitwise the same from run to run, also in other memory."""
    outs = [Case(3, 2, 12, 4, dtype).run() for _ in range(2)]
    assert all(map(same_bits, *outs))
    launches.expect(*KERNELS)


@pytest.mark.parametrize("field,value", [(Header.MAGIC, 1), (Header.ROWS, 1000)])
def test_a_refused_message_harms_no_other_lane(field, value, launches):
    case = Case(1, 3, 7, 3, torch.float32)
    maps = case.send()
    case.world.message(0, 1).header[field] = value
    schedule = arrival(case.world.requests_to(0), case.world.ffn_lanes[0], case.world.layout)
    assert schedule.error.tolist() == [0, 1, 0]
    y = experts_forward(schedule, **case.shards[0])
    reply(y, schedule, case.world.replies_from(0), case.world.ffn_lanes[0], case.world.reply_layout)
    for a in (0, 2):
        assert_close(case.world.receive(a, maps[a]), case.want(a))
    launches.expect("_merge_kernel", "_reply_kernel")
