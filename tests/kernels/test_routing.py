# SPDX-License-Identifier: Apache-2.0
"""route and top_k_from_logits against their references and against a loop over rows in fp64."""

import math

import pytest
import torch
from kernel_harness import DEVICE, generator, same_bits, strided, to_cpu

from afd_kernels import route, route_workspace, top_k_from_logits
from afd_kernels.routing import SCORINGS, route_ref, top_k_from_logits_ref
from afd_kernels.testing import assert_close, poison

FLOAT_MAX = torch.finfo(torch.float32).max
INF, NAN = float("inf"), float("nan")
PLAIN = {"scoring": "softmax"}
DEEPSEEK = {"scoring": "sigmoid", "renormalize": True, "scale": 2.5}


def score_row(row: list[float], scoring: str) -> list[float]:
    x = [None if math.isnan(v) else min(max(v, -FLOAT_MAX), FLOAT_MAX) for v in row]
    if scoring == "softmax":
        top = max((v for v in x if v is not None), default=0.0)
        e = [0.0 if v is None else math.exp(v - top) for v in x]
        return [v / max(sum(e), 1e-300) for v in e]
    if scoring == "sigmoid":
        return [0.0 if v is None else 1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x]
    return [0.0 if v is None else math.sqrt(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in x]


def oracle_row(row, top_k, scoring="softmax", selection_bias=None, num_groups=1, topk_groups=1, renormalize=False,
               scale=1.0):  # fmt: skip
    """(weights, ids, smallest gap between two neighbours of the order up to the first one not chosen)."""
    experts, gaps = len(row), [INF]
    scores = score_row(row, scoring)
    choice = list(row) if scoring == "softmax" and selection_bias is None else list(scores)
    if selection_bias is not None:
        choice = [c + b for c, b in zip(choice, selection_bias, strict=True)]
    real = [not math.isnan(row[e]) and not math.isnan(choice[e]) for e in range(experts)]
    opened = set(range(num_groups))
    if topk_groups < num_groups:
        size, best = experts // num_groups, 1 if selection_bias is None else 2
        groups = []
        for group in range(num_groups):
            members = [choice[e] if real[e] else -1e38 for e in range(group * size, (group + 1) * size)]
            groups.append(sum(sorted(members, reverse=True)[:best]))
        order = sorted(range(num_groups), key=lambda g: (-groups[g], g))
        opened = set(order[:topk_groups])
        gaps.append(groups[order[topk_groups - 1]] - groups[order[topk_groups]])
    eligible = [e for e in range(experts) if real[e] and e // (experts // num_groups) in opened]
    order = sorted(eligible, key=lambda e: (-choice[e], e))
    gaps += [choice[a] - choice[b] for a, b in zip(order[:top_k], order[1 : top_k + 1], strict=False)]
    ids = (order + [e for e in range(experts) if e not in set(eligible)])[:top_k]
    weights = [scores[e] if e in set(eligible) else 0.0 for e in ids]
    if renormalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return [w * scale for w in weights], ids, min((g for g in gaps if g == g), default=INF)


def oracle(logits: torch.Tensor, *, selection_bias=None, **kwargs):
    bias = None if selection_bias is None else selection_bias.double().tolist()
    rows = [oracle_row(row, selection_bias=bias, **kwargs) for row in logits.double().tolist()]
    weights = torch.tensor([r[0] for r in rows], dtype=torch.float64).reshape(len(rows), kwargs["top_k"])
    return weights, torch.tensor([r[1] for r in rows]).reshape(len(rows), kwargs["top_k"]), [r[2] for r in rows]


def decided(rows: int, experts: int, *, seed: int = 0, spread: float = 8.0, dtype=torch.float32, **kwargs):
    """Random logits [rows, experts] whose order does not hang on the last bits of fp32."""
    g, kept = generator(seed), []
    for _ in range(50 * rows):
        order = torch.stack([torch.randperm(experts, generator=g)]) - experts // 2
        logits = (order * spread / experts + 0.1 * torch.rand(1, experts, generator=g) / experts).to(dtype)
        if oracle(logits, **kwargs)[2][0] > 3e-6 or dtype != torch.float32:
            kept.append(logits)
        if len(kept) == rows:
            return torch.cat(kept)
    raise AssertionError("no decided rows")


def check(logits: torch.Tensor, *, exact: bool = True, **kwargs):
    """The kernel against both oracles; returns (weights, ids) on the CPU. exact: also the ids of the fp64 oracle."""
    on_device = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    weights, ids = to_cpu(top_k_from_logits(logits.to(DEVICE), **on_device))
    ref_weights, ref_ids = top_k_from_logits_ref(logits.cpu(), **kwargs)
    assert torch.equal(ids, ref_ids), (ids, ref_ids)
    assert_close(weights, ref_weights, what="against the reference")
    want_weights, want_ids, _ = oracle(logits.float().cpu(), **kwargs)
    if exact:
        assert torch.equal(ids.long(), want_ids), (ids, want_ids)
        assert_close(weights, want_weights, dtype=torch.float32, what="against the loop")
    in_range(weights, ids, logits.shape[1])
    return weights, ids


def in_range(weights, ids, experts):
    assert ((ids >= 0) & (ids < experts)).all()
    assert weights.isfinite().all()
    assert all(len(set(row)) == len(row) for row in ids.tolist()), "an expert was chosen twice"


EXPERTS = [(1, 1, 1, 1), (2, 2, 1, 1), (62, 6, 2, 1), (64, 8, 1, 1), (64, 32, 8, 4), (72, 5, 9, 3), (128, 8, 1, 1),
           (160, 6, 8, 3), (192, 8, 6, 2), (256, 8, 8, 4), (288, 8, 1, 1), (384, 8, 1, 1), (512, 10, 16, 4),
           (1024, 8, 1, 1), (33, 32, 1, 1), (32, 32, 1, 1)]  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("experts,top_k,groups,topk_groups", EXPERTS)
def test_every_number_of_experts(experts, top_k, groups, topk_groups, biased, launches):
    kwargs = {"top_k": top_k, "num_groups": groups, "topk_groups": topk_groups}
    kwargs |= DEEPSEEK if (experts // 2 + biased) % 2 else PLAIN
    if biased:
        kwargs["selection_bias"] = torch.randn(experts, generator=generator(1)) * 0.3
    check(decided(3, experts, **kwargs), **kwargs)
    launches.expect("_top_k_kernel")


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_scorings(scoring, biased, renormalize, launches):
    kwargs = {"top_k": 3, "scoring": scoring, "renormalize": renormalize, "scale": 1.25}
    if biased:
        kwargs["selection_bias"] = torch.randn(20, generator=generator(2))
    check(decided(4, 20, **kwargs), **kwargs)
    launches.expect("_top_k_kernel")


def test_half_logits(dtype, launches):
    logits = decided(5, 24, top_k=4, dtype=dtype)
    check(logits, top_k=4, renormalize=True)
    launches.expect("_top_k_kernel")


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("groups", [1, 4])
def test_row_of_nan(scoring, groups, launches):  # case 1
    kwargs = {"top_k": 8, "scoring": scoring, "num_groups": groups, "topk_groups": max(1, groups // 2)}
    logits = decided(3, 128, **kwargs)
    alone = to_cpu(top_k_from_logits(logits.to(DEVICE), **kwargs))
    logits[1] = NAN
    weights, ids = check(logits, renormalize=True, **kwargs)
    assert (weights[1] == 0).all()
    assert ids[1].tolist() == list(range(8))
    again = to_cpu(top_k_from_logits(logits.to(DEVICE), **kwargs))
    for row in (0, 2):
        assert same_bits(again[0][row], alone[0][row]) and torch.equal(again[1][row], alone[1][row])
    launches.expect("_top_k_kernel")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("at", [0, 100, 255])
def test_one_nan(scoring, at, biased, launches):  # case 2
    kwargs = {"top_k": 8, "scoring": scoring, "renormalize": True}
    if biased:
        kwargs["selection_bias"] = torch.full((256,), -2.0)  # a NaN's 0 would win against these
    logits = decided(2, 256, **kwargs)
    logits[0, at] = NAN
    _, ids = check(logits, **kwargs)
    assert at not in ids[0].tolist()
    launches.expect("_top_k_kernel")


def test_nan_in_the_bias(launches):
    bias = torch.zeros(16)
    bias[3] = NAN
    logits = decided(2, 16, top_k=4, scoring="sigmoid")
    logits[:, 3] = 50.0
    weights, ids = check(logits, top_k=4, scoring="sigmoid", selection_bias=bias, renormalize=True)
    assert (ids != 3).all() and (weights > 0).all()
    launches.expect("_top_k_kernel")


def test_fewer_numbers_than_choices(launches):
    logits = torch.full((1, 10), NAN)
    logits[0, 7], logits[0, 4] = 1.0, 2.0
    weights, ids = check(logits, top_k=5)
    assert ids.tolist() == [[4, 7, 0, 1, 2]]
    assert (weights[0, 2:] == 0).all() and (weights[0, :2] > 0).all()
    launches.expect("_top_k_kernel")


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_infinities(scoring, renormalize, launches):  # case 3
    logits = torch.linspace(-1, 1, 12).repeat(5, 1)
    logits[0] = INF
    logits[1] = -INF
    logits[2, 5], logits[2, 6] = INF, -INF
    logits[3, 2], logits[3, 9] = INF, INF
    logits[4, :11] = -INF
    # sigmoid ties at +inf and at -inf where fp64 would not: compare ids with the reference, and the rules by hand
    weights, ids = check(logits, exact=False, top_k=3, scoring=scoring, renormalize=renormalize)
    assert ids[0].tolist() == [0, 1, 2] and ids[1].tolist() == [0, 1, 2]
    assert ids[2, 0] == 5 and ids[3, :2].tolist() == [2, 9] and ids[4].tolist() == [11, 0, 1]
    if renormalize:
        assert (weights.sum(1)[[0, 2, 3, 4]] - 1).abs().max() < 1e-5
    launches.expect("_top_k_kernel")


def test_groups_of_negative_scores(launches):  # case 4
    bias = torch.tensor([-5.0, -6.0, -3.0, -4.0, -2.0, -9.0, -3.1, -3.2])
    kwargs = {"top_k": 2, "scoring": "sigmoid", "num_groups": 4, "topk_groups": 1, "selection_bias": bias}
    weights, ids = check(torch.zeros(1, 8), **kwargs)
    # sums of two: -11, -7, -11, -6.3; a masked group of 0 would win, the single best is expert 4
    assert ids.tolist() == [[6, 7]]
    _, ids = check(-torch.tensor([[5.0, 6, 3, 4, 2, 9, 3.1, 3.2]]), top_k=2, num_groups=4, topk_groups=1)
    assert ids.tolist() == [[4, 5]]  # without a bias the best one counts
    launches.expect("_top_k_kernel")


def test_nan_does_not_close_a_group(launches):
    logits = torch.zeros(1, 8)
    logits[0, 4], logits[0, 5] = 9.0, NAN
    _, ids = check(logits, top_k=1, num_groups=4, topk_groups=1)
    assert ids.tolist() == [[4]]
    launches.expect("_top_k_kernel")


def test_sigmoid_underflow(launches):  # case 5
    logits = torch.linspace(-200, -89, 16).repeat(2, 1)
    bias = torch.zeros(16)
    bias[5], bias[2] = 3.0, 2.0
    weights, ids = check(logits, exact=False, selection_bias=bias, top_k=2, **DEEPSEEK)
    assert ids.tolist() == [[5, 2], [5, 2]]
    assert weights.isfinite().all() and (weights >= 0).all()
    launches.expect("_top_k_kernel")


def test_softmax_is_over_all_experts(launches):  # case 6
    logits = torch.log(torch.tensor([[1.0, 2, 3, 4]]))
    weights, ids = check(logits, top_k=2)
    assert ids.tolist() == [[3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))
    weights, _ = check(logits, top_k=2, renormalize=True)
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]]))
    launches.expect("_top_k_kernel")


def test_softmax_order_far_below_the_top(launches):
    logits = torch.tensor([[0.0, -300.0, -200.0, -250.0, -400.0]])
    _, ids = check(logits, top_k=5)
    assert ids.tolist() == [[0, 2, 3, 1, 4]]
    launches.expect("_top_k_kernel")


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("value", [0.0, -3.5, 7.0])
@pytest.mark.parametrize("experts,top_k", [(384, 8), (62, 32)])
def test_ties_go_to_the_lowest_id(experts, top_k, value, scoring, launches):  # case 7
    logits = torch.full((2, experts), value)
    logits[1, ::2] = -0.0 if value == 0 else value  # -0 ties with 0
    weights, ids = check(logits, top_k=top_k, scoring=scoring, renormalize=True)
    assert ids.tolist() == [list(range(top_k))] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / top_k))
    launches.expect("_top_k_kernel")


