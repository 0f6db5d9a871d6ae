# SPDX-License-Identifier: Apache-2.0
"""Attention → FFN → attention on one GPU, both roles in one process, all layers in CUDA graphs.

``python -m benchmarks.exchange OUT.json`` compares each case's output with ``fused_experts`` and an fp64 oracle, then
measures it: a layer and its parts (bar P8), arrival + reply + combine (P7), gate + dispatch (P6), the FFN side's host
time, graphs and memory (P9), and what a delay on one side does to the other.
"""

import os

# Both roles live in one process: a kernel's first launch must not wait for one that waits for a peer, and no two
# streams may share a hardware queue. CUDA reads both when it starts.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
