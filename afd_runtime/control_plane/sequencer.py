# SPDX-License-Identifier: Apache-2.0
"""The order of steps. Pure: no socket, no thread; the caller holds the lock.

Without one order for all FFN ranks, two attention and two FFN ranks deadlock: each FFN rank serves another lane first
and waits for its next layer, which the lane cannot send before the other FFN rank has answered. Stages that were
ordered apart would do the same to threads that drive several stages. So whole announcements are ordered, in *units*: a
unit has a number and an order for each of its stages, and FFN ranks put all of them into the queues of the stages.

Nobody waits for ever, provided that a thread announces the stages of a forward at once, announces the next forward
after the last one has ended, and has sent a layer in each lower stage before it waits for that layer's reply:

- Numbers are given in one sequence, and each stage's queue on each FFN rank is a subsequence of it. So nothing stands
  before the lowest unfinished unit in any queue: on every FFN rank its stages are served, or the next to be.
- Each lane of that unit comes from an announcement that is in the unit as a whole (less what was given up or lost), so
  its thread waits for replies of this unit only.
- Of the unit's exchanges take the first unanswered one, by layer, then by stage. Its lanes have the replies of all
  before it, so their threads send it before they wait again; the FFN ranks have answered all before it, so they answer.
- A unit begins with the earliest of the announcements that share stages, directly or through others, and holds all of
  its kind that do: an announcement is overtaken only by those that an earlier one takes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afd_runtime.control_plane.messages import Announce, Order, Participant, StageStep
from afd_runtime.errors import AFDProtocolError

Kind = tuple[bool, bool, bool]


@dataclass(eq=False)
class _Entry:
    """What is left of one announcement. steps: by stage."""

    attention_rank: int
    session: int
    kind: Kind
    steps: dict[int, StageStep]

    def participant(self, stage: int) -> Participant:
        step = self.steps[stage]
        return Participant(self.attention_rank, self.session, step.lane_step, step.rows)


class Sequencer:
    """Numbers units and merges announcements that are pending at the same time."""

    def __init__(self) -> None:
        self._pending: list[_Entry] = []
        self._number = 0

    def announce(self, attention_rank: int, session: int, announce: Announce) -> None:
        """Adds a pending forward. A newer step of the same lane replaces one that was never ordered."""
        steps = {step.stage: step for step in announce.stages}
        for entry in self._pending:
            if entry.attention_rank == attention_rank:
                entry.steps = {stage: step for stage, step in entry.steps.items() if stage not in steps}
        kind = (announce.is_warmup, announce.is_graph_capturing, announce.is_graph_replaying)
        self._keep([*self._pending, _Entry(attention_rank, session, kind, steps)])

    def withdraw(
        self, attention_rank: int, session: int, stage: int | None = None, lane_step: int | None = None
    ) -> None:
        """Forgets what this rank announced (all stages and steps where None): it was aborted or lost."""
        for entry in self._pending:
            if (entry.attention_rank, entry.session) == (attention_rank, session):
                entry.steps = {
                    index: step
                    for index, step in entry.steps.items()
                    if stage not in (None, index) or (lane_step is not None and step.lane_step > lane_step)
                }
        self._keep(self._pending)

    def take(self, stage: int | None = None) -> tuple[Order, ...]:
        """The unit to be ordered next so that ``stage`` (None: any) gets a step; empty where none is pending for it.

        One order for each stage of the unit, by stage. It may be a unit without ``stage``, which goes first because it
        was announced earlier and shares stages with the one that has it: take again.
        """
        first = self._first(stage)
        if first is None:
            return ()
        unit = self._merged(first)
        self._keep([entry for entry in self._pending if entry not in unit])
        self._number += 1
        orders = []
        for index in sorted({index for entry in unit for index in entry.steps}):
            lanes = [entry.participant(index) for entry in unit if index in entry.steps]
            lanes.sort(key=lambda lane: lane.attention_rank)
            orders.append(Order(self._number, index, tuple(lanes), *first.kind))
        return tuple(orders)

    def _keep(self, entries: list[_Entry]) -> None:
        self._pending = [entry for entry in entries if entry.steps]

    def _first(self, stage: int | None) -> _Entry | None:
        """The earliest announcement with ``stage``, or one before it that it must not overtake."""
        if stage is None:
            return self._pending[0] if self._pending else None
        at = next((at for at, entry in enumerate(self._pending) if stage in entry.steps), None)
        if at is None:
            return None
        first, stages = self._pending[at], set(self._pending[at].steps)
        for entry in reversed(self._pending[:at]):
            if stages & entry.steps.keys():
                first, stages = entry, stages | entry.steps.keys()
        return first

    def _merged(self, first: _Entry) -> list[_Entry]:
        """All of the kind of ``first`` that share a stage with it, or with one that does."""
        unit, stages = [first], set(first.steps)
        rest = [entry for entry in self._pending if entry.kind == first.kind and entry is not first]
        while more := [entry for entry in rest if stages & entry.steps.keys()]:
            unit += more
            stages.update(*(entry.steps for entry in more))
            rest = [entry for entry in rest if entry not in more]
        return unit


def check_announce(sender: str, announce: Announce, announced: Sequence[int], max_rows: int) -> None:
    """Raises ``AFDProtocolError`` for no stage, one twice or out of range, too many rows, a step that does not grow.

    announced: by stage, the last step that the sender announced, -1 for none.
    """
    stages = [step.stage for step in announce.stages]
    if not stages or len(set(stages)) < len(stages) or not all(0 <= stage < len(announced) for stage in stages):
        raise AFDProtocolError(
            f"{sender} announces stages {stages[:16]}; allowed: one or more of 0 … {len(announced) - 1}, each once"
        )
    for step in announce.stages:
        if not 0 <= step.rows <= max_rows:
            raise AFDProtocolError(f"{sender} announces {step.rows} rows; allowed: 0 … {max_rows}")
        if not announced[step.stage] < step.lane_step < 1 << 32:
            raise AFDProtocolError(
                f"{sender} announces step {step.lane_step} of stage {step.stage} after {announced[step.stage]}; "
                "allowed: steps that grow, below 2**32"
            )
