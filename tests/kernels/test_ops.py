# SPDX-License-Identifier: Apache-2.0
"""The package's face: registered ops eager and compiled, gradients refused, typed errors, pinned signatures."""

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest
import torch
from kernel_harness import DEVICE, Launches, World, addresses, blocks, counted, same_bits, shard, status_cell, to_cpu

import afd_kernels
from afd_kernels import (
    ExpertSchedule,
    Header,
    Lane,
    MessageLayout,
    ReplyLayout,
    SwiGLU,
    arrival,
    combine,
    dispatch,
    experts_forward,
    fused_experts,
    fused_moe,
    new_schedule,
    reply,
    route,
    top_k_from_logits,
    wait,
)
from afd_kernels._op import check_tensor, reference
from afd_kernels.testing import expert_inputs, poison

OPS = (
    "arrival",
    "combine",
    "dispatch",
    "experts_forward",
    "fused_experts",
    "reply",
    "route",
    "top_k_from_logits",
    "wait",
)
TOKENS, EXPERTS, HIDDEN, INNER, TOP_K = 6, 5, 24, 10, 2


class Setup:
    """One peer, one lane, and what each op needs, built twice alike for eager and compiled."""

    def __init__(self) -> None:
        self.i = expert_inputs(TOKENS, EXPERTS, HIDDEN, INNER, TOP_K, device=DEVICE, bias=True)
        size, self.bucket = blocks(EXPERTS, 1)
        self.layout = MessageLayout(size, TOKENS + 2, TOP_K, HIDDEN, torch.float32)
        self.world = World(1, 1, self.layout)
        self.world.begin([TOKENS])
        (self.weights,) = shard(self.i, self.bucket, size, 1)
        self.abort, self.status = status_cell()
        self.requests, self.replies = self.world.requests_to(0), self.world.replies_from(0)
        self.lane, self.ffn_lanes = self.world.lanes[0], self.world.ffn_lanes[0]
        self.lane = self.lane.clone()
        self.workspace = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)

    def send(self) -> torch.Tensor:
        i = self.i
        return dispatch(i.x, i.topk_ids, i.topk_weights, expert_bucket=self.bucket, slots=self.requests,
                        layout=self.layout, lane=self.lane)  # fmt: skip

    def up_to(self, stage: str):
        """Runs the exchange eagerly up to (not including) ``stage``."""
        self.row_map = self.send() if stage != "dispatch" else None
        if stage in ("experts_forward", "reply", "combine"):
            self.schedule = arrival(self.requests, self.ffn_lanes, self.layout)
        if stage in ("reply", "combine"):
            self.y = experts_forward(self.schedule, **self.weights)
        if stage == "combine":
            reply(self.y, self.schedule, self.replies, self.ffn_lanes, self.world.reply_layout)
        return self


def call_route(s):
    return route(s.i.x, s.i.gate_weight, top_k=3, renormalize=True, selection_bias=s.i.b_down[:, 0].contiguous())


def call_top_k(s):
    return top_k_from_logits(s.i.x, top_k=3, scoring="sigmoid", num_groups=4, topk_groups=2, scale=2.5)


def call_dispatch(s):
    i = s.i
    row_map = dispatch(i.x, i.topk_ids, i.topk_weights, expert_bucket=s.bucket, slots=s.requests, layout=s.layout,
                       lane=s.lane, layer=3)  # fmt: skip
    return row_map


def call_arrival(s):
    return arrival(s.requests, s.ffn_lanes, s.layout, schedule=s.given).tensors()


def call_experts(s):
    y = torch.zeros(s.schedule.cap_pairs, HIDDEN, device=DEVICE)
    return experts_forward(s.schedule, **s.weights, y=y, activation=SwiGLU(limit=3.0, gate_first=False))


def call_reply(s):
    reply(s.y, s.schedule, s.replies, s.ffn_lanes, s.world.reply_layout)
    return s.ffn_lanes


def call_combine(s):
    return combine(s.replies, s.row_map, s.world.reply_layout, s.lane)


def call_wait(s):
    wait(s.requests, s.lane, abort=s.abort, status=s.status, timeout_s=5.0)
    return s.status


def call_fused(s):
    i = s.i
    return fused_experts(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids, b_up=i.b_up, b_down=i.b_down)


