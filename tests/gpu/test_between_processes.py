# SPDX-License-Identifier: Apache-2.0
"""Processes that share one GPU: CUDA IPC windows and doorbells, and what a round trip costs with and without them."""

from __future__ import annotations

import pytest
from group import new_group

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("attention,ffn,stages", [(1, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_groups(attention: int, ffn: int, stages: int) -> None:
    with new_group(attention, ffn, device="cuda", num_stages=stages) as group:
        servers, clients = group.start_all()
        for child in clients:
            child.start("steps", [5, 0, 16, 1, 7] * 4)
        for child in clients:
            child.result(60)
        for stage in range(1, stages):
            clients[0].call("step", 6, seed=3, stage=stage)
        for child in clients:
            child.call("close")
        assert all(report["steps"] >= 20 for report in group.end(servers))
