# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a layer, the same on a CPU and on a GPU. Each is followed by 100 right answers.

Each fault that was survived is printed, and put into the JSON file ``AFD_FAULT_REPORT``: by what it was noticed and
after how many seconds, what the error named, and how the group went on.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from group import SPEC, Child, Failed, Group
from planted import CRASH, HANG, NOTHING, PlantedBank, answers, graphs_captured, last_step, other_layers, plant
from proxy import Proxy

ANSWERS, START_S, LAYERS = 100, 100.0, SPEC.expert_layers
DETECTORS = {"CUDA error": "CUDA error", "a kernel does not end": "stuck kernel", r"process \d+ ended": "process end",
             "was silent": "silence", "sent no reply": "time limit"}  # fmt: skip


@dataclass
class Fault:
    """One fault and what came of it. seconds: from the fault to the error, or to the next answer where none is due."""

    fault: str
    device: str
    detector: str
    seconds: float
    error: str
    text: str
    peer: str | None = None
    layer: int | None = None
    stage: int | None = None
    step: int | None = None
    recovery: str = ""

    def survived(self, recovery: str) -> None:
        """Prints and writes the record."""
        self.recovery = recovery
        where = f"{self.peer}, layer {self.layer}, stage {self.stage}, step {self.step}"
        print(f"\n{self.device}: {self.fault}: {self.error} by {self.detector} after {self.seconds:.2f} s ({where}); "
              f"{recovery}")  # fmt: skip
        path = os.environ.get("AFD_FAULT_REPORT")
        if path:
            with open(path, "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                known = {(r["device"], r["fault"]): r for r in json.loads(file.read() or "[]")}
                known[self.device, self.fault] = dataclasses.asdict(self)
                file.truncate(0)
                json.dump(list(known.values()), file, indent=1)
                file.write("\n")


def detector_of(text: str) -> str:
    """What noticed a fault, from the text of its error."""
    return next((name for pattern, name in DETECTORS.items() if re.search(pattern, text)), "abort")


@dataclass
class Scene:
    """A group to which faults happen in turn. spares: FFN processes that stand by to be the last FFN rank."""

    group: Group
    device: str
    ffn: list[Child]
    attention: list[Child]
    spares: list[Child]
    folder: tempfile.TemporaryDirectory
    seed: int = 0

    @classmethod
    def start(cls, group: Group, *, spares: int = 0, proxy: Proxy | None = None, **bank: Any) -> Scene:
        """Starts every rank of the group's options, and the spares, with ``PlantedBank(**bank)``.

        proxy: that the attention ranks reach FFN rank 0 through.
        """
        folder = tempfile.TemporaryDirectory(prefix="afd-planted-")
        bank = {"kind": PlantedBank, "folder": folder.name, **bank}
        last, count = group.options["num_ffn_ranks"] - 1, group.options["num_attention_ranks"]
        ffn = [group.ffn(0, bank=dict(bank), wait=False)]
        group.options["port"] = ffn[0].result(START_S)
        ffn += [group.ffn(rank, bank=dict(bank), wait=False) for rank in range(1, last + 1)]
        waiting = [group.ffn(last, bank={**bank, "standby": True}, wait=False) for _ in range(spares)]
        dial = {}
        if proxy is not None:
            proxy.target, dial = group.options["port"], {"port": proxy.port}
        attention = [group.attention(rank, connect=False, **dial).start("connect") for rank in range(count)]
        for child in (*ffn[1:], *waiting, *attention):
            child.result(START_S)
        return cls(group, group.options.get("device", "cpu"), ffn, attention, waiting, folder)

    def plant(self, child: Child, what: int) -> None:
        """Plants a fault in the experts of an FFN rank."""
        plant(self.folder.name, child.process.pid, what)

    def answer(self, *ranks: int) -> str:
        """100 right answers to each of these attention ranks at once; on a GPU every second one from its graph."""
        for captured in (False, True) if self.device == "cuda" else (False,):
            self.seed += 1
            children = [self.attention[rank] for rank in ranks]
            count = ANSWERS // 2 if self.device == "cuda" else ANSWERS
            for child in children:
                child.start("run", answers, count, self.seed, captured=captured)
            for child in children:
                child.result(60)
        return f"{ANSWERS} right answers to attention rank(s) {', '.join(map(str, ranks))}"

    def open_step(self, rank: int = 0) -> dict[str, Any]:
        """Begins a step of an attention rank and exchanges its first layer. Returns where the next error will be."""
        self.attention[rank].call("step", 5, seed=self.seed, layers=1)
        step = self.attention[rank].call("run", last_step)
        return {"layer": LAYERS[1], "stage": 0, "step": step, "peer": f"FFN rank {len(self.ffn) - 1}"}

    def fails(self, fault: str, strike: Callable[[], None], child: Child, *command: Any, limit_s: float) -> Fault:
        """Strikes, lets the child go on with ``command`` (none: it is in one), which must fail within ``limit_s``."""
        start = time.monotonic()
        strike()
        if command:
            child.start(*command)
        with pytest.raises(Failed) as caught:
            child.result(60)
        error, seconds = caught.value, time.monotonic() - start
        assert seconds < limit_s, f"{error} after {seconds:.1f} s"
        fields = {name: error.fields.get(name) for name in ("peer", "layer", "stage", "step")}
        return Fault(fault, self.device, detector_of(error.text), round(seconds, 3), error.name, error.text, **fields)

    def replace(self) -> None:
        """The last FFN rank is gone for good; a spare takes its place."""
        self.ffn[-1].kill()
        self.ffn[-1] = self.spares.pop()
        self.ffn[-1].call("go")

    def end(self) -> list[dict]:
        """Ends the group. On a GPU every step of an FFN rank was a graph, and no attention rank captured twice."""
        for child in self.attention:
            assert child.call("run", graphs_captured) == (1 if self.device == "cuda" else 0)
            child.call("close")
        reports = self.group.end(self.ffn)
        for report in reports:
            served = {"replays": report["steps"], "eager": 0}
            if self.device == "cpu":
                served = {"replays": 0, "eager": report["steps"]}
            assert report["steps"] > 0 and report["attached"] == [] and served.items() <= report.items()
        return reports


def check(fault: Fault, error: str, detector: str, where: dict[str, Any]) -> None:
    """The error's class, what noticed it, and the peer, layer, stage and step that it names."""
    found = {name: getattr(fault, name) for name in where}
    assert (fault.error, fault.detector, found) == (error, detector, where), fault


def kill_ffn_between_layers(scene: Scene) -> None:
    """The last FFN rank is killed between two layers of a step."""
    (attention, victim), where = (scene.attention[0], scene.ffn[-1]), scene.open_step()
    command = "run", other_layers, 5, scene.seed
    fault = scene.fails("FFN rank killed between layers", lambda: ended(victim), attention, *command, limit_s=5)
    check(fault, "AFDPeerLost", "process end", where)
    alone = scene.fails("", lambda: None, attention, "run", answers, 1, 0, limit_s=6)
    assert alone.error == "AFDPeerLost" and "attaching anew failed" in alone.text and alone.layer is None
    scene.replace()
    fault.survived(f"a new FFN process; {scene.answer(0)}")


def kill_ffn_with_a_reply_outstanding(scene: Scene) -> None:
    """The last FFN rank is killed while it computes."""
    (attention, victim), where = (scene.attention[0], scene.ffn[-1]), scene.open_step()
    scene.plant(victim, HANG)
    attention.start("run", other_layers, 5, scene.seed)
    time.sleep(0.3)
    fault = scene.fails("FFN rank killed with a reply outstanding", victim.process.kill, attention, limit_s=5)
    check(fault, "AFDPeerLost", "process end", where)
    scene.replace()
    fault.survived(f"a new FFN process; {scene.answer(0)}")


def crash_ffn(scene: Scene) -> None:
    """The experts use an address that nobody has: a process ends by a signal, a GPU reports it and the process ends."""
    (attention, victim), where = (scene.attention[0], scene.ffn[-1]), scene.open_step()
    command = "run", other_layers, 5, scene.seed
    fault = scene.fails(
        "illegal address on an FFN rank", lambda: scene.plant(victim, CRASH), attention, *command, limit_s=8
    )
    check(fault, "AFDPeerLost", "CUDA error" if scene.device == "cuda" else "process end", where)
    if scene.device == "cuda":
        with pytest.raises(Failed, match="illegal memory access"):
            victim.result()
    victim.process.join(20)
    assert victim.process.exitcode == (1 if scene.device == "cuda" else -signal.SIGSEGV)
    scene.replace()
    fault.survived(f"a new FFN process; {scene.answer(0)}")


def stop_ffn(scene: Scene, detector: str, limit_s: float) -> None:
    """The last FFN rank is stopped: by silence the group loses it, or a step ends at the time limit before."""
    attention, victim = scene.attention[0], scene.ffn[-1]
    captured = scene.device == "cuda"
    where = {"peer": f"FFN rank {len(scene.ffn) - 1}", "layer": LAYERS[0], "stage": 0}
    command = "run", one_step, captured
    try:
        fault = scene.fails("FFN rank stopped", lambda: send(victim, signal.SIGSTOP), attention, *command,
                            limit_s=limit_s)  # fmt: skip
        if detector == "silence":
            time.sleep(1.5)  # until FFN rank 0 has noticed it too
    finally:
        send(victim, signal.SIGCONT)
    check(fault, "AFDPeerLost" if detector == "silence" else "AFDTimeoutError", detector, where)
    if detector == "silence":  # the group went on without it, which it notices
        with pytest.raises(Failed, match="FFN rank 0 was lost: was silent"):
            victim.result()
        scene.replace()
        fault.survived(f"it ended when it went on; a new FFN process; {scene.answer(0)}")
    else:
        fault.survived(f"the same processes; {scene.answer(0)}")


def hang_ffn(scene: Scene, limit_s: float) -> None:
    """The experts of the last FFN rank do not end. On a GPU that process gives itself up, on a CPU they do end."""
    (attention, victim), where = (scene.attention[0], scene.ffn[-1]), scene.open_step()
    start, command = time.monotonic(), ("run", other_layers, 5, scene.seed)
    fault = scene.fails(
        "experts that do not end", lambda: scene.plant(victim, HANG), attention, *command, limit_s=limit_s
    )
    check(fault, "AFDTimeoutError", "time limit", where)
    if scene.device == "cpu":
        scene.plant(victim, NOTHING)
        fault.survived(f"they ended; the same processes; {scene.answer(0)}")
        return
    stuck = scene.fails("experts that do not end, on the FFN rank", lambda: None, victim, limit_s=20)
    stuck.seconds = round(time.monotonic() - start, 3)
    check(stuck, "AFDStuckError", "stuck kernel", {})
    victim.process.join(20)
    assert victim.process.exitcode == 1, "it ended by itself"
    scene.replace()
    fault.survived(f"a new FFN process; {scene.answer(0)}")
    stuck.survived("it ended by itself")


def kill_attention(scene: Scene) -> None:
    """Attention rank 0 of two is killed between two layers of a step. Ends the scene: the FFN ranks tell then."""
    doomed, other = scene.attention
    scene.answer(1)
    step = scene.open_step()["step"]
    other.start("run", answers, 1, 0)
    time.sleep(0.1)
    assert not other.pipe.poll(), "its step waits for the end of the one that is open"
    start = time.monotonic()
    doomed.kill()
    other.result()
    seconds = round(time.monotonic() - start, 3)
    told = scene.answer(1)
    scene.attention[0] = scene.group.attention(0, connect=False)
    scene.attention[0].start("connect").result(START_S)
    told += f"; a new attention process, {scene.answer(0, 1)}; the FFN processes and graphs are the same"
    for report in scene.end():
        lost = f"attention rank 0 left step {step} of stage 0 at layer {LAYERS[1]}: process {doomed.process.pid} ended"
        assert any(lost in text for text in report["warnings"]), report["warnings"]
    Fault("attention rank killed between layers", scene.device, "process end", seconds, "none", lost,
          "attention rank 0", LAYERS[1], 0, step).survived(told)  # fmt: skip


def cut_control(scene: Scene, proxy: Proxy) -> None:
    """The control connection is cut within a layer, the data path is not: both sides fall back on silence."""
    (attention, victim), where = (scene.attention[0], scene.ffn[0]), scene.open_step()
    scene.plant(victim, HANG)
    attention.start("run", other_layers, 5, scene.seed)
    time.sleep(0.3)
    fault = scene.fails("control connection cut", proxy.cut, attention, limit_s=6)
    check(fault, "AFDPeerLost", "silence", where)
    alone = scene.fails("", lambda: None, attention, "run", answers, 1, 0, limit_s=6)
    assert alone.error == "AFDPeerLost" and "attaching anew failed" in alone.text
    scene.plant(victim, NOTHING)
    proxy.restore()
    fault.survived(f"the connection is restored; the same processes; {scene.answer(0)}")


def one_step(session: Any, captured: bool) -> float:
    """One step of five rows."""
    return answers(session, 1, 0, captured=captured, rows=5)


def ended(child: Child) -> None:
    """Kills a process, and waits until the GPU has noticed: what was launched goes on for a moment without it."""
    child.kill()
    time.sleep(0.5)


def send(child: Child, number: int) -> None:
    """Sends a signal, and waits until it was noticed."""
    os.kill(child.process.pid, number)
    time.sleep(0.05)
