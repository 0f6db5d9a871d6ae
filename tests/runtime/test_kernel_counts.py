# SPDX-License-Identifier: Apache-2.0
"""Launches by kernel name: what is captured counts with each replay, and every graph apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from afd_runtime.errors import AFDError
from afd_runtime.kernel_counts import FFNCounts, KernelCounts, total_counts


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch):
    """Plays a launch through Triton's hook, on a stream that is captured or not."""

    def play(*names: str, capturing: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        for name in names:
            triton.knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda name=name: {"name": name}))

    return play


def _graphs(**replays: int) -> SimpleNamespace:
    return SimpleNamespace(graphs=dict.fromkeys(replays), replays=replays)


def test_captured_launches_count_with_the_replays_of_their_graph(launch) -> None:
    launch("before")
    counts = KernelCounts.start()
    try:
        for extra in ([], ["_wide_kernel"], []):
            launch("_wait_kernel", "_up_kernel")  # the eager run in front of each capture
            launch("_wait_kernel", "_up_kernel", *extra, capturing=True)
        counts.launches.clear()
        launch("_open_kernel")
        stages = {0: _graphs(small=3, large=2), 1: _graphs(small=0)}
        server = SimpleNamespace(runner=SimpleNamespace(stage_graphs=stages), steps_served=5)
        found = counts.of_server(server)
    finally:
        counts.stop()
    launch("after")
    kernels = {"_wait_kernel": 5, "_up_kernel": 5, "_wide_kernel": 2, "_open_kernel": 1}
    assert found == FFNCounts(kernels, replays=5, steps=5)
    with pytest.raises(AFDError, match="3 captures were seen for 1 graphs"):
        counts.replayed([_graphs(small=1)])


def test_totals_of_a_run() -> None:
    ffn = [FFNCounts({"_wait_kernel": 2}, replays=1, steps=1), FFNCounts({"_up_kernel": 1}, replays=2, steps=3)]
    assert total_counts([{"_pack_kernel": 4}, {"_pack_kernel": 1}], ffn) == {
        "attention": {"_pack_kernel": 5},
        "ffn": {"_up_kernel": 1, "_wait_kernel": 2},
        "ffn_steps": 4,
        "ffn_replays": 3,
    }
