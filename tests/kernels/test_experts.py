# SPDX-License-Identifier: Apache-2.0
"""The experts: one-rank layer, both grouped GEMMs, reply and launch table, against references and an fp64 loop."""

import dataclasses
import itertools

import pytest
import torch
from kernel_harness import DEVICE, World, addresses, blocks, generator, new_slot, same_bits, strided, to_cpu

from afd_kernels import (
    MODE_OFFLINE,
    REPLY_WORKSPACE,
    GemmConfig,
    Lane,
    MessageLayout,
    ReplyLayout,
    SwiGLU,
    arrival,
    experts,
    experts_forward,
    experts_workspace,
    fused_experts,
    fused_experts_workspace,
    fused_moe,
    pick,
    pick_experts,
    reply,
    route,
    signal_word,
)
from afd_kernels.experts import experts_forward_ref
from afd_kernels.layer import fused_experts_ref
from afd_kernels.reply import reply_ref
from afd_kernels.testing import assert_close, expert_inputs, moe_oracle, poison

LAYER = ("_small_plan_kernel", "_merge_kernel", "_p_experts_up_kernel", "_p_experts_down_kernel",
         "_weighted_sum_kernel")  # fmt: skip
GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)


def inputs(tokens, experts, hidden, intermediate, top_k, dtype=torch.float32, **kwargs):
    return expert_inputs(tokens, experts, hidden, intermediate, top_k, dtype=dtype, device=DEVICE, **kwargs)


def check(i, *, activation=SwiGLU(), ids=None, weights=None, x=None, w_up=None, w_down=None, out=None):
    """fused_experts against the fp64 loop and the reference; returns the result. Given views replace the inputs'."""
    args = [t if given is None else given for t, given in
            ((i.x, x), (i.w_up, w_up), (i.w_down, w_down), (i.topk_weights, weights), (i.topk_ids, ids))]  # fmt: skip
    kwargs = {"activation": activation, "b_up": i.b_up, "b_down": i.b_down}
    out = poison(*i.x.shape, dtype=i.x.dtype, device=DEVICE) if out is None else out
    assert fused_experts(*args, out=out, **kwargs) is out
    args, kwargs = to_cpu(args), to_cpu(kwargs)
    assert_close(out, moe_oracle(*args, **kwargs), what="against the loop")
    assert_close(out, fused_experts_ref(*args, **kwargs), what="against the reference")
    return out


