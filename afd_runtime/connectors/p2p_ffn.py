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
from afd_kernels.message import split_word
from afd_kernels.signal_host import StatusCode
from afd_kernels.step import StepMember, fill_inbox
from afd_runtime.config import AFDConfig
from afd_runtime.connectors.base import AFDControlPlane
from afd_runtime.connectors.stage_tables import StageTables
from afd_runtime.control_plane.ffn import FFNControlPlane
from afd_runtime.control_plane.fingerprint import fingerprint
from afd_runtime.control_plane.lanes import AttachedRank, Member
from afd_runtime.control_plane.messages import LayerTotals, Order
from afd_runtime.doorbells import BELL_PATIENCE_S, Doorbells, bell_offset
from afd_runtime.errors import AFDError, AFDStuckError
from afd_runtime.event_log import EventLog
from afd_runtime.metadata import (
    AFDA2FTransferPayload,
    AFDControlPayload,
    AFDDPMetadata,
    AFDTransferContext,
    AFDTransferMetadata,
)
from afd_runtime.protocol import Event
from afd_runtime.window import WindowLayout, create_fabric, placement_of

if TYPE_CHECKING:
    from afd_kernels.arrival import ExpertSchedule
    from afd_runtime.model_spec import ModelSpec

logger = logging.getLogger("afd_runtime.ffn")
POLL_S = 20e-6
STUCK_AFTER_S = 10.0
STOP_PATIENCE_S = 5.0  # from the request to stop on; a step that is still in flight then is given up


@dataclass(eq=False)
class Step:
    """The step that a stage is in. layers_left: exchanged layers still to come; received_at: when a request was in.

    looked_at: when the watcher last opened its doorbells; abandoned_at: when it first saw every lane gone.
    """

    order: Order
    layers_left: int
    members: dict[int, Member] = field(default_factory=dict)  # by index into the tables
    received_at: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)
    abandoned_at: float | None = None


@dataclass
class Totals:
    """Sums of one layer."""

    exchanges: int = 0
    rows: int = 0
    wait_s: float = 0.0
    experts_s: float = 0.0
    reply_s: float = 0.0


