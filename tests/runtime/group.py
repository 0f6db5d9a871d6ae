# SPDX-License-Identifier: Apache-2.0
"""A small model, its oracle, and AFD groups of real processes that a test drives step by step.

Processes come from a fork server that has imported the runtime already, so one costs milliseconds. A group kills
whatever is left of it when the test ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from afd_kernels import SwiGLU, experts_forward
from afd_runtime.config import AFDConfig
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer
from afd_runtime.window import placement_of

TIMEOUT_S = 30.0
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["afd_runtime.server", "afd_runtime.remote_experts", "afd_kernels"])


@dataclass(frozen=True)
class Spec:
    """The part of a ModelSpec that the runtime reads. Nothing is a power of two."""

    num_layers: int = 5
    expert_layers: tuple[int, ...] = (1, 3, 4)
    num_experts: int = 7
    top_k: int = 3
    hidden_size: int = 24
    intermediate_size: int = 20
    activation: SwiGLU = SwiGLU()
    dtype: torch.dtype = torch.float32
    quantization: str | None = None
    config_hash: str = "0123456789abcdef"


SPEC = Spec()


def layer_weights(spec: Spec, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w_up [E, 2I, H] and w_down [E, H, I], the same in every process."""
    generator = torch.Generator().manual_seed(1000 + layer)
    up = torch.randn(spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size, generator=generator)
    down = torch.randn(spec.num_experts, spec.hidden_size, spec.intermediate_size, generator=generator)
    return up * 0.3, down * 0.3