def test_ties_between_groups(launches):
    _, ids = check(torch.zeros(1, 12), top_k=4, num_groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3]]
    logits = torch.zeros(1, 12)
    logits[0, 6:9] = 1.0
    _, ids = check(logits, top_k=4, num_groups=4, topk_groups=2)
    assert ids.tolist() == [[6, 7, 8, 0]]
    launches.expect("_top_k_kernel")


def test_scale_is_applied_once(launches):  # case 10
    logits = decided(2, 16, top_k=4, **DEEPSEEK)
    weights, _ = check(logits, top_k=4, **DEEPSEEK)
    torch.testing.assert_close(weights.sum(1), torch.full((2,), 2.5))
    launches.expect("_top_k_kernel")


def test_no_rows():  # case 11
    weights, ids = top_k_from_logits(torch.empty(0, 8, device=DEVICE), top_k=3)
    assert weights.shape == ids.shape == (0, 3) and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    weights, ids = route(torch.empty(0, 32, device=DEVICE), torch.empty(8, 32, device=DEVICE), top_k=3)
    assert weights.shape == ids.shape == (0, 3) and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def gate_inputs(rows, experts, hidden, dtype, seed=0):
    g = generator(seed)
    x = torch.randn(rows, hidden, generator=g).to(dtype)
    return x.to(DEVICE), (torch.randn(experts, hidden, generator=g) * 2 * hidden**-0.5).to(dtype).to(DEVICE)


