# SPDX-License-Identifier: Apache-2.0
"""Control messages, their codec, the fingerprint, the order of steps, the watcher."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from group import SPEC

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.fingerprint import compare, fingerprint
from afd_runtime.control_plane.messages import (
    MAX_MESSAGE_BYTES,
    Announce,
    Attach,
    Heartbeat,
    Order,
    Orders,
    Participant,
    Peer,
    Shutdown,
    StageStep,
    decode,
    encode,
)
from afd_runtime.control_plane.transport import Link, Watcher
from afd_runtime.errors import AFDConfigError, AFDProtocolError
from afd_runtime.window import LocalHandle, ShmHandle

PEER = Peer(1, 2, "here", {"a": "b"})


@pytest.mark.parametrize(
    "message",
    [
        Announce((StageStep(1, 2**32 - 1, 0), StageStep(0, 0, 16)), True),
        Attach(PEER, 65535, ShmHandle(1, 2, 3)),
        Attach(PEER, 1, LocalHandle(1, 2**48, 3)),
        Orders((Order(1, 0, (Participant(0, 1, 2, 3), Participant(5, 1, 2, 0))), Order(1, 3, ()))),
        Heartbeat(),
    ],
)
def test_messages_come_back_equal(message) -> None:
    assert decode(encode(message)) == message


def test_flags_default_to_false() -> None:
    order = {"number": 1, "stage": 0, "participants": []}
    frame = msgspec.msgpack.encode({"type": "Orders", "orders": [order, {**order, "is_warmup": True}]})
    kinds = [(o.is_warmup, o.is_graph_capturing, o.is_graph_replaying) for o in decode(frame).orders]
    assert kinds == [(False, False, False), (True, False, False)]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80\x04\x95cposix\nsystem\n.",
        msgspec.msgpack.encode({"type": "Announce", "stages": [], "surprise": 2}),
        msgspec.msgpack.encode({"type": "Announce", "stage": 0, "lane_step": 1, "rows": 1}),
        *(
            msgspec.msgpack.encode({"type": "Announce", "stages": [step]})
            for step in (
                {"stage": 0, "lane_step": 1, "rows": 1, "surprise": 2},
                {"stage": "0", "lane_step": 1, "rows": 1},
                {"stage": 0, "lane_step": 1},
                {"stage": 0, "lane_step": 1, "rows": 1.5},
                [0, 1, 1],
            )
        ),
        msgspec.msgpack.encode({"type": "Order", "number": 1, "stage": 0, "participants": []}),
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"stage": 0}),
        msgspec.msgpack.encode([1, 2]),
        encode(Heartbeat()) + b"\x00",
        b"\x00" * (MAX_MESSAGE_BYTES + 1),
    ],
)
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(AFDProtocolError, match="control frame of"):
        decode(frame)


def test_oversize_is_refused_before_it_is_sent() -> None:
    with pytest.raises(AFDProtocolError, match=f"allowed: up to {MAX_MESSAGE_BYTES}"):
        encode(Shutdown("x" * MAX_MESSAGE_BYTES))


def test_fingerprint_is_flat_text_and_compared_by_field() -> None:
    config = AFDConfig(role="ffn", max_batch_tokens=64)
    own = fingerprint(config, SPEC, torch.bfloat16, {"expert_identity": "cafe"})
    assert all(isinstance(value, str) for value in own.values())
    assert own["dtype"] == own["reply_dtype"] == "torch.bfloat16" and own["expert_layers"] == "1,3,4"
    assert own == fingerprint(config.model_copy(update={"role": "attention", "port": 7}), SPEC, torch.bfloat16,
                              {"expert_identity": "cafe"})  # fmt: skip
    assert compare(own, dict(own), "F", "A") is None
    for field in own:
        refusal = compare(own, {**own, field: "other"}, "F", "A")
        assert refusal is not None and refusal.field == field
        assert f"{field} differs: F has {own[field]}, A has other" in refusal.message
    more = compare(own, {**own, "later": "1"}, "F", "A")
    assert more is not None and "F has (not sent), A has 1" in more.message


def _announce(*step: int) -> Announce:
    return Announce((StageStep(*step),))


class Events(list):
    def until(self, count: int, timeout_s: float = 10.0) -> Events:
        deadline = time.monotonic() + timeout_s
        while len(self) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(self) >= count, self
        return self


@pytest.mark.timeout(30)
def test_watcher_reports_an_ended_process_at_once_and_a_silent_one_in_time() -> None:
    got, lost = Events(), Events()
    server = Watcher("server", lambda link, message: got.append((link, message)), lambda *what: lost.append(what), 3.0)
    endpoint = server.bind("127.0.0.1", 0)
    with pytest.raises(AFDConfigError, match="cannot bind host='127.0.0.1' port="):
        other = Watcher("other", lambda *_: None, lambda *_: None, 3.0)
        try:
            other.bind("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        finally:
            other.stop()
    server.start()
    client = Watcher("client", lambda *_: None, lambda *_: None, 3.0)
    client.start()
    client.send(client.connect("server", endpoint), _announce(0, 1, 2))
    link, message = got.until(1)[0]
    assert message == _announce(0, 1, 2)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server.watch(link, sleeper.pid)
    time.sleep(0.1)
    start = time.monotonic()
    sleeper.kill()
    assert lost.until(1)[0] == (link, f"process {sleeper.pid} ended") and time.monotonic() - start < 2
    sleeper.wait()
    silent = client.connect("server again", endpoint)
    client.send(silent, _announce(0, 2, 2))
    link = got.until(2)[1][0]
    server.watch(link, os.getpid())
    assert "was silent for" in lost.until(2)[1][1]
    client.stop()
    server.stop()
    server.stop()


@pytest.mark.timeout(30)
def test_an_ended_process_is_lost_before_a_frame_of_its_successor_is_read() -> None:
    lost: list = []
    watcher = Watcher("server", lambda *_: None, lambda *what: lost.append(what), 3.0)
    ended, alive = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    links = [watcher._links.setdefault(name, Link(name.decode(), name)) for name in (b"ended", b"alive")]
    for link, process in zip(links, (ended, alive), strict=True):
        link.watched, link.pid, link.pidfd = True, process.pid, os.pidfd_open(process.pid)
    watcher.lose_ended()
    assert not lost
    ended.kill()
    ended.wait()
    watcher.lose_ended()
    assert lost == [(links[0], f"process {ended.pid} ended")] and list(watcher._links) == [b"alive"]
    alive.kill()
    alive.wait()
    watcher.stop()


def test_watching_a_peer_again_opens_no_further_file() -> None:
    got = Events()
    server = Watcher("server", lambda link, message: got.append((link, message)), lambda *_: None, 3.0)
    client = Watcher("client", lambda *_: None, lambda *_: None, 3.0)
    endpoint = server.bind("127.0.0.1", 0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        try:
            server.start()
            client.start()
            dialled = client.connect("server", endpoint)
            for count in range(1, 12):
                client.send(dialled, _announce(0, count, 2))
                server.watch(got.until(count)[0][0], sleeper.pid)
            client.send(dialled, _announce(0, 12, 2))
            got.until(12)
            time.sleep(0.1)
            found = [os.readlink(file) for file in glob.glob("/proc/self/fd/*") if os.path.islink(file)]
            assert sum("pidfd" in name for name in found) == 1
        finally:
            client.stop()
            server.stop()
            sleeper.kill()


@pytest.mark.timeout(60)
def test_an_endless_sender_holds_up_no_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    lost = Events()
    server = Watcher("server", lambda *_: None, lambda *_: None, 10.0)
    client = Watcher("client", lambda *_: None, lambda *what: lost.append(what), 1.5)
    endpoint = server.bind("127.0.0.1", 0)
    flood = (
        "import sys, time, zmq; s = zmq.Context().socket(zmq.DEALER); s.connect(sys.argv[1]); end = time.time() + 6\n"
        "while time.time() < end: s.send(b'\\xc1')"
    )
    server.start()
    client.start()
    with subprocess.Popen([sys.executable, "-c", flood, endpoint]) as sender:
        try:
            dialled = client.connect("server", endpoint)
            client.send(dialled, Heartbeat())
            time.sleep(0.5)
            for link in list(server._links.values()):
                server.watch(link, os.getpid())
            client.watch(dialled, os.getpid())
            assert sender.wait() == 0
            assert server.bad_frames > 1000 and not lost
            assert len(caplog.records) < 1000
        finally:
            sender.kill()
            client.stop()
            server.stop()
