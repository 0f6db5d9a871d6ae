# SPDX-License-Identifier: Apache-2.0
"""What the children of a fault test run: a bank with planted faults, and an attention rank's checked answers."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from group import Bank, Spec, layer_weights, random_layer

from afd_kernels.signal import global_timer
from afd_runtime.connectors import p2p_ffn
from afd_runtime.remote_experts import AttentionSession

NOTHING, HANG, CRASH = 0, 1, 2  # what a test plants
POLL_S = 1e-3


def plant(folder: str, pid: int, what: int) -> None:
    """Plants a fault in the experts of process ``pid``, whose bank watches ``folder``, and waits until it is there."""
    Path(folder, str(pid)).write_bytes(bytes([what]))
    time.sleep(0.05)


@triton.jit(do_not_specialize=["num_delays"])
def _planted_kernel(flag_ptr, calls_ptr, delays_ptr, num_delays):
    """Runs for the call's delay, then as long as the flag is 1; where it is 2, stores to an address of nobody."""
    call = tl.load(calls_ptr)
    tl.store(calls_ptr, call + 1)
    now = global_timer()
    until = now + tl.load(delays_ptr + call % num_delays)
    while now < until:
        now = global_timer()
    flag = tl.load(flag_ptr, volatile=True)
    while flag == 1:
        flag = tl.load(flag_ptr, volatile=True)
    if flag == 2:
        nowhere = call * 0 + 16
        tl.store(nowhere.to(tl.pointer_type(tl.int32)), flag)


class PlantedBank(Bank):
    """A bank whose every call is late by the next of ``delays_ms``, hangs while HANG is planted, and where CRASH is
    reads (on a GPU: writes) an address that nobody has.

    folder: a file there, named like this process, says what is planted; a thread looks, because the main thread may be
    anywhere. stuck_after_s: patience of this process with a kernel that does not end; None: as it is.
    """

    def __init__(
        self, spec: Spec, expert_ids: range, *, folder: str, device: str = "cpu", delays_ms: Sequence[float] = (0,),
        stuck_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, expert_ids, device=device)
        self.delays_ms = delays_ms
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=device == "cuda")
        self.next_call = torch.zeros(1, dtype=torch.int64, device=device)
        self.delays = torch.tensor([int(ms * 1e6) for ms in delays_ms], dtype=torch.int64, device=device)
        if stuck_after_s is not None:
            p2p_ffn.STUCK_AFTER_S = stuck_after_s
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._cell = (ctypes.c_int32 * 1).from_address(self.flag.data_ptr())
        threading.Thread(target=self._watch, args=(Path(folder, str(os.getpid())),), daemon=True).start()

    def _watch(self, path: Path) -> None:
        while True:
            if path.exists():
                self._cell[0] = (path.read_bytes() or bytes(1))[0]
            time.sleep(POLL_S)

    def forward(self, layer_idx: int, schedule: Any, **buffers: Any) -> torch.Tensor:
        if self.delays.is_cuda:
            _planted_kernel[(1,)](self.flag, self.next_call, self.delays, len(self.delays_ms), num_warps=1,
                                  enable_fp_fusion=True)  # fmt: skip
        else:
            time.sleep(self.delays_ms[self.calls % len(self.delays_ms)] * 1e-3)
            while self._cell[0] == HANG:
                time.sleep(POLL_S)
            if self._cell[0] == CRASH:
                ctypes.string_at(0)
        return super().forward(layer_idx, schedule, **buffers)


class DenseOracle:
    """The routed experts of all exchanged layers at once, dense over all experts, in float64 on the CPU."""

    def __init__(self, spec: Spec) -> None:
        weights = [layer_weights(spec, layer) for layer in spec.expert_layers]
        self.num_experts = spec.num_experts
        self.up = torch.stack([up for up, _ in weights]).double()  # [L, E, 2I, H]
        self.down = torch.stack([down for _, down in weights]).double()  # [L, E, H, I]

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [L, M, H], ids and weights [L, M, k] (id -1: computed nowhere) -> float64 [L, M, H]."""
        gate, up = torch.einsum("lmh,leih->lmei", hidden.double(), self.up).chunk(2, dim=-1)
        y = torch.einsum("lmei,lehi->lmeh", gate * torch.sigmoid(gate) * up, self.down)
        scale = torch.zeros(*ids.shape[:2], self.num_experts + 1, dtype=torch.float64)
        scale.scatter_add_(2, ids.long() % (self.num_experts + 1), weights.double())
        return torch.einsum("lmeh,lme->lmh", y, scale[..., :-1])


Inputs = tuple[torch.Tensor, ...]


def random_step(spec: Spec, rows: int, seed: int) -> Inputs:
    """hidden [L, M, H], ids int32[L, M, k], weights f32[L, M, k] of all exchanged layers; some choices are nowhere."""
    layers = [random_layer(spec, rows, seed + index) for index in range(len(spec.expert_layers))]
    hidden, ids, weights = (torch.stack(parts) for parts in zip(*layers, strict=True))
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = -1
    return hidden, ids, weights


def _eager(session: AttentionSession) -> Callable[[int, Inputs], torch.Tensor]:
    device = session.connector.attention.device

    def run(rows: int, inputs: Inputs) -> torch.Tensor:
        on_device = [tensor[:, :rows].to(device) for tensor in inputs]
        session.begin_step(rows)
        outs = [
            session.experts(layer, *(t[i] for t in on_device)) for i, layer in enumerate(session.spec.expert_layers)
        ]
        session.end_step()
        return torch.stack(outs).cpu()

    return run


@functools.cache
def _captured(session: AttentionSession) -> Callable[[int, Inputs], torch.Tensor]:
    """Captures the session's layers, once in the life of the process."""
    from engine import Engine

    engine = Engine(session)

    def run(rows: int, inputs: Inputs) -> torch.Tensor:
        with torch.cuda.stream(engine.stream):
            engine.launch(rows, tuple(tensor.cuda() for tensor in inputs))
            out = engine.finish().cpu()
        assert not out[:, rows:].any(), "rows past the step's count come back as zero"
        return out[:, :rows]

    return run


def answers(
    session: AttentionSession, count: int, seed: int, *, captured: bool = False, rows: int | None = None
) -> float:
    """``count`` steps, each output of each layer compared with the oracle. Returns the largest error.

    captured: replays of one CUDA graph, captured by the first such call. rows: of each step; None: 0 … capacity.
    """
    spec, rng, oracle, worst = session.spec, random.Random(seed), DenseOracle(session.spec), 0.0
    run = _captured(session) if captured else _eager(session)
    for step in range(count):
        num_rows = rng.randint(0, session.max_rows) if rows is None else rows
        hidden, ids, weights = random_step(spec, session.max_rows, 1000 * seed + 7 * step)
        out, want = run(num_rows, (hidden, ids, weights)).double(), oracle(hidden, ids, weights)[:, :num_rows]
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        worst = max(worst, float((out - want).abs().max()) if num_rows else 0.0)
    return worst


def other_layers(session: AttentionSession, rows: int, seed: int) -> None:
    """The layers after the first of a step that is open, and its end."""
    device = session.connector.attention.device
    for index, layer in enumerate(session.spec.expert_layers[1:], 1):
        session.experts(layer, *(tensor.to(device) for tensor in random_layer(session.spec, rows, seed + index)))
    session.end_step()


def graphs_captured(session: AttentionSession) -> int:
    """How often this process captured its layers."""
    return _captured.cache_info().misses


def last_step(session: AttentionSession) -> int:
    """The number of stage 0's last step."""
    return session.connector.attention.lane(0).step
