# SPDX-License-Identifier: Apache-2.0
"""Shares a window with a child process, as ranks do: the child maps it by its handle, reads it and writes to it."""

from __future__ import annotations

import subprocess
import sys
from typing import Union

import msgspec
import torch

from afd_runtime.errors import AFDError, one_line
from afd_runtime.launch import python_module
from afd_runtime.window import CudaIpcFabric, Fabric, SharedMemoryFabric, ShmHandle, Window
from afd_runtime.window_cuda import CudaHandle

NBYTES = 8192
CHILD_S = 60.0


def share_window(kind: str) -> None:
    """Raises ``AFDError`` where a child process cannot use a window of this one. kind: ``shm`` or ``cuda``."""
    fabric = _fabric(kind)
    window = fabric.allocate(NBYTES)
    try:
        window.buffer.copy_(_pattern(3))
        if kind == "cuda":
            torch.cuda.synchronize()
        _run_child(kind, msgspec.json.encode(window.handle).decode())
        if not torch.equal(window.buffer.cpu(), _pattern(5)):
            raise AFDError("the child process wrote to the window, and nothing of it arrived here")
    finally:
        window.close()
        fabric.collect()


def _run_child(kind: str, handle: str) -> None:
    command = python_module("afd_runtime.doctor_windows", kind, handle)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise AFDError(f"the child process that maps the window did not end within {CHILD_S:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it wrote nothing to stderr"]
        raise AFDError(f"a child process could not use the window (exit code {done.returncode}): {lines[-1]}")


def use_window(kind: str, encoded: str) -> None:
    """The child: maps the window, checks what the parent wrote, answers. Raises ``AFDError``."""
    handle = msgspec.json.decode(encoded, type=Union[ShmHandle, CudaHandle])  # noqa: UP007
    fabric = _fabric(kind)
    window: Window = fabric.open(handle, NBYTES)
    try:
        if not torch.equal(window.buffer.cpu(), _pattern(3)):
            raise AFDError("the window was mapped, but does not hold what its owner wrote")
        window.buffer.copy_(_pattern(5))
        if kind == "cuda":
            torch.cuda.synchronize()
    finally:
        window.close()
        fabric.collect()


def _fabric(kind: str) -> Fabric:
    return CudaIpcFabric(torch.device("cuda", 0)) if kind == "cuda" else SharedMemoryFabric()


def _pattern(factor: int) -> torch.Tensor:
    return (torch.arange(NBYTES) * factor + 1).to(torch.uint8)


if __name__ == "__main__":
    try:
        use_window(*sys.argv[1:])
    except Exception as error:
        sys.exit(one_line(error))
