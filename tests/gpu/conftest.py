# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

# one process plays both roles here: a kernel's first launch must not wait for a kernel that waits for a peer
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# and no two streams may share a hardware queue: the kernel behind a waiting one would be the one it waits for
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in (i for i in items if Path(__file__).parent in i.path.parents):
            item.add_marker(pytest.mark.skip(reason="no GPU"))
