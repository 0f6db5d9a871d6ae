# SPDX-License-Identifier: Apache-2.0
"""An attention rank's place in its group: attaches, fills the lanes' address tables, and attaches anew after a loss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.attention_lane import Lane
from afd_runtime.control_plane.attention import AttachedPeer, AttentionControlPlane
from afd_runtime.control_plane.messages import Fingerprint
from afd_runtime.doorbells import BELL_PATIENCE_S, Doorbells, bell_offset
from afd_runtime.errors import AFDError, AFDPeerLost, AFDRefusedError
from afd_runtime.event_log import EventLog
from afd_runtime.topology import ExpertPlacement
from afd_runtime.window import WindowLayout, create_fabric

logger = logging.getLogger("afd_runtime.attention")


class Membership:
    """One attention rank in its group. control: of the present session; lock: holds it, and steps that begin in it."""

    def __init__(
        self, config: AFDConfig, attention_rank: int, placement: ExpertPlacement, layout: WindowLayout,
        lanes: Sequence[Lane], doorbells: Doorbells | None, device: torch.device, fingerprint: Fingerprint,
        log: EventLog | None,
    ) -> None:  # fmt: skip
        self.config, self.attention_rank, self.placement, self.layout = config, attention_rank, placement, layout
        self.lanes, self.doorbells, self.device, self.lock = lanes, doorbells, device, threading.RLock()
        self._fabric, self._fingerprint, self._log = create_fabric(config, device), fingerprint, log
        self._detached: tuple[str, str] | None = None
        self._closed = False
        self.control = self._new_control()

    def _new_control(self) -> AttentionControlPlane:
        return AttentionControlPlane(
            self.config, self.attention_rank, self.placement, self.layout, self._fabric, self._fingerprint,
            [lane.abort for lane in self.lanes], self.doorbells, self._watch_steps, self._log,
        )  # fmt: skip

    def attach(self, timeout_s: float | None = None) -> None:
        """Joins the group and fills the address tables. timeout_s: None is ``attach_timeout_s``."""
        peers = self.control.connect(timeout_s)
        for stage, lane in enumerate(self.lanes):
            lane.set_peers(
                [peer.request.address + stage * self.layout.request_stride for peer in peers],
                [peer.reply.address + stage * self.layout.reply_stride for peer in peers],
                [self._bell_at(peer, stage) for peer in peers],
            )
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _bell_at(self, peer: AttachedPeer, stage: int) -> int:
        """Address of the FFN rank's doorbell for this rank's requests, 0 where there is none."""
        if peer.bells is None:
            return 0
        served = self.placement.attention_peers(peer.ffn_rank)
        return peer.bells.address + bell_offset(stage, served.index(self.attention_rank), len(served))

    def close(self) -> None:
        """Leaves the group for good. Launches under way end first, while the watcher still opens their doorbells."""
        with self.lock:
            self._closed = True
            for lane in self.lanes:
                lane.drain()
            self.control.close()

    def _check_open(self) -> None:
        if self._closed:
            raise AFDError(f"attention rank {self.attention_rank} has closed its session; connect a new one")

    def reattach(self, timeout_s: float | None = None) -> None:
        """Leaves the group and joins it anew: a new session, new windows, the same tables, so captured graphs go on.

        timeout_s: None is ``attach_timeout_s``. Raises ``AFDError`` inside a step, ``AFDAttachError`` where the group
        is not complete in time, ``AFDRefusedError``; the next step tries again.
        """
        with self.lock:
            self._check_open()
            busy = [lane.stage for lane in self.lanes if lane.rows is not None]
            if busy:
                raise AFDError(f"stage {busy[0]} is in step {self.lanes[busy[0]].step}; end or abort it first")
            for lane in self.lanes:
                lane.drain()
            self._detached = self._detached or self.control.loss or ("the group", "this rank left it")
            self.control.close()
            self.control = self._new_control()
            self.attach(timeout_s)
            self._detached = None

    def reattach_after_loss(self, stage: int) -> AttentionControlPlane:
        """At the start of a step: where a peer was lost, tries once to attach anew. Returns the session's control.

        Raises ``AFDPeerLost`` with the loss where the group is not complete within ``reattach_timeout_s``.
        """
        with self.lock:  # the thread of another stage may be at it
            self._check_open()
            loss = self._detached or self.control.loss
            if loss is not None and all(lane.rows is None for lane in self.lanes):
                self._reattach_or_raise(stage, *loss)
            return self.control

    def _reattach_or_raise(self, stage: int, name: str, why: str) -> None:
        lost: dict[str, Any] = {"peer": name, "layer": None, "stage": stage, "step": self.lanes[stage].step + 1}
        if self.config.reattach_timeout_s == 0:
            raise AFDPeerLost(f"was lost: {why}", **lost)
        try:
            self.reattach(self.config.reattach_timeout_s)
        except AFDRefusedError:  # it names what to change
            raise
        except AFDError as error:
            raise AFDPeerLost(f"was lost: {why}; attaching anew failed: {error}", **lost) from error
        logger.info("attention rank %d attached anew after %s was lost: %s", self.attention_rank, name, why)

    def _watch_steps(self) -> None:
        """On the watcher thread, with each heartbeat: no stream waits for a doorbell without end."""
        now = time.monotonic()
        for lane in self.lanes:
            busy = lane.rows is not None or lane.undrained
            if self.doorbells is not None and busy and now - lane.looked_at > BELL_PATIENCE_S:
                lane.looked_at = now
                lane.open_bells()
