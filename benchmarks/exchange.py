# SPDX-License-Identifier: Apache-2.0
"""One MoE layer attention → FFN → attention on one GPU, both roles in one process and in CUDA graphs.

``python -m benchmarks.exchange OUT.json`` measures, for each shape and number of tokens: the time of a layer from
hidden states to combined output (route, dispatch, wait, arrival, experts, reply, wait, combine), the experts layer
alone (``fused_experts``), the gate alone, and the FFN side's host time per step. The output is compared with
``fused_experts`` first; a wrong one records no time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import triton

from afd_kernels import SwiGLU, combine, experts_forward, fused_experts, fused_experts_workspace, route
from afd_kernels.testing import assert_close
from afd_runtime.config import AFDConfig
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer

SHAPES = {"qwen3-30b": (128, 2048, 768, 8), "dsv3-ep8": (32, 7168, 2048, 8)}
TOKENS = (1, 16, 64, 128, 256)
LAYERS = 16
DEVICE = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the runtime reads of a ModelSpec."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    num_layers: int = LAYERS
    expert_layers: tuple[int, ...] = tuple(range(LAYERS))
    activation: SwiGLU = SwiGLU()
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    config_hash: str = "benchmark"


class Bank:
    """All layers share one set of weights, which is many times the L2 cache."""

    def __init__(self, spec: Spec) -> None:
        e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
        self.w_up = torch.randn(e, 2 * i, h, device=DEVICE, dtype=spec.dtype) * h**-0.5
        self.w_down = torch.randn(e, h, i, device=DEVICE, dtype=spec.dtype) * i**-0.5
        self.gate = torch.randn(e, h, device=DEVICE, dtype=spec.dtype) * h**-0.5

    def forward(self, layer_idx: int, schedule: Any, **buffers: Any) -> torch.Tensor:
        return experts_forward(schedule, self.w_up, self.w_down, **buffers)


def graph_us(function: Any, repeat: int = 20) -> float:
    """Median device time of one call in a CUDA graph, in microseconds."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Attention:
    """One attention rank whose layers are one captured graph."""

    def __init__(self, session: AttentionSession, bank: Bank, tokens: int) -> None:
        self.session, self.side, self.bank, self.tokens = session, session.connector.attention, bank, tokens
        self.lane, spec = self.side.lane(0), session.spec
        self.x = torch.randn(tokens, spec.hidden_size, device=DEVICE, dtype=spec.dtype)
        self.out = torch.full_like(self.x, float("nan"))
        self._layers()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._layers()

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        return route(self.x, self.bank.gate, top_k=self.session.spec.top_k, renormalize=True)

    def _layers(self) -> None:
        for layer in self.session.spec.expert_layers:
            weights, ids = self.route()
            row_map = self.side._dispatch(self.lane, self.x, ids, weights, layer=layer)
            self.side._wait(self.lane)
            combine(self.lane.reply_slots, row_map, self.side.layout.reply, self.lane.state, out=self.out)

    def step(self) -> float:
        """One step; returns its device time in microseconds, from the first layer's gate to the last combine."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.session.begin_step(self.tokens)
        time.sleep(0.002)  # the FFN side has launched its graph: a server's steady state
        start.record()
        self.graph.replay()
        end.record()
        self.lane.layer_index = len(self.session.spec.expert_layers)
        self.session.end_step()
        return start.elapsed_time(end) * 1e3


def measure(name: str, tokens: int) -> dict[str, Any]:
    experts, hidden, inner, top_k = SHAPES[name]
    spec = Spec(experts, hidden, inner, top_k)
    options = {"fabric": "local", "max_batch_tokens": tokens, "reply_timeout_s": 5.0, "peer_timeout_s": 10.0}
    bank = Bank(spec)
    server = FFNServer(AFDConfig(role="ffn", port=0, **options), 0, spec, bank, device=DEVICE, fingerprint_extra={})
    server.start()
    host = timed_host(server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    config = AFDConfig(role="attention", port=server.port, **options)
    session = AttentionSession.connect(config, 0, spec, device=DEVICE, fingerprint_extra={})
    try:
        attention = Attention(session, bank, tokens)
        attention.step()
        weights, ids = attention.route()
        want = fused_experts(attention.x, bank.w_up, bank.w_down, weights, ids)
        assert_close(attention.out, want, dtype=torch.bfloat16, what=f"{name} M={tokens}")
        layer_us = statistics.median(attention.step() for _ in range(30)) / LAYERS
        host_us = statistics.median(host[5:])
        replays = sum(server.runner.stage_graphs[0].replays.values())
    finally:
        session.close()
        server.stop()
        thread.join(20)
    shape = (tokens, experts, inner, hidden, top_k, spec.dtype, DEVICE)
    workspace = torch.zeros(fused_experts_workspace(*shape), dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(attention.x)
    experts_us = graph_us(
        lambda: fused_experts(attention.x, bank.w_up, bank.w_down, weights, ids, out=out, workspace=workspace)
    )
    route_us = graph_us(lambda: attention.route())
    return {
        "key": f"exchange/{name}/bf16/M={tokens}", "layer_us": layer_us, "experts_us": experts_us, "route_us": route_us,
        "over_experts_us": layer_us - experts_us, "ffn_host_us_per_step": host_us, "replays": replays, "layers": LAYERS,
    }  # fmt: skip


def timed_host(server: FFNServer) -> list[float]:
    """Host microseconds of the FFN side of each step: entering it and launching its graph."""
    side, graphs, times = server.connector.ffn, server.runner.stage_graphs[0], []
    enter, replay = side._enter, graphs.replay

    def timed_enter(order: Any) -> None:
        start = time.perf_counter()
        enter(order)
        times.append((time.perf_counter() - start) * 1e6)

    def timed_replay(rows: int) -> None:
        start = time.perf_counter()
        replay(rows)
        times[-1] += (time.perf_counter() - start) * 1e6

    side._enter, graphs.replay = timed_enter, timed_replay  # type: ignore[method-assign]
    return times


def main(out: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
             "commit": commit}  # fmt: skip
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for name in SHAPES:
            for tokens in TOKENS:
                results.append(measure(name, tokens))
                print(json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in results[-1].items()}))
                out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
