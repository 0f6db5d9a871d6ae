# SPDX-License-Identifier: Apache-2.0
"""Event logs: each rank appends what happens to its lanes, with ``AFD_EVENT_LOG=DIR``; ``replay`` checks them.

A line of ``DIR/<rank>-<process>-<n>.jsonl`` is one ``LogEvent`` without its process, as a JSON array. It is written by
one write(2) before the call returns, so a process that is killed has logged all that it did. The clock is
CLOCK_MONOTONIC, in nanoseconds, which the processes of one host share.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from afd_runtime import envs
from afd_runtime.errors import AFDConfigError
from afd_runtime.protocol import Event, Lane
from afd_runtime.replay import WORD_EVENTS, LogEvent


class EventLog:
    """The log of one rank, from any thread.

    rank: ``"A0"`` or ``"F1"``. words: False where only the device sees the words; ``WORD_EVENTS`` are then left out.
    """

    def __init__(self, directory: str | os.PathLike, rank: str, *, words: bool = True) -> None:
        self.rank, self.words = rank, words
        self._gone: set[tuple[Lane, int, int | None]] = set()
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = _create(directory, f"{rank}-{os.getpid()}")
        except OSError as error:
            raise AFDConfigError(
                f"AFD_EVENT_LOG={os.fspath(directory)!r} cannot be written: {error}; allowed: a directory that this "
                "process may write to, or unset"
            ) from error

    @classmethod
    def of(cls, rank: str, *, words: bool) -> EventLog | None:
        """The log that ``AFD_EVENT_LOG`` asks for, or None. Raises ``AFDConfigError`` where it cannot be written."""
        directory = envs.AFD_EVENT_LOG.get()
        return cls(directory, rank, words=words) if directory else None

    def note(
        self, event: Event, lane: Lane, step: int, exchange: int, *, session: int, peer: int | None = None
    ) -> None:
        """Stamps and appends one event. Call it before the store of a publish and after the load of a see."""
        if self.words or event not in WORD_EVENTS:
            entry = (time.monotonic_ns(), self.rank, lane, step, exchange, event.value, peer, session)
            line = entry if self.words or event is not Event.ATTACH else (*entry, False)
            self._file.write(msgspec.json.encode(line) + b"\n")

    def note_stages(
        self, event: Event, attention_rank: int, steps: Iterable[int], *, session: int, peer: int | None = None
    ) -> None:
        """One event in each stage of a rank. steps: the step that each stage is in."""
        for stage, step in enumerate(steps):
            self.note(event, (attention_rank, stage), max(0, step), 0, session=session, peer=peer)

    def note_loss(self, lane: Lane, step: int, *, session: int, peer: int) -> None:
        """A loss of FFN rank ``peer``, once in a session."""
        if (lane, session, peer) not in self._gone:
            self._gone.add((lane, session, peer))
            self.note(Event.LOSE, lane, max(0, step), 0, session=session, peer=peer)

    def note_given_up(self, lane: Lane, step: int, *, session: int, known: bool = False) -> None:
        """FFN rank: the attention rank gave ``step`` up, and the slots are free. known: this side gave it up before."""
        for event in (Event.CONFIRM,) if known else (Event.ABORT, Event.CONFIRM):
            self.note(event, lane, step, 0, session=session)


def _create(directory: str | os.PathLike, name: str):
    """A new file, unbuffered: every write is one write(2) at the file's end."""
    for n in itertools.count():
        path = os.path.join(directory, f"{name}-{n}.jsonl")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
        return open(fd, "wb", buffering=0)
    raise AssertionError


def read_logs(directory: str | os.PathLike) -> list[LogEvent]:
    """The events of all logs in ``directory``, by time. A last line without its end was never logged.

    Raises ``ValueError`` where there is no log, or a line that is no event.
    """
    paths = sorted(Path(directory).glob("*.jsonl"))
    if not paths:
        raise ValueError("no event logs; run the ranks with AFD_EVENT_LOG set to this directory")
    return sorted((entry for path in paths for entry in _read(path)), key=lambda entry: entry.time)


def _read(path: Path) -> Iterable[LogEvent]:
    lines = path.read_text().split("\n")[:-1]
    decoder = msgspec.json.Decoder(LogEvent)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)._replace(process=path.stem)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path.name}, line {number} is no event: {error}") from None
