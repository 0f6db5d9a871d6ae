# SPDX-License-Identifier: Apache-2.0
"""What both sides must agree on, compared by field before anything is allocated."""

from __future__ import annotations

import functools
import hmac
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import afd_runtime
from afd_runtime.config import AFDConfig
from afd_runtime.control_plane.messages import PROTOCOL_VERSION, Fingerprint, Peer, Refused

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


@functools.cache
def machine_id() -> str:
    """Host name, boot and PID namespace: equal exactly where two processes can map each other's windows."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = "unknown"
    return f"{platform.node()} {boot} {namespace}"


def fingerprint(
    config: AFDConfig, spec: ModelSpec, dtype: torch.dtype, extra: Mapping[str, str] | None = None,
    device: torch.device | None = None,
) -> Fingerprint:  # fmt: skip
    """The fields that must be equal on both sides. extra: further ones, such as the identity of the expert weights."""
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "package_version": afd_runtime.__version__,
        "connector": config.connector,
        "num_attention_ranks": config.num_attention_ranks,
        "num_ffn_ranks": config.num_ffn_ranks,
        "placement": config.placement,
        "max_batch_tokens": config.max_batch_tokens,
        "num_stages": config.num_stages,
        "compute_gate_on_attention": config.compute_gate_on_attention,
        "doorbells": device is not None and config.uses_doorbells(device),
        "hidden_size": spec.hidden_size,
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "dtype": dtype,
        "reply_dtype": config.reply_torch_dtype(dtype),
        "expert_layers": ",".join(map(str, spec.expert_layers)),
        "config_hash": spec.config_hash,
        "quantization": spec.quantization,
        "activation": spec.activation,
    }
    return {name: str(value) for name, value in {**fields, **(extra or {})}.items()}


def expert_identity_field(spec: ModelSpec) -> dict[str, str]:
    """``{"expert_identity": …}`` of the checkpoint behind ``spec``, which reads a few bytes of each expert tensor."""
    from afd_runtime.ffn_backend import expert_identity

    return {"expert_identity": expert_identity(spec)}


def compare(own: Fingerprint, other: Fingerprint, own_name: str, other_name: str) -> Refused | None:
    """The first field that differs, as a refusal that names it and both values; None where all are equal."""
    for field in [*own, *(name for name in other if name not in own)]:
        mine, theirs = own.get(field, "(not sent)"), other.get(field, "(not sent)")
        if mine != theirs:
            return Refused(
                field,
                f"{field} differs: {own_name} has {mine}, {other_name} has {theirs}; start both with the same {field}",
            )
    return None


def check_peer(peer: Peer, role: str, size: int, own: Fingerprint, token: str, own_name: str) -> Refused | None:
    """Everything that is checked about a process that asks to register or attach, in the order of what to fix first."""
    name = f"{role} rank {peer.rank}"
    if not hmac.compare_digest(peer.token.encode(), token.encode()):
        return Refused("token", f"{own_name} refuses {name}: its AFD_TOKEN is another one; set the same in both")
    if peer.machine != machine_id():
        return Refused(
            "machine",
            f"{own_name} is on {machine_id()!r} and {name} on {peer.machine!r}: one AFD group runs on one host; "
            "run a group on each host",
        )
    refusal = compare(own, peer.fingerprint, own_name, name)
    if refusal is None and not 0 <= peer.rank < size:
        return Refused("rank", f"{name} is outside this group; allowed: 0 … {size - 1}")
    return refusal
