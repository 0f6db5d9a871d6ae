# SPDX-License-Identifier: Apache-2.0
"""Doorbells: what a stream waits for in front of a wait kernel, where ranks of different processes share a GPU.

Kernels of two processes take turns on one GPU by time slices of about 2 ms, so a kernel that spins keeps out the very
process that it waits for. A stream that waits for a value in memory keeps nobody out. The values are those of
``afd_kernels.wait``; the memory keeps its address for the life of the process, because captured graphs wait for it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from afd_kernels.signal import open_bells
from afd_runtime.window_cuda import CudaHandle, CudaIpc, CudaMemory, checked, cuda_runtime

BELL_PATIENCE_S = 1.0  # a stream waits so long for a doorbell; then the wait kernel looks at abort flags and the time
_PER_LINE = 32  # bells of a stage begin on a cache line of their own


def bell_offset(stage: int, index: int, num_bells: int) -> int:
    """Bytes from the start of a rank's doorbell memory to bell ``index`` of ``num_bells`` of ``stage``."""
    return 4 * (stage * _line(num_bells) + index)


def bell_bytes(num_stages: int, num_bells: int) -> int:
    """Bytes of a rank's doorbell memory."""
    return bell_offset(num_stages, 0, num_bells)


def _line(num_bells: int) -> int:
    return -(-num_bells // _PER_LINE) * _PER_LINE


class Doorbells:
    """A rank's own doorbells: one for each (stage, peer). handle: for the peers, who ring them."""

    def __init__(self, device: torch.device, num_stages: int, num_bells: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self.num_bells = num_bells
        self._memory: CudaMemory
        self.handle: CudaHandle
        ipc = CudaIpc(device)
        self._memory, self.handle = ipc.allocate(bell_bytes(num_stages, num_bells))
        self.device = ipc.device
        lines = self._memory.buffer().view(torch.int32).view(num_stages, -1)
        self._stages = [line[:num_bells] for line in lines]
        self._lock = threading.Lock()
        self._stream = self._new_stream()
        for stage in range(num_stages):  # a first launch waits for every kernel that runs
            self.open(stage)
        self._stream.synchronize()

    def _new_stream(self) -> torch.cuda.Stream:
        """A stream of the highest priority, which nothing else uses: no waiting stream stands in front of it."""
        runtime = cuda_runtime()
        _, highest = checked(runtime.cudaDeviceGetStreamPriorityRange(), "cudaDeviceGetStreamPriorityRange")
        flags = runtime.cudaStreamNonBlocking
        stream = checked(runtime.cudaStreamCreateWithPriority(flags, highest), "cudaStreamCreateWithPriority")
        return torch.cuda.ExternalStream(int(stream), self.device)

    def of(self, stage: int) -> torch.Tensor:
        """int32[num_bells], the bells of one stage."""
        return self._stages[stage]

    def wait(self, stage: int) -> None:
        """Makes the current stream wait until every bell of ``stage`` was rung or opened. It can be captured."""
        stream, flag = torch.cuda.current_stream(self.device).cuda_stream, self._driver.CUstreamWaitValue_flags
        for index in range(self.num_bells):
            address = self._memory.address + bell_offset(stage, index, self.num_bells)
            result = self._driver.cuStreamWaitValue32(stream, address, 1, flag.CU_STREAM_WAIT_VALUE_GEQ)
            checked(result, "cuStreamWaitValue32")

    def open(self, stage: int) -> None:
        """Lets the stream of ``stage`` pass, from any thread: its wait kernel then looks at abort flag and time."""
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            open_bells(self._stages[stage])
