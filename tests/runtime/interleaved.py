# SPDX-License-Identifier: Apache-2.0
"""Forwards in several stages on one thread, for any attention rank of a test."""

from __future__ import annotations

import time
from random import Random

import torch
from group import Spec, oracle, random_layer

from afd_runtime.metadata import AFDTransferContext, AFDTransferMetadata
from afd_runtime.remote_experts import AttentionSession

Exchange = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # layer, hidden, ids, weights, output


def interleaved_step(
    session: AttentionSession, rows: dict[int, int], seed: int, pause_s: float = 0.0
) -> list[Exchange]:
    """One forward in several stages on this thread: sends each layer in all of them, then waits in all of them.

    Stages go in the order of ``rows``.
    """
    spec, done = session.spec, []
    with session.steps(rows):
        for index, layer in enumerate(spec.expert_layers):
            sent = {stage: random_layer(spec, count, seed + 100 * stage + index) for stage, count in rows.items()}
            for stage, (hidden, ids, weights) in sent.items():
                context = AFDTransferContext(AFDTransferMetadata(layer, stage))
                session.connector.send_attn_output(hidden, context, topk_ids=ids, topk_weights=weights)
                time.sleep(pause_s)
            for stage, inputs in sent.items():
                out = session.connector.recv_ffn_output(inputs[0], ubatch_idx=stage, layer_idx=layer)
                done.append((layer, *inputs, out))
    return done


def largest_error(spec: Spec, exchanges: list[Exchange]) -> float:
    """Against the oracle, in units of 2e-5 of the largest value of a row, at least 1. NaN counts as infinite."""
    worst = 0.0
    for layer, hidden, ids, weights, out in exchanges:
        assert out.shape == hidden.shape and out.dtype == hidden.dtype
        want = oracle(spec, layer, hidden, ids, weights)
        error = (out.double() - want).abs().nan_to_num(nan=torch.inf) / want.abs().clamp(min=1)
        worst = max(worst, error.max().item() / 2e-5 if error.numel() else 0.0)
    return worst


def interleaved_steps(session: AttentionSession, steps: int, stages: tuple[int, ...], seed: int) -> float:
    """``interleaved_step`` so many times at full pace, with other rows each time; then the ``largest_error``."""
    random, done = Random(seed), []
    for step in range(steps):
        rows = {stage: random.choice((0, 1, 3, 5)) for stage in stages}
        done += interleaved_step(session, rows, 1000 * step + seed, pause_s=random.choice((0.0, 0.0, 0.001)))
    return largest_error(session.spec, done)
