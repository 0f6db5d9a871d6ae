# SPDX-License-Identifier: Apache-2.0
"""Signals on the host: what ``signal`` does on a device, for slots in CPU memory, and the codes that both report."""

from __future__ import annotations

import ctypes
import enum
import threading
import time

import torch

from afd_kernels._op import reference
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, MODE_ONLINE, SIGNAL_OFFSET, Lane, tensor_at

BELL_OPEN = 2


class Status(enum.IntEnum):
    """Index of each int64 in a status cell ``int64[8]``.

    EXPECTED and OBSERVED are signal words, and layers where CODE is MALFORMED; ROWS and ANNOUNCED belong to that code.
    """

    CODE = 0
    PEER = 1
    EXPECTED = 2
    OBSERVED = 3
    ROWS = 4
    ANNOUNCED = 5


class StatusCode(enum.IntEnum):
    """Why a lane failed. TIMEOUT, ABORTED, PROTOCOL (a foreign or newer word): its wait. MALFORMED: its message."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2
    PROTOCOL = 3
    MALFORMED = 4


def ring_ref(address: int, word: int, device: torch.device) -> None:
    """``ring`` on the host: sets the doorbell at ``address`` on ``device`` (0: nobody listens)."""
    if address:
        tensor_at(address, 4, device).view(torch.int32).fill_(_bell_of(word))


def _bell_of(word: int) -> int:
    """``bell_of`` on the host."""
    return (word & 0xFFFFFF) << 2 | 1


_ORDER = threading.Lock()


def host_fence() -> None:
    """Orders this thread's memory accesses: taking and releasing a lock is a barrier on every CPU that runs Python."""
    with _ORDER:
        pass


def publish_host(address: int, word: int) -> None:
    """Stores a signal word in CPU memory after everything this thread wrote before."""
    host_fence()
    ctypes.c_int64.from_address(address + SIGNAL_OFFSET).value = word


@reference
def wait_ref(
    slots: torch.Tensor, lanes: torch.Tensor, *, abort: torch.Tensor, status: torch.Tensor, timeout_s: float,
    bells: torch.Tensor | None = None, clock: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """``wait`` on the host, with a back-off that leaves the core to the process that is being waited for."""
    started = time.monotonic_ns()
    passed = _wait_on_host(slots, lanes, abort, status, timeout_s, bells)
    if bells is not None:
        for peer in range(slots.numel()):
            bells[peer] = 0 if peer in passed else int(bells[peer]) | BELL_OPEN
    if clock is not None:
        clock[3] = time.monotonic_ns()
        clock[0] += clock[3] - started


def _wait_on_host(
    slots: torch.Tensor, lanes: torch.Tensor, abort: torch.Tensor, status: torch.Tensor, timeout_s: float,
    bells: torch.Tensor | None,
) -> set[int]:  # fmt: skip
    """Returns the peers whose word was seen."""
    per_lane = status.dim() == 2
    states = lanes.expand(slots.numel(), LANE_FIELDS).tolist()
    pending = {
        peer: (ctypes.c_int64.from_address(address + SIGNAL_OFFSET), state[Lane.WORD] | state[Lane.EXCHANGE])
        for peer, (address, state) in enumerate(zip(slots.tolist(), states, strict=True))
        if address and state[Lane.MODE] == MODE_ONLINE
    }
    waited, failed = set(pending), set[int]()
    deadline, pause, polls = time.monotonic() + timeout_s, 0.0, 0
    while pending:
        failures = []
        for peer, (cell, expected) in list(pending.items()):
            observed = cell.value
            if observed == expected and _has_rung(bells, peer, expected):
                del pending[peer]
                continue
            code = _failure(observed, expected, int(abort[peer if per_lane else 0]), time.monotonic() > deadline)
            if code is not StatusCode.OK:
                failures.append((code is not StatusCode.PROTOCOL, peer, code, expected, observed))
        for _, peer, code, expected, observed in sorted(failures)[: None if per_lane else 1]:
            lane = lanes[peer] if lanes.dim() == 2 else lanes
            _report(status[peer] if per_lane else status, lane, code, peer, expected, observed)
            failed.add(peer)
            del pending[peer]
        if failures and not per_lane:
            return set()  # the lane is offline: no peer will be waited for
        if pending:
            polls += 1
            pause = 0.0 if polls < 20 else min(500e-6, pause + 20e-6)
            time.sleep(pause)
    host_fence()
    return waited - failed


def _has_rung(bells: torch.Tensor | None, peer: int, word: int) -> bool:
    if bells is None:
        return True
    return int(bells[peer]) & ~BELL_OPEN == _bell_of(word)


def _failure(observed: int, expected: int, abort: int, late: bool) -> StatusCode:
    if observed != 0 and (observed >> 48 != expected >> 48 or _sequence(observed) > _sequence(expected)):
        return StatusCode.PROTOCOL
    if abort:
        return StatusCode.ABORTED
    return StatusCode.TIMEOUT if late else StatusCode.OK


def _sequence(word: int) -> int:
    return word & ((1 << 48) - 1)


def _report(
    status: torch.Tensor, lane: torch.Tensor, code: StatusCode, peer: int, expected: int, observed: int
) -> None:
    lane[Lane.MODE] = MODE_OFFLINE
    status[Status.PEER], status[Status.EXPECTED], status[Status.OBSERVED] = peer, expected, observed
    status[Status.CODE] = int(code)
