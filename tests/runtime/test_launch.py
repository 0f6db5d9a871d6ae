# SPDX-License-Identifier: Apache-2.0
"""The process group: events, the error that names a child, and that no child outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afd_runtime.launch import ChildFailed, ProcessGroup, follow, reserve_port

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


class Recorder:
    """A display that keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def progress(self, who: str, done: int, total: int) -> None:
        self.seen.append((who, done, total))

    def note(self, who: str, text: str) -> None:
        self.seen.append((who, text))


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_events_and_other_lines_arrive_in_order() -> None:
    program = "from afd_runtime.progress import emit_event as e; e('progress', done=1, total=2); print('hello')"
    shown = Recorder()
    with ProcessGroup() as group:
        child = group.start("child", _python(program), runs_to_end=True)
        follow(group, [child], shown)
    assert shown.seen == [("child", 1, 2), ("child", "hello")]


def test_failed_child_is_named_with_its_last_lines() -> None:
    program = "import sys; [print('line', i, file=sys.stderr) for i in range(50)]; sys.exit(9)"
    with ProcessGroup() as group, pytest.raises(ChildFailed) as error:
        server = group.start("server", _python(SLEEP), runs_to_end=False)
        child = group.start("worker", _python(program), runs_to_end=True)
        follow(group, [child], Recorder())
    text = str(error.value)
    assert "worker (process" in text and "exit code 9" in text and "line 49" in text and "line 29" not in text
    assert "server" not in text and not _alive(server.process.pid)


def test_server_that_ends_well_is_an_error_too() -> None:
    with ProcessGroup() as group, pytest.raises(ChildFailed, match="server .* exit code 0"):
        group.start("server", _python("pass"), runs_to_end=False)
        child = group.start("worker", _python(SLEEP), runs_to_end=True)
        follow(group, [child], Recorder())


def test_killed_server_is_named_before_the_worker_that_failed_with_it() -> None:
    with ProcessGroup() as group, pytest.raises(ChildFailed) as error:
        server = group.start("server", _python(SLEEP), runs_to_end=False)
        worker = group.start("worker", _python("import time; time.sleep(0.5); raise SystemExit(3)"), runs_to_end=True)
        server.process.kill()
        worker.process.wait()
        follow(group, [worker], Recorder())
    text = str(error.value)
    assert "SIGKILL" in text and text.index("server") < text.index("worker")


def test_child_that_ignores_sigterm_is_killed() -> None:
    with ProcessGroup(stop_timeout_s=0.3) as group:
        child = group.start("stubborn", _python(STUBBORN), runs_to_end=False)
        assert group.events.get(timeout=10)[0] is child
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_die_with_their_owner(number: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "from afd_runtime.launch import ProcessGroup\n"
        "with ProcessGroup(stop_timeout_s=0.3) as group:\n"
        f"    child = group.start('child', [sys.executable, '-c', {STUBBORN!r}], runs_to_end=False)\n"
        "    group.events.get()\n"
        "    print(child.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        _python(program), stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(number)
    owner.wait(timeout=20)
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_reserved_port_can_be_listened_on_while_it_is_held() -> None:
    with reserve_port("127.0.0.1") as holder:
        address = holder.getsockname()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            with socket.create_connection(address, timeout=5):
                pass
