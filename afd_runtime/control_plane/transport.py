# SPDX-License-Identifier: Apache-2.0
"""One watcher thread per process: it owns the zmq sockets, sends heartbeats and notices peers that are gone.

Other threads hand it work through a queue and an eventfd. A peer is lost when its process ends (pidfd, at once), or
when it is silent for the liveness limit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import zmq

from afd_runtime.control_plane.messages import MAX_MESSAGE_BYTES, Heartbeat, Message, Shutdown, decode, encode
from afd_runtime.errors import AFDConfigError, AFDProtocolError

logger = logging.getLogger("afd_runtime.control_plane")

HEARTBEAT_S = 0.5
LINGER_MS = 1000
QUIET_S = 5.0  # who waits longer than this for a peer says so
IDLE_S = 60.0
FRAMES_AT_ONCE = 64
LOGGED_BAD_FRAMES = 100


def endpoint_of(host: str, port: int | str) -> str:
    """The zmq endpoint of an address; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host and "[" not in host else f"tcp://{host}:{port}"


class Link:
    """One peer's connection. ``name`` appears in errors. Only the watcher thread touches the sockets."""

    def __init__(self, name: str, identity: bytes | None = None) -> None:
        self.name = name
        self.identity = identity
        self.socket: zmq.Socket | None = None
        self.pid = 0
        self.pidfd = -1
        self.watched = False
        self.closed = False
        self.last_seen = time.monotonic()


