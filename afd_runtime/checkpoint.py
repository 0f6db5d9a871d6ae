# SPDX-License-Identifier: Apache-2.0
"""A safetensors checkpoint directory: which tensor lies where, and exact reads of parts of it.

Only headers are read to build the index, so sizes, dtypes and missing tensors are known before a weight is read.
Reads go straight to the bytes asked for (no memory map, no whole-file read) and are counted.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from afd_runtime.errors import AFDConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class ModelError(AFDConfigError):
    """A model directory that cannot be served, with what was found and what is needed."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. `start` is the byte offset of its data in `file`; `dtype` is safetensors' name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def part(self, index: int) -> TensorEntry:
        """The slice `[index]` along the first dimension; contiguous, so it is a tensor entry of its own."""
        step = self.nbytes // self.shape[0]
        return TensorEntry(
            f"{self.name}[{index}]", self.file, self.dtype, self.shape[1:], self.start + index * step, step
        )


class SafetensorsIndex:
    """Every tensor name of a checkpoint directory, sharded or not. Shard headers are read when first needed."""

    def __init__(self, path: Path, files: dict[str, str]) -> None:
        self.path = path
        self._files = files
        self._headers: dict[str, dict[str, TensorEntry]] = {}

    @classmethod
    def open(cls, path: Path) -> SafetensorsIndex:
        """Reads the index file, or the header of the single file. Raises `ModelError` if there is neither."""
        if (path / INDEX_FILE).is_file():
            return cls(path, _read_weight_map(path / INDEX_FILE))
        if (path / SINGLE_FILE).is_file():
            header = _read_header(path / SINGLE_FILE)
            index = cls(path, dict.fromkeys(header, SINGLE_FILE))
            index._headers[SINGLE_FILE] = header
            return index
        raise ModelError(
            f"{path}: no safetensors checkpoint here; expected {SINGLE_FILE} or {INDEX_FILE}. "
            "Point at a downloaded model directory in the Hugging Face layout."
        )

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def entry(self, name: str) -> TensorEntry:
        """Where `name` lies. Raises `ModelError` for a name, a shard or a shard's tensor that is missing."""
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self.path}: the checkpoint has no tensor {name!r}. The download may be incomplete.")
        if file not in self._headers:
            self._headers[file] = _read_header(self.path / file)
        found = self._headers[file].get(name)
        if found is None:
            raise ModelError(f"{self.path / file}: has no tensor {name!r}, but {INDEX_FILE} places it there.")
        return found


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files = list(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ModelError(f"{path}: not a safetensors index ({error!r}).") from error
    outside = [v for v in files if not isinstance(v, str) or Path(v).name != v]
    if outside:
        raise ModelError(f"{path}: shard names must be plain file names, found {outside[:3]}.")
    return weight_map


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: not a safetensors file (header of {length} bytes in a file of {size}).")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: this shard is missing. The download may be incomplete.") from error
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: not a readable safetensors file ({error}).") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: not a safetensors file (its header is a JSON {type(header).__name__}).")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: dict, data_start: int, file_size: int) -> TensorEntry:
    try:
        (start, end), shape, dtype = fields["data_offsets"], tuple(fields["shape"]), fields["dtype"]
        if not isinstance(dtype, str) or not all(isinstance(n, int) for n in (start, end, *shape)):
            raise TypeError("dtype is no text, or a size no integer")
        nbytes = end - start
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: malformed header entry for tensor {name!r} ({error!r}).") from error
    if data_start + end > file_size or start < 0 or nbytes < 0:
        raise ModelError(
            f"{path}: the file has {file_size} bytes, but tensor {name!r} ends at byte {data_start + end}. "
            "The download may be incomplete."
        )
    if dtype in _ITEM_BYTES and nbytes != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelError(f"{path}: tensor {name!r} {dtype}{list(shape)} does not have {nbytes} bytes.")
    return TensorEntry(name, path, dtype, shape, data_start + start, nbytes)


class TensorReader:
    """Reads tensor entries into existing tensors through one staging buffer; `bytes_read` counts bytes from disk."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._staging = bytearray()
        self._open: tuple[Path, int] | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            os.close(self._open[1])
        self._open = None

    def copy_into(self, entry: TensorEntry, out: torch.Tensor) -> None:
        """Fills `out` (same shape as the entry, any floating dtype, any strides, any device) from disk."""
        if not entry.nbytes:
            return
        self.raw(entry, entry.nbytes)
        source = torch.frombuffer(self._staging, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape))
        out.copy_(source.view(entry.shape))

    def raw(self, entry: TensorEntry, nbytes: int) -> memoryview:
        """The first `nbytes` of the entry's data; valid until the next read."""
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        view = memoryview(self._staging)[:nbytes]
        done = 0
        while done < nbytes:
            count = os.preadv(self._descriptor(entry.file), [view[done:]], entry.start + done)
            if not count:
                raise ModelError(f"{entry.file}: ends inside tensor {entry.name!r}.")
            done += count
        self.bytes_read += nbytes
        return view

    def _descriptor(self, path: Path) -> int:
        if self._open is None or self._open[0] != path:
            self.__exit__()
            self._open = (path, os.open(path, os.O_RDONLY))
        return self._open[1]