def check_route(x, w, *, gate_bias=None, **kwargs):
    """route against route_ref and the fp64 loop; rows that hang on the last bits are left out (few may)."""
    weights, ids = to_cpu(route(x, w, gate_bias=gate_bias, **kwargs))
    x, w, gate_bias = to_cpu((x, w, gate_bias))
    logits = x.double() @ w.double().t() + (0 if gate_bias is None else gate_bias.double())
    want_weights, want_ids, gaps = oracle(logits, **to_cpu(kwargs))
    clear = torch.tensor([gap > 2e-5 for gap in gaps], dtype=torch.bool)
    assert clear.float().mean() >= 0.6, "too few rows to say anything"
    assert torch.equal(ids[clear].long(), want_ids[clear])
    assert_close(weights[clear], want_weights[clear], dtype=torch.float32)
    ref_weights, ref_ids = route_ref(x, w, gate_bias=gate_bias, **to_cpu(kwargs))
    assert torch.equal(ids[clear], ref_ids[clear])
    assert_close(weights[clear], ref_weights[clear])
    in_range(weights, ids, w.shape[0])


@pytest.mark.parametrize("rows,experts,hidden", [(1, 62, 33), (5, 8, 100), (17, 72, 64), (67, 20, 48), (3, 16, 1100)])
def test_route(rows, experts, hidden, dtype, launches):
    check_route(*gate_inputs(rows, experts, hidden, dtype), top_k=4, renormalize=True)
    launches.expect("_gate_kernel", "_top_k_kernel")


