# SPDX-License-Identifier: Apache-2.0
"""A group in one process: FFN ranks as threads, one attention rank whose layers are a captured graph per stage."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from afd_kernels import SwiGLU, experts_forward, fused_experts, route, shapes
from afd_kernels.testing import assert_close
from afd_runtime.config import AFDConfig
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer
from afd_runtime.window import placement_of
from benchmarks.exchange.timing import capture

SHAPES = {name: shapes.SHAPES[name].sizes for name in ("qwen3-30b", "dsv3-ep8")}
STEADY_S = 0.002  # an announcement leaves so long before the first layer, so that the FFN side has launched its graph


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the runtime reads of a ModelSpec. Every layer has experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    num_layers: int = 16
    activation: SwiGLU = SwiGLU()
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    config_hash: str = "benchmark"

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers))


class Bank:
    """Gate and experts; all layers share them, which are many times the L2 cache.

    w_up [E, 2I, H], w_down [E, H, I], gate [E, H]. before: called with the layer before its experts.
    """

    def __init__(self, spec: Spec, device: torch.device, before: Callable[[int], None] = lambda layer: None) -> None:
        e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
        make = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": spec.dtype}
        self.spec, self.device, self.before = spec, device, before
        self.w_up = torch.randn(e, 2 * i, h, **make).mul_(h**-0.5)
        self.w_down = torch.randn(e, h, i, **make).mul_(i**-0.5)
        self.gate = torch.randn(e, h, **make).mul_(h**-0.5)

    def part(self, experts: range) -> Bank:
        """A bank of some of the experts, without a copy."""
        bank = copy.copy(self)
        bank.w_up, bank.w_down = (w[experts.start : experts.stop] for w in (self.w_up, self.w_down))
        return bank

    def with_layers(self, num_layers: int) -> Bank:
        """The same weights for another number of layers."""
        bank = copy.copy(self)
        bank.spec = dataclasses.replace(self.spec, num_layers=num_layers)
        return bank

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(x, self.gate, top_k=self.spec.top_k, renormalize=True)

    def forward(self, layer_idx: int, schedule: Any, **buffers: Any) -> torch.Tensor:
        self.before(layer_idx)
        return experts_forward(schedule, self.w_up, self.w_down, **buffers)


def oracle(bank: Bank, x: torch.Tensor) -> torch.Tensor:
    """The layer's formula for a few rows x [n, H] in fp64, gate included: [n, H]."""
    x, out = x.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    scores, ids = (x @ bank.gate.double().T).softmax(-1).topk(bank.spec.top_k, dim=-1)
    for row, (weights, experts) in enumerate(zip(scores / scores.sum(-1, keepdim=True), ids.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (bank.w_up[expert].double() @ x[row]).chunk(2)
            out[row] += weight * (bank.w_down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out


class Stage:
    """One stage of the attention rank. Each layer has inputs of its own, so that no layer's reply passes for another's.

    x: [layers, rows, H]. outputs: [rows, H] of each layer. before: called with the layer at its start, also in the
    capture.
    """

    def __init__(
        self, group: Exchange, rows: int, stage: int = 0, before: Callable[[int], None] = lambda layer: None
    ) -> None:
        self.group, self.rows, self.stage, self.before = group, rows, stage, before
        bank = group.bank
        self.stream = torch.cuda.Stream(bank.device)
        generator = torch.Generator(bank.device).manual_seed(100 * stage + rows)
        shape = (bank.spec.num_layers, rows, bank.spec.hidden_size)
        self.x = torch.randn(shape, generator=generator, device=bank.device, dtype=bank.spec.dtype)
        self.outputs: list[torch.Tensor] = []
        torch.cuda.current_stream(bank.device).synchronize()
        with torch.cuda.stream(self.stream), group.session.offline(stage):
            self._layers()
            self.stream.synchronize()
            self.graph = capture(self._layers, self.stream)

    def _layers(self) -> None:
        self.outputs = []
        for layer in self.group.bank.spec.expert_layers:
            self.before(layer)
            weights, ids = self.group.bank.route(self.x[layer])
            self.outputs.append(self.group.session.experts(layer, self.x[layer], ids, weights, self.stage))

    def poison(self) -> None:
        """Fills the outputs with NaN."""
        for output in self.outputs:
            output.fill_(float("nan"))

    def check(self) -> None:
        """Raises ``AssertionError`` unless the outputs are those of ``fused_experts``, and some rows the oracle's."""
        bank, last = self.group.bank, self.rows - 1
        some = sorted({0, self.rows // 2, last})
        for layer, output in enumerate(self.outputs):
            weights, ids = bank.route(self.x[layer])
            want = fused_experts(self.x[layer], bank.w_up, bank.w_down, weights, ids)
            assert_close(output, want, what=f"stage {self.stage}, layer {layer}")
            if layer in (0, len(self.outputs) - 1):
                want = oracle(bank, self.x[layer][some])
                assert_close(output[some], want, dtype=output.dtype, what=f"stage {self.stage}, layer {layer}, fp64")


class Exchange:
    """An attached group. Steps are begun through it, so that it knows how many the FFN ranks have to serve."""

    def __init__(self, bank: Bank, servers: Sequence[FFNServer], session: AttentionSession) -> None:
        self.bank, self.servers, self.session = bank, servers, session
        self.steps = 0

    def begin(self, stages: Sequence[Stage]) -> None:
        """Announces one step of each stage, as one unit."""
        self.session.begin_steps({s.stage: s.rows for s in stages}, streams={s.stage: s.stream for s in stages})
        self.steps += len(stages)

    def step_us(self, stages: Sequence[Stage]) -> float:
        """One step of each stage, all in flight together: device µs from the first layer to the last combine."""
        self.begin(stages)
        time.sleep(STEADY_S)
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in stages]
        start.record(stages[0].stream)
        for stage, end in zip(stages, ends, strict=True):
            stage.stream.wait_event(start)
            with torch.cuda.stream(stage.stream):
                stage.graph.replay()
                end.record()
        for stage in stages:
            with torch.cuda.stream(stage.stream):
                self.session.end_step(stage.stage)
        return max(start.elapsed_time(end) for end in ends) * 1e3

    def checked_step(self, stages: Sequence[Stage]) -> None:
        """One step whose outputs are compared. Raises ``AssertionError``."""
        for stage in stages:
            stage.poison()
        torch.cuda.current_stream(self.bank.device).synchronize()
        self.step_us(stages)
        for stage in stages:
            stage.check()

    def settle(self, timeout_s: float = 5.0) -> None:
        """Waits until every FFN rank has left every step: its clocks and counters are then complete."""
        end = time.monotonic() + timeout_s
        while any(server.steps_served < self.steps for server in self.servers):
            if time.monotonic() > end:
                served = [server.steps_served for server in self.servers]
                raise TimeoutError(f"FFN ranks served {served} of {self.steps} steps within {timeout_s:g} s")
            time.sleep(1e-4)

    def clocks(self, stage: int = 0) -> torch.Tensor:
        """int64[layers, 4] of FFN rank 0: ns waited, computed and replied so far, and when its last reply ended."""
        self.settle()
        return self.servers[0].connector.ffn.tables[stage].read_clocks.clone()


@contextlib.contextmanager
def exchange(bank: Bank, num_ffn_ranks: int = 1, **options: Any) -> Iterator[Exchange]:
    """Both roles on the device of ``bank``. options: of ``AFDConfig``."""
    spec = bank.spec
    base = {"fabric": "local", "num_ffn_ranks": num_ffn_ranks, "reply_timeout_s": 5.0, "peer_timeout_s": 10.0,
            "port": 0, **options}  # fmt: skip
    connected = {"device": bank.device, "fingerprint_extra": {}}
    with contextlib.ExitStack() as ends:
        servers: list[FFNServer] = []
        for rank in range(num_ffn_ranks):
            config = AFDConfig(role="ffn", **base)
            mine = bank.part(placement_of(config, spec).local_experts(rank))
            servers.append(FFNServer(config, rank, spec, mine, **connected))
            servers[-1].start()
            base["port"] = servers[0].port
            thread = threading.Thread(target=servers[-1].serve_forever, daemon=True)
            thread.start()
            ends.callback(thread.join, 20)
            ends.callback(servers[-1].stop)
        session = AttentionSession.connect(AFDConfig(role="attention", **base), 0, spec, **connected)
        ends.callback(session.close)
        yield Exchange(bank, servers, session)
