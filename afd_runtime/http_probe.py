# SPDX-License-Identifier: Apache-2.0
"""``/health``, ``/ready`` and ``/metrics`` of one FFN rank on one HTTP port, in threads that never wait for a step.

At most ``MAX_CONNECTIONS`` are served at once and each for ``REQUEST_S`` at most; others are closed unanswered.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from afd_runtime import metrics
from afd_runtime.errors import AFDConfigError, one_line

if TYPE_CHECKING:
    from afd_runtime.server import FFNServer

logger = logging.getLogger("afd_runtime.http")

MAX_CONNECTIONS = 16
REQUEST_S = 5.0
TEXT = "text/plain; charset=utf-8"
Answer = tuple[int, str, bytes]


class RankProbe:
    """What the three pages say of one FFN rank.

    doing: what it does while there is no server yet. server: set once it exists.
    """

    def __init__(self, name: str) -> None:
        self.name, self.doing = name, "starts"
        self._server: FFNServer | None = None
        self._exposition: Callable[[], bytes] | None = None

    @property
    def server(self) -> FFNServer | None:
        """The rank's server."""
        return self._server

    @server.setter
    def server(self, server: FFNServer) -> None:
        self._exposition, self._server = metrics.exposition_of(server), server

    def health(self) -> Answer:
        """200, or 503 with the fatal error in one line."""
        error = None if self._server is None else self._server.fatal_error
        return _plain(503, error) if error else _plain(200, "ok")

    def ready(self) -> Answer:
        """200 where attention ranks can attach, or 503 with the reason in one line."""
        doing = f"{self.name} {self.doing}"
        reason = doing if self._server is None else self._server.not_ready
        return _plain(503, reason) if reason else _plain(200, "ready")

    def metrics(self) -> Answer:
        """200 with the series in the text format of Prometheus; no series before there is a server."""
        return 200, metrics.CONTENT_TYPE, self._exposition() if self._exposition is not None else b""


def _plain(status: int, text: str) -> Answer:
    return status, TEXT, f"{' '.join(text.split())}\n".encode()


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: ProbeServer

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
        pages = {"/health": self.server.probe.health, "/ready": self.server.probe.ready,
                 "/metrics": self.server.probe.metrics}  # fmt: skip
        page = pages.get(self.path.partition("?")[0])
        if page is None:
            self._send(*_plain(404, f"no such page; there are {', '.join(pages)}"))
            return
        try:
            answer = page()
        except Exception as error:
            logger.exception("%s failed", self.path)
            answer = _plain(500, one_line(error))
        self._send(*answer)

    def _refuse(self) -> None:
        self._send(*_plain(405, "only GET is allowed"), Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse  # noqa: N815

    def _send(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


class ProbeServer(ThreadingHTTPServer):
    """Serves a ``RankProbe`` from daemon threads, from ``start`` to ``close``. port: 0 picks a free one.

    Raises ``AFDConfigError`` where the address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, probe: RankProbe, host: str, port: int) -> None:
        self.probe = probe
        self._open: dict[socket.socket, float] = {}  # since when
        self._thread = threading.Thread(target=self.serve_forever, name="afd-http", daemon=True)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise AFDConfigError(
                f"cannot bind http_host={host!r} http_port={port}: {error}; choose a free port, an address of this "
                "host, or --http-port 0 for none"
            ) from error

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks the name service for the host's name

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self.socket.getsockname()[1])

    def start(self) -> ProbeServer:
        """Begins to answer."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Answers no more and frees the port. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: ends connections that take too long, however they spread their bytes."""
        for request, since in list(self._open.items()):
            if time.monotonic() - since > REQUEST_S:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request from %s failed", client_address, exc_info=True)
