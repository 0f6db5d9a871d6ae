# SPDX-License-Identifier: Apache-2.0
"""Several stages of one forward on one thread: announced, ordered and served as one unit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from group import SPEC, Bank, Child, Failed, checked_step, local_group, new_group, oracle, random_layer
from interleaved import (
    interleaved_step,
    interleaved_steps,
    interleaved_together,
    largest_error,
    serve_on_one_thread,
)

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.ffn import FFNControlPlane
from afd_runtime.control_plane.messages import Announce, StageStep
from afd_runtime.errors import AFDCapacityError, AFDError, AFDShutdownError
from afd_runtime.metadata import AFDControlPayload, AFDDPMetadata
from afd_runtime.server import FFNServer

pytestmark = pytest.mark.timeout(60)
STEPS = 40


def test_two_ranks_interleave_two_stages_in_opposite_orders() -> None:
    with new_group(2, 2, num_stages=2, reply_timeout_s=10.0) as group:  # with stages ordered apart this deadlocks
        ffn, attention = group.start_all()
        for rank, child in enumerate(attention):
            child.start("run", interleaved_steps, STEPS, (rank, 1 - rank), rank)
        for child in attention:
            assert 0 < child.result(50.0) < 1
            child.call("close")
        reports = group.end(ffn)
    for report in reports:
        assert 2 * STEPS <= report["steps"] <= 4 * STEPS and report["bad_frames"] == 0
    assert reports[0]["steps"] == reports[1]["steps"]


def test_ranks_with_other_sets_of_stages_share_a_group() -> None:
    with new_group(3, 2, num_stages=3, reply_timeout_s=10.0) as group:
        ffn, attention = group.start_all()
        for rank, (child, stages) in enumerate(zip(attention, [(0, 1), (1, 2, 0), (2, 1)], strict=True)):
            child.start("run", interleaved_steps, STEPS // 2, stages, rank)
        for child in attention:
            assert child.result(50.0) < 1
        group.end(ffn)


def test_a_loop_on_one_thread_serves_a_unit_as_one_payload() -> None:
    with local_group(2, 2, num_stages=2, loop=serve_on_one_thread) as (servers, connect):
        sessions = [connect(rank) for rank in (0, 1)]
        assert max(interleaved_together(sessions, 10)) < 1
        checked_step(sessions[0], 3, seed=1, stage=1)
        for server in servers:
            assert set(server.served_stages) == {(0, 1), (1,)} and server.served_stages[-1] == (1,)


def test_a_payload_with_several_stages_is_announced_at_once() -> None:
    with local_group(2, 1, num_stages=3) as (servers, connect):
        session = connect(1)
        side, announced = session.connector.attention, []
        send, side.control.announce = side.control.announce, announced.append
        counts = {stage: AFDDPMetadata.from_counts([9, rows]) for stage, rows in ((2, 4), (0, 0))}
        side.send_dp_metadata_list(AFDControlPayload(counts, is_warmup=True))
        assert announced == [Announce((StageStep(2, 0, 4), StageStep(0, 0, 0)), is_warmup=True)]
        send(announced[0])
        for stage in (0, 2):
            session.abort_step("enough", stage)
        side.control.announce = send
        assert largest_error(SPEC, interleaved_step(session, {1: 2, 0: 5, 2: 0}, seed=3)) < 1


def test_a_refused_stage_begins_none() -> None:
    with local_group(num_stages=3) as (servers, connect):
        session = connect()
        lanes = session.connector.attention.lanes
        for rows, error, message in [
            ({0: 1, 1: 17}, AFDCapacityError, "num_rows is 17"),
            ({0: 1, 1: -1}, AFDError, "num_rows is -1"),
            ({0: 1, 3: 1}, AFDError, "stage is 3; allowed: 0 … 2"),
            ({}, AFDError, "rows is empty; allowed: the rows of one stage or more"),
        ]:
            with pytest.raises(error, match=message):
                session.begin_steps(rows)
            assert [lane.rows for lane in lanes] == [None] * 3 and [lane.step for lane in lanes] == [-1] * 3
        session.begin_step(2, 2)
        with pytest.raises(AFDError, match="stage 2 is still in step 0"):
            session.begin_steps({0: 1, 2: 1})
        assert lanes[0].rows is None
        session.abort_step("enough", 2)
        assert largest_error(SPEC, interleaved_step(session, {0: 3, 2: 4}, seed=3)) < 1


def test_one_stage_of_a_unit_is_given_up_and_the_other_goes_on() -> None:
    with local_group(1, 2, num_stages=2) as (servers, connect):
        session = connect()
        for attempt in range(3):
            session.begin_steps({0: 4, 1: 3})
            session.abort_step("enough", attempt % 2)
            checked_layers(session, stage=1 - attempt % 2, rows=4 - (1 - attempt % 2), seed=attempt)
            assert largest_error(SPEC, interleaved_step(session, {1: 2, 0: 5}, seed=attempt)) < 1
        with pytest.raises(KeyError), session.steps({0: 2, 1: 2}):
            raise KeyError("user code")
        with pytest.raises(AFDError, match="ended after 0 of 3 exchanged layers"), session.steps({0: 2, 1: 2}):
            pass
        assert all(lane.rows is None for lane in session.connector.attention.lanes)
        assert largest_error(SPEC, interleaved_step(session, {1: 2, 0: 5}, seed=9)) < 1


def checked_layers(session, *, stage: int, rows: int, seed: int) -> None:
    for layer in SPEC.expert_layers:
        hidden, ids, weights = random_layer(SPEC, rows, seed + layer)
        out = session.experts(layer, hidden, ids, weights, stage)
        torch.testing.assert_close(out.double(), oracle(SPEC, layer, hidden, ids, weights), rtol=2e-5, atol=2e-5)
    session.end_step(stage)


def test_a_rank_killed_in_a_unit_leaves_the_other_served() -> None:
    with new_group(2, 2, num_stages=2) as group:
        ffn, (doomed, other) = group.start_all()
        doomed.call("begin_steps", {0: 4, 1: 2})
        other.start("run", interleaved_steps, 5, (1, 0), 1)  # may be in one unit with the doomed rank
        time.sleep(0.1)
        doomed.kill()
        assert other.result() < 1
        back: Child = group.attention(0)
        for rank, child in enumerate((back, other)):
            child.start("run", interleaved_steps, 5, (rank, 1 - rank), rank)
        for child in (back, other):
            assert child.result() < 1
        group.end(ffn)


def test_a_fault_in_one_stage_of_a_unit_is_told_at_once() -> None:
    with new_group(1, 2, num_stages=2) as group:
        ffn = [group.ffn(0), group.ffn(1, bank={"fail_at": 4})]
        attention = group.attention(0)
        with pytest.raises(Failed, match="AFDPeerLost.*the planted fault") as caught:
            attention.call("run", interleaved_steps, 5, (0, 1), 0)
        assert caught.value.fields["peer"] == "FFN rank 1" and caught.value.seconds < 5
        attention.call("close")
        with pytest.raises(Failed, match="RuntimeError: the planted fault"):
            ffn[1].result()
        assert ffn[0].process.is_alive()


@pytest.fixture
def control() -> Iterator[FFNControlPlane]:
    """The control plane of an FFN rank with three stages, to which nobody is attached."""
    config = AFDConfig(role="ffn", port=0, num_stages=3, fabric="local", max_batch_tokens=16)
    server = FFNServer(config, 0, SPEC, Bank(SPEC, range(SPEC.num_experts)), fingerprint_extra={})
    server.start()
    yield server.connector.ffn.control
    server.stop()


def announce(control: FFNControlPlane, step: int, *stages: int) -> None:
    control._sequencer.announce(0, 1, Announce(tuple(StageStep(stage, step, 1) for stage in stages)))


def test_a_unit_wakes_the_threads_of_its_other_stages(control: FFNControlPlane) -> None:
    found: list[tuple] = []
    threads = [
        threading.Thread(target=lambda stage=stage: found.append(control.next_orders(stage)), daemon=True)
        for stage in (0, 2)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    announce(control, 0, 0, 1, 2)  # nobody is told
    assert [order.stage for order in control.next_orders(1)] == [1]
    for thread in threads:
        thread.join(5)
    assert sorted((orders[0].number, orders[0].stage) for orders in found) == [(1, 0), (1, 2)]


def test_after_a_stop_only_units_that_were_begun_are_served(control: FFNControlPlane) -> None:
    announce(control, 0, 0)
    with control._changed:
        control._enqueue(control._sequencer.take(0))
    announce(control, 0, 1, 2)
    assert control.next_orders(2)[0].number == 2
    announce(control, 1, 0, 1)
    with control._changed:
        control._enqueue(control._sequencer.take(0))
    announce(control, 2, 2)
    control.stop_serving("the test says so")
    assert [order.number for order in control.next_orders(0)] == [1]  # before what was begun
    assert [order.number for order in control.next_orders(1)] == [2]
    for stage in (0, 1, 2, None):
        with pytest.raises(AFDShutdownError, match="the test says so"):
            control.next_orders(stage)


def test_a_stop_inside_a_unit_serves_all_of_its_stages() -> None:
    with new_group(num_stages=2) as group:
        ffn = group.ffn(0, bank={"delay_s": 0.1})
        attention = group.attention(0).start("run", interleaved_steps, 1000, (0, 1), 0)
        time.sleep(1.0)
        start = time.monotonic()
        ffn.process.terminate()
        with pytest.raises(Failed, match="AFDPeerLost: FFN rank 0 was lost: it shut down") as caught:
            attention.result()
        first = SPEC.expert_layers[0]  # no step was cut short, and at most one was announced too late
        assert caught.value.fields["layer"] in (None, first) and time.monotonic() - start < 10
        assert ffn.result()["bad_frames"] == 0


def test_a_bad_announcement_changes_nothing() -> None:
    with local_group(num_stages=2) as (servers, connect):
        session, control = connect(), servers[0].connector.ffn.control
        side = session.connector.attention
        bad = [
            (), (StageStep(0, 0, 1), StageStep(0, 1, 1)), (StageStep(0, 0, 1), StageStep(2, 0, 1)),
            (StageStep(0, 0, 1), StageStep(1, 0, 17)), (StageStep(0, 0, 1), StageStep(1, -1, 1)),
        ]  # fmt: skip
        for stages in bad:
            side.control.announce(Announce(stages))
        deadline = time.monotonic() + 10
        while control.bad_frames < len(bad) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert control.bad_frames == len(bad)
        assert [lane.announced for lane in control.lanes.ranks.values()] == [[-1, -1]]
        assert servers[0].steps_served == 0 and control._sequencer.take() == ()
        assert largest_error(SPEC, interleaved_step(session, {0: 3, 1: 4}, seed=0)) < 1
