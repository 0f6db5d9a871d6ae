# SPDX-License-Identifier: Apache-2.0
"""The part that only FFN rank 0 has: who belongs to the group, and which session an attention rank gets.

No lock of its own: the control plane calls it on its watcher thread, inside its lock.
"""

from __future__ import annotations

import logging
import os

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.fingerprint import check_peer
from afd_runtime.control_plane.messages import (
    Fingerprint,
    Hello,
    Message,
    Pending,
    Refused,
    Register,
    Registered,
    Welcome,
)
from afd_runtime.control_plane.transport import Link, Watcher

logger = logging.getLogger("afd_runtime.ffn")

MAX_SESSION = 0xFFFF


class Rendezvous:
    """FFN ranks register here; attention ranks get their session and everybody's endpoint once all have."""

    def __init__(self, config: AFDConfig, fingerprint: Fingerprint, token: str, watcher: Watcher) -> None:
        self.config, self.endpoint = config, ""
        self._fingerprint, self._token, self._watcher = fingerprint, token, watcher
        self._roster: dict[int, tuple[Link, str]] = {}
        self._sessions: dict[Link, tuple[int, int]] = {}  # attention rank, session
        self._waiting: dict[Link, Hello] = {}
        self._last_session = 0

    def send_to_ffn_ranks(self, message: Message) -> None:
        """To every registered FFN rank."""
        for link, _ in self._roster.values():
            self._watcher.send(link, message)

    def links(self) -> list[Link]:
        """Everybody who must learn that this process ends."""
        return [*self._sessions, *self._waiting, *(link for link, _ in self._roster.values())]

    def forget(self, link: Link, reason: str) -> None:
        """This process is gone: its place is free."""
        self._sessions.pop(link, None)
        self._waiting.pop(link, None)
        for ffn_rank, (peer, _) in list(self._roster.items()):
            if peer is link:
                del self._roster[ffn_rank]
                logger.warning("FFN rank %d was lost: %s", ffn_rank, reason)

    def register(self, link: Link, message: Register) -> Refused | None:
        """Takes an FFN rank into the group, or says why not."""
        peer = message.peer
        refusal = check_peer(peer, "FFN", self.config.num_ffn_ranks, self._fingerprint, self._token, "FFN rank 0")
        if refusal is not None:
            return refusal
        if peer.rank == 0 or peer.rank in self._roster:
            pid = self._roster[peer.rank][0].pid if peer.rank else os.getpid()
            return Refused(
                "rank", f"FFN rank {peer.rank} is already here, as process {pid}; choose a free rank, or end it"
            )
        link.name = f"FFN rank {peer.rank}"
        self._roster[peer.rank] = (link, message.endpoint)
        self._watcher.send(link, Registered(os.getpid()))
        self._watcher.watch(link, peer.pid)
        waiting, self._waiting = self._waiting, {}
        for waiter, hello in waiting.items():
            refusal = self.hello(waiter, hello)
            if refusal is not None:
                self._watcher.send(waiter, refusal)
        return None

    def hello(self, link: Link, message: Hello) -> Refused | None:
        """Answers an attention rank: Welcome, Pending while FFN ranks are missing, or why not."""
        peer = message.peer
        size = self.config.num_attention_ranks
        refusal = check_peer(peer, "attention", size, self._fingerprint, self._token, "FFN rank 0")
        if refusal is not None:
            return refusal
        taken = [other for other, (rank, _) in self._sessions.items() if rank == peer.rank and other is not link]
        if taken and not self._watcher.supersede(taken[0], peer.pid):
            return Refused(
                "rank",
                f"attention rank {peer.rank} is already attached, as process {taken[0].pid}; choose a free rank, or "
                "end it",
            )
        link.name = f"attention rank {peer.rank}"
        missing = self.missing()
        if missing:
            self._waiting[link] = message
            self._watcher.send(link, Pending(missing))
            self._watcher.watch(link, peer.pid)
            return None
        endpoints = (self.endpoint, *(self._roster[f][1] for f in range(1, self.config.num_ffn_ranks)))
        session = self._new_session()
        self._sessions[link] = (peer.rank, session)
        self._watcher.send(link, Welcome(session, endpoints, os.getpid()))
        self._watcher.watch(link, peer.pid)
        return None

    def missing(self) -> tuple[int, ...]:
        """The FFN ranks that have not registered."""
        return tuple(f for f in range(1, self.config.num_ffn_ranks) if f not in self._roster)

    def _new_session(self) -> int:
        used = {session for _, session in self._sessions.values()}
        while True:
            self._last_session = self._last_session % MAX_SESSION + 1
            if self._last_session not in used:
                return self._last_session
