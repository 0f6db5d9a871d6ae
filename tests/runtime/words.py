# SPDX-License-Identifier: Apache-2.0
"""Two processes rewrite every word of their two slots in each exchange, and check every byte of what they read.

Rows, pairs, weights and replies follow from (step, exchange, index) alone, so each side makes an image of the whole
slot that it reads, without the kernels, and compares all bytes. ``exchange_words`` runs it on ``"cpu"`` (shared memory)
or on ``"cuda"`` (CUDA IPC, and doorbells, between processes of one GPU).
"""

from __future__ import annotations

import multiprocessing.connection
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from group import Child
from group import _answer as answer

import afd_kernels
from afd_kernels.message import MAGIC, VERSION, Header, MessageLayout, ReplyLayout, signal_word
from afd_kernels.step import StepMember, fill_inbox
from afd_runtime.connectors.attention_lane import Lane
from afd_runtime.connectors.stage_tables import StageTables
from afd_runtime.doorbells import Doorbells, bell_bytes
from afd_runtime.window import Fabric, SharedMemoryFabric, Window, WindowLayout

SESSION = 7


@dataclass(frozen=True)
class Plan:
    """What both processes know. late: share of the exchanges that a side begins up to ``late_s`` later.

    fault: what the FFN side does wrong, for a check that can fail: "early" (it does not wait), "stale" (in one exchange
    it answers with the rows of the exchange before), or "".
    """

    device: str = "cpu"
    steps: int = 80
    exchanges: int = 5
    rows: int = 33
    hidden_size: int = 40
    num_experts: int = 7
    top_k: int = 3
    dtype: torch.dtype = torch.float32
    late: float = 0.05
    late_s: float = 0.005
    timeout_s: float = 20.0
    fault: str = ""

    @property
    def layout(self) -> WindowLayout:
        request = MessageLayout(self.num_experts, self.rows, self.top_k, self.hidden_size, self.dtype)
        return WindowLayout(request, ReplyLayout(self.rows, self.hidden_size, self.dtype), 1)

    def bits(self, step: int, exchange: int, count: int, salt: int) -> torch.Tensor:
        """int64[count], 32 random bits each, of (step, exchange, salt, index)."""
        index = torch.arange(count, dtype=torch.int64, device=self.device)
        mixed = index * 0x9E3779B1 + (step * self.exchanges + exchange) * 0x85EBCA6B + salt * 0x27D4EB2F
        for shift in (15, 12, 17):
            mixed = mixed & 0xFFFFFFFF
            mixed = (mixed ^ mixed >> shift) * 0x2C1B3C6D
        return mixed & 0xFFFFFFFF

    def request(self, step: int, exchange: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [M, H] of any bits, ids int32[M, k] of distinct experts, weights f32[M, k] that are powers of two."""
        at = (step, exchange)
        integer = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        hidden = self.bits(*at, self.rows * self.hidden_size, 1).to(integer).view(self.dtype)
        first = self.bits(*at, self.rows, 2)[:, None] + torch.arange(self.top_k, device=self.device)
        weights = torch.exp2(-(self.bits(*at, self.rows * self.top_k, 3) % 4).to(torch.float32))
        return (
            hidden.view(self.rows, self.hidden_size),
            (first % self.num_experts).to(torch.int32),
            weights.view(self.rows, self.top_k),
        )

    def outputs(self, step: int, exchange: int) -> torch.Tensor:
        """[M * k, H], whole numbers: what the experts would give for each choice of each row."""
        count = self.rows * self.top_k * self.hidden_size
        numbers = self.bits(step, exchange, count, 4) % 256 - 128
        return numbers.to(self.dtype).view(self.rows * self.top_k, self.hidden_size)

    def request_image(self, step: int, exchange: int) -> torch.Tensor:
        """uint8[nbytes]: the request slot, from the table in ``afd_kernels.message`` alone."""
        image = torch.zeros(self.layout.request.nbytes, dtype=torch.uint8, device=self.device)
        views, pairs = self.layout.request.views(image), self.rows * self.top_k
        hidden, ids, weights = self.request(step, exchange)
        fields = {Header.MAGIC: MAGIC, Header.VERSION: VERSION, Header.SESSION: SESSION, Header.STEP: step,
                  Header.LAYER: exchange, Header.EXCHANGE: exchange, Header.ROWS: self.rows,
                  Header.PAIRS: pairs}  # fmt: skip
        values = torch.zeros(len(views.header), dtype=torch.int32)
        values[list(fields)] = torch.tensor(list(fields.values()), dtype=torch.int32)
        views.header.copy_(values)
        views.signal.fill_(signal_word(SESSION, step, exchange))
        experts = ids.flatten().long()
        views.expert_offsets[1:] = torch.bincount(experts, minlength=self.num_experts).cumsum(0)
        views.pairs.copy_(experts.argsort(stable=True))
        views.weights.copy_(weights)
        views.rows.copy_(hidden)
        return image

    def reply_image(self, step: int, exchange: int) -> torch.Tensor:
        """uint8[nbytes]: the reply slot. Sums of whole numbers times powers of two are exact in any order."""
        image = torch.zeros(self.layout.reply.nbytes, dtype=torch.uint8, device=self.device)
        views = self.layout.reply.views(image)
        _, _, weights = self.request(step, exchange)
        outputs = self.outputs(step, exchange).view(self.rows, self.top_k, -1).float()
        views.signal.fill_(signal_word(SESSION, step, exchange))
        views.rows.copy_((weights[:, :, None] * outputs).sum(1))
        return image


class Check:
    """Counts differing bytes on the device; ``settle`` waits for the stream and raises where there were any."""

    def __init__(self, plan: Plan, what: str) -> None:
        self.what, self.wrong = what, torch.zeros(plan.exchanges, 2, dtype=torch.int64, device=plan.device)
        self.nbytes = 0

    def same(self, exchange: int, found: torch.Tensor, expected: torch.Tensor) -> None:
        differ = found.contiguous().view(torch.uint8).flatten() != expected.contiguous().view(torch.uint8).flatten()
        self.nbytes += differ.numel()
        self.wrong[exchange] += torch.stack([differ.sum(), differ.to(torch.uint8).argmax()])

    def settle(self, step: int) -> None:
        for exchange, (count, first) in enumerate(self.wrong.tolist()):
            assert count == 0, f"{self.what}: {count} wrong bytes in exchange {exchange} of step {step}, first {first}"


class Late:
    """Holds a side up now and then, by a seed of its own."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.random = plan, random.Random(seed)

    def pause(self) -> None:
        if self.random.random() < self.plan.late:
            time.sleep(self.random.choice((0.001, self.plan.late_s)))


def _fabric(plan: Plan) -> tuple[Fabric, Doorbells | None]:
    if plan.device == "cpu":
        return SharedMemoryFabric(), None
    from afd_runtime.window import CudaIpcFabric

    torch.cuda.set_stream(torch.cuda.Stream())
    device = torch.device("cuda", 0)
    return CudaIpcFabric(device), Doorbells(device, 1, 1)


def _meet(pipe: Any, fabric: Fabric, bells: Doorbells | None, own: Window, nbytes: int) -> tuple[Window, Window | None]:
    """Tells the other process about ``own`` and the doorbells. Returns its window and its doorbells."""
    pipe.send((own.handle, None if bells is None else bells.handle))
    window, bell = pipe.recv()
    return fabric.open(window, nbytes), None if bell is None else fabric.open(bell, bell_bytes(1, 1))


def attention_main(pipe: Any, plan: Plan) -> None:
    """Writes requests, reads replies."""
    torch.set_num_threads(1)
    fabric, bells = _fabric(plan)
    layout, late, check = plan.layout, Late(plan, 1), Check(plan, "reply")
    lane = Lane(1, layout, plan.exchanges, torch.device(plan.device), 0, bells)
    buckets = torch.arange(plan.num_experts, dtype=torch.int32, device=plan.device)
    reply = fabric.allocate(layout.reply_nbytes)
    request, bell = _meet(pipe, fabric, bells, reply, layout.request_nbytes)
    lane.set_peers([request.address], [reply.address], [bell.address if bell else 0])
    slot = reply.buffer[: layout.reply.nbytes]

    def run() -> int:
        for step in range(plan.steps):
            lane.begin(SESSION, plan.rows)
            for exchange in range(plan.exchanges):
                late.pause()
                inputs, expected = plan.request(step, exchange), plan.reply_image(step, exchange)
                row_map = lane.dispatch(*inputs, buckets, exchange, exchange)
                lane.wait(plan.timeout_s, exchange)
                check.same(exchange, slot, expected)
                out = lane.combine(row_map, torch.empty_like(inputs[0]))
                check.same(exchange, out, layout.reply.views(expected).rows)
            check.settle(step)
            assert not lane.status.any(), f"the wait of step {step} failed: {lane.status.tolist()}"
        return check.nbytes

    answer(pipe, run)
    pipe.recv()


def ffn_main(pipe: Any, plan: Plan) -> None:
    """Reads requests, writes replies."""
    torch.set_num_threads(1)
    fabric, bells = _fabric(plan)
    layout, late, check = plan.layout, Late(plan, 2), Check(plan, "request")
    tables = StageTables(1, plan.exchanges, torch.device(plan.device), 0, bells)
    request = fabric.allocate(layout.request_nbytes)
    reply, bell = _meet(pipe, fabric, bells, request, layout.reply_nbytes)
    slot, schedule = request.buffer[: layout.request.nbytes], None
    bell_address = bell.address if bell else 0
    member = StepMember(0, request.address, reply.address, SESSION, 0, plan.rows, bell_address)

    def run() -> int:
        nonlocal schedule
        for step in range(plan.steps):
            fill_inbox(tables.inbox, [member._replace(step=step)])
            tables.enter()
            for exchange in range(plan.exchanges):
                late.pause()
                expected = plan.request_image(step, exchange)
                stale = plan.fault == "stale" and (step, exchange) == (plan.steps // 2, 1)
                outputs = plan.outputs(step, exchange - stale)
                if plan.fault != "early":
                    tables.wait(plan.timeout_s, exchange)
                check.same(exchange, slot, expected)
                schedule = afd_kernels.arrival(
                    tables.slots, tables.lanes, layout.request, schedule=schedule, layer=exchange, status=tables.status
                )
                afd_kernels.reply(
                    outputs, schedule, tables.reply_slots, tables.lanes, layout.reply, bells=tables.peer_bells
                )
            check.settle(step)
            assert not tables.status.any(), f"the wait of step {step} failed: {tables.status.tolist()}"
        return check.nbytes

    answer(pipe, run)
    pipe.recv()


def exchange_words(plan: Plan, limit_s: float = 60.0) -> tuple[int, int]:
    """Runs both processes. Returns the bytes that the attention side and the FFN side have compared.

    Raises ``group.Failed`` of the side that found a wrong byte first.
    """
    children = [Child(main, plan) for main in (attention_main, ffn_main)]
    compared: dict[Any, int] = {}
    try:
        offers = [_next(child, limit_s) for child in children]
        for child, offer in zip(children, reversed(offers), strict=True):
            child.pipe.send(offer)
        pipes = {child.pipe: child for child in children}
        while len(compared) < len(children):
            ready = multiprocessing.connection.wait(set(pipes) - set(compared), limit_s)
            if not ready:
                raise TimeoutError(f"no answer within {limit_s} s")
            compared.update({pipe: pipes[pipe].result() for pipe in ready})
        return compared[children[0].pipe], compared[children[1].pipe]
    finally:
        for child in children:
            child.kill()


def _next(child: Child, limit_s: float) -> Any:
    if not child.pipe.poll(limit_s):
        raise TimeoutError(f"process {child.process.pid} made no window within {limit_s} s")
    return child.pipe.recv()