def test_route_with_everything(dtype, launches):
    x, w = gate_inputs(7, 24, 50, dtype)
    bias = torch.randn(24, generator=generator(3)).to(DEVICE)
    check_route(strided(x), strided(w.float()), gate_bias=bias.to(dtype), selection_bias=bias.flip(0), top_k=5,
                num_groups=4, topk_groups=2, **DEEPSEEK)  # fmt: skip
    launches.expect("_gate_kernel", "_top_k_kernel")


def test_logits_are_decided_in_fp32(dtype, launches):  # case 9
    hidden = 7168
    x, w = gate_inputs(2, 16, hidden, dtype)
    at = int(x[0].abs().argmax())
    x[1, at] = -x[0, at]
    w[0] = (x[0] + x[1]) / hidden  # logits near 1 in both rows; the other experts stay below
    w[1:] = w[0] / 2
    w[9] = w[0]
    step = torch.full((), 2e-3 / float(x[0, at]))  # moves a logit by 2e-3: a bf16 step at 1 is 8e-3
    w = w.float()
    w[9, at] += step
    logits = x.double().cpu() @ w.double().cpu().t()
    assert 5e-4 < float(logits[0, 9] - logits[0, 0]) < 5e-3 and logits[0, 0] > 0.9
    _, ids = route(x, w, top_k=2)
    assert ids.tolist() == [[9, 0], [0, 9]]
    launches.expect("_gate_kernel")


