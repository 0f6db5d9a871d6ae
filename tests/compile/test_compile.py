# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles, without a GPU, for every card this project names, in every checked-in configuration.

Run without TRITON_INTERPRET: ``python -m pytest tests/compile``.
"""

import functools
import re
from dataclasses import dataclass

import pytest
import torch
import triton

if triton.knobs.runtime.interpret:
    pytest.exit("tests/compile compiles: python -m pytest tests/compile, without TRITON_INTERPRET", returncode=4)

from afd_kernels import SwiGLU, pick, top_k_from_logits
from afd_runtime.bench.compiled import Launch, compile_for, record
from afd_runtime.bench.launches import CARDS, LANES, OPS, E, empty, entries, exchange, gemms, layer, routing


@dataclass
class Card:
    capability: int

    def build(self, launch: Launch):
        kernel = compile_for(launch, self.capability)
        limit = CARDS[self.capability]
        assert kernel.metadata.shared <= limit, f"{launch.name}: {kernel.metadata.shared} bytes of {limit}"
        return kernel

    def build_all(self, launches: list[Launch], *names: str) -> dict[str, str]:
        """PTX by kernel name. names: kernels that must be among the launches."""
        ptx = {launch.name: self.build(launch).asm["ptx"] for launch in launches}
        assert set(names) <= set(ptx), f"not launched: {set(names) - set(ptx)}"
        return ptx


@pytest.fixture(params=CARDS, ids=lambda c: f"sm_{c}")
def card(request) -> Card:
    return Card(request.param)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("folder,width,rows", entries())
def test_gemms_of_every_configuration(folder, width, rows, card):
    dtype = FULL if width == "4byte" else HALF
    up, down = (pick(op, rows, dtype, gpu=folder, shared_memory=CARDS[card.capability]) for op in OPS)
    ptx = card.build_all(gemms(dtype, up, down), "_p_experts_up_kernel", "_p_experts_down_kernel")
    tensor_cores = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(card.capability, "mma.sync")
    for text in ptx.values():
        if dtype == HALF and min(up.block_m, down.block_m) >= 64 and card.capability == 90:
            assert "wgmma.mma_async" in text
        elif dtype == HALF:
            assert tensor_cores in text or "mma.sync" in text


@pytest.mark.parametrize("rows", [16, 1000])
def test_gpt_oss_gemms(rows, card):
    up, down = (pick(op, rows, HALF, shared_memory=CARDS[card.capability]) for op in OPS)
    activation = SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)
    ptx = card.build_all(gemms(HALF, up, down, lanes=LANES, activation=activation, bias=True, transposed=True))
    if up.block_m >= 64 and card.capability == 90:
        assert all("wgmma.mma_async" in text for text in ptx.values())


@functools.cache
def _exchange(dtype: torch.dtype) -> tuple[Launch, ...]:
    return tuple(exchange(dtype))


SMALL = ("_dispatch_kernel",)
LARGE = ("_plan_count_kernel", "_plan_scan_kernel", "_plan_write_kernel", "_pack_kernel")
EXCHANGE = ("_wait_kernel", "_merge_kernel", "_reply_kernel", "_combine_kernel")


@pytest.mark.parametrize("tokens,plan", [(64, SMALL), (640, LARGE)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_exchange(dtype, tokens, plan, card):
    ptx = card.build_all(exchange(dtype, tokens=tokens), *plan, *EXCHANGE)
    assert "ld.acquire.sys.global" in ptx["_wait_kernel"]
    publishers = (plan[-1], "_reply_kernel")
    for name in publishers:
        text = ptx[name]
        assert "st.release.sys.global" in text
        # the arrival that decides which program publishes comes after a barrier and before the word
        barrier, arrive, publish = text.rfind("bar.sync"), text.find("atom.global"), text.find("st.release.sys.global")
        assert 0 < barrier and 0 < arrive < publish, (barrier, arrive, publish)
        assert text[arrive:].startswith("atom.global.gpu.acq_rel.add")
        assert "bar.sync" in text[:arrive]
    for name in (*publishers, "_combine_kernel"):  # rows move 16 bytes a thread, both ways
        assert not re.search(r"(ld|st)\.global(\.\w+)*\.[bu]16", ptx[name]), name
    assert not any("st.release.sys" in ptx[n] for n in {*plan, *EXCHANGE} - {*publishers})


@pytest.mark.parametrize("tokens,plan", [(16, SMALL), (8192, LARGE)], ids=["small", "large"])
@pytest.mark.parametrize("experts,top_k,peers,lanes", [(384, 32, 1, 1), (160, 6, 8, 8), (62, 1, 3, 5), (256, 8, 64, 1)])
def test_exchange_of_other_sizes(experts, top_k, peers, lanes, tokens, plan):
    sizes = {"experts": experts, "top_k": top_k, "peers": peers, "lanes": lanes, "tokens": tokens}
    Card(90).build_all(exchange(HALF, hidden=7168, reply_dtype=FULL, **sizes), *plan, *EXCHANGE)


def test_layer(card):
    card.build_all(layer(HALF), "_small_plan_kernel", "_merge_kernel", "_weighted_sum_kernel", "_p_experts_up_kernel")


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_routing(dtype, card):
    bias = torch.zeros(E)
    for scoring, kwargs in (("sigmoid", {"selection_bias": bias, "num_groups": 8, "topk_groups": 4}), ("softmax", {})):
        card.build_all(routing(dtype, scoring=scoring, renormalize=True, **kwargs), "_gate_kernel", "_top_k_kernel")


@pytest.mark.parametrize("experts,top_k,groups", [(62, 6, 2), (72, 5, 9), (160, 6, 8), (384, 8, 1), (1024, 32, 1)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_top_k_of_other_sizes(experts, top_k, groups, scoring):
    with record() as launches:
        top_k_from_logits(empty(5, experts, dtype=FULL), top_k=top_k, scoring=scoring, num_groups=groups,
                          topk_groups=groups // 2 or 1)  # fmt: skip
    Card(90).build_all(launches, "_top_k_kernel")


@pytest.mark.parametrize("shared_memory", [227 * 1024, 99 * 1024, 64 * 1024, 48 * 1024, 32 * 1024])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_estimate_of_shared_memory_holds(rows, shared_memory):
    """pick promises a fit by an estimate; the compiler decides. Case 23."""
    up, down = (pick(op, rows, HALF, shared_memory=shared_memory) for op in OPS)
    for capability in (80, 90):
        for launch in gemms(HALF, up, down):
            kernel = compile_for(launch, capability)
            assert kernel.metadata.shared <= shared_memory, (launch.name, capability, kernel.metadata.shared)
