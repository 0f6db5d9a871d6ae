# SPDX-License-Identifier: Apache-2.0
"""The packed message (attention → FFN) and the reply (FFN → attention): sizes, offsets, typed views. Pure functions.

A request slot holds, each part 128-byte aligned:

==================  =============================  ================================================================
header              128 B                           ``Header`` fields as int32; the last 8 bytes are the signal word
expert offsets      int32[num_experts + 1]          into ``pairs``, by local expert
pairs               int32[cap_rows * top_k]         ``row * top_k + choice``, sorted by local expert, then by token
weights             float32[cap_rows, top_k]        routing weight of each choice; 0: this choice is not computed here
token ids           int32[cap_rows]                 optional, for models that route by token id
row scales          float32[cap_rows, ⌈H/128⌉]      only for float8_e4m3fn rows
rows                [cap_rows, hidden_size]         model dtype
==================  =============================  ================================================================

A reply slot holds a 128-byte header line (only its signal word is used) and the rows, in the request's row order.
Capacity that is not used is never read.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

HEADER_BYTES = 128
SIGNAL_OFFSET = 120
MAGIC = 0x41464431
VERSION = 1
MODE_OFFLINE, MODE_ONLINE = 0, 1
MAX_TOP_K = 32
MAX_EXPERTS = 1024
SCALE_GROUP = 128


class Header(enum.IntEnum):
    """Index of each int32 in a request slot's header."""

    MAGIC = 0
    VERSION = 1
    SESSION = 2
    STEP = 3
    LAYER = 4
    EXCHANGE = 5
    ROWS = 6
    PAIRS = 7
    FLAGS = 8


class Lane(enum.IntEnum):
    """Index of each int64 in a lane-state tensor ``int64[8]``.

    ``WORD`` is the signal word of exchange 0, ``EXCHANGE`` the exchange the lane is in, ``MODE`` offline or online,
    ``ROWS`` the rows of this step.
    """

    WORD = 0
    EXCHANGE = 1
    MODE = 2
    ROWS = 3


LANE_FIELDS = 8


def signal_word(session: int, step: int, exchange: int) -> int:
    """session (16 bits) | step (32) | exchange (16), as the signed 64-bit integer that memory holds."""
    for name, value, bits in (("session", session, 16), ("step", step, 32), ("exchange", exchange, 16)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value}; allowed: 0 … {(1 << bits) - 1}")
    word = session << 48 | step << 16 | exchange
    return word - (1 << 64) if word >> 63 else word


def split_word(word: int) -> tuple[int, int, int]:
    """The (session, step, exchange) of a signal word."""
    word &= (1 << 64) - 1
    return word >> 48, word >> 16 & 0xFFFFFFFF, word & 0xFFFF


def _align(nbytes: int) -> int:
    return (nbytes + 127) // 128 * 128


class Message(NamedTuple):
    """Typed views of one request slot."""

    header: torch.Tensor
    signal: torch.Tensor
    expert_offsets: torch.Tensor
    pairs: torch.Tensor
    weights: torch.Tensor
    token_ids: torch.Tensor
    row_scales: torch.Tensor
    rows: torch.Tensor


