# SPDX-License-Identifier: Apache-2.0
"""Two things at once, and calls at the wrong moment: no crash, nobody waits for ever, the right rank is named."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from group import SPEC, Bank, Failed, checked_step, local_group, new_group, random_layer

from afd_kernels import Header
from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.fingerprint import machine_id
from afd_runtime.control_plane.messages import Attach, Detach, Heartbeat, Peer, Refused
from afd_runtime.control_plane.transport import Link
from afd_runtime.errors import AFDConfigError, AFDError, AFDPeerLost
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer
from afd_runtime.window import SharedMemoryFabric
from afd_runtime.window_cuda import CudaHandle

pytestmark = pytest.mark.timeout(60)


def attach_anew_inside_abort(session: AttentionSession) -> list[float]:
    """After a loss stage 1 is given up; the moment that it counts as left, another thread steps in stage 0."""
    side: Any = session.connector.attention
    checked_step(session, 3, seed=0, stage=1)
    session.begin_step(2, 1)
    side.control._lose(side.control.peers[0].link, "planted")
    leave, errors = side._leave, []

    def step() -> None:
        errors.append(checked_step(session, 3, seed=1))

    def leave_and_step(lane: Any) -> None:
        leave(lane)
        side._leave = leave
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        thread.join(10)

    side._leave = leave_and_step
    session.abort_step("planted", 1)
    return [*errors, *(checked_step(session, 3, seed=seed, stage=1) for seed in (2, 3))]


def test_a_stage_is_given_up_while_the_thread_of_another_attaches_anew() -> None:
    with new_group(num_stages=2, reply_timeout_s=3.0) as group:
        ffn, (attention,) = group.start_all()
        assert len(attention.call("run", attach_anew_inside_abort)) == 3
        attention.call("close")
        group.end(ffn)


def step_with_a_peer_that_ended_in_attach(_: Any, options: dict, pid: int) -> None:
    """FFN process ``pid`` ends after it has answered Attach, while its window is being mapped here."""
    opened = SharedMemoryFabric.open

    def end_meanwhile(self: SharedMemoryFabric, handle: Any, nbytes: int) -> Any:
        window = opened(self, handle, nbytes)
        if handle.pid == pid:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        return window

    SharedMemoryFabric.open = end_meanwhile  # type: ignore[method-assign]
    config = AFDConfig(role="attention", **options)
    with AttentionSession.connect(config, 0, SPEC, fingerprint_extra={}) as session:
        checked_step(session, 3, seed=0)


def test_an_ffn_rank_that_ends_while_its_window_is_mapped_is_lost() -> None:
    with new_group(1, 2, reply_timeout_s=3.0, reattach_timeout_s=0.0) as group:
        ffn = [group.ffn(0), group.ffn(1)]
        attention = group.attention(connect=False)
        with pytest.raises(Failed, match="AFDPeerLost: FFN rank 1") as caught:
            attention.call("run", step_with_a_peer_that_ended_in_attach, group.options, ffn[1].process.pid)
        assert caught.value.seconds < 3


def test_a_fault_after_a_stop_was_asked_for_is_told_at_once() -> None:
    with local_group(num_stages=2, loop=lambda server: None) as (servers, connect):
        session, control = connect(), servers[0].connector.ffn.control
        control.stop_serving("it was asked to stop")
        assert session.connector.attention.control.loss is None  # a step of another stage may go on
        control.stop_serving("the planted fault", failed=True)
        deadline = time.monotonic() + 5
        while session.connector.attention.control.loss is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.connector.attention.control.loss == ("FFN rank 0", "it shut down (the planted fault)")


def test_counts_of_rows_are_integers_of_any_kind_or_refused_before_a_step_begins() -> None:
    with local_group(reply_timeout_s=3.0) as (_, connect):
        session = connect()
        for rows in (3.0, "3", None):
            with pytest.raises(AFDError, match="allowed: an integer for each stage"):
                session.begin_step(rows)
        for rows in (torch.tensor(3), True):
            session.begin_step(rows)
            session.abort_step("enough")
        checked_step(session, 3, seed=0)


def test_no_step_begins_in_a_stage_that_is_offline() -> None:
    with local_group(num_stages=2) as (_, connect):
        session = connect()
        with session.offline(1):
            with pytest.raises(AFDError, match="stage 1 is offline; begin its step after"):
                session.begin_steps({0: 2, 1: 3})
            checked_step(session, 3, seed=0)
        checked_step(session, 3, seed=1, stage=1)


def use_after_close(session: AttentionSession, in_step: bool) -> list[str]:
    """What each call says after ``close``, inside a step or outside; the windows are unmapped."""
    layer, tensors = SPEC.expert_layers[0], random_layer(SPEC, 3, seed=0)
    if in_step:
        session.begin_step(3)
    session.close()
    said = []
    for call in (
        lambda: session.experts(layer, *tensors), session.end_step, lambda: session.begin_step(3), session.reattach,
    ):  # fmt: skip
        with pytest.raises(AFDError) as caught:
            call()
        said.append(str(caught.value))
    session.close()
    return said


@pytest.mark.parametrize("in_step", [False, True])
def test_a_closed_session_refuses_steps(in_step: bool) -> None:
    with new_group() as group:
        ffn, (attention,) = group.start_all()
        sent, ended, begun, joined = attention.call("run", use_after_close, in_step)
        assert "outside a step" in sent and "in no step" in ended
        assert begun == joined == "attention rank 0 has closed its session; connect a new one"
        group.attention(0).call("step", 3, seed=0)
        group.end(ffn)


def test_a_session_is_closed_after_every_ffn_rank_has_let_go_of_its_step() -> None:
    with local_group(1, 2, num_stages=2) as (servers, connect):
        session = connect()
        side: Any = session.connector.attention
        send, drained, detaches = side.control._watcher.send, [], []

        def note(link: Any, message: Any) -> None:
            if isinstance(message, Detach):
                detaches.append((drained[:], list(map(len, side.control._unconfirmed))))
            send(link, message)

        side.control._watcher.send = note
        for lane in side.lanes:
            lane.drain = lambda stage=lane.stage: drained.append(stage)
        session.begin_step(3, 1)
        drained.clear()
        session.experts(SPEC.expert_layers[0], *random_layer(SPEC, 3, seed=0), stage=1)
        session.close()
        assert detaches == [([0, 1], [0, 0])] * 2


def windows_open() -> int:
    """Windows of this process that have a file descriptor."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("afd-window" in os.readlink(link) for link in links if os.path.islink(link))


