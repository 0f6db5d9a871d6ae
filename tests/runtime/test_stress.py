# SPDX-License-Identifier: Apache-2.0
"""Random steps with ranks killed and replaced: right values, logs that obey the protocol. And every word of a slot."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from group import SPEC, Child, Failed, Group, new_group
from stress import random_steps
from words import Plan, exchange_words

from afd_runtime.event_log import read_logs
from afd_runtime.protocol import Event
from afd_runtime.replay import Replay

pytestmark = pytest.mark.timeout(120)
STEPS = 80


def kill_in_its_steps(child: Child, log: Path, seed: int) -> None:
    """SIGKILL, a random moment after the process has logged what a few steps log."""
    deadline = time.monotonic() + 20
    while sum(path.read_text().count("\n") for path in log.glob(f"*-{child.process.pid}-*")) < 100:
        assert time.monotonic() < deadline, "the process logs nothing"
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 0.2))
    child.process.kill()
    child.process.join(10)
    assert child.process.exitcode == -signal.SIGKILL


def run_with_losses(group: Group, log: Path, seed: int, threads: bool = False) -> int:
    """Two attention and two FFN ranks; one of each is killed and replaced. Returns the steps that ended for sure."""
    ffn, (lasting, doomed) = group.start_all()
    lasting.start("run", random_steps, STEPS, seed, threads=threads)
    doomed.start("run", random_steps, 10**6, seed + 1, threads=threads)
    kill_in_its_steps(doomed, log, seed)
    reports = [lasting.result(60)]
    successor = group.attention(1)
    for index, child in enumerate((lasting, successor)):
        child.start("run", random_steps, STEPS, seed + 2 + index, sessions=2, threads=threads)
    kill_in_its_steps(ffn[1], log, seed + 1)
    ffn[1] = group.ffn(1)
    reports += [child.result(60) for child in (lasting, successor)]
    assert sum(report["given_up"] for report in reports) >= 10, reports
    for child in (lasting, successor):
        child.call("close")
    group.end(ffn)
    return sum(report["steps"] for report in reports)


@pytest.mark.parametrize(("stages", "threads"), [(1, False), (2, False), (2, True)])
def test_random_steps_with_losses_obey_the_protocol(stages: int, threads: bool, tmp_path: Path) -> None:
    with new_group(2, 2, num_stages=stages, env={"AFD_EVENT_LOG": str(tmp_path)}) as group:
        steps = run_with_losses(group, tmp_path, 100 * stages, threads)
    log = read_logs(tmp_path)
    Replay.check(log)
    seen = Counter(entry.event for entry in log)
    assert set(seen) == {event.value for event in Event}
    assert len({entry.process for entry in log}) == 6
    exchanges = steps * len(SPEC.expert_layers)
    assert seen["see_reply"] >= exchanges and seen["see_request"] >= 2 * exchanges, seen
    assert len(log) >= (1 + 3 * len(SPEC.expert_layers)) * steps * (1 + group.options["num_ffn_ranks"])


@pytest.mark.parametrize(("dtype", "hidden_size"), [(torch.float32, 40), (torch.bfloat16, 41)])
def test_every_word_is_rewritten_in_each_exchange_and_read_right(dtype: torch.dtype, hidden_size: int) -> None:
    plan = Plan(steps=100, dtype=dtype, hidden_size=hidden_size)
    exchanges, layout = plan.steps * plan.exchanges, plan.layout
    output = plan.rows * plan.hidden_size * dtype.itemsize
    expected = exchanges * (layout.reply.nbytes + output), exchanges * layout.request.nbytes
    assert exchange_words(plan) == expected


@pytest.mark.parametrize(
    ("fault", "found"),
    [("early", r"request: \d+ wrong bytes in exchange \d of step \d"),
     ("stale", r"reply: \d+ wrong bytes in exchange 1 of step 5")],
)  # fmt: skip
def test_a_wrong_word_is_found(fault: str, found: str) -> None:
    with pytest.raises(Failed, match=found):
        exchange_words(Plan(steps=10, fault=fault))
