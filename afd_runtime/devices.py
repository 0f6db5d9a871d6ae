# SPDX-License-Identifier: Apache-2.0
"""What this host has. Nothing here starts CUDA."""

from __future__ import annotations

import os

import torch


def single_gpu_host() -> bool:
    """True on a host with one GPU, where ranks of different processes can only share it."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus")) == 1
    except OSError:
        return torch.cuda.device_count() == 1
