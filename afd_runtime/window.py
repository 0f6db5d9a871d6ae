# SPDX-License-Identifier: Apache-2.0
"""Windows: the memory that one (attention rank, FFN rank) pair exchanges messages through.

``WindowLayout`` gives sizes before anything is allocated. A fabric allocates windows and maps those of a peer by a
typed handle. Shared memory is a sealed memfd: it has no name, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from afd_kernels.message import MessageLayout, ReplyLayout
from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError, AFDError
from afd_runtime.topology import ExpertPlacement
from afd_runtime.window_cuda import CudaHandle, CudaIpc

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec

SLOT_ALIGNMENT = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def placement_of(config: AFDConfig, spec: ModelSpec) -> ExpertPlacement:
    """The placement of a group that serves ``spec``."""
    return ExpertPlacement(config.placement, spec.num_experts, config.num_attention_ranks, config.num_ffn_ranks)


@dataclass(frozen=True)
class WindowLayout:
    """Bytes and offsets of one pair's windows: ``num_stages`` request slots, owned by the FFN rank, and ``num_stages``
    reply slots, owned by the attention rank."""

    request: MessageLayout
    reply: ReplyLayout
    num_stages: int

    @classmethod
    def of(cls, config: AFDConfig, spec: ModelSpec, dtype: torch.dtype) -> WindowLayout:
        """The layout of every pair of a group whose rows travel in ``dtype``."""
        request = MessageLayout(
            num_experts=placement_of(config, spec).num_local_experts_cap,
            cap_rows=config.max_batch_tokens,
            top_k=spec.top_k,
            hidden_size=spec.hidden_size,
            dtype=dtype,
        )
        reply = ReplyLayout(config.max_batch_tokens, spec.hidden_size, config.reply_torch_dtype(dtype))
        return cls(request, reply, config.num_stages)

    @property
    def request_stride(self) -> int:
        """Bytes from one stage's request slot to the next."""
        return _align(self.request.nbytes)

    @property
    def reply_stride(self) -> int:
        """Bytes from one stage's reply slot to the next."""
        return _align(self.reply.nbytes)

    @property
    def request_nbytes(self) -> int:
        """Bytes of the window that the FFN rank owns, per attention rank."""
        return self.num_stages * self.request_stride

    @property
    def reply_nbytes(self) -> int:
        """Bytes of the window that the attention rank owns, per FFN rank."""
        return self.num_stages * self.reply_stride


def _align(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class ShmHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shm"):
    """A memfd of a process on this host."""

    pid: int
    fd: int
    nbytes: int


class LocalHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="local"):
    """A window of this very process."""

    pid: int
    key: int
    nbytes: int


WindowHandle = ShmHandle | LocalHandle | CudaHandle
H = TypeVar("H", ShmHandle, LocalHandle, CudaHandle)


