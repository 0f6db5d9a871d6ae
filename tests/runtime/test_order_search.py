# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of small groups, and random ones of larger groups: the order of units never deadlocks.

A world of attention threads, FFN loops and the real sequencer. A move is one call or one message; the slots are counts
of what was sent and answered. The rules that threads must keep are needed: without one, a deadlock is found.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from afd_runtime.control_plane.messages import Announce, Order, StageStep
from afd_runtime.control_plane.sequencer import Sequencer

LAYERS = 2
Op = tuple[str, tuple[int, ...]]  # announce, send, wait; stages
Program = tuple[Op, ...]
Move = tuple[str, int, int | None]


def forward(*stages: int) -> Program:
    """Announces all stages at once; sends each layer in all of them, then waits in all of them."""
    one = [(name, (stage,)) for name in ("send", "wait") for stage in stages]
    return (("announce", stages), *one * LAYERS)


def announced_apart(*stages: int) -> Program:
    return (*(("announce", (stage,)) for stage in stages), *forward(*stages)[1:])


def waits_at_once(*stages: int) -> Program:
    """Waits for a layer in one stage before it sends that layer in the next."""
    one = [(name, (stage,)) for stage in stages for name in ("send", "wait")]
    return (("announce", stages), *one * LAYERS)


@dataclass
class World:
    """threads: (attention rank, program, warm-up). loops: a stage each, or None for one that serves whole units."""

    threads: tuple[tuple[int, Program, bool], ...]
    loops: tuple[int | None, ...] = (0, 1)
    ffn_ranks: int = 2
    at: list[int] = field(default_factory=list)
    announced: dict[tuple[int, int], int] = field(default_factory=dict)  # steps by lane
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # layers by lane, over all steps
    waited: dict[tuple[int, int], int] = field(default_factory=dict)
    answered: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by FFN rank and lane
    sequencer: Sequencer = field(default_factory=Sequencer)
    links: list[deque[tuple[Order, ...]]] = field(default_factory=list)  # to FFN rank 1 …
    queues: list[dict[int, deque[Order]]] = field(default_factory=list)
    serving: dict[tuple[int, int | None], tuple[tuple[Order, ...], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = self.at or [0] * len(self.threads)
        self.links = self.links or [deque() for _ in range(self.ffn_ranks)]
        self.queues = self.queues or [{} for _ in range(self.ffn_ranks)]

    def copy(self) -> World:
        shared = {id(self.threads): self.threads, id(self.loops): self.loops}
        return copy.deepcopy(self, shared)

    def key(self) -> tuple:
        entries = [(e.attention_rank, e.kind, tuple(e.steps.values())) for e in self.sequencer._pending]
        queues = [tuple(tuple(queue.get(stage, ())) for stage in range(4)) for queue in self.queues]
        return (
            tuple(self.at), tuple(entries), tuple(tuple(link) for link in self.links), tuple(queues),
            tuple(sorted(self.serving.items(), key=str)),
        )  # fmt: skip

    def done(self) -> bool:
        return all(at == len(program) for at, (_, program, _) in zip(self.at, self.threads, strict=True))

    def moves(self) -> Iterator[Move]:
        for number, (rank, program, _) in enumerate(self.threads):
            if self.at[number] < len(program) and self._can_go_on(rank, *program[self.at[number]]):
                yield "thread", number, None
        for ffn_rank in range(self.ffn_ranks):
            if self.links[ffn_rank]:
                yield "deliver", ffn_rank, None
            for loop in self.loops:
                if (ffn_rank, loop) in self.serving:
                    if self._requested(ffn_rank, loop):
                        yield "answer", ffn_rank, loop
                elif self._queued(ffn_rank, loop) or (ffn_rank == 0 and self._is_pending(loop)):
                    yield "take", ffn_rank, loop

    def _can_go_on(self, rank: int, name: str, stages: tuple[int, ...]) -> bool:
        lane = (rank, stages[0])
        wanted = self.waited.get(lane, 0) + 1
        return name != "wait" or all(self.answered.get((f, *lane), 0) >= wanted for f in range(self.ffn_ranks))

    def _is_pending(self, loop: int | None) -> bool:
        return any(loop is None or loop in entry.steps for entry in self.sequencer._pending)

    def _queued(self, ffn_rank: int, loop: int | None) -> list[deque[Order]]:
        queues = [queue for stage, queue in self.queues[ffn_rank].items() if queue and loop in (None, stage)]
        number = min((queue[0].number for queue in queues), default=0)
        return [queue for queue in queues if queue[0].number == number]

    def _exchange(self, ffn_rank: int, loop: int | None) -> tuple[int, Order]:
        orders, position = self.serving[ffn_rank, loop]
        return position // len(orders), orders[position % len(orders)]

    def _requested(self, ffn_rank: int, loop: int | None) -> bool:
        layer, order = self._exchange(ffn_rank, loop)
        return all(
            self.sent.get((lane.attention_rank, order.stage), 0) > lane.lane_step * LAYERS + layer
            for lane in order.participants
        )

    def apply(self, move: Move) -> None:
        name, who, loop = move
        {"thread": self._thread, "deliver": self._deliver, "take": self._take, "answer": self._answer}[name](who, loop)

    def _thread(self, number: int, _: int | None) -> None:
        rank, program, warmup = self.threads[number]
        name, stages = program[self.at[number]]
        self.at[number] += 1
        if name == "announce":
            steps = []
            for stage in stages:
                steps.append(StageStep(stage, self.announced.get((rank, stage), 0), 1))
                self.announced[rank, stage] = steps[-1].lane_step + 1
            self.sequencer.announce(rank, 1, Announce(tuple(steps), warmup))
        else:
            counts = self.sent if name == "send" else self.waited
            counts[rank, stages[0]] = counts.get((rank, stages[0]), 0) + 1

    def _deliver(self, ffn_rank: int, _: int | None) -> None:
        self._enqueue(ffn_rank, self.links[ffn_rank].popleft())

    def _enqueue(self, ffn_rank: int, unit: Iterable[Order]) -> None:
        for order in unit:
            self.queues[ffn_rank].setdefault(order.stage, deque()).append(order)

    def _take(self, ffn_rank: int, loop: int | None) -> None:
        while not self._queued(ffn_rank, loop):
            unit = self.sequencer.take(loop)
            for link in self.links[1:]:
                link.append(unit)
            self._enqueue(0, unit)
        orders = [queue.popleft() for queue in self._queued(ffn_rank, loop)]
        self.serving[ffn_rank, loop] = (tuple(sorted(orders, key=lambda order: order.stage)), 0)

    def _answer(self, ffn_rank: int, loop: int | None) -> None:
        _, order = self._exchange(ffn_rank, loop)
        for lane in order.participants:
            key = (ffn_rank, lane.attention_rank, order.stage)
            self.answered[key] = self.answered.get(key, 0) + 1
        orders, position = self.serving.pop((ffn_rank, loop))
        if position + 1 < LAYERS * len(orders):
            self.serving[ffn_rank, loop] = (orders, position + 1)


def search(world: World) -> tuple[int, World | None]:
    """Every state that can be reached. Returns how many there are, and the first one in which nothing can move."""
    seen, stack = {world.key()}, [world]
    while stack:
        state = stack.pop()
        moves = list(state.moves())
        if not moves and not state.done():
            return len(seen), state
        for move in moves:
            child = state.copy()
            child.apply(move)
            if child.key() not in seen:
                seen.add(child.key())
                stack.append(child)
    return len(seen), None


def two_ranks(program: Callable[..., Program], forwards: int = 1) -> tuple[tuple[int, Program, bool], ...]:
    return ((0, program(0, 1) * forwards, False), (1, program(1, 0) * forwards, False))


@pytest.mark.parametrize("loops", [(0, 1), (None,)])
def test_no_interleaving_of_two_ranks_with_opposite_orders_deadlocks(loops: tuple[int | None, ...]) -> None:
    states, stuck = search(World(two_ranks(forward, 2), loops))
    assert stuck is None and states > 2000


@pytest.mark.parametrize("program", [announced_apart, waits_at_once])
def test_a_thread_that_breaks_a_rule_can_deadlock(program: Callable[..., Program]) -> None:
    _, stuck = search(World(two_ranks(program)))
    assert stuck is not None


def test_ranks_that_wait_at_once_in_the_same_order_do_not_deadlock() -> None:
    _, stuck = search(World(((0, waits_at_once(0, 1), False), (1, waits_at_once(0, 1), False))))
    assert stuck is None


def random_world(random: Random) -> World:
    """Three ranks, three stages; a rank has one thread for all its stages, or one for each of two sets of them."""
    threads = []
    for rank in range(3):
        stages = random.sample(range(3), random.randint(1, 3))
        cut = random.choice((0, 1)) if len(stages) > 1 else 0
        for part in filter(None, (stages[:cut], stages[cut:])):
            program: Program = ()
            for _ in range(random.randint(1, 4)):
                program += forward(*random.sample(part, random.randint(1, len(part))))
            threads.append((rank, program, random.random() < 0.3))
    return World(tuple(threads), random.choice(((0, 1, 2), (None,))), random.choice((1, 2, 3)))


@pytest.mark.parametrize("seed", range(5))
def test_random_groups_finish_in_random_orders(seed: int) -> None:
    for attempt in range(200):
        random = Random(1000 * seed + attempt)
        world = random_world(random)
        while moves := list(world.moves()):
            world.apply(random.choice(moves))
        assert world.done(), (seed, attempt, world)