CALLS = {"route": call_route, "top_k_from_logits": call_top_k, "dispatch": call_dispatch, "arrival": call_arrival,
         "experts_forward": call_experts, "reply": call_reply, "combine": call_combine, "wait": call_wait,
         "fused_experts": call_fused}  # fmt: skip


EXPERT_KERNELS = ("_p_experts_up_kernel", "_p_experts_down_kernel")
KERNELS = {"route": ("_gate_kernel", "_top_k_kernel"), "top_k_from_logits": ("_top_k_kernel",),
           "dispatch": ("_dispatch_kernel",), "arrival": ("_merge_kernel",), "experts_forward": EXPERT_KERNELS,
           "reply": ("_reply_kernel",), "combine": ("_combine_kernel",), "wait": ("_wait_kernel",),
           "fused_experts": ("_small_plan_kernel", "_merge_kernel", *EXPERT_KERNELS,
                             "_weighted_sum_kernel")}  # fmt: skip


def result_of(name: str, function):
    """What the op returned and every byte it may have written, on the CPU; addresses left out."""
    s = Setup().up_to(name)
    if name == "arrival":
        s.given = new_schedule(1, s.layout, block_m=16, device=torch.device(DEVICE))
        for tensor in s.given.tensors():
            tensor.zero_()
    returned = function(s)
    returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if name == "arrival":
        returned = returned[3:]
    memory = [*s.world.requests[0], *s.world.replies[0], s.lane, s.ffn_lanes, s.status]
    return to_cpu(returned + memory)


def test_every_op_is_registered():
    assert sorted(CALLS) == sorted(OPS)
    for name in OPS:
        assert hasattr(torch.ops.afd, name)
        assert "Tensor(a" in str(getattr(torch.ops.afd, name).default._schema), "an op that writes nothing"
        assert str(getattr(torch.ops.afd, name).default._schema).endswith("-> ()")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPS)
def test_compiled_equals_eager(name, backend, launches):
    torch._dynamo.reset()
    want = result_of(name, CALLS[name])
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=backend)
    inside = Launches()

    def call(s):
        with counted() as inner:
            returned = compiled(s)
        inside.update(inner)
        return returned

    got = result_of(name, call)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b), (name, a, b)
    inside.expect(*KERNELS[name])
    launches.expect(*inside)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_exchange_compiles(backend, launches):
    """One graph from the gate to the sum; the order of ops that only meet in raw memory holds."""
    torch._dynamo.reset()

    def step(s):
        weights, ids = route(s.i.x, s.i.gate_weight, top_k=TOP_K, renormalize=True)
        row_map = dispatch(s.i.x, ids, weights, expert_bucket=s.bucket, slots=s.requests, layout=s.layout, lane=s.lane)
        wait(s.requests, s.ffn_lanes, abort=s.abort, status=s.status, timeout_s=5.0)
        schedule = arrival(s.requests, s.ffn_lanes, s.layout)
        y = experts_forward(schedule, **s.weights)
        reply(y, schedule, s.replies, s.ffn_lanes, s.world.reply_layout)
        wait(s.replies, s.lane, abort=s.abort, status=s.status, timeout_s=5.0)
        return combine(s.replies, row_map, s.world.reply_layout, s.lane)

    want = step(Setup())
    s = Setup()
    got = torch.compile(step, fullgraph=True, backend=backend)(s)
    assert same_bits(got, want) and int(s.status[0]) == 0 and int(s.lane[Lane.EXCHANGE]) == 1
    whole = fused_moe(s.i.x, s.i.gate_weight, s.i.w_up, s.i.w_down, top_k=TOP_K, renormalize=True, b_up=s.i.b_up,
                      b_down=s.i.b_down)  # fmt: skip
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)
    launches.expect("_wait_kernel", "_combine_kernel")


