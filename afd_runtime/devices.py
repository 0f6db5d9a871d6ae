# SPDX-License-Identifier: Apache-2.0
"""What this host has. Nothing here starts CUDA."""

from __future__ import annotations

import os

import torch

from afd_runtime.errors import AFDConfigError


def single_gpu_host() -> bool:
    """True on a host with one GPU, where ranks of different processes can only share it."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus")) == 1
    except OSError:
        return torch.cuda.device_count() == 1


def use_device(device: torch.device) -> None:
    """Makes a GPU the one that this thread launches on. Nothing happens for a CPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def check_current(device: torch.device) -> None:
    """Raises ``AFDConfigError`` where ``device`` is a GPU that this thread does not launch on."""
    if device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device():
        raise AFDConfigError(
            f"device is {device}, and this thread launches on cuda:{torch.cuda.current_device()}; call "
            f"torch.cuda.set_device({device.index}) in each thread that runs steps"
        )
