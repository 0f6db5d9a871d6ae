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
        self._there, self._back, self._sockets = threading.Event(), threading.Event(), [self._listener]
        self.restore()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, both_ways: bool = True) -> None:
        """Nothing passes from now on, or only what goes to the target does."""
        self._back.clear()
        if both_ways:
            self._there.clear()

    def restore(self) -> None:
        """What was held passes, and what comes."""
        self._there.set()
        self._back.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [near, far]
                for way in ((near, far, self._there), (far, near, self._back)):
                    threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, passes: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passes.wait()
                sink.sendall(data)
            passes.wait()
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes every connection."""
        self.restore()
        for open_socket in self._sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
