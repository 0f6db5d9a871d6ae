# SPDX-License-Identifier: Apache-2.0
"""Both roles in one process on one GPU: every FFN step is a graph replay, every layout, stages, failures."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from group import SPEC, checked_step, local_group, oracle, random_layer
from interleaved import interleaved_together, serve_on_one_thread

from afd_runtime.errors import AFDError, AFDTimeoutError
from afd_runtime.server import FFNServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def own_stream():
    """Attention on a stream of its own: the legacy stream would wait for the FFN side's kernels."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def replays(server) -> int:
    return sum(sum(g.replays.values()) for g in server.runner.stage_graphs.values())


def run_all(sessions, steps) -> None:
    """One thread and one stream per session; steps: of one session, (rows, seed)."""
    errors: list[BaseException] = []

    def run(session, mine) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for rows, seed in mine:
                    checked_step(session, rows, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=args) for args in zip(sessions, steps, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def test_one_pair_replays_every_step() -> None:
    with local_group(device="cuda") as (servers, connect):
        session = connect()
        counts = [5, 0, 16, 1, 7, 16, 2]
        for step, rows in enumerate(counts):
            checked_step(session, rows, seed=step)
        assert servers[0].runner.eager_steps == 0 and replays(servers[0]) == len(counts)
        stats = session.stats[SPEC.expert_layers[0]]
        assert stats["rows"] == sum(counts) and stats["rows_sent"] == sum(counts)


@pytest.mark.parametrize("attention,ffn", [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_groups(attention, ffn) -> None:
    rng = random.Random(attention * 10 + ffn)
    with local_group(attention, ffn, device="cuda") as (servers, connect):
        sessions = [connect(rank) for rank in range(attention)]
        run_all(sessions, [[(rng.randint(0, 16), rng.randrange(1000)) for _ in range(20)] for _ in sessions])
        assert all(server.runner.eager_steps == 0 and replays(server) > 0 for server in servers)


def test_sixteen_attention_ranks_one_ffn_rank() -> None:
    with local_group(16, 1, max_batch_tokens=8, device="cuda") as (servers, connect):
        sessions = [connect(rank) for rank in range(16)]
        run_all(sessions, [[((rank + i) % 9, 100 * rank + i) for i in range(6)] for rank in range(16)])
        assert len(servers[0].runner.stage_graphs[0].graphs) <= 4


def test_replicated() -> None:
    with local_group(3, 2, "replicated", device="cuda") as (_, connect):
        sessions = [connect(rank) for rank in range(3)]
        run_all(sessions, [[(rank + i, 50 * rank + i) for i in range(8)] for rank in range(3)])


def test_two_stages_in_flight_interleaved_by_one_thread() -> None:
    with local_group(1, 2, num_stages=2, device="cuda") as (_, connect):
        session = connect()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for repeat in range(5):
            rows = {0: 5 + repeat, 1: 3}
            outputs = []
            for stage in (0, 1):
                with torch.cuda.stream(streams[stage]):
                    session.begin_step(rows[stage], stage)
            for layer in SPEC.expert_layers:
                for stage in (1, 0):
                    inputs = random_layer(SPEC, rows[stage], seed=10 * layer + stage + 100 * repeat)
                    with torch.cuda.stream(streams[stage]):
                        out = session.experts(layer, *(t.cuda() for t in inputs), stage)
                    outputs.append((layer, inputs, out))
            for stage in (0, 1):
                with torch.cuda.stream(streams[stage]):
                    session.end_step(stage)
            for layer, inputs, out in outputs:
                torch.testing.assert_close(out.cpu().double(), oracle(SPEC, layer, *inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loop", [FFNServer.serve_forever, serve_on_one_thread])
def test_two_ranks_interleave_two_stages_in_opposite_orders(loop) -> None:
    with local_group(2, 2, num_stages=2, device="cuda", loop=loop) as (servers, connect):
        assert max(interleaved_together([connect(rank) for rank in (0, 1)], 20)) < 1
        assert all(server.runner.eager_steps == 0 and replays(server) >= 40 for server in servers)


def test_padding_and_choices_that_are_nowhere() -> None:
    with local_group(1, 3, device="cuda") as (_, connect):
        session = connect()
        with session.step(5):  # 8 rows, of which 3 are padding
            checks = []
            for layer in SPEC.expert_layers:
                hidden, ids, weights = random_layer(SPEC, 8, seed=layer)
                ids[1, 0] = -1
                hidden[5:] = float("nan")
                checks.append(
                    (layer, hidden, ids, weights, session.experts(layer, *(t.cuda() for t in (hidden, ids, weights))))
                )
        for layer, hidden, ids, weights, out in checks:
            want = oracle(SPEC, layer, hidden[:5], ids[:5], weights[:5])
            torch.testing.assert_close(out[:5].cpu().double(), want, rtol=2e-5, atol=2e-5)
            assert (out[5:].cpu() == 0).all()


def test_a_lane_that_stops_in_a_step_is_left_out_and_the_other_goes_on() -> None:
    """Rank 1 gives its step up after one layer; rank 0, merged with it or not, gets right answers, and rank 1 again."""
    with local_group(2, 1, device="cuda", peer_timeout_s=20.0) as (_, connect):
        sessions = [connect(0), connect(1)]
        for repeat in range(3):
            sessions[1].begin_step(3)
            inputs = random_layer(SPEC, 3, seed=repeat)
            sessions[1].experts(SPEC.expert_layers[0], *(t.cuda() for t in inputs))
            sessions[1].abort_step("the test gives it up")
            checked_step(sessions[0], 4, seed=repeat)
            checked_step(sessions[1], 2, seed=repeat + 7)


def test_an_ffn_side_that_does_not_answer_is_named_at_the_time_limit() -> None:
    with local_group(1, 1, device="cuda", reply_timeout_s=0.5, peer_timeout_s=3.0) as (servers, connect):
        session = connect()
        checked_step(session, 3, seed=0)
        graphs = servers[0].runner.stage_graphs[0]
        replay, graphs.replay = graphs.replay, lambda rows: None  # the FFN side never launches this step
        session.begin_step(3)
        for layer in SPEC.expert_layers:
            session.experts(layer, *(t.cuda() for t in random_layer(SPEC, 3, seed=1)))
        start = time.monotonic()
        with pytest.raises(AFDTimeoutError, match="FFN rank 0.*layer 1.*stage 0.*step 1"):
            session.end_step()
        assert time.monotonic() - start < 3
        graphs.replay = replay
        time.sleep(0.2)
        for step in range(20):
            checked_step(session, step % 5, seed=step)


def test_memory_is_flat_after_capture() -> None:
    with local_group(device="cuda") as (_, connect):
        session = connect()
        for step in range(20):
            checked_step(session, step % 17, seed=step)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(60):
            checked_step(session, step % 17, seed=step)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


def test_a_step_that_is_too_large_is_refused() -> None:
    with local_group(device="cuda") as (_, connect):
        session = connect()
        with pytest.raises(AFDError, match="num_rows is 17; allowed: up to max_batch_tokens=16"):
            session.begin_step(17)
        checked_step(session, 16, seed=3)
