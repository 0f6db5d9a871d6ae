# SPDX-License-Identifier: Apache-2.0
"""Both roles as threads of one process: the local fabric, stages, 16A1F, and what reaches the control port."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import pytest
import torch
import zmq
from group import SPEC, checked_step, local_group, oracle, random_layer

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.fingerprint import fingerprint, machine_id
from afd_runtime.control_plane.messages import (
    MAX_MESSAGE_BYTES,
    Announce,
    Hello,
    Order,
    Orders,
    Peer,
    Refused,
    StageStep,
    decode,
    encode,
)
from afd_runtime.errors import AFDConfigError, AFDPeerLost, AFDStepError
from afd_runtime.remote_experts import AttentionSession

pytestmark = pytest.mark.timeout(60)


def test_local_fabric_serves_padded_batches_and_choices_that_are_nowhere() -> None:
    with local_group(1, 3) as (_, connect):
        session = connect()
        checked_step(session, 7, seed=1)
        with session.step(5):  # 8 rows, of which 3 are padding
            for layer in SPEC.expert_layers:
                hidden, ids, weights = random_layer(SPEC, 8, seed=layer)
                ids[1, 0] = -1
                hidden[5:] = float("nan")
                out = session.experts(layer, hidden, ids, weights)
                want = oracle(SPEC, layer, hidden[:5], ids[:5], weights[:5])
                torch.testing.assert_close(out[:5].double(), want, rtol=2e-5, atol=2e-5)
                assert (out[5:] == 0).all()
        session.close()
        assert session.stats[1]["rows"] == 12  # kept after close


def test_sixteen_attention_ranks_one_ffn_rank() -> None:
    with local_group(16, 1, max_batch_tokens=4) as (servers, connect):
        sessions = [connect(rank) for rank in range(16)]
        assert servers[0].attached == tuple(range(16))
        assert len({session.session for session in sessions}) == 16
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                checked_step(sessions[rank], rank % 5, seed=rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors


def test_two_stages_in_flight_keep_their_own_buffers() -> None:
    with local_group(1, 2, num_stages=2) as (_, connect):
        session = connect()
        rows = {0: 5, 1: 3}
        for stage in (0, 1):
            session.begin_step(rows[stage], stage)
        for layer in SPEC.expert_layers:
            for stage in (1, 0):
                hidden, ids, weights = random_layer(SPEC, rows[stage], seed=10 * layer + stage)
                out = session.experts(layer, hidden, ids, weights, stage)
                want = oracle(SPEC, layer, hidden, ids, weights)
                torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
        for stage in (0, 1):
            session.end_step(stage)
        workers = [threading.Thread(target=checked_step, args=(session, 4, 7), kwargs={"stage": s}) for s in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(20)
        assert all(session.connector.attention.lane(s).rows is None for s in (0, 1))


def test_a_server_that_stops_is_named() -> None:
    with local_group() as (servers, connect):
        session = connect()
        checked_step(session, 2, seed=0)
        servers[0].stop()
        with pytest.raises(AFDPeerLost, match="FFN rank 0 was lost: it shut down .it was asked to stop"):
            for step in range(3):
                checked_step(session, 2, seed=step)
                time.sleep(0.1)


def test_an_exception_inside_a_step_gives_it_up() -> None:
    with local_group() as (_, connect):
        session = connect()
        for attempt in range(3):
            with pytest.raises(KeyError), session.step(2):
                session.experts(1, *random_layer(SPEC, 2, seed=attempt))
                raise KeyError("user code")
            checked_step(session, 3, seed=attempt)


def _hello(**changes) -> Hello:
    config = AFDConfig(role="attention", port=1, max_batch_tokens=16)
    fields = {"rank": 0, "pid": os.getpid(), "machine": machine_id(),
              "fingerprint": fingerprint(config, SPEC, SPEC.dtype, {})}  # fmt: skip
    return Hello(Peer(**{**fields, **changes}))


def test_bad_frames_are_dropped_and_the_loop_goes_on() -> None:
    with local_group() as (servers, connect):
        session, control = connect(), servers[0].connector.ffn.control
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(servers[0].endpoint)
        good = msgspec.msgpack.decode(encode(_hello()))
        bad: list[bytes] = [
            b"", b"\x80", b"cos\nsystem\n", os.urandom(200), msgspec.msgpack.encode({**good, "surprise": 1}),
            msgspec.msgpack.encode({**good, "peer": {**good["peer"], "rank": "0"}}), b"\x00" * (MAX_MESSAGE_BYTES + 1),
            encode(Announce((StageStep(0, 1, 1),))),  # not attached
            encode(Orders((Order(1, 0, ()),))),
            msgspec.msgpack.encode({"type": "Shutdown", "reason": "mischief"}),
            msgspec.msgpack.encode({"type": "None"}),
        ]  # fmt: skip
        for frame in bad:
            socket.send(frame)
        socket.send_multipart([b"one", b"two"])
        deadline = time.monotonic() + 10
        while control.bad_frames < len(bad) + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert control.bad_frames == len(bad) + 1
        checked_step(session, 3, seed=0)
        for field, hello in {
            "machine": _hello(machine="elsewhere"), "token": _hello(token="guess"), "rank": _hello(rank=5),
        }.items():  # fmt: skip
            socket.send(encode(hello))
            assert socket.poll(5000)
            answer = decode(socket.recv())
            assert isinstance(answer, Refused) and answer.field == field and "\n" not in answer.message
        checked_step(session, 3, seed=1)
        socket.close()


def test_a_forged_message_in_a_slot_drops_the_lane_only() -> None:
    with local_group(2, 1) as (servers, connect):
        sessions = [connect(rank) for rank in (0, 1)]
        lane = sessions[0].connector.attention.lane(0)
        sessions[0].begin_step(2)
        lane.state[3] = 9  # rows that were not announced
        with pytest.raises(AFDStepError, match="it sent 9 rows after announcing 2"):
            sessions[0].experts(1, *random_layer(SPEC, 9, seed=0))
        checked_step(sessions[1], 4, seed=1)
        checked_step(sessions[0], 4, seed=2)
        assert servers[0].attached == (0, 1)


def test_off_loopback_a_token_is_required_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFD_TOKEN", raising=False)
    with pytest.raises(AFDConfigError, match="AFD_TOKEN must be set.*secrets.token_hex"), local_group(host="0.0.0.0"):
        pass
    monkeypatch.setenv("AFD_TOKEN", "sesame")
    with local_group(host="0.0.0.0") as (servers, connect):
        checked_step(connect(), 2, seed=0)
        monkeypatch.setenv("AFD_TOKEN", "wrong")
        config = AFDConfig(role="attention", port=servers[0].port, fabric="local", max_batch_tokens=16)
        with pytest.raises(Exception, match="AFD_TOKEN is another one"):
            AttentionSession.connect(config, 0, SPEC, fingerprint_extra={})
