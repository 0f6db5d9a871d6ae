# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: bars on a terminal, plain lines elsewhere, JSON events from a child to its launcher.

All of it goes to stderr, apart from events, which a launcher reads from a child's stdout.
"""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

LINE_EVERY_S = 1.0
EVENT_EVERY_S = 0.1


class Display(Protocol):
    """Where progress and notes go. ``done`` and ``total`` are bytes; ``total`` 0 means that it is not known."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def progress(self, who: str, done: int, total: int) -> None: ...

    def note(self, who: str, text: str) -> None: ...


class BarDisplay:
    """One bar for each process that loads something; notes scroll above the bars."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> BarDisplay:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def progress(self, who: str, done: int, total: int) -> None:
        if who not in self._tasks:
            self._tasks[who] = self._bars.add_task(who)
        self._bars.update(self._tasks[who], completed=done, total=total or None)

    def note(self, who: str, text: str) -> None:
        self._bars.console.print(f"{who}: {text}", markup=False, highlight=False)


class LineDisplay:
    """Plain lines, at most one a second for each process and always the last one."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def progress(self, who: str, done: int, total: int) -> None:
        if done >= total or _due(self._last, who, LINE_EVERY_S):
            self.note(who, f"loaded {_mib(done)} of {_mib(total)} MiB")

    def note(self, who: str, text: str) -> None:
        print(f"{who}: {text}", file=sys.stderr, flush=True)


class EventDisplay:
    """What a child writes for its launcher: one JSON object a line on stdout. ``who`` is known to the launcher."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __enter__(self) -> EventDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def progress(self, who: str, done: int, total: int) -> None:
        if done >= total or _due(self._last, who, EVENT_EVERY_S):
            emit_event("progress", done=done, total=total)

    def note(self, who: str, text: str) -> None:
        emit_event("note", text=text)


def open_display(*, events: bool = False) -> Display:
    """Events for a launcher, bars on a terminal, plain lines otherwise."""
    if events:
        return EventDisplay()
    console = Console(stderr=True)
    return BarDisplay(console) if console.is_terminal else LineDisplay()


def emit_event(kind: str, **fields: Any) -> None:
    """Writes one event line to stdout."""
    print(json.dumps({"event": kind, **fields}), flush=True)


def _due(last: dict[str, float], who: str, every_s: float) -> bool:
    now = time.monotonic()
    if now - last.get(who, float("-inf")) < every_s:
        return False
    last[who] = now
    return True


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