def test_other_sizes_compile_too(launches):
    """The second size may trace with symbolic shapes."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: route(x, w, top_k=2), fullgraph=True, backend="aot_eager")
    for tokens in (3, 5, 9, 1):
        i = expert_inputs(tokens, EXPERTS, HIDDEN, INNER, TOP_K, device=DEVICE, seed=tokens)
        for a, b in zip(compiled(i.x, i.gate_weight), route(i.x, i.gate_weight, top_k=2), strict=True):
            assert same_bits(a, b)
    launches.expect("_top_k_kernel")


GRADIENTS = {
    "route x": lambda s, g: route(g(s.i.x), s.i.gate_weight, top_k=2),
    "route gate": lambda s, g: route(s.i.x, g(s.i.gate_weight), top_k=2),
    "route bias": lambda s, g: route(s.i.x, s.i.gate_weight, top_k=2, selection_bias=g(s.i.b_down[:, 0].contiguous())),
    "top_k": lambda s, g: top_k_from_logits(g(s.i.x), top_k=2),
    "dispatch": lambda s, g: dispatch(g(s.i.x), s.i.topk_ids, s.i.topk_weights, expert_bucket=s.bucket,
                                      slots=s.requests, layout=s.layout, lane=s.lane),
    "dispatch weights": lambda s, g: dispatch(s.i.x, s.i.topk_ids, g(s.i.topk_weights), expert_bucket=s.bucket,
                                              slots=s.requests, layout=s.layout, lane=s.lane),
    "experts": lambda s, g: experts_forward(s.schedule, g(s.i.w_up), s.i.w_down),
    "experts bias": lambda s, g: experts_forward(s.schedule, s.i.w_up, s.i.w_down, b_down=g(s.i.b_down)),
    "reply": lambda s, g: reply(g(s.y), s.schedule, s.replies, s.ffn_lanes, s.world.reply_layout),
    "combine": lambda s, g: combine(s.replies, s.row_map, s.world.reply_layout, s.lane,
                                    out=g(torch.zeros(TOKENS, HIDDEN, device=DEVICE))),
    "fused": lambda s, g: fused_experts(s.i.x, s.i.w_up, g(s.i.w_down), s.i.topk_weights, s.i.topk_ids),
    "fused_moe": lambda s, g: fused_moe(g(s.i.x), s.i.gate_weight, s.i.w_up, s.i.w_down, top_k=2),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_refused(name):
    s = Setup().up_to("combine")
    with pytest.raises(ValueError, match="requires grad; this library is inference only"):
        GRADIENTS[name](s, lambda t: t.clone().requires_grad_())
    s = Setup().up_to("combine")
    with torch.no_grad():
        GRADIENTS[name](s, lambda t: t.clone().requires_grad_())


ROUTING_ERRORS = [
    ({"top_k": 0}, "top_k is 0; allowed: 1 … 5"), ({"top_k": 6}, "top_k is 6; allowed: 1 … 5"),
    ({"scoring": "relu"}, "scoring is 'relu'; allowed: softmax, sigmoid, sqrt_softplus"),
    ({"num_groups": 2}, "num_groups is 2; allowed: divisors of the 5 experts"),
    ({"num_groups": 0}, "num_groups is 0"),
    ({"num_groups": 5, "topk_groups": 6}, "topk_groups is 6; allowed: 1 … num_groups"),
    ({"num_groups": 5, "topk_groups": 1, "top_k": 2}, r"top_k is 2; allowed: 1 … 1 \(1 experts in the open groups\)"),
    ({"selection_bias": torch.zeros(4)}, r"selection_bias has shape \(4,\); allowed: \(5,\)"),
    ({"selection_bias": torch.zeros(10)[::2]}, "selection_bias is not contiguous"),
    ({"out": (torch.zeros(6, 1), torch.zeros(6, 2, dtype=torch.int32))}, r"out\[0\] has shape"),
    ({"out": (torch.zeros(6, 2), torch.zeros(6, 2))}, r"out\[1\] is torch.float32; allowed: torch.int32"),
]  # fmt: skip


def moved(kwargs):
    def move(v):
        if isinstance(v, tuple):
            return tuple(map(move, v))
        return v.to(DEVICE) if isinstance(v, torch.Tensor) and v.is_contiguous() else v

    return {k: move(v) for k, v in kwargs.items()}


@pytest.mark.parametrize("kwargs,match", ROUTING_ERRORS)
def test_routing_errors(kwargs, match, launches):
    if match == "selection_bias is not contiguous":
        kwargs = {"selection_bias": torch.zeros(10, device=DEVICE)[::2]}
    i = expert_inputs(TOKENS, EXPERTS, HIDDEN, INNER, TOP_K, device=DEVICE)
    kwargs = {"top_k": 2} | moved(kwargs)
    with pytest.raises(ValueError, match=match):
        route(i.x, i.gate_weight, **kwargs)
    with pytest.raises(ValueError, match=match):
        top_k_from_logits(i.x @ i.gate_weight.t(), **kwargs)
    launches.expect_none()


def test_route_input_errors(launches):
    i = expert_inputs(TOKENS, EXPERTS, HIDDEN, INNER, TOP_K, device=DEVICE)
    for args, match in [
        ((i.x[0], i.gate_weight), "hidden_states has shape"),
        ((i.x.double(), i.gate_weight), "hidden_states is torch.float64; allowed: torch.float32"),
        ((i.x, i.gate_weight.half()), "gate_weight is torch.float16; allowed: torch.float32"),
        ((i.x, i.gate_weight[:, 1:]), r"gate_weight has shape \(5, 23\); allowed: \('\*', 24\)"),
        ((i.x.t().contiguous().t(), i.gate_weight), "hidden_states has strides"),
        ((i.x, torch.zeros(1025, HIDDEN, device=DEVICE)), "the number of experts is 1025; allowed: 1 … 1024"),
    ]:
        with pytest.raises(ValueError, match=match):
            route(*args, top_k=2)
    with pytest.raises(TypeError, match="hidden_states is a list; a torch.Tensor is needed"):
        route([1.0], i.gate_weight, top_k=2)
    with pytest.raises(ValueError, match="gate_bias has shape"):
        route(i.x, i.gate_weight, top_k=2, gate_bias=torch.zeros(4, device=DEVICE))
    launches.expect_none()


DISPATCH_ERRORS = [
    ("x", lambda t: t[:, 1:], "x has shape"), ("x", lambda t: t.half(), "x is torch.float16; allowed: torch.float32"),
    ("x", lambda t: t.t().contiguous().t(), "x has strides"),
    ("x", lambda t: t.repeat(2, 1), "x has 12 rows, the slot"),
    ("topk_ids", lambda t: t.long(), "topk_ids is torch.int64; allowed: torch.int32"),
    ("topk_ids", lambda t: t[:, :1], "topk_ids has shape"),
    ("topk_ids", lambda t: t.t().contiguous().t(), "topk_ids is not contiguous"),
    ("topk_weights", lambda t: t.half(), "topk_weights is torch.float16"),
    ("topk_weights", lambda t: t[1:], "topk_weights has shape"),
    ("expert_bucket", lambda t: t.long(), "expert_bucket is torch.int64"),
    ("slots", lambda t: t.int(), "slots is torch.int32"), ("lane", lambda t: t[:4], "lane has shape"),
    ("row_map", lambda t: torch.zeros(1, 5, dtype=torch.int32, device=DEVICE), "row_map has shape"),
    ("layout", lambda t: dataclasses.replace(t, with_token_ids=True), "layout.with_token_ids is True"),
]  # fmt: skip


@pytest.mark.parametrize("name,change,match", DISPATCH_ERRORS)
def test_dispatch_errors(name, change, match, launches):
    s = Setup()
    given = {"x": s.i.x, "topk_ids": s.i.topk_ids, "topk_weights": s.i.topk_weights, "expert_bucket": s.bucket,
             "slots": s.requests, "lane": s.lane, "layout": s.layout, "row_map": None}  # fmt: skip
    given[name] = change(given[name])
    before = s.world.requests[0][0].clone()
    with pytest.raises(ValueError, match=match):
        dispatch(given.pop("x"), given.pop("topk_ids"), given.pop("topk_weights"), **given)
    launches.expect_none()
    assert torch.equal(before, s.world.requests[0][0])


def test_fp8_rows_are_refused(launches):
    s = Setup()
    layout = MessageLayout(EXPERTS, TOKENS, TOP_K, HIDDEN, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="layout.dtype is torch.float8_e4m3fn; allowed"):
        dispatch(s.i.x.to(torch.float8_e4m3fn), s.i.topk_ids, s.i.topk_weights, expert_bucket=s.bucket,
                 slots=s.requests, layout=layout, lane=s.lane)  # fmt: skip
    launches.expect_none()


def test_combine_reply_and_wait_errors():
    s = Setup().up_to("combine")
    args = (s.replies, s.row_map, s.world.reply_layout, s.lane)
    for change, match in [
        ({1: s.row_map.long()}, "row_map is torch.int64"), ({1: s.row_map[0]}, "row_map has shape"),
        ({1: s.row_map.repeat(2, 1)}, "row_map has shape"), ({0: s.replies.int()}, "reply_slots is torch.int32"),
        ({3: s.ffn_lanes}, "lane has shape"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            combine(*[change.get(n, a) for n, a in enumerate(args)])
    with pytest.raises(ValueError, match="out has shape"):
        combine(*args, out=torch.zeros(TOKENS, HIDDEN + 1, device=DEVICE))
    with pytest.raises(ValueError, match="out is torch.float64"):
        combine(*args, out=torch.zeros(TOKENS, HIDDEN, device=DEVICE, dtype=torch.float64))
    with pytest.raises(ValueError, match="y is torch.float16"):
        reply(s.y.half(), s.schedule, s.replies, s.ffn_lanes, s.world.reply_layout)
    with pytest.raises(ValueError, match="reply_slots has shape"):
        reply(s.y, s.schedule, s.replies.repeat(2), s.ffn_lanes, s.world.reply_layout)
    waiting = {"abort": s.abort, "status": s.status, "timeout_s": 1.0}
    for change, match in [
        ({"abort": s.abort.long()}, "abort is torch.int64"), ({"status": s.status[:4]}, "status has shape"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; allowed: above 0 seconds"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            wait(s.requests, s.lane, **(waiting | change))
    with pytest.raises(ValueError, match="lanes has shape"):
        wait(s.requests.repeat(3), s.ffn_lanes, **waiting)


def test_fused_errors(launches):
    i = expert_inputs(TOKENS, EXPERTS, HIDDEN, INNER, TOP_K, device=DEVICE, bias=True)
    args = (i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids)
    for change, match in [
        ({0: i.x.half()}, "w_down is torch.float32; allowed: torch.float16"), ({0: i.x[0]}, "x has shape"),
        ({1: i.w_up[:, 1:]}, "w_up has shape"), ({2: i.w_down[1:]}, "w_up has shape"),
        ({3: i.topk_weights.double()}, "topk_weights is torch.float64"),
        ({4: i.topk_ids.long()}, "topk_ids is torch.int64"),
        ({4: i.topk_ids[:, :1].contiguous()}, "topk_weights has shape"),
        ({3: torch.zeros(6, 33, device=DEVICE), 4: torch.zeros(6, 33, dtype=torch.int32, device=DEVICE)},
         "topk_ids has 33 columns; allowed: 1 … 32"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fused_experts(*[change.get(n, a) for n, a in enumerate(args)])
    for kwargs, match in [
        ({"b_up": i.b_down}, "b_up has shape"), ({"b_down": i.b_down.t().contiguous().t()}, "b_down has strides"),
        ({"out": i.x.half()}, "out is torch.float16"), ({"out": i.x[1:]}, "out has shape"),
        ({"workspace": torch.zeros(16, device=DEVICE)}, "workspace has 16 elements of torch.float32"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fused_experts(*args, **kwargs)
    with pytest.raises(ValueError, match="limit is 0; allowed: None, or above 0"):
        SwiGLU(limit=0)
    launches.expect_none()


def test_misaligned_workspace_is_refused(launches):
    s = Setup()
    workspace = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)[8:]
    with pytest.raises(ValueError, match="workspace is not 16-byte aligned"):
        fused_experts(s.i.x, s.i.w_up, s.i.w_down, s.i.topk_weights, s.i.topk_ids, workspace=workspace)
    launches.expect_none()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs two devices")
def test_device_mismatch_is_refused(launches):
    s = Setup()
    with pytest.raises(ValueError, match="gate_weight is on cpu, the other inputs on cuda"):
        route(s.i.x, s.i.gate_weight.cpu(), top_k=2)
    with pytest.raises(ValueError, match="slots is on cpu, the other inputs on cuda"):
        dispatch(s.i.x, s.i.topk_ids, s.i.topk_weights, expert_bucket=s.bucket, slots=s.requests.cpu(),
                 layout=s.layout, lane=s.lane)  # fmt: skip
    launches.expect_none()


def test_references_can_be_forbidden(monkeypatch):
    called = reference(lambda tensor: tensor)
    monkeypatch.setenv("AFD_FORBID_REFERENCE", "1")
    called(torch.zeros(1))
    if DEVICE == "cuda":
        with pytest.raises(RuntimeError, match="was called on a CUDA tensor while AFD_FORBID_REFERENCE=1"):
            called(torch.zeros(1, device=DEVICE))
        monkeypatch.delenv("AFD_FORBID_REFERENCE")
        called(torch.zeros(1, device=DEVICE))


def test_check_tensor_names_everything():
    tensor = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"w has shape \(2, 3\); allowed: \(2, '\*', 4\)"):
        check_tensor("w", tensor, shape=(2, None, 4), dtypes=(torch.float32,), like=tensor)


SIGNATURES = {
    "ExpertSchedule": "row_address, pair_address, weight_address, lane_base, lane_prefix, lane_start, "
    "expert_base, tiles, num_tiles, error, tickets, block_m, top_k, cap_rows, cap_pairs, hidden_size, "
    "row_stride, dtype, row_alignment=16",
    "GemmConfig": "block_m, block_n, block_k, num_warps=4, num_stages=3, group_m=8",
    "MessageLayout": "num_experts, cap_rows, top_k, hidden_size, dtype, with_token_ids=False",
    "ReplyLayout": "cap_rows, hidden_size, dtype",
    "SwiGLU": "alpha=1.0, beta=0.0, limit=None, gate_first=True, interleaved=False",
    "arrival": "slots, lanes, layout, *, block_m=None, schedule=None, layer=-1, status=None",
    "begin_step": "lane, *, session, step, rows, mode=1, bells=None",
    "combine": "reply_slots, row_map, layout, lane, *, out=None, dtype=None",
    "dispatch": "x, topk_ids, topk_weights, *, expert_bucket, slots, layout, lane, layer=0, row_map=None, sent=None, "
    "bells=None, workspace=None",
    "StepMember": "lane, slot, reply_slot, session, step, rows, bell=0",
    "enter_step": "inbox, slots, reply_slots, lanes, *, peer_bells=None, bells=None",
    "fill_inbox": "inbox, members",
    "leave_step": "clocks, out",
    "dispatch_workspace": "num_tokens, layout, num_peers",
    "experts_forward": "schedule, w_up, w_down, *, activation=SwiGLU(), b_up=None, b_down=None, y=None, "
    "workspace=None, config=None",
    "experts_workspace": "schedule, intermediate_size",
    "fused_experts": "x, w_up, w_down, topk_weights, topk_ids, *, activation=SwiGLU(), b_up=None, b_down=None, "
    "out=None, workspace=None",
    "fused_experts_workspace": "num_tokens, num_experts, intermediate_size, hidden_size, top_k, dtype, device",
    "fused_moe": "hidden_states, gate_weight, w_up, w_down, *, top_k, scoring='softmax', gate_bias=None, "
    "selection_bias=None, num_groups=1, topk_groups=1, renormalize=False, scale=1.0, "
    "activation=SwiGLU(), b_up=None, b_down=None, out=None",
    "new_schedule": "num_lanes, layout, *, block_m, device, row_stride=None, max_rows=None, workspace=None",
    "pick": "op, rows_per_expert, dtype, *, gpu='default', shared_memory=101376",
    "pick_experts": "num_pairs, num_experts, dtype, device, *, block_m=None",
    "reply": "y, schedule, reply_slots, lanes, layout, *, bells=None, clock=None, workspace=None",
    "route": "hidden_states, gate_weight, *, top_k, scoring='softmax', gate_bias=None, "
    "selection_bias=None, num_groups=1, topk_groups=1, renormalize=False, scale=1.0, out=None, "
    "workspace=None",
    "route_workspace": "num_tokens, num_experts, hidden_size",
    "schedule_bytes": "num_lanes, layout, block_m, max_rows=None",
    "signal_word": "session, step, exchange",
    "split_word": "word",
    "tensor_at": "address, nbytes, device",
    "supported": "op, *, dtype, device='cuda', **sizes",
    "top_k_from_logits": "logits, *, top_k, scoring='softmax', selection_bias=None, num_groups=1, topk_groups=1, "
    "renormalize=False, scale=1.0, out=None",
    "wait": "slots, lanes, *, abort, status, timeout_s, bells=None, clock=None",
}
CONSTANTS = {"INBOX_FIELDS": 8, "MODE_OFFLINE": 0, "MODE_ONLINE": 1, "REPLY_WORKSPACE": 16}
ENUMS = {
    "Header": ["MAGIC", "VERSION", "SESSION", "STEP", "LAYER", "EXCHANGE", "ROWS", "PAIRS", "FLAGS"],
    "Lane": ["WORD", "EXCHANGE", "MODE", "ROWS"],
    "Status": ["CODE", "PEER", "EXPECTED", "OBSERVED", "ROWS", "ANNOUNCED"],
    "StatusCode": ["OK", "TIMEOUT", "ABORTED", "PROTOCOL", "MALFORMED"],
}


def described(function) -> str:
    parts, star = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        default = "SwiGLU()" if p.default == SwiGLU() else repr(p.default)
        name = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
        parts.append(name if p.default is p.empty else f"{name}={default}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert described(getattr(afd_kernels, name)) == SIGNATURES[name]


def test_exports():
    assert sorted(afd_kernels.__all__) == sorted([*SIGNATURES, *CONSTANTS, *ENUMS])
    for name, value in CONSTANTS.items():
        assert getattr(afd_kernels, name) == value
    for name, members in ENUMS.items():
        assert {m.name: int(m) for m in getattr(afd_kernels, name)} == {m: n for n, m in enumerate(members)}
    assert all(getattr(afd_kernels, name).__doc__ for name in (*SIGNATURES, *ENUMS)), "an export without a docstring"
    assert dataclasses.is_dataclass(ExpertSchedule) and Header.ROWS == 6


def test_import_exports_exactly_all_and_touches_no_gpu():
    code = (
        "import torch, types, afd_kernels as a\n"
        "public = {n for n in vars(a) if not n.startswith('_') and not isinstance(getattr(a, n), types.ModuleType)}\n"
        "assert public == set(a.__all__), public ^ set(a.__all__)\n"
        "assert len(a.__all__) == len(set(a.__all__))\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys\n"
        "assert not [m for m in sys.modules if m.startswith('afd_runtime')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_reference_has_its_ops_signature():
    from afd_kernels.combine import combine_ref
    from afd_kernels.dispatch import dispatch_ref
    from afd_kernels.layer import fused_experts_ref
    from afd_kernels.routing import route_ref, top_k_from_logits_ref
    from afd_kernels.signal import wait_ref

    for op, twin in [(dispatch, dispatch_ref), (combine, combine_ref), (fused_experts, fused_experts_ref),
                     (wait, wait_ref), (route, route_ref), (top_k_from_logits, top_k_from_logits_ref)]:  # fmt: skip
        names = [n for n in inspect.signature(op).parameters if n not in ("out", "workspace")]
        assert [n for n in inspect.signature(twin).parameters if n not in ("out", "workspace")] == names


def test_poison_is_poison():
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8):
        buffer = poison(3, 2, dtype=dtype, device=DEVICE)
        assert buffer.isnan().all() if dtype.is_floating_point else (buffer > 90).all()
    assert addresses([None]).tolist() == [0] and ReplyLayout(0, 1, torch.float32).nbytes == 128


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, two elements apart."""
    view = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)[..., 0]
    return view.copy_(tensor)


