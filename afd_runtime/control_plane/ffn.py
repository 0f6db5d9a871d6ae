# SPDX-License-Identifier: Apache-2.0
"""The control plane of one FFN rank.

FFN rank 0 is also the rendezvous, and the sequencer where lanes span FFN ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.cells import AbortCell
from afd_runtime.control_plane.fingerprint import check_peer, machine_id
from afd_runtime.control_plane.lanes import AttachedRank, LaneTable, Member
from afd_runtime.control_plane.messages import (
    Abort,
    Announce,
    Attach,
    Attached,
    Detach,
    Fingerprint,
    Hello,
    LayerTotals,
    Message,
    Order,
    Orders,
    Peer,
    Refused,
    Register,
    Registered,
    Shutdown,
    Stats,
    StatsRequest,
)
from afd_runtime.control_plane.rendezvous import MAX_SESSION, Rendezvous
from afd_runtime.control_plane.sequencer import Sequencer, check_announce
from afd_runtime.control_plane.transport import QUIET_S, Link, Watcher, endpoint_of
from afd_runtime.doorbells import Doorbells, bell_bytes
from afd_runtime.errors import (
    AFDAttachError,
    AFDError,
    AFDProtocolError,
    AFDRefusedError,
    AFDShutdownError,
    AFDStuckError,
)
from afd_runtime.event_log import EventLog
from afd_runtime.protocol import Event
from afd_runtime.topology import ExpertPlacement
from afd_runtime.window import Fabric, Window, WindowLayout

logger = logging.getLogger("afd_runtime.ffn")


class FFNControlPlane:
    """Registers, attaches, orders steps, notices losses. Handlers run on the watcher thread, the rest on the loop's."""

    def __init__(
        self,
        config: AFDConfig,
        ffn_rank: int,
        placement: ExpertPlacement,
        layout: WindowLayout,
        fabric: Fabric,
        fingerprint: Fingerprint,
        totals: Callable[[], dict[int, LayerTotals]],
        doorbells: Doorbells | None = None,
        on_beat: Callable[[], None] | None = None,
        log: EventLog | None = None,
    ) -> None:
        placement.local_experts(ffn_rank)  # checks the rank
        self.config, self.ffn_rank, self.placement = config, ffn_rank, placement
        self.layout, self.fabric, self.doorbells = layout, fabric, doorbells
        self.name = f"FFN rank {ffn_rank}"
        self.endpoint = ""
        self._served = placement.attention_peers(ffn_rank)
        self._fingerprint, self._totals, self._token = fingerprint, totals, config.token()
        self._changed = threading.Condition()
        self._sequencer = Sequencer()
        self._orders: list[deque[Order]] = [deque() for _ in range(config.num_stages)]
        self._begun = 0
        self._stopping: AFDError | None = None
        self.stopping_since: float | None = None  # by time.monotonic
        self._root: Link | None = None
        self._registered: Registered | Refused | None = None
        self._watcher = Watcher(self.name, self._on_message, self._on_lost, config.liveness_timeout_s, on_beat)
        self._log = log
        self.lanes = LaneTable(self.name, self._watcher.send, log)
        self._rendezvous = Rendezvous(config, fingerprint, self._token, self._watcher) if ffn_rank == 0 else None
        self._handlers: dict[type, Callable] = {
            Register: self._on_newcomer, Registered: self._on_registered, Refused: self._on_registered,
            Hello: self._on_newcomer, Attach: self._on_attach, Announce: self._on_announce, Orders: self._on_orders,
            Abort: self._on_abort, Detach: self._on_detach, StatsRequest: self._on_stats, Shutdown: self._on_shutdown,
        }  # fmt: skip

    @property
    def bad_frames(self) -> int:
        """Control frames that were dropped because they were no message, or no message for this place."""
        return self._watcher.bad_frames

    @property
    def not_ready(self) -> str | None:
        """Why attention ranks cannot attach now, in one line; None where they can. Takes no lock."""
        if self._stopping is not None:
            return str(self._stopping)
        if not self.endpoint:
            return f"{self.name} has not bound its port yet"
        if self._rendezvous is None:
            return None if isinstance(self._registered, Registered) else f"{self.name} waits for FFN rank 0"
        missing = self._rendezvous.missing()
        return f"FFN rank(s) {', '.join(map(str, missing))} have not registered yet" if missing else None

    # -- from the server's threads --------------------------------------------------------------------------------

    def start(self) -> None:
        """Binds; an FFN rank past 0 registers at FFN rank 0. Raises ``AFDRefusedError`` or ``AFDAttachError``."""
        port = self.config.port if self.ffn_rank == 0 else 0
        try:
            self.endpoint = self._watcher.bind(self.config.listen_host, port)
        except AFDError:
            self._watcher.stop()
            raise
        if self._rendezvous is not None:
            self._rendezvous.endpoint = self.endpoint
            self._watcher.start()
            return
        self._watcher.start()
        root = endpoint_of(self.config.host, self.config.port)
        me = Peer(self.ffn_rank, os.getpid(), machine_id(), self._fingerprint, self._token)
        try:
            self._root = self._watcher.connect("FFN rank 0", root)
        except AFDError:
            self._watcher.stop()
            raise
        self._watcher.send(self._root, Register(me, self.endpoint))
        answer = self._await_registered(root)
        if isinstance(answer, Registered):
            return
        self._watcher.stop()
        if isinstance(answer, Refused):
            raise AFDRefusedError(answer.field, answer.message)
        raise AFDAttachError(
            f"FFN rank 0 at {root} did not answer within attach_timeout_s={self.config.attach_timeout_s:g}; start "
            "it, or correct host and port"
        )

    def _await_registered(self, root: str) -> Registered | Refused | None:
        """The answer of FFN rank 0, or None after ``attach_timeout_s``."""
        limit = self.config.attach_timeout_s
        quiet = min(QUIET_S, limit)
        with self._changed:
            if not self._changed.wait_for(lambda: self._registered is not None, quiet):
                logger.warning("%s waits for FFN rank 0 at %s, for %.0f s at most", self.name, root, limit - quiet)
                self._changed.wait_for(lambda: self._registered is not None, limit - quiet)
            return self._registered

    def next_orders(self, stage: int | None = None) -> tuple[Order, ...]:
        """Waits for the next step of ``stage``: one order. None: for the next unit, all of its orders.

        Raises ``AFDShutdownError`` once a stop was asked for, ``AFDError`` where FFN rank 0 was lost; but before that
        come the steps of units that another stage has begun, because their ranks may wait in this stage.
        """
        with self._changed:
            while True:
                orders = self._dequeue(stage)
                if orders:
                    self._begun = max(self._begun, orders[0].number)
                    return orders
                if self._stopping is not None:
                    raise self._stopping
                unit = self._sequencer.take(stage)
                if not unit:
                    self._changed.wait()
                    continue
                if self._rendezvous is not None and self.placement.kind == "sharded":
                    self._rendezvous.send_to_ffn_ranks(Orders(unit))
                self._enqueue(unit)

    def _dequeue(self, stage: int | None) -> tuple[Order, ...]:
        queues = self._orders if stage is None else [self._orders[stage]]
        number = min((queue[0].number for queue in queues if queue), default=None)
        if number is None or (self._stopping is not None and number > self._begun):
            return ()
        return tuple(queue.popleft() for queue in queues if queue and queue[0].number == number)

    def _enqueue(self, unit: tuple[Order, ...]) -> None:
        for order in unit:
            self._orders[order.stage].append(order)
        self._changed.notify_all()

    def enter_step(self, order: Order, abort: AbortCell) -> list[Member]:
        """The lanes of ``order`` that are served here and still in it; from now on a loss among them sets its flag."""
        with self._changed:
            return self.lanes.enter(order, abort, self._served)

    def take_losses(self, stage: int) -> list[tuple[int, str]]:
        """(attention rank, why) of the lanes that left the active step; the loop touches their slots no more."""
        with self._changed:
            return self.lanes.take_losses(stage)

    def is_abandoned(self, stage: int) -> bool:
        """Whether the stage is in a step that every lane has left."""
        with self._changed:
            return self.lanes.is_abandoned(stage)

    def drop(self, stage: int, attention_rank: int, reason: str, layer: int | None) -> None:
        """Takes a lane out of the active step and tells its attention rank why."""
        with self._changed:
            self.lanes.drop(stage, attention_rank, reason, layer)

    def leave_step(self, stage: int) -> None:
        """The loop is done with the active step of this stage."""
        with self._changed:
            self.lanes.leave(stage)

    def request_stop(self) -> None:
        """Asks for a stop from a signal handler: takes no lock."""
        self._watcher.post(lambda: self.stop_serving("it was asked to stop"))

    def stop_serving(self, reason: str, error: AFDError | None = None, *, failed: bool = False) -> None:
        """No further unit begins; one that a stage has begun goes on in all of its stages.

        error: what ``next_orders`` raises from then on. failed: a stage is not served any more, so peers are told now.
        """
        with self._changed:
            if failed:  # also where a stop was asked for before
                self._tell_peers(reason)
            self._begin_stop(error or AFDShutdownError(f"{self.name} ends: {reason}"))

    def _begin_stop(self, error: AFDError) -> None:
        """Inside the lock. The first reason stays."""
        if self._stopping is None:
            self._stopping, self.stopping_since = error, time.monotonic()
        self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Tells every peer, waits until that has been sent, frees the windows. Idempotent."""
        self.stop_serving(reason)
        with self._changed:
            self._tell_peers(reason)
        self._watcher.stop()
        for lane in self.lanes.ranks.values():
            self._note(Event.DETACH, lane)
            lane.close()
        self.lanes.ranks.clear()
        if not isinstance(self._stopping, AFDStuckError):  # freeing would wait for the kernel that does not end
            self.fabric.collect()

    def _tell_peers(self, reason: str) -> None:
        links = [lane.link for lane in self.lanes.ranks.values()]
        links += self._rendezvous.links() if self._rendezvous is not None else []
        for link in dict.fromkeys(links):
            self._watcher.send(link, Shutdown(reason))

    # -- on the watcher thread -------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise AFDProtocolError(f"{link.name} sent {type(message).__name__}, which an FFN rank does not receive")
        with self._changed:
            handler(link, message)

    def _on_lost(self, link: Link, reason: str) -> None:
        with self._changed:
            if link is self._root:
                self._begin_stop(AFDError(f"{self.name} ends: FFN rank 0 was lost: {reason}"))
            self._leave(link, reason)
            self._changed.notify_all()

    def _leave(self, link: Link, reason: str) -> None:
        if self._rendezvous is not None:
            self._rendezvous.forget(link, reason)
        for lane in list(self.lanes.ranks.values()):
            if lane.link is link:
                self._sequencer.withdraw(lane.attention_rank, lane.session)
                self.lanes.forget(lane, reason)

    def _refuse(self, link: Link, refusal: Refused) -> None:
        logger.warning("%s refused %s: %s", self.name, link.name, refusal.message)
        self._watcher.send(link, refusal)

    def _on_newcomer(self, link: Link, message: Register | Hello) -> None:
        self._watcher.lose_ended()
        if self._rendezvous is None:
            refusal: Refused | None = Refused("rank", f"{self.name} is not the rendezvous; connect to FFN rank 0")
        elif isinstance(message, Register):
            refusal = self._rendezvous.register(link, message)
        else:
            refusal = self._rendezvous.hello(link, message)
        if refusal is not None:
            self._refuse(link, refusal)

    def _on_registered(self, link: Link, message: Registered | Refused) -> None:
        if link is not self._root:
            raise AFDProtocolError(f"{link.name} sent {type(message).__name__}, which only FFN rank 0 sends")
        if isinstance(message, Registered):
            self._watcher.watch(link, message.pid)
        self._registered = message
        self._changed.notify_all()

    def _attach_refusal(self, message: Attach) -> Refused | None:
        peer, size = message.peer, self.config.num_attention_ranks
        refusal = check_peer(peer, "attention", size, self._fingerprint, self._token, self.name)
        if refusal is not None:
            return refusal
        if peer.rank not in self._served:
            return Refused(
                "placement", f"{self.name} does not serve attention rank {peer.rank}; it serves {list(self._served)}"
            )
        if not 1 <= message.session <= MAX_SESSION:
            return Refused("session", f"session is {message.session}; allowed: 1 … {MAX_SESSION}")
        lane = self.lanes.ranks.get(peer.rank)
        if lane is not None and not self._watcher.supersede(lane.link, peer.pid):
            return Refused("rank", f"attention rank {peer.rank} is already attached to {self.name}; end that process")
        return None

    def _on_attach(self, link: Link, message: Attach) -> None:
        self._watcher.lose_ended()
        peer, refusal = message.peer, self._attach_refusal(message)
        if refusal is not None:
            return self._refuse(link, refusal)
        with contextlib.ExitStack() as refused:
            try:
                reply = self.fabric.open(message.reply_handle, self.layout.reply_nbytes)
                refused.callback(reply.close)
                request = self.fabric.allocate(self.layout.request_nbytes)
                refused.callback(request.close)
                bells = self._open_bells(message)
            except AFDError as error:
                return self._refuse(link, Refused("window", f"{self.name}: {error}"))
            refused.pop_all()
        link.name = f"attention rank {peer.rank}"
        none = [-1] * self.config.num_stages
        lane = AttachedRank(peer.rank, message.session, link, request, reply, none, list(none), bells=bells)
        self.lanes.ranks[peer.rank] = lane
        self._note(Event.ATTACH, lane)
        self._watcher.watch(link, peer.pid)
        own_bells = None if self.doorbells is None else self.doorbells.handle
        self._watcher.send(link, Attached(self.ffn_rank, os.getpid(), request.handle, own_bells))
        logger.info(
            "%s: attention rank %d attached (session %d, process %d, windows %d + %d bytes)",
            self.name, peer.rank, message.session, peer.pid, self.layout.request_nbytes, self.layout.reply_nbytes,
        )  # fmt: skip
        return None

    def _note(self, event: Event, lane: AttachedRank) -> None:
        if self._log is not None:
            self._log.note_stages(event, lane.attention_rank, lane.announced, session=lane.session)

    def _open_bells(self, message: Attach) -> Window | None:
        if self.doorbells is None or message.bells is None:
            return None
        peers = len(self.placement.peers(message.peer.rank))
        return self.fabric.open(message.bells, bell_bytes(self.config.num_stages, peers))

    def _on_announce(self, link: Link, message: Announce) -> None:
        lane = self.lanes.of(link)
        if self.placement.sequencer(lane.attention_rank) != self.ffn_rank:
            raise AFDProtocolError(f"{link.name} announces to {self.name}, which is not its sequencer")
        check_announce(link.name, message, lane.announced, self.config.max_batch_tokens)
        for step in message.stages:
            lane.announced[step.stage] = step.lane_step
        alive = tuple(step for step in message.stages if lane.in_step(step.stage, step.lane_step))
        self._sequencer.announce(lane.attention_rank, lane.session, msgspec.structs.replace(message, stages=alive))
        self._changed.notify_all()

    def _on_orders(self, link: Link, message: Orders) -> None:
        if link is not self._root:
            raise AFDProtocolError(f"{link.name} sent Orders, which only FFN rank 0 sends")
        for order in message.orders:
            self._check_stage(order.stage)
            for participant in order.participants:
                if not 0 <= participant.attention_rank < self.config.num_attention_ranks:
                    raise AFDProtocolError(f"{link.name} ordered a step of attention rank {participant.attention_rank}")
        self._enqueue(message.orders)

    def _on_abort(self, link: Link, message: Abort) -> None:
        lane = self.lanes.of(link)
        self._check_stage(message.stage)
        self._sequencer.withdraw(lane.attention_rank, lane.session, message.stage, message.lane_step)
        self.lanes.give_up(lane, message)
        logger.warning("%s: %s gave up step %d: %s", self.name, link.name, message.lane_step, message.reason)

    def _on_detach(self, link: Link, message: Detach) -> None:
        self._leave(link, "detached")
        self._watcher.send(link, message)
        self._watcher.close_link(link)

    def _on_stats(self, link: Link, message: StatsRequest) -> None:
        self.lanes.of(link)
        self._watcher.send(link, Stats(self.ffn_rank, self._totals()))

    def _on_shutdown(self, link: Link, message: Shutdown) -> None:
        if link is not self._root:
            raise AFDProtocolError(f"{link.name} sent Shutdown, which only FFN rank 0 sends here")
        self._begin_stop(AFDShutdownError(f"FFN rank 0 ends: {message.reason}"))

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.config.num_stages:
            raise AFDProtocolError(f"stage is {stage}; allowed: 0 … {self.config.num_stages - 1}")
