# SPDX-License-Identifier: Apache-2.0
"""One stage of an attention rank: what its kernels read and write, and the launches of a step and of an exchange."""

from __future__ import annotations

import torch

import afd_kernels
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, MODE_ONLINE
from afd_kernels.signal import CLOCK_FIELDS
from afd_runtime.control_plane.cells import AbortCell, status_cells
from afd_runtime.devices import check_current
from afd_runtime.doorbells import Doorbells
from afd_runtime.window import WindowLayout


class Lane:
    """The tables of one stage, and where its step is.

    slots, reply_slots: int64[D] for D peers. state: int64[8]. status: int64[8] in host memory. bells: int32[D], own
    doorbells, and peer_bells: int64[D], or None both. workspace: of dispatch. sent: int64[layers, D], rows sent so far;
    clocks: int64[layers, 4], time waited so far.
    step: of this lane, from 0; rows: of the step, None between steps; layer_index: exchanged layers that were sent.
    offline: an engine profiles, warms up or captures. undrained: a step was given up and its launches may still run.
    """

    def __init__(
        self, num_peers: int, layout: WindowLayout, num_layers: int, device: torch.device, stage: int,
        doorbells: Doorbells | None,
    ) -> None:  # fmt: skip
        self.layout, self.device, self.stage, self.doorbells = layout, device, stage, doorbells
        nbytes = afd_kernels.dispatch_workspace(layout.request.cap_rows, layout.request, num_peers)
        self.workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        self.sent = torch.zeros(num_layers, num_peers, dtype=torch.int64, device=device)
        self.clocks = torch.zeros(num_layers, CLOCK_FIELDS, dtype=torch.int64, device=device)
        self._sent, self._clocks = self.sent.unbind(), self.clocks.unbind()  # a view for each layer, made once
        self.slots = torch.zeros(num_peers, dtype=torch.int64, device=device)
        self.reply_slots = torch.zeros(num_peers, dtype=torch.int64, device=device)
        self.state = torch.zeros(LANE_FIELDS, dtype=torch.int64, device=device)
        self.bells = None if doorbells is None else doorbells.of(stage)
        self.peer_bells = None if doorbells is None else torch.zeros_like(self.slots)
        self.abort = AbortCell(device, on_set=None if doorbells is None else self.open_bells)
        self.status = status_cells(device)
        self.row_map: torch.Tensor | None = None
        self.step = -1
        self.rows: int | None = None
        self.layer_index = 0
        self.offline = self.undrained = False
        self.looked_at = 0.0
        self._streams: set[torch.cuda.Stream] = set()
        self._launched: set[tuple] = set()

    def forget_warm_up(self) -> None:
        """What the warm-up has counted."""
        self.sent.zero_()
        self.clocks.zero_()

    def set_peers(self, slots: list[int], reply_slots: list[int], bells: list[int]) -> None:
        """Writes the address tables, in place: graphs that were captured before read the new ones."""
        for table, values in ((self.slots, slots), (self.reply_slots, reply_slots), (self.peer_bells, bells)):
            if table is not None:
                table.copy_(torch.tensor(values, dtype=torch.int64))

    def open_bells(self) -> None:
        """Lets the stage's stream pass its doorbells, so that its wait kernel looks at the abort flag and the time."""
        assert self.doorbells is not None
        self.doorbells.open(self.stage)

    def begin(self, session: int, rows: int) -> None:
        """Writes the state of the lane's next step, in stream order."""
        self.step, self.rows, self.layer_index = self.step + 1, rows, 0
        self._write(session, self.step, rows, MODE_ONLINE)

    def go_offline(self) -> None:
        """From here on nothing is sent and ``combine`` writes zeros, in stream order."""
        self._write(1, 0, 0, MODE_OFFLINE)

    def _write(self, session: int, step: int, rows: int, mode: int) -> None:
        check_current(self.device)
        self._streams.clear()
        self.note_stream()
        afd_kernels.begin_step(self.state, session=session, step=step, rows=rows, mode=mode, bells=self.bells)

    def note_stream(self) -> None:
        """What the current stream was given until now belongs to the step."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._streams.add(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Waits for the streams on which the step began, sent a layer, was ended or given up."""
        for stream in self._streams:
            stream.synchronize()

    def drain(self) -> None:
        """Waits for the launches of a step that was given up: its abort flag ends their waits."""
        if self.undrained:
            self.synchronize()
            self.status.zero_()
        self.undrained = False

    def is_first_launch(self, *tensors: torch.Tensor) -> bool:
        """Whether these arguments would compile or load a kernel: what an address is aligned to is part of its kind."""
        kind = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
        known = kind in self._launched
        self._launched.add(kind)
        return not known

    def dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        bucket: torch.Tensor,
        layer: int,
        index: int,
    ) -> torch.Tensor:
        """Sends exchange ``index``. Returns the row map."""
        if self.rows is not None:
            self.note_stream()
        return afd_kernels.dispatch(
            hidden, ids, weights, expert_bucket=bucket, slots=self.slots, layout=self.layout.request, lane=self.state,
            layer=layer, sent=self._sent[index], bells=self.peer_bells, workspace=self.workspace,
        )  # fmt: skip

    def wait(self, timeout_s: float, index: int) -> None:
        """Waits for the replies of exchange ``index``, in stream order."""
        if self.doorbells is not None:
            self.doorbells.wait(self.stage)
        afd_kernels.wait(
            self.reply_slots, self.state, abort=self.abort.tensor, status=self.status, timeout_s=timeout_s,
            bells=self.bells, clock=self._clocks[index] if self.device.type == "cuda" else None,
        )  # fmt: skip

    def combine(self, row_map: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Adds the replies up into ``out``."""
        return afd_kernels.combine(self.reply_slots, row_map, self.layout.reply, self.state, out=out)