SHAPES = [(1, 1, 16, 8, 1), (5, 7, 33, 20, 3), (17, 4, 64, 192, 2), (37, 12, 40, 20, 4), (130, 3, 48, 24, 2)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens,experts,hidden,intermediate,top_k", SHAPES)
def test_shapes(tokens, experts, hidden, intermediate, top_k, bias, dtype, launches):
    check(inputs(tokens, experts, hidden, intermediate, top_k, dtype, bias=bias))
    launches.expect(*LAYER)


@pytest.mark.parametrize("experts", [62, 64, 72, 128, 160, 192, 256, 288, 384, 512, 1024])
def test_every_number_of_experts(experts, launches):  # case 12
    i = inputs(3, experts, 20, 8, 4)
    ids = i.topk_ids.clone()
    ids[0, 0], ids[1, 1] = experts - 1, 0
    check(i, ids=ids)
    launches.expect(*LAYER)


@pytest.mark.parametrize("top_k", [1, 5, 16, 32])
def test_every_number_of_choices(top_k, launches):
    check(inputs(6, 40, 24, 12, top_k))
    launches.expect(*LAYER)


ACTIVATIONS = {
    "up first": SwiGLU(gate_first=False),
    "interleaved": SwiGLU(interleaved=True),
    "interleaved, up first": SwiGLU(interleaved=True, gate_first=False),
    "clamp": SwiGLU(limit=10.0),
    "clamp, up first": SwiGLU(limit=10.0, gate_first=False),
    "gpt-oss": GPT_OSS,
    "gpt-oss, halves": SwiGLU(alpha=1.702, beta=1.0, limit=7.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("intermediate", [20, 192])
def test_activations(name, intermediate, dtype, launches):  # cases 20, 22
    i = inputs(9, 5, 32, intermediate, 2, dtype, bias=True)
    a = check(i, activation=ACTIVATIONS[name])
    b = fused_experts(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids, b_up=i.b_up, b_down=i.b_down)
    if name != "clamp":  # these inputs do not reach it
        assert not torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05), "the activation made no difference"
    launches.expect(*LAYER)


@pytest.mark.parametrize("name", ["clamp", "clamp, up first", "gpt-oss"])
def test_clamp_with_large_inputs(name, dtype, launches):  # case 22
    i = inputs(8, 4, 16, 24, 2, dtype)
    i.x.fill_(1.0)
    i.x[::2] = -1.0
    i.w_up.copy_((torch.randint(0, 2, i.w_up.shape, generator=generator(1)) * 100 - 50) / 16)
    i.w_up[:, :, :] = i.w_up[:, :, :1]  # every gate and up is +50 or -50
    assert ((i.x.float() @ i.w_up[0].float().t()).abs() == 50).all()
    check(i, activation=ACTIVATIONS[name])
    launches.expect(*LAYER)


def test_gpt_oss_weights_as_it_holds_them(dtype, launches):
    """[E, H, 2I] and [E, I, H], interleaved, with biases: transposed views, no copy."""
    i = inputs(11, 6, 40, 20, 3, dtype, bias=True)
    held_up, held_down = i.w_up.transpose(1, 2).contiguous(), i.w_down.transpose(1, 2).contiguous()
    w_up, w_down = held_up.transpose(1, 2), held_down.transpose(1, 2)
    assert w_up.stride(1) == 1 and w_down.stride(1) == 1
    check(i, activation=GPT_OSS, w_up=w_up, w_down=w_down)
    launches.expect(*LAYER)


def test_slices_of_larger_tensors(dtype, launches):
    i = inputs(9, 5, 24, 20, 2, dtype)
    wide = poison(5, 40 + 7, 24 + 5, dtype=dtype, device=DEVICE)
    w_up = wide[:, 3:43, 2:26].copy_(i.w_up)
    out = strided(torch.zeros(9, 24, dtype=dtype, device=DEVICE))
    check(i, x=strided(i.x), w_up=w_up, w_down=strided(i.w_down), out=out)
    assert out._base.isnan().sum() == out._base.numel() - out.numel(), "wrote outside of out"
    aligned = poison(9, 32, dtype=dtype, device=DEVICE)[:, :24].copy_(i.x)
    check(i, x=aligned, w_up=poison(7, 48, 24, dtype=dtype, device=DEVICE)[1:6, :40].copy_(i.w_up))
    launches.expect(*LAYER)


@pytest.mark.parametrize("expert", [0, 2, 5])
@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_on_one_expert(expert, tokens, dtype, launches):  # case 13
    i = inputs(tokens, 6, 24, 16, 1, dtype)
    poisoned = i.w_up.clone()
    poisoned[[e for e in range(6) if e != expert]] = float("nan")
    check(i, ids=torch.full_like(i.topk_ids, expert), w_up=poisoned)
    launches.expect(*LAYER)


@pytest.mark.parametrize("empty", [0, 3, 5])
def test_an_empty_expert(empty, launches):  # case 13
    i = inputs(20, 6, 24, 16, 2)
    ids = torch.where(i.topk_ids == empty, -1, i.topk_ids)
    poisoned = i.w_down.clone()
    poisoned[empty] = float("nan")
    check(i, ids=ids, w_down=poisoned)
    launches.expect(*LAYER)


def test_no_tokens(dtype):
    i = inputs(0, 4, 16, 8, 2, dtype)
    out = fused_experts(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids)
    assert out.shape == (0, 16) and out.dtype == dtype
    out = fused_moe(i.x, i.gate_weight, i.w_up, i.w_down, top_k=2)
    assert out.shape == (0, 16) and out.dtype == dtype


def test_choices_that_are_not_here(dtype, launches):  # case 17
    i = inputs(8, 6, 24, 16, 3, dtype)
    ids, weights = i.topk_ids.clone(), i.topk_weights.clone()
    ids[2], ids[3, 1], ids[4, 0], ids[4, 2] = -1, -1, 6, -9
    weights[5], weights[6, 0] = 0.0, 0.0
    out = check(i, ids=ids, weights=weights)
    assert (out[2] == 0).all() and (out[5] == 0).all()
    launches.expect(*LAYER)


def test_nan_rows_stay_alone(dtype, launches):  # case 18
    i = inputs(9, 4, 24, 16, 2, dtype)
    clean = check(i)
    x, weights = i.x.clone(), i.topk_weights.clone()
    x[3], x[6] = float("nan"), float("inf")
    weights[3] = 0
    out = fused_experts(x, i.w_up, i.w_down, weights, i.topk_ids)
    good = [0, 1, 2, 4, 5, 7, 8]
    assert same_bits(out[good], clean[good]) and (out[3] == 0).all() and not out[6].isfinite().any()
    launches.expect(*LAYER)


def test_a_row_is_alone_and_repeatable(dtype, launches):
    i = inputs(40, 4, 24, 16, 2, dtype)
    first = check(i)
    args = (i.w_up, i.w_down, i.topk_weights, i.topk_ids)
    assert same_bits(first, fused_experts(i.x, *args))
    other = i.x.flip(0)
    other[7] = i.x[7]
    ids = i.topk_ids.flip(0)
    ids[7] = i.topk_ids[7]
    second = fused_experts(other, i.w_up, i.w_down, i.topk_weights, ids)
    assert same_bits(first[7], second[7])
    launches.expect(*LAYER)


def test_negative_and_large_weights(launches):
    i = inputs(7, 4, 24, 16, 3)
    check(i, weights=i.topk_weights * torch.tensor([-3.0, 100.0, 0.5], device=DEVICE))
    launches.expect(*LAYER)


def test_workspace_is_used_again(launches):
    nbytes = fused_experts_workspace(30, 5, 16, 24, 3, torch.float32, torch.device(DEVICE))
    buffer = torch.zeros(nbytes + 512, dtype=torch.uint8, device=DEVICE)
    buffer[nbytes:] = 0x5B
    for seed in range(3):
        i = inputs(30, 5, 24, 16, 3, seed=seed, skew=seed / 2)
        ids = torch.where(i.topk_ids == seed, -1, i.topk_ids)
        args = (i.x, i.w_up, i.w_down, i.topk_weights, ids)
        assert same_bits(fused_experts(*args, workspace=buffer), fused_experts(*args))
    assert (buffer[nbytes:] == 0x5B).all()
    with pytest.raises(ValueError, match=f"at least {nbytes}"):
        fused_experts(*args, workspace=buffer[: nbytes - 1])
    launches.expect(*LAYER)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_fused_moe_is_route_then_experts(scoring, dtype, launches):
    i = inputs(6, 8, 32, 16, 2, dtype, bias=True)
    kwargs = {"top_k": 3, "scoring": scoring, "renormalize": True, "scale": 2.5, "num_groups": 4, "topk_groups": 2}
    kwargs["selection_bias"] = torch.randn(8, generator=generator(4)).to(DEVICE)
    weights, ids = route(i.x, i.gate_weight, **kwargs)
    experts = {"activation": GPT_OSS, "b_up": i.b_up, "b_down": i.b_down}
    out = poison(6, 32, dtype=dtype, device=DEVICE)
    assert fused_moe(i.x, i.gate_weight, i.w_up, i.w_down, out=out, **kwargs, **experts) is out
    assert_close(out, moe_oracle(i.x, i.w_up, i.w_down, weights, ids, **experts))
    launches.expect("_gate_kernel", "_top_k_kernel", *LAYER)


def arrived(rows, experts, top_k, hidden, dtype, *, block_m=16, seed=0):
    """(world, inputs, schedule): one FFN rank with all lanes' messages merged."""
    i = inputs(max(rows), experts, hidden, 20, top_k, dtype, bias=True, seed=seed)
    size, bucket = blocks(experts, 1)
    world = World(1, len(rows), MessageLayout(size, max(rows) + 2, top_k, hidden, dtype))
    world.begin(rows)
    for a, n in enumerate(rows):
        ids = i.topk_ids[:n].clone()
        ids[1:2, 0] = -1
        world.send(a, i.x[:n], ids, i.topk_weights[:n].contiguous(), bucket)
    return world, i, arrival(world.requests_to(0), world.ffn_lanes[0], world.layout, block_m=block_m)


def run_experts(schedule, i, **kwargs):
    y = poison(schedule.cap_rows * schedule.top_k, schedule.hidden_size, dtype=schedule.dtype, device=DEVICE)
    assert experts_forward(schedule, i.w_up, i.w_down, b_up=i.b_up, b_down=i.b_down, y=y, **kwargs) is y
    return y


@pytest.mark.parametrize("rows", [[6], [5, 0, 20], [1, 2, 3, 4, 5]])
def test_experts_forward_on_lanes(rows, dtype, launches):
    """Each pair's result where the docstring says, and poison everywhere else."""
    world, i, schedule = arrived(rows, 6, 3, 24, dtype)
    y = run_experts(schedule, i)
    want, written = torch.zeros(y.shape, dtype=torch.float64), torch.zeros(len(y), dtype=torch.bool)
    bases = schedule.lane_base.tolist()
    ones = torch.ones(1, 1)
    for a in range(len(rows)):
        message = world.layout.views(world.requests[0][a].cpu())
        offsets, pairs = message.expert_offsets.tolist(), message.pairs.tolist()
        for expert in range(6):
            for pair in pairs[offsets[expert] : offsets[expert + 1]]:
                at = bases[a] * 3 + pair
                x, ids = message.rows[pair // 3][None], torch.tensor([[expert]])
                want[at] = moe_oracle(x, i.w_up, i.w_down, ones, ids, b_up=i.b_up, b_down=i.b_down)[0]
                written[at] = True
    assert_close(y[written.to(DEVICE)], want[written], what="pairs")
    assert y[~written.to(DEVICE)].isnan().all(), "a row that is no pair's was written"
    launches.expect("_merge_kernel", "_p_experts_up_kernel", "_p_experts_down_kernel")


def on_cpu(schedule, moved: torch.Tensor):
    """The schedule over copies of the slots, each ``moved`` bytes away."""
    names = [field.name for field in dataclasses.fields(schedule)][:10]
    tensors = dict(zip(names, to_cpu(schedule.tensors()), strict=True))
    for name in names[:3]:
        tensors[name] += moved
    return dataclasses.replace(schedule, **tensors)


def test_experts_ref_on_lanes(dtype):
    world, i, schedule = arrived([5, 0, 20], 6, 3, 24, dtype)
    y = run_experts(schedule, i)
    slots = [s.cpu() for s in world.requests[0]]
    copy = on_cpu(schedule, torch.tensor([s.data_ptr() for s in slots]) - world.requests_to(0).cpu())
    twin = poison(*y.shape, dtype=dtype)
    w_up, w_down, b_up, b_down = to_cpu([i.w_up, i.w_down, i.b_up, i.b_down])
    experts_forward_ref(copy, w_up, w_down, b_up=b_up, b_down=b_down, y=twin)
    assert torch.equal(y.cpu().isnan(), twin.isnan())
    assert_close(y.cpu().nan_to_num(), twin.nan_to_num())


@pytest.mark.parametrize(
    "config",
    [GemmConfig(16, 16, 16, group_m=1), GemmConfig(32, 32, 64, group_m=3, num_stages=2),
     GemmConfig(64, 64, 32, group_m=8)],
    ids=str,
)  # fmt: skip
def test_every_tile_shape(config, dtype, launches):
    world, i, schedule = arrived([50, 33], 3, 2, 40, dtype, block_m=config.block_m)
    other_world, _, narrow = arrived([50, 33], 3, 2, 40, dtype, block_m=16)
    y, other = run_experts(schedule, i, config=(config, config)), run_experts(narrow, i)
    assert torch.equal(y.isnan(), other.isnan())
    assert_close(y.nan_to_num(), other.nan_to_num().double())
    launches.expect("_p_experts_up_kernel", "_p_experts_down_kernel")


def test_experts_forward_workspace_and_errors(launches):
    world, i, schedule = arrived([6, 5], 6, 3, 24, torch.float32)
    nbytes = experts_workspace(schedule, 20)
    workspace = poison(nbytes, dtype=torch.uint8, device=DEVICE)
    y = run_experts(schedule, i, workspace=workspace)
    assert not (workspace == 0x5B).all() and same_bits(y, run_experts(schedule, i))
    with pytest.raises(ValueError, match=f"at least {nbytes}"):
        run_experts(schedule, i, workspace=workspace[:-1])
    with pytest.raises(ValueError, match="block_m 32 and 32; allowed: the schedule's 16"):
        run_experts(schedule, i, config=(GemmConfig(32, 32, 32),) * 2)
    with pytest.raises(ValueError, match="w_up has 5 experts; allowed: the schedule's 6"):
        experts_forward(schedule, i.w_up[:5], i.w_down[:5])
    with pytest.raises(ValueError, match="w_up has shape"):
        experts_forward(schedule, i.w_up[:, 1:], i.w_down)
    with pytest.raises(ValueError, match="y has shape"):
        experts_forward(schedule, i.w_up, i.w_down, y=y[1:])
    launches.expect("_p_experts_up_kernel")


def check_reply(world, schedule, y, reply_layout):
    """The reply rows against the fp64 loop and the reference, the words, and the poison around them."""
    slots = [new_slot(reply_layout) for _ in range(world.num_lanes)]
    lanes = world.ffn_lanes[0]
    lanes[:, Lane.EXCHANGE] = 2
    state = to_cpu(lanes)
    reply(y, schedule, addresses(slots), lanes, reply_layout)
    copies, twin = [new_slot(reply_layout).cpu() for _ in slots], state.clone()
    requests = [s.cpu() for s in world.requests[0]]
    copy = on_cpu(schedule, torch.tensor([r.data_ptr() for r in requests]) - world.requests_to(0).cpu())
    reply_ref(y.cpu(), copy, torch.tensor([c.data_ptr() for c in copies]), twin, reply_layout)
    assert torch.equal(lanes.cpu(), twin)
    bases, k = schedule.lane_base.tolist(), schedule.top_k
    for a, (slot, copy) in enumerate(zip(to_cpu(slots), copies, strict=True)):
        views, n = reply_layout.views(slot), bases[a + 1] - bases[a]
        online = int(state[a, Lane.MODE]) == 1
        assert int(views.signal) == (signal_word(40000 + a, 5, 2) if online else 0)
        assert int(lanes[a, Lane.EXCHANGE]) == (3 if online else 2)
        weights = world.layout.views(requests[a]).weights
        want = torch.zeros(n, y.shape[1], dtype=torch.float64)
        for row in range(n):
            for choice in range(k):
                if weights[row, choice] != 0:
                    want[row] += weights[row, choice].double() * y[(bases[a] + row) * k + choice].cpu().double()
        assert_close(views.rows[:n], want, dtype=reply_layout.dtype, what=f"lane {a}")
        assert_close(views.rows[:n], reply_layout.views(copy).rows[:n], what=f"lane {a}, reference")
        used = 128 + n * reply_layout.hidden_size * reply_layout.dtype.itemsize
        assert (slot[used:] == 0x5B).all() and (slot[:120] == 0x5B).all(), "wrote outside of the rows"


@pytest.mark.parametrize("reply_dtype", [None, torch.float32])
@pytest.mark.parametrize("rows,hidden", [([4], 24), ([5, 0, 20], 33), ([0, 0], 8), ([3, 2], 1040)])
def test_reply(rows, hidden, reply_dtype, dtype, launches):
    world, i, schedule = arrived(rows, 6, 3, hidden, dtype)
    y = run_experts(schedule, i)
    check_reply(world, schedule, y, ReplyLayout(max(rows) + 2, hidden, reply_dtype or dtype))
    launches.expect("_reply_kernel")


def test_reply_leaves_offline_lanes_alone(launches):
    world, i, _ = arrived([4, 5, 6], 6, 3, 24, torch.float32)
    world.ffn_lanes[0][1, Lane.MODE] = MODE_OFFLINE
    schedule = arrival(world.requests_to(0), world.ffn_lanes[0], world.layout)
    check_reply(world, schedule, run_experts(schedule, i), ReplyLayout(8, 24, torch.float32))
    launches.expect("_reply_kernel")


def test_reply_workspace(launches):
    world, i, schedule = arrived([4, 5], 6, 3, 24, torch.float32)
    y = run_experts(schedule, i)
    args = (y, schedule, world.replies_from(0), world.ffn_lanes[0], world.reply_layout)
    workspace = torch.zeros(REPLY_WORKSPACE, dtype=torch.uint8, device=DEVICE)
    for exchange in range(3):
        reply(*args, workspace=workspace)
        assert (workspace == 0).all(), "not ready for the next launch"
        signals = [int(world.reply_layout.views(s).signal) for s in world.replies[0]]
        assert signals == [signal_word(40000 + a, 5, exchange) for a in range(2)]
    with pytest.raises(ValueError, match="at least 16"):
        reply(*args, workspace=workspace[:8])
    with pytest.raises(ValueError, match="layout.hidden_size is 25"):
        reply(*args[:-1], ReplyLayout(8, 25, torch.float32))
    launches.expect("_reply_kernel")


ROWS = (0, 0.5, 1, 16, 16.5, 64, 65, 1e4, 1e12)
CARDS = (227 * 1024, 163 * 1024, 101376, 65536, 49152, 16384)


@pytest.mark.parametrize("dtype_", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["experts_up", "experts_down"])
def test_pick_fits_the_card(op, dtype_):  # case 23
    blocks_of = 2 if op == "experts_up" else 1
    for rows, card in itertools.product(ROWS, CARDS):
        config = pick(op, rows, dtype_, shared_memory=card)
        largest = pick(op, rows, dtype_, shared_memory=1 << 30)
        assert config == pick(op, rows, dtype_, shared_memory=card), "not a pure function"
        assert config.shared_memory(dtype_.itemsize, blocks_of) <= card
        assert config.block_m == largest.block_m, "the schedule's block_m does not depend on the card"
        for name in ("block_n", "block_k", "num_stages"):
            assert getattr(config, name) <= getattr(largest, name)
        if largest.shared_memory(dtype_.itemsize, blocks_of) <= card:
            assert config == largest
        for n in (config.block_m, config.block_n, config.block_k):
            assert n >= 16 and n & (n - 1) == 0
        unknown = pick(op, rows, dtype_, gpu="no-such-card", shared_memory=card)
        assert unknown == config, "a card without a folder has the default"


@pytest.mark.parametrize("op", ["experts_up", "experts_down"])
def test_pick_refuses_a_card_that_is_too_small(op):
    with pytest.raises(ValueError, match="shared_memory is 256 bytes"):
        pick(op, 1e6, torch.bfloat16, shared_memory=256)


@pytest.mark.parametrize("shared_memory", [101376, 49152, 16384, 8192])
def test_picked_configurations_run(shared_memory, dtype, launches):  # case 23
    up, down = (pick(op, 4, dtype, shared_memory=shared_memory) for op in ("experts_up", "experts_down"))
    world, i, schedule = arrived([9, 5], 3, 2, 40, dtype, block_m=up.block_m)
    y, other = run_experts(schedule, i, config=(up, down)), run_experts(schedule, i)
    assert_close(y.nan_to_num(), other.nan_to_num().double())
    launches.expect("_p_experts_up_kernel", "_p_experts_down_kernel")


def test_pick_experts_has_one_block_m():
    for pairs, num_experts, dtype_ in itertools.product(
        (0, 1, 100, 10**6), (1, 8, 256), (torch.float32, torch.bfloat16)
    ):
        up, down = pick_experts(pairs, num_experts, dtype_, torch.device(DEVICE))
        assert up.block_m == down.block_m
        for block_m in (16, 64, 128, 256):  # a schedule's own: what the card has is kept to
            up, down = pick_experts(pairs, num_experts, dtype_, torch.device(DEVICE), block_m=block_m)
            assert up.block_m == down.block_m == block_m
            if DEVICE == "cpu":
                assert up.shared_memory(dtype_.itemsize, 2) <= 101376
                assert down.shared_memory(dtype_.itemsize, 1) <= 101376


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_that_start_unaligned(monkeypatch, first):
    """Rows 16 bytes apart whose first starts between: the loads must not assume more than is so."""
    i = expert_inputs(5, 3, 32, 8, 2, device=DEVICE)
    wide = torch.full((5, 48), float("nan"), device=DEVICE)
    x = wide[:, first : first + 32].copy_(i.x)
    promised, kernel = [], experts._p_experts_up_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                promised.append(kwargs["ALIGN"])
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(experts, "_p_experts_up_kernel", Recorder())
    out = fused_experts(x, i.w_up, i.w_down, i.topk_weights, i.topk_ids)
    assert x.data_ptr() % promised[0] == 0 and x.stride(0) * 4 % promised[0] == 0
    assert_close(out, moe_oracle(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids))


@pytest.mark.parametrize("activation", [GPT_OSS, SwiGLU(limit=7.0)])
def test_nan_is_not_hidden_by_the_limit(activation):
    i = expert_inputs(3, 2, 8, 4, 2, device=DEVICE)
    i.x[1] = float("nan")
    out = fused_experts(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids, activation=activation)
    assert out[1].isnan().all() and not out[0].isnan().any() and not out[2].isnan().any()
