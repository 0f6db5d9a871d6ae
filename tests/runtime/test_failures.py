# SPDX-License-Identifier: Apache-2.0
"""What happens when a rank dies, hangs, lies or does not fit: an error that names it, soon, and the others go on."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest
from group import SPEC, Bank, Failed, new_group

from afd_runtime.config import AFDConfig
from afd_runtime.control_plane import transport
from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer
from afd_runtime.window import placement_of

pytestmark = pytest.mark.timeout(60)


def failure(child, name: str, *args, **kwargs) -> Failed:
    with pytest.raises(Failed) as caught:
        child.call(name, *args, **kwargs)
    return caught.value


def test_killed_ffn_rank_is_named_with_layer_stage_and_step() -> None:
    with new_group(1, 2) as group:
        ffn, (attention,) = group.start_all()
        attention.call("step", 3, seed=0)
        attention.call("step", 3, seed=1, layers=1)
        ffn[1].kill()
        error = failure(attention, "experts", 3, *_tensors(3))
        assert error.name == "AFDPeerLost" and error.seconds < 5
        assert error.fields == {"peer": "FFN rank 1", "layer": 3, "stage": 0, "step": 1}
        assert f"process {ffn[1].process.pid} ended" in error.text
        error = failure(attention, "step", 3, seed=2)
        assert error.name == "AFDPeerLost" and error.fields["layer"] is None and error.seconds < 5
        attention.call("close")


def test_killed_ffn_rank_with_a_reply_outstanding_and_its_successor() -> None:
    with new_group(1, 2) as group:
        first = group.ffn(0)
        slow = group.ffn(1, bank={"delay_s": 30.0})
        attention = group.attention(0)
        attention.call("begin_step", 4)
        attention.start("experts", 1, *_tensors(4))
        time.sleep(0.5)
        slow.kill()
        with pytest.raises(Failed) as caught:
            attention.result()
        assert caught.value.name == "AFDPeerLost" and caught.value.fields["peer"] == "FFN rank 1"
        assert caught.value.fields["layer"] == 1 and caught.value.seconds < 5
        attention.call("close")
        second = group.ffn(1)  # FFN rank 0 served on; a new FFN rank 1 takes the free place
        again = group.attention(0)
        again.call("step", 4, seed=0)
        again.call("close")
        group.end([first, second])


@pytest.mark.parametrize("ffn_ranks", [1, 2])
def test_killed_attention_rank_leaves_the_others_served_and_can_come_back(ffn_ranks: int) -> None:
    with new_group(2, ffn_ranks) as group:
        ffn, (doomed, other) = group.start_all()
        doomed.call("begin_step", 4)
        other.start("step", 5, seed=1)  # may be in one step with the doomed rank
        time.sleep(0.1)
        doomed.kill()
        other.result()
        other.call("step", 2, seed=2)
        back = group.attention(0)
        for child in (back, other):
            child.start("step", 6, seed=3)
        for child in (back, other):
            child.result()
        reports = group.end(ffn)
    assert all(report["attached"] == [] for report in reports)


def test_silent_ffn_rank_is_lost_after_the_liveness_limit() -> None:
    with new_group(1, 2, liveness_timeout_s=3.0) as group:
        ffn, (attention,) = group.start_all()
        attention.call("step", 1, seed=0)
        os.kill(ffn[1].process.pid, signal.SIGSTOP)  # it lives, but says nothing
        error = failure(attention, "step", 3, seed=1)
        assert error.name == "AFDPeerLost" and error.fields["peer"] == "FFN rank 1" and error.seconds < 10
        assert "was silent for" in error.text


def test_killed_sequencer_ends_the_other_ffn_rank() -> None:
    with new_group(1, 2) as group:
        ffn, (attention,) = group.start_all()
        ffn[0].kill()
        with pytest.raises(Failed, match="FFN rank 1 ends: FFN rank 0 was lost: process"):
            ffn[1].result()
        assert failure(attention, "step", 1, seed=0).fields["peer"].startswith("FFN rank")


def test_refusals_at_connect_name_the_field_and_both_values() -> None:
    other = dataclasses.replace
    cases = {
        "max_batch_tokens": ({"max_batch_tokens": 32}, {}, ("16", "32")),
        "num_stages": ({"num_stages": 2}, {}, ("1", "2")),
        "num_attention_ranks": ({"num_attention_ranks": 3}, {}, ("2", "3")),
        "reply_dtype": ({"reply_dtype": "bfloat16"}, {}, ("torch.float32", "torch.bfloat16")),
        "hidden_size": ({}, {"spec": other(SPEC, hidden_size=32)}, ("24", "32")),
        "expert_layers": ({}, {"spec": other(SPEC, expert_layers=(1, 3))}, ("1,3,4", "1,3")),
        "config_hash": ({}, {"spec": other(SPEC, config_hash="other")}, ("0123456789abcdef", "other")),
        "expert_identity": ({}, {"extra": {"expert_identity": "beef"}}, ("cafe", "beef")),
    }
    with new_group(2, 1, extra={"expert_identity": "cafe"}) as group:
        ffn = group.ffn(0)
        for field, (options, arguments, values) in cases.items():
            child = group.attention(0, connect=False, **arguments, **options)
            error = failure(child, "connect")
            assert error.name == "AFDRefusedError" and error.fields["field"] == field, error
            assert field in error.text and "FFN rank 0" in error.text and "attention rank 0" in error.text
            assert all(value in error.text for value in values), error.text
            child.pipe.send(("exit", (), {}))
        error = failure(group.attention(7, connect=False), "connect")
        assert error.name == "AFDConfigError" and "attention_rank is 7; allowed: 0 … 1" in error.text
        good = group.attention(0)
        error = failure(group.attention(0, connect=False), "connect")
        assert error.fields["field"] == "rank" and f"process {good.process.pid}" in error.text
        good.call("step", 3, seed=0)  # refusals left the group as it was
        group.end([ffn])


def test_ffn_rank_with_another_config_is_refused_at_register() -> None:
    with new_group(1, 2) as group:
        group.ffn(0)
        with pytest.raises(Failed, match="max_batch_tokens differs: FFN rank 0 has 16, FFN rank 1 has 8") as caught:
            group.ffn(1, max_batch_tokens=8)
        assert caught.value.name == "AFDRefusedError"
        error = failure(group.attention(0, connect=False, attach_timeout_s=0.5), "connect")
        assert error.name == "AFDAttachError" and "FFN rank(s) 1 did not register" in error.text


def test_more_rows_than_the_slot_holds_are_refused_before_anything_is_written() -> None:
    with new_group() as group:
        ffn, (attention,) = group.start_all()
        error = failure(attention, "begin_step", 17)
        assert error.name == "AFDCapacityError" and "17" in error.text and "max_batch_tokens=16" in error.text
        attention.call("step", 16, seed=0)  # no step had been announced
        (report,) = group.end(ffn)
    assert report["steps"] == 1


def test_a_step_given_up_leaves_the_others_and_the_next_step_works() -> None:
    with new_group(2, 2, reply_timeout_s=10.0) as group:
        ffn, (first, second) = group.start_all()
        for attempt in range(3):
            first.call("step", 4, seed=attempt, layers=1)  # one of three layers
            second.start("step", 5, seed=attempt)
            time.sleep(0.1)
            error = failure(first, "end_step")
            assert error.name == "AFDError" and "1 of 3 exchanged layers" in error.text
            second.result()
            first.call("step", 4, seed=10 + attempt)
        group.end(ffn)


def test_an_attention_rank_that_hangs_in_a_step_is_dropped_and_told() -> None:
    with new_group(2, 1, peer_timeout_s=3.0) as group:
        ffn, (hanging, other) = group.start_all()
        for child in (hanging, other):
            child.call("step", 1, seed=0)  # first calls are slow
        hanging.call("step", 2, seed=0, layers=1)
        other.start("step", 3, seed=1)
        other.result()
        time.sleep(3.2)
        error = failure(hanging, "experts", 3, *_tensors(2))
        assert error.name == "AFDStepAborted" and error.fields["peer"] == "FFN rank 0" and error.fields["layer"] == 3
        assert "no request for layer 3 arrived within peer_timeout_s=3" in error.text
        hanging.call("step", 2, seed=2)
        group.end(ffn)


def test_an_ffn_rank_that_is_too_slow_is_a_time_out() -> None:
    with new_group(1, 2, reply_timeout_s=1.5) as group:
        ffn = [group.ffn(0), group.ffn(1, bank={"delay_s": 3.0})]
        attention = group.attention(0)
        error = failure(attention, "step", 2, seed=0)
        where = {name: error.fields[name] for name in ("peer", "layer", "stage", "step")}
        assert error.name == "AFDTimeoutError" and where == {"peer": "FFN rank 1", "layer": 1, "stage": 0, "step": 0}
        assert "within 1.5 s" in error.text
        group.end(ffn)  # FFN rank 0 was told and waits for no further layer


def test_a_fault_in_the_experts_reaches_attention_with_its_text() -> None:
    with new_group() as group:
        ffn = group.ffn(0, bank={"fail_at": 2})
        attention = group.attention(0)
        error = failure(attention, "step", 2, seed=0)
        assert error.name == "AFDPeerLost" and error.fields["layer"] == 3 and "the planted fault" in error.text
        with pytest.raises(Failed, match="RuntimeError: the planted fault"):
            ffn.result()


def test_a_fault_in_one_stage_ends_the_others() -> None:
    with new_group(num_stages=2) as group:
        ffn = group.ffn(0, bank={"fail_at": 1})
        attention = group.attention(0)
        error = failure(attention, "step", 2, seed=0, stage=1)
        assert error.name == "AFDPeerLost" and error.fields["stage"] == 1 and "the planted fault" in error.text
        with pytest.raises(Failed, match="RuntimeError: the planted fault"):
            ffn.result()


def test_wrong_calls_are_refused_by_name() -> None:
    with new_group() as group:
        ffn, (attention,) = group.start_all()
        assert "call begin_step first" in failure(attention, "experts", 1, *_tensors(2)).text
        attention.call("begin_step", 2)
        assert "end_step or abort_step first" in failure(attention, "begin_step", 2).text
        assert "layer_idx is 4 in step 0 of stage 0; allowed: 1" in failure(attention, "experts", 4, *_tensors(2)).text
        assert "stage is 1; allowed: 0 … 0" in failure(attention, "begin_step", 2, 1).text
        hidden, ids, weights = _tensors(17)
        error = failure(attention, "experts", 1, hidden, ids, weights)
        assert error.name == "AFDCapacityError" and "17 rows" in error.text and "max_batch_tokens=16" in error.text
        assert "the step was begun with 2" in failure(attention, "experts", 1, *_tensors(1)).text
        hidden, ids, weights = _tensors(2)
        assert "hidden is torch.float64" in failure(attention, "experts", 1, hidden.double(), ids, weights).text
        assert "topk_ids is (2, 2)" in failure(attention, "experts", 1, hidden, ids[:, :2], weights).text
        attention.call("abort_step", "the test is over")
        attention.call("step", 2, seed=0)
        group.end(ffn)


def _tensors(rows: int):
    from group import random_layer

    return random_layer(SPEC, rows, seed=0)


def test_a_rank_that_waits_long_for_an_ffn_rank_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "IDLE_S", 1.0)
    options = {"num_ffn_ranks": 2, "fabric": "local", "attach_timeout_s": 15.0, "max_batch_tokens": 4}
    sessions: list[AttentionSession] = []
    servers: list[FFNServer] = []

    def serve(rank: int, port: int) -> int:
        config = AFDConfig(role="ffn", port=port, **options)
        bank = Bank(SPEC, placement_of(config, SPEC).local_experts(rank))
        servers.append(FFNServer(config, rank, SPEC, bank, fingerprint_extra={}))
        servers[-1].start()
        return servers[-1].port

    def attach(port: int) -> None:
        config = AFDConfig(role="attention", port=port, **options)
        sessions.append(AttentionSession.connect(config, 0, SPEC, fingerprint_extra={}))

    try:
        port = serve(0, 0)
        waiting = threading.Thread(target=attach, args=(port,))
        waiting.start()
        time.sleep(2.5)
        serve(1, port)
        waiting.join(20)
        assert len(sessions) == 1 and servers[0].attached == servers[1].attached == (0,)
        sessions.pop().close()
        attach(port)
    finally:
        for session in sessions:
            session.close()
        for server in reversed(servers):
            server.stop()
