# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a layer, between processes of one GPU: each is named in time, and 100 right answers follow.

The same as ``tests/runtime/test_faults.py``, with graphs on both sides: half of the answers are replays of a graph
that the attention process captured before the first fault.
"""

from __future__ import annotations

import contextlib
import time

import pytest
from faults import (
    Scene,
    crash_ffn,
    cut_control,
    hang_ffn,
    kill_attention,
    kill_ffn_between_layers,
    kill_ffn_with_a_reply_outstanding,
    stop_ffn,
)
from group import SPEC, new_group
from planted import answers
from proxy import Proxy

pytestmark = pytest.mark.timeout(150)
REPLAYS = 1000
LATE_MS = [50.0 if call == 40 else 1.0 if call % 7 == 3 else 0.0 for call in range(97)]


def test_one_attention_process_outlives_every_fault() -> None:
    """Five FFN processes in turn, then an attention process of the group is lost."""
    options = {"reply_timeout_s": 3.0, "attach_timeout_s": 90.0, "device": "cuda"}
    with new_group(2, 2, **options) as group:
        scene = Scene.start(group, spares=4, stuck_after_s=2.0)
        scene.answer(0, 1)
        kill_ffn_between_layers(scene)
        kill_ffn_with_a_reply_outstanding(scene)
        stop_ffn(scene, "time limit", limit_s=8)
        hang_ffn(scene, limit_s=8)
        crash_ffn(scene)
        kill_attention(scene)


def test_control_connection_and_late_peers() -> None:
    """A cut of the control connection; then case 35b: replays, and eager steps, whose peer is late now and then."""
    options = {"liveness_timeout_s": 3.0, "attach_timeout_s": 90.0, "device": "cuda"}
    with new_group(1, 1, **options) as group, contextlib.closing(Proxy()) as proxy:
        scene = Scene.start(group, proxy=proxy, delays_ms=LATE_MS)
        scene.answer(0)
        cut_control(scene, proxy)
        least_s = REPLAYS * len(SPEC.expert_layers) * sum(LATE_MS) / len(LATE_MS) * 1e-3
        for captured in (True, False):
            start = time.monotonic()
            worst = scene.attention[0].start("run", answers, REPLAYS, 2 + captured, captured=captured).result(60)
            seconds = time.monotonic() - start
            assert seconds > least_s, "the peer was not late"
            print(f"\n{REPLAYS} {'replays' if captured else 'eager steps'} with a peer late by up to 50 ms: "
                  f"{seconds:.1f} s, worst error {worst:.1e}")  # fmt: skip
        (report,) = scene.end()
    assert any("attention rank 0 left" in text and "was silent for" in text for text in report["warnings"])
