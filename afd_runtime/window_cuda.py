# SPDX-License-Identifier: Apache-2.0
"""Windows in GPU memory that peers map through CUDA IPC: allocations of their own, not the caching allocator's."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import msgspec
import torch

from afd_kernels.message import tensor_at
from afd_runtime.errors import AFDConfigError, AFDError

logger = logging.getLogger("afd_runtime.window")


class CudaHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cuda"):
    """Memory of a GPU of this host. ipc: the 64 bytes of cudaIpcMemHandle_t."""

    pid: int
    ipc: bytes
    nbytes: int


def cuda_runtime() -> Any:
    """The CUDA runtime bindings. Raises ``AFDConfigError`` where they are not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise AFDConfigError(
            f"windows in GPU memory need cuda-bindings ({error}); install it with: pip install cuda-bindings"
        ) from error
    return runtime


def checked(result: tuple, what: str) -> Any:
    """The value of a CUDA call. Raises ``AFDError`` naming the call and the error."""
    code, *values = result
    if int(code) != 0:
        raise AFDError(f"{what} failed: {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else tuple(values)


class CudaMemory:
    """One allocation or mapping of ``nbytes`` at ``address``. ``free`` waits for every kernel that runs."""

    def __init__(self, device: torch.device, address: int, nbytes: int, *, mapped: bool) -> None:
        self.device, self.address, self.nbytes, self._mapped = device, address, nbytes, mapped

    def buffer(self) -> torch.Tensor:
        """The memory as uint8[nbytes]."""
        return tensor_at(self.address, self.nbytes, self.device)

    def free(self) -> None:
        """Gives the memory back. Idempotent."""
        address, self.address = self.address, 0
        if not address:
            return
        runtime = cuda_runtime()
        checked(runtime.cudaSetDevice(self.device.index), "cudaSetDevice")
        if self._mapped:
            checked(runtime.cudaIpcCloseMemHandle(address), "cudaIpcCloseMemHandle")
        else:
            checked(runtime.cudaFree(address), "cudaFree")


class CudaIpc:
    """Allocates and maps windows on one GPU, from any thread."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._runtime = cuda_runtime()
        self._lock = threading.Lock()
        self._dead: list[CudaMemory] = []
        torch.cuda.init()

    def allocate(self, nbytes: int) -> tuple[CudaMemory, CudaHandle]:
        """New zeroed memory. Nothing here waits for a kernel that runs."""
        runtime = self._runtime
        checked(runtime.cudaSetDevice(self.device.index), "cudaSetDevice")
        address = int(checked(runtime.cudaMalloc(nbytes), f"cudaMalloc of {nbytes} bytes"))
        memory = CudaMemory(self.device, address, nbytes, mapped=False)
        stream = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "cudaStreamCreate")
        checked(runtime.cudaMemsetAsync(address, 0, nbytes, stream), "cudaMemsetAsync")
        checked(runtime.cudaStreamSynchronize(stream), "cudaStreamSynchronize")
        checked(runtime.cudaStreamDestroy(stream), "cudaStreamDestroy")
        handle = checked(runtime.cudaIpcGetMemHandle(address), "cudaIpcGetMemHandle")
        return memory, CudaHandle(os.getpid(), bytes(handle.reserved), nbytes)

    def open(self, handle: CudaHandle) -> CudaMemory:
        """Maps a peer's memory: peer access is probed by doing it."""
        runtime = self._runtime
        if handle.pid == os.getpid():
            raise AFDError("fabric='cuda' connects processes; the peer is this very process; use fabric='local'")
        raw = runtime.cudaIpcMemHandle_t()
        raw.reserved = list(handle.ipc)
        checked(runtime.cudaSetDevice(self.device.index), "cudaSetDevice")
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        what = f"mapping the window of process {handle.pid} (cudaIpcOpenMemHandle: both GPUs need peer access)"
        return CudaMemory(self.device, int(checked(runtime.cudaIpcOpenMemHandle(raw, flags), what)), handle.nbytes,
                          mapped=True)  # fmt: skip

    def bury(self, memory: CudaMemory) -> None:
        """Freed by ``collect``: freeing waits for every kernel that runs, which a thread that serves must not."""
        with self._lock:
            self._dead.append(memory)

    def collect(self) -> None:
        """Frees what was buried. After a fault of the GPU nothing can be freed any more: that is logged."""
        with self._lock:
            dead, self._dead = self._dead, []
        for memory in dead:
            try:
                memory.free()
            except AFDError as error:
                logger.warning("%d bytes of GPU memory were not freed: %s", memory.nbytes, error)
