# SPDX-License-Identifier: Apache-2.0
"""Kernel tests: on a GPU where there is one, otherwise in Triton's interpreter."""

import os

# no two streams may share a hardware queue: what a test launches beside a waiting kernel would stand behind it
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch
import triton

if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
    pytest.exit("tests/kernels without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels", returncode=4)

from kernel_harness import DEVICE, DTYPES, counted


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def launches():
    """Counts launches by kernel name for the whole test."""
    with counted() as counter:
        yield counter
