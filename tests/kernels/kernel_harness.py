# SPDX-License-Identifier: Apache-2.0
"""What the kernel tests share: where they run, a launch counter, poisoned slots, an exchange of D peers and A lanes."""

from __future__ import annotations

import contextlib
from collections import Counter

import torch
import triton

from afd_kernels import (
    MODE_ONLINE,
    MessageLayout,
    ReplyLayout,
    Status,
    SwiGLU,
    arrival,
    begin_step,
    combine,
    dispatch,
    experts_forward,
    reply,
    wait,
)
from afd_kernels.testing import ExpertInputs, poison

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"
#: The interpreter computes bf16 dots wrongly.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
GUARD = 256  # bytes of poison behind each slot
LONG_S = 20.0  # of a wait that must pass


class Launches(Counter):
    """Launches by kernel name, seen from outside the package."""

    def expect(self, *names: str) -> None:
        missing = [name for name in names if not self[name]]
        assert not missing, f"these kernels did not run: {missing}; these did: {dict(self)}"

    def expect_none(self) -> None:
        """Nothing ran but the lane states that the test itself set."""
        ran = {name: n for name, n in self.items() if name != "_begin_kernel"}
        assert not ran, f"these kernels ran: {ran}"


@contextlib.contextmanager
def counted():
    """Counts through Triton's launch hook on a GPU, and by wrapping the interpreter's entry without one."""
    launches = Launches()
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        saved = InterpretedFunction.run

        def run(self, *args, **kwargs):
            launches[self.fn.__name__] += 1
            return saved(self, *args, **kwargs)

        InterpretedFunction.run = run
        try:
            yield launches
        finally:
            InterpretedFunction.run = saved
        return

    def hook(metadata):
        launches[metadata.get()["name"]] += 1

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield launches
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


def to_cpu(value):
    """CPU copies of a tensor, or of every tensor in a list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    return type(value)(map(to_cpu, value)) if isinstance(value, (list, tuple)) else value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, so also where both hold the same NaN."""
    a, b = a.contiguous().cpu(), b.contiguous().cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strided(tensor: torch.Tensor, *, before: int = 1, after: int = 2) -> torch.Tensor:
    """The same values as a slice of a larger tensor full of NaN: every stride but the last is odd."""
    shape = [before + n + after for n in tensor.shape]
    larger = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(before, before + n) for n in tensor.shape)]
    return view.copy_(tensor)


def addresses(slots: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([0 if s is None else s.data_ptr() for s in slots], dtype=torch.int64, device=DEVICE)


def new_slot(layout: MessageLayout | ReplyLayout) -> torch.Tensor:
    """A slot full of poison, its signal word zero, with a guard behind it."""
    slot = poison(layout.nbytes + GUARD, dtype=torch.uint8, device=DEVICE)
    layout.views(slot).signal.zero_()
    return slot


def status_cell() -> tuple[torch.Tensor, torch.Tensor]:
    """abort int32[1], status int64[8]"""
    return torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)


def passes(slots: torch.Tensor, lanes: torch.Tensor) -> None:
    abort, status = status_cell()
    wait(slots, lanes, abort=abort, status=status, timeout_s=LONG_S)
    assert int(status[Status.CODE]) == 0, status.tolist()