@dataclass(eq=False)
class Window:
    """Mapped memory, until ``close``. buffer: uint8[nbytes], zero when it was allocated. handle: for the peer."""

    buffer: torch.Tensor
    handle: WindowHandle
    fd: int = -1
    on_close: Callable[[], None] | None = None

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.buffer.data_ptr()

    def slot(self, stage: int, stride: int, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of one stage's slot."""
        return self.buffer[stage * stride : stage * stride + nbytes]

    def close(self) -> None:
        """Drops the mapping of this object; the memory goes when the last view of it goes. Idempotent."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


class Fabric(ABC):
    """Allocates windows here and maps a peer's windows."""

    name: str

    @abstractmethod
    def allocate(self, nbytes: int) -> Window:
        """A new zeroed window of at least ``nbytes`` > 0."""

    @abstractmethod
    def open(self, handle: WindowHandle, nbytes: int) -> Window:
        """Maps a peer's window. Raises ``AFDError`` unless it exists and has exactly ``nbytes``."""

    def collect(self) -> None:  # noqa: B027  most fabrics have nothing to do
        """Gives closed windows' memory back where closing them could not: called while no kernel waits."""

    def _checked(self, handle: WindowHandle, kind: type[H], nbytes: int) -> H:
        if not isinstance(handle, kind):
            raise AFDError(
                f"the peer's window is of the fabric {type(handle).__struct_config__.tag!r}, this process uses "
                f"{self.name!r}; set the same fabric on both sides"
            )
        if handle.nbytes != nbytes:
            raise AFDError(f"the peer's window has {handle.nbytes} bytes; this process expects {nbytes}")
        return handle


class SharedMemoryFabric(Fabric):
    """Shared memory of one host. A handle is (pid, fd); the peer opens it through ``/proc``."""

    name = "shm"

    def allocate(self, nbytes: int) -> Window:
        fd = os.memfd_create("afd-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            buffer = _map(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise AFDError(
                f"no shared memory of {nbytes} bytes: {error}; lower max_batch_tokens or num_stages"
            ) from error
        return Window(buffer, ShmHandle(os.getpid(), fd, nbytes), fd)

    def open(self, handle: WindowHandle, nbytes: int) -> Window:
        shm = self._checked(handle, ShmHandle, nbytes)
        path = f"/proc/{shm.pid:d}/fd/{shm.fd:d}"
        try:
            if not re.fullmatch(r"/memfd:afd-window( \(deleted\))?", os.readlink(path)):
                raise AFDError(f"{path} of the peer is not an AFD window")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise AFDError(
                f"cannot map the window of process {handle.pid}: {error}; both processes must run as the same user "
                "in one PID namespace (containers: share it, for example with --pid=host)"
            ) from error
        try:
            # without the seal a peer could shrink the file under this mapping, which ends this process with SIGBUS
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != nbytes:
                raise AFDError(f"{path} of the peer is not a sealed window of {nbytes} bytes")
            return Window(_map(fd, nbytes), handle)
        finally:
            os.close(fd)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), dtype=torch.uint8)


class LocalFabric(Fabric):
    """Windows of one process, on any device: both roles run as threads. A handle is a key into the live windows."""

    name = "local"
    _lock = threading.Lock()
    _streams: dict[torch.device, torch.cuda.Stream] = {}
    _windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def allocate(self, nbytes: int) -> Window:
        stream = self._stream()
        with torch.cuda.stream(stream):
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        if stream is not None:
            stream.synchronize()
        with self._lock:
            window = Window(buffer, LocalHandle(os.getpid(), buffer.data_ptr(), nbytes))
            self._windows[buffer.data_ptr()] = window
        return window

    def _stream(self) -> torch.cuda.Stream | None:
        """One for all windows of a device, so that a kernel that waits on another stream holds nothing up."""
        if self.device.type != "cuda":
            return None
        with self._lock:
            if self.device not in self._streams:
                self._streams[self.device] = torch.cuda.Stream(self.device, priority=-1)
            return self._streams[self.device]

    def open(self, handle: WindowHandle, nbytes: int) -> Window:
        local = self._checked(handle, LocalHandle, nbytes)
        with self._lock:
            window = self._windows.get(local.key) if local.pid == os.getpid() else None
        if window is None:
            raise AFDError(
                f"fabric='local' connects threads of one process; the peer is process {handle.pid}, this is "
                f"{os.getpid()}; use fabric='shm'"
            )
        return Window(window.buffer, handle)


class CudaIpcFabric(Fabric):
    """GPU memory of processes of one host."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._ipc = CudaIpc(device)

    def allocate(self, nbytes: int) -> Window:
        memory, handle = self._ipc.allocate(nbytes)
        return Window(memory.buffer(), handle, on_close=lambda: self._ipc.bury(memory))

    def open(self, handle: WindowHandle, nbytes: int) -> Window:
        memory = self._ipc.open(self._checked(handle, CudaHandle, nbytes))
        return Window(memory.buffer(), handle, on_close=lambda: self._ipc.bury(memory))

    def collect(self) -> None:
        self._ipc.collect()


def create_fabric(config: AFDConfig, device: torch.device) -> Fabric:
    """The fabric that ``config.fabric`` names; ``auto`` is CUDA IPC on a GPU and shared memory on a CPU."""
    if config.fabric == "local":
        return LocalFabric(device)
    kinds = {"cuda": ("cuda",), "shm": ("cpu",), "auto": ("cpu", "cuda")}[config.fabric]
    if device.type not in kinds:
        raise AFDConfigError(
            f"fabric={config.fabric!r} with device={str(device)!r}; allowed: 'shm' on a cpu, 'cuda' on a GPU, "
            "'auto', or 'local' with both roles in one process"
        )
    return CudaIpcFabric(device) if device.type == "cuda" else SharedMemoryFabric()
