# SPDX-License-Identifier: Apache-2.0
"""``AFDConfig``: what an AFD process needs to know about its group. Frozen; it validates itself."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from afd_runtime import envs
from afd_runtime.devices import single_gpu_host
from afd_runtime.errors import AFDConfigError

DEFAULT_PORT = 29650
MAX_RANKS = 1024
MAX_STAGES = 8

_REPLY_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class AFDConfig(BaseModel):
    """One AFD group as one of its processes sees it.

    role: ``attention`` or ``ffn``.
    host, port: control address of FFN rank 0, the rendezvous. Port 0 lets FFN rank 0 choose (one-process tests).
    bind_host: address that this FFN rank binds, where it is another one than ``host``.
    num_attention_ranks, num_ffn_ranks: configured maximum of attention ranks, number of FFN ranks.
    placement: ``sharded`` (each FFN rank holds a block of the experts) or ``replicated`` (each holds all).
    max_batch_tokens: most rows of one step of one attention rank, the capacity of every slot.
    num_stages: micro-batches in flight. reply_dtype: dtype of replies; None is the model's.
    reply_timeout_s: attention waits so long for a reply; None: 5 s on cuda, 5 s more than ``peer_timeout_s`` on cpu.
    peer_timeout_s: an FFN rank waits so long for a request of a peer that lives; then it goes on without that peer.
    attach_timeout_s: to find the group and attach to all of it. liveness_timeout_s: a silent peer is lost after it.
    reattach_timeout_s: after a loss, each step tries so long to attach anew before it raises; 0: it does not try.
    doorbells: for ranks of different processes that share a GPU (their kernels take turns; streams then wait for a
    value in memory and not in a kernel); None: where the host has a single GPU.
    fabric: ``shm`` and ``cuda`` (processes of one host), ``local`` (threads of one process), ``auto`` (by device).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["attention", "ffn"]
    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    bind_host: str | None = None
    num_attention_ranks: int = Field(default=1, ge=1, le=MAX_RANKS)
    num_ffn_ranks: int = Field(default=1, ge=1, le=MAX_RANKS)
    placement: Literal["sharded", "replicated"] = "sharded"
    connector: str = "p2p"
    compute_gate_on_attention: bool = True
    max_batch_tokens: int = Field(default=2048, ge=1, le=1 << 20)
    num_stages: int = Field(default=1, ge=1, le=MAX_STAGES)
    reply_timeout_s: float | None = Field(default=None, gt=0)
    peer_timeout_s: float = Field(default=60.0, gt=0)
    attach_timeout_s: float = Field(default=120.0, gt=0)
    liveness_timeout_s: float = Field(default=10.0, ge=1)
    reattach_timeout_s: float = Field(default=2.0, ge=0)
    doorbells: bool | None = None
    reply_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    fabric: Literal["auto", "shm", "cuda", "local"] = "auto"

    @model_validator(mode="after")
    def _check_group(self) -> AFDConfig:
        if self.placement == "replicated" and self.num_attention_ranks < self.num_ffn_ranks:
            raise ValueError(
                f"placement='replicated' with num_attention_ranks={self.num_attention_ranks} and num_ffn_ranks="
                f"{self.num_ffn_ranks}: an FFN rank would serve nobody; allowed: at least as many attention ranks as "
                "FFN ranks; use placement='sharded' or fewer FFN ranks"
            )
        if self.port == 0 and self.role == "attention":
            raise ValueError("port=0 with role='attention': allowed: 1 … 65535, the port that FFN rank 0 prints")
        return self

    @property
    def listen_host(self) -> str:
        """The address that an FFN process of this config binds."""
        return self.bind_host or self.host

    def reply_torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """dtype of the reply rows for a model that runs in ``model_dtype``."""
        return _REPLY_DTYPES[self.reply_dtype] if self.reply_dtype else model_dtype

    def reply_timeout(self, device: torch.device) -> float:
        """Seconds that attention waits for a reply on ``device``."""
        return self.reply_timeout_s or (5.0 if device.type == "cuda" else self.peer_timeout_s + 5.0)

    def uses_doorbells(self, device: torch.device) -> bool:
        """Whether ranks on ``device`` ring doorbells: between processes only."""
        if device.type != "cuda" or self.fabric == "local":
            return False
        return single_gpu_host() if self.doorbells is None else self.doorbells

    def token(self) -> str:
        """The group's token (``AFD_TOKEN``). Raises ``AFDConfigError`` where one is needed and none is set."""
        token = envs.AFD_TOKEN.get()
        exposed = [h for h in {self.host, self.listen_host} if not is_loopback(h)]
        if exposed and not token:
            raise AFDConfigError(
                f"host={exposed[0]!r} is not a loopback address, so AFD_TOKEN must be set, to the same value in every "
                'process of the group; make one with: python -c "import secrets; print(secrets.token_hex(16))"'
            )
        return token


def is_loopback(host: str) -> bool:
    """True where every address of ``host`` is a loopback address. An unknown name is not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(a).split("%")[0]).is_loopback for a in found)
