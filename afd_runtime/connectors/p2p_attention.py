# SPDX-License-Identifier: Apache-2.0
"""The attention side of the p2p connector: begins steps, sends rows into the peers' slots, adds up the replies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import afd_kernels
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, split_word
from afd_kernels.signal import StatusCode
from afd_kernels.step import begin_step
from afd_runtime.config import AFDConfig
from afd_runtime.connectors.base import AFDControlPlane
from afd_runtime.control_plane.attention import AttentionControlPlane
from afd_runtime.control_plane.cells import AbortCell, status_cells
from afd_runtime.control_plane.fingerprint import fingerprint
from afd_runtime.control_plane.messages import Announce
from afd_runtime.errors import AFDCapacityError, AFDError, AFDProtocolError, AFDTimeoutError
from afd_runtime.metadata import AFDControlPayload
from afd_runtime.window import WindowLayout, create_fabric, placement_of

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


class Lane:
    """One stage of this attention rank.

    slots, reply_slots: int64[D] for D peers. state: int64[8]. status: int64[8] in host memory. workspace: of dispatch.
    sent: int64[layers, D], rows sent so far. step: of this lane, from 0; rows: of the step, None between steps;
    layer_index: exchanged layers that were sent.
    """

    def __init__(self, num_peers: int, layout: WindowLayout, num_layers: int, device: torch.device) -> None:
        nbytes = afd_kernels.dispatch_workspace(layout.request.cap_rows, layout.request, num_peers)
        self.workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        self.sent = torch.zeros(num_layers, num_peers, dtype=torch.int64, device=device)
        self.slots = torch.zeros(num_peers, dtype=torch.int64, device=device)
        self.reply_slots = torch.zeros(num_peers, dtype=torch.int64, device=device)
        self.state = torch.zeros(LANE_FIELDS, dtype=torch.int64, device=device)
        self.abort = AbortCell(device)
        self.status = status_cells(device)
        self.row_map: torch.Tensor | None = None
        self.step = -1
        self.rows: int | None = None
        self.layer_index = 0


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
        self.lanes = [
            Lane(len(self.peer_ranks), self.layout, len(spec.expert_layers), device) for _ in range(config.num_stages)
        ]
        self.stats = {layer: LayerStats() for layer in spec.expert_layers}
        self._timeout_s = config.reply_timeout(device)
        self.control = AttentionControlPlane(
            config, attention_rank, self.placement, self.layout, create_fabric(config, device),
            fingerprint(config, spec, dtype, fingerprint_extra), [lane.abort for lane in self.lanes],
        )  # fmt: skip

    def connect(self) -> None:
        """Joins the group and fills the address tables. The lanes are offline until their first step."""
        if self.device.type == "cuda":
            self._warm_up()
        for index, peer in enumerate(self.control.connect()):
            for stage, lane in enumerate(self.lanes):
                lane.slots[index] = peer.request.address + stage * self.layout.request_stride
                lane.reply_slots[index] = peer.reply.address + stage * self.layout.reply_stride

    def _warm_up(self) -> None:
        """Launches every kernel once, offline: a first launch would wait for a kernel that waits for a peer."""
        request, device = self.layout.request, self.device
        for lane in self.lanes:
            begin_step(lane.state, session=1, step=0, rows=0, mode=MODE_OFFLINE)
            for rows in (1, min(2, request.cap_rows)):
                hidden = torch.zeros(rows, request.hidden_size, dtype=request.dtype, device=device)
                ids = torch.zeros(rows, request.top_k, dtype=torch.int32, device=device)
                weights = torch.zeros(rows, request.top_k, dtype=torch.float32, device=device)
                row_map = self._dispatch(lane, hidden, ids, weights, layer=0)
                self._wait(lane)
                afd_kernels.combine(lane.reply_slots, row_map, self.layout.reply, lane.state, dtype=request.dtype)
        torch.cuda.synchronize(device)

    def _dispatch(
        self, lane: Lane, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, layer: int
    ) -> torch.Tensor:
        return afd_kernels.dispatch(
            hidden, ids, weights, expert_bucket=self.expert_bucket, slots=lane.slots, layout=self.layout.request,
            lane=lane.state, layer=layer, sent=lane.sent[lane.layer_index], workspace=lane.workspace,
        )  # fmt: skip

    def _wait(self, lane: Lane) -> None:
        afd_kernels.wait(
            lane.reply_slots, lane.state, abort=lane.abort.tensor, status=lane.status, timeout_s=self._timeout_s
        )

    # -- control plane ---------------------------------------------------------------------------------------------

    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        """Refused: attention ranks announce steps, they do not receive them."""
        raise AFDError(f"attention rank {self.attention_rank} receives no steps; call it on an FFN rank's connector")

    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None:
        """Begins a step in each stage of ``payload`` with this rank's count of rows."""
        flags = (payload.is_warmup, payload.is_graph_capturing, payload.is_graph_replaying)
        for stage, metadata in payload.dp_metadata_list.items():
            self.begin_step(int(metadata.num_tokens_across_dp_cpu[self.attention_rank]), stage, flags)

    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None:
        """Nothing to do: ``send_dp_metadata_list`` has begun the steps."""

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, num_rows: int, stage: int = 0, flags: tuple[bool, bool, bool] = (False, False, False)) -> None:
        """Begins the next step of a stage: announces it and writes the lane's state.

        num_rows: 0 … max_batch_tokens. Raises ``AFDCapacityError``, ``AFDPeerLost``, or ``AFDError`` inside a step.
        """
        lane = self.lane(stage)
        if num_rows > self.config.max_batch_tokens:
            raise AFDCapacityError(
                f"num_rows is {num_rows}; allowed: up to max_batch_tokens={self.config.max_batch_tokens}; split the "
                "batch, or raise max_batch_tokens on both sides"
            )
        if num_rows < 0:
            raise AFDError(f"num_rows is {num_rows}; allowed: 0 … {self.config.max_batch_tokens}")
        if lane.rows is not None:
            raise AFDError(f"stage {stage} is still in step {lane.step}; call end_step or abort_step first")
        self.control.begin_step(stage, lane.step + 1)
        lane.step, lane.rows, lane.layer_index = lane.step + 1, num_rows, 0
        begin_step(lane.state, session=self.control.session, step=lane.step, rows=num_rows)
        self.control.announce(Announce(stage, lane.step, num_rows, *flags))

    def end_step(self, stage: int = 0) -> None:
        """Ends a step. Raises ``AFDError`` (and gives the step up) where layers are missing."""
        lane = self.lane(stage)
        if lane.rows is None:
            raise AFDError(f"stage {stage} is in no step; call begin_step first")
        if self.device.type == "cuda":  # before any result of the step leaves
            torch.cuda.current_stream(self.device).synchronize()
            self._check_status(lane, stage)
        done, layers = lane.layer_index, len(self.spec.expert_layers)
        if done < layers:
            self.abort_step(f"it ended after {done} of {layers} exchanged layers", stage)
            raise AFDError(
                f"step {lane.step} of stage {stage} ended after {done} of {layers} exchanged layers; run all of them"
            )
        lane.rows = None

    def abort_step(self, reason: str, stage: int = 0) -> None:
        """Gives the stage's step up and tells the peers. Nothing happens outside a step."""
        lane = self.lane(stage)
        if lane.rows is None:
            return
        layers = self.spec.expert_layers
        layer = layers[lane.layer_index] if lane.layer_index < len(layers) else None
        lane.rows = None
        self.control.abort(stage, lane.step, reason, layer)

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
        self._check_exchange(lane, hidden, layer_idx, stage)
        if topk_ids.shape != topk_weights.shape or topk_ids.shape != (hidden.shape[0], self.spec.top_k):
            raise AFDError(
                f"topk_ids is {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; allowed: "
                f"[{hidden.shape[0]}, {self.spec.top_k}] for both (rows of hidden, top_k of the model)"
            )
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        lane.row_map = self._dispatch(lane, hidden.contiguous(), ids, weights, layer=layer_idx)

    def _check_exchange(self, lane: Lane, hidden: torch.Tensor, layer_idx: int, stage: int) -> None:
        layers = self.spec.expert_layers
        if lane.rows is None:
            raise AFDError(f"layer {layer_idx} is sent outside a step of stage {stage}; call begin_step first")
        if lane.layer_index >= len(layers) or layers[lane.layer_index] != layer_idx:
            allowed = (
                layers[lane.layer_index] if lane.layer_index < len(layers) else "none, all were sent; call end_step"
            )
            raise AFDError(f"layer_idx is {layer_idx} in step {lane.step} of stage {stage}; allowed: {allowed}")
        if hidden.dim() != 2 or hidden.shape[1] != self.spec.hidden_size or hidden.dtype != self.layout.request.dtype:
            raise AFDError(
                f"hidden is {hidden.dtype}{list(hidden.shape)}; allowed: {self.layout.request.dtype}[M, "
                f"{self.spec.hidden_size}]; cast it, or connect with its dtype"
            )
        if hidden.shape[0] > self.config.max_batch_tokens:
            raise AFDCapacityError(
                f"hidden has {hidden.shape[0]} rows; allowed: up to max_batch_tokens={self.config.max_batch_tokens}; "
                "split the batch, or raise max_batch_tokens on both sides"
            )
        if hidden.shape[0] < lane.rows:
            raise AFDError(
                f"hidden has {hidden.shape[0]} rows; the step was begun with {lane.rows}; begin it with fewer"
            )

    def recv_ffn_output(self, ref_tensor: torch.Tensor, *, layer_idx: int, stage: int) -> torch.Tensor:
        """Waits for every peer's reply and adds them up in fp32, in the order of the peers. Returns [M, H].

        On a GPU the wait is the stream's: a failure shows in ``end_step``, and the layers after it give zeros.
        """
        lane = self.lane(stage)
        if lane.row_map is None:
            raise AFDError(f"nothing was sent for layer {layer_idx} of stage {stage}; call send_attn_output first")
        start = time.perf_counter()
        self._wait(lane)
        waited = 0.0
        if self.device.type == "cpu":
            waited = time.perf_counter() - start
            self._check_status(lane, stage)
        out = torch.empty_like(ref_tensor, memory_format=torch.contiguous_format)
        row_map, lane.row_map = lane.row_map, None
        afd_kernels.combine(lane.reply_slots, row_map, self.layout.reply, lane.state, out=out)
        self._count(layer_idx, lane, waited)
        lane.layer_index += 1
        return out

    def _check_status(self, lane: Lane, stage: int) -> None:
        code, peer, expected, observed = lane.status[:4].tolist()
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

    def _count(self, layer_idx: int, lane: Lane, waited: float) -> None:
        stats = self.stats[layer_idx]
        stats.exchanges, stats.wait_s = stats.exchanges + 1, stats.wait_s + waited
        stats.rows += lane.rows or 0

    def layer_stats(self) -> dict[int, LayerStats]:
        """The sums by layer. Reads the device's counters."""
        sent = sum(lane.sent.cpu() for lane in self.lanes)
        for (_, stats), rows in zip(self.stats.items(), sent.tolist(), strict=True):  # type: ignore[union-attr]
            stats.rows_sent = sum(rows)
            exchanges = [stats.exchanges] * len(rows)
            stats.bytes_out = sum(map(self._bytes_out, rows, exchanges))
            stats.bytes_back = sum(map(self._bytes_back, rows, exchanges))
        return self.stats

    def _bytes_out(self, rows: int, messages: int) -> int:
        fixed = self.layout.request.bytes_used(0)
        return messages * fixed + self.layout.request.bytes_used(rows) - fixed

    def _bytes_back(self, rows: int, messages: int) -> int:
        fixed = self.layout.reply.bytes_used(0)
        return messages * fixed + self.layout.reply.bytes_used(rows) - fixed
