# SPDX-License-Identifier: Apache-2.0
"""Cells in host memory that kernels read and write beside the host: abort flags and status cells.

On a GPU they are pinned, so the device reaches them by the same address; the watcher thread sets a flag with a plain
store, while any kernel waits on any stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from afd_kernels.message import LANE_FIELDS


def host_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory that ``device`` can reach too."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


class AbortCell:
    """tensor: int32[size], 0 or 1, one flag for each lane that waits on its own (one for all of an attention rank).

    on_set: called after a flag was set, on the thread that set it: opens the doorbells that a stream may wait for.
    """

    def __init__(self, device: torch.device, size: int = 1, on_set: Callable[[], None] | None = None) -> None:
        self.tensor = host_zeros(size, dtype=torch.int32, device=device)
        self._flags = (ctypes.c_int32 * size).from_address(self.tensor.data_ptr())
        self._on_set = on_set

    def set(self, index: int = 0) -> None:
        """Ends the waits that read this flag."""
        self._flags[index] = 1
        if self._on_set is not None:
            self._on_set()

    def clear(self, index: int | None = None) -> None:
        """Waits are possible again: of one lane, or of all."""
        if index is None:
            ctypes.memset(self._flags, 0, ctypes.sizeof(self._flags))
        else:
            self._flags[index] = 0


def status_cells(device: torch.device, *lanes: int) -> torch.Tensor:
    """Status cells, int64[8] or int64[lanes, 8]: all zero, which is ``StatusCode.OK``."""
    return host_zeros(*lanes, LANE_FIELDS, dtype=torch.int64, device=device)


def codes_of(status: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    """The cells' int64s as an array over the same memory, which a host loop reads faster than a tensor."""
    return (ctypes.c_int64 * status.numel()).from_address(status.data_ptr())
