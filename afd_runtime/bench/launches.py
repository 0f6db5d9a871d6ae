# SPDX-License-Identifier: Apache-2.0
"""Every kernel as its launcher launches it, recorded on CPU tensors: what compile tests and the static gate compile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

import torch

from afd_kernels import (
    GemmConfig,
    MessageLayout,
    ReplyLayout,
    StepMember,
    SwiGLU,
    arrival,
    begin_step,
    combine,
    dispatch,
    enter_step,
    experts_forward,
    fill_inbox,
    fused_experts,
    leave_step,
    new_schedule,
    pick,
    reply,
    route,
    wait,
)
from afd_kernels.shapes import SHAPES
from afd_kernels.signal import open_bells
from afd_runtime.bench.compiled import Launch, record

#: Bytes of shared memory that one block may use, by compute capability.
CARDS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_QWEN = SHAPES["qwen3-30b"]
H, I, K, E = _QWEN.hidden_size, _QWEN.intermediate_size, _QWEN.top_k, 64
PEERS, LANES = 2, 3
OPS = ("experts_up", "experts_down")
OF_ANY_BATCH = ("_wait_kernel", "_merge_kernel", "_reply_kernel", "_combine_kernel")  # one variant serves all


def entries() -> list[tuple[str, str, int]]:
    """(folder, width of an element, rows) of each line of the checked-in tables."""
    found = []
    for folder in (resources.files("afd_kernels") / "configs").iterdir():
        table = json.loads((folder / "experts.json").read_text())
        for key, lines in table.items():
            found += [(folder.name, key.split("/")[1], line["rows"]) for line in lines if key.startswith(OPS[0])]
    return sorted(found)


def empty(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def routing(dtype, *, experts=E, top_k=K, hidden=H, tokens=16, **kwargs) -> list[Launch]:
    with record() as launches:
        route(empty(tokens, hidden, dtype=dtype), empty(experts, hidden, dtype=dtype), top_k=top_k, **kwargs)
    return launches


def exchange(dtype, *, experts=E, top_k=K, hidden=H, peers=PEERS, lanes=LANES, tokens=64, reply_dtype=None):
    """Every launch of one exchange but the experts."""
    size = -(-experts // peers)
    layout, replies = (
        MessageLayout(size, tokens, top_k, hidden, dtype),
        ReplyLayout(tokens, hidden, reply_dtype or dtype),
    )
    ids, weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    lane, slots = torch.zeros(8, dtype=torch.int64), torch.zeros(peers, dtype=torch.int64)
    states, requests = torch.zeros(lanes, 8, dtype=torch.int64), torch.zeros(lanes, dtype=torch.int64)
    abort, status = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    bucket = torch.zeros(experts, dtype=torch.int32)
    with record() as launches:
        row_map = dispatch(
            empty(tokens, hidden, dtype=dtype),
            ids,
            weights,
            expert_bucket=bucket,
            slots=slots,
            layout=layout,
            lane=lane,
        )
        wait(slots, lane, abort=abort, status=status, timeout_s=1.0)
        schedule = arrival(requests, states, layout)
        reply(empty(schedule.cap_rows * top_k, hidden, dtype=dtype), schedule, requests, states, replies)
        combine(slots, row_map, replies, lane)
    return launches


def layer(dtype, *, experts=E, top_k=K, tokens=64) -> list[Launch]:
    """The launches of the one-rank layer."""
    ids, weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    with record() as launches:
        fused_experts(empty(tokens, 256, dtype=dtype), empty(experts, 128, 256, dtype=dtype),
                      empty(experts, 256, 64, dtype=dtype), weights, ids)  # fmt: skip
    return launches


def gemms(dtype, up: GemmConfig, down: GemmConfig, *, lanes=1, activation=SwiGLU(), bias=False, transposed=False):
    """The two grouped GEMMs."""
    layout = MessageLayout(E, 64, K, H, dtype)
    block_m = min(up.block_m, down.block_m)
    schedule = new_schedule(lanes, layout, block_m=block_m, device=torch.device("cpu"))
    w_up, w_down = empty(1, 1, 1, dtype=dtype).expand(E, 2 * I, H), empty(1, 1, 1, dtype=dtype).expand(E, H, I)
    strides = ((2 * I * H, 1, 2 * I), (H * I, 1, H)) if transposed else ((2 * I * H, H, 1), (H * I, I, 1))
    w_up, w_down = _Strided.of(w_up, strides[0]), _Strided.of(w_down, strides[1])
    biases = {"b_up": empty(E, 2 * I, dtype=dtype), "b_down": empty(E, H, dtype=dtype)} if bias else {}
    with record() as launches:
        experts_forward(schedule, w_up, w_down, activation=activation, config=(up, down), **biases)
    return launches


class _Strided(torch.Tensor):
    """A tensor of one element that claims other strides: weights of a real size without their memory."""

    claimed: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        view = tensor.as_subclass(cls)
        view.claimed = strides
        return view

    def stride(self, dim=None):
        return self.claimed if dim is None else self.claimed[dim]


def steps(*, lanes: int = LANES, peers: int = PEERS) -> list[Launch]:
    """The launches that begin and end a step, and those of the doorbells."""
    lane, states = torch.zeros(8, dtype=torch.int64), torch.zeros(lanes, 8, dtype=torch.int64)
    inbox, slots = torch.zeros(lanes, 8, dtype=torch.int64), torch.zeros(lanes, dtype=torch.int64)
    bells, clocks = torch.zeros(peers, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int64)
    own = torch.zeros(lanes, dtype=torch.int32)
    fill_inbox(inbox, [StepMember(0, 16, 16, 1, 1, 1)])
    with record() as launches:
        begin_step(lane, session=1, step=1, rows=1, bells=bells)
        enter_step(inbox, slots, slots.clone(), states, peer_bells=slots.clone(), bells=own)
        leave_step(clocks, clocks.clone())
        open_bells(bells)
    return launches


def every_launch(capability: int) -> Iterator[tuple[str, Launch]]:
    """(variant, launch) of every kernel, the GEMMs in each line of each checked-in table, for one kind of card.

    A variant tells launches of one kernel apart; together with the kernel's name it is stable.
    """
    for folder, width, rows in entries():
        dtype = torch.float32 if width == "4byte" else torch.bfloat16
        up, down = (pick(op, rows, dtype, gpu=folder, shared_memory=CARDS[capability]) for op in OPS)
        for launch in gemms(dtype, up, down):
            yield f"{folder}/{width}/rows={rows}", launch
    up, down = (pick(op, 1000, torch.bfloat16, shared_memory=CARDS[capability]) for op in OPS)
    interleaved = SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)
    for launch in gemms(torch.bfloat16, up, down, lanes=LANES, activation=interleaved, bias=True, transposed=True):
        yield "gpt-oss", launch
    bf16, seen = torch.bfloat16, set()
    deep = {"scoring": "sigmoid", "selection_bias": torch.zeros(256), "num_groups": 8, "topk_groups": 4}
    parts = {
        "bf16": [*steps(), *exchange(bf16), *layer(bf16), *routing(bf16, renormalize=True)],
        "bf16/large": [*exchange(bf16, tokens=640), *routing(bf16, tokens=640, experts=256, hidden=7168, **deep)],
    }  # fmt: skip
    for variant, launches in parts.items():
        for launch in launches:
            if launch.name.startswith("_p_") or (variant != "bf16" and launch.name in OF_ANY_BATCH):
                continue
            if (variant, launch.name) not in seen:
                seen.add((variant, launch.name))
                yield variant, launch
