# SPDX-License-Identifier: Apache-2.0
"""A group of child processes that starts together and never outlives its owner.

Children write one JSON object a line to stdout (an *event*) and whatever they like to stderr, of which the last lines
are kept for the error that names a child. On Linux the kernel kills a child when its owner dies, whatever ended it.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afd_runtime.progress import Display

STDERR_LINES = 20
POLL_S = 0.1
GRACE_S = 0.5

# Runs before the child's own program: PR_SET_PDEATHSIG survives execv. A parent that has died before is noticed too.
_BOOTSTRAP = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class ChildFailed(RuntimeError):
    """A child ended although it was still needed. The message names it and quotes its last stderr lines."""


@dataclass
class Child:
    """One started process. ``runs_to_end`` is False for a server: if it ends by itself, that is an error."""

    name: str
    process: subprocess.Popen[str]
    runs_to_end: bool
    stderr: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=STDERR_LINES))
    readers: list[threading.Thread] = field(default_factory=list)

    def describe_end(self) -> str:
        """How this child ended, with its last stderr lines indented below."""
        code = self.process.returncode
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        lines = [line for line in self.stderr if line.strip()]
        quoted = "".join(f"\n    {line}" for line in lines) or "\n    (nothing)"
        return f"{self.name} (process {self.process.pid}) {how}; its last lines on stderr:{quoted}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessGroup:
    """Context manager that owns the children started in it; leaving it, for whatever reason, ends them all.

    Start children from the main thread: the kernel ties a child's life to the thread that started it.
    """

    def __init__(self, *, stop_timeout_s: float = 5.0, forward_stderr: bool = False) -> None:
        self.children: list[Child] = []
        self.events: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()
        self._stop_timeout_s = stop_timeout_s
        self._forward_stderr = forward_stderr
        self._old_handler: Any = None

    def __enter__(self) -> ProcessGroup:
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)

    def start(
        self, name: str, argv: Sequence[str], *, runs_to_end: bool, env: Mapping[str, str] | None = None
    ) -> Child:
        """Starts ``argv`` as a child called ``name`` in messages. ``env`` is added to this process's environment."""
        process = subprocess.Popen(
            _tied_to_parent(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C reaches the owner alone, which then stops the children in order
        )
        child = Child(name, process, runs_to_end)
        self.children.append(child)
        for target, stream in ((self._read_events, process.stdout), (self._read_stderr, process.stderr)):
            reader = threading.Thread(target=target, args=(child, stream), daemon=True)
            reader.start()
            child.readers.append(reader)
        return child

    def next_event(self) -> tuple[Child, dict[str, Any]] | None:
        """The next event, or None after a short wait. Raises ``ChildFailed`` once a child has ended too early."""
        try:
            return self.events.get(timeout=POLL_S)
        except queue.Empty:
            self.check()
            return None

    def check(self) -> None:
        """Raises ``ChildFailed`` if a child has failed. Servers come first: a client often fails because they did."""
        if not self._failed():
            return
        time.sleep(GRACE_S)  # the cause and its consequences end at nearly the same time: name them all
        failed = sorted(self._failed(), key=lambda child: (child.runs_to_end, child.process.returncode >= 0))
        for child in failed:
            _join(child.readers, 1.0)
        raise ChildFailed("\n".join(child.describe_end() for child in failed))

    def finished(self, children: Iterable[Child]) -> bool:
        """True once all of ``children`` have ended well and all that they wrote has been read."""
        return all(c.process.poll() == 0 and not any(r.is_alive() for r in c.readers) for c in children)

    def stop(self) -> None:
        """Ends every child: SIGTERM, clients before servers, then SIGKILL for those that are left. Never raises."""
        for child in sorted(self.children, key=lambda child: not child.runs_to_end):
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_timeout_s
        for child in self.children:
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(child, signal.SIGKILL)
                child.process.wait()
            _join(child.readers, 1.0)

    def _failed(self) -> list[Child]:
        return [c for c in self.children if (code := c.process.poll()) is not None and (code or not c.runs_to_end)]

    def _read_events(self, child: Child, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.events.put((child, _parse_event(line)))

    def _read_stderr(self, child: Child, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                child.stderr.append(line.rstrip())
                if self._forward_stderr:
                    print(f"[{child.name}] {line.rstrip()}", file=sys.stderr)


def follow(group: ProcessGroup, children: list[Child], display: Display) -> None:
    """Shows the events of a group until ``children`` have ended well. Raises ``ChildFailed``."""
    while not (group.finished(children) and group.events.empty()):
        item = group.next_event()
        if item is None:
            continue
        child, event = item
        if event["event"] == "progress":
            display.progress(child.name, event["done"], event["total"])
        elif event["event"] == "note":
            display.note(child.name, event["text"])


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """A socket that holds TCP ``port`` of ``host`` (0: a free one) while it is open, and lets one listener bind it too.

    It is bound and never listens, so a listener that sets SO_REUSEADDR (as ZeroMQ does) may take the port, and nobody
    is handed it by accident in between. Raises ``OSError`` for a port that is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def python_script(script: Path, *arguments: str) -> list[str]:
    """The command line that runs the file ``script`` in this interpreter."""
    return [sys.executable, str(script), *arguments]


def _tied_to_parent(argv: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), *argv]


def _parse_event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) and "event" in event else {"event": "note", "text": line.rstrip()}


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def _join(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    for thread in threads:
        thread.join(timeout_s)