class FFNSide(AFDControlPlane):
    """One FFN rank: its control plane, the tables of each stage, and the three calls of the FFN loop.

    messages: requests merged, and timeouts: waits for one that ended by their limit, by stage.
    """

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
        bells = config.uses_doorbells(device)
        self.doorbells = Doorbells(device, config.num_stages, len(self.served)) if bells else None
        self.tables = [
            StageTables(len(self.served), len(spec.expert_layers), device, stage, self.doorbells)
            for stage in range(config.num_stages)
        ]
        self.totals = {layer: Totals() for layer in spec.expert_layers}
        self.steps_served = self._graph_steps = self._graph_rows = 0
        self.messages, self.timeouts = [0] * config.num_stages, [0] * config.num_stages
        self.stuck: AFDStuckError | None = None  # the kernel that does not end, once that is known
        self._steps: list[Step | None] = [None] * config.num_stages
        self._orders: list[Order | None] = [None] * config.num_stages
        self._schedules: list[ExpertSchedule | None] = [None] * config.num_stages
        self._log = EventLog.of(f"F{ffn_rank}", words=device.type == "cpu")
        self.control = FFNControlPlane(
            config, ffn_rank, self.placement, self.layout, create_fabric(config, device),
            fingerprint(config, spec, dtype, fingerprint_extra, device), self.layer_totals, self.doorbells,
            self._watch_steps, self._log,
        )  # fmt: skip

    def layer_totals(self) -> dict[int, LayerTotals]:
        """The sums by layer, as they are sent to attention ranks. What graphs did is as of their last step."""
        found = {}
        clocks = sum(tables.read_clocks for tables in self.tables).tolist()  # type: ignore[union-attr]
        for (layer, totals), (waited, computed, replied, _) in zip(self.totals.items(), clocks, strict=True):
            found[layer] = LayerTotals(
                exchanges=totals.exchanges + self._graph_steps, rows=totals.rows + self._graph_rows,
                wait_s=totals.wait_s + waited * 1e-9, experts_s=totals.experts_s + computed * 1e-9,
                reply_s=totals.reply_s + replied * 1e-9,
            )  # fmt: skip
        return found

    # -- control plane ---------------------------------------------------------------------------------------------

    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        """Waits for the next step of ``stage`` with a lane that is served here, and enters it.

        None: for the next unit, and enters all of its stages, whose layers must then be served in turn.
        """
        while True:
            orders = self.control.next_orders(stage)
            payload = AFDControlPayload(
                {order.stage: self._counts(order) for order in orders},
                is_graph_capturing=orders[0].is_graph_capturing,
                is_warmup=orders[0].is_warmup,
                is_graph_replaying=orders[0].is_graph_replaying,
            )
            for order in orders:
                self._orders[order.stage] = order
            self.update_state_from_dp_metadata(payload)
            entered = [index for index in payload.dp_metadata_list if self._steps[index] is not None]
            if len(entered) == len(orders):
                return payload
            if entered:
                counts = {index: payload.dp_metadata_list[index] for index in entered}
                return dataclasses.replace(payload, dp_metadata_list=counts)

    def _counts(self, order: Order) -> AFDDPMetadata:
        counts = [0] * self.config.num_attention_ranks
        for participant in order.participants:
            counts[participant.attention_rank] = participant.rows
        return AFDDPMetadata.from_counts(counts)

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
            if tables.in_graph:  # its graph still reads what would be written here
                raise AFDError(f"stage {stage} is still in a step; finish_step ends it, before the next one is entered")
            self.leave(stage)
        step, members = Step(order, layers_left=len(self.spec.expert_layers)), []
        for lane, participant in self.control.enter_step(order, tables.abort):
            index = self.served.index(participant.attention_rank)
            step.members[index] = (lane, participant)
            request = lane.request.address + stage * self.layout.request_stride
            reply = lane.reply.address + stage * self.layout.reply_stride
            members.append(
                StepMember(index, request, reply, participant.session, participant.lane_step, participant.rows,
                           self._bell_of(lane, stage))
            )  # fmt: skip
        fill_inbox(tables.inbox, members)
        if not tables.in_graph:
            tables.enter()
        if step.members:
            self._steps[stage] = step

    def _bell_of(self, lane: AttachedRank, stage: int) -> int:
        """Address of the attention rank's doorbell for this FFN rank's replies, 0 where there is none."""
        if lane.bells is None:
            return 0
        peers = self.placement.peers(lane.attention_rank)
        return lane.bells.address + bell_offset(stage, peers.index(self.ffn_rank), len(peers))

    def leave(self, stage: int) -> None:
        """Ends the stage's step, whether or not all its layers were served."""
        if self._steps[stage] is not None:
            self._note(Event.END_STEP, stage, -1)
            self._steps[stage] = None
            self.steps_served += 1
            self.control.leave_step(stage)
            if not any(self._steps):
                self.control.fabric.collect()

    def finish_step(self, stage: int) -> None:
        """The end of a step that a graph served: waits for this thread's stream, reads the cells, leaves the step.

        Raises ``AFDStuckError`` where the step does not end although nobody is left in it.
        """
        end = self.tables[stage].end_of_step()
        while not end.query():
            if self.stuck is not None:
                raise self.stuck
            time.sleep(POLL_S)
        self._graph_steps += 1
        self._graph_rows += self.step_rows(stage)
        self.messages[stage] += len(self._step(stage).members) * len(self.spec.expert_layers)
        self.settle(stage)
        self.leave(stage)

    def step_rows(self, stage: int) -> int:
        """Rows that the lanes of the stage's step announced."""
        return sum(participant.rows for _, participant in self._step(stage).members.values())

    def _watch_steps(self) -> None:
        """On the watcher thread, with each heartbeat: nothing waits without end, for a doorbell, for a kernel, or for a
        peer once a stop was asked for."""
        now, stopping = time.monotonic(), self.control.stopping_since
        for stage, (step, tables) in enumerate(zip(self._steps, self.tables, strict=True)):
            if step is None:
                continue
            if stopping is not None and now - stopping > STOP_PATIENCE_S:
                for index in list(step.members):
                    tables.abort.set(index)
            if self.doorbells is not None and now - step.looked_at > BELL_PATIENCE_S:
                step.looked_at = now
                tables.open_bells()
            if not self.control.is_abandoned(stage):
                step.abandoned_at = None
            elif step.abandoned_at is None:
                step.abandoned_at = now
            elif now - step.abandoned_at > STUCK_AFTER_S and self.stuck is None and tables.in_graph:
                self.stuck = AFDStuckError(
                    f"FFN rank {self.ffn_rank}: step {step.order.number} of stage {stage} still runs "
                    f"{STUCK_AFTER_S:g} s after every attention rank has left it: a kernel does not end; start this "
                    "process again"
                )

    # -- exchanges -------------------------------------------------------------------------------------------------

    def recv_attn_output(self, ubatch_idx: int = 0, *, layer_idx: int) -> AFDA2FTransferPayload:
        """Waits for the requests of every lane that is still in the step and merges them."""
        step = self._step(ubatch_idx)
        start = time.perf_counter()
        self._await_requests(ubatch_idx, layer_idx)
        self._note(Event.SEE_REQUEST, ubatch_idx)
        tables = self.tables[ubatch_idx]
        schedule = self._arrival(ubatch_idx, layer_idx)
        self.settle(ubatch_idx, layer_idx, merged=True)
        step.received_at = time.perf_counter()
        base = schedule.lane_base.tolist()
        lengths = [after - before for before, after in zip(base, base[1:], strict=False) if after > before]
        totals = self.totals[layer_idx]
        totals.wait_s += step.received_at - start
        totals.exchanges, totals.rows = totals.exchanges + 1, totals.rows + base[-1]
        self.messages[ubatch_idx] += len(step.members)
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
        self._note(Event.PUBLISH_REPLY, stage)
        afd_kernels.reply(out, schedule, tables.reply_slots, tables.lanes, self.layout.reply, bells=tables.peer_bells)
        totals = self.totals[layer]
        totals.experts_s += computed - step.received_at
        totals.reply_s += time.perf_counter() - computed
        step.layers_left -= 1
        if step.layers_left == 0:
            self.leave(stage)
        else:
            self._note(Event.NEXT_EXCHANGE, stage)

    def _note(self, event: Event, stage: int, after: int = 0) -> None:
        """Logs an event of every lane in the stage's step. after: exchanges from the one that comes next."""
        if self._log is not None and (step := self._steps[stage]) is not None:
            exchange = max(0, len(self.spec.expert_layers) - step.layers_left + after)
            for _, participant in step.members.values():
                place = (participant.attention_rank, stage)
                self._log.note(event, place, participant.lane_step, exchange, session=participant.session)

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
        self.tables[stage].wait(self.config.peer_timeout_s, self.spec.expert_layers.index(layer))
        self.settle(stage, layer)

    def settle(self, stage: int, layer: int | None = None, *, merged: bool = False) -> None:
        """Takes the lanes whose status cells report a failure out of the step. The device has set them offline.

        layer: that was being served; None where all layers of a graph are through: the cell's word tells then. merged:
        the rows of the other lanes are about to be read, so those of them that were lost stay for now.
        """
        status, step = self.tables[stage].status, self._step(stage)
        failed = [index for index in step.members if self.tables[stage].has_failed(index)]
        if not failed:
            return
        cells = {index: status[index, :6].tolist() for index in failed}
        layers = {i: self._layer_of(cell[0], cell[2]) if layer is None else layer for i, cell in cells.items()}
        for rank, reason in () if merged else self.control.take_losses(stage):
            index = self.served.index(rank)
            self._forget(stage, index, reason, layers.get(index, layer))
        for index, (code, _, _, observed, rows, announced) in cells.items():
            status[index] = 0
            self.timeouts[stage] += code == StatusCode.TIMEOUT
            if index in step.members:
                self._drop(stage, index, self._why(code, layers[index], observed, rows, announced), layers[index])

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
        return f"this rank was asked to stop, and no request for layer {layer} arrived in time"

    def _drop(self, stage: int, index: int, reason: str, layer: int) -> None:
        rank = self.served[index]
        self.control.drop(stage, rank, reason, layer)
        self._forget(stage, index, reason, layer)

    def _forget(self, stage: int, index: int, reason: str, layer: int | None) -> None:
        _, participant = self._step(stage).members.pop(index)
        if not self.tables[stage].in_graph:  # there the device has done it
            self.tables[stage].set_offline(index)
        logger.warning(
            "FFN rank %d: attention rank %d left step %d of stage %d at layer %s: %s",
            self.ffn_rank, participant.attention_rank, participant.lane_step, stage, layer, reason,
        )  # fmt: skip