def test_tables_that_are_not_contiguous_are_refused():
    size, bucket = blocks(4, 2)
    layout = MessageLayout(size, 4, 2, 8, torch.float32)
    world = World(2, 2, layout)
    world.begin([3, 3])
    i = expert_inputs(3, 4, 8, 4, 2, device=DEVICE)
    args, lane = (i.x, i.topk_ids, i.topk_weights), world.lanes[0]
    table, given = world.requests_of(0), {"layout": layout, "lane": lane}
    with pytest.raises(ValueError, match="expert_bucket is not contiguous"):
        dispatch(*args, expert_bucket=every_other(bucket), slots=table, **given)
    with pytest.raises(ValueError, match="slots is not contiguous"):
        dispatch(*args, expert_bucket=bucket, slots=every_other(table), **given)
    with pytest.raises(ValueError, match="sent is not contiguous"):
        sent = every_other(torch.zeros(2, dtype=torch.int64, device=DEVICE))
        dispatch(*args, expert_bucket=bucket, slots=table, sent=sent, **given)
    abort, status = status_cell()
    with pytest.raises(ValueError, match="slots is not contiguous"):
        wait(every_other(table), lane, abort=abort, status=status, timeout_s=1)
    with pytest.raises(ValueError, match="reply_slots is not contiguous"):
        row_map = torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
        combine(every_other(world.replies_of(0)), row_map, world.reply_layout, lane)
    with pytest.raises(ValueError, match="slots is not contiguous"):
        arrival(every_other(world.requests_to(0)), world.ffn_lanes[0], layout)