def blocks(num_experts: int, num_peers: int) -> tuple[int, torch.Tensor]:
    """(experts of a peer, expert_bucket): neighbours together, the last peer has the remainder."""
    size = -(-num_experts // num_peers)
    return size, torch.arange(num_experts, dtype=torch.int32, device=DEVICE)


def round_robin(num_experts: int, num_peers: int) -> tuple[int, torch.Tensor]:
    """(experts of a peer, expert_bucket): expert e on peer e % num_peers."""
    size = -(-num_experts // num_peers)
    expert = torch.arange(num_experts, dtype=torch.int32, device=DEVICE)
    return size, (expert % num_peers) * size + expert // num_peers


class World:
    """num_peers FFN ranks and num_lanes attention ranks in one process, every slot full of poison."""

    def __init__(self, num_peers, num_lanes, layout: MessageLayout, reply_dtype: torch.dtype | None = None) -> None:
        self.num_peers, self.num_lanes, self.layout = num_peers, num_lanes, layout
        self.reply_layout = ReplyLayout(layout.cap_rows, layout.hidden_size, reply_dtype or layout.dtype)
        self.requests = [[new_slot(layout) for _ in range(num_lanes)] for _ in range(num_peers)]
        self.replies = [[new_slot(self.reply_layout) for _ in range(num_lanes)] for _ in range(num_peers)]
        self.lanes = torch.zeros(num_lanes, 8, dtype=torch.int64, device=DEVICE)
        self.ffn_lanes = [torch.zeros_like(self.lanes) for _ in range(num_peers)]

    def begin(self, rows: list[int], *, step: int = 5, modes: list[int] | None = None) -> None:
        modes = modes or [MODE_ONLINE] * self.num_lanes
        for a in range(self.num_lanes):
            for lane in (self.lanes[a], *(lanes[a] for lanes in self.ffn_lanes)):
                begin_step(lane, session=40000 + a, step=step, rows=rows[a], mode=modes[a])

    def requests_to(self, peer: int) -> torch.Tensor:
        return addresses(self.requests[peer])

    def requests_of(self, lane: int) -> torch.Tensor:
        return addresses([slots[lane] for slots in self.requests])

    def replies_from(self, peer: int) -> torch.Tensor:
        return addresses(self.replies[peer])

    def replies_of(self, lane: int) -> torch.Tensor:
        return addresses([slots[lane] for slots in self.replies])

    def message(self, peer: int, lane: int):
        return self.layout.views(self.requests[peer][lane])

    def send(self, lane: int, x, ids, weights, bucket, **kwargs) -> torch.Tensor:
        return dispatch(
            x, ids, weights, expert_bucket=bucket, slots=self.requests_of(lane), layout=self.layout,
            lane=self.lanes[lane], **kwargs,
        )  # fmt: skip

    def serve(self, peer: int, weights: dict, activation: SwiGLU = SwiGLU(), block_m: int = 16):
        """One FFN rank's exchange. weights: of this peer, ``w_up`` … ``b_down``. Returns (schedule, y)."""
        slots, lanes = self.requests_to(peer), self.ffn_lanes[peer]
        passes(slots, lanes)
        schedule = arrival(slots, lanes, self.layout, block_m=block_m)
        assert not schedule.error.any()
        y = poison(schedule.cap_rows * schedule.top_k, self.layout.hidden_size, dtype=self.layout.dtype, device=DEVICE)
        experts_forward(schedule, **weights, activation=activation, y=y)
        reply(y, schedule, self.replies_from(peer), lanes, self.reply_layout)
        return schedule, y

    def receive(self, lane: int, row_map: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        slots = self.replies_of(lane)
        passes(slots, self.lanes[lane])
        out = poison(row_map.shape[1], self.layout.hidden_size, dtype=dtype or self.layout.dtype, device=DEVICE)
        return combine(slots, row_map, self.reply_layout, self.lanes[lane], out=out)


def shard(inputs: ExpertInputs, bucket: torch.Tensor, size: int, num_peers: int) -> list[dict]:
    """Each peer's experts in local order; where it has fewer than ``size``, NaN."""
    owner = torch.full((num_peers * size,), -1, dtype=torch.int64)
    for expert, at in enumerate(bucket.tolist()):
        if at >= 0:
            owner[at] = expert

    def cut(tensor, peer):
        if tensor is None:
            return None
        mine = owner[peer * size : (peer + 1) * size].to(tensor.device)
        part = tensor[mine.clamp(min=0)].clone()
        part[mine < 0] = float("nan")
        return part

    names = ("w_up", "w_down", "b_up", "b_down")
    return [{name: cut(getattr(inputs, name), peer) for name in names} for peer in range(num_peers)]
