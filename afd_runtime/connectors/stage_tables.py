# SPDX-License-Identifier: Apache-2.0
"""What the kernels of one FFN stage read and write, and the two launches that every step and layer begins with."""

from __future__ import annotations

import torch

import afd_kernels
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, Lane
from afd_kernels.signal import CLOCK_FIELDS
from afd_kernels.signal_host import Status, StatusCode
from afd_kernels.step import INBOX_FIELDS, enter_step
from afd_runtime.control_plane.cells import AbortCell, codes_of, host_zeros, status_cells
from afd_runtime.doorbells import Doorbells


class StageTables:
    """What the kernels of one stage read: slot addresses and lane states of the attention ranks served here.

    slots, reply_slots: int64[A], 0 where a rank is not in the step. lanes: int64[A, 8]. inbox: int64[A, 8], abort:
    int32[A], status: int64[A, 8], all three in host memory. bells: int32[A], own doorbells, and peer_bells: int64[A],
    those of the attention ranks, or None both. clocks: int64[layers, 4]; read_clocks: what the last graph left of it,
    in host memory. in_graph: a captured graph writes the tables from the inbox; else whoever enters the step does.
    """

    def __init__(
        self, num_lanes: int, num_layers: int, device: torch.device, stage: int, doorbells: Doorbells | None
    ) -> None:
        self.stage, self.doorbells, self.in_graph = stage, doorbells, False
        self.slots = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.reply_slots = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.lanes = torch.zeros(num_lanes, LANE_FIELDS, dtype=torch.int64, device=device)
        self.inbox = host_zeros(num_lanes, INBOX_FIELDS, dtype=torch.int64, device=device)
        self.bells = None if doorbells is None else doorbells.of(stage)
        self.peer_bells = None if doorbells is None else torch.zeros_like(self.slots)
        self.clocks = torch.zeros(num_layers, CLOCK_FIELDS, dtype=torch.int64, device=device)
        self.read_clocks = host_zeros(num_layers, CLOCK_FIELDS, dtype=torch.int64, device=device)
        self.abort = AbortCell(device, num_lanes, on_set=None if doorbells is None else self.open_bells)
        self.status = status_cells(device, num_lanes)
        self._codes = codes_of(self.status)
        self._end = torch.cuda.Event() if device.type == "cuda" else None

    def open_bells(self) -> None:
        """Lets the stage's stream pass its doorbells, so that its wait kernel looks at the abort flags and the time."""
        assert self.doorbells is not None
        self.doorbells.open(self.stage)

    def enter(self) -> None:
        """Writes the tables from the inbox, in stream order."""
        enter_step(self.inbox, self.slots, self.reply_slots, self.lanes, peer_bells=self.peer_bells, bells=self.bells)

    def wait(self, timeout_s: float, layer_index: int) -> None:
        """Waits for the requests of all online lanes, in stream order."""
        if self.doorbells is not None:
            self.doorbells.wait(self.stage)
        afd_kernels.wait(
            self.slots, self.lanes, abort=self.abort.tensor, status=self.status, timeout_s=timeout_s, bells=self.bells,
            clock=self.clocks[layer_index] if self.slots.is_cuda else None,
        )  # fmt: skip

    def captured(self) -> None:
        """From now on graphs serve the stage; what their warm-up has counted is forgotten."""
        self.in_graph = True
        self.clocks.zero_()
        self.read_clocks.zero_()

    def has_failed(self, index: int) -> bool:
        """Whether the status cell of a lane reports a failure."""
        return self._codes[index * LANE_FIELDS + Status.CODE] != StatusCode.OK

    def end_of_step(self) -> torch.cuda.Event:
        """An event at this point of the current stream. There is one, so one step at a time."""
        assert self._end is not None
        self._end.record()
        return self._end

    def set_offline(self, index: int) -> None:
        """Takes one lane out of the step."""
        self.lanes[index, Lane.MODE] = MODE_OFFLINE
        self.slots[index] = self.reply_slots[index] = 0
