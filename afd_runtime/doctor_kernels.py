# SPDX-License-Identifier: Apache-2.0
"""``afd doctor --kernels``: every operation once, in fp32 on small odd sizes, against plain loops over tokens.

On a GPU each result is also compared with that of the operation's reference, which runs on the CPU. Results are brought
into an order that no operation promises anything about: by peer, token and choice.
"""

from __future__ import annotations

import torch

import afd_kernels
from afd_kernels import Header, Lane, MessageLayout, ReplyLayout, StepMember, signal_word
from afd_kernels._op import INTERPRETED
from afd_kernels.testing import assert_close, expert_inputs, moe_oracle, poison
from afd_runtime.control_plane.cells import host_zeros, status_cells
from afd_runtime.doctor import FAILED, OK, Finding
from afd_runtime.errors import AFDError, one_line

TOKENS, EXPERTS, PEERS, HIDDEN, INNER, TOP_K = 7, 5, 2, 37, 29, 3
SHARE = -(-EXPERTS // PEERS)  # experts of a peer; the last has fewer
SESSION, STEP = 40001, 5
WAIT_S = 5.0
ALONE = ("route", "top_k_from_logits", "fused_experts", "fused_moe", "leave_step")
EXCHANGE = (
    "begin_step", "enter_step", "dispatch", "wait", "arrival", "experts_forward", "reply", "combine",
)  # fmt: skip
TODO = "do not serve with this environment; compare torch, triton and driver with the supported versions"

Tensors = tuple[torch.Tensor, ...]


def check_kernels(device: torch.device | None = None) -> list[Finding]:
    """One finding for each operation. device: None is the current GPU where there is one, otherwise the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = f"kernel on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "reference on the CPU"
    if INTERPRETED and device.type == "cpu":
        path = "kernel in Triton's interpreter"
    run = Operations(device)
    wanted: dict[str, Operations | Formulas] = {"a loop over tokens": Formulas()}
    if device.type == "cuda":
        wanted["its reference"] = Operations(torch.device("cpu"))
    findings, broken = [], ""
    for name in ALONE + EXCHANGE:
        try:
            if name in EXCHANGE and broken:
                raise AFDError(f"not run, because {broken} failed")
            _check(name, run, wanted)
            findings.append(Finding(f"kernels: {name}", OK, f"{path}, equal to {' and '.join(wanted)}"))
        except Exception as error:
            broken = broken or (name if name in EXCHANGE else "")
            findings.append(Finding(f"kernels: {name}", FAILED, f"{path}: {one_line(error)}", TODO))
    return findings


def _check(name: str, run: Operations, wanted: dict[str, Operations | Formulas]) -> None:
    found = getattr(run, name)()
    for what, other in wanted.items():
        for tensor, want in zip(found, getattr(other, name)(), strict=True):
            tensor, want = tensor.cpu(), want.cpu()
            if tensor.is_floating_point():
                assert_close(tensor, want, dtype=torch.float32, what=f"against {what}")
            elif not torch.equal(tensor.long(), want.long()):
                raise AFDError(f"against {what}: {tensor.tolist()}, expected {want.tolist()}")


def _inputs(device: torch.device):
    inputs = expert_inputs(TOKENS, EXPERTS, HIDDEN, INNER, TOP_K, device=device, bias=True, seed=11)
    inputs.topk_ids[0, 0] = -1  # computed nowhere
    return inputs


class Operations:
    """The operations on ``device``, each called once, those of ``EXCHANGE`` in that order: one lane, two peers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.inputs = device, _inputs(device)
        self.layout = MessageLayout(SHARE, TOKENS + 2, TOP_K, HIDDEN, torch.float32)
        self.reply_layout = ReplyLayout(TOKENS + 2, HIDDEN, torch.float32)
        self.requests = [self._slot(self.layout) for _ in range(PEERS)]
        self.replies = [self._slot(self.reply_layout) for _ in range(PEERS)]
        self.lane = torch.zeros(8, dtype=torch.int64, device=device)
        self.lanes = [torch.full((1, 8), -1, dtype=torch.int64, device=device) for _ in range(PEERS)]

    def _slot(self, layout: MessageLayout | ReplyLayout) -> torch.Tensor:
        slot = poison(layout.nbytes, dtype=torch.uint8, device=self.device)
        layout.views(slot).signal.zero_()
        return slot

    def _addresses(self, slots: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([slot.data_ptr() for slot in slots], dtype=torch.int64, device=self.device)

    def _wait(self, slots: list[torch.Tensor], lanes: torch.Tensor) -> torch.Tensor:
        abort, status = host_zeros(1, dtype=torch.int32, device=self.device), status_cells(self.device)
        afd_kernels.wait(self._addresses(slots), lanes, abort=abort, status=status, timeout_s=WAIT_S)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return status[:1].clone()

    def _by_token(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Rows of each peer's message, [PEERS, TOKENS, …]; zero where the token was not sent there."""
        picked = []
        for peer, table in enumerate(rows):
            at = self.row_map[peer].long()
            shape = (-1, *[1] * (table.dim() - 1))
            picked.append(torch.where((at >= 0).view(shape), table[at.clamp(min=0)], torch.zeros_like(table[:1])))
        return torch.stack(picked)

    def route(self) -> Tensors:
        return afd_kernels.route(self.inputs.x, self.inputs.gate_weight, top_k=TOP_K)

    def top_k_from_logits(self) -> Tensors:
        return afd_kernels.top_k_from_logits(self.inputs.x[:, :EXPERTS].contiguous(), top_k=TOP_K)

    def fused_experts(self) -> Tensors:
        i = self.inputs
        return (afd_kernels.fused_experts(i.x, i.w_up, i.w_down, i.topk_weights, i.topk_ids, b_up=i.b_up,
                                          b_down=i.b_down),)  # fmt: skip

    def fused_moe(self) -> Tensors:
        i = self.inputs
        return (afd_kernels.fused_moe(i.x, i.gate_weight, i.w_up, i.w_down, top_k=TOP_K, b_up=i.b_up,
                                      b_down=i.b_down),)  # fmt: skip

    def leave_step(self) -> Tensors:
        clocks = torch.arange(8, device=self.device).view(2, 4) * 3 + 1
        out = host_zeros(2, 4, dtype=torch.int64, device=self.device)
        afd_kernels.leave_step(clocks, out)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (out,)

    def begin_step(self) -> Tensors:
        afd_kernels.begin_step(self.lane, session=SESSION, step=STEP, rows=TOKENS)
        return (self.lane[: Lane.ROWS + 1].clone(),)

    def enter_step(self) -> Tensors:
        written = []
        for peer, lanes in enumerate(self.lanes):
            request, reply = self.requests[peer].data_ptr(), self.replies[peer].data_ptr()
            inbox = host_zeros(1, afd_kernels.INBOX_FIELDS, dtype=torch.int64, device=self.device)
            slots, reply_slots = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
            afd_kernels.fill_inbox(inbox, [StepMember(0, request, reply, SESSION, STEP, TOKENS)])
            afd_kernels.enter_step(inbox, slots, reply_slots, lanes)
            if (int(slots), int(reply_slots)) != (request, reply):
                raise AFDError(
                    f"slot addresses {int(slots):#x} and {int(reply_slots):#x} are not those that were given"
                )
            written.append(lanes[0, : Lane.ROWS + 1].clone())
        return tuple(written)

    def dispatch(self) -> Tensors:
        i, bucket = self.inputs, torch.arange(EXPERTS, dtype=torch.int32, device=self.device)
        self.row_map = afd_kernels.dispatch(
            i.x, i.topk_ids, i.topk_weights, expert_bucket=bucket, slots=self._addresses(self.requests),
            layout=self.layout, lane=self.lane,
        )  # fmt: skip
        messages = [self.layout.views(slot) for slot in self.requests]
        sizes = torch.stack([message.header[[Header.ROWS, Header.PAIRS]] for message in messages])
        return sizes, self._by_token([message.rows for message in messages])

    def wait(self) -> Tensors:
        return tuple(self._wait([slot], lanes[0]) for slot, lanes in zip(self.requests, self.lanes, strict=True))

    def arrival(self) -> Tensors:
        pairs = zip(self.requests, self.lanes, strict=True)
        self.schedules = [afd_kernels.arrival(self._addresses([slot]), lanes, self.layout) for slot, lanes in pairs]
        return torch.stack([s.lane_base for s in self.schedules]), torch.stack([s.expert_base for s in self.schedules])

    def experts_forward(self) -> Tensors:
        i, self.ys = self.inputs, []
        for peer, schedule in enumerate(self.schedules):
            mine = [t[peer * SHARE : (peer + 1) * SHARE] for t in (i.w_up, i.w_down, i.b_up, i.b_down)]
            w_up, w_down, b_up, b_down = (self._padded(part) for part in mine)
            self.ys.append(afd_kernels.experts_forward(schedule, w_up, w_down, b_up=b_up, b_down=b_down))
        by_token = self._by_token([y.view(-1, TOP_K, HIDDEN) for y in self.ys])
        ids = self.inputs.topk_ids.long()
        local = torch.stack([(ids >= 0) & (ids // SHARE == peer) for peer in range(PEERS)])
        return (torch.where(local[..., None], by_token, torch.zeros_like(by_token)),)

    def _padded(self, part: torch.Tensor) -> torch.Tensor:
        missing = poison(SHARE - part.shape[0], *part.shape[1:], dtype=part.dtype, device=self.device)
        return torch.cat([part, missing])

    def reply(self) -> Tensors:
        for peer, (y, schedule) in enumerate(zip(self.ys, self.schedules, strict=True)):
            slots = self._addresses([self.replies[peer]])
            afd_kernels.reply(y, schedule, slots, self.lanes[peer], self.reply_layout)
        return (self._by_token([self.reply_layout.views(slot).rows for slot in self.replies]),)

    def combine(self) -> Tensors:
        status = self._wait(self.replies, self.lane)
        out = afd_kernels.combine(self._addresses(self.replies), self.row_map, self.reply_layout, self.lane)
        return status, out


class Formulas:
    """What the operations compute, from plain loops in fp64 that share no code with them."""

    def __init__(self) -> None:
        self.inputs = _inputs(torch.device("cpu"))
        self.choices = self.inputs.topk_ids.tolist()
        self.lane = torch.tensor([signal_word(SESSION, STEP, 0), 0, afd_kernels.MODE_ONLINE, TOKENS])

    def _moe(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        i = self.inputs
        return moe_oracle(i.x, i.w_up, i.w_down, weights, ids, b_up=i.b_up, b_down=i.b_down)

    def _at(self, peer: int, choices: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[e if e >= 0 and e // SHARE == peer else -1 for e in row] for row in choices])

    def _choose(self, logits: torch.Tensor) -> Tensors:
        scores = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
        ids = [sorted(range(EXPERTS), key=lambda e: (-row[e], e))[:TOP_K] for row in scores.tolist()]
        return scores.gather(1, torch.tensor(ids)), torch.tensor(ids)

    def route(self) -> Tensors:
        return self._choose(self.inputs.x.double() @ self.inputs.gate_weight.double().T)

    def top_k_from_logits(self) -> Tensors:
        return self._choose(self.inputs.x[:, :EXPERTS])

    def fused_experts(self) -> Tensors:
        return (self._moe(self.inputs.topk_weights, self.inputs.topk_ids),)

    def fused_moe(self) -> Tensors:
        return (self._moe(*self.route()),)

    def leave_step(self) -> Tensors:
        return (torch.tensor([[1, 4, 7, 10], [13, 16, 19, 22]]),)

    def begin_step(self) -> Tensors:
        return (self.lane,)

    def enter_step(self) -> Tensors:
        return (self.lane,) * PEERS

    def dispatch(self) -> Tensors:
        local = torch.stack([self._at(peer, self.choices) >= 0 for peer in range(PEERS)])
        sizes = torch.stack([local.any(-1).sum(-1), local.sum((1, 2))], dim=1)
        return sizes, self.inputs.x * local.any(-1, keepdim=True)

    def wait(self) -> Tensors:
        return (torch.zeros(1, dtype=torch.int64),) * PEERS

    def arrival(self) -> Tensors:
        counts = [[sum(row.count(peer * SHARE + e) for row in self.choices) for e in range(SHARE)]
                  for peer in range(PEERS)]  # fmt: skip
        sizes = self.dispatch()[0][:, :1]
        zero = torch.zeros(PEERS, 1, dtype=torch.int64)
        return torch.cat([zero, sizes], 1), torch.cat([zero, torch.tensor(counts).cumsum(1)], 1)

    def experts_forward(self) -> Tensors:
        one = torch.ones(TOKENS, 1)
        return (torch.stack([
            torch.stack([self._moe(one, self._at(peer, self.choices)[:, c : c + 1]) for c in range(TOP_K)], 1)
            for peer in range(PEERS)
        ]),)  # fmt: skip

    def reply(self) -> Tensors:
        weights = self.inputs.topk_weights
        return (torch.stack([self._moe(weights, self._at(peer, self.choices)) for peer in range(PEERS)]),)

    def combine(self) -> Tensors:
        return torch.zeros(1, dtype=torch.int64), *self.fused_experts()