def test_schedule_of_another_layout_is_refused():
    layout = MessageLayout(5, 4, 2, 8, torch.float32)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    lanes = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    for name, value in (("num_experts", 3), ("top_k", 1), ("hidden_size", 4), ("dtype", torch.float16)):
        other = new_schedule(2, dataclasses.replace(layout, **{name: value}), block_m=16, device=slots.device)
        with pytest.raises(ValueError, match=f"schedule has {name} {value}; allowed: the layout's"):
            arrival(slots, lanes, layout, schedule=other)
    with pytest.raises(ValueError, match="status has shape"):
        arrival(slots, lanes, layout, status=torch.zeros(8, dtype=torch.int64, device=DEVICE))


def test_reply_refuses_results_of_another_shape():
    layout = MessageLayout(5, 4, 2, 8, torch.float32)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    lanes = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    schedule = arrival(slots, lanes, layout)
    y = torch.zeros(16, 8, device=DEVICE)
    reply(y, schedule, slots, lanes, ReplyLayout(4, 8, torch.float32))
    with pytest.raises(ValueError, match="y has shape"):
        reply(y[1:], schedule, slots, lanes, ReplyLayout(4, 8, torch.float32))
    with pytest.raises(ValueError, match="y is not contiguous"):
        reply(every_other(y), schedule, slots, lanes, ReplyLayout(4, 8, torch.float32))


