# SPDX-License-Identifier: Apache-2.0
"""The order of steps. Pure: no socket, no thread; the caller holds the lock.

Without one order for all FFN ranks, two attention and two FFN ranks deadlock: each FFN rank serves another lane first
and waits for its next layer, which the lane cannot send before the other FFN rank has answered.
"""

from __future__ import annotations

from afd_runtime.control_plane.messages import Announce, Order, Participant


class Sequencer:
    """Numbers the steps of each stage and merges announcements that are pending at the same time."""

    def __init__(self, num_stages: int) -> None:
        self._pending: list[dict[int, tuple[Participant, Announce]]] = [{} for _ in range(num_stages)]
        self._number = 0

    def announce(self, attention_rank: int, session: int, announce: Announce) -> None:
        """Adds a pending step. A newer announcement of the same lane replaces one that was never served."""
        participant = Participant(attention_rank, session, announce.lane_step, announce.rows)
        self._pending[announce.stage].pop(attention_rank, None)
        self._pending[announce.stage][attention_rank] = (participant, announce)

    def withdraw(
        self, attention_rank: int, session: int, stage: int | None = None, lane_step: int | None = None
    ) -> None:
        """Forgets what this lane announced (all stages and steps where None): it was aborted or lost."""
        for index, pending in enumerate(self._pending):
            entry = pending.get(attention_rank)
            if entry is None or entry[0].session != session or stage not in (None, index):
                continue
            if lane_step is None or entry[0].lane_step <= lane_step:
                del pending[attention_rank]

    def has_pending(self, stage: int | None = None) -> bool:
        """Whether ``take`` would give an order."""
        return any(self._pending if stage is None else self._pending[stage : stage + 1])

    def take(self, stage: int | None = None) -> Order | None:
        """The next order of ``stage`` (None: of the lowest stage that has one): all that is pending, of one kind."""
        stages = range(len(self._pending)) if stage is None else (stage,)
        for index in stages:
            pending = self._pending[index]
            if not pending:
                continue
            kind = _kind(next(iter(pending.values()))[1])
            chosen = {rank: entry for rank, entry in pending.items() if _kind(entry[1]) == kind}
            for rank in chosen:
                del pending[rank]
            self._number += 1
            participants = tuple(chosen[rank][0] for rank in sorted(chosen))
            return Order(self._number, index, participants, *kind)
        return None


def _kind(announce: Announce) -> tuple[bool, bool, bool]:
    return announce.is_warmup, announce.is_graph_capturing, announce.is_graph_replaying