class Watcher:
    """The thread and its sockets. ``on_message(link, message)``, ``on_lost(link, reason)`` and, with each heartbeat,
    ``on_beat()`` run on it."""

    def __init__(
        self,
        name: str,
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link, str], None],
        liveness_timeout_s: float,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.bad_frames = name, 0
        self._on_message, self._on_lost, self._liveness_s = on_message, on_lost, liveness_timeout_s
        self._on_beat = on_beat
        self._context = zmq.Context()
        self._router: zmq.Socket | None = None
        self._links: dict[bytes, Link] = {}  # behind the router, by identity
        self._dialled: list[Link] = []
        self._work: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # not before: a late wake-up must not hit another file
        self._running = self._released = False
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"afd-watcher {name}", daemon=True)

    def bind(self, host: str, port: int) -> str:
        """Binds the router; port 0 picks one. Returns the endpoint. Call before ``start``."""
        address = endpoint_of(host, port or "*")
        self._router = self._socket(zmq.ROUTER, address)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise AFDConfigError(
                f"cannot bind host={host!r} port={port}: {error}; choose a free port, or the address of this host"
            ) from error
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Starts the thread."""
        self._running, self._last_beat = True, time.monotonic()
        self._thread.start()

    def connect(self, name: str, endpoint: str) -> Link:
        """A new connection; what is sent on it waits until the peer is there. Raises ``AFDConfigError``."""
        link = Link(name)
        link.socket = self._socket(zmq.DEALER, endpoint)
        try:
            link.socket.connect(endpoint)
        except zmq.ZMQError as error:
            link.socket.close()
            raise AFDConfigError(f"cannot connect to {endpoint}: {error}; correct host and port") from error
        self.post(lambda: self._dialled.append(link))  # from then on the socket is the thread's
        return link

    def send(self, link: Link, message: Message) -> None:
        """Sends from any thread. A message to a closed link is dropped."""
        frame = encode(message)
        self.post(lambda: self._send(link, frame))

    def watch(self, link: Link, pid: int = 0) -> None:
        """From now on the peer must live: heartbeats go to it, and its end or silence is reported once.

        pid: of its process; 0 where that is not known yet, then only its silence is noticed.
        """

        def begin() -> None:
            if link.closed:
                return
            if link.pidfd >= 0:  # watched before, when it said hello
                os.close(link.pidfd)
                link.pidfd = -1
            link.watched, link.pid, link.last_seen = True, pid, time.monotonic()
            if pid in (0, os.getpid()):
                return
            try:
                link.pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._lose(link, f"process {pid} ended")
            except OSError:
                logger.debug("no pidfd for process %d: relying on heartbeats", pid)

        self.post(begin)

    def lose_ended(self) -> None:
        """On this thread: loses the peers whose processes have ended, before a successor's frame that came as early."""
        for link in self._all_links():
            ended = select.poll()
            if link.pidfd >= 0:
                ended.register(link.pidfd, select.POLLIN)
            if ended.poll(0):
                self._lose(link, f"process {link.pid} ended")

    def supersede(self, link: Link, pid: int) -> bool:
        """On this thread: loses ``link`` if its own process ``pid`` connects anew, which noticed a loss before us.

        A session of that process that still uses the link is told.
        """
        if link.pid != pid or pid == os.getpid():
            return False
        self._send(link, encode(Shutdown(f"for this session: process {pid} connected anew as {link.name}")))
        self._lose(link, f"process {pid} connected anew")
        return True

    def close_link(self, link: Link) -> None:
        """Closes a connection without reporting it."""
        self.post(lambda: self._close(link))

    def post(self, action: Callable[[], None]) -> None:
        """Runs ``action`` on the watcher thread, in order."""
        self._work.append(action)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look at its queue. Safe in a signal handler."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Sends what is queued, closes everything and joins the thread. Idempotent."""
        self.post(self._end)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        elif not self._released:
            self._release()

    def _end(self) -> None:
        self._running = False

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        return socket

    def _send(self, link: Link, frame: bytes) -> None:
        if link.closed:
            return
        try:
            if link.identity is None:
                assert link.socket is not None
                link.socket.send(frame, zmq.DONTWAIT)
            elif self._router is not None:
                self._router.send_multipart([link.identity, frame], zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("%s: the queue to %s is full; a message was dropped", self.name, link.name)

    def _run(self) -> None:
        next_beat = 0.0
        while self._running:
            for source in self._poll(max(0.0, next_beat - time.monotonic())):
                self._serve(source)
            while self._work:
                self._guard(self._work.popleft())
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                self._beat()
                if self._on_beat is not None:
                    self._guard(self._on_beat)
        self._release()

    def _poll(self, timeout_s: float) -> list[Link | zmq.Socket]:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        sources: dict[int | zmq.Socket, Link | zmq.Socket] = {}
        if self._router is not None:
            sources[self._router] = self._router
        for link in self._all_links():
            if link.socket is not None:
                sources[link.socket] = link.socket
            if link.pidfd >= 0:
                sources[link.pidfd] = link
        for source in sources:
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000) + 1))
        if ready.pop(self._wake, None):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return [sources[source] for source in ready]

    def _all_links(self) -> list[Link]:
        return [*self._links.values(), *self._dialled]

    def _serve(self, source: Link | zmq.Socket) -> None:
        if isinstance(source, Link):
            self._lose(source, f"process {source.pid} ended")
            return
        for _ in range(FRAMES_AT_ONCE):  # a peer that never stops sending must not hold heartbeats up
            if source.closed:
                return
            try:
                frames = source.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._guard(functools.partial(self._receive, source, frames))

    def _receive(self, socket: zmq.Socket, frames: list[bytes]) -> None:
        if socket is self._router:
            link = self._links.get(frames[0])
            if link is None:
                link = self._links[frames[0]] = Link("an unknown peer", frames[0])
            frames = frames[1:]
        else:
            link = next(link for link in self._dialled if link.socket is socket)
        link.last_seen = time.monotonic()
        if len(frames) != 1:
            raise AFDProtocolError(f"a control message of {len(frames)} frames; allowed: 1")
        message = decode(frames[0])
        if not isinstance(message, Heartbeat):
            self._on_message(link, message)

    def _guard(self, action: Callable[[], None]) -> None:
        """A bad frame is counted, and nothing that a peer sends ends the thread."""
        try:
            action()
        except AFDProtocolError as error:
            self.bad_frames += 1
            if self.bad_frames <= LOGGED_BAD_FRAMES or self.bad_frames % 10000 == 0:
                logger.warning("%s: dropped (%d so far): %s", self.name, self.bad_frames, str(error)[:1000])
        except Exception:
            logger.exception("%s: a control message failed", self.name)

    def _beat(self) -> None:
        now, beat = time.monotonic(), encode(Heartbeat())
        stood_still = now - self._last_beat - 2 * HEARTBEAT_S
        self._last_beat = now
        if stood_still > 0:  # this process was stopped: what the others sent meanwhile has not been read yet
            for link in self._all_links():
                link.last_seen += stood_still
        for link in self._all_links():
            silent = now - link.last_seen
            if link.watched:
                self._send(link, beat)
                if silent > self._liveness_s:
                    self._lose(link, f"was silent for {silent:.0f} s")
            elif link.identity is not None and silent > IDLE_S:
                self._close(link)  # it connected and never asked for anything

    def _lose(self, link: Link, reason: str) -> None:
        watched = link.watched and not link.closed
        self._close(link)
        if watched:
            self._guard(lambda: self._on_lost(link, reason))

    def _close(self, link: Link) -> None:
        link.closed, link.watched = True, False
        if link.pidfd >= 0:
            os.close(link.pidfd)
            link.pidfd = -1
        if link.identity is not None:
            self._links.pop(link.identity, None)
        elif link in self._dialled:
            self._dialled.remove(link)
            if link.socket is not None:
                link.socket.close()

    def _release(self) -> None:
        for link in self._all_links():
            self._close(link)
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()
        self._released = True