TWINS = {"route": "routing", "top_k_from_logits": "routing", "dispatch": "dispatch", "arrival": "arrival",
         "experts_forward": "experts", "reply": "reply", "combine": "combine", "wait": "signal", "enter_step": "step",
         "fused_experts": "layer"}  # fmt: skip
OUTPUTS = {"out", "workspace"}  # a reference may do without


@pytest.mark.parametrize("name", TWINS)
def test_a_reference_has_its_op_s_signature(name):
    module = importlib.import_module(f"afd_kernels.{TWINS[name]}")
    op, twin = (described(function).split(", ") for function in (getattr(module, name), getattr(module, f"{name}_ref")))
    missing = {part.partition("=")[0] for part in op} - {part.partition("=")[0] for part in twin}
    assert missing <= OUTPUTS and [part for part in op if part in twin] == twin


@pytest.mark.parametrize(
    "op,dtype,sizes,reason",
    [("route", torch.bfloat16, {"num_experts": 256, "top_k": 8, "num_groups": 8, "topk_groups": 4}, None),
     ("route", torch.float32, {"num_experts": 1025, "top_k": 8}, "the number of experts is 1025; allowed: 1 … 1024"),
     ("route", torch.float32, {"num_experts": 8, "top_k": 3, "num_groups": 4}, "top_k is 3; allowed: 1 … 2"),
     ("route", torch.float32, {"num_experts": 64, "top_k": 33}, "top_k is 33; allowed: 1 … 32"),
     ("dispatch", torch.float8_e4m3fn, {"num_experts": 8, "top_k": 2, "hidden_size": 64}, "dtype is torch.float8"),
     ("experts_forward", torch.float16, {"num_experts": 8, "top_k": 2, "hidden_size": 0}, "hidden_size is 0; allow"),
     ("fused_experts", torch.float16, {"num_experts": 8, "top_k": 2, "hidden_size": 64, "cap_rows": 65536}, None)],
)  # fmt: skip
def test_supported(op, dtype, sizes, reason):
    answer = afd_kernels.supported(op, dtype=dtype, device=DEVICE, **sizes)
    assert answer is None if reason is None else answer.startswith(reason)


def test_supported_says_what_the_launcher_says():
    with pytest.raises(ValueError) as error:
        afd_kernels.route(torch.zeros(2, 8, device=DEVICE), torch.zeros(6, 8, device=DEVICE), top_k=2, num_groups=4)
    answer = afd_kernels.supported("route", dtype=torch.float32, device=DEVICE, num_experts=6, top_k=2, num_groups=4)
    assert answer == str(error.value)
    with pytest.raises(ValueError, match="op is 'gemm'; allowed: route, dispatch"):
        afd_kernels.supported("gemm", dtype=torch.float32)
