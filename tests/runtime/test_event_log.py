# SPDX-License-Identifier: Apache-2.0
"""Event logs of a real group: a sound one passes, a tampered one is refused, and off means off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from group import local_group
from stress import random_steps

from afd_runtime.errors import AFDConfigError
from afd_runtime.event_log import EventLog, read_logs
from afd_runtime.protocol import Event, ProtocolViolation
from afd_runtime.replay import WORD_EVENTS, LogEvent, Replay

ROOT = Path(__file__).parents[2]
LANE = (0, 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs of one attention and two FFN ranks, threads of this process, with steps given up."""
    path = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFD_EVENT_LOG", str(path))
        with local_group(1, 2) as (_, connect):
            assert random_steps(connect(0), 15, seed=1)["given_up"] >= 2
    yield path


@pytest.fixture
def log(directory: Path) -> list[LogEvent]:
    return read_logs(directory)


def first(log: list[LogEvent], event: str, rank: str, after: int = 0) -> int:
    found = (at for at, entry in enumerate(log) if at >= after and (entry.event, entry.rank) == (event, rank))
    return next(found)


def swapped(log: list[LogEvent], at: int, other: int) -> list[LogEvent]:
    """Two entries exchange their times."""
    copy = list(log)
    copy[at], copy[other] = log[at]._replace(time=log[other].time), log[other]._replace(time=log[at].time)
    return copy


def test_a_sound_log_passes(log: list[LogEvent]) -> None:
    Replay.check(log)
    assert {entry.event for entry in log} == {event.value for event in Event}
    assert len({entry.session for entry in log}) == 1 and len({entry.process for entry in log}) == 3


@pytest.mark.parametrize(
    ("rank", "event"),
    [(rank, event) for rank in ("A0", "F1") for event in ("attach", "announce", "next_exchange", "end_step", "abort")]
    + [("A0", "confirm"), ("A0", "publish_request"), ("A0", "see_reply")]
    + [("F1", "confirm"), ("F1", "see_request"), ("F1", "publish_reply")],
)
def test_a_dropped_event_is_refused(log: list[LogEvent], rank: str, event: str) -> None:
    del log[first(log, event, rank)]
    with pytest.raises(ProtocolViolation):
        Replay.check(log)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("publish_request", "A0"), ("see_request", "F0")),
        (("see_request", "F0"), ("publish_reply", "F0")),
        (("publish_reply", "F1"), ("see_reply", "A0")),
        (("see_reply", "A0"), ("next_exchange", "A0")),
        (("attach", "F0"), ("announce", "A0")),
        (("abort", "F1"), ("confirm", "F1")),
    ],
)
def test_two_swapped_events_are_refused(log: list[LogEvent], one: tuple[str, str], two: tuple[str, str]) -> None:
    at = first(log, *one)
    with pytest.raises(ProtocolViolation):
        Replay.check(swapped(log, at, first(log, *two, after=at)))


@pytest.mark.parametrize("change", [{"exchange": 1}, {"step": 7}, {"session": 60000}, {"process": "another"}])
def test_a_changed_event_is_refused(log: list[LogEvent], change: dict) -> None:
    at = first(log, "publish_request", "A0")
    log[at] = log[at]._replace(**change)
    with pytest.raises(ProtocolViolation) as caught:
        Replay.check(log)
    assert caught.value.event == log[at]


def test_without_the_words_the_rest_is_still_checked(log: list[LogEvent]) -> None:
    """What ranks on a GPU log: their words are seen on the device."""
    hosts = [entry._replace(words=False) for entry in log if Event(entry.event) not in WORD_EVENTS]
    Replay.check(hosts)
    for event, rank in (("confirm", "A0"), ("confirm", "F0"), ("end_step", "A0"), ("announce", "F1")):
        fewer = list(hosts)
        del fewer[first(hosts, event, rank)]
        with pytest.raises(ProtocolViolation):
            Replay.check(fewer)
    word = log[first(log, "see_reply", "A0")]
    with pytest.raises(ProtocolViolation, match="only the device sees"):
        Replay.check([*hosts, word])


