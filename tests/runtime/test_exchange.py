# SPDX-License-Identifier: Apache-2.0
"""MoE layers over real processes and shared memory, compared with a plain loop over tokens."""

from __future__ import annotations

import pytest
from group import SPEC, Spec, new_group

pytestmark = pytest.mark.timeout(60)

COUNTS = [(3, 5), (0, 4), (0, 0), (16, 1)]


def test_one_attention_rank_one_ffn_rank() -> None:
    with new_group() as group:
        ffn, (attention,) = group.start_all()
        for step, rows in enumerate((3, 0, 16, 1, 7)):
            attention.call("step", rows, seed=10 * step)
        stats = attention.call("stats")
        attention.call("close")
        (report,) = group.end(ffn)
    assert (report["steps"], report["bad_frames"], report["attached"]) == (5, 0, [])
    assert list(stats) == list(SPEC.expert_layers)
    for layer in stats.values():
        assert (layer["exchanges"], layer["rows"], layer["rows_sent"]) == (5, 27, 27)
        assert layer["bytes_out"] > 27 * 24 * 4 and layer["bytes_back"] > 27 * 24 * 4
        assert layer["wait_s"] > 0 and layer["experts_s"] > 0 and layer["reply_s"] > 0


@pytest.mark.parametrize(
    ("attention_ranks", "ffn_ranks", "placement"),
    [
        (2, 2, "sharded"),
        (1, 3, "sharded"),
        (3, 2, "sharded"),
        (2, 1, "sharded"),
        (2, 2, "replicated"),
        (3, 2, "replicated"),
    ],
)
def test_steps_together_and_apart(attention_ranks: int, ffn_ranks: int, placement: str) -> None:
    with new_group(attention_ranks, ffn_ranks, placement) as group:
        ffn, attention = group.start_all()
        for step, counts in enumerate(COUNTS):
            for rank, child in enumerate(attention):
                child.start("step", counts[rank % 2], seed=100 * step + 10 * rank)
            for child in attention:
                child.result()
        for step in range(4):  # one rank alone, the others idle
            attention[-1].call("step", 2 + step, seed=step)
        for rank, child in enumerate(attention):  # everyone at a pace of its own
            child.start("step", 5, seed=rank, pause_s=0.05 * rank)
        for child in attention:
            child.result()
        for child in attention:
            child.call("close")
        reports = group.end(ffn)
    assert all(report["bad_frames"] == 0 and report["attached"] == [] for report in reports)
    assert all(report["steps"] >= 5 for report in reports if placement == "sharded")


def test_three_attention_ranks_at_full_pace_have_one_order_of_steps() -> None:
    with new_group(3, 2, reply_timeout_s=10.0) as group:  # without one order this deadlocks
        ffn, attention = group.start_all()
        for rank, child in enumerate(attention):
            child.start("steps", [(step + rank) % 3 for step in range(25)])
        for child in attention:
            assert len(child.result()) == 25
        reports = group.end(ffn)
    assert 25 <= reports[0]["steps"] == reports[1]["steps"] <= 75


def test_an_ffn_rank_without_tokens_answers_a_hundred_steps() -> None:
    with new_group(1, 2, spec=Spec(expert_layers=(0,), num_layers=1)) as group:
        ffn, (attention,) = group.start_all()
        for step in range(100):
            attention.call("step", 1 + step % 3, seed=step, experts=range(0, 4))  # all on FFN rank 0
        attention.call("step", 4, seed=1, experts=range(4, 7))  # all on FFN rank 1
        reports = group.end(ffn)
    assert [report["steps"] for report in reports] == [101, 101]


def test_more_ffn_ranks_on_their_own_addresses_in_any_order() -> None:
    with new_group(1, 2) as group:
        first = group.ffn(0)
        attention = group.attention(0, connect=False).start("connect")
        second = group.ffn(1, bind_host="127.0.0.2")
        attention.result()
        attention.call("step", 6, seed=3)
        attention.call("close")
        group.end([first, second])


def test_two_stages_that_one_thread_interleaves() -> None:
    with new_group(1, 2, num_stages=2) as group:
        ffn, (attention,) = group.start_all()
        attention.call("begin_step", 0, 0)
        for step in range(3):  # stage 1 overtakes stage 0, which is open all the time
            attention.call("step", 5, seed=step, stage=1)
        attention.call("abort_step", "enough", 0)
        attention.call("step", 5, seed=9, stage=0)
        attention.call("close")
        group.end(ffn)


def test_reply_dtype_float32_for_a_bfloat16_model() -> None:
    import torch

    with new_group(1, 2, spec=Spec(dtype=torch.bfloat16), reply_dtype="float32") as group:
        ffn, (attention,) = group.start_all()
        attention.call("begin_step", 1)
        hidden = torch.ones(1, SPEC.hidden_size, dtype=torch.bfloat16)
        ids, weights = torch.tensor([[0, 5, -1]], dtype=torch.int32), torch.tensor([[0.5, 0.5, 0.0]])
        out = attention.call("experts", 1, hidden, ids, weights)
        assert out.dtype == torch.bfloat16 and out.abs().sum() > 0
        attention.call("close")
        group.end(ffn)
