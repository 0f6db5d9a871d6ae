# SPDX-License-Identifier: Apache-2.0
"""The HTTP pages of an FFN rank: what each says from start to end, and that no client can hold them up."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest
from group import SPEC, Bank, checked_step, local_group, random_layer

from afd_runtime import http_probe, metrics
from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError, AFDPeerLost
from afd_runtime.http_probe import MAX_CONNECTIONS, ProbeServer, RankProbe
from afd_runtime.launch import reserve_port
from afd_runtime.server import FFNServer
from afd_runtime.window import placement_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pages():
    """Starts the pages of a probe; all are closed at the end."""
    servers: list[ProbeServer] = []

    def start(probe: RankProbe) -> ProbeServer:
        servers.append(ProbeServer(probe, "127.0.0.1", 0).start())
        return servers[-1]

    yield start
    for server in servers:
        server.close()
        server.close()


def ask(server: ProbeServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert path == "/metrics" or text.count("\n") == (method != "HEAD")
        return answer.status, text.rstrip("\n")
    finally:
        connection.close()


def until_ready(server: ProbeServer, status: int, within_s: float = 10.0) -> str:
    deadline = time.monotonic() + within_s
    while (answer := ask(server, "/ready"))[0] != status and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answer[0] == status, answer
    return answer[1]


def test_before_there_is_a_server(pages) -> None:
    probe = RankProbe("FFN rank 3")
    server = pages(probe)
    assert ask(server, "/health") == (200, "ok") and ask(server, "/metrics") == (200, "")
    assert ask(server, "/ready") == (503, "FFN rank 3 starts")
    probe.doing = "loads its experts"
    assert ask(server, "/ready?verbose") == (503, "FFN rank 3 loads its experts")
    status, text = ask(server, "/readyz")
    assert status == 404 and "/health, /ready, /metrics" in text
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, "/health", method)[0] == 405


def test_ready_once_every_ffn_rank_has_registered(pages) -> None:
    with reserve_port("127.0.0.1") as holder:
        port = holder.getsockname()[1]
        config = AFDConfig(role="ffn", num_ffn_ranks=2, fabric="local", max_batch_tokens=4, port=port)
        ranks, probes, threads = [], [], []
        for rank in (0, 1):
            bank = Bank(SPEC, placement_of(config, SPEC).local_experts(rank))
            ranks.append(FFNServer(config, rank, SPEC, bank, fingerprint_extra={}))
            probe = RankProbe(f"FFN rank {rank}")
            probe.server = ranks[-1]
            probes.append(pages(probe))
            threads.append(threading.Thread(target=ranks[-1].serve_forever, daemon=True))
        try:
            assert ask(probes[0], "/ready") == (503, "FFN rank 0 has not bound its port yet")
            ranks[1].runner.use_cuda_graph = True
            assert ask(probes[1], "/ready") == (503, "FFN rank 1 captures its graphs")
            ranks[1].runner.use_cuda_graph = False
            threads[1].start()
            time.sleep(0.3)
            assert ask(probes[1], "/ready") == (503, "FFN rank 1 waits for FFN rank 0")
            ranks[0].start()
            assert until_ready(probes[0], 200) == "ready" and until_ready(probes[1], 200) == "ready"
            threads[0].start()
            ranks[1].stop()
            assert "it was asked to stop" in until_ready(probes[1], 503)
            assert ask(probes[1], "/health") == (200, "ok")
        finally:
            for rank in reversed(ranks):
                rank.stop()


def test_rank_zero_names_the_ranks_that_are_missing(pages) -> None:
    config = AFDConfig(role="ffn", num_ffn_ranks=3, fabric="local", max_batch_tokens=4, port=0)
    server = FFNServer(config, 0, SPEC, Bank(SPEC, range(1)), fingerprint_extra={})
    probe = RankProbe("FFN rank 0")
    probe.server = server
    try:
        server.start()
        assert ask(pages(probe), "/ready") == (503, "FFN rank(s) 1, 2 have not registered yet")
    finally:
        server.stop()


def test_a_fatal_error_shows_in_both_pages(pages) -> None:
    caught: list[BaseException] = []

    def serve(server: FFNServer) -> None:
        try:
            server.serve_forever()
        except RuntimeError as error:
            caught.append(error)

    with local_group(loop=serve) as (servers, connect):
        probe = RankProbe("FFN rank 0")
        probe.server = servers[0]
        page = pages(probe)
        assert ask(page, "/health") == (200, "ok") and ask(page, "/ready") == (200, "ready")
        servers[0].runner.model.fail_at = 1
        with pytest.raises(AFDPeerLost):
            checked_step(connect(), 2, 0)
        assert ask(page, "/health") == (503, "RuntimeError: the planted fault") == ask(page, "/ready")
    assert len(caught) == 1


def test_pages_answer_while_a_step_is_in_flight(pages) -> None:
    with local_group() as (servers, connect):
        session, probe = connect(), RankProbe("FFN rank 0")
        probe.server = servers[0]
        page = pages(probe)
        checked_step(session, 1, 0)
        session.begin_step(2)
        servers[0].runner.model.delay_s = 1.0
        layer = threading.Thread(target=session.experts, args=(SPEC.expert_layers[0], *random_layer(SPEC, 2, 1)))
        layer.start()
        time.sleep(0.2)
        for path in ("/health", "/ready", "/metrics"):
            start = time.monotonic()
            assert ask(page, path)[0] == 200
            assert time.monotonic() - start < 0.5 and layer.is_alive()
        layer.join()
        servers[0].runner.model.delay_s = 0.0
        assert all(f"\n{name}_total{{" in ask(page, "/metrics")[1] for name in metrics.SERIES)
        session.abort_step("the test is over")


def test_slow_clients_are_few_and_do_not_stay(pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_probe, "REQUEST_S", 1.5)
    page = pages(RankProbe("FFN rank 0"))
    slow = [socket.create_connection(("127.0.0.1", page.port), timeout=10) for _ in range(MAX_CONNECTIONS)]
    time.sleep(0.2)
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(page, "/health")
    deadline = time.monotonic() + 5
    left = dict(enumerate(slow))
    while left and time.monotonic() < deadline:  # each sends a byte now and then, so none is ever idle
        for index, client in list(left.items()):
            try:
                client.sendall(b"G")
            except OSError:
                del left[index]
        time.sleep(0.1)
    assert not left
    assert ask(page, "/health") == (200, "ok")
    for client in slow:
        client.close()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AFDConfigError, match=f"http_port={port}.*choose a free port"):
            ProbeServer(RankProbe("FFN rank 0"), "127.0.0.1", port)
