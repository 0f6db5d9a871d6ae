# SPDX-License-Identifier: Apache-2.0
"""Random steps with ranks that are killed and replaced: every value is right, and every event log obeys the protocol."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from group import SPEC, Child, Group, new_group
from stress import random_steps

from afd_runtime.event_log import read_logs
from afd_runtime.protocol import Event
from afd_runtime.replay import Replay

pytestmark = pytest.mark.timeout(120)
STEPS = 60


def kill_in_its_steps(child: Child, seed: int) -> None:
    time.sleep(random.Random(seed).uniform(0.3, 0.6))
    child.process.kill()
    child.process.join(10)
    assert child.process.exitcode == -signal.SIGKILL


def run_with_losses(group: Group, seed: int) -> int:
    """Two attention and two FFN ranks; one of each is killed and replaced. Returns the steps that ended for sure."""
    ffn, (lasting, doomed) = group.start_all()
    lasting.start("run", random_steps, STEPS, seed)
    doomed.start("run", random_steps, 10**6, seed + 1)
    kill_in_its_steps(doomed, seed)
    reports = [lasting.result(60)]
    successor = group.attention(1)
    for index, child in enumerate((lasting, successor)):
        child.start("run", random_steps, STEPS, seed + 2 + index, sessions=2)
    kill_in_its_steps(ffn[1], seed + 1)
    ffn[1] = group.ffn(1)
    reports += [child.result(60) for child in (lasting, successor)]
    assert all(report["sessions"] >= 2 for report in reports[1:]), reports
    assert sum(report["given_up"] for report in reports) >= 10, reports
    for child in (lasting, successor):
        child.call("close")
    group.end(ffn)
    return sum(report["steps"] for report in reports)


@pytest.mark.parametrize("stages", [1, 2])
def test_random_steps_with_losses_obey_the_protocol(stages: int, tmp_path: Path) -> None:
    with new_group(2, 2, num_stages=stages, env={"AFD_EVENT_LOG": str(tmp_path)}) as group:
        steps = run_with_losses(group, seed=100 * stages)
    log = read_logs(tmp_path)
    Replay.check(log)
    seen = Counter(entry.event for entry in log)
    assert set(seen) == {event.value for event in Event}
    assert len({entry.process for entry in log}) == 6
    exchanges = steps * len(SPEC.expert_layers)
    assert seen["see_reply"] >= exchanges and seen["see_request"] >= 2 * exchanges, seen
    assert len(log) >= (1 + 3 * len(SPEC.expert_layers)) * steps * (1 + group.options["num_ffn_ranks"])