class Bank:
    """The local experts of one FFN rank. ``fail_at``: the call that raises; ``delay_s``: of every call."""

    def __init__(
        self, spec: Spec, expert_ids: range, *, fail_at: int = -1, delay_s: float = 0.0, device: str = "cpu"
    ) -> None:
        ids = list(expert_ids)
        self.spec, self.calls, self.fail_at, self.delay_s = spec, 0, fail_at, delay_s
        self.layers = {
            layer: tuple(w[ids].to(device, spec.dtype) for w in layer_weights(spec, layer))
            for layer in spec.expert_layers
        }

    def forward(self, layer_idx: int, schedule: Any, **buffers: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("the planted fault")
        time.sleep(self.delay_s)
        return experts_forward(schedule, *self.layers[layer_idx], activation=self.spec.activation, **buffers)


def oracle(spec: Spec, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The routed experts by a plain loop over tokens, in float64."""
    w_up, w_down = (w.double() for w in layer_weights(spec, layer))
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(hidden.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            if expert < 0:
                continue
            gate, up = (w_up[expert] @ hidden[token].double()).chunk(2)
            out[token] += weights[token, choice].double() * (w_down[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def random_layer(spec: Spec, rows: int, seed: int, experts: range | None = None) -> tuple[torch.Tensor, ...]:
    """hidden [M, H], ids int32[M, k] of distinct experts (of ``experts``), weights f32[M, k]."""
    generator = torch.Generator().manual_seed(seed)
    among = experts or range(spec.num_experts)
    scores = torch.rand(rows, len(among), generator=generator)
    weights, ids = scores.topk(min(spec.top_k, len(among)), dim=1)
    pad = spec.top_k - ids.shape[1]
    ids = torch.nn.functional.pad(ids + among.start, (0, pad), value=-1)
    weights = torch.nn.functional.pad(weights, (0, pad))
    return torch.randn(rows, spec.hidden_size, generator=generator), ids.to(torch.int32), weights


def checked_step(
    session: AttentionSession, rows: int, seed: int, *, stage: int = 0, layers: int | None = None,
    experts: range | None = None, pause_s: float = 0.0,
) -> float:  # fmt: skip
    """One step, each layer compared with the oracle. layers: run only so many. Returns the largest error."""
    spec, worst, device = session.spec, 0.0, session.connector.attention.device
    outputs = []
    session.begin_step(rows, stage)
    for index, layer in enumerate(spec.expert_layers[:layers]):
        hidden, ids, weights = random_layer(spec, rows, seed + index, experts)
        on_device = (t.to(device) for t in (hidden, ids, weights))
        outputs.append((layer, hidden, ids, weights, session.experts(layer, *on_device, stage)))
        time.sleep(pause_s)
    if layers is None:
        session.end_step(stage)
    for layer, hidden, ids, weights, out in outputs:
        want = oracle(spec, layer, hidden, ids, weights)
        assert out.shape == hidden.shape and out.dtype == hidden.dtype
        torch.testing.assert_close(out.cpu().double(), want, rtol=2e-5, atol=2e-5)
        worst = max(worst, (out.cpu().double() - want).abs().max().item() if rows else 0.0)
    return worst


def _answer(pipe: Any, action: Any) -> bool:
    start = time.monotonic()
    try:
        value = action()
        pipe.send(("ok", value, time.monotonic() - start))
        return True
    except BaseException as error:
        fields = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, type(None)))}
        pipe.send(("error", (type(error).__name__, str(error), fields), time.monotonic() - start))
        return False


class Warnings(logging.Handler):
    """Keeps the warnings of the runtime in this process."""

    def __init__(self) -> None:
        super().__init__("WARNING")
        self.messages: list[str] = []
        logging.getLogger("afd_runtime").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def ffn_main(pipe: Any, options: dict, rank: int, spec: Spec, extra: dict, bank_options: dict) -> None:
    """An FFN process: serves until it is told to end, then reports what it served.

    bank_options: of ``Bank``, or of the class in ``kind``; standby: prepares everything, then waits for a word.
    """
    torch.set_num_threads(1)
    logging.basicConfig(level="WARNING")
    warnings, standby, kind = Warnings(), bank_options.pop("standby", False), bank_options.pop("kind", Bank)
    os.environ.update(options.pop("env", {}))
    device = options.pop("device", "cpu")
    config = AFDConfig(role="ffn", **options)
    bank = kind(spec, placement_of(config, spec).local_experts(rank), device=device, **bank_options)
    server = FFNServer(config, rank, spec, bank, device=device, fingerprint_extra=extra)
    if standby:
        _answer(pipe, server.runner.capture_model)
        pipe.recv()

    def start() -> int:
        server.start()
        return server.port

    def serve() -> dict:
        server.serve_forever()
        control, graphs = server.connector.ffn.control, server.runner.stage_graphs.values()
        return {"steps": server.steps_served, "bad_frames": control.bad_frames, "attached": list(control.lanes.ranks),
                "warnings": warnings.messages, "eager": server.runner.eager_steps,
                "replays": sum(sum(stage.replays.values()) for stage in graphs)}  # fmt: skip

    if not (_answer(pipe, start) and _answer(pipe, serve)):
        os._exit(1)  # the ordinary way out would wait for a kernel that does not end


def attention_main(pipe: Any, options: dict, rank: int, spec: Spec, extra: dict) -> None:
    """An attention process: runs the commands that the test sends."""
    torch.set_num_threads(1)
    logging.basicConfig(level="WARNING")
    os.environ.update(options.pop("env", {}))
    session: AttentionSession | None = None

    device = options.pop("device", "cpu")

    def connect() -> int:
        nonlocal session
        if device == "cuda":  # on the legacy stream it would wait for whatever else runs
            torch.cuda.set_stream(torch.cuda.Stream())
        config = AFDConfig(role="attention", **options)
        session = AttentionSession.connect(config, rank, spec, device=device, fingerprint_extra=extra)
        return session.session

    while True:
        name, args, kwargs = pipe.recv()
        if name == "exit":
            return
        if name == "connect":
            _answer(pipe, connect)
        elif name == "step":
            _answer(pipe, lambda args=args, kwargs=kwargs: checked_step(session, *args, **kwargs))
        elif name == "steps":
            _answer(pipe, lambda args=args, kwargs=kwargs: [checked_step(session, r, i) for i, r in enumerate(*args)])
        elif name == "run":
            _answer(pipe, lambda args=args, kwargs=kwargs: args[0](session, *args[1:], **kwargs))
        elif name == "stats":
            _answer(pipe, lambda: session.stats)
        else:
            _answer(pipe, lambda args=args, kwargs=kwargs, name=name: getattr(session, name)(*args, **kwargs))


class Failed(Exception):
    """What went wrong in a child. name: of the error's class; fields: its attributes; seconds: until it was raised."""

    def __init__(self, name: str, text: str, fields: dict, seconds: float) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text, self.fields, self.seconds = name, text, fields, seconds


class Child:
    """One process of a group and its pipe."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name: str, *args: Any, **kwargs: Any) -> Child:
        self.pipe.send((name, args, kwargs))
        return self

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"process {self.process.pid} gave no answer within {timeout_s} s")
        kind, value, seconds = self.pipe.recv()
        if kind == "error":
            raise Failed(*value, seconds)
        return value

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.start(name, *args, **kwargs).result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


@dataclass
class Group:
    """FFN and attention processes of one AFD group. Port 0: FFN rank 0 chooses, the others are told."""

    options: dict
    spec: Spec = SPEC
    extra: dict = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)

    def ffn(self, rank: int = 0, *, extra: dict | None = None, bank: dict | None = None, wait: bool = True,
            spec: Spec | None = None, **options: Any) -> Child:  # fmt: skip
        """Starts one FFN rank. Rank 0 with a free port tells the port to those that come after."""
        merged = {**self.options, **options}
        child = Child(ffn_main, merged, rank, spec or self.spec, self.extra if extra is None else extra, bank or {})
        self.children.append(child)
        if wait:
            port = child.result()
            if rank == 0:
                self.options["port"] = port
        return child

    def attention(self, rank: int = 0, *, connect: bool = True, extra: dict | None = None, spec: Spec | None = None,
                  **options: Any) -> Child:  # fmt: skip
        """Starts one attention rank."""
        child = Child(
            attention_main, {**self.options, **options}, rank, spec or self.spec, self.extra if extra is None else extra
        )
        self.children.append(child)
        if connect:
            child.call("connect")
        return child

    def start_all(self) -> tuple[list[Child], list[Child]]:
        """Every rank of the config, attached."""
        ffn = [self.ffn(rank) for rank in range(self.options["num_ffn_ranks"])]
        attention = [self.attention(rank, connect=False) for rank in range(self.options["num_attention_ranks"])]
        for child in attention:
            child.start("connect")
        for child in attention:
            child.result()
        return ffn, attention

    def end(self, ffn: list[Child]) -> list[dict]:
        """SIGTERM to FFN rank 0; every FFN rank reports what it served."""
        ffn[0].process.terminate()
        reports = [child.result() for child in ffn]
        for child in ffn:
            child.process.join(TIMEOUT_S)
            assert child.process.exitcode == 0
        return reports

    def close(self) -> None:
        for child in self.children:
            if child.process.is_alive():
                child.process.kill()
        for child in self.children:
            child.process.join(TIMEOUT_S)
            child.pipe.close()
        assert not [child.process.pid for child in self.children if child.process.is_alive()]


@contextlib.contextmanager
def new_group(attention: int = 1, ffn: int = 1, placement: str = "sharded", **options: Any) -> Iterator[Group]:
    """A group that is gone, with all its processes, when the block ends."""
    spec, extra = options.pop("spec", SPEC), options.pop("extra", {})
    defaults = {"port": 0, "num_attention_ranks": attention, "num_ffn_ranks": ffn, "placement": placement,
                "max_batch_tokens": 16, "attach_timeout_s": 20.0, "reply_timeout_s": 20.0}  # fmt: skip
    group = Group({**defaults, **options}, spec, extra)
    try:
        yield group
    finally:
        group.close()


@contextlib.contextmanager
def local_group(
    attention: int = 1, ffn: int = 1, placement: str = "sharded", *,
    loop: Callable[[FFNServer], None] = FFNServer.serve_forever, **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """Both roles as threads of this process: yields (servers, connect), where connect(rank) attaches a session.

    loop: what the thread of a server does.
    """
    spec, device = options.pop("spec", SPEC), options.pop("device", "cpu")
    base = {"num_attention_ranks": attention, "num_ffn_ranks": ffn, "placement": placement, "fabric": "local",
            "max_batch_tokens": 16, "attach_timeout_s": 10.0, "reply_timeout_s": 10.0, "port": 0,
            **options}  # fmt: skip
    servers: list[FFNServer] = []
    threads: list[threading.Thread] = []
    sessions: list[AttentionSession] = []

    def connect(rank: int = 0) -> AttentionSession:
        config = AFDConfig(role="attention", **base)
        sessions.append(AttentionSession.connect(config, rank, spec, device=device, fingerprint_extra={}))
        return sessions[-1]

    try:
        for rank in range(ffn):
            config = AFDConfig(role="ffn", **base)
            bank = Bank(spec, placement_of(config, spec).local_experts(rank), device=device)
            servers.append(FFNServer(config, rank, spec, bank, device=device, fingerprint_extra={}))
            servers[-1].start()
            base["port"] = servers[0].port
            threads.append(threading.Thread(target=loop, args=(servers[-1],), daemon=True))
            threads[-1].start()
        yield servers, connect
    finally:
        for session in sessions:
            session.close()
        for server in reversed(servers):
            server.stop()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
