# SPDX-License-Identifier: Apache-2.0
"""Plants one fault in the processes of a run. Python imports this module by name at start, from PYTHONPATH.

AFD_TEST_FAULT names the fault, of FFN processes but for those in ATTENTION_FAULTS; AFD_TEST_PLANTED is a directory in
which each faulty process leaves a file;
AFD_TEST_MODULES is a file that gets the names of all modules that the process imported.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def _zeroed(weights, last_rank):
    weights.w_up.zero_()
    weights.w_down.zero_()
    if weights.b_down is not None:
        weights.b_down.zero_()


def _shifted(weights, last_rank):
    for tensor in (weights.w_up, weights.w_down, weights.b_up, weights.b_down):
        if tensor is not None:
            tensor.copy_(tensor.roll(1, dims=0))


def _swapped(interleaved):
    def swap(weights, last_rank):
        for tensor in (weights.w_up, weights.b_up):
            if tensor is None:
                continue
            half = tensor.shape[1] // 2
            gate = slice(0, None, 2) if interleaved else slice(0, half)
            up = slice(1, None, 2) if interleaved else slice(half, None)
            kept = tensor[:, gate].clone()
            tensor[:, gate] = tensor[:, up]
            tensor[:, up] = kept

    return swap


def _last_dropped(weights, last_rank):
    if last_rank:
        weights.w_down[-1].zero_()
        if weights.b_down is not None:
            weights.b_down[-1].zero_()


def _scaled(weights, last_rank):
    for tensor in (weights.w_up, weights.w_down, weights.b_up, weights.b_down):
        if tensor is not None:
            tensor.mul_(1.01)


def _scaled_twice(weights, last_rank):
    weights.w_down.mul_(1.5)  # the routed scale of the small DeepSeek-V2, which the weights of a row hold already


def _none(weights, last_rank):
    return None


def _lost_weight(ids, weights):
    weights[:, -1] = 0


def _wrong_expert(ids, weights):
    ids[0, 0] = (ids[0] + 1).max() % 10  # of one row; the smallest of the models with it has 10 experts


ATTENTION_FAULTS = {"lost-weight": _lost_weight, "wrong-expert": _wrong_expert}


def _plant_in_attention(name: str) -> None:
    from afd_runtime.remote_experts import AttentionSession

    experts = AttentionSession.experts

    def faulty_experts(self, layer_idx, hidden, topk_ids, topk_weights, stage=0):
        ids, weights = topk_ids.clone(), topk_weights.clone()
        ATTENTION_FAULTS[name](ids, weights)
        return experts(self, layer_idx, hidden, ids, weights, stage)

    AttentionSession.experts = faulty_experts
    Path(os.environ["AFD_TEST_PLANTED"], str(os.getpid())).touch()


def _plant(name: str) -> None:
    from afd_runtime.ffn_backend import ExpertBank

    load = ExpertBank.load

    def faulty_load(spec, expert_ids, **kwargs):
        bank = load(spec, expert_ids, **kwargs)
        faults = {
            "none": _none,
            "zeroed": _zeroed,
            "shifted": _shifted,
            "swapped": _swapped(spec.activation.interleaved),
            "last-dropped": _last_dropped,
            "scaled": _scaled,
            "scaled-twice": _scaled_twice,
        }
        for weights in bank.layers.values():
            if name in faults:
                faults[name](weights, spec.num_experts - 1 in expert_ids)
        if name == "dies":
            bank.forward = _die
        Path(os.environ["AFD_TEST_PLANTED"], str(os.getpid())).touch()
        return bank

    ExpertBank.load = staticmethod(faulty_load)


def _die(*args, **kwargs):
    print("a planted death", file=sys.stderr, flush=True)
    os._exit(7)


def _record_modules(path: str) -> None:
    atexit.register(lambda: Path(path).write_text("\n".join(sorted(sys.modules))))


if "afd_runtime.cli" in sys.orig_argv:
    fault = os.environ.get("AFD_TEST_FAULT")
    if "attention-worker" in sys.orig_argv and fault in ATTENTION_FAULTS:
        _plant_in_attention(fault)
    if "ffn" in sys.orig_argv and fault not in (None, *ATTENTION_FAULTS):
        _plant(fault)
    if "ffn" in sys.orig_argv and "AFD_TEST_MODULES" in os.environ:
        _record_modules(os.environ["AFD_TEST_MODULES"])