def test_a_row_is_alone(dtype, launches):
    x, w = gate_inputs(6, 20, 40, dtype)
    first = route(x, w, top_k=3)
    assert all(same_bits(a, b) for a, b in zip(first, route(x, w, top_k=3), strict=True)), "not repeatable"
    other = x.clone()
    other[1:] = NAN
    second = route(other, w, top_k=3)
    assert same_bits(first[0][0], second[0][0]) and torch.equal(first[1][0], second[1][0])
    launches.expect("_gate_kernel")


def test_out_and_workspace(launches):
    x, w = gate_inputs(5, 12, 1024, torch.float32)
    nbytes = route_workspace(5, 12, 1024)
    out = poison(5, 3, dtype=torch.float32, device=DEVICE), poison(5, 3, dtype=torch.int32, device=DEVICE)
    workspace = poison(nbytes, dtype=torch.uint8, device=DEVICE)
    result = route(x, w, top_k=3, out=out, workspace=workspace)
    assert result[0] is out[0] and result[1] is out[1]
    assert not (workspace == 0x5B).all(), "the workspace was not used"
    fresh = route(x, w, top_k=3)
    assert same_bits(fresh[0], out[0]) and same_bits(fresh[1], out[1])
    with pytest.raises(ValueError, match=f"at least {nbytes}"):
        route(x, w, top_k=3, workspace=workspace[:-1])
    launches.expect("_gate_kernel")


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_sqrt_softplus_keeps_its_digits_far_below_zero(scale):
    logits = (torch.linspace(-9, 9, 96) * scale).view(2, 48)
    weights, ids = top_k_from_logits(logits.to(DEVICE), top_k=32, scoring="sqrt_softplus")
    want = (logits.double().clamp(min=0) + torch.log1p(torch.exp(-logits.double().abs()))).sqrt()
    want = want.gather(1, ids.cpu().long())
    assert ((weights.cpu().double() - want).abs() / want).max() < 2e-5


def test_group_with_both_infinities_in_its_bias_is_open():
    bias = torch.tensor([0.0, 0.0, INF, -INF, 0.0, 0.0])
    logits = torch.arange(6.0).view(1, 6)
    kwargs = {"top_k": 2, "scoring": "sigmoid", "num_groups": 3, "topk_groups": 1}
    weights, ids = top_k_from_logits(logits.to(DEVICE), selection_bias=bias.to(DEVICE), **kwargs)
    assert ids.tolist() == [[2, 3]] and weights.isfinite().all()
    assert top_k_from_logits_ref(logits, selection_bias=bias, **kwargs)[1].tolist() == [[2, 3]]


def test_reference_takes_no_rows_in_groups():
    weights, ids = top_k_from_logits_ref(torch.empty(0, 8), top_k=2, num_groups=4, topk_groups=2)
    assert weights.shape == ids.shape == (0, 2)


def test_one_expert_or_one_column_may_have_any_last_stride():
    x = torch.ones(3, 2, device=DEVICE)[:, :1].t().contiguous().t()  # strides (1, 3)
    w = torch.full((1, 1), 2.0, device=DEVICE).expand(1, 1)
    assert x.stride(1) != 1 and route(x, w, top_k=1)[1].tolist() == [[0]] * 3
    assert top_k_from_logits(x, top_k=1)[0].tolist() == [[1.0]] * 3


def test_workspace_in_two_dimensions_is_refused():
    x, w = torch.ones(5, 64, device=DEVICE), torch.ones(4, 64, device=DEVICE)
    workspace = torch.zeros(2, 4096, dtype=torch.uint8, device=DEVICE)
    for wrong in (workspace, workspace[:, 0], workspace[0, 1:]):
        with pytest.raises(ValueError, match="workspace"):
            route(x, w, top_k=2, workspace=wrong)