def test_an_attach_that_is_refused_leaves_no_window_behind() -> None:
    config = AFDConfig(role="ffn", port=0, max_batch_tokens=16)
    server = FFNServer(config, 0, SPEC, Bank(SPEC, range(SPEC.num_experts)), fingerprint_extra={})
    server.start()
    control: Any = server.connector.ffn.control
    answers: list[Any] = []
    control._watcher.send = lambda link, message: answers.append(message)
    reply = SharedMemoryFabric().allocate(control.layout.reply_nbytes)
    control.doorbells, before = object(), windows_open()
    me = Peer(0, os.getpid(), machine_id(), control._fingerprint)
    control._on_attach(Link("a peer", b"1"), Attach(me, 1, reply.handle, CudaHandle(1, b"", 128)))
    assert isinstance(answers[0], Refused) and answers[0].field == "window" and control.lanes.ranks == {}
    assert windows_open() == before
    control.doorbells = None
    reply.close()
    server.stop()


def test_memory_of_a_lost_rank_whose_rows_were_merged_stays_until_they_are_computed() -> None:
    """Rank 0 is lost after its wait, and rank 1's message is malformed: what is dropped then must not be in use."""
    held: list[bool] = []

    def serve(server: FFNServer) -> None:
        side, bank = server.connector.ffn, server.runner.model
        arrival, forward, control = side._arrival, bank.forward, side.control

        def lose_and_merge(stage: int, layer: int) -> Any:
            lanes, members = control.lanes.ranks, side._step(stage).members
            if not held and len(members) == 2:
                held.append(False)
                side.layout.request.views(lanes[1].request.buffer).header[Header.ROWS] = 999
                lost.append(lanes[0])
                control._on_lost(lanes[0].link, "planted")
            return arrival(stage, layer)

        def compute(layer: int, schedule: Any) -> Any:
            if lost and schedule.lane_base.tolist() == [0, 3, 3]:
                held.append(lost[0].request.buffer.numel() > 0 and lost[0].reply.buffer.numel() > 0)
            return forward(layer, schedule)

        def both_in_one_unit(stage: int | None = None) -> Any:
            end = time.monotonic() + 10.0
            while not held and len(control._sequencer._pending) < 2 and time.monotonic() < end:
                time.sleep(1e-3)
            return next_orders(stage)

        lost: list[Any] = []
        next_orders, control.next_orders = control.next_orders, both_in_one_unit
        side._arrival, bank.forward = lose_and_merge, compute
        server.serve_forever()

    def run(session: AttentionSession) -> None:
        with contextlib.suppress(AFDError):
            checked_step(session, 3, seed=0)

    with local_group(2, 1, loop=serve, reply_timeout_s=2.0, reattach_timeout_s=0.0) as (servers, connect):
        sessions = [connect(rank) for rank in (0, 1)]
        threads = [threading.Thread(target=run, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    # Once merged, rank 0 may have had its rows of further layers written already: its memory stays for each of them.
    assert held[0] is False and len(held) > 1 and all(held[1:]), held


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_host_that_is_no_address_is_refused_at_once(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFD_TOKEN", "a secret")
    options = {"role": role, "host": "no such host!", "bind_host": "127.0.0.1", "port": 4444, "num_ffn_ranks": 2}
    config, start = AFDConfig(**options), time.monotonic()
    with pytest.raises(AFDConfigError, match="cannot connect to tcp://no such host!:4444"):
        if role == "attention":
            AttentionSession.connect(config, 0, SPEC, fingerprint_extra={})
        else:
            FFNServer(config, 1, SPEC, Bank(SPEC, range(SPEC.num_experts)), fingerprint_extra={}).start()
    assert time.monotonic() - start < 5
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("afd-watcher")]


class Stream:
    """Stands for a CUDA stream: knows whether it was waited for. The kernels' references run at once."""

    def __init__(self) -> None:
        self.waited_for = 0

    def synchronize(self) -> None:
        self.waited_for += 1


@pytest.mark.parametrize("end", ["end_step", "abort_step"])
def test_a_step_waits_for_every_stream_that_it_ran_on(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins on one stream, a layer runs on a second, a graph was replayed on the third, where it ends."""
    began, ran, ended, later = streams = [Stream() for _ in range(4)]
    with local_group(reply_timeout_s=5.0) as (_, connect):
        session = connect()
        side: Any = session.connector.attention
        for cell in (side, side.lanes[0]):
            monkeypatch.setattr(cell, "device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

        def on(stream: Stream) -> None:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)

        on(began)
        session.begin_step(3)
        on(ran)
        for layer in SPEC.expert_layers:
            session.experts(layer, *random_layer(SPEC, 3, seed=layer))
        on(ended)
        session.end_step() if end == "end_step" else session.abort_step("enough")
        on(later)
        session.begin_step(3)
        assert [stream.waited_for for stream in streams] == [1, 1, 1, 0]
        for cell in (side, side.lanes[0]):
            monkeypatch.setattr(cell, "device", torch.device("cpu"))
        session.abort_step("enough")
        checked_step(session, 3, seed=0)


def test_asking_for_totals_leaves_what_an_attaching_thread_waits_for() -> None:
    with local_group(1, 2) as (_, connect):
        session = connect()
        control: Any = session.connector.attention.control
        checked_step(session, 3, seed=0)
        control._inbox.put((control.peers[1].link, Heartbeat()))
        seen: list[int] = []
        threads = [threading.Thread(target=lambda: seen.append(len(control.stats()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen == [2] * 4 and control._inbox.get_nowait()[1] == Heartbeat()


def test_whatever_keeps_a_rank_from_attaching_anew_is_told_with_the_loss() -> None:
    with local_group(reply_timeout_s=3.0) as (_, connect):
        session = connect()
        group: Any = session.connector.attention.group
        group._detached, attach = ("FFN rank 0", "planted"), group.attach

        def vanish(timeout_s: float) -> None:
            raise AFDError("cannot map the window of process 1")

        group.attach = vanish
        with pytest.raises(AFDPeerLost, match="FFN rank 0 was lost: planted; attaching anew failed: cannot map"):
            session.begin_step(3)
        group.attach = attach
        checked_step(session, 3, seed=0)


def connect_again(session: AttentionSession, options: dict) -> str:
    """What the first session says after its process has connected a second one of the same rank."""
    config = AFDConfig(role="attention", **options)
    with AttentionSession.connect(config, 0, SPEC, fingerprint_extra={}) as second:  # type: ignore[arg-type]
        checked_step(second, 3, seed=0)
        with pytest.raises(AFDPeerLost) as caught:
            checked_step(session, 3, seed=0)
        checked_step(second, 3, seed=1)
    return str(caught.value)


def test_a_rank_that_connects_twice_is_named_at_once() -> None:
    with new_group(reattach_timeout_s=0.0) as group:
        ffn, (attention,) = group.start_all()
        text = attention.start("run", connect_again, group.options).result(8)
        assert f"process {attention.process.pid} connected anew as attention rank 0" in text
        group.end(ffn)