class Reply(NamedTuple):
    """Typed views of one reply slot."""

    signal: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class MessageLayout:
    """Layout of a request slot.

    num_experts: most experts that any FFN rank holds (1 … 1024); the same for all slots of a model.
    cap_rows: most rows of one message. top_k: choices per token (1 … 32). hidden_size: H. dtype: of the rows.
    """

    num_experts: int
    cap_rows: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    with_token_ids: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_experts", 1, MAX_EXPERTS),
            ("cap_rows", 0, 1 << 26),
            ("top_k", 1, MAX_TOP_K),
            ("hidden_size", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; allowed: {low} … {high}")
        if self.cap_rows * self.top_k >= 1 << 31:
            raise ValueError(f"cap_rows * top_k is {self.cap_rows * self.top_k}; allowed: below 2**31; lower cap_rows")
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"dtype is {self.dtype}; allowed: float32, float16, bfloat16, float8_e4m3fn")

    @functools.cached_property
    def _fields(self) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        scales = (self.hidden_size + SCALE_GROUP - 1) // SCALE_GROUP if self.dtype == torch.float8_e4m3fn else 0
        wanted = {
            "expert_offsets": (torch.int32, (self.num_experts + 1,)),
            "pairs": (torch.int32, (self.cap_rows * self.top_k,)),
            "weights": (torch.float32, (self.cap_rows, self.top_k)),
            "token_ids": (torch.int32, (self.cap_rows if self.with_token_ids else 0,)),
            "row_scales": (torch.float32, (self.cap_rows, scales)),
            "rows": (self.dtype, (self.cap_rows, self.hidden_size)),
        }
        fields, offset = {}, HEADER_BYTES
        for name, (dtype, shape) in wanted.items():
            fields[name] = (offset, dtype, shape)
            offset += _align(dtype.itemsize * functools.reduce(lambda a, b: a * b, shape, 1))
        fields["end"] = (offset, torch.uint8, (0,))
        return fields

    def offset(self, field: str) -> int:
        """Byte offset of ``expert_offsets``, ``pairs``, ``weights``, ``token_ids``, ``row_scales`` or ``rows``."""
        return self._fields[field][0]

    @property
    def nbytes(self) -> int:
        """Bytes of one request slot."""
        return self._fields["end"][0]

    def bytes_used(self, rows: int) -> int:
        """Bytes that a message of ``rows`` rows moves at most (every choice of every row computed there)."""
        per_row = self.hidden_size * self.dtype.itemsize + self.top_k * 8
        return HEADER_BYTES + 4 * (self.num_experts + 1) + rows * per_row

    def views(self, buffer: torch.Tensor) -> Message:
        """Typed views of a slot. buffer: uint8[nbytes], 16-byte aligned."""
        _check_slot(buffer, self.nbytes)
        parts = {
            name: buffer[start : start + dtype.itemsize * _numel(shape)].view(dtype).view(shape)
            for name, (start, dtype, shape) in self._fields.items()
            if name != "end"
        }
        header = buffer[:HEADER_BYTES].view(torch.int32)
        return Message(header=header, signal=_signal(buffer), **parts)


@dataclass(frozen=True)
class ReplyLayout:
    """Layout of a reply slot: cap_rows rows of hidden_size elements of dtype behind one 128-byte line."""

    cap_rows: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one reply slot."""
        return HEADER_BYTES + _align(self.cap_rows * self.hidden_size * self.dtype.itemsize)

    def bytes_used(self, rows: int) -> int:
        """Bytes that a reply of ``rows`` rows moves."""
        return 8 + rows * self.hidden_size * self.dtype.itemsize

    def views(self, buffer: torch.Tensor) -> Reply:
        """Typed views of a slot. buffer: uint8[nbytes], 16-byte aligned."""
        _check_slot(buffer, self.nbytes)
        end = HEADER_BYTES + self.cap_rows * self.hidden_size * self.dtype.itemsize
        rows = buffer[HEADER_BYTES:end].view(self.dtype).view(self.cap_rows, self.hidden_size)
        return Reply(signal=_signal(buffer), rows=rows)


def tensor_at(address: int, nbytes: int, device: torch.device | str) -> torch.Tensor:
    """A uint8[nbytes] view of raw memory at ``address``; the caller keeps that memory alive."""
    device = torch.device(device)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise ValueError("address is 0: the slot is not attached; attach the lane, or set it offline")
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_RawCuda(address, nbytes), device=device)


class _RawCuda:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _numel(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def _signal(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[SIGNAL_OFFSET:HEADER_BYTES].view(torch.int64)


def _check_slot(buffer: torch.Tensor, nbytes: int) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < nbytes or buffer.data_ptr() % 16:
        raise ValueError(
            f"buffer is {buffer.dtype}{list(buffer.shape)} at {buffer.data_ptr():#x}; "
            f"allowed: uint8[{nbytes}] or more, 16-byte aligned"
        )