def entries(*lines: str) -> list[LogEvent]:
    """``"A0 publish_request 0 1 7 old"``: rank, event, step, exchange, session, process; on lane (0, 0), FFN rank 0."""
    found = []
    for time, line in enumerate(lines):
        rank, event, *numbers, process = line.split()
        step, exchange, session = map(int, numbers)
        peer = 0 if rank[0] == "A" else None
        found.append(LogEvent(time, rank, LANE, step, exchange, event, peer, session, process=process))
    return found


OLD = ["F0 attach 0 0 3 f", "A0 attach 0 0 3 a", "A0 announce 0 0 3 a", "F0 announce 0 0 3 f",
       "A0 publish_request 0 0 3 a", "F0 see_request 0 0 3 f"]  # fmt: skip


def test_a_successor_of_a_killed_attention_rank_attaches_while_the_old_step_is_still_served() -> None:
    new = ["F0 attach 0 0 4 f", "A0 attach 0 0 4 b", "A0 announce 0 0 4 b", "F0 publish_reply 0 0 3 f"]
    Replay.check(entries(*OLD, *new, "F0 lose 0 0 3 f", "F0 announce 0 0 4 f", "A0 publish_request 0 0 4 b"))
    with pytest.raises(ProtocolViolation, match="begins while session 3 is in step"):
        Replay.check(entries(*OLD, *new, "F0 announce 0 0 4 f"))


def test_a_successor_of_a_killed_ffn_rank_attaches_after_the_loss() -> None:
    again = ["F0 attach 0 0 3 g", "A0 attach 0 0 3 a", "A0 announce 1 0 3 a", "F0 announce 1 0 3 g"]
    Replay.check(entries(*OLD, "A0 lose 0 0 3 a", *again, "A0 publish_request 1 0 3 a", "F0 see_request 1 0 3 g"))
    with pytest.raises(ProtocolViolation, match="attach in state request_published"):
        Replay.check(entries(*OLD, *again))
    with pytest.raises(ProtocolViolation, match="attach in state computing"):
        Replay.check(entries(*OLD, "F0 attach 0 0 3 f"))


def replay(directory: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "afd_runtime.protocol", "--replay", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_the_command(directory: Path, log: list[LogEvent], tmp_path: Path) -> None:
    done = replay(directory)
    assert done.returncode == 0 and f"{len(log)} events of 3 processes: no violation" in done.stdout
    assert replay(tmp_path).returncode == 2
    dropped = 0
    for path in directory.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        confirms = [at for at, line in enumerate(lines) if '"confirm"' in line] if path.name[0] == "A" else []
        dropped += len(confirms[:1])
        for at in confirms[:1]:
            del lines[at]
        (tmp_path / path.name).write_text("".join(lines))
    done = replay(tmp_path)
    assert dropped == 1 and done.returncode == 1 and "announce in state aborted" in done.stderr


def test_a_line_that_was_cut_off_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "A0-1-0.jsonl"
    path.write_text('[1,"A0",[0,0],0,0,"attach",0,3]\n[2,"A0",[0,')
    assert read_logs(tmp_path) == [LogEvent(1, "A0", LANE, 0, 0, "attach", 0, 3, process="A0-1-0")]
    path.write_text('[1,"A0",[0,0],0,0,"attach",0,3]\n[2,"A0",[0,\n')
    with pytest.raises(ValueError, match="A0-1-0.jsonl, line 2 is no event"):
        read_logs(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AFD_EVENT_LOG", str(tmp_path / "file"))
    with pytest.raises(AFDConfigError, match="AFD_EVENT_LOG=.*file.*allowed: a directory"):
        EventLog.of("A0", words=True)


def test_without_the_variable_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFD_EVENT_LOG", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EventLog, "__init__", lambda *args, **kwargs: pytest.fail("a log was opened"))
    with local_group(1, 2) as (_, connect):
        random_steps(connect(0), 3, seed=2)
    assert os.listdir(tmp_path) == []
