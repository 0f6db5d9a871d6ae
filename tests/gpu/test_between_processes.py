# SPDX-License-Identifier: Apache-2.0
"""Processes that share one GPU: CUDA IPC windows and doorbells, every word of the slots, allocators, and statistics."""

from __future__ import annotations

import time

import pytest
from group import SPEC, new_group
from words import Plan, exchange_words

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("attention,ffn,stages", [(2, 2, 1), (1, 2, 2)])
def test_groups(attention: int, ffn: int, stages: int) -> None:
    with new_group(attention, ffn, device="cuda", num_stages=stages) as group:
        servers, clients = group.start_all()
        for child in clients:
            child.start("steps", [5, 0, 16, 1, 7] * 4)
        for child in clients:
            child.result(60)
        for stage in range(1, stages):
            clients[0].call("step", 6, seed=3, stage=stage)
        for child in clients:
            child.call("close")
        assert all(report["steps"] >= 20 for report in group.end(servers))


def test_windows_map_beside_expandable_segments() -> None:
    """Case 35. The columns of both sides' times are there too."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with new_group(1, 1, device="cuda", env=env) as group:
        _, (client,) = group.start_all()
        start = time.perf_counter()
        client.call("steps", [5, 0, 16, 1, 7] * 4)
        seconds = time.perf_counter() - start
        stats = client.call("stats")[SPEC.expert_layers[0]]
        assert 0 < stats["wait_s"] < seconds and 0 < stats["experts_s"] < seconds and 0 < stats["reply_s"] < seconds
        assert stats["rows"] == stats["rows_sent"] == 29 * 4 and stats["exchanges"] == 20


def test_every_word_is_rewritten_in_each_exchange_and_read_right() -> None:
    plan = Plan(device="cuda", steps=200, late=0.02)
    start = time.perf_counter()
    compared = exchange_words(plan, limit_s=90)
    print(f"\n{plan.steps * plan.exchanges} exchanges, {sum(compared)} bytes compared, "
          f"{time.perf_counter() - start:.1f} s")  # fmt: skip
    exchanges, output = plan.steps * plan.exchanges, plan.rows * plan.hidden_size * plan.dtype.itemsize
    assert exchanges >= 1000
    assert compared == (exchanges * (plan.layout.reply.nbytes + output), exchanges * plan.layout.request.nbytes)
