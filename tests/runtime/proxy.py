# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that a test can cut and restore."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards TCP connections to ``target``, a port of this host. While it is cut nothing passes in either direction;
    nothing is lost."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = self._listener.getsockname()[1], 0
        self._passes, self._sockets = threading.Event(), [self._listener]
        self._passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes from now on."""
        self._passes.clear()

    def restore(self) -> None:
        """What was held passes, and what comes."""
        self._passes.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
            self._passes.wait()
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes every connection."""
        self._passes.set()
        for open_socket in self._sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
