# SPDX-License-Identifier: Apache-2.0
"""The control plane of one attention rank: joins the group, announces steps, learns of losses and aborts."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.cells import AbortCell
from afd_runtime.control_plane.fingerprint import machine_id
from afd_runtime.control_plane.messages import (
    Abort,
    Aborted,
    Announce,
    Attach,
    Attached,
    Detach,
    Fingerprint,
    Hello,
    Message,
    Peer,
    Pending,
    Refused,
    Shutdown,
    Stats,
    StatsRequest,
    Welcome,
)
from afd_runtime.control_plane.transport import QUIET_S, Link, Watcher, endpoint_of
from afd_runtime.doorbells import Doorbells, bell_bytes
from afd_runtime.errors import AFDAttachError, AFDError, AFDPeerLost, AFDProtocolError, AFDRefusedError, AFDStepAborted
from afd_runtime.event_log import EventLog
from afd_runtime.protocol import Event
from afd_runtime.topology import ExpertPlacement
from afd_runtime.window import Fabric, Window, WindowLayout

logger = logging.getLogger("afd_runtime.attention")

T = TypeVar("T")
_DETACH_S = 2.0


@dataclass(eq=False)
class AttachedPeer:
    """One FFN rank that this attention rank exchanges messages with."""

    ffn_rank: int
    link: Link
    request: Window
    reply: Window
    bells: Window | None = None

    def close(self) -> None:
        self.request.close()
        self.reply.close()
        if self.bells is not None:
            self.bells.close()


class AttentionControlPlane:
    """``aborts``: one abort cell per stage, set when a wait of that stage cannot succeed any more."""

    def __init__(
        self,
        config: AFDConfig,
        attention_rank: int,
        placement: ExpertPlacement,
        layout: WindowLayout,
        fabric: Fabric,
        fingerprint: Fingerprint,
        aborts: list[AbortCell],
        doorbells: Doorbells | None = None,
        on_beat: Callable[[], None] | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.config, self.attention_rank, self.placement = config, attention_rank, placement
        self.layout, self.fabric, self.aborts, self.doorbells = layout, fabric, aborts, doorbells
        self._log = log
        self.name = f"attention rank {attention_rank}"
        self.session = 0
        self.peers: list[AttachedPeer] = []
        self._peer_ranks = placement.peers(attention_rank)
        self._me = Peer(attention_rank, os.getpid(), machine_id(), fingerprint, config.token())
        self._changed = threading.Condition()
        self._inbox: queue.Queue[tuple[Link, Message | str]] = queue.Queue()
        self._asking, self._totals = threading.Lock(), queue.Queue[Stats]()
        self._links: dict[int, Link] = {}
        self._lost: dict[Link, str] = {}
        self._current = [-1] * config.num_stages
        self._aborted: list[tuple[Link, Abort] | None] = [None] * config.num_stages
        self._unconfirmed: list[set[Link]] = [set() for _ in range(config.num_stages)]
        self._closed = False
        self._attach_s = config.attach_timeout_s
        self._watcher = Watcher(self.name, self._on_message, self._on_lost, config.liveness_timeout_s, on_beat)

    # -- joining ---------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float | None = None) -> list[AttachedPeer]:
        """Says hello to FFN rank 0 and attaches to each of this rank's FFN ranks.

        timeout_s: None is ``attach_timeout_s``.

        Raises ``AFDRefusedError`` (with the field that differs) or ``AFDAttachError``; then nothing is left open.
        """
        self._attach_s = self.config.attach_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + self._attach_s
        self._watcher.start()
        try:
            root = self._dial(0, endpoint_of(self.config.host, self.config.port))
            self._watcher.send(root, Hello(self._me))
            welcome = self._answer(root, Welcome, deadline)
            self._watcher.watch(root, welcome.pid)
            self.session = welcome.session
            for ffn_rank in self._peer_ranks:
                link = root if ffn_rank == 0 else self._dial(ffn_rank, welcome.endpoints[ffn_rank])
                self.peers.append(self._attach(ffn_rank, link, deadline))
                self._note_attach(ffn_rank)
        except BaseException:
            self.close()
            raise
        return self.peers

    def _dial(self, ffn_rank: int, endpoint: str) -> Link:
        link = self._links[ffn_rank] = self._watcher.connect(f"FFN rank {ffn_rank} at {endpoint}", endpoint)
        return link

    def _attach(self, ffn_rank: int, link: Link, deadline: float) -> AttachedPeer:
        opened = [self.fabric.allocate(self.layout.reply_nbytes)]
        own_bells = None if self.doorbells is None else self.doorbells.handle
        try:
            self._watcher.send(link, Attach(self._me, self.session, opened[0].handle, own_bells))
            attached = self._answer(link, Attached, deadline)
            if attached.ffn_rank != ffn_rank:
                raise AFDProtocolError(f"{link.name} says that it is FFN rank {attached.ffn_rank}")
            self._watcher.watch(link, attached.pid)
            opened.append(self.fabric.open(attached.request_handle, self.layout.request_nbytes))
            bells = None
            if self.doorbells is not None and attached.bells is not None:
                served = len(self.placement.attention_peers(ffn_rank))
                bells = self.fabric.open(attached.bells, bell_bytes(self.config.num_stages, served))
        except BaseException:
            for window in opened:
                window.close()
            raise
        link.name = f"FFN rank {ffn_rank}"
        reply, request = opened
        return AttachedPeer(ffn_rank, link, request, reply, bells)

    def _answer(self, link: Link, kind: type[T], deadline: float) -> T:
        missing: tuple[int, ...] = ()
        until = min(deadline, time.monotonic() + QUIET_S)
        while True:
            try:
                sender, message = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if until < deadline:
                    until = deadline
                    absent = f"FFN rank(s) {', '.join(map(str, missing))}" if missing else link.name
                    seconds = max(0.0, deadline - time.monotonic())
                    logger.warning("%s waits for %s, for %.0f s at most", self.name, absent, seconds)
                    continue
                limit = f"within {self._attach_s:g} s"
                if missing:
                    ranks = ", ".join(map(str, missing))
                    raise AFDAttachError(
                        f"FFN rank(s) {ranks} did not register with {link.name} {limit}; start them"
                    ) from None
                raise AFDAttachError(
                    f"{link.name} did not answer {limit}; start it, or correct host and port"
                ) from None
            if isinstance(message, Refused):
                raise AFDRefusedError(message.field, message.message)
            if isinstance(message, str):
                raise AFDAttachError(f"{sender.name} {message} while {self.name} attached; start it again")
            if sender is link and isinstance(message, Pending):
                missing = message.missing
                self._watcher.watch(link)  # its heartbeats keep the place while FFN ranks load
            elif sender is link and isinstance(message, kind):
                return message

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, stage: int, lane_step: int) -> None:
        """Makes ``lane_step`` the stage's current step, after every peer has let go of an aborted one before it.

        Raises ``AFDPeerLost`` where a peer is gone, ``AFDError`` where one does not confirm.
        """
        with self._changed:
            limit = self.config.reply_timeout_s or self.config.peer_timeout_s
            self._changed.wait_for(lambda: not self._unconfirmed[stage] or bool(self._lost), limit)
            self._raise_lost(stage, lane_step, None)
            if self._unconfirmed[stage]:
                names = ", ".join(sorted(link.name for link in self._unconfirmed[stage]))
                raise AFDError(
                    f"{names} did not confirm the end of the aborted step before step {lane_step} within {limit:g} s"
                )
            self._current[stage], self._aborted[stage] = lane_step, None
            self.aborts[stage].clear()

    def announce(self, announce: Announce) -> None:
        """Tells the sequencer of this rank that a step begins."""
        self._watcher.send(self._links[self.placement.sequencer(self.attention_rank)], announce)

    def abort(self, stage: int, lane_step: int, reason: str, layer: int | None) -> None:
        """Tells every living peer that this lane gives its step up."""
        with self._changed:
            for peer in self.peers:
                self._note_abort(peer, stage, lane_step)
                if peer.link not in self._lost:
                    self._unconfirmed[stage].add(peer.link)
                    self._watcher.send(peer.link, Abort(stage, lane_step, reason[:4096], layer))

    def raise_failure(self, stage: int, lane_step: int, layer: int | None) -> None:
        """Raises what made the abort cell of this stage be set; returns where nothing did."""
        with self._changed:
            self._raise_lost(stage, lane_step, layer)
            aborted = self._aborted[stage]
            if aborted is not None:
                link, message = aborted
                raise AFDStepAborted(
                    f"gave the step up: {message.reason}", peer=link.name, layer=layer, stage=stage, step=lane_step
                )

    def _raise_lost(self, stage: int, lane_step: int, layer: int | None) -> None:
        for link, reason in self._lost.items():
            raise AFDPeerLost(f"was lost: {reason}", peer=link.name, layer=layer, stage=stage, step=lane_step)

    @property
    def loss(self) -> tuple[str, str] | None:
        """(name, why) of the first peer that was lost, or None."""
        with self._changed:
            return next(((link.name, reason) for link, reason in self._lost.items()), None)

    def stats(self, timeout_s: float = 2.0) -> dict[int, Stats]:
        """The totals of each living peer, by FFN rank, from any thread. One that does not answer in time is missing."""
        with self._asking:
            return self._ask_for_stats(timeout_s)

    def _ask_for_stats(self, timeout_s: float) -> dict[int, Stats]:
        found: dict[int, Stats] = {}
        asked = [peer for peer in self.peers if peer.link not in self._lost]
        for peer in asked:
            self._watcher.send(peer.link, StatsRequest())
        deadline = time.monotonic() + timeout_s
        while len(found) < len(asked):
            try:
                answer = self._totals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            found[answer.ffn_rank] = answer
        return found

    def close(self) -> None:
        """Detaches from every FFN rank that has let go of the last step, frees the windows. Idempotent.

        Waits a moment for each of the two confirmations.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # FFN ranks that have not let go of a step may still write replies into the windows
            self._changed.wait_for(lambda: not any(self._unconfirmed), _DETACH_S)
            waiting = [link for link in self._links.values() if link not in self._lost]
            for link in waiting:
                self._watcher.send(link, Detach())
        deadline = time.monotonic() + (_DETACH_S if self.session else 0.0)
        while waiting:
            with contextlib.suppress(ValueError):
                try:
                    sender, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if isinstance(message, (Detach, str)):
                    waiting.remove(sender)
        self._watcher.stop()
        for peer in self.peers:
            self._note_detach(peer)
            peer.close()
        self.fabric.collect()

    # -- on the watcher thread -------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Shutdown):
            self._lose(link, f"it shut down ({message.reason})")
        elif isinstance(message, (Abort, Aborted)):
            if not 0 <= message.stage < self.config.num_stages:
                raise AFDProtocolError(f"stage is {message.stage}; allowed: 0 … {self.config.num_stages - 1}")
            self._on_step_end(link, message)
        elif isinstance(message, Stats):
            self._totals.put(message)
        elif isinstance(message, (Welcome, Pending, Attached, Refused, Detach)):
            self._inbox.put((link, message))
        else:
            raise AFDProtocolError(
                f"{link.name} sent {type(message).__name__}, which an attention rank does not receive"
            )

    def _on_step_end(self, link: Link, message: Abort | Aborted) -> None:
        with self._changed:
            if message.lane_step != self._current[message.stage]:
                return
            if isinstance(message, Aborted):
                self._note_confirm(link, message)
                self._unconfirmed[message.stage].discard(link)
            else:
                self._aborted[message.stage] = (link, message)
                self.aborts[message.stage].set()
            self._changed.notify_all()

    def _on_lost(self, link: Link, reason: str) -> None:
        self._lose(link, reason)

    def _lose(self, link: Link, reason: str) -> None:
        with self._changed:
            if link not in self._links.values():
                return
            if self.peers and link is self._links.get(0) and 0 not in self._peer_ranks:
                return  # the rendezvous of a group whose replicated FFN ranks serve without it
            self._lost.setdefault(link, reason)
            for abort, unconfirmed in zip(self.aborts, self._unconfirmed, strict=True):
                abort.set()
                unconfirmed.discard(link)
            self._changed.notify_all()
        self._inbox.put((link, reason))

    # -- event log -------------------------------------------------------------------------------------------------

    def _note_attach(self, ffn_rank: int) -> None:
        if self._log is not None:
            self._log.note_stages(
                Event.ATTACH, self.attention_rank, [0] * len(self._current), session=self.session, peer=ffn_rank
            )

    def _note_abort(self, peer: AttachedPeer, stage: int, lane_step: int) -> None:
        """What the end of a step means for one peer: it was lost, or it has to confirm."""
        if self._log is not None and not self._closed:
            lane, where = (self.attention_rank, stage), {"session": self.session, "peer": peer.ffn_rank}
            if peer.link in self._lost:
                self._log.note_loss(lane, lane_step, **where)
            else:
                self._log.note(Event.ABORT, lane, lane_step, 0, **where)

    def _note_confirm(self, link: Link, message: Aborted) -> None:
        if self._log is not None and link in self._unconfirmed[message.stage]:
            ffn_rank = next(peer.ffn_rank for peer in self.peers if peer.link is link)
            lane = (self.attention_rank, message.stage)
            self._log.note(Event.CONFIRM, lane, message.lane_step, 0, session=self.session, peer=ffn_rank)

    def _note_detach(self, peer: AttachedPeer) -> None:
        if self._log is not None:
            for stage, lane_step in enumerate(self._current):
                if peer.link in self._lost:
                    lane = (self.attention_rank, stage)
                    self._log.note_loss(lane, lane_step, session=self.session, peer=peer.ffn_rank)
            self._log.note_stages(
                Event.DETACH, self.attention_rank, self._current, session=self.session, peer=peer.ffn_rank
            )
