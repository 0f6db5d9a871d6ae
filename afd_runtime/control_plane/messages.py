# SPDX-License-Identifier: Apache-2.0
"""The control messages and their codec: typed, bounded in size, unknown fields refused, nothing unpickled."""

from __future__ import annotations

from typing import Union

import msgspec

from afd_runtime.errors import AFDProtocolError
from afd_runtime.window import LocalHandle, ShmHandle
from afd_runtime.window_cuda import CudaHandle

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20

Fingerprint = dict[str, str]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who sends: its rank inside its role, its process, its machine, the group's token, what it expects."""

    rank: int
    pid: int
    machine: str
    fingerprint: Fingerprint
    token: str = ""


class Register(_Message, frozen=True):
    """FFN rank f ≥ 1 → FFN rank 0: I serve at ``endpoint``."""

    peer: Peer
    endpoint: str


class Registered(_Message, frozen=True):
    """FFN rank 0 → FFN rank f."""

    pid: int


class Hello(_Message, frozen=True):
    """Attention rank → FFN rank 0: I want to attach."""

    peer: Peer


class Pending(_Message, frozen=True):
    """FFN rank 0 → attention rank: these FFN ranks have not registered yet; Welcome follows when they have."""

    missing: tuple[int, ...]


class Welcome(_Message, frozen=True):
    """FFN rank 0 → attention rank: your session (1 … 65535), and where each FFN rank serves."""

    session: int
    endpoints: tuple[str, ...]
    pid: int


class Attach(_Message, frozen=True):
    """Attention rank → each of its FFN ranks, with the window that the replies go into. bells: its doorbells."""

    peer: Peer
    session: int
    reply_handle: Union[ShmHandle, LocalHandle, CudaHandle]  # noqa: UP007  msgspec reads it at run time
    bells: CudaHandle | None = None


class Attached(_Message, frozen=True):
    """FFN rank → attention rank, with the window that the requests go into. bells: its doorbells."""

    ffn_rank: int
    pid: int
    request_handle: Union[ShmHandle, LocalHandle, CudaHandle]  # noqa: UP007
    bells: CudaHandle | None = None


class StageStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Step ``lane_step`` of the sender's lane of ``stage``, with ``rows`` rows."""

    stage: int
    lane_step: int
    rows: int


class Announce(_Message, frozen=True):
    """Attention rank → its sequencer: a forward begins, with a step in each of ``stages``; they are ordered as one."""

    stages: tuple[StageStep, ...]
    is_warmup: bool = False
    is_graph_capturing: bool = False
    is_graph_replaying: bool = False


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lane of a step."""

    attention_rank: int
    session: int
    lane_step: int
    rows: int


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of ``stage`` in unit ``number``."""

    number: int
    stage: int
    participants: tuple[Participant, ...]
    is_warmup: bool = False
    is_graph_capturing: bool = False
    is_graph_replaying: bool = False


class Orders(_Message, frozen=True):
    """Sequencer → every FFN rank: one unit, an order for each of its stages, all with the same number."""

    orders: tuple[Order, ...]


class Abort(_Message, frozen=True):
    """Either side → the other: I gave this lane's step up."""

    stage: int
    lane_step: int
    reason: str
    layer: int | None = None


class Aborted(_Message, frozen=True):
    """FFN rank → attention rank: the lane has left that step; its slots are not touched any more."""

    stage: int
    lane_step: int


class StatsRequest(_Message, frozen=True):
    """Attention rank → FFN rank."""


class LayerTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums of one layer since the FFN rank started."""

    exchanges: int
    rows: int
    wait_s: float
    experts_s: float
    reply_s: float


class Stats(_Message, frozen=True):
    """FFN rank → attention rank: totals by layer."""

    ffn_rank: int
    layers: dict[int, LayerTotals]


class Heartbeat(_Message, frozen=True):
    """Both ways, to show that the process lives."""


class Detach(_Message, frozen=True):
    """Attention rank → FFN rank: I leave."""


class Refused(_Message, frozen=True):
    """Answer to Register, Hello or Attach. field: what is wrong."""

    field: str
    message: str


class Shutdown(_Message, frozen=True):
    """FFN rank → everybody: I end. reason: why."""

    reason: str


Message = Union[  # noqa: UP007  msgspec reads it at run time
    Register, Registered, Hello, Pending, Welcome, Attach, Attached, Announce, Orders, Abort, Aborted, StatsRequest,
    Stats, Heartbeat, Detach, Refused, Shutdown,
]  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of one message. Raises ``AFDProtocolError`` where they pass ``MAX_MESSAGE_BYTES``."""
    frame = _ENCODER.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise AFDProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes; allowed: up to {MAX_MESSAGE_BYTES}; shorten its texts"
        )
    return frame


def decode(frame: bytes) -> Message:
    """The message in ``frame``. Raises ``AFDProtocolError`` for anything that is not exactly one known message."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise AFDProtocolError(f"a control frame of {len(frame)} bytes; allowed: up to {MAX_MESSAGE_BYTES}")
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AFDProtocolError(f"a control frame of {len(frame)} bytes is no message: {error}") from None
