# SPDX-License-Identifier: Apache-2.0
"""The FFN side of the p2p connector: enters a step, waits for requests, merges them, answers."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import afd_kernels
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, Lane, split_word
from afd_kernels.signal import Status, StatusCode
from afd_kernels.step import StepMember, enter_step
from afd_runtime.config import AFDConfig
from afd_runtime.connectors.base import AFDControlPlane
from afd_runtime.control_plane.cells import AbortCell, status_cells
from afd_runtime.control_plane.ffn import FFNControlPlane
from afd_runtime.control_plane.fingerprint import fingerprint
from afd_runtime.control_plane.lanes import Member
from afd_runtime.control_plane.messages import LayerTotals, Order
from afd_runtime.errors import AFDError
from afd_runtime.metadata import (
    AFDA2FTransferPayload,
    AFDControlPayload,
    AFDDPMetadata,
    AFDTransferContext,
    AFDTransferMetadata,
)
from afd_runtime.window import WindowLayout, create_fabric, placement_of

if TYPE_CHECKING:
    from afd_kernels.arrival import ExpertSchedule
    from afd_runtime.model_spec import ModelSpec

logger = logging.getLogger("afd_runtime.ffn")


class StageTables:
    """What the kernels of one stage read: slot addresses and lane states of the attention ranks served here.

    slots, reply_slots: int64[A], 0 where a rank is not in the step. lanes: int64[A, 8]. abort: int32[A], status:
    int64[A, 8], both in host memory.
    """

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.reply_slots = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.lanes = torch.zeros(num_lanes, LANE_FIELDS, dtype=torch.int64, device=device)
        self.abort = AbortCell(device, num_lanes)
        self.status = status_cells(device, num_lanes)

    def set_offline(self, index: int) -> None:
        """Takes one lane out of the step."""
        self.lanes[index, Lane.MODE] = MODE_OFFLINE
        self.slots[index] = self.reply_slots[index] = 0


@dataclass(eq=False)
class Step:
    """The step that a stage is in. layers_left: exchanged layers still to come; received_at: when a request was in."""

    order: Order
    layers_left: int
    members: dict[int, Member] = field(default_factory=dict)  # by index into the tables
    received_at: float = 0.0


@dataclass
class Totals:
    """Sums of one layer."""

    exchanges: int = 0
    rows: int = 0
    wait_s: float = 0.0
    experts_s: float = 0.0
    reply_s: float = 0.0


class FFNSide(AFDControlPlane):
    """One FFN rank: its control plane, the tables of each stage, and the three calls of the FFN loop."""

    def __init__(
        self,
        config: AFDConfig,
        ffn_rank: int,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fingerprint_extra: Mapping[str, str],
    ) -> None:
        self.config, self.ffn_rank, self.spec, self.device = config, ffn_rank, spec, device
        self.placement = placement_of(config, spec)
        self.layout = WindowLayout.of(config, spec, dtype)
        self.served = self.placement.attention_peers(ffn_rank)
        self.num_local_experts = len(self.placement.local_experts(ffn_rank))
        self.tables = [StageTables(len(self.served), device) for _ in range(config.num_stages)]
        self.totals = {layer: Totals() for layer in spec.expert_layers}
        self.steps_served = 0
        self._steps: list[Step | None] = [None] * config.num_stages
        self._orders: list[Order | None] = [None] * config.num_stages
        self._schedules: list[ExpertSchedule | None] = [None] * config.num_stages
        self.control = FFNControlPlane(
            config, ffn_rank, self.placement, self.layout, create_fabric(config, device),
            fingerprint(config, spec, dtype, fingerprint_extra), self.layer_totals,
        )  # fmt: skip

    def layer_totals(self) -> dict[int, LayerTotals]:
        """The sums by layer, as they are sent to attention ranks."""
        return {layer: LayerTotals(**dataclasses.asdict(totals)) for layer, totals in self.totals.items()}

    # -- control plane ---------------------------------------------------------------------------------------------

    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        """Waits for the next step with a lane that is served here, and enters it."""
        while True:
            order = self.control.next_order(stage)
            counts = [0] * self.config.num_attention_ranks
            for participant in order.participants:
                counts[participant.attention_rank] = participant.rows
            payload = AFDControlPayload(
                {order.stage: AFDDPMetadata.from_counts(counts)},
                is_graph_capturing=order.is_graph_capturing,
                is_warmup=order.is_warmup,
                is_graph_replaying=order.is_graph_replaying,
            )
            self._orders[order.stage] = order
            self.update_state_from_dp_metadata(payload)
            if self._steps[order.stage] is not None:
                return payload

    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None:
        """Refused: attention ranks announce steps."""
        raise AFDError(f"FFN rank {self.ffn_rank} does not announce steps; call it on an attention rank's connector")

    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None:
        """Enters the step of each stage in ``payload`` that was ordered: writes lane states and slot addresses."""
        for stage in payload.dp_metadata_list:
            order, self._orders[stage] = self._orders[stage], None
            if order is not None:
                self._enter(order)

    def _enter(self, order: Order) -> None:
        stage, tables = order.stage, self.tables[order.stage]
        if self._steps[stage] is not None:
            self.leave(stage)
        tables.status.zero_()
        step, members = Step(order, layers_left=len(self.spec.expert_layers)), []
        for lane, participant in self.control.enter_step(order, tables.abort):
            index = self.served.index(participant.attention_rank)
            step.members[index] = (lane, participant)
            request = lane.request.address + stage * self.layout.request_stride
            reply = lane.reply.address + stage * self.layout.reply_stride
            members.append(
                StepMember(index, request, reply, participant.session, participant.lane_step, participant.rows)
            )
        enter_step(tables.slots, tables.reply_slots, tables.lanes, members)
        if step.members:
            self._steps[stage] = step

    def leave(self, stage: int) -> None:
        """Ends the stage's step, whether or not all its layers were served."""
        if self._steps[stage] is not None:
            self._steps[stage] = None
            self.steps_served += 1
            self.control.leave_step(stage)
            if not any(self._steps):
                self.control.fabric.collect()

    def finish_step(self, stage: int) -> None:
        """The end of a step that a graph served: waits for this thread's stream, reads the cells, leaves the step."""
        torch.cuda.current_stream(self.device).synchronize()
        self.settle(stage)
        self.leave(stage)

    def step_rows(self, stage: int) -> int:
        """Rows that the lanes of the stage's step announced."""
        return sum(participant.rows for _, participant in self._step(stage).members.values())

    # -- exchanges -------------------------------------------------------------------------------------------------

    def recv_attn_output(self, ubatch_idx: int = 0, *, layer_idx: int) -> AFDA2FTransferPayload:
        """Waits for the requests of every lane that is still in the step and merges them."""
        step = self._step(ubatch_idx)
        start = time.perf_counter()
        self._await_requests(ubatch_idx, layer_idx)
        tables = self.tables[ubatch_idx]
        schedule = self._arrival(ubatch_idx, layer_idx)
        self.settle(ubatch_idx, layer_idx)
        step.received_at = time.perf_counter()
        base = schedule.lane_base.tolist()
        lengths = [after - before for before, after in zip(base, base[1:], strict=False) if after > before]
        totals = self.totals[layer_idx]
        totals.wait_s += step.received_at - start
        totals.exchanges, totals.rows = totals.exchanges + 1, totals.rows + base[-1]
        context = AFDTransferContext(AFDTransferMetadata(layer_idx, ubatch_idx, lengths), states=(step, schedule))
        empty = torch.empty(0, self.spec.hidden_size, dtype=schedule.dtype, device=tables.slots.device)
        return AFDA2FTransferPayload(empty, context, routing=self.local_schedule(schedule))

    def send_ffn_output(self, out: torch.Tensor, context: AFDTransferContext) -> None:
        """Answers every lane that is still in the step. out: [cap_rows * top_k, H], of each pair."""
        stage, layer = context.metadata.stage_idx, context.metadata.layer_idx
        step, schedule = self._steps[stage], context.states[1]
        if step is None or step is not context.states[0]:
            raise AFDError(f"context is of a step that stage {stage} has left; answer before the next step is received")
        computed = time.perf_counter()
        tables = self.tables[stage]
        afd_kernels.reply(out, schedule, tables.reply_slots, tables.lanes, self.layout.reply)
        totals = self.totals[layer]
        totals.experts_s += computed - step.received_at
        totals.reply_s += time.perf_counter() - computed
        step.layers_left -= 1
        if step.layers_left == 0:
            self.leave(stage)

    def _step(self, stage: int) -> Step:
        step = self._steps[stage]
        if step is None:
            raise AFDError(f"stage {stage} is in no step; receive a payload from the control plane first")
        return step

    def _arrival(self, stage: int, layer: int) -> ExpertSchedule:
        tables = self.tables[stage]
        schedule = self._schedules[stage]
        self._schedules[stage] = schedule = afd_kernels.arrival(
            tables.slots, tables.lanes, self.layout.request, schedule=schedule, layer=layer, status=tables.status
        )
        return schedule

    def local_schedule(self, schedule: ExpertSchedule) -> ExpertSchedule:
        """The schedule over this rank's experts; the last ranks may hold fewer than the layout has places for."""
        experts = self.num_local_experts
        if experts == schedule.num_experts:
            return schedule
        return dataclasses.replace(
            schedule,
            lane_prefix=schedule.lane_prefix[:experts],
            lane_start=schedule.lane_start[:experts],
            expert_base=schedule.expert_base[: experts + 1],
        )

    def _await_requests(self, stage: int, layer: int) -> None:
        tables = self.tables[stage]
        afd_kernels.wait(
            tables.slots, tables.lanes, abort=tables.abort.tensor, status=tables.status,
            timeout_s=self.config.peer_timeout_s,
        )  # fmt: skip
        self.settle(stage, layer)

    def settle(self, stage: int, layer: int | None = None) -> None:
        """Takes the lanes whose status cells report a failure out of the step. The device has set them offline.

        layer: that was being served; None where all layers of a graph are through: the cell's word tells then.
        """
        status, step = self.tables[stage].status, self._step(stage)
        failed = [index for index in step.members if int(status[index, Status.CODE]) != StatusCode.OK]
        if not failed:
            return
        for rank, reason in self.control.take_losses(stage):
            self._forget(stage, self.served.index(rank), reason, layer)
        for index in failed:
            code, _, expected, observed, rows, announced = status[index, :6].tolist()
            status[index] = 0
            if index in step.members:
                at = self._layer_of(code, expected) if layer is None else layer
                self._drop(stage, index, self._why(code, at, observed, rows, announced), at)

    def _layer_of(self, code: int, expected: int) -> int:
        return expected if code == StatusCode.MALFORMED else self.spec.expert_layers[split_word(expected)[2]]

    def _why(self, code: int, layer: int, observed: int, rows: int, announced: int) -> str:
        if code == StatusCode.TIMEOUT:
            limit = f"peer_timeout_s={self.config.peer_timeout_s:g}"
            return f"no request for layer {layer} arrived within {limit}"
        if code == StatusCode.PROTOCOL:
            return f"its signal word {observed:#x} belongs to another step"
        if code == StatusCode.MALFORMED and observed != layer:
            return f"it sent layer {observed} where layer {layer} comes next"
        if code == StatusCode.MALFORMED and not 0 <= rows <= announced:
            return f"it sent {rows} rows after announcing {announced}"
        if code == StatusCode.MALFORMED:
            return "its message is malformed"
        return "its wait was ended"

    def _drop(self, stage: int, index: int, reason: str, layer: int) -> None:
        rank = self.served[index]
        self.control.drop(stage, rank, reason, layer)
        self._forget(stage, index, reason, layer)

    def _forget(self, stage: int, index: int, reason: str, layer: int | None) -> None:
        _, participant = self._step(stage).members.pop(index)
        self.tables[stage].set_offline(index)
        logger.warning(
            "FFN rank %d: attention rank %d left step %d of stage %d at layer %s: %s",
            self.ffn_rank, participant.attention_rank, participant.lane_step, stage, layer, reason,
        )  # fmt: skip
