# SPDX-License-Identifier: Apache-2.0
"""The attention side of the p2p connector: begins steps, sends rows into the peers' slots, adds up the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from afd_kernels.message import Lane as LaneField
from afd_kernels.message import split_word
from afd_kernels.signal_host import StatusCode
from afd_runtime.config import AFDConfig
from afd_runtime.connectors.attention_checks import check_begin, check_choices, check_exchange, integer_rows
from afd_runtime.connectors.attention_group import Membership
from afd_runtime.connectors.attention_lane import Lane
from afd_runtime.connectors.base import AFDControlPlane
from afd_runtime.control_plane.attention import AttentionControlPlane
from afd_runtime.control_plane.fingerprint import fingerprint
from afd_runtime.control_plane.messages import Announce, StageStep
from afd_runtime.doorbells import Doorbells
from afd_runtime.errors import AFDError, AFDProtocolError, AFDTimeoutError
from afd_runtime.event_log import EventLog
from afd_runtime.metadata import AFDControlPayload
from afd_runtime.protocol import Event
from afd_runtime.window import WindowLayout, placement_of

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


@dataclass
class LayerStats:
    """Sums of one layer on the attention side. rows: of the steps; bytes: over all peers; wait_s: for the replies."""

    exchanges: int = 0
    rows: int = 0
    rows_sent: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    wait_s: float = 0.0


class AttentionSide(AFDControlPlane):
    """One attention rank: its control plane, its lanes, and the two calls of an exchange."""

    def __init__(
        self,
        config: AFDConfig,
        attention_rank: int,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fingerprint_extra: Mapping[str, str],
    ) -> None:
        self.config, self.attention_rank, self.spec, self.device = config, attention_rank, spec, device
        self.placement = placement_of(config, spec)
        self.layout = WindowLayout.of(config, spec, dtype)
        self.peer_ranks = self.placement.peers(attention_rank)
        self.expert_bucket = self.placement.expert_bucket(attention_rank).to(device)
        bells = config.uses_doorbells(device)
        self.doorbells = Doorbells(device, config.num_stages, len(self.peer_ranks)) if bells else None
        self.lanes = [
            Lane(len(self.peer_ranks), self.layout, len(spec.expert_layers), device, stage, self.doorbells)
            for stage in range(config.num_stages)
        ]
        self.stats = {layer: LayerStats() for layer in spec.expert_layers}
        self.timeouts = [0] * config.num_stages  # waits for a reply that ended by their limit, by stage
        self._index = {layer: index for index, layer in enumerate(spec.expert_layers)}
        self._timeout_s, self._reading = config.reply_timeout(device), threading.Lock()
        self._log = EventLog.of(f"A{attention_rank}", words=device.type == "cpu")
        self.group = Membership(
            config, attention_rank, self.placement, self.layout, self.lanes, self.doorbells, device,
            fingerprint(config, spec, dtype, fingerprint_extra, device), self._log,
        )  # fmt: skip

    @property
    def control(self) -> AttentionControlPlane:
        """The control plane of the present session."""
        return self.group.control

    def connect(self) -> None:
        """Joins the group and fills the address tables. The lanes are offline until their first step."""
        if self.device.type == "cuda":
            self._warm_up()
        self.group.attach()

    def close(self) -> None:
        """Gives up the steps that are under way, detaches and frees the windows. Idempotent."""
        for lane in self.lanes:
            self.abort_step("it closes its session", lane.stage)
        self.group.close()

    def _warm_up(self) -> None:
        """Launches every kernel once, offline: a first launch would wait for a kernel that waits for a peer."""
        request, device = self.layout.request, self.device
        for lane in self.lanes:
            lane.go_offline()
            for rows in sorted({1, min(2, request.cap_rows), request.cap_rows}):
                hidden = torch.zeros(rows, request.hidden_size, dtype=request.dtype, device=device)
                ids = torch.zeros(rows, request.top_k, dtype=torch.int32, device=device)
                weights = torch.zeros(rows, request.top_k, dtype=torch.float32, device=device)
                lane.is_first_launch(hidden, ids, weights)
                row_map = lane.dispatch(hidden, ids, weights, self.expert_bucket, 0, 0)
                lane.wait(self._timeout_s, 0)
                lane.combine(row_map, torch.empty_like(hidden))
            lane.forget_warm_up()
        torch.cuda.synchronize(device)

    # -- control plane ---------------------------------------------------------------------------------------------

    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        """Refused: attention ranks announce steps, they do not receive them."""
        raise AFDError(f"attention rank {self.attention_rank} receives no steps; call it on an FFN rank's connector")

    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None:
        """Begins a step in each stage of ``payload`` with this rank's count of rows, as one unit."""
        flags = (payload.is_warmup, payload.is_graph_capturing, payload.is_graph_replaying)
        counts = payload.dp_metadata_list
        self.begin_steps(
            {stage: int(counts[stage].num_tokens_across_dp_cpu[self.attention_rank]) for stage in counts}, flags
        )

    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None:
        """Nothing to do: ``send_dp_metadata_list`` has begun the steps."""

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, num_rows: int, stage: int = 0, flags: tuple[bool, bool, bool] = (False, False, False)) -> None:
        """Begins the next step of one stage, as ``begin_steps`` does."""
        self.begin_steps({stage: num_rows}, flags)

    def begin_steps(
        self,
        rows: Mapping[int, int],
        flags: tuple[bool, bool, bool] = (False, False, False),
        streams: Mapping[int, torch.cuda.Stream] | None = None,
    ) -> None:
        """Begins the next step of each stage in ``rows``: writes the lanes' states and announces all of them at once.

        rows: by stage, each 0 … max_batch_tokens. A refused stage begins none. streams: the stream that each stage runs
        on, where it is not the current one.
        Raises ``AFDCapacityError``, ``AFDPeerLost``, or ``AFDError`` inside a step.
        """
        if not rows:
            raise AFDError("rows is empty; allowed: the rows of one stage or more; name each stage of the forward")
        rows = integer_rows(rows)
        for stage, num_rows in rows.items():
            check_begin(self.lane(stage), num_rows, self.config)
        while not self._begin(rows, flags, streams or {}):
            pass

    def _begin(
        self, rows: Mapping[int, int], flags: tuple[bool, bool, bool], streams: Mapping[int, torch.cuda.Stream]
    ) -> bool:
        """False where the thread of another stage attached anew meanwhile: nothing was begun."""
        control = self.group.reattach_after_loss(next(iter(rows)))
        for stage in rows:
            self.lanes[stage].drain()
            control.begin_step(stage, self.lanes[stage].step + 1)
        with self.group.lock:
            if control is not self.control:
                return False
            for stage, num_rows in rows.items():
                with torch.cuda.stream(streams.get(stage)):
                    self.lanes[stage].begin(control.session, num_rows)
                self.lanes[stage].looked_at = time.monotonic()
                self._note(Event.ANNOUNCE, self.lanes[stage])
            steps = tuple(StageStep(stage, self.lanes[stage].step, num_rows) for stage, num_rows in rows.items())
            control.announce(Announce(steps, *flags))
        return True

    def end_step(self, stage: int = 0) -> None:
        """Ends a step. Raises ``AFDError`` (and gives the step up) where layers are missing."""
        lane = self.lane(stage)
        if lane.rows is None:
            raise AFDError(f"stage {stage} is in no step; call begin_step first")
        if self.device.type == "cuda":  # before any result of the step leaves
            lane.note_stream()
            lane.synchronize()
            self._check_status(lane, stage)
        layers = len(self.spec.expert_layers)
        if lane.layer_index < layers and self.device.type == "cuda":
            lane.layer_index = int(lane.state[LaneField.EXCHANGE])  # what a graph ran, the device has counted
        done = lane.layer_index
        if done < layers:
            self.abort_step(f"it ended after {done} of {layers} exchanged layers", stage)
            raise AFDError(
                f"step {lane.step} of stage {stage} ended after {done} of {layers} exchanged layers; run all of them"
            )
        self._note(Event.END_STEP, lane, done - 1)
        self._leave(lane)

    def _note(self, event: Event, lane: Lane, exchange: int | None = None) -> None:
        """Logs an event of a lane's step, of the exchange that it is in unless given."""
        if self._log is not None and lane.rows is not None:
            place, index = (self.attention_rank, lane.stage), lane.layer_index if exchange is None else exchange
            self._log.note(event, place, lane.step, index, session=self.control.session)

    def _leave(self, lane: Lane) -> None:
        for layer in self.spec.expert_layers[: lane.layer_index]:
            self.stats[layer].exchanges += 1
            self.stats[layer].rows += lane.rows or 0
        lane.rows = lane.row_map = None

    def abort_step(self, reason: str, stage: int = 0) -> None:
        """Gives the stage's step up and tells the peers. Nothing happens outside a step."""
        lane = self.lane(stage)
        if lane.rows is None:
            return
        layers = self.spec.expert_layers
        layer = layers[lane.layer_index] if lane.layer_index < len(layers) else None
        if self.device.type == "cuda":
            lane.note_stream()
            lane.undrained = True
            lane.abort.set()
        self.control.abort(stage, lane.step, reason, layer)
        self._leave(lane)  # last: from here on the thread of another stage may attach anew

    def go_offline(self, stage: int = 0) -> None:
        """An engine profiles, warms up or captures: until ``go_online`` layers send nothing and give zeros.

        Raises ``AFDError`` inside a step and inside a capture.
        """
        lane = self.lane(stage)
        if lane.rows is not None or lane.offline:
            state = "offline already" if lane.offline else f"in step {lane.step}; end it first"
            raise AFDError(f"stage {stage} is {state}")
        if self._is_capturing():
            raise AFDError(f"stage {stage} goes offline inside a graph capture; do it before the capture begins")
        lane.drain()
        lane.go_offline()
        with self._reading:  # a capture that begins now is not disturbed by a thread that reads counters
            lane.offline = True

    def go_online(self, stage: int = 0) -> None:
        """Ends ``go_offline``. The lane takes part again from its next step on."""
        self.lane(stage).offline = False

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def lane(self, stage: int) -> Lane:
        """The lane of a stage. Raises ``AFDError`` outside ``0 … num_stages - 1``."""
        if not 0 <= stage < len(self.lanes):
            raise AFDError(f"stage is {stage}; allowed: 0 … {len(self.lanes) - 1}; num_stages sets it")
        return self.lanes[stage]

    # -- exchanges -------------------------------------------------------------------------------------------------

    def send_attn_output(
        self, hidden: torch.Tensor, *, layer_idx: int, stage: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> None:
        """Writes rows, pairs and weights into the peers' slots and publishes. Checks everything before it writes.

        hidden: [M, H] with M at least the step's rows (the rest is padding). topk_ids: int[M, k]; topk_weights: [M, k].
        """
        lane = self.lane(stage)
        capturing = self._is_capturing()
        check_exchange(lane, hidden, layer_idx, self.spec, self.config, capturing=capturing)
        check_choices(hidden, topk_ids, topk_weights, self.spec.top_k)
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        hidden = hidden.contiguous()
        if self.device.type == "cuda":
            first = lane.is_first_launch(hidden, ids, weights)
            if first and capturing:
                raise AFDError(
                    f"hidden {hidden.dtype}{list(hidden.shape)} at an address of another alignment than before is used "
                    "for the first time inside a graph capture; run the layer once with it before the capture"
                )
        self._note(Event.PUBLISH_REQUEST, lane)
        lane.row_map = lane.dispatch(hidden, ids, weights, self.expert_bucket, layer_idx, self._index[layer_idx])

    def recv_ffn_output(self, ref_tensor: torch.Tensor, *, layer_idx: int, stage: int) -> torch.Tensor:
        """Waits for every peer's reply and adds them up in fp32, in the order of the peers. Returns [M, H].

        On a GPU the wait is the stream's: a failure shows in ``end_step``, and the layers after it give zeros.
        """
        lane = self.lane(stage)
        if lane.row_map is None:
            raise AFDError(f"nothing was sent for layer {layer_idx} of stage {stage}; call send_attn_output first")
        start = time.perf_counter()
        lane.wait(self._timeout_s, self._index[layer_idx])
        if self.device.type == "cpu":
            self.stats[layer_idx].wait_s += time.perf_counter() - start
            self._check_status(lane, stage)
        self._note(Event.SEE_REPLY, lane)
        out = torch.empty_like(ref_tensor, memory_format=torch.contiguous_format)
        row_map, lane.row_map = lane.row_map, None
        lane.combine(row_map, out)
        lane.layer_index += 0 if lane.offline else 1
        if lane.layer_index < len(self.spec.expert_layers):
            self._note(Event.NEXT_EXCHANGE, lane)
        return out

    def _check_status(self, lane: Lane, stage: int) -> None:
        code, peer, expected, observed = lane.status[:4].tolist()
        self.timeouts[stage] += code == StatusCode.TIMEOUT
        if code != StatusCode.OK:
            lane.status.zero_()
            layer = self.spec.expert_layers[split_word(expected)[2]]
            self._fail(lane, code, peer, expected, observed, layer, stage)

    def _fail(self, lane: Lane, code: int, peer: int, expected: int, observed: int, layer: int, stage: int) -> None:
        where: dict[str, Any] = {
            "peer": f"FFN rank {self.peer_ranks[peer]}",
            "layer": layer,
            "stage": stage,
            "step": lane.step,
        }
        try:
            self.control.raise_failure(stage, lane.step, layer)
            if code == StatusCode.TIMEOUT:
                raise AFDTimeoutError(f"sent no reply within {self._timeout_s:g} s", **where)
            if code == StatusCode.PROTOCOL:
                raise AFDProtocolError(
                    f"{where['peer']} answered with the signal word {observed:#x}; expected {expected:#x} (layer "
                    f"{layer}, stage {stage}, step {lane.step})"
                )
            raise AFDError(f"the wait for {where['peer']} was aborted (layer {layer}, stage {stage}, step {lane.step})")
        except AFDError as error:
            lane.row_map = None
            self.abort_step(str(error), stage)
            raise

    def layer_stats(self) -> dict[int, LayerStats]:
        """The sums by layer, from any thread. Reads the device's counters, which ``go_offline`` leaves as last read."""
        with self._reading:
            if self.device.type == "cpu" or not any(lane.offline for lane in self.lanes):
                self._read_counters()
        return self.stats

    def _read_counters(self) -> None:
        sent = sum(lane.sent.cpu() for lane in self.lanes)
        if self.device.type == "cuda":
            waited = sum(lane.clocks[:, 0].cpu() for lane in self.lanes).tolist()  # type: ignore[union-attr]
            for stats, nanoseconds in zip(self.stats.values(), waited, strict=True):
                stats.wait_s = nanoseconds * 1e-9
        for (_, stats), rows in zip(self.stats.items(), sent.tolist(), strict=True):  # type: ignore[union-attr]
            stats.rows_sent = sum(rows)
            exchanges = [stats.exchanges] * len(rows)
            stats.bytes_out = sum(map(self._bytes_out, rows, exchanges))
            stats.bytes_back = sum(map(self._bytes_back, rows, exchanges))

    def _bytes_out(self, rows: int, messages: int) -> int:
        fixed = self.layout.request.bytes_used(0)
        return messages * fixed + self.layout.request.bytes_used(rows) - fixed

    def _bytes_back(self, rows: int, messages: int) -> int:
        fixed = self.layout.reply.bytes_used(0)
        return messages * fixed + self.layout.reply.bytes_used(rows) - fixed
