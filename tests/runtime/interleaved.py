# SPDX-License-Identifier: Apache-2.0
"""Forwards in several stages on one thread, for any attention rank of a test."""

from __future__ import annotations

import threading
import time
from random import Random

import torch
from group import Spec, oracle, random_layer

from afd_runtime.errors import AFDShutdownError
from afd_runtime.metadata import AFDTransferContext, AFDTransferMetadata
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer

Streams = dict[int, torch.cuda.Stream]
Exchange = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # layer, hidden, ids, weights, output


def interleaved_step(
    session: AttentionSession, rows: dict[int, int], seed: int, *, pause_s: float = 0.0, streams: Streams | None = None
) -> list[Exchange]:
    """One forward in several stages on this thread: sends each layer in all of them, then waits in all of them.

    Stages go in the order of ``rows``. streams: of each stage, on a GPU.
    """
    spec, connector, done = session.spec, session.connector, []
    with session.steps(rows, streams):
        for index, layer in enumerate(spec.expert_layers):
            sent = {}
            for stage, count in rows.items():
                inputs = random_layer(spec, count, seed + 100 * stage + index)
                context = AFDTransferContext(AFDTransferMetadata(layer, stage))
                with torch.cuda.stream((streams or {}).get(stage)):
                    hidden, ids, weights = (tensor.to(connector.attention.device) for tensor in inputs)
                    connector.send_attn_output(hidden, context, topk_ids=ids, topk_weights=weights)
                sent[stage] = hidden, inputs
                time.sleep(pause_s)
            for stage, (hidden, inputs) in sent.items():
                with torch.cuda.stream((streams or {}).get(stage)):
                    out = connector.recv_ffn_output(hidden, ubatch_idx=stage, layer_idx=layer)
                done.append((layer, *inputs, out))
    return done


def largest_error(spec: Spec, exchanges: list[Exchange]) -> float:
    """Against the oracle, in units of 2e-5 of the largest value of a row, at least 1. NaN counts as infinite."""
    worst = 0.0
    for layer, hidden, ids, weights, result in exchanges:
        out = result.cpu()
        assert out.shape == hidden.shape and out.dtype == hidden.dtype
        want = oracle(spec, layer, hidden, ids, weights)
        error = (out.double() - want).abs().nan_to_num(nan=torch.inf) / want.abs().clamp(min=1)
        worst = max(worst, error.max().item() / 2e-5 if error.numel() else 0.0)
    return worst


def interleaved_steps(session: AttentionSession, steps: int, stages: tuple[int, ...], seed: int) -> float:
    """``interleaved_step`` so many times at full pace, with other rows each time; then the ``largest_error``."""
    random, done = Random(seed), []
    on_gpu = session.connector.attention.device.type == "cuda"
    streams = {stage: torch.cuda.Stream() for stage in stages} if on_gpu else {}
    for step in range(steps):
        rows = {stage: random.choice((0, 1, 3, 5)) for stage in stages}
        pause_s = random.choice((0.0, 0.0, 0.001))
        done += interleaved_step(session, rows, 1000 * step + seed, pause_s=pause_s, streams=streams)
    return largest_error(session.spec, done)


def interleaved_together(sessions: list[AttentionSession], steps: int) -> list[float]:
    """``interleaved_steps`` of two sessions of this process, a thread each, with stages 0 and 1 in opposite orders."""
    found: list[float] = []

    def run(rank: int) -> None:
        found.append(interleaved_steps(sessions[rank], steps, (rank, 1 - rank), rank))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert len(found) == 2, "a thread failed or still waits"
    return found


def serve_on_one_thread(server: FFNServer) -> None:
    """What a worker with a single loop does: whole units. Leaves their stages in ``server.served_stages``."""
    served = server.served_stages = []  # type: ignore[attr-defined]
    with server._stream():
        while True:
            try:
                payload = server.connector.control_plane.recv_dp_metadata_list()
            except AFDShutdownError:
                return
            served.append(tuple(payload.dp_metadata_list))
            server.runner.execute_model(dp_metadata_list=payload.dp_metadata_list)
