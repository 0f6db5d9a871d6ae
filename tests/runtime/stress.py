# SPDX-License-Identifier: Apache-2.0
"""Random steps of an attention process: rows, layouts, pauses, stages, steps given up; every value is checked."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from group import oracle, random_layer

from afd_runtime.errors import AFDPeerLost, AFDStepAborted
from afd_runtime.remote_experts import AttentionSession


@dataclass
class Tally:
    """What one driver did. steps: that ended; given_up: by this rank; lost: units that a loss ended."""

    steps: int = 0
    given_up: int = 0
    lost: int = 0
    rows: int = 0


class Driver:
    """Draws units of steps from a seed, runs them in ``stages`` and compares each reply with the oracle."""

    def __init__(self, session: AttentionSession, seed: int, stages: list[int]) -> None:
        self.session, self.spec, self.random, self.stages = session, session.spec, random.Random(seed), stages
        self.side, self.tally = session.connector.attention, Tally()

    def run(self, steps: int, sessions: int, end: float) -> None:
        """Units until ``steps`` steps have ended and ``sessions`` sessions were seen. A lost unit is given up."""
        known = {self.session.session}
        while self.tally.steps < steps or len(known) < sessions:
            if time.monotonic() > end:
                raise TimeoutError(f"stages {self.stages}: {self.tally}, {len(known)} sessions when time was up")
            try:
                self.unit()
            except (AFDPeerLost, AFDStepAborted):
                self.tally.lost += 1
                for stage in self.stages:
                    self.session.abort_step("a peer was lost", stage)
            known.add(self.session.session)

    def unit(self) -> None:
        """One step in a random set of stages, announced at once; a stage may give its step up on the way."""
        draw = self.random
        stages = sorted(draw.sample(self.stages, draw.randint(1, len(self.stages))))
        cap = self.session.max_rows
        rows = {stage: draw.choice((0, 1, cap, draw.randint(0, cap))) for stage in stages}
        leaves = {stage: draw.randrange(9) for stage in stages if draw.random() < 0.12}  # layer * 3 + where in it
        self.session.begin_steps(rows)
        outputs, left = [], set()
        for index, layer in enumerate(self.spec.expert_layers):
            sent = {}
            for stage in stages:
                self._leave(stage, leaves, 3 * index, left)
                if stage not in left:
                    sent[stage] = self._send(layer, stage, rows[stage])
                self._leave(stage, leaves, 3 * index + 1, left)
            for stage in [stage for stage in sent if stage not in left]:
                out = self.side.recv_ffn_output(sent[stage][0].to(self.side.device), layer_idx=layer, stage=stage)
                outputs.append((layer, *sent[stage], out))
                self._leave(stage, leaves, 3 * index + 2, left)
            self._pause()
        for stage in stages:
            if stage not in left:
                self.session.end_step(stage)
                self.tally.steps, self.tally.rows = self.tally.steps + 1, self.tally.rows + rows[stage]
        for layer, hidden, ids, weights, out in outputs:
            want = oracle(self.spec, layer, hidden, ids, weights)
            torch.testing.assert_close(out.cpu().double(), want, rtol=2e-5, atol=2e-5)

    def _leave(self, stage: int, leaves: dict[int, int], place: int, left: set[int]) -> None:
        if leaves.get(stage) == place and stage not in left:
            self.session.abort_step("the driver gives it up", stage)
            self.tally.given_up += 1
            left.add(stage)

    def _send(self, layer: int, stage: int, rows: int) -> tuple[torch.Tensor, ...]:
        one = self.random.randrange(self.spec.num_experts)
        experts = range(one, one + 1) if self.random.random() < 0.2 else None
        inputs = random_layer(self.spec, rows, self.random.randrange(1 << 30), experts)
        hidden, ids, weights = (tensor.to(self.side.device) for tensor in inputs)
        self.side.send_attn_output(hidden, layer_idx=layer, stage=stage, topk_ids=ids, topk_weights=weights)
        return inputs

    def _pause(self) -> None:
        if self.random.random() < 0.1:
            time.sleep(self.random.uniform(0.0, 0.01))


def random_steps(
    session: AttentionSession, steps: int, seed: int, *, sessions: int = 1, threads: bool = False, limit_s: float = 40.0
) -> dict:
    """Units until ``steps`` steps have ended and the rank has been in ``sessions`` sessions. Returns its ``Tally``.

    threads: each stage has a thread of its own, and a share of the steps; else one thread drives them all.
    """
    stages = range(session.config.num_stages)
    parts = [[stage] for stage in stages] if threads else [list(stages)]
    drivers = [Driver(session, seed + 1000 * index, part) for index, part in enumerate(parts)]
    with ThreadPoolExecutor(len(drivers)) as pool:
        share, end = -(-steps // len(drivers)), time.monotonic() + limit_s
        for run in [pool.submit(driver.run, share, sessions, end) for driver in drivers]:
            run.result()
    totals = [asdict(driver.tally) for driver in drivers]
    return {name: sum(total[name] for total in totals) for name in totals[0]}
