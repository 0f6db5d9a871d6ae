# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a layer on a CPU: each is named within its limit, and 100 right answers follow."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from faults import (
    Scene,
    check,
    crash_ffn,
    cut_control,
    hang_ffn,
    kill_attention,
    kill_ffn_between_layers,
    kill_ffn_with_a_reply_outstanding,
    stop_ffn,
)
from group import SPEC, Failed, new_group, oracle
from planted import HANG, NOTHING, DenseOracle, answers, other_layers, random_step
from proxy import Proxy

from afd_runtime.remote_experts import AttentionSession

pytestmark = pytest.mark.timeout(90)


def test_the_dense_oracle_agrees_with_the_loop_over_tokens() -> None:
    hidden, ids, weights = random_step(SPEC, 9, seed=3)
    assert (ids == -1).any()
    dense = DenseOracle(SPEC)(hidden, ids, weights)
    for index, layer in enumerate(SPEC.expert_layers):
        loop = oracle(SPEC, layer, hidden[index], ids[index], weights[index])
        torch.testing.assert_close(dense[index], loop, rtol=1e-9, atol=1e-9)


def test_answers_notices_a_wrong_one() -> None:
    with new_group(1, 1) as group:
        scene = Scene.start(group)
        with pytest.raises(Failed, match="Tensor-likes are not close"):
            scene.attention[0].call("run", answers_of_other_rows)


def answers_of_other_rows(session: AttentionSession) -> None:
    experts = session.experts
    session.experts = lambda layer, hidden, *rest: experts(layer, 1.001 * hidden, *rest)
    answers(session, 1, 0, rows=3)


def test_killed_ffn_rank() -> None:
    with new_group(1, 2) as group:
        scene = Scene.start(group, spares=2)
        kill_ffn_between_layers(scene)
        kill_ffn_with_a_reply_outstanding(scene)
        scene.end()


def test_killed_sequencer() -> None:
    """FFN rank 1 cannot go on without rank 0; both are started anew, the attention process stays."""
    with new_group(1, 2) as group:
        scene = Scene.start(group)
        where, command = scene.open_step(), ("run", other_layers, 5, scene.seed)
        kill = scene.ffn[0].process.kill
        fault = scene.fails("FFN rank 0 killed between layers", kill, scene.attention[0], *command, limit_s=5)
        check(fault, "AFDPeerLost", "process end", {**where, "peer": "FFN rank 0"})
        with pytest.raises(Failed, match="FFN rank 1 ends: FFN rank 0 was lost"):
            scene.ffn[1].result()
        scene.ffn = [group.ffn(rank) for rank in (0, 1)]
        fault.survived(f"two new FFN processes; {scene.answer(0)}")
        scene.end()


def test_crashed_and_stopped_ffn_rank() -> None:
    with new_group(1, 2, liveness_timeout_s=3.0) as group:
        scene = Scene.start(group, spares=2)
        crash_ffn(scene)
        stop_ffn(scene, "silence", limit_s=5)
        scene.end()


def test_experts_that_do_not_end() -> None:
    with new_group(1, 2, reply_timeout_s=2.0) as group:
        scene = Scene.start(group)
        hang_ffn(scene, limit_s=3)
        scene.end()


def test_killed_attention_rank() -> None:
    with new_group(2, 2) as group:
        kill_attention(Scene.start(group))


def test_cut_control_connection() -> None:
    with new_group(1, 1, liveness_timeout_s=3.0) as group, contextlib.closing(Proxy()) as proxy:
        scene = Scene.start(group, proxy=proxy)
        cut_control(scene, proxy)
        (report,) = scene.end()
    assert any("attention rank 0 left" in text and "was silent for" in text for text in report["warnings"])


def test_control_connection_cut_one_way() -> None:
    """Only attention has noticed it when the connection is restored: it takes its own place, not another's."""
    with new_group(1, 1, liveness_timeout_s=3.0) as group, contextlib.closing(Proxy()) as proxy:
        scene = Scene.start(group, proxy=proxy)
        where, cut = scene.open_step(), partial(proxy.cut, both_ways=False)
        scene.plant(scene.ffn[0], HANG)
        attention = scene.attention[0].start("run", other_layers, 5, scene.seed)
        fault = scene.fails("control connection cut one way", cut, attention, limit_s=6)
        check(fault, "AFDPeerLost", "silence", where)
        scene.plant(scene.ffn[0], NOTHING)
        proxy.restore()
        fault.survived(f"the same processes, at once; {scene.answer(0)}")
        (report,) = scene.end()
    assert any(f"process {attention.process.pid} connected anew" in text for text in report["warnings"])
