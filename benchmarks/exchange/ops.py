# SPDX-License-Identifier: Apache-2.0
"""The ops of one exchanged layer, each on its own: all slots are local and nobody waits."""

from __future__ import annotations

import functools
import statistics

import torch

import afd_kernels
from afd_kernels.testing import assert_close, poison
from benchmarks.exchange.group import Bank
from benchmarks.exchange.report import Result, p6_limit, p7_limit, verdict
from benchmarks.exchange.timing import op_us, repeated, rounds


class Ops:
    """One attention rank with ``rows`` rows a step and ``ffn_ranks`` FFN ranks that share the experts of ``bank``.

    x: [layers, rows, H]; an op with an index takes the inputs of that layer. Everything is sized for exactly ``rows``.
    """

    def __init__(self, bank: Bank, rows: int, ffn_ranks: int = 1) -> None:
        spec, device = bank.spec, bank.device
        if spec.num_experts % ffn_ranks:
            raise ValueError(f"ffn_ranks is {ffn_ranks}; allowed: a divisor of the {spec.num_experts} experts")
        size, top_k, hidden = spec.num_experts // ffn_ranks, spec.top_k, spec.hidden_size
        self.parts = [bank.part(range(rank * size, (rank + 1) * size)) for rank in range(ffn_ranks)]
        self.bank, self.rows, self.peers = bank, rows, ffn_ranks
        self.layout = afd_kernels.MessageLayout(size, rows, top_k, hidden, spec.dtype)
        self.replies = afd_kernels.ReplyLayout(rows, hidden, spec.dtype)
        generator = torch.Generator(device).manual_seed(rows)
        shape = (spec.num_layers, rows, hidden)
        self.x = torch.randn(shape, generator=generator, device=device, dtype=spec.dtype)
        self.routed = [bank.route(x) for x in self.x]
        self.lane = torch.zeros(8, dtype=torch.int64, device=device)
        afd_kernels.begin_step(self.lane, session=1, step=1, rows=rows)
        self.lanes = [self.lane.clone()[None] for _ in range(ffn_ranks)]
        self._memory = [
            torch.zeros(n, dtype=torch.uint8, device=device) for n in [self.layout.nbytes] * ffn_ranks +
            [self.replies.nbytes] * ffn_ranks
        ]  # fmt: skip
        addresses = torch.tensor([memory.data_ptr() for memory in self._memory], device=device)
        self.slots, self.reply_slots = addresses[:ffn_ranks].clone(), addresses[ffn_ranks:].clone()
        self.expert_bucket = torch.arange(spec.num_experts, dtype=torch.int32, device=device)
        self.row_map = torch.zeros(ffn_ranks, rows, dtype=torch.int32, device=device)
        nbytes = afd_kernels.dispatch_workspace(rows, self.layout, ffn_ranks)
        self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._counter = torch.zeros(afd_kernels.REPLY_WORKSPACE, dtype=torch.uint8, device=device)
        configs = afd_kernels.pick_experts(rows * top_k, size, spec.dtype, device)
        self.schedule = afd_kernels.new_schedule(1, self.layout, block_m=configs[0].block_m, device=device)
        self.y = torch.zeros(rows * top_k, hidden, dtype=spec.dtype, device=device)
        self.out = torch.zeros(rows, hidden, dtype=spec.dtype, device=device)

    def route(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bank.route(self.x[index % len(self.x)])

    def dispatch(self, index: int, routed: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        weights, ids = routed or self.routed[index % len(self.x)]
        afd_kernels.dispatch(
            self.x[index % len(self.x)], ids, weights, expert_bucket=self.expert_bucket, slots=self.slots,
            layout=self.layout, lane=self.lane, row_map=self.row_map, workspace=self._workspace,
        )  # fmt: skip

    def attention(self, index: int) -> None:
        """Hidden states in, packed messages published."""
        self.dispatch(index, self.route(index))

    def arrival(self, rank: int = 0) -> None:
        slots = self.slots[rank : rank + 1]
        afd_kernels.arrival(slots, self.lanes[rank], self.layout, schedule=self.schedule)

    def experts(self, rank: int = 0) -> None:
        self.parts[rank].forward(0, self.schedule, y=self.y)

    def reply(self, rank: int = 0, clock: torch.Tensor | None = None) -> None:
        slots = self.reply_slots[rank : rank + 1]
        afd_kernels.reply(
            self.y, self.schedule, slots, self.lanes[rank], self.replies, clock=clock, workspace=self._counter
        )

    def combine(self) -> None:
        afd_kernels.combine(self.reply_slots, self.row_map, self.replies, self.lane, out=self.out)

    def fused(self, index: int) -> torch.Tensor:
        weights, ids = self.routed[index % len(self.x)]
        return afd_kernels.fused_experts(
            self.x[index % len(self.x)], self.bank.w_up, self.bank.w_down, weights, ids, out=self.out,
            workspace=self._fused_workspace,
        )  # fmt: skip

    @functools.cached_property
    def _fused_workspace(self) -> torch.Tensor:
        spec, device = self.bank.spec, self.bank.device
        sizes = spec.num_experts, spec.intermediate_size, spec.hidden_size, spec.top_k
        nbytes = afd_kernels.fused_experts_workspace(self.rows, *sizes, spec.dtype, device)
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def check(self) -> None:
        """Raises ``AssertionError`` unless the ops one after the other give what ``fused_experts`` gives."""
        self.dispatch(0)
        for rank in range(self.peers):
            self.arrival(rank)
            self.experts(rank)
            self.reply(rank)
        self.out.copy_(poison(*self.out.shape, dtype=self.out.dtype))
        self.combine()
        got = self.out.clone()
        assert_close(got, self.fused(0), what=f"ops, {self.rows} rows, {self.peers} FFN ranks")


def measure_sent(bank: Bank, rows: int, ffn_ranks: int = 2) -> Result:
    """Hidden states in, packed messages published (P6), and its two parts."""
    ops = Ops(bank, rows, ffn_ranks)
    ops.check()
    calls = bank.spec.num_layers
    figures = rounds({
        "attention_us": repeated(ops.attention, calls), "route_us": repeated(ops.route, calls),
        "dispatch_us": repeated(ops.dispatch, calls),
    })  # fmt: skip
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return {**medians, "ffn_ranks": ffn_ranks, **verdict("P6", medians["attention_us"], p6_limit(rows))}


def measure_answered(bank: Bank, rows: int, ffn_ranks: int = 2) -> Result:
    """Arrival and reply of one FFN rank and the combine of all replies, each alone; their sum (P7)."""
    ops = Ops(bank, rows, ffn_ranks)
    ops.check()
    ops.arrival()
    parts = {
        "arrival_us": op_us(lambda _: ops.arrival()), "reply_us": op_us(lambda _: ops.reply()),
        "combine_us": op_us(lambda _: ops.combine()),
    }  # fmt: skip
    total = sum(parts.values())
    limit = p7_limit(rows, bank.spec.hidden_size) if bank.spec.top_k == 8 and ffn_ranks == 2 else None
    return {"p7_us": total, **parts, "ffn_ranks": ffn_ranks, **verdict("P7", total, limit)}
