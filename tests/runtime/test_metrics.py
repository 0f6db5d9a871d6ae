# SPDX-License-Identifier: Apache-2.0
"""Every Prometheus series moves, by as much as plain counting says."""

from __future__ import annotations

import time
from typing import Any

import pytest
from group import SPEC, checked_step, local_group, random_layer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from afd_runtime import metrics
from afd_runtime.errors import AFDStepAborted, AFDTimeoutError

pytestmark = pytest.mark.timeout(60)

BOTH = {"afd_rows_total", "afd_bytes_total", "afd_wait_seconds_total", "afd_timeouts_total"}
FFN_ONLY = {
    "afd_experts_seconds_total", "afd_reply_seconds_total", "afd_replays_total", "afd_eager_steps_total",
}  # fmt: skip
ROW_BYTES, CHOICE_BYTES, WORD_BYTES = 4 * SPEC.hidden_size, 8, 8


def scrape(*sources: Any) -> dict[tuple, float]:
    """(name, labels as pairs) → value of what Prometheus would read."""
    families = text_string_to_metric_families(metrics.exposition_of(*sources)().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def total(samples: dict[tuple, float], name: str, **labels: str) -> float:
    """The sum over all samples with these labels."""
    found = [v for (n, *pairs), v in samples.items() if n == name and set(labels.items()) <= set(pairs)]
    assert found, (name, labels)
    return sum(found)


def test_both_sides_count_the_rows_and_bytes_that_routing_says() -> None:
    with local_group(2, 2) as (servers, connect):
        sessions = [connect(0), connect(1)]
        steps = [(sessions[0], 5, 10), (sessions[1], 3, 20), (sessions[0], 0, 30)]
        for session, rows, seed in steps:
            checked_step(session, rows, seed)
        samples = scrape(*servers, *sessions)
    local = servers[0].connector.ffn.placement.num_local_experts_cap
    to, messages = [0, 0], len(steps) * len(SPEC.expert_layers)
    for _, rows, seed in steps:
        for index in range(len(SPEC.expert_layers)):
            for experts in random_layer(SPEC, rows, seed + index)[1].tolist():
                for ffn_rank in {expert // local for expert in experts}:
                    to[ffn_rank] += 1
    for rank in (0, 1):
        assert total(samples, "afd_rows_total", role="ffn", ffn_rank=str(rank)) == to[rank] > 0
    fixed = 128 + 4 * (local + 1)
    want = {
        "request": 2 * messages * fixed + sum(to) * (ROW_BYTES + CHOICE_BYTES * SPEC.top_k),
        "reply": 2 * messages * WORD_BYTES + sum(to) * ROW_BYTES,
    }
    for role in ("ffn", "attention"):
        assert total(samples, "afd_rows_total", role=role) == sum(to)
        assert total(samples, "afd_wait_seconds_total", role=role) > 0
        assert total(samples, "afd_timeouts_total", role=role, stage="0") == 0
        for direction, nbytes in want.items():
            assert total(samples, "afd_bytes_total", role=role, direction=direction) == nbytes
    assert total(samples, "afd_experts_seconds_total") > 0 and total(samples, "afd_reply_seconds_total") > 0
    assert [total(samples, "afd_eager_steps_total", ffn_rank=str(rank)) for rank in (0, 1)] == [3, 3]
    names = {role: {name for name, *pairs in samples if ("role", role) in pairs} for role in ("ffn", "attention")}
    assert names == {"ffn": BOTH | FFN_ONLY, "attention": BOTH}
    assert {f"{name}_total" for name in metrics.SERIES} == BOTH | FFN_ONLY


def test_replays_are_told_from_eager_steps() -> None:
    with local_group() as (servers, connect):
        session, runner = connect(), servers[0].runner
        checked_step(session, 4, 0)
        runner.graphs[((0, (8,)),)] = lambda: runner._ffn_forward({0: None})  # type: ignore[dict-item]
        for seed in (1, 2):
            checked_step(session, 4, seed)
        checked_step(session, 9, 3)  # more rows than the captured step holds
        samples = scrape(servers[0])
        assert total(samples, "afd_replays_total") == 2 and total(samples, "afd_eager_steps_total") == 2
        runner.stage_graphs[0] = type("", (), {"replays": {64: 5, 512: 2}})()  # as on a GPU: by size class
        assert total(scrape(servers[0]), "afd_replays_total", stage="0") == 7
        del runner.stage_graphs[0]


def test_a_slow_ffn_rank_and_a_slow_attention_rank_are_timeouts() -> None:
    with local_group(num_stages=2, reply_timeout_s=1.0, peer_timeout_s=1.5) as (servers, connect):
        session, bank = connect(), servers[0].runner.model
        checked_step(session, 1, 0, stage=1)
        bank.delay_s = 2.0
        with pytest.raises(AFDTimeoutError):
            checked_step(session, 2, 1, stage=1)
        bank.delay_s = 0.0
        samples = scrape(*servers, session)
        assert total(samples, "afd_timeouts_total", role="attention", stage="1") == 1
        assert total(samples, "afd_timeouts_total", role="attention", stage="0") == 0
        assert total(samples, "afd_timeouts_total", role="ffn") == 0
        time.sleep(1.5)
        checked_step(session, 2, 2, layers=1)  # and then nothing
        time.sleep(2.0)
        with pytest.raises(AFDStepAborted):
            session.experts(SPEC.expert_layers[1], *random_layer(SPEC, 2, 3))
        samples = scrape(*servers, session)
        assert total(samples, "afd_timeouts_total", role="ffn", stage="0") == 1
        assert total(samples, "afd_timeouts_total", role="attention") == 1


def test_a_session_in_a_registry_of_the_user_outlives_its_end() -> None:
    registry = CollectorRegistry()
    with local_group() as (_, connect):
        session = connect()
        registry.register(metrics.collector_of(session))
        checked_step(session, 4, 0)
        labels = {"role": "attention", "attention_rank": "0"}
        assert registry.get_sample_value("afd_rows_total", labels) == 12
        session.close()
        assert registry.get_sample_value("afd_rows_total", labels) == 12


def test_counters_are_left_as_they_were_while_an_engine_may_capture() -> None:
    with local_group() as (_, connect):
        session = connect()
        side = session.connector.attention
        checked_step(session, 4, 0)
        reads = []
        side._read_counters = lambda: reads.append(1)  # type: ignore[method-assign]
        side.layer_stats()
        assert reads == [1]
        device, side.device = side.device, type(side.device)("cuda", 0)
        side.lanes[0].offline = True
        side.layer_stats()
        side.lanes[0].offline, side.device = False, device
        assert reads == [1]


def test_what_is_no_source_is_refused() -> None:
    with pytest.raises(TypeError, match="source is a dict; allowed: AttentionSession, FFNServer"):
        metrics.collector_of({})  # type: ignore[arg-type]
